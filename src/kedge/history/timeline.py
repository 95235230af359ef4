"""A run as people read it: where it is, what it waits for, and its steps in order with all that belongs to each.

Made from the log alone. Values are read when somebody looks at them; nothing is written and no clock is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from kedge.errors import ValueErased
from kedge.history.parts import (
    NOTHING,
    Adopted,
    Attempt,
    Child,
    Decision,
    Delay,
    Drift,
    Edit,
    Entry,
    Failed,
    Moment,
    Note,
    Part,
    Said,
    Settled,
    Step,
    Values,
    Vote,
    Wait,
    walked,
)  # fmt: skip
from kedge.log.log import Log, Recorded
from kedge.model import events as e
from kedge.model import fold as folds
from kedge.model.codec import plain
from kedge.model.failure import Failure
from kedge.model.fold import Status
from kedge.model.state import State
from kedge.model.values import unpack

TIMELINE_VERSION: Final = 1
"""The version of the JSON form, which docs/showing.md describes."""


class Timeline(Part, frozen=True):
    """A run at its head, or as it was after an event. `held_back`: it waits since then for somebody to resume it."""

    run: str
    agent: str
    status: Status
    seq: int
    generation: int
    plan: tuple[str, ...]
    stage: str | None
    current: str | None
    started_at: int
    changed_at: int
    last_at: int
    ended_at: int | None
    wake_at: int | None
    cancelling: bool
    priority: int
    tags: tuple[str, ...]
    parent: str | None
    parent_step: str | None
    forked_from: str | None
    renewed_as: str | None
    holder: str | None
    build: e.Build
    held_back: Moment | None
    waits: tuple[Wait, ...]
    entries: tuple[Entry, ...]
    failed: Failed | None
    state: State

    @property
    def input(self) -> Any:
        return self.state.input

    @property
    def result(self) -> Any:
        return self.state.result if self.status == "completed" else None

    @property
    def context(self) -> Any:
        """The agent's own document."""
        return self.state.context.document

    @property
    def place(self) -> str | None:
        """Where it is in its plan: `approve: step 6 of 9`."""
        if self.stage is None or self.stage not in self.plan:
            return self.stage
        return f"{self.stage}: step {self.plan.index(self.stage) + 1} of {len(self.plan)}"

    def steps(self) -> Iterator[Step]:
        """Every step, those inside scopes after the scope."""
        return walked(self.entries)

    def step(self, number: str) -> Step | None:
        """A step by its number."""
        return next((step for step in self.steps() if step.number == number), None)

    @property
    def at_work(self) -> Step | None:
        """The step that people ask about: the one that failed, else the one that waits, else the last."""
        failed = self.failed.step if self.failed is not None else None
        waits = self.waits[0].step if self.waits and self.failed is None else None
        number = failed or waits or self.current
        return self.step(number) if number is not None else None

    def document(self) -> dict[str, Any]:
        """Everything at once, as JSON has it; as long as the run is."""
        return {"version": TIMELINE_VERSION, **_document(self)}


_READ: Final[dict[type[Part], tuple[str, ...]]] = {
    Step: ("output", "failure"), Moment: ("data",), Timeline: ("place", "input", "result", "context"),
}  # fmt: skip
"""What the JSON form has of a part beside its fields and what it said."""


def _document(part: Any) -> Any:
    if isinstance(part, Part):
        fields = [name for name in part.__struct_fields__ if not isinstance(getattr(part, name), Values | State)]
        said = [name for name, value in vars(type(part)).items() if isinstance(value, Said)]
        return {name: _document(getattr(part, name)) for name in (*fields, *said, *_READ.get(type(part), ()))}
    if isinstance(part, e.Event):
        return {name: value for name, value in _built(part).items() if name not in ("kind", "at", "data")}
    if isinstance(part, e.Usage | e.Build | e.Verdict | Failure):
        return _built(part)
    if isinstance(part, tuple):
        return [_document(each) for each in part]  # pyright: ignore[reportUnknownVariableType]
    return plain(part)


def _built(part: msgspec.Struct) -> Any:
    return msgspec.json.decode(msgspec.json.encode(part))


# making one ---------------------------------------------------------------------------------------

_OF_STEPS: Final = (
    e.StepIntended, e.StepEdited, e.StepDelayed, e.StepAdopted, e.StepDrifted, e.StepOverridden, e.StepEnded,
    e.AttemptStarted, e.AttemptProgressed, e.AttemptEnded, e.AttemptSettled, e.EffectConfirmed, e.DecisionMade,
    e.WaitOpened, e.WaitVoted, e.WaitClosed, e.MessageSent, e.ChildSpawned, e.ChildEnded,
)  # fmt: skip
"""Events that belong to a step; all others happen to the run, between its steps."""


def timeline(log: Log, run: str, at: int | None = None, *, keep: Sequence[int] = ()) -> Timeline:
    """The timeline of a run at its head, or as it was after an event and those of `keep`, as a place has them."""
    folded = log.state(run, at, keep=keep).fold
    facts = folded.facts
    last = facts.seq if at is None else at
    read = log.read(run, limit=max(last, *keep, 1))
    recorded = {each.seq: each for each in read if each.seq <= last or each.seq in keep}
    making = _Making(log, run, recorded)
    standing = folds.timeline([(seq, each.event) for seq, each in recorded.items() if seq <= last])
    standing += [(seq, recorded[seq].event) for seq in keep]
    entries = making.entries(folded, standing)
    moments = [entry for entry in entries if isinstance(entry, Moment)]
    taken = [moment.event for moment in moments if isinstance(moment.event, e.RunTaken)]
    held = [moment for moment in moments if isinstance(moment.event, _HOLDS_BACK)]
    failed = recorded[facts.ended] if facts.ended_as == "failed" else None
    by_number = {step.number: step for step in walked(entries)}
    waits = (by_number[wait].waits[-1] for wait in facts.waits if wait in by_number and by_number[wait].waits)
    return Timeline(
        run=run, agent=facts.agent, status=facts.status, seq=facts.seq, generation=facts.generation,
        plan=facts.plan, stage=facts.stage, current=facts.current, started_at=facts.started_at,
        changed_at=facts.changed_at, ended_at=recorded[facts.ended].event.at if facts.ended else None,
        last_at=recorded[facts.seq].event.at if facts.seq else 0, wake_at=folded.wake_at,
        cancelling=facts.cancelling, priority=facts.priority, tags=facts.tags, parent=facts.parent,
        parent_step=facts.parent_step, forked_from=facts.forked_from, renewed_as=facts.renewed_as,
        holder=taken[-1].holder if taken else None, build=facts.build,
        held_back=held[-1] if held and (facts.paused or facts.mend) else None,
        waits=tuple(waits), entries=entries,
        failed=_run_failed(making, failed) if failed is not None else None,
        state=making.state(folded),
    )  # fmt: skip


_HOLDS_BACK: Final = (e.RunPaused, e.RunDiverged, e.RunRepaired)


def _run_failed(making: _Making, failed: Recorded) -> Failed:
    event = failed.event
    step = event.step if isinstance(event, e.RunFailed) else None
    return Failed(at=event.at, step=step, values=making.values(failed.seq))


class _Making:
    """Makes the entries of one run from its events."""

    def __init__(self, log: Log, run: str, recorded: Mapping[int, Recorded]) -> None:
        self._log = log
        self._run = run
        self._recorded = recorded
        self._erasing = State(folds.Fold(), self)

    def state(self, fold: folds.Fold) -> State:
        return State(fold, self)

    def event(self, seq: int) -> e.Event:
        return self._recorded[seq].event

    def data(self, seq: int) -> dict[str, Any]:
        recorded = self._recorded[seq]
        if recorded.row.data is not None:
            return dict(unpack(recorded.row.data, self._log.store.pieces))
        if recorded.event.data is None:
            return {}
        raise ValueErased(e.from_text(recorded.event.data))

    def values(self, seq: int) -> Values:
        return Values(self._erasing.data, seq)

    def entries(self, fold: folds.Fold, events: Sequence[tuple[int, e.Event]], after: int = 0) -> tuple[Entry, ...]:
        """Steps that were intended after a seq, and moments, in order; those inside a scope inside it."""
        known = {step.id: step for step in fold.steps if step.intended > after}
        undoing = {step.undoes: step.id for step in fold.steps if step.undoes is not None and step.status == "done"}
        own: dict[str, list[tuple[int, Any]]] = defaultdict(list)
        inside: dict[str, list[str | Moment]] = defaultdict(list)
        takings: list[tuple[int, int]] = []
        stages: dict[str, str | None] = {}
        stage: str | None = None
        for seq, event in events:
            number: str | None = getattr(event, "step", None)
            if number is not None and self._belongs(event, number, known, own):
                if number not in own:
                    inside[_container(number, known)].append(number)
                    stages[number] = stage
                own[number].append((seq, event))
                continue
            if isinstance(event, e.RunTaken):
                takings.append((seq, event.epoch))
            elif isinstance(event, e.PlanReached | e.PlanMade):
                stage = event.stage if isinstance(event, e.PlanReached) else None
            elif isinstance(event, e.RunFailed):
                number = None
            inside[_container(number, known) if number else ""].append(self._moment(seq, event))

        def within(container: str) -> tuple[Entry, ...]:
            return tuple(
                entry if isinstance(entry, Moment) else self._step(
                    known[entry], own[entry], takings, stages[entry], undoing.get(entry), within(entry)
                )
                for entry in inside.get(container, ())
            )  # fmt: skip

        return within("")

    def _belongs(self, event: e.Event, number: str, known: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
        """Whether an event is part of the step that it names. A note of ours is; one of the agent's comes before it."""
        if number not in known:
            return False
        if isinstance(event, e.NoteMade):
            return event.by == "kedge" and number in own
        if isinstance(event, e.AttemptSettled | e.AttemptEnded) and event.key is not None:
            # What a timeline that was left behind had started ends and is settled under the number that it had there.
            started = (each.key for _, each in own.get(number, ()) if isinstance(each, e.AttemptStarted))
            return event.key in started
        return isinstance(event, _OF_STEPS)

    def _moment(self, seq: int, event: e.Event) -> Moment:
        left = self._left(seq, event) if isinstance(event, e.RunRewound) else ()
        kind = str(type(event).__struct_config__.tag)
        return Moment(seq=seq, at=event.at, kind=kind, event=event, values=self.values(seq), left=left)

    def _left(self, seq: int, event: e.RunRewound) -> tuple[Step, ...]:
        """The steps that a rewind took back, as they stood then."""
        before = folds.timeline([(each.seq, each.event) for each in self._recorded.values() if each.seq < seq])
        gone = [(at, found) for at, found in before if at > event.cut and at not in event.keep]
        entries = self.entries(self._log.state(self._run, seq - 1).fold, gone, event.cut)
        return tuple(entry for entry in entries if isinstance(entry, Step))

    def _step(
        self,
        known: folds.Step,
        own: Sequence[tuple[int, Any]],
        takings: Sequence[tuple[int, int]],
        stage: str | None,
        undone_by: str | None,
        entries: tuple[Entry, ...],
    ) -> Step:
        parts = _StepParts(self, known.id, takings)
        for seq, event in own:
            parts.take(seq, event)
        return Step(
            number=known.id, sort=known.sort, name=known.name, status=known.status, seq=known.intended,
            intended_at=known.at, ended_at=known.ended_at or None, effect=known.effect, stage=stage,
            attempts=tuple(parts.attempts.values()), delayed_until=known.delayed_until, waits=tuple(parts.waits),
            undoes=known.undoes, undone_by=undone_by, entries=entries,
            intended=self.values(known.intended), ended=self.values(known.output) if known.output else NOTHING,
            delays=tuple(parts.delays), drifts=tuple(parts.drifts), notes=tuple(parts.notes), edits=tuple(parts.edits),
            **parts.single,
        )  # fmt: skip


def _container(number: str, known: Mapping[str, folds.Step]) -> str:
    """The scope that a step stands in; "" for the run itself."""
    while "." in number:
        number = number.rpartition(".")[0]
        if number in known:
            return number
    return ""


class _StepParts:
    """What the events of one step come to."""

    def __init__(self, making: _Making, number: str, takings: Sequence[tuple[int, int]]) -> None:
        self._making = making
        self._number = number
        self._takings = takings
        self.attempts: dict[int, Attempt] = {}
        self.waits: list[Wait] = []
        self.delays: list[Delay] = []
        self.drifts: list[Drift] = []
        self.notes: list[Note] = []
        self.edits: list[Edit] = []
        self.single: dict[str, Any] = {}

    def take(self, seq: int, event: e.Event) -> None:
        values = self._making.values(seq)
        match event:
            case e.StepIntended():
                self.single["verdict"] = event.verdict
            case e.StepEdited():
                self.edits.append(Edit(at=event.at, by=event.by, verdict=event.verdict, values=values))
            case e.StepEnded():
                self.single |= {"last_verdict": event.verdict, "ended_by": event.by}
            case e.StepDelayed():
                self.delays.append(Delay(at=event.at, until=event.until, because=event.because))
            case e.StepAdopted():
                self.single["adopted"] = Adopted(run=event.run, key=event.key, seq=event.seq)
            case e.StepDrifted():
                self.drifts.append(Drift(at=event.at, values=values))
            case e.StepOverridden():
                self.single |= {"overridden_by": event.by or "somebody", "overriding": values}
            case e.EffectConfirmed():
                self.single["confirmed"] = event.confirmed
            case e.DecisionMade():
                self.single["decision"] = Decision(by=event.by, values=values)
            case e.NoteMade():
                self.notes.append(Note(at=event.at, by=event.by, values=values))
            case e.MessageSent():
                self.single["sent_to"] = event.run
            case e.ChildSpawned():
                self.single["child"] = Child(run=event.run, agent=event.agent)
            case e.ChildEnded():
                self.single["child"] = Child(run=event.run, status=event.status)
            case e.WaitOpened() | e.WaitVoted() | e.WaitClosed():
                self._waits(event, values)
            case _:
                self._tries(seq, event, values)

    def _waits(self, event: e.WaitOpened | e.WaitVoted | e.WaitClosed, values: Values) -> None:
        if isinstance(event, e.WaitOpened):
            if event.waits_for == "child":
                self.single["child"] = Child(run=event.name)
            self._asked(event, values)
        elif self.waits:
            last = self.waits[-1]
            if isinstance(event, e.WaitVoted):
                vote = Vote(at=event.at, by=event.by, values=values)
                known = any(each.by == event.by for each in last.votes)
                self.waits[-1] = last if known else replace(last, votes=(*last.votes, vote))
            else:
                self.waits[-1] = replace(last, closed_at=event.at, how=event.how, by=event.by, closed=values)

    def _asked(self, event: e.WaitOpened, values: Values) -> None:
        last = self.waits[-1] if self.waits and self.waits[-1].how is None else None
        if last is not None and event.digest == last.digest and event.round == last.round:
            # The same question once more, because an answer to it did not fit.
            self.waits[-1] = replace(last, opened=values)
            return
        if last is not None:
            self.waits[-1] = replace(last, closed_at=event.at, how="expired" if event.round > last.round else "voided")
        self.waits.append(
            Wait(
                step=self._number, waits_for=event.waits_for, name=event.name, to=event.to, opened_at=event.at,
                deadline=event.deadline, need=event.need, rule=event.rule, round=event.round, digest=event.digest,
                opened=values,
            )
        )  # fmt: skip

    def _tries(self, seq: int, event: e.Event, values: Values) -> None:
        if isinstance(event, e.AttemptStarted):
            died = any(at > seq and epoch > event.epoch for at, epoch in self._takings)
            self.attempts[event.attempt] = Attempt(number=event.attempt, key=event.key, started_at=event.at, died=died)
            return
        number = getattr(event, "attempt", None)
        if number not in self.attempts:
            return
        last, changes = self.attempts[number], dict[str, Any]()
        if isinstance(event, e.AttemptProgressed):
            changes = {"progressed": values}
        elif isinstance(event, e.AttemptEnded):
            changes = {
                "ended_at": event.at, "outcome": event.outcome, "retry_at": event.retry_at, "limited": event.limited,
                "usage": event.usage, "values": values, "died": False,
            }  # fmt: skip
        elif isinstance(event, e.AttemptSettled):
            changes = {"settled": Settled(at=event.at, how=event.settlement, by=event.by, values=values)}
        self.attempts[number] = replace(last, **changes)
