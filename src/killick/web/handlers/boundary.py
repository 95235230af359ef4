"""A run at any boundary of its timeline: its position, its state, and the changes since the boundary before.

A boundary is found by its number or its name. The cost depends on the output, not on the run's length. Read-only.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Annotated, Any, Final, Literal

import msgspec
from starlette.responses import Response

from killick.history.diff import Diff, passed
from killick.log import boundaries
from killick.log.boundaries import Numbered, RunMoment
from killick.log.log import Log
from killick.model.facts import Step
from killick.model.fold import Fold
from killick.model.state import Decision, EffectSeen, Failure, Output, Pending, Retry, State
from killick.presenting.documents import Document
from killick.web.routes import Call, Nothing, RunAsked, get

SHOWN_MAX: Final = 12
"""The maximum number of items of each part, the latest; the whole is at `/runs/{run}/state`."""

PlaceText = Annotated[
    str, msgspec.Meta(max_length=200, description="A place: 6:before, 6:after, 4~1:before, @17, start or now.")
]


CHOICES_MAX: Final = 200
"""The maximum number of steps that a form offers, the last ones of the run."""


Written = Annotated[object, msgspec.Meta(extra_json_schema={"description": "Any value, as it is written in the log."})]
"""A value that is JSON already, tags and all: it is not written once more."""


class MomentAsked(RunAsked, frozen=True, kw_only=True):
    """A place of a run's time, or a boundary by its number."""

    place: PlaceText = "now"
    n: Annotated[int, msgspec.Meta(ge=0, le=2**53, description="From 0, the start; a greater one is now.")] | None = (
        None
    )


class BoundaryPosition(Document, frozen=True):
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


class StepChoice(Document, frozen=True):
    """A step to choose in a form."""

    step: str
    name: str
    status: str


def choices(steps: Iterable[Step]) -> tuple[StepChoice, ...]:
    """Steps as choices of a form."""
    return tuple(StepChoice.of(step, step=step.id) for step in steps)


def own_steps(fold: Fold) -> tuple[StepChoice, ...]:
    """The last of a run's own steps, in their order."""
    return choices(fold.steps[index] for index in fold.tops[-CHOICES_MAX:])


@get("/runs/{run}/moments", page="_moment.html")
def moment(call: Call[MomentAsked, Nothing]) -> Boundary:
    """A run at a place of its time, or at boundary n of its timeline."""
    asked, log = call.asked, call.log
    now = log.state(asked.run).fold
    at = numbered(log, asked.run, now, asked.place) if asked.n is None else boundaries.nth(now, asked.n)
    return _seen(log, asked.run, now, at)


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
    there = range(boundaries.count(now))
    after = bisect_right(there, place.seq, key=lambda n: boundaries.nth(now, n).place.seq)
    return Numbered(after - 1, "event", place)


def _seen(log: Log, run: str, now: Fold, at: Numbered) -> Boundary:
    place = at.place
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
        position=BoundaryPosition.of(facts, step=facts.current, pending=tuple(facts.pending)),
        context=RunContext(version=facts.context_version, document=state.context.document),
        knows=tuple(_knows(state)), since=before.label if before is not None else None, changes=changes,
    )  # fmt: skip


def _knows(given: State) -> Iterator[StatePart]:
    """The parts of a state that are lists, each with its last items."""
    state = given.as_written()
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
