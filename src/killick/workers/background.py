"""Background tasks of a worker: they serve internal logs, such as triggers and hooks, and use no slot."""

from __future__ import annotations

from typing import Protocol


class TaskControl(Protocol):
    """The worker as a background task sees it: when to stop, and how to rest."""

    @property
    def stopping(self) -> bool:
        """Whether the worker is about to stop; the task must return soon."""
        ...

    async def rest(self, seconds: float) -> None:
        """Waits until the store notifies, the timeout expires, or the worker stops."""
        ...
