"""The effect of a command, decided from the record alone: the events that carry it out, or the refusal.

Touches no store. Refuses to override or skip a step that is open or over: an attempt is settled by an answer, an ended
step by a rewind or a fork. Refuses a caller named `model:…` that continues or ends what waits for a person.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from killick.definitions.tools import TOOLS
from killick.engine.approval.call_answer import INSTEAD, PERSON
from killick.engine.control.inbox import asks_person
from killick.engine.replay import OVER
from killick.errors import AnswerRefused, ContextStale, ValueRefused
from killick.log.writer import Entry
from killick.model import events as e
from killick.model.facts import OUT_OF_BAND, Facts, Step, Wait, is_model
from killick.model.failure import Failure
from killick.model.fold import Fold
from killick.model.typed import convert

Body = dict[str, Any]

_OF_PERSONS: Final = ("cancel", "override", "skip")
"""The commands that end a question or a hold, which models may not end for a person."""

SKIPPED: Final = "killick.Skipped"
_TYPES: Final = (SKIPPED, "killick.errors.Skipped", "killick.errors.StepFailed")

_DECISIONS: Final = frozenset({PERSON, INSTEAD, "killick.Skipped", "killick.Stopped"})
"""Codes and types of failures that a person decided on."""


def entries_of(fold: Fold, body: Body, *, by: str | None, at: int) -> list[Entry]:
    """A command as the events that carry it out. AnswerRefused, ContextStale: it cannot be."""
    because = {"because": body["because"]} if body.get("because") else None
    if (verb := body["command"]) in _OF_PERSONS:
        named, waits = body.get("step"), fold.facts.waits
        refuse_model(fold.facts, by, verb, waits=[each for each in waits.values() if named in (None, each.step)])
    match body["command"]:
        case "pause":
            return [Entry(e.RunPaused(at=at, by=by), because)]
        case "cancel":
            return [Entry(e.CancelRequested(at=at, by=by, compensate=bool(body.get("compensate"))), because)]
        case "prioritize":
            return [Entry(e.RunPrioritized(at=at, by=by, priority=body["priority"]), because)]
        case "note":
            return [Entry(e.NoteMade(at=at, by=by or "a person"), {"note": body["note"]})]
        case "set":
            return [_context_changed(fold, body, by or "a person", at, because or {})]
        case "override":
            return _overridden(fold, body, by, at, because or {})
        case "skip":
            return _skipped(fold, body, by, at)
        case "retry":
            reason = body.get("because") or f"{by or 'a person'} ended the delay"
            return [Entry(e.StepDelayed(at=at, step=_delayed(fold, body).id, until=at, because=reason, by=by))]
        case "permit":
            named = [s for i in fold.facts.pending.values() if body["tag"] in (s := fold.steps[i]).queued]
            reason = "a call under its limit ended"
            delayed = [step.id for step in named if step.status == "delayed"]
            return [Entry(e.StepDelayed(at=at, step=step, until=at, because=reason)) for step in delayed]
        case "forked":
            return [Entry(e.ForkMade(at=at, run=body["fork"], cut=body["cut"], by=by))]
        case _:
            return []


def _context_changed(fold: Fold, body: Body, by: str, at: int, because: Body) -> Entry:
    version, saw = fold.facts.context_version, body.get("saw")
    if saw is not None and saw != version:
        raise ContextStale(fold.facts.run, saw=saw, version=version, changes={})
    changed = e.ContextChanged(at=at, version=version + 1, saw=version if saw is None else saw, by=by)
    return Entry(changed, {"set": body["set"], "unset": list(body.get("unset") or ()), **because})


def _overridden(fold: Fold, body: Body, by: str | None, at: int, because: Body) -> list[Entry]:
    step = _pending(fold, body, "override")
    wait, output = fold.facts.waits.get(step.id), body["output"]
    if step.sort == "child" or (wait is not None and wait.waits_for == "time"):
        what = "a run cannot be made up" if step.sort == "child" else "a sleep has no result"
        raise AnswerRefused(fold.facts.run, f"step {step.id}: {what}; skip it")
    # A message to another run is a tool's step, too, and has no effect of its own.
    tool = TOOLS.get(step.name) if step.sort == "tool" and step.effect is not None else None
    if tool is not None and tool.shape.returns is not Any:
        try:
            convert(output, tool.shape.returns, at=f"step {step.id} ({tool.name})")
        except ValueRefused as misfit:
            raise AnswerRefused(fold.facts.run, str(misfit)) from None
    if step.sort == "wait" and wait is not None:
        # In the form of the event that ends such a wait, so that the code accepts it.
        if wait.waits_for == "answer":
            output = {"kind": "respond", "value": output}
        elif wait.waits_for == "child":
            output = {"status": "completed", "result": output, "failure": None}
    event = e.StepOverridden(at=at, step=step.id, by=by or "a person")
    return [*_voided(step, wait, by, at), Entry(event, {"output": output, **because})]


def _skipped(fold: Fold, body: Body, by: str | None, at: int) -> list[Entry]:
    step = _pending(fold, body, "skip")
    wait, because = fold.facts.waits.get(step.id), body.get("because")
    if step.sort == "wait" and wait is not None:
        return [Entry(e.WaitClosed(at=at, step=step.id, how="skipped", by=by), {"comment": because} if because else {})]
    event = e.StepEnded(at=at, step=step.id, outcome="failed", by=by or "a person")
    return [*_voided(step, wait, by, at), Entry(event, {"failure": skip_failure(by, because)})]


def _voided(step: Step, wait: Wait | None, by: str | None, at: int) -> list[Entry]:
    """Close the open question of a step that was ended."""
    if wait is None or step.sort == "wait":
        return []
    return [Entry(e.WaitClosed(at=at, step=step.id, how="voided", by=by))]


def skip_failure(by: str | None, because: Any) -> Failure:
    """The failure of a skipped step."""
    reason = f": {because}" if because else ""
    return Failure("error", SKIPPED, _TYPES, f"skipped by {by or 'a person'}{reason}", details={"by": by})


def _delayed(fold: Fold, body: Body) -> Step:
    """The step that sits out a delay."""
    run, facts = fold.facts.run, fold.facts
    if body.get("step"):
        step = _pending(fold, body, "retry")
        if step.status != "delayed":
            raise AnswerRefused(run, f"step {step.id} ({step.name}) waits for no backoff; it is {_where(step, facts)}")
        return step
    found = [step for index in facts.pending.values() if (step := fold.steps[index]).status == "delayed"]
    if len(found) == 1:
        return _pending(fold, {**body, "step": found[0].id}, "retry")
    if found:
        raise AnswerRefused(run, f"several steps wait; name one of {', '.join(step.id for step in found)}")
    raise AnswerRefused(run, f"no step waits for a backoff; the run is {facts.status}")


def _pending(fold: Fold, body: Body, verb: str) -> Step:
    """A step that is neither over nor open, so that its outcome is not determined yet."""
    run, facts, named = fold.facts.run, fold.facts, str(body["step"])
    step = fold.step(named)

    def refuse(reason: str) -> AnswerRefused:
        return AnswerRefused(run, f"step {named}{f' ({step.name})' if step is not None else ''} {reason}")

    if step is None:
        raise refuse(f"does not exist; `killick show {run}` lists the steps")
    if step.status in OVER:
        raise refuse(
            f"is over ({step.status}); to change it, rewind the run (to {named}:before) or fork it "
            f"(at {named}:after, with another output)"
        )
    if step.sort == "scope":
        raise refuse(f"contains other steps, such as {_inside(fold, named)}; {verb} one of those")
    if facts.cancelling:
        raise refuse("is of a run that is being cancelled")
    if verb != "retry" and (step.sort == "undo" or named.startswith(OUT_OF_BAND)):
        raise refuse("is a compensation and cannot be changed")
    wait = facts.waits.get(named)
    if step.status == "in_doubt" or (wait is not None and wait.waits_for == "settlement"):
        raise refuse("is in doubt; first answer whether it happened: happened, not or stop")
    if step.attempts and not step.attempts[-1].ended and step.status != "intended":
        raise refuse("has an attempt in progress; wait until it ends, or resume the run if its process died")
    return step


def _inside(fold: Fold, scope: e.StepId) -> str:
    inside = [name for name in fold.facts.pending if name.startswith(f"{scope}.")]
    return ", ".join(inside[:3]) or "those that it is yet to begin"


def _where(step: Step, facts: Facts) -> str:
    wait = facts.waits.get(step.id)
    return f"waiting for {wait.waits_for} {wait.name}".strip() if wait is not None else step.status


# whose move it is ---------------------------------------------------------------------------------


def person_only(facts: Facts) -> str | None:
    """Returns why only a person may continue a run; None if others may, too."""
    if facts.cancelling or facts.status == "cancelled":
        return "it is cancelled"
    if facts.paused and not is_model(facts.paused):
        return f"it was paused by {'its contract' if facts.paused == 'contract' else facts.paused}"
    if facts.crashes is not None and facts.crashes.quarantined:
        return f"its process died {facts.crashes.deaths} times in a row"
    if facts.mend and facts.mend != facts.diverged:
        return "its record was repaired"
    return None


def person_ended(failure: Failure | None) -> str | None:
    """Returns why a failed run is not for a model to continue: a person rejected, skipped or stopped its step."""
    while failure is not None:
        found = {failure.type, failure.details.get("code")} & _DECISIONS
        if found and not is_model(failure.details.get("by")):
            return f"it failed because of a person's decision ({failure.message})"
        failure = failure.cause
    return None


def refuse_model(
    facts: Facts, by: str | None, verb: str, *, waits: Iterable[Wait] = (), also: str | None = None
) -> None:
    """Refuses a model's command on a run that only a person may continue, or on a wait that asks a person.

    also  another reason, if the caller knows one
    """
    if not is_model(by):
        return
    asked = (f"step {each.step} asks {', '.join(each.to) or 'a person'}" for each in waits if asks_person(by, each))
    if (why := person_only(facts) or also or next(asked, None)) is not None:
        raise AnswerRefused(facts.run, f"{why}; a model may not {verb} it. Ask a person to, or go on with another run")
