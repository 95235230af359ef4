"""One open wait of a branch, and how it ended; and the attempts whose code waits for steps of the same run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple, Protocol

from killick.definitions.markers import InnerSteps
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
    channel: str | None = None


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
    since: int = 0
    """When the wait began."""
    is_date: bool = False
    """Whether the deadline is a date, and not a duration since then."""
    digest: e.Digest | None = None
    opened: int = 0
    then: Then | None = None
    fits: Callable[[str, Any], Any] | None = None
    asked: Entry | None = None
    need: int = 1
    votes: tuple[str, ...] = ()
    channels: Mapping[str, str] = field(default_factory=dict[str, str])
    """The channel of each approver who answered by link."""
    rounds: tuple[Escalation, ...] = ()
    resting: bool = False
    message: Message | None = None
    """The message that was there when the wait began."""
    future: asyncio.Future[Closed] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @classmethod
    def of(cls, asked: Entry, opened: int, **more: Any) -> Waiter:
        """The wait that an event opened."""
        event: Any = asked.event
        return cls(
            event.step, event.waits_for, name=event.name, deadline=event.deadline, digest=event.digest,
            need=event.need, opened=opened, asked=asked, **{"since": event.at, **more},
        )  # fmt: skip

    def answer_id(self, run: str) -> str:
        return answer_id(run, self.step, self.opened)


class AwaitedBranch(Protocol):
    """A branch that code of an attempt may await."""

    awaited_by: list[InnerSteps]
    inner: InnerSteps | None


class InnerCaller(NamedTuple):
    """Code of an attempt that awaits a branch; `notified` ends when that branch only waits."""

    inner: InnerSteps
    branch: AwaitedBranch
    notified: asyncio.Future[None]


class InnerWaits:
    """Counts the waits of each attempt, and marks the run idle or busy with them."""

    def __init__(self, mark_idle: Callable[[], None], mark_busy: Callable[[], None]) -> None:
        self._mark_idle = mark_idle
        self._mark_busy = mark_busy
        self.callers: list[InnerCaller] = []

    def begin(self, inner: InnerSteps, branch: AwaitedBranch) -> None:
        """Code of an attempt awaits a branch and does nothing else."""
        branch.awaited_by.append(inner)
        inner.running += 1
        if inner.running == 1:
            if inner.live is not None:
                inner.live.mark_idle()
            self._mark_idle()

    def end(self, inner: InnerSteps, branch: AwaitedBranch) -> None:
        """Code of an attempt awaits a branch no longer."""
        if inner in branch.awaited_by:
            branch.awaited_by.remove(inner)
            inner.running -= 1
            if not inner.running and inner.is_open:
                if inner.live is not None:
                    inner.live.mark_running()
                self._mark_busy()

    def close(self, inner: InnerSteps) -> None:
        """The code of an attempt is over, also if steps that it began are not."""
        inner.is_open = False
        if inner.running:
            self._mark_busy()

    def notify(self) -> bool:
        """Everything is idle: notify the callers inside of attempts, the innermost first. False if there are none.

        Their steps keep waiting; the attempt ends as its code decides.
        """
        innermost = [each for each in self.callers if each.branch.inner is None or not each.branch.inner.running]
        for caller in innermost:
            self.end(caller.inner, caller.branch)
            if not caller.notified.done():
                caller.notified.set_result(None)
        return bool(innermost)
