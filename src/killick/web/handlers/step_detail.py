"""One step: its whole record, its changes, its effect in the ledger, and the reason for it.

Values are verbatim. Reads the step, a few before it and its changes, however long the run is. Read-only.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Annotated, Final

from msgspec import Meta

from killick.history import timeline_parts
from killick.history.diff import passed
from killick.history.run_info import pending_answers
from killick.history.timeline import Timeline, part_of
from killick.log.boundaries import at as place_at
from killick.log.log import Log
from killick.model.fold import Fold
from killick.presenting.documents import Document, Step, step_fields
from killick.presenting.explain import why as explained
from killick.web.handlers.boundary import Change, changed
from killick.web.handlers.record import effect_at
from killick.web.problems import Problem
from killick.web.routes import Call, Nothing, RunAsked, get

BEFORE_STEPS: Final = 12
"""How many steps before one are read to say why it happened."""

INSIDE_MAX: Final = 100
"""A scope with more steps inside omits their changes."""

StepId = Annotated[str, Meta(pattern=r"^\d{1,9}(\.\d{1,9}){0,40}$")]


class StepAsked(RunAsked, frozen=True, kw_only=True):
    step: StepId


class StepEffect(Document, frozen=True):
    """The effect of a step in the ledger. `run` executed it: another run, if the result was deduplicated."""

    idempotency_key: str
    status: str
    run: str
    attempts: int


class StepDetail(Step, frozen=True, tag="step"):
    """A step, its changes, and its reasons. `output_seq` is the event that holds its output."""

    output_seq: int | None
    effect_status: StepEffect | None
    changes: tuple[Change, ...]
    why: tuple[str, ...]


@get("/runs/{run}/steps/{step}", page="_step.html", personal=False)
def step(call: Call[StepAsked, Nothing]) -> StepDetail:
    """Everything on record of one step: values, attempts, waits, verdicts, edits, changes, and the reason."""
    run, number = call.asked.run, call.asked.step
    log = call.log
    fold = log.state(run).fold
    known = fold.step(number)
    timeline = about(log, run, fold, number)
    found = timeline.step(number) if timeline is not None else None
    if known is None or timeline is None or found is None:
        raise unknown(run, fold, number)
    started = known.attempts[0].started if known.attempts else 0
    return StepDetail.of(
        found, **step_fields(run, found, call.now_us), output_seq=known.output or None,
        effect_status=_effect_status(log, run, found, started), changes=_changes(call, found),
        why=tuple(explained(timeline, number, zone=None, answers=pending_answers(log, run))),
    )  # fmt: skip


def _changes(call: Call[StepAsked, Nothing], step: timeline_parts.Step) -> tuple[Change, ...]:
    """The changes of a step. In a large scope, each inner step has its own."""
    run, log = call.asked.run, call.log
    if sum(1 for _ in timeline_parts.walked(step.entries)) > INSIDE_MAX:
        return ()
    before, after = (place_at(log, run, f"{step.number}:{side}") for side in ("before", "after"))
    diff, _ = passed(log, run, before, after)
    return tuple(changed(diff))


def unknown(run: str, fold: Fold, number: str) -> Problem:
    """There is no such step."""
    return Problem(404, f"{run}: has no step {number}; it has {len(fold.tops)}", code="step_unknown")


def about(log: Log, run: str, fold: Fold, number: str) -> Timeline | None:
    """The part of a timeline that explains a step: the step, some before it and the next one."""
    index, tops = fold.find(number), fold.tops
    if index is None:
        return None
    own = bisect_right(tops, index)  # the run's own step that it is in
    end = tops[own + 1] if own + 1 < len(tops) else len(fold.steps)
    reach = end - (tops[own - 1] if own else 0)
    return part_of(log, run, before=own + 2, limit=reach + BEFORE_STEPS, fold=fold)


def _effect_status(log: Log, run: str, step: timeline_parts.Step, started: int) -> StepEffect | None:
    """The status of a step's effect in the ledger, or of the effect that it reused."""
    owner, seq = (run, started) if step.adopted is None else (step.adopted.run, step.adopted.seq)
    if step.effect in (None, "reads") or not seq:
        return None
    found = effect_at(log.ledger(owner).effects, seq)
    return None if found is None else StepEffect.of(found, idempotency_key=found.key, run=owner)
