"""One simulated process of a run under test: its client, its memory, and its interceptor.

Once it is dead, its leftover code cannot reach the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, cast

from killick.check.fakes import Fakes, called_for, name_of
from killick.client.client import SimulatedClient
from killick.client.external_runs import ClientRuntime
from killick.clock import ManualClock
from killick.definitions.markers import ToolStep
from killick.definitions.policy import Effect
from killick.definitions.tools import Tool
from killick.engine.outcome import RunOutcome
from killick.engine.steps.attempt import Applied
from killick.engine.steps.intention import Intent
from killick.errors import FakeRefused, KillickError, StoreUnavailable
from killick.ids import Ids, SeededIds
from killick.model.events import Build
from killick.store.protocol import Store

Named: TypeAlias = str | Tool[..., Any] | Callable[..., Any]
"""A tool, a model's function, or the name of one."""

_FAULTS: Final = (FakeRefused, AssertionError)
"""Errors of the test, not of the tool: they end the test, and are not recorded."""


class Played(Protocol):
    """The played run, as far as a process needs it."""

    clock: PlayClock
    fakes: Fakes
    ids: Ids
    store: Store

    def note(self, intent: Intent) -> None:
        """Records a call of a tool or a model."""
        ...

    async def held(self, intent: Intent, place: ToolStep, *, returned: bool) -> None:
        """Stops here, if the test asked for it."""
        ...

    async def fail(self, fault: BaseException) -> Applied:
        """Reports an error of the test itself."""
        ...


class Halt(NamedTuple):
    """A stop: before a tool or model is called, or after it returned and before its outcome is recorded."""

    step: Named
    returned: bool

    def is_at(self, intent: Intent, place: ToolStep, returned: bool) -> bool:
        return self.returned == returned and (self.step == place.id or called_for(self.step, intent))

    def __str__(self) -> str:
        return self.step if isinstance(self.step, str) else name_of(self.step)


class PlayClock(ManualClock):
    """A frozen clock. Tracks the wake times of sleeping runs, and reports a new sleeper."""

    def __init__(self, now_us: int | None = None) -> None:
        super().__init__(*(() if now_us is None else (now_us,)))
        self.wake_us = math.inf
        self.leaps = False
        self.on_nap: Callable[[], None] = lambda: None

    def nap_seconds(self, seconds: float) -> float:
        if seconds > 0:
            self.wake_us = min(self.wake_us, self.now_us() + round(seconds * 1_000_000))
            self.on_nap()
        return 0.0 if self.leaps else 0.001

    def leap(self) -> None:
        """Jumps to the earliest wake time."""
        if self.wake_us > self.now_us():
            self.advance((self.wake_us - self.now_us()) / 1_000_000)
        self.wake_us = math.inf


class _ProcessStore:
    """A store as one process reaches it: unreachable once the process is dead."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.dead = False

    def __getattr__(self, name: str) -> Any:
        if self.dead:
            raise StoreUnavailable(self._store.place, "the process was crashed by its test")
        return getattr(self._store, name)

    def close(self) -> None:
        """The store outlives the process."""


class Process:
    """A client with its memory, and the interceptor between its steps and the world."""

    def __init__(self, play: Played) -> None:
        self._play = play
        self._store = _ProcessStore(play.store)
        self.task: asyncio.Task[RunOutcome] | None = None
        self.sits = False
        runtime = ClientRuntime(
            cast("Store", self._store), clock=play.clock, ids=SeededIds(int.from_bytes(play.ids.key())),
            build=lambda agent: Build(version="played"), behind=False, stand_in=self,
        )  # fmt: skip
        self.client = SimulatedClient(runtime)

    @property
    def dead(self) -> bool:
        return self._store.dead

    def die(self) -> None:
        self._store.dead = True

    @property
    def is_asleep(self) -> bool:
        """Whether everything live here waits, and something for time."""
        live = self.client.runtime.executor()._live.values()  # pyright: ignore[reportPrivateUsage]
        quiet = all(ex is not None and ex.busy == 0 and not ex.stirred.is_set() for ex in live)
        return quiet and self._play.clock.now_us() < self._play.clock.wake_us < math.inf

    async def reap(self) -> None:
        """Lets leftover tasks end; after death, without effect."""
        executor = self.client.runtime.executor()
        if self.task is not None:
            self.task.cancel()
        await executor.close()
        if self.task is not None:
            await asyncio.gather(self.task, return_exceptions=True)
            self.task = None
        if self.dead:
            self.client.runtime.engine.threads.close()
            with contextlib.suppress(KillickError):
                self.client.runtime.log.close()
        else:
            await self.client.runtime.engine.resources.close()
            self.client.close()

    # interception of calls ----------------------------------------------------------------------

    async def apply(self, intent: Intent, place: ToolStep, real: Callable[[], Awaitable[Applied]]) -> Applied:
        play = self._play
        try:
            await play.held(intent, place, returned=False)
            if self.dead:
                raise asyncio.CancelledError
            play.note(intent)
            applied = await play.fakes.apply(intent, place) or await real()
            if isinstance(applied.error, FakeRefused):
                raise applied.error
            await play.held(intent, place, returned=True)
        except asyncio.CancelledError as cancelled:
            return Applied(error=cancelled)
        except GeneratorExit:
            raise
        except BaseException as fault:
            return Applied(error=asyncio.CancelledError()) if self.dead else await play.fail(fault)
        return applied

    async def call_hook(self, fn: Callable[..., Any], effect: Effect, real: Callable[[], Awaitable[Any]]) -> Any:
        try:
            applied = await self._play.fakes.call_hook(fn, effect)
        except _FAULTS as fault:
            return await self._play.fail(fault)
        if applied is None:
            return await real()
        if applied.error is not None:
            raise applied.error
        return applied.value
