"""The parts of a run's record one after the other: decisions, failures, effects and the log itself. Changes nothing.

Each is read from its end, a page at a time; the cursor is where the page before begins.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Annotated, Any, Final, TypeVar

from msgspec import Meta
from starlette.responses import Response

from killick.model import ledger as ledgers
from killick.model.state import State
from killick.presenting.documents import Decision, Document, Error, Event, errors, event, recorded_failure
from killick.web.problems import Problem
from killick.web.render import pretty
from killick.web.routes import Call, Nothing, RunAsked, get

PAGE_MAX: Final = 50
EVENTS_MAX: Final = 100

T = TypeVar("T")


class PageAsked(RunAsked, frozen=True, kw_only=True):
    """`cursor` is `next` of the page before."""

    cursor: Annotated[str, Meta(pattern=r"^\d{1,9}$")] | None = None
    limit: Annotated[int, Meta(ge=1, le=200)] = PAGE_MAX


def paged(found: Sequence[T], asked: PageAsked) -> tuple[Sequence[T], str | None]:
    """The last ones, or the last before a cursor; and the cursor of those before."""
    end = len(found) if asked.cursor is None else min(int(asked.cursor), len(found))
    start = max(end - asked.limit, 0)
    return found[start:end], str(start) if start else None


class RecordedDecision(Decision, frozen=True, kw_only=True):
    """A decision, its step and its time."""

    step: str
    at_us: int


class DecisionPage(Document, frozen=True):
    """Decisions, the last first, of `total`."""

    run: str
    total: int
    decisions: tuple[RecordedDecision, ...]
    next: str | None


@get("/runs/{run}/decisions", page="_record.html")
def decisions(call: Call[PageAsked, Nothing]) -> DecisionPage:
    """Decisions with their options, reasons and authors; the last first."""
    run, state = call.asked.run, call.log.state(call.asked.run)
    found, following = paged(state.decisions, call.asked)
    documents = tuple(map(RecordedDecision.of, reversed(found)))
    return DecisionPage(run=run, total=len(state.fold.decisions), decisions=documents, next=following)


class RecordedFailure(Document, frozen=True):
    """A failure: its step, its input, its progress, and the error with its chain."""

    at_us: int
    step: str | None
    tool: str | None
    attempt: int | None
    input: Any
    progress: Any
    errors: tuple[Error, ...]


class FailurePage(Document, frozen=True):
    """Failures, the last first, of `total`."""

    run: str
    total: int
    failures: tuple[RecordedFailure, ...]
    next: str | None


@get("/runs/{run}/failures", page="_record.html")
def failures(call: Call[PageAsked, Nothing]) -> FailurePage:
    """Failures with their context: every failed attempt, rejection and failed step; the last first."""
    run, state = call.asked.run, call.log.state(call.asked.run)
    found, following = paged(state.failures, call.asked)
    documents = tuple(RecordedFailure.of(each, errors=errors(recorded_failure(each.error))) for each in reversed(found))
    return FailurePage(run=run, total=len(state.fold.failures), failures=documents, next=following)


class Effect(Document, frozen=True):
    """One effect by its idempotency key, as the ledger has it. `rewound`: a rewind has left the timeline that did it.

    `undoes` and `undone_by` are steps.
    """

    idempotency_key: str
    step: str
    tool: str
    effect: str
    status: ledgers.EffectStatus
    attempts: int
    generation: int
    rewound: bool
    undoes: str | None
    undone_by: str | None
    started_seq: int
    arguments: Any
    result: Any


class EffectPage(Document, frozen=True):
    """Effects, the last first, of `total`. A rewind does not remove them."""

    run: str
    total: int
    effects: tuple[Effect, ...]
    next: str | None


@get("/runs/{run}/effects", page="_record.html")
def effects(call: Call[PageAsked, Nothing]) -> EffectPage:
    """Effects on the outside world, with their status; the last first."""
    run, state = call.asked.run, call.log.state(call.asked.run)
    ledger = call.log.ledger(run)
    found, following = paged(ledger.effects, call.asked)
    undoing = _undoing(ledger.effects, [each.started for each in found if each.status == "undone"])
    documents = tuple(_effect(state, ledger.effects, each, undoing.get(each.started)) for each in reversed(found))
    return EffectPage(run=run, total=len(ledger.effects), effects=documents, next=following)


def _effect(state: State, known: Sequence[ledgers.Effect], effect: ledgers.Effect, undone_by: str | None) -> Effect:
    undone = effect_at(known, effect.undoes) if effect.undoes else None
    happened = effect.ended and effect.status in ("happened", "undone")
    step = state.fold.step(effect.step)
    return Effect.of(
        effect, idempotency_key=effect.key, rewound=step is None or step.intended != effect.intended,
        undoes=undone.step if undone is not None else None, undone_by=undone_by, started_seq=effect.started,
        arguments=state.data(effect.intended).get("arguments"),
        result=state.data(effect.ended).get("output") if happened else None,
    )  # fmt: skip


def effect_at(known: Sequence[ledgers.Effect], seq: int) -> ledgers.Effect | None:
    """The effect of a ledger that started at an event."""
    index = bisect_left(known, seq, key=lambda effect: effect.started)
    return known[index] if index < len(known) and known[index].started == seq else None


def _undoing(known: Sequence[ledgers.Effect], wanted: Sequence[int]) -> dict[int, str]:
    """By which step each of these was undone, by where it started. Those are near the end."""
    found: dict[int, str] = {}
    index = len(known)
    while index and len(found) < len(wanted):
        index -= 1
        effect = known[index]
        if effect.undoes in wanted and effect.status == "happened":
            found[effect.undoes] = effect.step
    return found


# the log ------------------------------------------------------------------------------------------


class EventsAsked(RunAsked, frozen=True, kw_only=True):
    """Events after a seq; without one, the last events."""

    after: Annotated[int, Meta(ge=0)] | None = None
    limit: Annotated[int, Meta(ge=1, le=1_000)] = EVENTS_MAX


class EventPage(Document, frozen=True):
    """Events in order, of `last`; `next` is where the following page begins, `earlier` where the preceding one does."""

    run: str
    last: int
    events: tuple[Event, ...]
    next: str | None
    earlier: int | None


@get("/runs/{run}/events", page="_record.html")
def events(call: Call[EventsAsked, Nothing]) -> EventPage:
    """The log itself: every event, verbatim, in order."""
    asked, log = call.asked, call.log
    last = log.head(asked.run).seq
    after = max(last - asked.limit, 0) if asked.after is None else asked.after
    found = log.read(asked.run, after=after, limit=asked.limit)
    documents = tuple(event(log, asked.run, each) for each in found)
    end = found[-1].seq if found else after
    return EventPage(
        run=asked.run, last=last, events=documents, next=str(end) if end < last else None,
        earlier=max(after - asked.limit, 0) if 0 < after <= last else None,
    )  # fmt: skip


class ValueAsked(RunAsked, frozen=True, kw_only=True):
    seq: Annotated[int, Meta(ge=1)]
    name: Annotated[str, Meta(min_length=1, max_length=200)]


@get("/runs/{run}/events/{seq}/{name}", media="text/plain")
def value(call: Call[ValueAsked, Nothing]) -> Response:
    """One value of an event, whole, as text."""
    asked, log = call.asked, call.log
    if asked.seq > log.head(asked.run).seq:
        raise Problem(404, f"{asked.run}: has no event {asked.seq}", code="event_unknown")
    shown = log.data(asked.run, asked.seq)
    if asked.name not in shown:
        there = f"; it has {', '.join(sorted(shown))}" if shown else ""
        raise Problem(404, f"{asked.run}: event {asked.seq} has no {asked.name}{there}", code="value_unknown")
    return Response(pretty(shown[asked.name]), media_type="text/plain; charset=utf-8")
