"""Two runs side by side, or one run at two positions: the shared steps, the divergence, and every later step.

Reads from where they part, a page at a time, however long the runs are. Changes nothing.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator
from difflib import SequenceMatcher
from itertools import islice
from typing import Annotated, Any, Final, Literal

import msgspec

from killick.history.compare_runs import Pair, StepKeys, conditions_between, in_order, paired
from killick.history.diff import last_shared, passed
from killick.history.diff import values as changed_values
from killick.history.page import PageBuilder
from killick.history.timeline_parts import Step, walked
from killick.log import boundaries
from killick.log.boundaries import RunMoment
from killick.model.codec import plain
from killick.model.ledger import Spend
from killick.presenting.documents import Document
from killick.web.handlers.boundary import SIGNS, Change, PlaceText, RunContext, StepChoice, Written, changed, own_steps
from killick.web.routes import Call, Nothing, get

PAGE: Final = 40
"""So many steps of either run are on a page."""

RELATED_MAX: Final = 24
"""So many runs are named that one may be compared with."""

PIECES_MAX: Final = 4_000
"""Longer values are shown whole, without marked differences."""

_WORD: Final = re.compile(r"\s+|\w+|[^\w\s]")

Other = Annotated[str, msgspec.Meta(max_length=1_000, description="A run, by its id.")]


class CompareAsked(msgspec.Struct, frozen=True, kw_only=True):
    a: Other | None = None
    b: Other | None = None
    at: PlaceText | None = None
    to: Annotated[PlaceText, msgspec.Meta(description="The other place, where both runs are the same.")] = "now"
    cursor: Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,9}$", description="Steps after this one.")] | None = None


class ComparedRun(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two runs, as it is now. Its usage excludes steps that a fork shares."""

    id: str
    agent: str
    status: str
    generation: int
    forked_from: str | None
    started_at_us: int
    ended_at_us: int | None
    duration_seconds: float
    steps: int
    input: Any
    result: Any
    attempts: int
    model_calls: int
    tokens_in: int
    tokens_out: int
    cost_micros: int
    context: RunContext


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


class TextPiece(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a value's text; `other` if the other run differs there."""

    text: str
    other: bool


class ComparedStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step as one of the runs has it. Pieces are there where the two are different and not too long for it."""

    kind: str
    name: str
    status: str
    attempts: int
    duration_seconds: float | None
    arguments: Written
    output: Written
    error: str | None
    arguments_pieces: tuple[TextPiece, ...] | None
    output_pieces: tuple[TextPiece, ...] | None


class StepPair(msgspec.Struct, frozen=True, kw_only=True):
    """A step number, and each run's step there; `how` they differ, or None."""

    step: str
    how: Literal["call", "arguments", "outcome", "output", "absent"] | None
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
        used, before = ledger.spend, ledger.facts.before.spend if ledger.facts.before is not None else Spend()
        ended = log.event(self.run, facts.ended).at if facts.ended else None
        return ComparedRun(
            id=self.run, agent=facts.agent, status=facts.status, generation=facts.generation,
            forked_from=facts.forked_from, started_at_us=facts.started_at, ended_at_us=ended,
            duration_seconds=((ended or log.event(self.run, facts.seq).at) - facts.started_at) / 1_000_000,
            steps=facts.committed, input=self.state.input,
            result=self.state.result if facts.status == "completed" else None,
            attempts=used.attempts - before.attempts, model_calls=used.model_calls - before.model_calls,
            tokens_in=used.tokens_in - before.tokens_in, tokens_out=used.tokens_out - before.tokens_out,
            cost_micros=used.cost_micros - before.cost_micros,
            context=RunContext(version=facts.context_version, document=self.state.context.document),
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
        left, right = _pieces(pair)
        yield StepPair(
            step=number, how=pair.how, shared=is_shared, one=_half(mine, pair, left, 0),
            two=_half(other, pair, right, 1),
        )  # fmt: skip


def _key(side: _Side, step: Step) -> tuple[Any, ...] | None:
    index = side.fold.find(step.number)
    return None if index is None else side.key(index)


_Marked = tuple[tuple[TextPiece, ...] | None, tuple[TextPiece, ...] | None]


def _half(step: Step | None, pair: Pair, marked: _Marked, which: Literal[0, 1]) -> ComparedStep | None:
    seen = (pair.one, pair.two)[which]
    if step is None or seen is None:
        return None
    return ComparedStep(
        kind=seen.sort, name=seen.name, status=seen.status, attempts=len(step.attempts),
        duration_seconds=None if step.ended_at is None else max(step.ended_at - step.intended_at, 0) / 1_000_000,
        arguments=seen.arguments, output=seen.output, error=seen.failure,
        arguments_pieces=marked[0], output_pieces=marked[1],
    )  # fmt: skip


def _pieces(pair: Pair) -> tuple[_Marked, _Marked]:
    """The differences of two steps' arguments and outputs, for each of the two."""
    if pair.one is None or pair.two is None or pair.how in (None, "call"):
        return (None, None), (None, None)
    given = word_diff(_text(pair.one.arguments), _text(pair.two.arguments))
    came = word_diff(_text(pair.one.output), _text(pair.two.output))
    return (given[0], came[0]), (given[1], came[1])


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def word_diff(one: str, two: str) -> tuple[tuple[TextPiece, ...], tuple[TextPiece, ...]] | tuple[None, None]:
    """Two texts with their differences marked, word by word; None if they are equal, or very long."""
    if one == two or len(one) + len(two) > PIECES_MAX:
        return None, None
    ones, twos = _WORD.findall(one), _WORD.findall(two)
    left: list[TextPiece] = []
    right: list[TextPiece] = []
    for tag, a, b, c, d in SequenceMatcher(None, ones, twos, autojunk=False).get_opcodes():
        for pieces, words in ((left, ones[a:b]), (right, twos[c:d])):
            if words:
                pieces.append(TextPiece(text="".join(words), other=tag != "equal"))
    return tuple(left), tuple(right)


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
