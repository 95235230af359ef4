"""The state that a fold keeps: facts and vectors of small records, with its queries.

It keeps seqs, not values: each record names the event that holds its values, and readers load them on demand. So a
snapshot of a long run shares almost everything with the previous one.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

import msgspec

from killick.model import events as e
from killick.model.facts import OUT_OF_BAND, Facts, Step, StepStatus, intended_name
from killick.model.vector import SavedFold, Vector, VectorFold

_LIVE: Final = frozenset({"intended", "running"})
_IDLE: Final = frozenset({"delayed", "waiting", "in_doubt"})
_OVER: Final = frozenset({"done", "failed", "cancelled"})


class FoldData(VectorFold):
    """The state of a timeline. Handlers change it, one event at a time."""

    VECTORS = MappingProxyType({
        "steps": Step, "tops": int, "decisions": int, "retried": int, "failures": int, "trace": int, "effects": int,
        "notes": int,
    })  # fmt: skip
    FACTS, DECODER = Facts, msgspec.json.Decoder(SavedFold[Facts])
    OF_STEPS = frozenset({"steps", "tops", "trace", "effects"})
    __slots__ = ("decisions", "effects", "facts", "failures", "notes", "retried", "steps", "tops", "trace")

    facts: Facts
    steps: Vector[Step]
    tops: Vector[int]
    decisions: Vector[int]
    retried: Vector[int]
    failures: Vector[int]
    trace: Vector[int]
    effects: Vector[int]
    notes: Vector[int]

    # the fold ---------------------------------------------------------------------------------

    @property
    def wake_at(self) -> int | None:
        """Returns when the run becomes due without outside input; None: never."""
        crashes, found = self.facts.crashes, self._wake_at
        if crashes is None or found is None:
            return found
        return None if crashes.quarantined else max(found, crashes.until)

    @property
    def _wake_at(self) -> int | None:
        facts = self.facts
        # A cancellation that waits for a person or a child becomes due by a message, as any other wait.
        cancels = facts.cancelling and not facts.ended and (facts.status == "running" or not facts.cancel_begun)
        if facts.status == "queued" or cancels:
            return facts.changed_at or facts.started_at
        if facts.status != "waiting" or facts.mend or facts.hosted:
            return None
        if facts.hook is not None:
            return facts.started_at  # a hook must always follow the outbox
        if facts.trigger is not None:
            queued = facts.trigger.queued
            return queued[0].at if queued else facts.trigger.next
        if not facts.taken:
            # The run was resumed, and no worker has checked its wait since.
            return facts.changed_at
        times = [wait.deadline for wait in facts.waits.values()]
        times += [self.steps[index].delayed_until for index in facts.pending.values()]
        return min((time for time in times if time is not None), default=None)

    @property
    def timed_at(self) -> int:
        """Returns when the time was computed at which the run becomes due: the last of all that it waits for."""
        facts = self.facts
        if facts.status != "waiting" or not facts.taken or facts.cancelling or facts.hook is not None:
            return facts.changed_at
        times = [wait.at for wait in facts.waits.values() if wait.deadline is not None]
        times += [step.delayed_at for index in facts.pending.values() if (step := self.steps[index]).delayed_until]
        return max(times, default=0)

    @property
    def _live(self) -> int:
        """Counts the steps that can progress. An attempt cannot while all steps that it made itself wait."""
        facts = self.facts
        if not facts.live or not facts.nested:
            return facts.live
        pending = [self.steps[index] for index in facts.pending.values()]

        def rests(step: Step) -> bool:
            inner = [each for each in pending if each.within == step.id]
            return step.status in _IDLE or bool(inner and step.status == "running" and all(map(rests, inner)))

        return facts.live - sum(step.status == "running" and rests(step) for step in pending)

    def inside(self, step: e.StepId) -> list[e.StepId]:
        """Returns the open steps that an attempt of a step made."""
        if not self.facts.nested:
            return []
        return [name for name, index in self.facts.pending.items() if self.steps[index].within == step]

    def find(self, step: e.StepId) -> int | None:
        """Returns the index of a step by its id, in the current timeline."""
        index = self.facts.pending.get(step)
        if index is not None:
            return index
        top, _, inner = step.partition(".")
        if step.startswith(OUT_OF_BAND):
            return next((at for at in self.facts.beside if self.steps[at].id == step), None)
        if not top.isdigit() or not 1 <= int(top) <= len(self.tops):
            return None
        number = int(top)
        index = self.tops[number - 1]
        if not inner:
            return index
        after = self.tops[number] if number < len(self.tops) else len(self.steps)
        return next((at for at in range(index + 1, after) if self.steps[at].id == step), None)

    def step(self, step: e.StepId) -> Step | None:
        """Returns a step by its id."""
        index = self.find(step)
        return None if index is None else self.steps[index]

    # shared by handlers -----------------------------------------------------------------------

    def open_step(self, seq: int, event: e.StepIntended) -> Step:
        step = Step(event.step, event.sort, event.name, seq, event.at, "intended", event.effect, undoes=event.undoes)
        step.undoes_seq, step.within = event.undoes_seq, event.within
        self.facts.nested += event.within is not None
        step.attempts = []
        index = self.steps.append(step)
        facts = self.facts
        facts.pending[event.step] = index
        if event.step.startswith(OUT_OF_BAND):
            facts.beside.append(index)
            return step
        if "." not in event.step:
            self.tops.append(index)
        facts.current = event.step
        if event.sort != "scope":
            facts.live += 1
        if event.sort in ("model", "tool"):
            self.trace.append(index)
        return step

    def changing(self, step: e.StepId) -> Step | None:
        """Returns a pending step for mutation; None for an ended one, which is immutable."""
        index = self.facts.pending.get(step)
        return None if index is None else self.steps.changing(index)

    def move(self, step: Step, status: StepStatus, event: e.Event, seq: int) -> None:
        """Sets a step's status, and closes the step if that ends it."""
        facts = self.facts
        if step.sort != "scope" and not step.id.startswith(OUT_OF_BAND):
            facts.live += (status in _LIVE) - (step.status in _LIVE)
            facts.idle += (status in _IDLE) - (step.status in _IDLE)
        step.status = status
        if status in _OVER:
            if step.sort == "scope" and step.name == "guests":
                facts.hosted = False
            step.ended, step.ended_at = seq, event.at
            facts.nested -= step.id in facts.pending and step.within is not None
            facts.crashes = None
            facts.pending.pop(step.id, None)
            facts.waits.pop(step.id, None)
            facts.committed += status == "done"
            if status == "done" and (step.sort == "tool" or step.sort == "child"):
                name = step.name if step.sort == "tool" else intended_name(step.sort, step.name)
                facts.done[name] = facts.done.get(name, 0) + 1
            if step.undoes is not None and status == "done":
                index = self.find(step.undoes)
                # An abandoned timeline may have made the compensated effect under the same step number.
                if index is not None and is_started_at(self.steps[index], step.undoes_seq):
                    undone = self.steps.changing(index)
                    undone.undone = True
                    facts.done[undone.name] = facts.done.get(undone.name, 1) - 1


def is_started_at(step: Step, seq: int) -> bool:
    """Returns whether the effect that started at a seq is this step's own or reused."""
    return not step.attempts or any(attempt.started == seq for attempt in step.attempts)
