"""An agent's own records between its calls: decisions, plans, notes, context changes, and recorded nondeterminism."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from killick.contracts.policy_input import UPDATE
from killick.engine.approval.contracts_in_force import judge_change
from killick.engine.approval.verdicts import failed, rejection, stop_looping
from killick.engine.divergence import note_drift, recorded_step, refuse_after_end, replay_outcome
from killick.engine.execution import Branch, Execution
from killick.engine.replay import RequestedStep
from killick.engine.waits.questions import EPOCH
from killick.errors import StepFailed
from killick.log.writer import Entry
from killick.model import events as e
from killick.model.chunks import through_codec
from killick.model.codec import digest
from killick.model.failure import Failure
from killick.model.typed import convert


async def decided(
    ex: Execution, branch: Branch, question: str, choice: Any, options: Sequence[Any] | None, because: str | None,
    by: str,
) -> Any:  # fmt: skip
    step = branch.number()
    decision = through_codec({"question": question, "options": options, "choice": choice, "because": because})
    claim = RequestedStep("decision", "decision")
    past = await recorded_step(ex, branch, step, claim, decision, f"decision {question!r}")
    if past is None:
        await ex.await_turn()
        await ex.recorded(ex.write_behind(Entry(e.DecisionMade(at=ex.now_us(), step=step, by=by), decision)))
        return choice if isinstance(choice, str | int | float | bool | None) else _as(choice, decision["choice"])
    recorded = ex.record.data(past.output)
    if recorded != decision:
        note_drift(ex, step, e.to_text(digest(decision, secret_key=ex.log.secret_key)), recorded, decision)
    await replay_outcome(ex, branch, past)
    return _as(choice, recorded["choice"])


def _as(like: Any, value: Any) -> Any:
    """A recorded choice as the type that the code's own one has."""
    return value if type(like) in (dict, list, tuple, type(None)) else convert(value, type(like), at="choice")


async def plan(ex: Execution, branch: Branch, stages: tuple[str, ...]) -> None:
    await _noted(ex, branch, "plan.made", Entry(e.PlanMade(at=ex.now_us(), stages=stages, step=branch.position)))


async def at(ex: Execution, branch: Branch, stage: str) -> None:
    await _noted(ex, branch, "plan.reached", Entry(e.PlanReached(at=ex.now_us(), stage=stage, step=branch.position)))


async def note(ex: Execution, branch: Branch, note: Any) -> None:
    await _noted(ex, branch, "note.made", Entry(e.NoteMade(at=ex.now_us(), step=branch.position), {"note": note}))


async def _noted(ex: Execution, branch: Branch, kind: str, entry: Entry) -> None:
    """Something between two steps goes on record once."""
    if ex.record.take(branch.position, kind) is None:
        await refuse_after_end(ex, branch)
        ex.write_behind(entry)


async def update(ex: Execution, branch: Branch, changes: Mapping[str, Any]) -> None:
    seen = ex.record.take(branch.position, "context.changed", "context.refused")
    saw = ex.context.version
    if seen is not None:
        recorded = ex.record.event(seen)
        if isinstance(recorded, e.ContextRefused):
            raise _refused(branch, ex.record.data(seen))
        ex.context.update(changes)
        ex.context.version = recorded.version
        return
    await refuse_after_end(ex, branch)
    version = ex.log.fold.facts.context_version
    verdict = judge_change(ex.judge, through_codec(dict(changes)), (), by="agent", step=branch.position)
    if verdict is not None and verdict.ruling.ruling == "reject":
        values = {"set": through_codec(dict(changes)), "failure": rejection(verdict.ruling, verdict.contract)}
        refused = e.ContextRefused(
            at=ex.now_us(), version=version, saw=saw, step=branch.position, verdict=verdict.event
        )
        ex.write_behind(*ex.judge.unbound(), Entry(refused, {**values, **verdict.rests_on}))
        stop_looping(ex)
        raise _refused(branch, values)
    kept = ex.context.update(changes)
    judged, rests_on, bound = (
        (None, {}, []) if verdict is None else (verdict.event, verdict.rests_on, ex.judge.unbound())
    )
    event = e.ContextChanged(at=ex.now_us(), version=version + 1, saw=saw, step=branch.position, verdict=judged)
    ex.write_behind(*bound, Entry(event, {"set": kept, "unset": [], **rests_on}))
    ex.context.version = version + 1


def _refused(branch: Branch, data: Mapping[str, Any]) -> StepFailed:
    return failed(branch.position, UPDATE, convert(data["failure"], Failure, at="failure"))


# recorded nondeterminism: drawn once, and replayed -------------------------------------------------


def _drawn(ex: Execution, branch: Branch, name: str, draw: Callable[[], Any]) -> Any:
    seq = ex.record.take(branch.position, f"fact.drawn:{name}")
    if seq is not None:
        return ex.record.data(seq)["value"]
    value = draw()
    if not branch.may_be_stopped:
        ex.write_behind(Entry(e.FactDrawn(at=ex.now_us(), name=name, step=branch.position), {"value": value}))
    return value


def now(ex: Execution, branch: Branch) -> datetime:
    us: int = _drawn(ex, branch, "now", ex.now_us)
    return EPOCH + timedelta(microseconds=us)


def uuid(ex: Execution, branch: Branch) -> UUID:
    drawn: UUID = _drawn(ex, branch, "uuid", lambda: UUID(bytes=ex.engine.ids.key()[:16], version=4))
    return drawn


def random(ex: Execution, branch: Branch) -> float:
    drawn: float = _drawn(ex, branch, "random", ex.engine.ids.fraction)
    return drawn


def patched(ex: Execution, branch: Branch, name: str) -> bool:
    """The first answer counts for the whole run: code before and after must agree on which way it went.

    Each holder marks the place before it makes the next step. A mark of a holder that died before that step counts no
    more once another holder's code, without this guard, made the step. A branch that was stopped here gave no answer.
    """
    known = ex.patches.get(name)
    if known is None:
        mark = None
        while (found := ex.record.take(branch.position, f"fact.drawn:patched:{name}")) is not None:
            mark = found
        if mark is None and branch.may_be_stopped:
            return True
        if not branch.replaying:
            ex.write_behind(Entry(e.FactDrawn(at=ex.now_us(), name=f"patched:{name}", step=branch.position)))
            known = True
        else:
            known = mark is not None and not ex.record.was_taken_between(mark, branch.position)
        ex.patches[name] = known
    return known
