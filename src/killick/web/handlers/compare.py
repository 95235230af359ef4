"""Two runs side by side, or one run at two positions: the shared steps, the divergence, and every later step.

Reads from where they part, a page at a time, however long the runs are. Changes nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import islice
from typing import Annotated, Any, Final, Literal

import msgspec

from killick.history.compare_runs import ComparedStep, How, StepKeys, conditions_between, in_order, paired
from killick.history.diff import last_shared, passed
from killick.history.diff import values as changed_values
from killick.history.page import PageBuilder
from killick.history.timeline_parts import Step, walked
from killick.log import boundaries
from killick.log.boundaries import RunMoment
from killick.model.codec import plain
from killick.model.ledger import Spend
from killick.presenting.documents import Document
from killick.web.handlers.boundary import SIGNS, Change, PlaceText, StepChoice, changed, own_steps
from killick.web.routes import Call, Nothing, get
from killick.web.tallies import RunUsage

PAGE: Final = 40
"""The number of steps of each run on a page."""

RELATED_MAX: Final = 24
"""The maximum number of runs that are suggested for a comparison."""

Other = Annotated[str, msgspec.Meta(max_length=1_000, description="A run, by its id.")]


class CompareAsked(msgspec.Struct, frozen=True, kw_only=True):
    a: Other | None = None
    b: Other | None = None
    at: PlaceText | None = None
    to: Annotated[PlaceText, msgspec.Meta(description="The other place, where both runs are the same.")] = "now"
    cursor: Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,9}$", description="Steps after this one.")] | None = None


class ComparedRun(Document, frozen=True):
    """One of the two runs, as it is now. `used` is its usage without steps that a fork shares."""

    id: str
    agent: str
    status: str
    generation: int
    forked_from: str | None
    started_at_us: int
    ended_at_us: int | None
    steps: int
    input: Any
    result: Any
    attempts: int
    used: RunUsage


Kinship = Literal["parent", "fork", "same agent", "recent"]


class RelatedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate for the comparison, and its relation to the first run."""

    run: str
    how: Kinship
    status: str


class SharedHistory(msgspec.Struct, frozen=True, kw_only=True):
    """The shared history: the number of steps, and its end; None for unrelated runs."""

    steps: int
    place: str


class ForkCondition(Document, frozen=True):
    """A condition that a fork changed."""

    run: str
    what: str
    step: str | None
    value: Any
    was: Any
    unset: tuple[str, ...]


class StepPair(msgspec.Struct, frozen=True, kw_only=True):
    """A step number, and each run's step there; `how` they differ, or None."""

    step: str
    how: How | None
    shared: bool
    one: ComparedStep | None
    two: ComparedStep | None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Two runs, or, where both are the same, a run at two places, of which `steps` are to choose. `changes` is what
    they know otherwise."""

    a: ComparedRun | None
    b: ComparedRun | None
    at: str | None
    to: str
    steps: tuple[StepChoice, ...]
    related: tuple[RelatedRun, ...]
    shared: SharedHistory | None
    conditions: tuple[ForkCondition, ...]
    diverges_at: str | None
    pairs: tuple[StepPair, ...]
    changes: tuple[Change, ...]
    next: str | None


class _Side:
    """A run as it is now, read lazily."""

    def __init__(self, call: Call[Any, Any], run: str) -> None:
        self.log, self.run = call.log, run
        self.state = self.log.state(run)
        self.fold = self.state.fold
        self._making = PageBuilder(self.log, run, self.fold)
        self._keys = StepKeys(self.log, run, self.fold)

    def key(self, index: int) -> tuple[Any, ...]:
        """The key that identifies the record of a step."""
        return self._keys.key(self.fold.steps[index].id)

    def steps(self, first: int, end: int) -> dict[str, Step]:
        """The run's own steps from one place to before another, and those inside them, by number."""
        if first >= min(end, len(self.fold.tops)):
            return {}
        found = self._making.section(first + 1, min(end, len(self.fold.tops)))
        return {step.number: step for step in walked(found.entries)}

    def document(self, at: str | None) -> Any:
        """The agent's own document, at a place or now."""
        if at is None:
            return self.state.context.document
        place = boundaries.at(self.log, self.run, at)
        return self.log.state(self.run, place.seq, keep=place.keep).context.document

    def seen(self) -> ComparedRun:
        facts, log = self.fold.facts, self.log
        ledger = log.ledger(self.run)
        spend, before = ledger.spend, ledger.facts.before.spend if ledger.facts.before is not None else Spend()
        used = {name: getattr(spend, name) - getattr(before, name) for name in Spend.__struct_fields__}
        ended = log.event(self.run, facts.ended).at if facts.ended else None
        return ComparedRun.of(
            facts, id=self.run, ended_at_us=ended, steps=facts.committed, input=self.state.input,
            result=self.state.result if facts.status == "completed" else None, attempts=used.pop("attempts"),
            used=RunUsage(**used),
        )  # fmt: skip


@get("/compare", page="compare.html")
def compare(call: Call[CompareAsked, Nothing]) -> Comparison:
    """Two runs side by side: the shared steps, the divergence, and each run's later steps."""
    asked = call.asked
    one = _Side(call, asked.a) if asked.a else None
    two = _Side(call, asked.b) if asked.b else None
    a, b = (side.seen() if side is not None else None for side in (one, two))
    nothing = Comparison(
        a=a, b=b, at=asked.at, to=asked.to, next=None, steps=own_steps(one.fold) if one is not None else (),
        related=tuple(_related_runs(call, one)), shared=None, conditions=(), diverges_at=None, pairs=(), changes=(),
    )  # fmt: skip
    if one is None or two is None:
        return nothing
    if one.run == two.run:
        then, later = _two_places(one, asked)
        diff, _ = passed(one.log, one.run, then, later)
        return msgspec.structs.replace(nothing, at=then.label, to=later.label, changes=tuple(changed(diff)))
    start, shared = _shared(one, two)
    first = max(int(asked.cursor or 0), start)
    pairs = tuple(_pairs(one, two, first))
    last = max(len(one.fold.tops), len(two.fold.tops))
    conditions = conditions_between(call.log, one.run, two.run) if shared is not None else ()
    return msgspec.structs.replace(
        nothing, shared=shared, conditions=tuple(map(ForkCondition.of, conditions)), pairs=pairs,
        diverges_at=next((pair.step for pair in pairs if pair.how is not None), None),
        changes=tuple(_contexts(one.document(asked.at), two.document(asked.at))),
        next=str(first + PAGE) if first + PAGE < last else None,
    )  # fmt: skip


# where they part ----------------------------------------------------------------------------------


def _shared(one: _Side, two: _Side) -> tuple[int, SharedHistory | None]:
    """How many of their own steps are on the same record: all up to one, so that one is found by halving."""
    if not last_shared(one.log, one.run, two.run):
        return 0, None
    ones, twos = one.fold.tops, two.fold.tops
    least = range(min(len(ones), len(twos)))
    count = bisect_left(least, 1, key=lambda at: one.key(ones[at]) != two.key(twos[at]))
    place = f"{one.fold.steps[ones[count - 1]].id}:after" if count else "start"
    return count, SharedHistory(steps=count, place=place)


def _pairs(one: _Side, two: _Side, first: int) -> Iterator[StepPair]:
    ones, twos = one.steps(first, first + PAGE), two.steps(first, first + PAGE)
    for number in sorted({**ones, **twos}, key=in_order):
        mine, other = ones.get(number), twos.get(number)
        pair = paired(number, mine, other)
        is_shared = mine is not None and other is not None and _key(one, mine) == _key(two, other)
        yield StepPair(step=number, how=pair.how, shared=is_shared, one=pair.one, two=pair.two)


def _key(side: _Side, step: Step) -> tuple[Any, ...] | None:
    index = side.fold.find(step.number)
    return None if index is None else side.key(index)


# their states -------------------------------------------------------------------------------------


def _contexts(one: Any, two: Any) -> Iterator[Change]:
    was, now = (msgspec.to_builtins(plain({} if each is None else each)) for each in (one, two))
    for change in changed_values(was, now):
        yield Change(part="context", sign=SIGNS[change.op], path=change.path, before=change.before, after=change.after)


def _two_places(side: _Side, asked: CompareAsked) -> tuple[RunMoment, RunMoment]:
    """The two places of a run, the earlier one first."""
    one, two = (boundaries.at(side.log, side.run, text) for text in (asked.at or "start", asked.to))
    return (one, two) if one.seq <= two.seq else (two, one)


# candidates for a comparison ----------------------------------------------------------------------


def _related_runs(call: Call[Any, Any], side: _Side | None) -> Iterator[RelatedRun]:
    """The parent and the forks of a run, then the latest runs of its agent; without a run, the latest of all."""
    log, found = call.log, dict[str, Kinship]()
    agent = side.fold.facts.agent if side is not None else None
    if side is not None:
        found |= {run: "parent" for run in (side.fold.facts.forked_from,) if run is not None}
        found |= dict.fromkeys(reversed(log.ledger(side.run).facts.forks), "fork")
    for each in call.client.list(agent=agent, limit=RELATED_MAX):
        found.setdefault(each.id, "recent" if agent is None else "same agent")
    for run, how in islice(found.items(), RELATED_MAX):
        if (side is None or run != side.run) and log.store.head(run) is not None:
            yield RelatedRun(run=run, how=how, status=log.state(run).status)
