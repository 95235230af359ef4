"""What a worker does besides runs: it attends to Killick's own logs, which take no slot."""

from __future__ import annotations

from typing import Protocol


class Duty(Protocol):
    """How a worker lends itself to one of Killick's own logs."""

    @property
    def stopping(self) -> bool:
        """Whether the worker is about to stop: whoever attends returns soon."""
        ...

    async def rest(self, seconds: float) -> None:
        """Until the store rang, the time is up, or the worker stops."""
        ...
