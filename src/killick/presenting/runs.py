"""Runs as documents: a run, and a run with its whole timeline; and where it is, in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from killick.engine import views
from killick.history import run_info
from killick.history import timeline_parts as parts
from killick.history.timeline import Timeline
from killick.log.log import Log
from killick.model import events as e
from killick.presenting.documents import (
    SCHEMA_VERSION,
    Document,
    Error,
    Moment,
    Step,
    Wait,
    errors,
    moment,
    open_wait,
    recorded_wait,
    step_fields,
)
from killick.store.protocol import is_held
from killick.store.records import KEY_DESTROYED, shown_tags


class RunFailure(Document, frozen=True):
    """Why a run failed; `not_undone` are the compensations that failed."""

    at_us: int
    step: str | None
    errors: tuple[Error, ...]
    not_undone: tuple[str, ...] = ()


class Position(Document, frozen=True):
    """A run's position, since when, and the next step. `stage_index` is its stage, from 0; `entered`: those reached."""

    where: str
    since_us: int
    next: str
    step: str | None
    place: str | None
    stage_index: int | None
    entered: tuple[int, ...]


class Run(Document, frozen=True):
    """A run: its position, its open waits, its input and its result."""

    id: str
    agent: str
    status: str
    position: Position
    seq: int
    generation: int
    plan: tuple[str, ...]
    stage: str | None
    step: str | None
    priority: int
    tags: tuple[str, ...]
    started_at_us: int
    changed_at_us: int
    ended_at_us: int | None
    wake_at_us: int | None
    cancelling: bool
    build: e.Build
    parent: str | None
    parent_step: str | None
    forked_from: str | None
    follows: str | None
    renewed_as: str | None
    failure: RunFailure | None
    waits: tuple[Wait, ...]
    input: Any
    result: Any


class TimelineStep(Step, frozen=True, tag="step"):
    """A step in its timeline; `entries` are those of a scope."""

    entries: tuple[TimelineStep | Moment, ...] = ()


class RunTimeline(Run, frozen=True, kw_only=True):
    """A run with its whole timeline."""

    version: int = SCHEMA_VERSION
    holder: str | None
    context: Any
    entries: tuple[TimelineStep | Moment, ...]


def run_fields(
    tl: Timeline,
    *,
    status: str | None = None,
    broken: str | None = None,
    waits: Iterable[views.Wait] | None = None,
    answers: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The fields of a run that its type does not take over by name. Its open waits, where the run is at its head, and
    the answers that it has not taken, by step."""
    status, failed = status or str(tl.status), tl.failed
    return {
        "id": tl.run, "status": status, "position": position(tl, status, broken, answers), "step": tl.current,
        "tags": tuple(shown_tags(tl.tags)), "follows": tl.state.fold.facts.follows,
        "failure": None if failed is None else RunFailure(
            at_us=failed.at, step=failed.step, errors=errors(failed.failure), not_undone=tuple(failed.not_undone),
        ),
        "waits": tuple(recorded_wait(tl.run, each) for each in tl.waits) if waits is None
        else tuple(map(open_wait, waits)),
    }  # fmt: skip


def display_status(log: Log, run: str, status: str) -> str:
    """The status of a run: broken, abandoned, or the one on record."""
    if log.store.quarantined(run) is not None:
        return "broken"
    return "abandoned" if status == "running" and not is_held(log.store, log.head(run)) else status


def run_now(log: Log, tl: Timeline, now_us: int) -> RunTimeline:
    """A run at its head, as it is now: with its open waits, and the answers that it has not taken."""
    return run_timeline(
        tl, now_us, status=display_status(log, tl.run, str(tl.status)), broken=log.store.quarantined(tl.run),
        waits=run_info.info(log, tl.run).waits, answers=run_info.pending_answers(log, tl.run),
    )  # fmt: skip


def why_now(log: Log, tl: Timeline, step: str | None = None, **shown: Any) -> list[str]:
    """As `explain.why`, for a run at its head: with the death of its process, and the answers not taken yet."""
    from killick.presenting.explain import why  # a list of runs needs none of it

    abandoned = display_status(log, tl.run, str(tl.status)) == "abandoned"
    return why(tl, step, abandoned=abandoned, answers=run_info.pending_answers(log, tl.run), **shown)


def run_timeline(tl: Timeline, now_us: int, **given: Any) -> RunTimeline:
    """A run with everything that happened. Its size grows with the run."""
    entries = tuple(_entry(tl.run, each, now_us) for each in tl.entries)
    return RunTimeline.of(tl, **run_fields(tl, **given), entries=entries)


def _entry(run: str, part: parts.Entry, now_us: int) -> TimelineStep | Moment:
    if isinstance(part, parts.Moment):
        return moment(part)
    inside = tuple(_entry(run, each, now_us) for each in part.entries)
    return TimelineStep.of(part, **step_fields(run, part, now_us), entries=inside)


def position(
    tl: Timeline, status: str, broken: str | None = None, answers: Mapping[str, str] | None = None
) -> Position:
    """The position of a run, the reason for its wait, and the event that ends it."""
    step = tl.at_work
    number = step.number if step is not None else tl.failed.step if tl.failed is not None else tl.current
    named = f"step {number} ({step.name})" if step is not None else f"step {number}" if number else ""
    from killick.presenting.explain import why  # a list of runs needs none of it

    lines = why(tl, zone=None, abandoned=status == "abandoned", answers=answers)
    following = lines[-1] if lines else ""
    since = tl.waits[0].opened_at if tl.waits else tl.changed_at
    if status == "running" and step is not None:
        since = step.intended_at
    match status:
        case "broken" if broken == KEY_DESTROYED:
            where, following = "Quarantined", f"{broken[:1].upper()}{broken[1:]}."
        case "broken":
            where, following = "The log fails verification", f"{broken}. Verify it to see where; then repair it."
        case "completed" | "cancelled":
            where = status.capitalize()
            following = f"It continues as {tl.renewed_as}." if tl.renewed_as else "Nothing more will happen."
            since = tl.ended_at or since
        case "failed":
            where, since = f"Failed at {named}" if number else "Failed in the agent's own code", tl.ended_at or since
            following = "Nothing more happens until a person resumes the run."
        case "code_mismatch" if tl.held_back is not None:
            where, since = f"Code mismatch at step {getattr(tl.held_back.event, 'step', '')}", tl.held_back.at
        case "queued":
            over = step is not None and step.is_over
            where = f"Queued {'after' if over else 'at'} {named}" if named else "Queued"
            following = "No worker has taken the run yet."
        case _:
            where = f"{status.capitalize()} at {named}" if named else status.capitalize()
    return Position(
        where=where, since_us=since, next=following, step=number, place=tl.place,
        stage_index=tl.plan.index(tl.stage) if tl.stage in tl.plan else None,
        entered=tuple(n for n, stage in enumerate(tl.plan) if stage in tl.state.fold.facts.entered),
    )  # fmt: skip


def revived(count: int, move: str) -> str:
    """Why abandoned runs stopped, and what continues them."""
    return f"{'its process' if count == 1 else 'their processes'} died. {move[:1].upper()}{move[1:]}"
