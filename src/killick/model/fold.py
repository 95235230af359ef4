"""Folds the events of a timeline. Reads no clock, touches no store."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Final

from msgspec.structs import replace

from killick.model import events as e
from killick.model import page_events
from killick.model.facts import Attempt, PlainStep, Step
from killick.model.fold_data import FoldData
from killick.model.fold_handlers import HANDLERS

FOLD: Final = 14
"""The version of this fold; snapshots of another version are ignored."""


class Fold(FoldData):
    """The state of a timeline. Grows by `apply`; users read it as a `State`."""

    __slots__ = ()

    @property
    def is_running(self) -> bool:
        """Whether the run is running and stays so while plain steps begin and return."""
        facts = self.facts
        return facts.status == "running" and not (facts.idle or facts.hosted or facts.crashes)

    def are_quiet(self, events: Sequence[tuple[int, e.Event]]) -> bool:
        """Returns whether these events leave the run's index row unchanged: no wait is open, and they open none; or a
        worker takes a run that only waits."""
        facts = self.facts
        if facts.status != "running" or facts.idle or facts.hosted or facts.crashes:
            waits_on = facts.taken and facts.status == "waiting" and not (facts.live or facts.cancelling)
            return waits_on and len(events) == 1 and type(events[0][1]) is e.RunTaken
        for _, event in events:
            if type(event) not in _QUIET and not (isinstance(event, e.AttemptEnded) and event.outcome == "returned"):
                return False
        return True

    def apply(self, seq: int, event: e.Event) -> None:
        """Applies the next event of the timeline."""
        facts = self.facts
        facts.seq = seq
        handler = HANDLERS.get(type(event))
        if handler is not None:
            handler(self, seq, event)
        if facts.ended_as is not None:
            status = facts.ended_as
        elif facts.paused:
            status = "paused"
        elif facts.mend or ((facts.idle or facts.hosted) and not self._live) or facts.trigger or facts.hook:
            status = "code_mismatch" if facts.mend and facts.mend == facts.diverged else "waiting"
        else:
            status = "running" if facts.taken else "queued"
        if status != facts.status:
            facts.status = status
            facts.changed_at = event.at

    def apply_steps(self, plain: Sequence[PlainStep]) -> None:
        """Applies the events of plain steps in a row, as `apply` of each would."""
        facts = self.facts
        for one in plain:
            intended = one.intended
            if intended.verdict is not None:
                facts.rejected = 0
            facts.done[intended.name] = facts.done.get(intended.name, 0) + 1
        facts.seq, facts.current = plain[-1].last, plain[-1].intended.step
        facts.committed += len(plain)
        self.keep(plain)

    def add_steps(self, plain: Sequence[PlainStep]) -> None:
        first, steps, effects = len(self.steps), list[Step](), list[int]()
        for index, one in enumerate(plain, first):
            intended, started, last, ended_at = one.intended, one.started, one.last, one.ended.at
            name, effect = intended.name, intended.effect
            attempt = Attempt(last - 1, started.at, started.epoch, last, ended_at, "returned")
            steps.append(
                Step(intended.step, "tool", name, one.seq, intended.at, "done", effect, last, ended_at, last, [attempt])
            )
            if effect != "reads":
                effects.append(index)
        self.steps.extend(steps)
        self.effects.extend(effects)
        for vector in (self.tops, self.trace):
            vector.extend(range(first, first + len(steps)))

    def with_one_returned(self, at: int) -> Fold:
        """Returns the fold as if a running step had returned. Does not change this fold, so any thread may call it."""
        twin, facts = copy(self), self.facts
        twin.plain = None if self.plain is None else []  # no plain step is pending
        waits = facts.status == "running" and (facts.idle or facts.hosted) and facts.live == 1
        changed = {"status": "waiting", "changed_at": at} if waits else {}
        twin.facts = replace(facts, live=facts.live - 1, crashes=None, **changed)
        return twin


_QUIET: Final = frozenset(
    {
        e.ContractBound, e.StepIntended, e.StepStarted, e.AttemptStarted, e.AttemptProgressed, e.DecisionMade,
        e.ContextChanged, e.PlanMade, e.PlanReached, e.NoteMade, e.FactDrawn, page_events.PageEvicted,
        page_events.PageFaulted, page_events.PagePinned, e.WorkspaceBound, e.WorkspaceCaptured, e.WorkspaceRestored,
    }
)  # fmt: skip


JUMPS: Final = frozenset({e.RunRewound, e.RunForked})


def goes_back(event: e.Event) -> bool:
    """Returns whether the timeline jumps at this event: a rewind, or a fork that kept later events."""
    kind = type(event)
    return kind is e.RunRewound or (kind is e.RunForked and bool(event.keep))  # type: ignore[attr-defined]


def timeline(log: Sequence[tuple[int, e.Event]]) -> list[tuple[int, e.Event]]:
    """Removes rewound events from a log: keeps the events before each cut, the kept ones, and the rewind itself."""
    events = dict(log)
    end = max(events, default=0)
    later: list[tuple[int, e.Event]] = []
    for seq in sorted(events, reverse=True):
        event = events[seq]
        if seq > end:
            continue
        later.append((seq, event))
        if isinstance(event, e.RunRewound | e.RunForked):
            later += [(kept, events[kept]) for kept in reversed(event.keep) if kept in events]
            end = event.cut
    return later[::-1]
