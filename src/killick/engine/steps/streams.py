"""Streamed model replies: chunks reach the agent live, and are recorded as a whole after the last one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextvars import copy_context
from typing import Any, Final, cast

from killick.engine.approval.verdicts import model_of
from killick.engine.control.commands import overridden
from killick.engine.execution import Branch, Execution
from killick.engine.failures import describe
from killick.engine.replay import OVER
from killick.engine.steps.attempt import waited_for
from killick.engine.steps.intention import Intent
from killick.engine.steps.model_reply import join_chunks, rebuild, reply_kind, usage_of, wire
from killick.engine.steps.pipeline import classified, replayed
from killick.engine.steps.step_execution import StepExecution
from killick.engine.waits.open_wait import Intervened
from killick.errors import KillickError, StepFailed
from killick.log.writer import Entry
from killick.model import events as e
from killick.model.chunks import through_codec

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
                while (chunk := await self._next(blocking)) is not END:
                    self.chunks.append(chunk)
                    yield chunk
        except (KillickError, GeneratorExit):
            raise
        except Exception as error:
            failure = describe(error)
            # It is not retried: the agent has seen its first chunks.
            self.attempting.note_failed(failure, "unknown", None)
            raise StepFailed(self.attempting.step, self.attempting.intent.name, failure) from error

    async def _next(self, blocking: Any) -> Any:
        ex = self.attempting.ex
        applied = await waited_for(ex.engine.threads.start(lambda: next(blocking, END), copy_context()), None)
        if applied.error is not None:
            raise applied.error
        return applied.value

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
