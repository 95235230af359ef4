"""Background tasks of a worker: they serve internal logs, such as triggers and hooks, and use no slot."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable


class TaskControl:
    """The worker as a background task sees it: when to stop, and how to rest. The task counts as busy until then."""

    def __init__(
        self, duties: dict[TaskControl, None], is_stopping: Callable[[], bool], rested: Callable[[], None]
    ) -> None:
        self._duties = duties
        self._is_stopping = is_stopping
        self._rested = rested
        self.bell = asyncio.Event()
        self.busy = True

    def __enter__(self) -> TaskControl:
        self._duties[self] = None
        return self

    def __exit__(self, *_: object) -> None:
        self._duties.pop(self, None)
        self._rested()

    @property
    def stopping(self) -> bool:
        """Whether the worker is about to stop; the task must return soon."""
        return self._is_stopping()

    async def rest(self, seconds: float) -> None:
        """Waits until the store notifies, the timeout expires, or the worker stops."""
        self.busy = False
        self._rested()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0 if self.stopping else seconds):
                await self.bell.wait()
        # A notification before the rest counts, so only its consumer clears it.
        self.bell.clear()
        self.busy = True
