"""Calls of tools: their outcomes, their threads, and the calls of this process that may still have effects, by run.

A release of a lease, a settlement and a compensation look for live calls first. Knows no store.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context, copy_context
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from killick.fork_safety import end_child

if TYPE_CHECKING:
    from killick.definitions.markers import ToolStep
    from killick.definitions.policy import Effect
    from killick.engine.steps.intention import Intent
    from killick.model.events import StepId

ABANDON_SECONDS: Final = 30.0
"""How long to wait for an abandoned call."""

Late = Callable[[Any, BaseException | None], object]
"""Records the outcome of a call whose execution is gone: its result, or its error."""


class LiveCall(msgspec.Struct, eq=False):
    """One call, from before it begins until it can have no more effects."""

    _calls: LiveCalls
    run: str
    step: StepId
    tool: str
    late: Late | None
    work: Work | None = None
    is_over: bool = False
    is_idle: bool = False

    def __str__(self) -> str:
        return f"{self.tool} at step {self.step}"

    def end(self) -> None:
        """It is over, from any thread. After the last one of its run the callbacks run, in this thread."""
        calls = self._calls
        with calls.mutex:
            if self.is_over:
                return
            self.is_over = True
            if self.is_idle or not calls.is_awaited_without(self):
                return
        calls.call_back(self.run)

    def mark_idle(self) -> None:
        """Its code awaits steps of the same run, and touches nothing until one of them is over."""
        with self._calls.mutex:
            if self.is_over or self.is_idle:
                return
            self.is_idle = True
            if not self._calls.is_awaited_without(self):
                return
        self._calls.call_back(self.run)

    def mark_running(self) -> None:
        """Mark its code as running again."""
        with self._calls.mutex:
            if self.is_idle and not self.is_over:
                self.is_idle = False
                self._calls.add(self)

    def record_late(self) -> None:
        """Record its outcome, where its thread ended after its execution."""
        if self.late is not None and self.work is not None and self.work.outcome is not None:
            late, self.late = self.late, None
            late(*self.work.outcome)


class LiveCalls:
    """The running calls by run, and the callbacks for the end of the last one of a run."""

    def __init__(self) -> None:
        self.mutex = threading.RLock()
        self._changed = threading.Condition(self.mutex)
        self._calls: dict[str, list[LiveCall]] = {}
        self._then: dict[str | None, list[Callable[[], object]]] = {}
        self._works: dict[tuple[str, StepId], Work] = {}
        self._ending = 0
        self._waiting = 0

    def begin(self, run: str, step: StepId, tool: str, late: Late | None = None) -> LiveCall:
        """A call that is about to begin."""
        call = LiveCall(self, run, step, tool, late)
        with self.mutex:
            self.add(call)
        return call

    def add(self, call: LiveCall) -> None:
        """Count a call as running. Called under the mutex."""
        if (calls := self._calls.get(call.run)) is None:
            self._calls[call.run] = [call]
        else:
            calls.append(call)

    def is_awaited_without(self, call: LiveCall) -> bool:
        """Count a call as running no longer. True: its end may be awaited, and `call_back` follows. Called under the
        mutex."""
        calls = self._calls[call.run]
        calls.remove(call)
        if not calls:
            del self._calls[call.run]
        if not (self._then or self._waiting):
            return False
        self._ending += 1
        return True

    def call_back(self, run: str) -> None:
        """After the last call of a run the callbacks run, in this thread."""
        with self.mutex:
            then = [] if run in self._calls else self._then.pop(run, [])
        try:
            for do in then:
                do()
        finally:
            with self.mutex:
                self._ending -= 1
                then = self._then.pop(None, []) if not self._calls and not self._ending else []
                self._changed.notify_all()
        for do in then:
            do()

    def of(self, run: str | None = None, step: StepId | None = None) -> Sequence[LiveCall]:
        """The calls of a run that live, or of all; of one step, where it is named."""
        with self.mutex:
            found = self._calls.values() if run is None else (self._calls.get(run, ()),)
            return [call for calls in found for call in calls if step is None or call.step == step]

    def then(self, run: str | None, do: Callable[[], object]) -> None:
        """Call back when no call of a run, or of any, is running: at once, or in the thread that ends the last one."""
        with self.mutex:
            waits = run in self._calls if run is not None else bool(self._calls or self._ending)
            if waits:
                self._then.setdefault(run, []).append(do)
        if not waits:
            do()

    def wait(self, seconds: float) -> bool:
        """Block until no call lives. False: the time was up first."""
        with self.mutex:
            self._waiting += 1
            try:
                return self._changed.wait_for(lambda: not self._calls and not self._ending, seconds)
            finally:
                self._waiting -= 1

    async def over(self, run: str, seconds: float) -> bool:
        """Wait on a loop until no call of a run lives. False: the time was up first."""
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        self.then(run, partial(call_on, loop, over.set))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await over.wait()
        return not self.of(run)

    # threads ----------------------------------------------------------------------------------

    def work_of(self, run: str, step: StepId) -> Work | None:
        """The thread that last ran a step, also when it is over and its outcome was not taken."""
        return self._works.get((run, step))

    def remember(self, run: str, step: StepId, work: Work) -> None:
        """Another execution of the run, in this process, finds the thread by its step."""
        self._works[run, step] = work

    def untaken(self, run: str) -> Sequence[LiveCall]:
        """The calls of a run whose threads ended, and whose steps have not ended: a closed loop takes no outcome."""
        works = [work for (of, _), work in list(self._works.items()) if of == run]
        return [work.live for work in works if work.live is not None and work.outcome is not None]

    def forget(self, run: str, step: StepId) -> None:
        """Forget the ended thread of a step that is over."""
        work = self._works.get((run, step))
        if work is not None and not work.alive:
            del self._works[run, step]


def call_on(loop: asyncio.AbstractEventLoop, do: Callable[..., object], *args: Any) -> None:
    """Call a function on a loop, from any thread. A closed loop has taken along the tasks that it concerns."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(do, *args)


class Work:
    """A blocking call on its way. `future` ends with its outcome; `alive` tells whether its thread is still in it."""

    __slots__ = ("alive", "call", "context", "future", "live", "loop", "outcome")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, context: Context, call: Callable[[], Any], live: LiveCall | None
    ) -> None:
        self.loop = loop
        self.context = context
        self.call = call
        self.alive = True
        self.live = live
        if live is not None:
            live.work = self
        self.outcome: tuple[Any, BaseException | None] | None = None
        self.future: asyncio.Future[Any] = loop.create_future()

    def run(self) -> None:
        process = os.getpid()
        try:
            result, error = self.context.run(self.call), None
        except BaseException as raised:
            result, error = None, raised
        if os.getpid() != process:
            end_child(error)
        self.call = lambda: None  # drops what the call refers to
        self.outcome = result, error
        try:
            self.loop.call_soon_threadsafe(self._end, result, error)
        except RuntimeError:
            self.alive = False  # a closed loop has taken along the task that waited
        if self.live is not None:
            with contextlib.suppress(Exception):
                self.live.end()

    def _end(self, result: Any, error: BaseException | None) -> None:
        self.alive = False
        if self.future.done():
            return
        if self.live is not None:
            self.live.end()  # its thread may not have come to it, and the run is not leased for a call that returned
        if error is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(error if not isinstance(error, StopIteration) else RuntimeError(str(error)))
            self.future.exception()  # retrieved here, because no task awaits an abandoned call


_KEPT: Final = 32
"""Idle threads that are kept for the next call."""


class Threads:
    """As many threads as there are blocking calls at once."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        self._mutex = threading.Lock()
        self._idle = 0
        self._closed = False

    def start(self, call: Callable[[], Any], context: Context, live: LiveCall | None = None) -> Work:
        """Begin a blocking call; its outcome comes to the running loop. A live call is over when its thread is."""
        work = Work(asyncio.get_running_loop(), context, call, live)
        with self._mutex:
            spare = self._idle > 0
            self._idle -= spare
        try:
            if not spare:
                threading.Thread(target=self._serve, name="killick-tool", daemon=True).start()
        except BaseException:
            if live is not None:
                live.end()  # there is no room for a thread: nothing began
            raise
        self._queue.put(work)
        return work

    async def call(
        self, call: Callable[[], Any], live: LiveCall | None = None, *, context: Context | None = None,
        timeout: float | None = None,
    ) -> Any:  # fmt: skip
        """The outcome of a blocking call, which is no attempt of a step."""
        applied = await waited_for(self.start(call, context or copy_context(), live), timeout)
        if applied.error is not None:
            raise applied.error
        return applied.value

    def close(self) -> None:
        """Let the idle threads go."""
        with self._mutex:
            self._closed = True
            idle, self._idle = self._idle, 0
        for _ in range(idle):
            self._queue.put(None)

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            work.run()
            del work
            with self._mutex:
                if self._closed or self._idle >= _KEPT:
                    return
                self._idle += 1


class Applied(msgspec.Struct, frozen=True):
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
