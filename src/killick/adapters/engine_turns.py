"""A turn: one run, driven until it has ended, waits, or is asked to leave. What an engine calls, and all it is told.

Knows no engine. What it gives back is small and plain, however much the run has on record.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from killick.client.client import Client
from killick.engine import renewals
from killick.engine.executor import ClaimedRun
from killick.engine.leases import LEASE_SECONDS
from killick.engine.outcome import RunOutcome, ended
from killick.errors import RunBusy
from killick.model.codec import plain
from killick.store.protocol import ENDED, RunRow

SIT_SECONDS: Final = 0.5
"""Waits that are shorter than this are sat out: an engine's timer would cost more than it saves."""

SLICE_SECONDS: Final = 600.0
"""How long a run goes on before it is given back to the engine at its next step, which may put it elsewhere."""

RESULT_BYTES_MAX: Final = 65_536
"""Results that are larger than this stay in the store, and the engine is told only that there is one."""


@dataclass(frozen=True)
class TurnOutcome:
    """How a run stands after a turn, as plain data that every engine can keep."""

    run: str
    status: str
    wait_seconds: float | None = None
    """Until it is to go on by itself: 0 is at once, None is not before something comes for it."""
    result: Any = None
    whole: bool = True
    """Whether `result` is the result; one that is too large for an engine stays in the store."""
    failure: str | None = None

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED


class Turn:
    """One turn of a run, and of what it is renewed as."""

    def __init__(
        self,
        client: Client,
        run: str,
        *,
        lease_seconds: float = LEASE_SECONDS,
        slice_seconds: float = SLICE_SECONDS,
    ) -> None:
        self._client = client
        self._run = renewals.latest(client.log, run)
        self._lease_seconds = lease_seconds
        self._slice_seconds = slice_seconds
        self._leaving = asyncio.Event()

    def leave(self) -> None:
        """Give the run back at its next step; what is under way is finished first."""
        self._leaving.set()
        self._client.executor().leave(self._run)

    async def take(self) -> TurnOutcome:
        """Drive the run. RunBusy while somebody else is at it, RunUnknown if there is none."""
        sliced = asyncio.get_running_loop().call_later(self._slice_seconds, self.leave)
        try:
            standing = TurnOutcome(self._run, "running", 0.0)
            while not self._leaving.is_set():
                standing = self._stands(await self._advanced())
                seconds = standing.wait_seconds
                if seconds is None or seconds > SIT_SECONDS:
                    break
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._client.clock.nap_seconds(seconds)):
                        await self._leaving.wait()
            return standing
        finally:
            sliced.cancel()

    async def _advanced(self) -> RunOutcome:
        """As the client's own `advance`, but children are runs for the engine, like all others."""
        client, run = self._client, self._run
        row = client.store.index(run)
        if row is not None and row.status in ENDED:
            return ended(client.engine, run)
        executor, holder = client.executor(), client.engine.holder
        if executor.notify(run):
            raise RunBusy(run, holder=holder)
        left = client.log.head(run)
        since = client.clock.monotonic()
        head = client.store.lease(run, holder, seconds=self._lease_seconds)
        claim = ClaimedRun(head, since, self._lease_seconds, left.holder, left.lease_until_us)
        try:
            return await executor.advance(run, claim=claim)
        except BaseException:
            client.engine.let_go(run, head.epoch, left=True)
            raise

    def _stands(self, advanced: RunOutcome) -> TurnOutcome:
        if advanced.renewed_as is not None:
            self._run = advanced.renewed_as
            return TurnOutcome(self._run, "running", 0.0)
        if advanced.has_ended:
            return _ended(advanced)
        if advanced.left:
            return TurnOutcome(self._run, advanced.status, 0.0)
        if advanced.status == "paused":
            return TurnOutcome(self._run, advanced.status)
        # What came in the last moment is in the index already, and not in what the run knew when it parked.
        row = self._client.store.index(self._run)
        wake_at_us = advanced.wake_at_us if row is None else row.wake_at_us
        seconds = None if wake_at_us is None else max((wake_at_us - self._client.clock.now_us()) / 1_000_000, 0.0)
        return TurnOutcome(self._run, advanced.status, seconds)


def _ended(advanced: RunOutcome) -> TurnOutcome:
    failure = None if advanced.failure is None else str(advanced.failure)
    result = plain(advanced.result)
    if len(msgspec.json.encode(result)) > RESULT_BYTES_MAX:
        return TurnOutcome(advanced.run, advanced.status, whole=False, failure=failure)
    return TurnOutcome(advanced.run, advanced.status, result=result, failure=failure)


def name_of(row: RunRow) -> str:
    """What an engine knows a run by: one that was renewed keeps the name that it began with."""
    root, number = renewals.root_of(row.run)
    return root if number > 1 and renewals.renewals(root) in row.tags else row.run
