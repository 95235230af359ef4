"""One step: everything that is on record of it, what it changed, how the ledger has it, and why it happened.

Values are verbatim. Reads the step, a few before it and what it did, however long the run is; changes nothing.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Annotated, Any, Final

from msgspec import Meta

from killick.history import timeline_parts
from killick.history.diff import passed
from killick.history.explain import why as explained
from killick.history.page import RedactData
from killick.history.phrasing import chain
from killick.history.timeline import Timeline, part_of
from killick.history.timeline_parts import Step
from killick.log.boundaries import at as place_at
from killick.log.log import Log
from killick.model import events as e
from killick.model.failure import Failure
from killick.model.fold import Fold
from killick.presenting.steps import reply_text
from killick.web.handlers.boundary import Changed, changed, veiled
from killick.web.handlers.step_list import Doc, RunId, span_of, through_of
from killick.web.problems import Problem
from killick.web.routes import Call, Nothing, Route, get

BEFORE_STEPS: Final = 12
"""How many steps before one are read to say why it happened."""

INSIDE_MAX: Final = 100
"""A scope with more steps inside does not say what they changed."""

StepId = Annotated[str, Meta(pattern=r"^\d{1,9}(\.\d{1,9}){0,40}$")]


class StepAsked(Doc, frozen=True):
    run: RunId
    step: StepId


class FrameLine(Doc, frozen=True):
    file: str
    line: int
    function: str


class ErrorSeen(Doc, frozen=True):
    """One error of a chain; `details` is what else it carried, such as what the far side answered."""

    type: str
    message: str
    kind: str
    notes: tuple[str, ...] = ()
    frames: tuple[FrameLine, ...] = ()
    inside: tuple[str, ...] = ()
    details: Any = None


def errors_of(failure: Failure | None) -> tuple[ErrorSeen, ...]:
    """An error, and those that led to it."""
    return tuple(
        ErrorSeen.of(
            each, details=each.details or None, frames=tuple(map(FrameLine.of, each.frames)),
            inside=tuple(map(str, each.members)),
        )
        for each in (chain(failure) if failure is not None else ())
    )  # fmt: skip


class SettledSeen(Doc, frozen=True):
    at_us: int
    how: str
    by: str | None
    because: Any = None


class AttemptSeen(Doc, frozen=True):
    """One try: `died` means that its process was gone before it had said how it ended."""

    number: int
    key: str
    started_us: int
    ended_us: int | None
    outcome: str | None
    died: bool
    retry_us: int | None
    is_limited: bool
    not_retried: e.NotRetried | None
    usage: e.Usage | None
    errors: tuple[ErrorSeen, ...] = ()
    reasoning: Any = None
    progress: Any = None
    settled: SettledSeen | None = None


class VoteSeen(Doc, frozen=True):
    at_us: int
    by: str
    answer: Any = None
    comment: Any = None


class WaitSeen(Doc, frozen=True):
    """What was waited for within a step, who may answer, and who did."""

    waits_for: str
    name: str
    to: tuple[str, ...]
    since_us: int
    deadline_us: int | None
    closed_us: int | None
    how: str | None
    by: str | None
    need: int
    round: int
    rule: str | None
    votes: tuple[VoteSeen, ...] = ()
    prompt: Any = None
    options: Any = None
    default: Any = None
    intention: Any = None
    reason: Any = None
    answer: Any = None
    comment: Any = None


class DecisionSeen(Doc, frozen=True):
    by: str
    question: Any = None
    options: Any = None
    choice: Any = None
    because: Any = None


class EditSeen(Doc, frozen=True):
    at_us: int
    by: str
    stands: bool
    rule: str | None
    arguments: Any = None
    changed: Any = None
    comment: Any = None


class NoteSeen(Doc, frozen=True):
    at_us: int
    by: str
    note: Any = None


class DelaySeen(Doc, frozen=True):
    at_us: int
    until_us: int
    because: str


class DriftSeen(Doc, frozen=True):
    at_us: int
    recorded: Any = None
    found: Any = None


class EffectStanding(Doc, frozen=True):
    """What the ledger knows of what a step did: `run` is who did it, where it was adopted."""

    key: str
    status: str
    run: str
    attempts: int


class StepSeen(Doc, frozen=True):
    """Everything that is on record of a step. Values are verbatim; `*_seq` are the events that hold them."""

    run: str
    number: str
    sort: e.Sort
    name: str
    status: str
    stage: str | None
    effect: str | None
    at_us: int
    ended_us: int | None
    took_us: int | None
    intended_seq: int
    output_seq: int | None
    arguments: Any
    given: Any
    output: Any
    because: Any
    errors: tuple[ErrorSeen, ...]
    attempts: tuple[AttemptSeen, ...]
    waits: tuple[WaitSeen, ...]
    decision: DecisionSeen | None
    verdict: e.Verdict | None
    last_verdict: e.Verdict | None
    ended_by: str | None
    edits: tuple[EditSeen, ...]
    delays: tuple[DelaySeen, ...]
    drifts: tuple[DriftSeen, ...]
    notes: tuple[NoteSeen, ...]
    retry_us: int | None
    standing: EffectStanding | None
    adopted_from: str | None
    overridden_by: str | None
    overriding: Any
    is_confirmed: bool | None
    undoes: str | None
    undone_by: str | None
    child: str | None
    sent_to: str | None
    changes: tuple[Changed, ...]
    why: tuple[str, ...]


def step(call: Call[StepAsked, Nothing]) -> StepSeen:
    """Everything on record of one step: values, attempts, waits, verdicts, edits, what it changed, and why."""
    run, number = call.asked.run, call.asked.step
    log, through = call.client.log, through_of(call, run)
    fold = log.state(run).fold
    known = fold.step(number)
    timeline = about(log, run, fold, number, through)
    found = timeline.step(number) if timeline is not None else None
    if known is None or timeline is None or found is None:
        raise unknown(run, fold, number)
    told = explained(timeline, number, text_of=reply_text)
    started = known.attempts[0].started if known.attempts else 0
    standing = _standing(log, run, found, started)
    return _seen(run, found, known.output or None, standing, _changes(call, found), told, call.now_us)


def _changes(call: Call[StepAsked, Nothing], step: Step) -> tuple[Changed, ...]:
    """What it changed. Of a scope with very much inside, each step says it for itself."""
    run, log = call.asked.run, call.client.log
    if sum(1 for _ in timeline_parts.walked(step.entries)) > INSIDE_MAX:
        return ()
    before, after = (place_at(log, run, f"{step.number}:{side}") for side in ("before", "after"))
    diff, _ = passed(log, run, before, after, seen=veiled(call, run))
    return tuple(changed(diff))


def unknown(run: str, fold: Fold, number: str) -> Problem:
    """There is no such step."""
    return Problem(404, f"{run}: has no step {number}; it has {len(fold.tops)}", code="step_unknown")


def about(log: Log, run: str, fold: Fold, number: str, through: RedactData | None) -> Timeline | None:
    """The part of a timeline that says what there is to say of a step: itself, some before it and the next one."""
    index, tops = fold.find(number), fold.tops
    if index is None:
        return None
    own = bisect_right(tops, index)  # the run's own step that it is in
    end = tops[own + 1] if own + 1 < len(tops) else len(fold.steps)
    reach = end - (tops[own - 1] if own else 0)
    return part_of(log, run, before=own + 2, limit=reach + BEFORE_STEPS, through=through, fold=fold)


def _standing(log: Log, run: str, step: Step, started: int) -> EffectStanding | None:
    """How the ledger has what a step did, or what it took over instead."""
    owner, seq = (run, started) if step.adopted is None else (step.adopted.run, step.adopted.seq)
    if step.effect in (None, "reads") or not seq:
        return None
    effects = log.ledger(owner).effects
    index = bisect_left(effects, seq, key=lambda effect: effect.started)
    if index == len(effects) or effects[index].started != seq:
        return None
    found = effects[index]
    return EffectStanding(key=found.key, status=found.status, run=owner, attempts=found.attempts)


def _seen(
    run: str,
    step: Step,
    output_seq: int | None,
    standing: EffectStanding | None,
    changes: tuple[Changed, ...],
    told: list[str],
    now_us: int,
) -> StepSeen:
    decision = step.decision
    return StepSeen.of(
        step, run=run, at_us=step.intended_at, took_us=span_of(step, now_us), intended_seq=step.seq,
        output_seq=output_seq, errors=errors_of(step.failure), attempts=tuple(map(_attempt, step.attempts)),
        waits=tuple(map(_wait, step.waits)),
        decision=None if decision is None else DecisionSeen.of(decision, options=list(decision.options)),
        edits=tuple(map(_edit, step.edits)), delays=tuple(map(DelaySeen.of, step.delays)),
        drifts=tuple(map(DriftSeen.of, step.drifts)), notes=tuple(map(NoteSeen.of, step.notes)),
        retry_us=step.delayed_until, standing=standing,
        adopted_from=step.adopted.run if step.adopted is not None else None,
        overriding=step.overriding.get("because"), is_confirmed=step.confirmed,
        child=step.child.run if step.child is not None else None, changes=changes, why=tuple(told),
    )  # fmt: skip


def _attempt(attempt: timeline_parts.Attempt) -> AttemptSeen:
    settled = None if attempt.settled is None else SettledSeen.of(attempt.settled)
    return AttemptSeen.of(attempt, is_limited=attempt.limited, errors=errors_of(attempt.failure), settled=settled)


def _wait(wait: timeline_parts.Wait) -> WaitSeen:
    votes = tuple(map(VoteSeen.of, wait.votes))
    return WaitSeen.of(wait, since_us=wait.opened_at, votes=votes, options=list(wait.options) or None)


def _edit(edit: timeline_parts.Edit) -> EditSeen:
    return EditSeen.of(edit, rule=edit.verdict.rule if edit.verdict is not None else None)


ROUTES: Final[tuple[Route, ...]] = (
    get("/runs/{run}/steps/{step}", step, asks=StepAsked, gives=StepSeen, page="_step.html"),
)
