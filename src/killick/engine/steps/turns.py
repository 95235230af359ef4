"""The order in which the branches of a run continue. Recorded outcomes come first, in the order of their seqs."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Coroutine
from inspect import CORO_CREATED, getcoroutinestate
from itertools import count
from sys import getrefcount
from types import CodeType, FrameType
from typing import Any, Final

from killick.engine.signals import Signal
from killick.errors import KillickError

_RELUCTANT_SECONDS: Final = 0.05
_LOOP_TURNS: Final = 20
"""How often the loop turns before a branch counts as reluctant: a starved process finds its timer due at once."""


class Turns:
    """The branches that wait for their turn, and the number of those that compute."""

    def __init__(self, *, is_threaded: bool) -> None:
        self.computing = 0
        self.is_threaded = is_threaded
        self._queue: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = count()
        self._granted = 0
        self._timer: asyncio.Handle | None = None
        self._is_closed = False

    def __bool__(self) -> bool:
        return bool(self._queue)

    async def wait(self, seq: float) -> None:
        """Wait until no branch computes and no branch with a lower seq waits."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, (seq, next(self._order), future))
        if self.computing == 0:
            self._next()
        elif not self.is_threaded:
            self._insist()
        await future
        self.computing -= 1

    def pass_on(self) -> None:
        """Give the next branch its turn, if none computes."""
        if self._queue and not self.computing:
            self._next()

    def close(self, signal: Signal) -> None:
        """End every wait for a turn with a signal."""
        for _, _, future in self._queue:
            if not future.done():
                self.computing += 1
                end_with(future, signal)
        self._queue.clear()
        self._is_closed = True

    def _next(self) -> None:
        while self._queue:
            future = heapq.heappop(self._queue)[2]
            if not future.done():
                self.computing += 1
                self._granted += 1
                future.set_result(None)
                break
        if self._queue and not self.is_threaded:
            self._insist()

    def _insist(self) -> None:
        """A branch that awaits something of its own seems to compute for ever: after a while the next has its turn."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_RELUCTANT_SECONDS, self._insisted, self._granted, 0)

    def _insisted(self, granted: int, turns: int) -> None:
        self._timer = None
        if not self._queue or self._is_closed:
            return
        if granted != self._granted:
            self._insist()
        elif turns < _LOOP_TURNS:
            self._timer = asyncio.get_running_loop().call_soon(self._insisted, granted, turns + 1)
        else:
            self._next()


class TimedEvent:
    """An event for one waiter, whose wait has a limit. The end of a wait does not set it."""

    __slots__ = ("_is_set", "_waiter")

    def __init__(self) -> None:
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        if self._waiter is not None:
            _end(self._waiter)

    def clear(self) -> None:
        self._is_set = False

    async def wait(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        """Wait until it is set, or the time is up."""
        if self._is_set:
            return
        self._waiter = waiter = loop.create_future()
        timer = loop.call_later(seconds, _end, waiter)
        try:
            await waiter
        finally:
            self._waiter = None
            timer.cancel()


def _end(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class InertSteps:
    """The steps that code requested and has not awaited. Nothing happens before that, so none may be forgotten."""

    def __init__(self) -> None:
        self._steps: list[tuple[Any, str, CodeType, int]] = []

    def add(self, step: Coroutine[Any, Any, Any], call: str, caller: FrameType) -> None:
        """Remember a step until it is awaited. Raise for an earlier one that no code can await any more."""
        if len(self._steps) == 1 and self._steps[0][0].cr_frame is None:  # the usual case: it was awaited, and is over
            self._steps.clear()
        elif self._steps and (not _is_inert(self._steps[-1][0]) or getrefcount(self._steps[-1][0]) == _ALONE):
            try:
                self.refuse_forgotten()
            except KillickError:
                step.close()
                raise
        self._steps.append((step, call, caller.f_code, caller.f_lasti))

    def refuse_forgotten(self, *, at_end: bool = False) -> None:
        """Raise for a step that is never awaited: no other code refers to it, or all code has ended."""
        self._steps = [each for each in self._steps if _is_inert(each[0])]
        forgotten = [each for each in self._steps if at_end or getrefcount(each[0]) == _ALONE]
        for each in forgotten:
            each[0].close()
        for _, call, code, at in forgotten:
            line = next(line for start, end, line in code.co_lines() if start <= at < end)
            problem = f"{code.co_filename}:{line}: {call} was never awaited, and nothing was called"
            raise KillickError(f"{problem}; write `await {call}`")

    def named_in(self, error: BaseException) -> BaseException:
        """An error of the agent's code; where that took a step for its result, the message names the step."""
        if isinstance(error, TypeError | AttributeError) and "coroutine" in str(error):
            try:
                self.refuse_forgotten(at_end=True)
            except KillickError as forgotten:
                error.args = (f"{error}; {forgotten}",)
        return error

    def close(self) -> None:
        """Closes the steps that no code can await any more."""
        for step, *_ in filter(lambda each: _is_inert(each[0]), self._steps):
            step.close()


_ALONE: Final = 2
"""The references to a step besides those of the code: the list of inert steps, and the call that counts."""


def _is_inert(step: Coroutine[Any, Any, Any]) -> bool:
    return getcoroutinestate(step) == CORO_CREATED


def end_with(future: asyncio.Future[Any] | None, signal: Signal) -> None:
    """End a wait that is not over with a signal, also if its task is gone."""
    if future is not None and not future.done():
        future.set_exception(signal)
        future.exception()
