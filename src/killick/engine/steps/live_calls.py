"""Calls of this process that may still have effects, by run: threads, child processes, coroutines.

A release of a lease, a settlement and a compensation check here first. Knows no store.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from contextvars import Context
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from killick.fork_safety import end_child

if TYPE_CHECKING:
    from killick.model.events import StepId

ABANDON_SECONDS: Final = 30.0
"""How long to wait for an abandoned call."""

Late = Callable[[Any, BaseException | None], object]
"""Records the outcome of a call whose execution is gone: its result, or its error."""


class LiveCall:
    """One call, from before it begins until it can have no more effects."""

    __slots__ = ("_calls", "is_over", "is_resting", "late", "run", "step", "tool", "work")

    def __init__(self, calls: LiveCalls, run: str, step: StepId, tool: str, late: Late | None) -> None:
        self._calls = calls
        self.run = run
        self.step = step
        self.tool = tool
        self.late = late
        self.work: Work | None = None
        self.is_over = False
        self.is_resting = False

    def __str__(self) -> str:
        return f"{self.tool} at step {self.step}"

    def end(self) -> None:
        """It is over. From any thread."""
        self._calls.end(self)

    def mark_idle(self) -> None:
        """Its code awaits steps of the same run, and touches nothing until one of them is over."""
        self._calls.mark_idle(self)

    def mark_running(self) -> None:
        """Mark its code as running again."""
        self._calls.mark_running(self)

    def record_late(self) -> None:
        """Record its outcome, where its thread ended after its execution."""
        if self.late is not None and self.work is not None and self.work.outcome is not None:
            late, self.late = self.late, None
            late(*self.work.outcome)


class LiveCalls:
    """The running calls by run, and the callbacks for the end of the last one of a run."""

    def __init__(self) -> None:
        self._mutex = threading.RLock()
        self._changed = threading.Condition(self._mutex)
        self._calls: dict[str, list[LiveCall]] = {}
        self._then: dict[str | None, list[Callable[[], object]]] = {}
        self._works: dict[tuple[str, StepId], Work] = {}
        self._ending = 0
        self._waiting = 0

    def begin(self, run: str, step: StepId, tool: str, late: Late | None = None) -> LiveCall:
        """A call that is about to begin."""
        call = LiveCall(self, run, step, tool, late)
        with self._mutex:
            self._calls.setdefault(run, []).append(call)
        return call

    def end(self, call: LiveCall) -> None:
        """End a call. After the last one of its run the callbacks run, in this thread."""
        with self._mutex:
            if call.is_over:
                return
            call.is_over = True
            if call.is_resting:
                return
        self._leave(call)

    def mark_idle(self, call: LiveCall) -> None:
        """Mark a call as idle: it awaits steps of the same run and touches nothing else."""
        with self._mutex:
            if call.is_over or call.is_resting:
                return
            call.is_resting = True
        self._leave(call)

    def mark_running(self, call: LiveCall) -> None:
        """Mark a resting call as running again."""
        with self._mutex:
            if call.is_resting and not call.is_over:
                call.is_resting = False
                self._calls.setdefault(call.run, []).append(call)

    def _leave(self, call: LiveCall) -> None:
        with self._mutex:
            calls = self._calls[call.run]
            calls.remove(call)
            if not calls:
                del self._calls[call.run]
            if not (self._then or self._waiting):
                return
            then = [] if calls else self._then.pop(call.run, [])
            self._ending += 1
        try:
            for do in then:
                do()
        finally:
            with self._mutex:
                self._ending -= 1
                then = self._then.pop(None, []) if not self._calls and not self._ending else []
                self._changed.notify_all()
        for do in then:
            do()

    def of(self, run: str | None = None, step: StepId | None = None) -> Sequence[LiveCall]:
        """The calls of a run that live, or of all; of one step, where it is named."""
        with self._mutex:
            found = self._calls.values() if run is None else (self._calls.get(run, ()),)
            return [call for calls in found for call in calls if step is None or call.step == step]

    def then(self, run: str | None, do: Callable[[], object]) -> None:
        """Call back when no call of a run, or of any, is running: at once, or in the thread that ends the last one."""
        with self._mutex:
            waits = run in self._calls if run is not None else bool(self._calls or self._ending)
            if waits:
                self._then.setdefault(run, []).append(do)
        if not waits:
            do()

    def wait(self, seconds: float) -> bool:
        """Block until no call lives. False: the time was up first."""
        with self._mutex:
            self._waiting += 1
            try:
                return self._changed.wait_for(lambda: not self._calls and not self._ending, seconds)
            finally:
                self._waiting -= 1

    async def over(self, run: str, seconds: float) -> bool:
        """Wait on a loop until no call of a run lives. False: the time was up first."""
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        self.then(run, partial(_set, loop, over))
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


def _set(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    with contextlib.suppress(RuntimeError):  # a closed loop has taken along the task that waited
        loop.call_soon_threadsafe(event.set)


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
        self.call = _nothing
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


def _nothing() -> None:
    pass
