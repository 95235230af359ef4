"""A page of a run: some consecutive steps with their parts, and the events between them.

Reads only the events of those steps, so that a page of a long run costs only its content. A timeline is the page of all
steps. Values are read lazily; writes nothing and reads no clock.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from msgspec.structs import replace

from killick.history import timeline_parts as parts
from killick.log.boundaries import before as place_before
from killick.log.log import Log, Recorded
from killick.model import events as e
from killick.model import facts
from killick.model import fold as folds
from killick.model.state import State

STEPS_MAX: Final = 100
LEFT_MAX: Final = 50
"""The maximum number of rewound steps listed in a page."""

_ROUND: Final = 1_000
"""The number of events in one read."""

_OF_STEPS: Final = (
    e.StepIntended, e.StepEdited, e.StepDelayed, e.StepAdopted, e.StepDrifted, e.StepOverridden, e.StepEnded,
    e.AttemptStarted, e.AttemptProgressed, e.AttemptEnded, e.AttemptSettled, e.EffectConfirmed, e.DecisionMade,
    e.WaitOpened, e.WaitVoted, e.WaitClosed, e.MessageSent, e.ChildSpawned, e.ChildEnded,
)  # fmt: skip
"""Events that belong to a step; all others happen to the run, between its steps."""


class RunPage(parts.Part, frozen=True):
    """Steps `first` to `last` of `total`, numbered by the run's top-level steps; nested steps come with them.

    An event of a step that came after the next page began, such as a drift found on replay, is a moment there.
    """

    first: int
    last: int
    total: int
    entries: tuple[parts.Entry, ...]

    @property
    def earlier(self) -> int | None:
        """The value of `before` for the previous page."""
        return self.first if self.first > 1 else None


def bounds(fold: folds.Fold, before: int | None, limit: int) -> tuple[int, int]:
    """Returns the first and the last top-level step of a page."""
    last = len(fold.tops) if before is None else max(min(before - 1, len(fold.tops)), 0)
    end = fold.tops[last] if last < len(fold.tops) else len(fold.steps)
    first = last
    while first > 1 and end - fold.tops[first - 2] <= limit:
        first -= 1
    return min(first, last) or 1, last


class PageBuilder:
    """Builds the entries of one run from its events, as of one of them and those of `keep`."""

    def __init__(
        self,
        log: Log,
        run: str,
        fold: folds.Fold,
        at: int | None = None,
        keep: Sequence[int] = (),
    ) -> None:
        self.fold = fold
        self._log = log
        self._run = run
        self._last = fold.facts.seq if at is None else at
        self._keep = keep
        self._recorded: dict[int, Recorded] = {}
        self._facts: dict[int, facts.Facts] = {}
        self._erasing = State(folds.Fold(), self)
        self._left_max: int | None = None

    def state(self) -> State:
        return State(self.fold, self)

    def recorded(self, seq: int) -> Recorded:
        """Returns one event with its row, from the cache or the store."""
        found = self._recorded.get(seq)
        if found is None:
            [found] = self._log.read(self._run, after=seq - 1, limit=1)
            self._recorded[seq] = found
        return found

    def event(self, seq: int) -> e.Event:
        return self.recorded(seq).event

    def data(self, seq: int) -> dict[str, Any]:
        return self._log.values(self._run, self.recorded(seq).row)

    def values(self, seq: int) -> parts.Values:
        return parts.Values(self._erasing.data, seq)

    # which events -----------------------------------------------------------------------------

    def everything(self) -> tuple[parts.Entry, ...]:
        """Returns all entries of the timeline."""
        events = self._standing(0, self._last, self.fold)
        events += [(seq, self.event(seq)) for seq in self._keep]
        return self._entries(self.fold, self.fold.steps, events)

    def section(self, first: int, last: int) -> RunPage:
        """Returns the entries between two top-level steps; the first page includes what precedes its first step."""
        fold, self._left_max = self.fold, LEFT_MAX
        tops, total = fold.tops, len(fold.tops)
        begin = tops[first - 1] if 1 < first <= total else 0
        end = tops[last] if last < total else len(fold.steps)
        steps = fold.steps[begin:end]
        after = steps[0].intended - 1 if begin else 0
        up_to = fold.steps[end].intended - 1 if end < len(fold.steps) else self._last
        events = self._standing(after, up_to, fold)
        events += self._late(steps, up_to)
        is_staged = begin and (fold.facts.stage is not None or fold.facts.plan)
        stage = self._facts_before(steps[0]).stage if is_staged else None
        entries = self._entries(fold, steps, events, stage, excluded=facts.OUT_OF_BAND)
        return RunPage(first=first, last=last, total=total, entries=entries)

    def _standing(self, after: int, up_to: int, fold: folds.Fold) -> list[tuple[int, e.Event]]:
        """Returns the events of a timeline between two positions. Read backwards, to skip rewound parts."""
        found: list[Recorded] = []
        kept = [(each.cut, each.seq, frozenset(each.keep)) for each in fold.facts.kept]
        end = up_to
        while end > after:
            start = max(after, end - _ROUND)
            for each in reversed(self._log.read(self._run, after=start, limit=end - start)):
                if any(cut < each.seq < seq and each.seq not in keep for cut, seq, keep in kept):
                    continue
                found.append(each)
                if isinstance(each.event, e.RunRewound | e.RunForked):
                    found += [self.recorded(seq) for seq in reversed(each.event.keep) if seq > after]
                    start = each.event.cut
                    break
            end = start
        self._recorded |= {each.seq: each for each in found}
        return [(each.seq, each.event) for each in reversed(found)]

    def _late(self, steps: Sequence[facts.Step], up_to: int) -> list[tuple[int, e.Event]]:
        """Returns later events of out-of-band steps, which run concurrently with the agent."""
        out_of_band = {step.id: step for step in steps if step.id.startswith(facts.OUT_OF_BAND)}
        ends = [step.ended or self._last for step in out_of_band.values()]
        late = self._standing(up_to, max(ends, default=0), self.fold)
        return [(seq, event) for seq, event in late if getattr(event, "step", None) in out_of_band]

    def _facts_before(self, step: facts.Step) -> facts.Facts:
        if step.intended not in self._facts:
            place = place_before(self.fold, step.intended, "")
            self._facts[step.intended] = self._log.state(self._run, place.seq, keep=place.keep).fold.facts
        return self._facts[step.intended]

    def known_before(self, found: RunPage) -> list[parts.Moment]:
        """Returns the context before a page: the contracts in force, and the last context change."""
        if found.first <= 1:
            return []
        facts = self._facts_before(self.fold.steps[self.fold.tops[found.first - 1]])
        seqs = sorted([*(bound.seq for bound in facts.contracts), *facts.context_parts])
        return [self._moment(seq, self.event(seq)) for seq in seqs]

    def last(self, entries: Sequence[parts.Entry], *kinds: type[e.Event]) -> parts.Moment | None:
        """Returns the last moment of some kinds among entries; on a partial page, also among the last events."""
        moments = (entry for entry in reversed(entries) if isinstance(entry, parts.Moment))
        found = next((moment for moment in moments if isinstance(moment.event, kinds)), None)
        if self._left_max is None:
            return found
        recent = self._standing(max(self._last - _ROUND, 0), self._last, self.fold)
        later = next((seq for seq, event in reversed(recent) if isinstance(event, kinds)), 0)
        return self._moment(later, self.event(later)) if later > (found.seq if found is not None else 0) else found

    # entries ----------------------------------------------------------------------------------

    def _entries(
        self,
        fold: folds.Fold,
        steps: Iterable[facts.Step],
        events: Sequence[tuple[int, e.Event]],
        stage: str | None = None,
        *,
        excluded: str | None = None,
    ) -> tuple[parts.Entry, ...]:
        """Returns steps and moments in order, nested by scope. Other pages have the rest."""
        known = {step.id: step for step in steps}
        undone_by = _undoing(fold, known.values())
        own: dict[str, list[tuple[int, Any]]] = defaultdict(list)
        inside: dict[str, list[str | parts.Moment]] = defaultdict(list)
        takings: list[tuple[int, int]] = [(fold.facts.seq, fold.facts.epoch)]
        stages: dict[str, str | None] = {}
        for seq, event in events:
            number: str | None = getattr(event, "step", None)
            if number is not None and _belongs(event, number, known, own):
                if number not in own:
                    inside[_container(number, known)].append(number)
                    stages[number] = stage
                own[number].append((seq, event))
                continue
            if number is not None and number not in known and excluded is not None and number.startswith(excluded):
                continue
            if isinstance(event, e.RunTaken):
                takings.append((seq, event.epoch))
            elif isinstance(event, e.PlanReached | e.PlanMade):
                stage = event.stage if isinstance(event, e.PlanReached) else None
            elif isinstance(event, e.RunFailed):
                number = None
            inside[_container(number, known) if number else ""].append(self._moment(seq, event))

        def within(container: str) -> tuple[parts.Entry, ...]:
            return tuple(
                entry if isinstance(entry, parts.Moment) else self._step(
                    known[entry], own[entry], takings, stages[entry], undone_by.get(entry), within(entry)
                )
                for entry in inside.get(container, ())
            )  # fmt: skip

        return within("")

    def _moment(self, seq: int, event: e.Event) -> parts.Moment:
        left = self._left(seq, event) if isinstance(event, e.RunRewound) else ()
        kind = str(type(event).__struct_config__.tag)
        return parts.Moment(seq=seq, at=event.at, kind=kind, event=event, values=self.values(seq), left=left)

    def _left(self, seq: int, event: e.RunRewound) -> tuple[parts.Step, ...]:
        """Returns the steps that a rewind dropped, as they were then."""
        fold = self._log.state(self._run, seq - 1).fold
        begin, end = bisect_right(fold.steps, event.cut, key=lambda step: step.intended), len(fold.steps)
        up_to = seq - 1
        if self._left_max is not None and end - begin > self._left_max:
            end = begin + self._left_max
            up_to = fold.steps[end].intended - 1
        gone = [(at, found) for at, found in self._standing(event.cut, up_to, fold) if at not in event.keep]
        entries = self._entries(fold, fold.steps[begin:end], gone)
        return tuple(entry for entry in entries if isinstance(entry, parts.Step))

    def _step(
        self,
        known: facts.Step,
        own: Sequence[tuple[int, Any]],
        takings: Sequence[tuple[int, int]],
        stage: str | None,
        undone_by: str | None,
        entries: tuple[parts.Entry, ...],
    ) -> parts.Step:
        made = _StepParts(self.values, known.id, takings)
        for seq, event in own:
            made.take(seq, event)
        return parts.Step(
            number=known.id, sort=known.sort, name=known.name, status=known.status, seq=known.intended,
            intended_at=known.at, ended_at=known.ended_at or None, effect=known.effect, stage=stage,
            attempts=tuple(made.attempts.values()), delayed_until=known.delayed_until, waits=tuple(made.waits),
            undoes=known.undoes, undone_by=undone_by, entries=entries,
            intended=self.values(known.intended), ended=self.values(known.output) if known.output else parts.NOTHING,
            delays=tuple(made.delays), drifts=tuple(made.drifts), notes=tuple(made.notes), edits=tuple(made.edits),
            **made.single,
        )  # fmt: skip


def _undoing(fold: folds.Fold, steps: Iterable[facts.Step]) -> dict[str, str]:
    """Maps compensated steps to their compensating steps, which are near the end, in reverse order."""
    wanted = {step.id for step in steps if step.undone}
    found: dict[str, str] = {}
    index = len(fold.steps)
    while index and len(found) < len(wanted):
        index -= 1
        step = fold.steps[index]
        if step.undoes is not None and step.undoes in wanted and step.status == "done":
            found.setdefault(step.undoes, step.id)
    return found


def _belongs(event: e.Event, number: str, known: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    """Returns whether an event is part of its step. Killick's own notes are; an agent's note precedes the step."""
    if number not in known:
        return False
    if isinstance(event, e.NoteMade):
        return event.by == "killick" and number in own
    if isinstance(event, e.AttemptSettled | e.AttemptEnded) and event.key is not None:
        # The effects of a rewound timeline end and are resolved under their old step number.
        started = (each.key for _, each in own.get(number, ()) if isinstance(each, e.Started))
        return event.key in started
    return isinstance(event, _OF_STEPS)


def _container(number: str, known: Mapping[str, facts.Step]) -> str:
    """Returns the scope of a step; "" for the run itself."""
    while "." in number:
        number = number.rpartition(".")[0]
        if number in known:
            return number
    return ""


class _StepParts:
    """Assembles one step from its events."""

    def __init__(self, values: Callable[[int], parts.Values], number: str, takings: Sequence[tuple[int, int]]) -> None:
        self._values = values
        self._number = number
        self._takings = takings
        self.attempts: dict[int, parts.Attempt] = {}
        self.waits: list[parts.Wait] = []
        self.delays: list[parts.Delay] = []
        self.drifts: list[parts.Drift] = []
        self.notes: list[parts.Note] = []
        self.edits: list[parts.Edit] = []
        self.single: dict[str, Any] = {}

    def take(self, seq: int, event: e.Event) -> None:
        values = self._values(seq)
        match event:
            case e.StepIntended():
                self.single["verdict"] = event.verdict
                self._tries(seq, event, values)
            case e.StepEdited():
                self.edits.append(parts.Edit(at=event.at, by=event.by, verdict=event.verdict, values=values))
            case e.StepEnded():
                self.single |= {"last_verdict": event.verdict, "ended_by": event.by}
            case e.StepDelayed():
                self.delays.append(parts.Delay(at=event.at, until=event.until, because=event.because))
            case e.StepAdopted():
                self.single["adopted"] = parts.Adopted(run=event.run, key=event.key, seq=event.seq)
            case e.StepDrifted():
                self.drifts.append(parts.Drift(at=event.at, values=values))
            case e.StepOverridden():
                self.single |= {"overridden_by": event.by or "a person", "overriding": values}
            case e.EffectConfirmed():
                self.single["confirmed"] = event.confirmed
            case e.DecisionMade():
                self.single["decision"] = parts.Decision(by=event.by, values=values)
            case e.NoteMade():
                self.notes.append(parts.Note(at=event.at, by=event.by, values=values))
            case e.MessageSent():
                self.single["sent_to"] = event.run
            case e.ChildSpawned():
                self.single["child"] = parts.Child(run=event.run, agent=event.agent)
            case e.ChildEnded():
                self.single["child"] = parts.Child(run=event.run, status=event.status)
            case e.WaitOpened() | e.WaitVoted() | e.WaitClosed():
                self._waits(event, values)
            case _:
                self._tries(seq, event, values)

    def _waits(self, event: e.WaitOpened | e.WaitVoted | e.WaitClosed, values: parts.Values) -> None:
        if isinstance(event, e.WaitOpened):
            if event.waits_for == "child":
                self.single["child"] = parts.Child(run=event.name)
            self._asked(event, values)
        elif self.waits:
            last = self.waits[-1]
            if isinstance(event, e.WaitVoted):
                vote = parts.Vote(at=event.at, by=event.by, values=values)
                known = any(each.by == event.by for each in last.votes)
                self.waits[-1] = last if known else replace(last, votes=(*last.votes, vote))
            else:
                self.waits[-1] = replace(last, closed_at=event.at, how=event.how, by=event.by, closed=values)

    def _asked(self, event: e.WaitOpened, values: parts.Values) -> None:
        last = self.waits[-1] if self.waits and self.waits[-1].how is None else None
        if last is not None and event.digest == last.digest and event.round == last.round:
            # The same question again, because an answer did not fit.
            self.waits[-1] = replace(last, opened=values)
            return
        if last is not None:
            self.waits[-1] = replace(last, closed_at=event.at, how="expired" if event.round > last.round else "voided")
        self.waits.append(
            parts.Wait(
                step=self._number, waits_for=event.waits_for, name=event.name, to=event.to, opened_at=event.at,
                deadline=event.deadline, need=event.need, rule=event.rule, round=event.round, digest=event.digest,
                opened=values,
            )
        )  # fmt: skip

    def _tries(self, seq: int, event: e.Event, values: parts.Values) -> None:
        if isinstance(event, e.Started):
            died = any(at > seq and epoch > event.epoch for at, epoch in self._takings)
            self.attempts[event.attempt] = parts.Attempt(
                number=event.attempt, key=event.key, started_at=event.at, died=died
            )
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
                "usage": event.usage, "values": values, "died": False, "not_retried": event.not_retried,
            }  # fmt: skip
        elif isinstance(event, e.AttemptSettled):
            changes = {"settled": parts.Settled(at=event.at, how=event.settlement, by=event.by, values=values)}
        self.attempts[number] = replace(last, **changes)
