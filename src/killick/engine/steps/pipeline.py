"""The step pipeline, the only path to effects: intend, record, fence, apply, record; attempt by attempt.

Reconciliation, deduplication and compensation are in `effects`. The chunks of a streamed reply reach the agent live.
They are recorded as a whole after the last one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, Final, TypeVar, cast

from killick.engine import parallel
from killick.engine.approval import approvals
from killick.engine.approval.verdicts import failed, model_of
from killick.engine.control.commands import overridden
from killick.engine.divergence import recorded_step, until_cancelled
from killick.engine.effects import reconcile
from killick.engine.execution import Branch, Execution
from killick.engine.failures import describe
from killick.engine.replay import OVER
from killick.engine.signals import Signal, Stopped
from killick.engine.steps.intention import Intent, restored
from killick.engine.steps.model_reply import join_chunks, rebuild, reply_kind, usage_of, wire
from killick.engine.steps.step_execution import CANCELLED, StepExecution
from killick.engine.waits.open_wait import Intervened
from killick.errors import KillickError, LogError, StepFailed, StoreError
from killick.log.writer import Entry
from killick.model import events as e
from killick.model.chunks import through_codec
from killick.model.facts import Step
from killick.model.failure import Failure
from killick.model.typed import convert

T = TypeVar("T")


async def execute_step(ex: Execution, branch: Branch, intent: Intent, step: e.StepId | None = None) -> Any:
    """Run a step: return its recorded outcome, or make its attempts."""
    step, past = await classified(ex, branch, intent, step)
    if past is not None and past.status in OVER:
        return await replayed(ex, branch, past, intent)
    ex.leave_for(intent.name, intent.sort)
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
    except (Stopped, asyncio.CancelledError) as error:
        if not isinstance(error, Stopped):
            await ex.raise_if_closing()
        if isinstance(error, Stopped) or not ex.is_outside:
            execution.given_up()
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


END: Final[Any] = object()
"""The end marker for a blocking reader."""


async def stream(ex: Execution, intent: Intent, *, branch: Branch | None = None) -> AsyncGenerator[Any]:
    """One step whose outcome is a stream of chunks. No other step may begin before its end."""
    branch = branch or ex.branch_here()
    ex.enter(branch, task=asyncio.current_task())
    inside, reading = True, None
    try:
        step, past = await classified(ex, branch, intent)
        if past is not None and past.status in OVER:
            source: Any = _listed(_chunks(await replayed(ex, branch, past, intent)))
        else:
            ex.leave_for(intent.name, intent.sort)
            await ex.await_turn()
            reading = _Reading(StepExecution(ex, branch, step, intent, past))
            try:
                source = reading.read(await reading.attempting.open_stream())
            except Intervened as done:
                source, reading = _listed(_chunks(await overridden(ex, intent.name, done))), None
        async for chunk in source:
            branch.streaming = True
            ex.turns.computing += 1
            inside = False
            yield chunk
            branch.streaming = False
            ex.turns.computing -= 1
            inside = True
        if reading is not None:
            await ex.recorded(reading.record())
    except GeneratorExit:
        # The agent stopped reading: the chunks so far are the reply, now and on replay.
        branch.streaming = False
        if not inside:
            ex.turns.computing -= 1
            inside = True
        if reading is not None and ex.signal is None:
            reading.record()
        raise
    finally:
        branch.streaming = False
        if inside:
            ex.turns.computing += 1


def _chunks(whole: Any) -> list[Any]:
    """A recorded reply in its chunks; an output that a person gave instead is one chunk."""
    if not isinstance(whole, dict) or "chunks" not in whole:
        return [whole]
    stored: list[dict[str, Any]] = cast("dict[str, Any]", whole)["chunks"]
    return [rebuild(each["reply"], each["chunk"]) if each.get("reply") else each["chunk"] for each in stored]


async def _listed(chunks: list[Any]) -> AsyncIterator[Any]:
    for chunk in chunks:
        yield chunk


class _Reading:
    """A stream that is being read: opening it is tried again like any call, reading it is not."""

    def __init__(self, attempting: StepExecution) -> None:
        self.attempting = attempting
        self.chunks: list[Any] = []

    async def read(self, source: Any) -> AsyncIterator[Any]:
        try:
            if hasattr(source, "__aiter__"):
                async for chunk in source:
                    self.chunks.append(chunk)
                    yield chunk
            else:
                blocking = iter(source)
                threads = self.attempting.ex.engine.threads
                while (chunk := await threads.call(lambda: next(blocking, END))) is not END:
                    self.chunks.append(chunk)
                    yield chunk
        except (KillickError, GeneratorExit):
            raise
        except Exception as error:
            failure = describe(error)
            # It is not retried: the agent has seen its first chunks.
            self.attempting.note_failed(failure, "unknown", None)
            raise StepFailed(self.attempting.step, self.attempting.intent.name, failure) from error

    def record(self) -> int:
        """The whole reply, as one chunk where chunks can be joined."""
        a = self.attempting
        joined = join_chunks(self.chunks)
        stored = [
            {"chunk": wire(chunk), "reply": kind} if (kind := reply_kind(chunk)) else {"chunk": chunk}
            for chunk in joined
        ]
        usage = a.ex.judge.priced(usage_of(self.chunks), model_of(a.intent))
        event = e.AttemptEnded(at=a.ex.now_us(), step=a.step, attempt=a.made, outcome="returned", usage=usage)
        return a.ex.write_behind(Entry(event, {"output": through_codec({"chunks": stored})}))
