"""Runs held for calls from outside any agent: callers come and go, and the run waits in between.

Such a run has no agent code. It is executed on the runtime's own loop, where calls reach it from any loop or thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from killick.agents.runtime import Runtime
from killick.client.start import begin, outcome
from killick.definitions.agents import Agent, AgentOptions
from killick.engine.outcome import outcome_of
from killick.engine.signals import Released
from killick.errors import KillickError, RunBusy
from killick.fork_safety import keep_inherited
from killick.llm.external import HOST, ExternalBranches, ExternalSteps, Host

if TYPE_CHECKING:
    from killick.agents.run import Run
    from killick.contracts.contract import Contract

_TRIES: Final = 200
_AGAIN_SECONDS: Final = 0.01


class ExternalSession:
    """`with kd.host(run) as host`, or `async with`: holds a run for calls from outside any agent."""

    def __init__(
        self, runs: ExternalRuns, run: str, *, agent: str, contract: Contract | None, tags: Sequence[str]
    ) -> None:  # fmt: skip
        self._runs = runs
        self._given = run, agent, contract, tags
        self._held: ExternalRun | None = None
        self._before: Host | None = None

    def __enter__(self) -> Host:
        held = self._runs.acquire(*self._given)
        self._runs.runtime.blocking(held.acquire())
        return self._entered(held)

    def __exit__(self, *_: object) -> None:
        self._runs.runtime.blocking(self._exited().release())

    async def __aenter__(self) -> Host:
        held = self._runs.acquire(*self._given)
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(held.acquire(), held.loop))
        return self._entered(held)

    async def __aexit__(self, *_: object) -> None:
        held = self._exited()
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(held.release(), held.loop))

    def _entered(self, held: ExternalRun) -> Host:
        self._held, self._before = held, HOST.get()
        host = Host(held.run, held.loop, held.reach)
        HOST.set(host)
        return host

    def _exited(self) -> ExternalRun:
        assert self._held is not None
        held, self._held = self._held, None
        HOST.set(self._before)
        return held


class ClientRuntime(Runtime):
    """A runtime that holds external runs too."""

    def _begin(self) -> None:
        super()._begin()
        self.external = ExternalRuns(self)

    def after_fork_in_child(self) -> None:
        keep_inherited(self.external)
        super().after_fork_in_child()


class ExternalRuns:
    """The external runs of this process, each held once for all of its callers."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._held_runs: dict[str, ExternalRun] = {}
        self._mutex = threading.Lock()

    def acquire(self, run: str, agent: str, contract: Contract | None, tags: Sequence[str]) -> ExternalRun:
        """An external run, with one more caller; each caller calls `release`."""
        loop = self.runtime.own_loop
        with self._mutex:
            if (held := self._held_runs.get(run)) is None:
                held = self._held_runs[run] = ExternalRun(self, run, loop, agent=agent, contract=contract, tags=tags)
            held.users += 1
            return held

    def release(self, held: ExternalRun) -> bool:
        """Removes a caller; returns whether it was the last one."""
        with self._mutex:
            held.users -= 1
            if held.users == 0:
                del self._held_runs[held.run]
            return held.users == 0


class ExternalRun:
    """One external run, held for as long as it has a caller in this process."""

    def __init__(
        self, runs: ExternalRuns, run: str, loop: asyncio.AbstractEventLoop, *, agent: str, contract: Contract | None,
        tags: Sequence[str],
    ) -> None:  # fmt: skip
        self.run = run
        self.loop = loop
        self.users = 0
        self._runs = runs
        self._runtime = runs.runtime
        self._agent: Agent[Any, Any] = Agent(self._serve, agent, AgentOptions(contract=contract))
        self._tags = tuple(tags)
        self._held: asyncio.Task[Any] | None = None
        self._ready: asyncio.Future[ExternalBranches] | None = None
        self._leaving: asyncio.Event | None = None

    async def acquire(self) -> None:
        """Holds the run for a caller that `ExternalRuns.acquire` counted."""
        try:
            await self.reach()
        except BaseException:
            await self.release()
            raise

    async def release(self) -> None:
        """A caller is done; the last one releases the run."""
        if self._runs.release(self) and self._held is not None and self._leaving is not None:
            self._leaving.set()
            await asyncio.wait({self._held})

    async def reach(self) -> ExternalBranches:
        """The branches of the run. Leases the run again if it was released."""
        if self._held is not None and self._is_leaving:
            await asyncio.wait({self._held})
        if self._held is None or self._held.done():
            if not self.users:
                raise KillickError(f"{self.run}: its host has ended; call inside the block")
            self._ready, self._leaving = self.loop.create_future(), asyncio.Event()
            self._held = self.loop.create_task(self._hold(self._ready))
        assert self._ready is not None
        return await asyncio.shield(self._ready)

    @property
    def _is_leaving(self) -> bool:
        """Whether the run is being released."""
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
            self._refuse(ready, self._as_error(advanced))  # it ended, or was paused
        return advanced

    def _refuse(self, ready: asyncio.Future[ExternalBranches], error: BaseException) -> None:
        ready.set_exception(error)
        ready.exception()  # marks it as retrieved: there may be no caller to raise it to

    def _as_error(self, advanced: Any) -> BaseException:
        """The outcome of the run, as an error for its callers."""
        try:
            outcome(self._runtime.engine, self._agent, advanced)
        except BaseException as error:
            return error
        return KillickError(f"{self.run}: has ended; use another id for new calls")

    async def _advanced(self) -> Any:
        """Executes the run, after this process has released it if necessary."""
        runtime = self._runtime
        for left in range(_TRIES, -1, -1):
            run, start = begin(runtime.engine, self._agent, None, self.run, None, self._tags)
            try:
                return await runtime.executor().advance(run, start=start, agent=self._agent, sit_out=True)
            except RunBusy as busy:
                if busy.holder != runtime.engine.holder or not left:
                    raise
            await asyncio.sleep(_AGAIN_SECONDS)
        return None

    async def _serve(self, run: Run) -> None:
        """The agent's code: it has only external branches."""
        assert self._ready is not None
        assert self._leaving is not None
        ex = run._execution  # pyright: ignore[reportPrivateUsage]
        async with ExternalSteps(ex, run._paged, outside=True) as host:  # pyright: ignore[reportPrivateUsage]
            hosted = await host.reach()
            assert self._held is not None
            hosted.why = partial(self._why, self._held)
            hosted.how = lambda: self._as_error(outcome_of(ex))
            if self._ready.done():
                self._leaving.set()  # executed again after a store error: the next caller leases the run anew
            else:
                self._ready.set_result(hosted)
            ex.at_close = self._leaving.set
            await self._leaving.wait()
            if ex.signal is None:
                await hosted.close()  # calls in progress end first
            if ex.signal is None:
                ex.close(Released())
            assert ex.signal is not None
            raise ex.signal

    async def _why(self, held: asyncio.Task[Any]) -> BaseException:
        """Why calls were refused: the outcome of the run when it was released."""
        try:
            return self._as_error(await asyncio.shield(held))
        except BaseException as error:
            return error
