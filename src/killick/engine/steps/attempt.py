"""One attempt at a call that may block: its outcome, and the thread that may still run."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from killick.engine.steps.live_calls import Work

if TYPE_CHECKING:
    from killick.definitions.markers import ToolStep
    from killick.definitions.policy import Effect
    from killick.engine.steps.intention import Intent


class Applied(NamedTuple):
    """The outcome of one attempt: a value or an error; and the thread, where one may still run."""

    value: Any = None
    error: BaseException | None = None
    work: Work | None = None
    timed_out: bool = False
    untouched: bool = False
    ended: tuple[int, Any] | None = None
    """Where its outcome is on record already, and the value as code sees it."""


class Untouched(Exception):
    """An attempt was cancelled after it was recorded and before anything was touched."""


class ToolInterceptor(Protocol):
    """Intercepts calls of tools where a run is only rehearsed or replayed.

    `real` makes the call that would happen without it.
    """

    async def apply(self, intent: Intent, place: ToolStep, real: Callable[[], Awaitable[Applied]]) -> Applied:
        """One attempt of a tool, a model call, or an undoing."""
        ...

    async def call_hook(self, fn: Callable[..., Any], effect: Effect, real: Callable[[], Awaitable[Any]]) -> Any:
        """The result of a reconciler or a confirmation."""
        ...


async def waited_for(work: Work, timeout: float | None) -> Applied:
    """The outcome of a blocking call. After a timeout or a cancellation its thread is abandoned, and keeps running."""
    try:
        await asyncio.wait({work.future}, timeout=timeout)
    except asyncio.CancelledError as error:
        return Applied(error=error, work=work if work.alive else None)
    if not work.future.done():
        return Applied(error=TimeoutError(f"still running after {timeout:g} s"), work=work, timed_out=True)
    if (failed := work.future.exception()) is not None:
        return Applied(error=failed)
    value = work.future.result()
    if inspect.isawaitable(value):
        try:
            async with asyncio.timeout(timeout):
                return Applied(await value)
        except BaseException as raised:
            return Applied(error=raised, timed_out=isinstance(raised, TimeoutError))
    return Applied(value)


async def outlasted(work: Work, seconds: float) -> Applied:
    """The outcome of a blocking call that was cancelled: wait for its thread, also if cancelled again."""
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    while not work.future.done() and (left := until - loop.time()) > 0:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({work.future}, timeout=left)
    if not work.future.done():
        return Applied(error=asyncio.CancelledError(), work=work)
    return await waited_for(work, 0)
