"""Search results: one type for each kind of query."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, Self, TypeAlias, TypeVar

import msgspec

from killick.model.facts import StepStatus

Standing = Literal["stands", "undone", "in_doubt"]

T = TypeVar("T", bound="SearchHit", covariant=True)


class SearchHit(msgspec.Struct, frozen=True, kw_only=True):
    """An event that matches a query. `rewound`: a later rewind dropped it."""

    run: str
    agent: str
    step: str | None
    seq: int
    at_us: int
    rewound: bool = False


class FoundDecision(SearchHit, frozen=True, kw_only=True, tag_field="kind", tag="decision"):
    """A decision: its options, choice, author and reason."""

    question: Any
    options: Any
    choice: Any
    because: Any
    by: str


class FoundCall(SearchHit, frozen=True, kw_only=True, tag_field="kind", tag="call"):
    """A tool call, and its outcome."""

    tool: str
    arguments: Any
    status: StepStatus
    attempts: int
    output: Any


class FoundFailure(SearchHit, frozen=True, kw_only=True, tag_field="kind", tag="failure"):
    """A failure: of an attempt, of a step before any effect, or of the whole run."""

    of: Literal["attempt", "step", "run"]
    tool: str | None
    type: str
    message: str
    attempt: int | None
    failure: Any


class FoundEffect(SearchHit, frozen=True, kw_only=True, tag_field="kind", tag="effect"):
    """An effect: in force, compensated, or unknown."""

    tool: str
    key: str
    arguments: Any
    status: Standing


class FoundAnswer(SearchHit, frozen=True, kw_only=True, tag_field="kind", tag="answer"):
    """A person's answer. `at_us` is when the run received it, `answered_at_us` when it was given. One that is not
    `taken` waits in the inbox of its run; `seq` is then the event that asked."""

    prompt: Any
    to: tuple[str, ...]
    verb: str
    value: Any
    by: str | None
    comment: Any
    answered_at_us: int
    taken: bool = True


AnyHit: TypeAlias = FoundCall | FoundDecision | FoundFailure | FoundEffect | FoundAnswer


class Findings(tuple[T, ...]):
    """Results, newest first. `more`: there are more beyond the limit.

    `scanned`: why all logs were scanned instead of the index. `unread`: unreadable runs.
    """

    more: bool
    scanned: str | None
    unread: tuple[str, ...]

    def __new__(cls, items: Iterable[T], *, more: bool, scanned: str | None, unread: tuple[str, ...]) -> Self:
        made = super().__new__(cls, items)
        made.more, made.scanned, made.unread = more, scanned, unread
        return made
