"""What questions across runs find: one kind of answer for each question, and what came with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Literal, TypeVar, overload

import msgspec

from killick.model.fold import StepStatus

Standing = Literal["stands", "undone", "in_doubt"]

T = TypeVar("T", bound="SearchHit", covariant=True)


class SearchHit(msgspec.Struct, frozen=True, kw_only=True):
    """An event that answers a question. `rewound`: the run was taken back to before it since."""

    run: str
    agent: str
    step: str | None
    seq: int
    at_us: int
    rewound: bool = False


class FoundDecision(SearchHit, frozen=True, kw_only=True, tag_field="kind", tag="decision"):
    """What was chosen, from what, by whom and why."""

    question: Any
    options: Any
    choice: Any
    because: Any
    by: str


class FoundCall(SearchHit, frozen=True, kw_only=True, tag_field="kind", tag="call"):
    """A call of a tool, and what came of it."""

    tool: str
    arguments: Any
    status: StepStatus
    attempts: int
    output: Any


class FoundFailure(SearchHit, frozen=True, kw_only=True, tag_field="kind", tag="failure"):
    """What went wrong: an attempt of a step, a step before it touched anything, or the whole run."""

    of: Literal["attempt", "step", "run"]
    tool: str | None
    type: str
    message: str
    attempt: int | None
    failure: Any


class FoundEffect(SearchHit, frozen=True, kw_only=True, tag_field="kind", tag="effect"):
    """Something that was done to the world: it stands, it was undone, or nobody knows."""

    tool: str
    key: str
    arguments: Any
    status: Standing


class FoundAnswer(SearchHit, frozen=True, kw_only=True, tag_field="kind", tag="answer"):
    """What a person answered. `at_us` is when the run took it, `answered_at_us` when it was given."""

    prompt: Any
    to: tuple[str, ...]
    verb: str
    value: Any
    by: str | None
    comment: Any
    answered_at_us: int


class Findings(Sequence[T], Generic[T]):
    """What was found, newest first. `more`: there is more than was asked for.

    `scanned`: why all logs were read instead of the index. `unread`: runs that could not be read.
    """

    def __init__(self, items: Sequence[T], *, more: bool, scanned: str | None, unread: tuple[str, ...]) -> None:
        self._items = tuple(items)
        self.more, self.scanned, self.unread = more, scanned, unread

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        return self._items[index]

    def __repr__(self) -> str:
        return f"Findings({list(self._items)!r})"
