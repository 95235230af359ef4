"""A run at any boundary of its timeline: its position, its state, and the changes since the boundary before.

A boundary is found by its number or its name. The cost depends on the output, not on the run's length. Read-only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Annotated, Any, Final, Literal

import msgspec
from starlette.responses import Response

from killick.history.diff import Diff, passed
from killick.history.state_items import as_written
from killick.log import boundaries
from killick.log.boundaries import Numbered, RunMoment
from killick.log.log import Log
from killick.model import events as e
from killick.model.facts import Step
from killick.model.fold import Fold
from killick.model.state import Decision, EffectSeen, Failure, Output, Pending, Retry, State
from killick.web.routes import Call, Nothing, RunAsked, get

SHOWN_MAX: Final = 12
"""The maximum number of items of each part, the latest; the whole is at `/runs/{run}/state`."""

MARKS_MAX: Final = 60
"""So many boundaries of one sort are marked; of more, as many, evenly."""

LOOKED_MAX: Final = 400
"""The most steps that are examined for marks; of a longer run, a selection is."""

EVENTS_MAX: Final = 4_000
"""A log of more events is not searched for its rewinds."""

PlaceText = Annotated[
    str, msgspec.Meta(max_length=200, description="A place: 6:before, 6:after, 4~1:before, @17, start or now.")
]


CHOICES_MAX: Final = 200
"""So many of a run's last steps a form offers to choose from."""


Written = Annotated[object, msgspec.Meta(extra_json_schema={"description": "Any value, as it is written in the log."})]
"""A value that is JSON already, tags and all: it is not written once more."""


class MomentAsked(RunAsked, frozen=True, kw_only=True):
    n: Annotated[int, msgspec.Meta(ge=0, le=2**53, description="A boundary, from 0, the start; a greater one is now.")]
    marks: Annotated[bool, msgspec.Meta(description="Whether to return the notable boundaries.")] = False


class PlaceAsked(RunAsked, frozen=True, kw_only=True):
    place: PlaceText = "now"
    marks: Annotated[bool, msgspec.Meta(description="Whether to return the notable boundaries.")] = False


class BoundaryPosition(msgspec.Struct, frozen=True, kw_only=True):
    """Where the run stood: its step, the stage of its plan, how many steps were done, and which were not."""

    step: str | None
    stage: str | None
    plan: tuple[str, ...]
    committed: int
    pending: tuple[str, ...]


class RunContext(msgspec.Struct, frozen=True, kw_only=True):
    """The agent's own document."""

    version: int
    document: Any


class StatePart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the state: how many there are, and the latest of them, the last first."""

    part: Literal["outputs", "decisions", "retries", "failures", "pending", "effects"]
    count: int
    latest: tuple[Written, ...]


Sign = Literal["+", "-", "~"]
SIGNS: Final[dict[str, Sign]] = {"add": "+", "remove": "-", "replace": "~", "+": "+", "-": "-", "~": "~"}


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One change: a line of `text`, or, if that is null, the values before and after."""

    part: str
    sign: Sign
    text: str | None = None
    step: str | None = None
    path: str = ""
    before: Written = None
    after: Written = None


class BoundaryMark(msgspec.Struct, frozen=True, kw_only=True):
    """A notable boundary."""

    n: int
    kind: Literal["wait", "failure", "decision", "rewind", "child"]
    step: str


class Boundary(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a run at a boundary. `since` is the boundary before, and the base of `changes`."""

    run: str
    n: int
    count: int
    side: Literal["start", "before", "after", "now", "event"]
    place: str
    step: str | None
    kind: str | None
    name: str | None
    seq: int
    at_us: int
    status: str
    generation: int
    position: BoundaryPosition
    context: RunContext
    knows: tuple[StatePart, ...]
    since: str | None
    changes: tuple[Change, ...]
    marks: tuple[BoundaryMark, ...] | None = None


class StepChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A step to choose in a form."""

    step: str
    name: str
    status: str


def choices(steps: Iterable[Step]) -> tuple[StepChoice, ...]:
    """Steps as choices of a form."""
    return tuple(StepChoice(step=step.id, name=step.name, status=step.status) for step in steps)


def own_steps(fold: Fold) -> tuple[StepChoice, ...]:
    """The last of a run's own steps, in their order."""
    return choices(fold.steps[index] for index in fold.tops[-CHOICES_MAX:])


@get("/runs/{run}/moments/{n}", page="_moment.html")
def moment(call: Call[MomentAsked, Nothing]) -> Boundary:
    """A run at boundary n of its timeline."""
    now = call.log.state(call.asked.run).fold
    return _seen(call, call.asked.run, now, boundaries.nth(now, call.asked.n), marks=call.asked.marks)


@get("/runs/{run}/moments", page="_moment.html")
def moment_at(call: Call[PlaceAsked, Nothing]) -> Boundary:
    """A run at a place of its time."""
    asked, log = call.asked, call.log
    now = log.state(asked.run).fold
    return _seen(call, asked.run, now, numbered(log, asked.run, now, asked.place), marks=asked.marks)


def numbered(log: Log, run: str, now: Fold, text: str) -> Numbered:
    """The boundary that a text names. A place that is no boundary of the timeline resolves to the nearest one."""
    place = boundaries.at(log, run, text)
    name, _, side = place.label.partition(":")
    if place.seq >= now.facts.seq:
        return boundaries.nth(now, boundaries.count(now))
    n = boundaries.number(now, name, "before" if side == "before" else "after") if side in ("before", "after") else None
    if n is not None:
        return boundaries.nth(now, n)
    if place.seq <= 1:
        return boundaries.nth(now, 0)
    low, high = 0, boundaries.count(now) - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if boundaries.nth(now, middle).place.seq <= place.seq else (low, middle - 1)
    return Numbered(low, "event", place)


def _seen(call: Call[Any, Nothing], run: str, now: Fold, at: Numbered, *, marks: bool) -> Boundary:
    log, place = call.log, at.place
    earlier = at.n if at.side == "event" else at.n - 1
    before = boundaries.nth(now, earlier).place if earlier >= 0 else None
    if before is not None and before.seq <= place.seq:
        diff, state = passed(log, run, before, place)
        changes = tuple(changed(diff))
    else:
        changes, state = (), log.state(run, place.seq, keep=place.keep)
    facts = state.fold.facts
    return Boundary(
        run=run, n=at.n, count=boundaries.count(now), side=at.side, place=place.label,
        step=at.step.id if at.step is not None else None, kind=at.step.sort if at.step is not None else None,
        name=at.step.name if at.step is not None else None, seq=place.seq, at_us=log.event(run, facts.seq).at,
        status=facts.status, generation=facts.generation,
        position=BoundaryPosition(
            step=facts.current, stage=facts.stage, plan=facts.plan, committed=facts.committed,
            pending=tuple(facts.pending),
        ),
        context=RunContext(version=facts.context_version, document=state.context.document),
        knows=tuple(_knows(state)), since=before.label if before is not None else None, changes=changes,
        marks=tuple(_marks(log, run, now)) if marks else None,
    )  # fmt: skip


def _knows(given: State) -> Iterator[StatePart]:
    """The parts of a state that are lists, each with its last items."""
    state = as_written(given)
    fold = state.fold
    done = (step for step in reversed(fold.steps) if step.status == "done" and step.output)
    outputs = [Output(step.id, step.name, state.output_of(step)) for step in islice(done, SHOWN_MAX)]
    yield StatePart(part="outputs", count=fold.facts.committed, latest=tuple(map(msgspec.to_builtins, outputs)))
    parts: tuple[tuple[Any, Sequence[Decision | Retry | Failure | Pending | EffectSeen]], ...] = (
        ("decisions", state.decisions), ("retries", state.retries), ("failures", state.failures),
        ("pending", state.pending), ("effects", state.effects),
    )  # fmt: skip
    for name, part in parts:
        latest = tuple(
            msgspec.to_builtins(part[place]) for place in range(len(part) - 1, max(len(part) - 1 - SHOWN_MAX, -1), -1)
        )
        yield StatePart(part=name, count=len(part), latest=latest)


def changed(diff: Diff) -> Iterator[Change]:
    """A diff for display: values before and after, and the run's position in words."""
    changes = diff.visible_changes()
    decided = {change.step for change in changes if change.part == "decisions"}
    for change in changes:
        if change.part in ("run", "position", "trace") or (change.part == "outputs" and change.step in decided):
            continue
        yield Change(
            part=change.part, sign=SIGNS[change.op], step=change.step, path=change.path, before=change.before,
            after=change.after,
        )  # fmt: skip
    words = tuple(change for change in changes if change.part in ("run", "position"))
    for line in msgspec.structs.replace(diff, changes=words).lines(120):
        yield Change(part=line.part, sign=SIGNS[line.sign], text=line.text)


# marks --------------------------------------------------------------------------------------------


def _marks(log: Log, run: str, fold: Fold) -> Iterator[BoundaryMark]:
    """The notable boundaries, in order; of a long run, an even selection."""
    found = list(_steps_marked(fold))
    if fold.facts.generation and fold.facts.seq <= EVENTS_MAX:
        for seq, event, _ in log.read(run, limit=EVENTS_MAX):
            if isinstance(event, e.RunRewound) and (index := _following(fold, seq)) is not None:
                found.append(("rewind", index))
    marks: set[tuple[int, str, str]] = set()
    for sort, index in found:
        step = fold.steps[index]
        n = boundaries.number(fold, step.id, "before" if sort == "rewind" or step.id in fold.facts.pending else "after")
        if n is not None:
            marks.add((n, sort, step.id))
    for n, sort, step_id in sorted(marks):
        yield BoundaryMark(n=n, kind=sort, step=step_id)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def _steps_marked(fold: Fold) -> Iterator[tuple[str, int]]:
    yield from (("decision", index) for index in _evenly_spaced(fold.decisions))
    yield from (("failure", index) for index in _evenly_spaced(fold.retried))
    yield from (("wait", index) for index in fold.facts.pending.values() if fold.steps[index].status == "waiting")
    for index in _evenly_spaced(range(len(fold.steps)), LOOKED_MAX):
        step: Step = fold.steps[index]
        if step.status == "failed":
            yield "failure", index
        elif step.sort in ("wait", "child"):
            yield ("wait" if step.sort == "wait" else "child"), index


def _evenly_spaced(indexes: Sequence[int], most: int = MARKS_MAX) -> Iterator[int]:
    """All of them, or some, evenly."""
    count = len(indexes)
    places = range(count) if count <= most else (count * nth // MARKS_MAX for nth in range(MARKS_MAX))
    return (indexes[at] for at in places)


def _following(fold: Fold, seq: int) -> int | None:
    """The first step that was intended after an event."""
    return next((index for index, step in enumerate(fold.steps) if step.intended > seq), None)


# whole states -------------------------------------------------------------------------------------


class StateAsked(RunAsked, frozen=True, kw_only=True):
    at: PlaceText = "now"


@get("/runs/{run}/state", media="application/json")
def state(call: Call[StateAsked, Nothing]) -> Response:
    """The whole state of a run at a place, as its documented JSON form has it: as long as the run is."""
    asked, log = call.asked, call.log
    place: RunMoment = boundaries.at(log, asked.run, asked.at)
    found = log.state(asked.run, place.seq, keep=place.keep)
    return Response(found.to_json(), media_type="application/json")
