"""A turn: drives one run until it ends, waits, or must yield. Called by an external engine.

Knows no engine. Its result is small and plain, for a log of any size.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from killick.client.client import AnyClient
from killick.clock import timestamp
from killick.engine import renewals
from killick.engine.approval.argument_edits import call
from killick.engine.claims import ClaimedRun
from killick.engine.leases import LEASE_SECONDS
from killick.engine.outcome import RunOutcome, ended
from killick.engine.views import Wait
from killick.errors import RunBusy
from killick.history.run_info import info
from killick.log.slots import root_of
from killick.model.codec import plain
from killick.store.records import ENDED, RunRow

SIT_SECONDS: Final = 0.5
"""Shorter waits are slept through: an engine's timer would cost more."""

SLICE_SECONDS: Final = 600.0
"""How long a run continues before it yields to the engine at its next step."""

RESULT_BYTES_MAX: Final = 1_000_000
"""Larger results stay in the store: engines limit what they pass on."""


@dataclass(frozen=True)
class TurnOutcome:
    """A run's outcome after a turn, as plain data for any engine."""

    run: str
    status: str
    wait_seconds: float | None = None
    """Seconds until it continues by itself: 0 is at once, None waits for an outside event."""
    step: str | None = None
    """The number of the current step."""
    waits: list[dict[str, Any]] = field(default_factory=list)
    """The open waits, as `wait_shown` shows them."""
    result: Any = None
    """The result; one that is too large is named instead, as `{"killick_run": …, "bytes": …}`."""
    failure: str | None = None
    queue: str | None = None
    """The task queue that takes the next turn; None: the agent's own."""

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED

    @property
    def error(self) -> tuple[str, str] | None:
        """The name and the text of the error by which a failed or cancelled run ended."""
        if not self.has_ended or self.status == "completed":
            return None
        return f"Run{self.status.capitalize()}", f"{self.run}: {self.failure or self.status}"


@dataclass(frozen=True)
class ToolQueues:
    """The task queues of tools. A process takes the steps of its queue, and leaves the run before any other."""

    own: str
    of: Mapping[str, str]

    def serves(self, name: str, sort: str) -> bool:
        """Whether this process takes a step. A queue that no tool names takes all but those of named tools."""
        if sort not in ("tool", "model"):
            return True
        queue = self.of.get(name) if sort == "tool" else None
        return queue == (self.own if self.own in self.of.values() else None)


class Turn:
    """One turn of a run, and of its continuations."""

    def __init__(
        self, client: AnyClient, run: str, *, lease_seconds: float = LEASE_SECONDS,
        slice_seconds: float = SLICE_SECONDS, queues: ToolQueues | None = None,
    ) -> None:  # fmt: skip
        self._client = client
        self._run = renewals.latest(client.runtime.log, run)
        self._lease_seconds = lease_seconds
        self._slice_seconds = slice_seconds
        self._queues = queues
        self._left_for: str | None = None
        self._leaving = asyncio.Event()

    def leave(self) -> None:
        """Yields the run at its next step; the current step is finished first."""
        self._leaving.set()
        self._client.runtime.executor().leave(self._run)

    async def take(self) -> TurnOutcome:
        """Drives the run. RunBusy if another worker holds it, RunUnknown if there is none."""
        sliced = asyncio.get_running_loop().call_later(self._slice_seconds, self.leave)
        try:
            outcome = TurnOutcome(self._run, "running", 0.0)
            while not self._leaving.is_set():
                outcome = self._outcome_of(await self._advanced())
                seconds = outcome.wait_seconds
                if seconds is None or seconds > SIT_SECONDS or self._left_for is not None:
                    break
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._client.runtime.clock.nap_seconds(seconds)):
                        await self._leaving.wait()
            return outcome
        finally:
            sliced.cancel()

    async def _advanced(self) -> RunOutcome:
        """As the client's `advance`, but children are separate runs for the engine."""
        client, run = self._client, self._run
        row = client.runtime.store.index(run)
        if row is not None and row.status in ENDED:
            return ended(client.runtime.engine, run)
        executor, holder = client.runtime.executor(), client.runtime.engine.holder
        if executor.notify(run):
            raise RunBusy(run, holder=holder)
        left = client.runtime.log.head(run)
        since = client.runtime.clock.monotonic()
        head = client.runtime.store.lease(run, holder, seconds=self._lease_seconds)
        serves = None if self._queues is None else self._queues.serves
        claim = ClaimedRun(head, since, self._lease_seconds, left.holder, left.lease_until_us, serves=serves)
        try:
            return await executor.advance(run, claim=claim)
        except BaseException:
            client.runtime.engine.release(run, head.epoch, left=True)
            raise

    def _outcome_of(self, advanced: RunOutcome) -> TurnOutcome:
        if advanced.renewed_as is not None:
            self._run = advanced.renewed_as
            return TurnOutcome(self._run, "running", 0.0)
        if advanced.has_ended:
            return _ended(advanced)
        if advanced.left:
            self._left_for = advanced.left_for
            queue = None if self._queues is None else self._queues.of.get(advanced.left_for or "")
            return TurnOutcome(self._run, advanced.status, 0.0, queue=queue)
        found, is_shown = info(self._client.runtime.log, self._run), self._client.runtime.log.keys is None
        waits = [wait_shown(each, is_shown) for each in found.waits]
        if advanced.status == "paused":
            return TurnOutcome(self._run, advanced.status, step=found.step, waits=waits)
        # A message of the last moment is already in the index, but not in the fold from when the run parked.
        row = self._client.runtime.store.index(self._run)
        wake_at_us = advanced.wake_at_us if row is None else row.wake_at_us
        now_us = self._client.runtime.clock.now_us()
        seconds = None if wake_at_us is None else max((wake_at_us - now_us) / 1_000_000, 0.0)
        return TurnOutcome(self._run, advanced.status, seconds, found.step, waits)


def wait_shown(wait: Wait, is_shown: bool) -> dict[str, Any]:
    """Returns a wait as an engine shows it. The content of an encrypted store stays there."""
    shown: dict[str, Any] = {
        "step": wait.step, "kind": wait.waits_for, "name": wait.name, "to": list(wait.to), "verbs": list(wait.verbs),
        "deadline": None if wait.deadline_us is None else timestamp(wait.deadline_us),
    }  # fmt: skip
    if is_shown:
        prompt = wait.prompt or (call(wait.intention) if wait.intention is not None else None)
        shown |= {"prompt": prompt, "options": plain(list(wait.options)), "schema": plain(wait.schema)}
    return shown


def _ended(advanced: RunOutcome) -> TurnOutcome:
    failure = None if advanced.failure is None else str(advanced.failure)
    result = plain(advanced.result)
    if (size := len(msgspec.json.encode(result))) > RESULT_BYTES_MAX:
        result = {"killick_run": advanced.run, "bytes": size}
    return TurnOutcome(advanced.run, advanced.status, result=result, failure=failure)


def name_of(row: RunRow) -> str:
    """Returns the engine's name of a run: a renewed run keeps its first name."""
    return root_of(row.run, row.tags)
