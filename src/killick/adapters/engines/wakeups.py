"""Notifies an external engine of runs that need it: new ones, and those with a new message.

Watches the store and polls as a fallback. So a process that starts a run, answers a question or sends a message needs
no knowledge of engines. Timers are the engine's own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection
from typing import Final

from killick.client.client import AnyClient
from killick.definitions.agents import AGENTS
from killick.logger import get_logger
from killick.store.protocol import is_held
from killick.store.records import ENDED, OUTBOX_CHANGED, READ_LIMIT, Head, RunRow

logger: Final = get_logger("killick.adapters")

POLL_SECONDS: Final = 2.0
"""The polling interval, for missed notifications."""

GRACE_SECONDS: Final = 15.0
"""How long a run may be due before its engine is reminded: its timers and failover are faster."""

_AT_ONCE: Final = 32
_HELD_SECONDS: Final = 0.02

Stir = Callable[[RunRow, str], Awaitable[None]]
"""Makes an engine continue a run. The text is equal for equal reasons, for deduplication."""


class RunWaker:
    """Wakes runs that need their engine, within an `async with` block. Several may run concurrently."""

    def __init__(
        self, client: AnyClient, wake: Stir, *, agents: Collection[str] | None = None,
        poll_seconds: float = POLL_SECONDS, grace_seconds: float = GRACE_SECONDS,
    ) -> None:  # fmt: skip
        self._client = client
        self._stir = wake
        self._agents = agents
        self._poll_seconds = poll_seconds
        self._grace_seconds = grace_seconds
        self._rung: set[str] = set()
        self._held: dict[str, float] = {}
        self._bell = asyncio.Event()
        self._woken: dict[str, tuple[str, float]] = {}
        self._watching: asyncio.Task[None] | None = None

    async def __aenter__(self) -> RunWaker:
        self._watching = asyncio.get_running_loop().create_task(self._watch(), name="killick-waking")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._watching is not None
        self._watching.cancel()
        await asyncio.wait({self._watching})

    async def _watch(self) -> None:
        loop, clock = asyncio.get_running_loop(), self._client.runtime.clock

        def on_notify(run: str) -> None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._schedule, run)

        stop = self._client.runtime.store.watch(on_notify)
        looked: float | None = None
        try:
            while True:
                self._bell.clear()
                rung, self._rung = self._rung, set()
                try:
                    wanted, held = await asyncio.to_thread(self._wanted, rung)
                    self._look_again(rung, held)
                    await self._wake_all(wanted)
                    if looked is None or "" in rung or clock.monotonic() - looked >= self._poll_seconds:
                        await self._wake_all(await asyncio.to_thread(self._overdue, first=looked is None))
                        looked = clock.monotonic()
                except Exception as error:  # an error in one poll does not stop the next
                    logger.warning("store error=%s", error)
                    await asyncio.sleep(self._poll_seconds)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._poll_seconds):
                        await self._bell.wait()
        finally:
            stop()

    def _schedule(self, run: str) -> None:
        if run != OUTBOX_CHANGED:
            self._rung.add(run)
            self._bell.set()

    # due runs -----------------------------------------------------------------------------------

    def _known(self) -> Collection[str]:
        return AGENTS.names() if self._agents is None else self._agents

    def _wanted(self, rung: Collection[str]) -> tuple[list[tuple[RunRow, str]], list[str]]:
        """Returns notified runs that are due and free; and held ones, whose holder may take the message."""
        client, known = self._client, self._known()
        found, held = list[tuple[RunRow, str]](), list[str]()
        for run in rung:
            row = client.runtime.store.index(run)
            if row is None or row.agent not in known or row.status in ENDED:
                continue
            head = client.runtime.store.head(run)
            is_due = row.wake_at_us is not None and row.wake_at_us <= client.runtime.clock.now_us()
            if is_due and head is not None and not is_held(client.runtime.store, head):
                found.append((row, reason_of(row, head)))
            elif is_due:
                held.append(run)
        return found, held

    def _look_again(self, rung: Collection[str], held: Collection[str]) -> None:
        """Checks due but held runs again with backoff: a command holds a run only briefly."""
        loop = asyncio.get_running_loop()
        self._held = {run: seconds for run, seconds in self._held.items() if run not in rung or run in held}
        for run in held:
            self._held[run] = min(self._held.get(run, _HELD_SECONDS / 2) * 2, self._poll_seconds)
            loop.call_later(self._held[run], self._schedule, run)

    def _overdue(self, *, first: bool) -> list[tuple[RunRow, str]]:
        """Returns runs without a notification: new ones, and overdue ones."""
        client = self._client
        now_us = client.runtime.clock.now_us()
        grace_us = round(self._grace_seconds * 1_000_000)
        found = list[tuple[RunRow, str]]()
        for row in client.runtime.store.due(now_us, limit=READ_LIMIT, agents=self._known()):
            since = row.changed_at_us if row.wake_at_us is None else max(row.wake_at_us, row.changed_at_us)
            if first or row.status == "queued" or now_us - since > grace_us:
                head = client.runtime.store.head(row.run)
                reason = reason_of(row, head)
                # A run that stays due after a wake-up is woken again, as a new reason, with backoff.
                late = (max(now_us - since, 0) // grace_us).bit_length()
                found.append((row, f"{reason}+{late}" if late else reason))
        return found

    async def _wake_all(self, wanted: list[tuple[RunRow, str]]) -> None:
        now = self._client.runtime.clock.monotonic()
        fresh = [(row, reason) for row, reason in wanted if self._woken.get(row.run, ("", 0.0))[0] != reason]
        for start in range(0, len(fresh), _AT_ONCE):
            some = fresh[start : start + _AT_ONCE]
            outcomes = await asyncio.gather(*(self._stir(*each) for each in some), return_exceptions=True)
            for (row, reason), outcome in zip(some, outcomes, strict=True):
                if isinstance(outcome, Exception):
                    # Its engine is unavailable: the next poll finds the run again.
                    logger.warning("not stirred run=%s error=%s", row.run, outcome)
                    self._rung.add(row.run)
                else:
                    self._woken[row.run] = (reason, now)
        if len(self._woken) > READ_LIMIT:
            horizon = now - 4 * self._grace_seconds
            self._woken = {run: last for run, last in self._woken.items() if last[1] > horizon}


def reason_of(row: RunRow, head: Head | None) -> str:
    """Returns why a run should continue: equal for all observers of the same state."""
    return f"{row.run}@{0 if head is None else head.seq}.{row.delivered}"
