"""Reads the status of a run for many requests at once. Keeps none: each request sees a read that began after it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from killick.store.protocol import Store
    from killick.store.records import RunStatus

_Read = asyncio.Task["RunStatus | None"]


class StatusReader:
    """One read of the store at a time, off the loop. Requests that come during one share the next."""

    def __init__(self, store: Store, run: str) -> None:
        self._store = store
        self._run = run
        self._next: _Read | None = None
        self._last: _Read | None = None

    async def read(self) -> RunStatus | None:
        """The status of the run; None where there is no such run."""
        if self._next is None or self._next.done():  # done: its loop was closed
            self._next = asyncio.ensure_future(self._read(self._last))
        return await asyncio.shield(self._next)

    async def _read(self, last: _Read | None) -> RunStatus | None:
        if last is not None and not last.done():
            await asyncio.wait([last])
        self._last, self._next = self._next, None
        return (await asyncio.to_thread(self._store.statuses, (self._run,))).get(self._run)
