"""How the client's methods are called: blocking, or awaited with `.soon`, with no code written twice."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from killick.errors import KillickError

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
B = TypeVar("B", bound="Blocking")


class Blocking(Protocol):
    """An object with its own event loop, which runs coroutines for blocking callers."""

    def blocking(self, work: Coroutine[Any, Any, R]) -> R: ...


class Both(Generic[S, P, R]):
    """A method that blocks, with an awaitable form that does not: `kd.answer(…)` and `await kd.answer.soon(…)`."""

    def __init__(self, method: Callable[Concatenate[S, P], R]) -> None:
        self._method = method
        self.__doc__ = method.__doc__

    def __get__(self, instance: S, owner: type[S] | None = None) -> Bound[P, R]:
        method = self._method

        def bound(*args: P.args, **kwargs: P.kwargs) -> R:
            return method(instance, *args, **kwargs)

        return Bound(bound)


class Bound(Generic[P, R]):
    """A method of one client."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[P, R]) -> None:
        self._call = call

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._call(*args, **kwargs)

    async def soon(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """The same, without blocking the loop."""
        return await asyncio.to_thread(self._call, *args, **kwargs)


class OnLoop(Generic[B, P, R]):
    """A method that runs on a loop: the client's own for callers that block, the caller's own with `.soon`."""

    def __init__(self, method: Callable[Concatenate[B, P], Coroutine[Any, Any, R]]) -> None:
        self._method = method
        self.__doc__ = method.__doc__

    def __get__(self, instance: B, owner: type[B] | None = None) -> BoundOnLoop[B, P, R]:
        return BoundOnLoop(instance, self._method)


class BoundOnLoop(Generic[B, P, R]):
    """Such a method of one client."""

    __slots__ = ("_client", "_method")

    def __init__(self, client: B, method: Callable[Concatenate[B, P], Coroutine[Any, Any, R]]) -> None:
        self._client = client
        self._method = method

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        work = self._method(self._client, *args, **kwargs)
        return self._client.blocking(work)

    async def soon(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """The same, on the caller's own loop."""
        return await self._method(self._client, *args, **kwargs)


class OwnLoop:
    """A loop in a thread of its own, for callers that block."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="killick-loop", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        if threading.current_thread() is self._thread:
            work.close()
            raise KillickError("a blocking call of the client inside an agent; use its awaitable form, .soon")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            # Interrupted by a person: the run is told, and lets its lease go, before we leave.
            if not future.done():
                future.cancel()
                with contextlib.suppress(BaseException):
                    asyncio.run_coroutine_threadsafe(asyncio.sleep(0.05), self._loop).result(1)
            raise

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        try:
            self.run(last)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)
            if not self._thread.is_alive():
                self._loop.close()
