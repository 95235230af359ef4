"""One open wait of a branch, and how it ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

from killick.engine.control.inbox import answer_id
from killick.log.writer import Entry
from killick.model import events as e
from killick.store.records import Message


class Closed(NamedTuple):
    """How a wait ended."""

    seq: int
    how: e.WaitEnd
    by: str | None = None
    answer: Any = None
    comment: str | None = None


class Intervened(BaseException):
    """A person ended a step that was not over. The agent's code gets the recorded outcome instead of this error."""

    def __init__(self, seq: int, event: Any, values: Mapping[str, Any]) -> None:
        super().__init__(f"step {event.step}")
        self.seq = seq
        self.event: e.StepOverridden | e.StepEnded | e.WaitClosed = event
        self.values = values

    @property
    def closed(self) -> Closed:
        """The equivalent end of a wait."""
        if isinstance(self.event, e.StepOverridden):
            return Closed(self.seq, "answered", self.event.by, self.values.get("output"))
        return Closed(self.seq, "skipped", self.event.by, None, self.values.get("comment"))


Then = Callable[[Closed], tuple[Sequence[Entry], dict[str, Any]]]
"""Further writes in the commit that ends a wait: events, and rights."""


class Escalation(NamedTuple):
    """The next addressees of a question that was not answered in time: for how long, and their names, if known."""

    to: tuple[str, ...]
    timeout: float | None
    may: Sequence[str] | None = None


@dataclass(slots=True, eq=False)
class Waiter:
    """A branch that waits. Without `opened` it only waits for time, and no event says so."""

    step: e.StepId
    waits_for: str
    _: KW_ONLY
    name: str = ""
    deadline: int | None = None
    digest: e.Digest | None = None
    opened: int = 0
    then: Then | None = None
    fits: Callable[[str, Any], Any] | None = None
    asked: Entry | None = None
    need: int = 1
    votes: tuple[str, ...] = ()
    rounds: tuple[Escalation, ...] = ()
    resting: bool = False
    message: Message | None = None
    """The message that was there when the wait began."""
    future: asyncio.Future[Closed] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def answer_id(self, run: str) -> str:
        return answer_id(run, self.step, self.opened)
