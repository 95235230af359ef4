"""Methods that are written once: a blocking client calls them, an async client awaits them.

Also the event loop of blocking callers: one for each process, in a daemon thread.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import warnings
from collections.abc import Callable, Coroutine
from functools import wraps
from types import MethodType
from typing import TYPE_CHECKING, Any, Concatenate, Final, Generic, ParamSpec, TypeVar, overload

from killick.errors import KillickError, RunError
from killick.fork_safety import ForkedMutex, keep_inherited, register_for_forks
from killick.logger import get_logger

if TYPE_CHECKING:
    import asyncio  # elsewhere imported on use: a command that only searches needs no loop

logger: Final = get_logger("killick")

P = ParamSpec("P")
R = TypeVar("R")
B = TypeVar("B", covariant=True)
A = TypeVar("A", covariant=True)
C = TypeVar("C", covariant=True)

_END_SECONDS: Final = 5.0
"""How long the tasks of a loop that stops may take to end."""


class Blocks:
    """An object whose methods block. Its `_blocking` runs a coroutine on a loop."""

    _is_warned = False

    @property
    def _client(self) -> Any:
        return self

    def _warn_in_loop(self) -> None:
        """Warns a caller once that blocks its own running loop. A notebook always has one, so it is not warned."""
        if "asyncio" not in sys.modules:
            return
        import asyncio

        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return
        if not self._is_warned and not isinstance(threading.current_thread(), _Loop) and not _is_notebook():
            self._is_warned = True
            message = "a blocking client holds up the running event loop; use killick.open_async, or kd.as_async()"
            warnings.warn(message, RuntimeWarning, stacklevel=3)


class Awaits:
    """An object whose methods are awaited."""


class Group(Generic[C]):
    """Methods of a client under a name of their own, as in `kd.store.verify()`. They block or are awaited as its own;
    what blocks warns once for the client and all of its groups."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._client!r}>"


class Twin(Generic[B, A]):
    """A method of both kinds: typed B where it blocks, A where it is awaited."""

    def __init__(self, blocking: Callable[..., Any], awaited: Callable[..., Any]) -> None:
        self._blocking = blocking
        self._awaited = awaited
        self.__doc__ = blocking.__doc__

    @overload
    def __get__(self, instance: Blocks | Group[Blocks], owner: type[Any] | None = None) -> B: ...
    @overload
    def __get__(self, instance: Awaits | Group[Awaits], owner: type[Any] | None = None) -> A: ...
    def __get__(self, instance: Any, owner: type[Any] | None = None) -> Any:
        client: Any = getattr(instance, "_client", instance)
        awaits = isinstance(client, Awaits) or (owner is not None and issubclass(owner, Awaits))
        function = self._awaited if awaits else self._blocking
        return function if instance is None else MethodType(function, instance)


class InThread(Twin[Callable[P, R], Callable[P, Coroutine[Any, Any, R]]]):
    """A method with a plain body. An async client calls it in a thread."""

    def __init__(self, body: Callable[Concatenate[Any, P], R]) -> None:
        @wraps(body)
        def blocking(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
            self._client._warn_in_loop()
            return body(self, *args, **kwargs)

        @wraps(body)
        async def awaited(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
            import asyncio

            return await asyncio.to_thread(body, self, *args, **kwargs)

        super().__init__(blocking, awaited)

    def awaits(
        self, body: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]
    ) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]:
        """Gives async clients a body of their own in place of the thread."""
        self._awaited = wraps(self._blocking)(body)
        return body


class OnLoop(Twin[Callable[P, R], Callable[P, Coroutine[Any, Any, R]]]):
    """A method whose body is a coroutine. It runs on the caller's loop, or for a blocking client on the loop thread."""

    def __init__(self, body: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]) -> None:
        @wraps(body)
        def blocking(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
            self._client._warn_in_loop()
            try:
                outcome: R = self._client._blocking(body(self, *args, **kwargs))
            except RunError as error:
                raise error.with_traceback(None)  # noqa: B904  the frames of our loop say nothing of the run
            return outcome

        super().__init__(blocking, body)


class _Loop(threading.Thread):
    """Serves an event loop."""

    def __init__(self) -> None:
        import asyncio

        super().__init__(name="killick-loop", daemon=True)
        self.loop = asyncio.new_event_loop()

    def run(self) -> None:
        import asyncio

        asyncio.set_event_loop(self.loop)
        while True:
            try:
                self.loop.run_forever()
                return
            except BaseException:  # SystemExit of a task: its caller gets it, and the loop goes on for the others
                logger.exception("the loop of blocking callers was interrupted")


class LoopThread(ForkedMutex):
    """An event loop in a daemon thread, which starts with its first work."""

    def __init__(self) -> None:
        self._thread: _Loop | None = None
        self._mutex = threading.Lock()
        register_for_forks(self)

    def after_fork_in_child(self) -> None:
        """Forgets the parent's loop: its thread is not in the child."""
        keep_inherited(self._thread)
        self._thread = None

    @property
    def is_started(self) -> bool:
        return self._thread is not None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        with self._mutex:
            if self._thread is None:
                self._thread = _Loop()
                self._thread.start()
            return self._thread.loop

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Runs a coroutine on the loop and waits for it."""
        import asyncio

        loop = self.loop
        if threading.current_thread() is self._thread:
            work.close()
            raise KillickError("a blocking call of a client inside an agent; await the same call of kd.as_async()")
        future = asyncio.run_coroutine_threadsafe(work, loop)
        try:
            return future.result()
        except BaseException:
            # Interrupted by a person: the run is cancelled, and releases its lease, before the caller leaves.
            if not future.done():
                future.cancel()
                with contextlib.suppress(BaseException):
                    asyncio.run_coroutine_threadsafe(asyncio.sleep(0.05), loop).result(1)
            raise

    def close(self) -> None:
        """Ends the tasks on the loop, and stops it. The next call starts another."""
        with self._mutex:
            thread, self._thread = self._thread, None
        if thread is not None:
            import asyncio

            with contextlib.suppress(Exception):
                asyncio.run_coroutine_threadsafe(_cancel_others(), thread.loop).result(_END_SECONDS)
            thread.loop.call_soon_threadsafe(thread.loop.stop)
            thread.join(10)
            if not thread.is_alive():
                thread.loop.close()


async def _cancel_others() -> None:
    """Cancels the tasks of a loop that is about to stop, as `asyncio.run` does."""
    import asyncio

    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()


LOOP_THREAD: Final = LoopThread()
"""The loop of all blocking clients of this process, so that objects that an agent binds to it outlive one client."""

atexit.register(LOOP_THREAD.close)


def run_in_own_loop(work: Coroutine[Any, Any, R]) -> R:
    """Runs a coroutine on a loop of its own, so that code that does not end holds up no other run."""
    with contextlib.closing(LoopThread()) as apart:
        return apart.run(work)


def _is_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    return ipython is not None and ipython.get_ipython() is not None
