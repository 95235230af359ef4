"""What every engine's adapter is: it serves runs to the engine, and notifies it of runs that need it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Collection, Mapping
from contextlib import AsyncExitStack
from typing import Any, Final, Self

from killick.adapters.engines import commands
from killick.adapters.engines.turns import Turn, TurnOutcome
from killick.adapters.engines.wakeups import GRACE_SECONDS, RunWaker
from killick.client.client import AnyClient
from killick.definitions.agents import AGENTS
from killick.errors import RunBusy
from killick.store.records import RunRow

BUSY_SECONDS: Final = 0.5
"""After how long a turn is taken again whose run another process holds."""

_LEAVE_SECONDS: Final = 0.2


class Engine:
    """Runs on an external engine. In an `async with` block it serves them."""

    def __init__(
        self, client: AnyClient, agents: Collection[str] | None, *, duties: bool, grace_seconds: float = GRACE_SECONDS
    ) -> None:
        self._client = client.as_async()
        self._agents = agents
        self._duties = duties
        self._grace_seconds = grace_seconds
        self._serving = AsyncExitStack()

    async def __aenter__(self) -> Self:
        try:
            if self._duties:
                await self._serving.enter_async_context(self._client.worker(agents=()))
            await self._open(self._serving)
            await self._serving.enter_async_context(self.waking())
        except BaseException:
            await self._serving.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._serving.aclose()

    def waking(self) -> RunWaker:
        """Notifies the engine of events for its runs, and of new runs: an `async with` block."""
        return RunWaker(self._client, self.wake, agents=self._agents, grace_seconds=self._grace_seconds)

    async def wake(self, row: RunRow, reason: str) -> None:
        """Makes the engine take a turn of a run. A repeated reason does nothing."""
        raise NotImplementedError

    async def _open(self, serving: AsyncExitStack) -> None:
        """Opens what takes turns, for as long as the block lasts."""
        raise NotImplementedError

    def _error(self, refused: Exception) -> Exception:
        """Returns the engine's own error for a refused request, which it does not retry."""
        raise NotImplementedError

    async def _create(self, agent: str, run: str, given: Any) -> None:
        """Creates a run unless it exists. Another agent or input is refused; no input is any input."""
        start: Any = self._client.start
        with commands.final(self._error):
            await start(agent, given, id=run)

    async def _obey(self, run: str, command: str, given: Mapping[str, Any], request: str) -> None:
        """Carries out a command for a run."""
        with commands.final(self._error):
            await commands.obey(self._client, run, command, given, request=request)


class CallingEngine(Engine):
    """An engine that calls this process for each turn, and may hang up."""

    _agents: tuple[str, ...]

    def __init__(
        self, client: AnyClient, agents: Collection[str] | None, *, concurrency: int, lease_seconds: float,
        slice_seconds: float, duties: bool, grace_seconds: float = GRACE_SECONDS,
    ) -> None:  # fmt: skip
        known = tuple(AGENTS.names() if agents is None else agents)
        super().__init__(client, known, duties=duties, grace_seconds=grace_seconds)
        self._room = asyncio.Semaphore(concurrency)
        self._lease_seconds = lease_seconds
        self._slice_seconds = slice_seconds
        self._turns: dict[asyncio.Task[TurnOutcome], Turn] = {}
        self._is_draining = False

    async def _open(self, serving: AsyncExitStack) -> None:
        serving.push_async_callback(self.drain)

    async def _turn(self, run: str) -> dict[str, Any]:
        """One turn. If the engine hangs up, the current step is still finished, and no more."""
        with commands.final(self._error):
            async with self._room:
                return dataclasses.asdict(await self._taken(run))

    async def _taken(self, run: str) -> TurnOutcome:
        if self._is_draining:
            return TurnOutcome(run, "running", BUSY_SECONDS)
        turn = Turn(self._client, run, lease_seconds=self._lease_seconds, slice_seconds=self._slice_seconds)
        work = asyncio.get_running_loop().create_task(turn.take())
        self._turns[work] = turn
        work.add_done_callback(self._over)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            turn.leave()
            raise
        except RunBusy:
            # Its holder finishes a step, or is dead and will be detected.
            return TurnOutcome(run, "running", BUSY_SECONDS)

    def _over(self, work: asyncio.Task[TurnOutcome]) -> None:
        self._turns.pop(work, None)
        if not work.cancelled():
            work.exception()  # reported to the engine, or no caller waits for it

    async def drain(self) -> None:
        """Takes no more turns, and lets every active run yield at its next step."""
        self._is_draining = True
        while self._turns:
            for turn in self._turns.values():
                turn.leave()
            await asyncio.wait(set(self._turns), timeout=_LEAVE_SECONDS)
