"""The order in which the branches of a run continue. Recorded outcomes come first, in the order of their seqs."""

from __future__ import annotations

import asyncio
import heapq
from itertools import count
from typing import Any, Final

from killick.engine.signals import Signal

_RELUCTANT_SECONDS: Final = 0.05


class Turns:
    """The branches that wait for their turn, and the number of those that compute."""

    def __init__(self, *, is_threaded: bool) -> None:
        self.computing = 0
        self.is_threaded = is_threaded
        self._queue: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = count()
        self._timer: asyncio.TimerHandle | None = None
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
                future.set_result(None)
                break
        if self._queue and not self.is_threaded:
            self._insist()

    def _insist(self) -> None:
        """A branch that awaits something of its own seems to compute for ever: after a while the next has its turn."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_RELUCTANT_SECONDS, self._insisted)

    def _insisted(self) -> None:
        self._timer = None
        if self._queue and not self._is_closed:
            self._next()


def end_with(future: asyncio.Future[Any], signal: Signal) -> None:
    """End a wait with a signal, also if its task is gone."""
    future.set_exception(signal)
    future.exception()
