"""Reads the statuses of runs for many requests at once. Keeps none: each request sees a read that began after it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from killick.store.protocol import Store
    from killick.store.records import RunStatus

_Read = asyncio.Task["dict[str, RunStatus]"]


class StatusReader:
    """One read of the store at a time, off the loop. Requests that come during one share the next."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._runs: set[str] = set()
        self._next: _Read | None = None
        self._last: _Read | None = None

    async def read(self, run: str) -> dict[str, RunStatus]:
        """The statuses of some runs, and of this one if it exists."""
        if self._next is None or self._next.done():  # done: its loop was closed
            self._next = asyncio.ensure_future(self._read(self._last))
        self._runs.add(run)
        return await asyncio.shield(self._next)

    async def _read(self, last: _Read | None) -> dict[str, RunStatus]:
        if last is not None and not last.done():
            await asyncio.wait([last])
        runs, self._runs = tuple(self._runs), set()
        self._last, self._next = self._next, None
        return await asyncio.to_thread(self._store.statuses, runs)
