"""Runs that are held for calls from outside of any agent: who makes them comes and goes, and the run waits meanwhile.

Such a run has no code of its own. It is driven on the client's own loop, where calls reach it from any loop or thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from killick.definitions.registry import Agent, AgentOptions
from killick.engine.outcome import outcome_of
from killick.engine.signals import Released
from killick.errors import KillickError, RunBusy
from killick.llm.external import HOST, ExternalBranches, ExternalSteps, Host

if TYPE_CHECKING:
    from killick.agents.run import Run
    from killick.client.client import Client
    from killick.contracts.contract import Contract

_TRIES: Final = 200
_AGAIN_SECONDS: Final = 0.01


class ExternalSession:
    """`with kd.host(run) as host`, or `async with`: a run is held here, for calls from outside of any agent."""

    def __init__(
        self, client: Client, run: str, *, agent: str, contract: Contract | None, tags: Sequence[str]
    ) -> None:  # fmt: skip
        self._client = client
        self._given = run, agent, contract, tags
        self._desk: ExternalRun | None = None
        self._before: Host | None = None

    def __enter__(self) -> Host:
        desk = self._client.desks.come(*self._given)
        self._client.blocking(desk.come())
        return self._entered(desk)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.blocking(self._left().go())

    async def __aenter__(self) -> Host:
        desk = self._client.desks.come(*self._given)
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(desk.come(), desk.loop))
        return self._entered(desk)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        desk = self._left()
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(desk.go(), desk.loop))

    def _entered(self, desk: ExternalRun) -> Host:
        self._desk, self._before = desk, HOST.get()
        host = Host(desk.run, desk.loop, desk.reach)
        HOST.set(host)
        return host

    def _left(self) -> ExternalRun:
        assert self._desk is not None
        desk, self._desk = self._desk, None
        HOST.set(self._before)
        return desk


class ExternalRuns:
    """The runs that are held in this process, each once, whoever calls."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._desks: dict[str, ExternalRun] = {}
        self._mutex = threading.Lock()

    def come(self, run: str, agent: str, contract: Contract | None, tags: Sequence[str]) -> ExternalRun:
        """The desk of a run, with one more user; whoever has it says when they go."""
        loop = self._client.own_loop
        with self._mutex:
            desk = self._desks.get(run)
            if desk is None:
                desk = ExternalRun(self._client, run, loop, agent=agent, contract=contract, tags=tags)
                self._desks[run] = desk
            desk.users += 1
            return desk

    def go(self, desk: ExternalRun) -> bool:
        """One user less; True when that was the last one."""
        with self._mutex:
            desk.users -= 1
            if desk.users == 0:
                del self._desks[desk.run]
            return desk.users == 0


class ExternalRun:
    """One run that is held for calls from outside, for as long as anybody in this process is at it."""

    def __init__(
        self,
        client: Client,
        run: str,
        loop: asyncio.AbstractEventLoop,
        *,
        agent: str,
        contract: Contract | None,
        tags: Sequence[str],
    ) -> None:
        self.run = run
        self.loop = loop
        self.users = 0
        self._client = client
        self._agent: Agent[Any, Any] = Agent(self._serve, agent, AgentOptions(contract=contract))
        self._tags = tuple(tags)
        self._held: asyncio.Task[Any] | None = None
        self._ready: asyncio.Future[ExternalBranches] | None = None
        self._leaving: asyncio.Event | None = None

    async def come(self) -> None:
        """Somebody wants the run held, who was counted already."""
        try:
            await self.reach()
        except BaseException:
            await self.go()
            raise

    async def go(self) -> None:
        """Somebody is done; the last one lets the run go."""
        if self._client.desks.go(self) and self._held is not None and self._leaving is not None:
            self._leaving.set()
            await asyncio.wait({self._held})

    async def reach(self) -> ExternalBranches:
        """The guests of the run, which is taken again where it was let go meanwhile."""
        if self._held is not None and self._is_leaving:
            await asyncio.wait({self._held})
        if self._held is None or self._held.done():
            self._ready, self._leaving = self.loop.create_future(), asyncio.Event()
            self._held = self.loop.create_task(self._hold(self._ready))
        assert self._ready is not None
        return await asyncio.shield(self._ready)

    @property
    def _is_leaving(self) -> bool:
        """Whether the run is just being let go."""
        ready = self._ready
        return ready is not None and ready.done() and ready.exception() is None and not ready.result().is_reached

    async def _hold(self, ready: asyncio.Future[ExternalBranches]) -> Any:
        try:
            advanced = await self._advanced()
        except BaseException as error:
            if ready.done():
                raise
            self._refuse(ready, error)
            return None
        if not ready.done():
            self._refuse(ready, self._stands(advanced))  # it ended, or somebody paused it
        return advanced

    def _refuse(self, ready: asyncio.Future[ExternalBranches], error: BaseException) -> None:
        ready.set_exception(error)
        ready.exception()  # whoever waits is told; that nobody does is no mistake

    def _stands(self, advanced: Any) -> BaseException:
        """How the run stands, as an error for whoever wanted something of it."""
        try:
            self._client.outcome(self._agent, advanced)
        except BaseException as error:
            return error
        return KillickError(f"{self.run}: has ended; give what comes now an id of its own")

    async def _advanced(self) -> Any:
        """Drive the run; one that others in this process are just letting go is waited for."""
        client = self._client
        for left in range(_TRIES, -1, -1):
            run, start = client.begin(self._agent, None, self.run, None, self._tags, True)
            try:
                return await client.executor().advance(run, start=start, agent=self._agent, sit_out=True)
            except RunBusy as busy:
                if busy.holder != client.engine.holder or not left:
                    raise
            await asyncio.sleep(_AGAIN_SECONDS)
        return None

    async def _serve(self, run: Run) -> None:
        """The agent's code: there is none of its own, only guests."""
        assert self._ready is not None
        assert self._leaving is not None
        ex = run._execution  # pyright: ignore[reportPrivateUsage]
        async with ExternalSteps(ex, run._steps, outside=True) as host:  # pyright: ignore[reportPrivateUsage]
            hosted = await host.reach()
            assert self._held is not None
            hosted.why = partial(self._why, self._held)
            hosted.how = lambda: self._stands(outcome_of(self._client.engine, ex))
            self._ready.set_result(hosted)
            ex.at_close = self._leaving.set
            await self._leaving.wait()
            if ex.signal is None:
                await hosted.close()  # what is under way comes to its end
            if ex.signal is None:
                ex.close(Released())
            assert ex.signal is not None
            raise ex.signal

    async def _why(self, held: asyncio.Task[Any]) -> BaseException:
        """Why calls came to nothing: how the run stood when it was let go."""
        try:
            return self._stands(await asyncio.shield(held))
        except BaseException as error:
            return error
