"""Coalescing: equal questions that come at once are answered together. Caches nothing.

Of equal questions one is answered at a time. Those that come meanwhile share the next answer, which is begun after all
of them: no answer is older than its question, and a crowd costs as much as one caller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from killick.store.protocol import Store
    from killick.store.records import RunStatus

T = TypeVar("T")


class Coalescer(Generic[T]):
    """The questions that are being answered, all on one loop."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, asyncio.Task[T]] = {}
        self._making: dict[Hashable, asyncio.Task[T]] = {}

    async def shared(self, asked: Hashable, make: Callable[[], Awaitable[T]]) -> T:
        """The answer to a question, which is begun after this call. A caller that is cancelled cancels no other."""
        waiting = self._waiting.get(asked)
        if waiting is None or waiting.done():  # done: its loop was closed
            waiting = self._waiting[asked] = asyncio.create_task(self._answer(asked, make))
        return await asyncio.shield(waiting)

    async def _answer(self, asked: Hashable, make: Callable[[], Awaitable[T]]) -> T:
        if (before := self._making.get(asked)) is not None:
            await asyncio.wait([before])
        self._making[asked] = self._waiting.pop(asked)  # who asks from now on gets the next one
        try:
            return await make()
        finally:
            del self._making[asked]


class StatusReader:
    """Reads the statuses of runs, off the loop: in one read for all requests that came before it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._runs: set[str] = set()
        self._reads = Coalescer[dict[str, "RunStatus"]]()

    async def read(self, run: str) -> dict[str, RunStatus]:
        """The statuses of some runs, and of this one if it exists."""
        self._runs.add(run)
        return await self._reads.shared("", self._read)

    async def _read(self) -> dict[str, RunStatus]:
        runs, self._runs = tuple(self._runs), set()
        return await asyncio.to_thread(self._store.statuses, runs)
