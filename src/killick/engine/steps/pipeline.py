"""The step pipeline, the only path to effects: intend, record, fence, apply, record; attempt by attempt.

Reconciliation, deduplication and compensation are in `effects`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar, cast

from killick.engine import parallel
from killick.engine.approval import approvals
from killick.engine.approval.verdicts import failed
from killick.engine.control.commands import overridden
from killick.engine.divergence import recorded_step, until_cancelled
from killick.engine.effects import reconcile
from killick.engine.execution import Branch, Execution
from killick.engine.replay import OVER
from killick.engine.signals import Signal, Stopped
from killick.engine.steps.intention import Intent, restored
from killick.engine.steps.step_execution import CANCELLED, StepExecution
from killick.engine.waits.open_wait import Intervened
from killick.errors import LogError, StepFailed, StoreError
from killick.model import events as e
from killick.model.facts import Step
from killick.model.failure import Failure
from killick.model.typed import convert

T = TypeVar("T")


async def execute_step(ex: Execution, branch: Branch, intent: Intent, step: e.StepId | None = None) -> Any:
    """Run a step: return its recorded outcome, or make its attempts."""
    step, past = await classified(ex, branch, intent, step)
    if past is not None and past.status in OVER:
        return await replayed(ex, branch, past, intent)
    if not ex.is_solo:
        await ex.await_turn()
    attempting = StepExecution(ex, branch, step, intent, past)
    return await concluded(attempting, attempting.run())


async def classified(
    ex: Execution, branch: Branch, intent: Intent, step: e.StepId | None = None
) -> tuple[e.StepId, Step | None]:
    """The number of a step, once its arguments are known to be storable, and what is on record of it."""
    if ex.model is not None and ex.record.steps.get(branch.position) is None:
        intent.ask_instead(ex.model)
    intent.classify(step or branch.position, ex.log.secret_key)
    step = step or branch.number()
    return step, await recorded_step(ex, branch, step, intent.asked(), intent.recording)


async def concluded(execution: StepExecution, outcome: Coroutine[Any, Any, Any]) -> Any:
    """The outcome of a step that is being carried out; a person, or the end of a gather, may end it first."""
    ex, intent = execution.ex, execution.intent
    try:
        return await outcome
    except Stopped:
        execution.stopped()
        raise
    except Intervened as done:
        return restored(intent, await overridden(ex, intent.name, done), None, execution.step)
    finally:
        execution.branch.answer = execution.answer
        execution.over()


async def replayed(ex: Execution, branch: Branch, past: Step, intent: Intent) -> Any:
    """The recorded outcome of a step that is over, in its recorded order."""
    approvals.replayed(ex, branch, past)
    data = ex.record.data(past.output) if past.output else {}
    failure = recorded_failure(ex, past, data)
    await ex.await_turn(past.ended)
    if past.status != "done" and failure is not None and failure.kind == "cancelled":
        if branch.stopped is None and not ex.is_outside:
            await until_cancelled(ex, branch, past)
        ex.mark_replayed(past.ended)
        ex.refuse(branch)
    ex.mark_replayed(past.ended)
    if past.status == "done":
        value = restored(intent, data.get("output"), data.get("reply"), past.id)
        by_hand = past.output and isinstance(ex.record.event(past.output), e.StepOverridden)
        if not by_hand and not await reconcile.stays_confirmed(ex, branch, past, intent, value):
            raise StepFailed(past.id, past.name, reconcile.NOT_CONFIRMED)
        return value
    raise failed(past.id, past.name, failure)


def recorded_failure(ex: Execution, past: Step, data: Mapping[str, Any]) -> Failure | None:
    """The failure with which a step ended; None for one that is done."""
    if past.status == "done":
        return None
    if past.status == "cancelled":
        return CANCELLED
    event = ex.record.event(past.output) if past.output else None
    if isinstance(event, e.AttemptSettled):
        return reconcile.stopped(event.by, data.get("because"))
    found: Failure = convert(data["failure"], Failure, at="failure")
    return found


async def run_step(
    ex: Execution, do: Callable[..., Coroutine[Any, Any, T]], *args: Any, branch: Branch | None = None, **kwargs: Any
) -> T:
    """Run a step when it is awaited, in the branch whose code awaits it."""
    task = None if branch is None else asyncio.current_task()
    branch = branch or ex.branch_here()
    try:
        ex.enter(branch, task=task)
    except Signal:
        parallel.discard(args)
        await ex.refused_again()
        raise
    try:
        return await do(ex, branch, *args, **kwargs)
    except (StoreError, LogError) as error:
        raise ex.interrupted(error) from error
    except Intervened as done:
        return cast("T", await overridden(ex, "step", done))
    finally:
        branch.applying = None
        ex.turns.computing += 1
