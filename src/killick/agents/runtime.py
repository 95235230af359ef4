"""An engine in one process: its log, one executor for each event loop, and its own loop.

A forked child creates all of these again. The parent keeps its runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import threading
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar
from weakref import WeakMethod

from killick.agents.build import build_of
from killick.agents.run import run_of
from killick.blocking import OwnLoop
from killick.clock import Clock, SystemClock
from killick.definitions.agents import AnyAgent
from killick.definitions.current import mark_log_records
from killick.engine.engine import Engine
from killick.engine.executor import Executor
from killick.engine.leases import LEASE_SECONDS
from killick.engine.steps import live_calls
from killick.engine.steps.attempt import ToolInterceptor
from killick.engine.tracer import Tracer
from killick.errors import KillickError, RunError
from killick.fork_safety import hears_of_forks, keep_inherited
from killick.ids import Ids, RandomIds
from killick.log.log import Log
from killick.model import events as e
from killick.store.protocol import Store

R = TypeVar("R")


class _Forked:
    """Restarts a runtime in a forked child."""

    def __init__(self, runtime: Runtime) -> None:
        self._begin_in_child = WeakMethod(runtime._begin_in_child)  # pyright: ignore[reportPrivateUsage]
        hears_of_forks(self)

    def before_fork(self) -> None:
        """Nothing: the store closes what must not be inherited."""

    def after_fork_in_parent(self) -> None:
        """Nothing: the parent keeps everything."""

    def after_fork_in_child(self) -> None:
        """Starts again."""
        if (begin := self._begin_in_child()) is not None:
            begin()


class Runtime:
    """Executes the runs of one store in this process. Close it to release the leases, the threads and the store."""

    def __init__(
        self,
        store: Store,
        *,
        clock: Clock | None = None,
        ids: Ids | None = None,
        build: Callable[[AnyAgent], e.Build] = build_of,
        lease_seconds: float | None = None,
        grace_seconds: float = 5.0,
        behind: bool = True,
        stand_in: ToolInterceptor | None = None,
        roles: Callable[[str], Iterable[str]] | None = None,
        tracer: Tracer | None = None,
        url: str | None = None,
    ) -> None:
        self.store = store
        self.url = url
        """The URL by which another process can open the same store; None if unknown or impossible."""
        self.clock = clock or SystemClock()
        self.ids = ids or RandomIds()
        self._behind = behind
        # A lease may be endless if the store notices a dead holder at once; elsewhere it must expire.
        endless = math.inf if store.proves_life else LEASE_SECONDS
        self._options: dict[str, Any] = {
            "build": build,
            "lease_seconds": endless if lease_seconds is None else lease_seconds,
            "grace_seconds": grace_seconds,
            "stand_in": stand_in,
            "roles": roles,
            "tracer": tracer,
        }
        self._closed = False
        self._begin()
        mark_log_records()
        self._forked = _Forked(self)

    def _begin(self) -> None:
        """Creates the parts of one process: its holder name, its log, its loops and threads."""
        holder = f"{os.getpid()}-{self.ids.new('h')}"
        self.log = Log(self.store, clock=self.clock, behind=self._behind)
        self.engine = Engine(self.log, clock=self.clock, ids=self.ids, holder=holder, **self._options)
        self._own: OwnLoop | None = None
        self._executors: dict[asyncio.AbstractEventLoop, Executor] = {}
        self._mutex = threading.Lock()

    def _begin_in_child(self) -> None:
        keep_inherited(self.log, self.engine, self._own, self._executors)
        self._begin()

    # loops ------------------------------------------------------------------------------------

    def executor(self) -> Executor:
        """The executor of the running loop."""
        loop = asyncio.get_running_loop()
        executor = self._executors.get(loop)
        if executor is None:
            self._abandon_closed()
            executor = self._executors[loop] = Executor(self.engine, run_of)
        return executor

    def blocking(self, work: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine on the runtime's own loop, in a thread of its own, and wait for it."""
        try:
            own = self._own_loop()
        except KillickError:
            work.close()
            raise
        try:
            return own.run(work)
        except RunError as outcome:
            raise outcome.with_traceback(None)  # noqa: B904  the frames of our loop say nothing of the run

    @property
    def own_loop(self) -> asyncio.AbstractEventLoop:
        """The runtime's own loop, in a thread of its own."""
        return self._own_loop().loop

    def _own_loop(self) -> OwnLoop:
        with self._mutex:
            if self._closed:
                raise KillickError("this client is closed; open the store again")
            if self._own is None:
                self._own = OwnLoop()
            return self._own

    def _notify(self, run: str) -> None:
        """Wake a run that is live here, from any thread: its inbox has something for it."""
        for loop, executor in list(self._executors.items()):
            if not loop.is_closed():
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(executor.notify, run)

    # the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Park the runs that are live here, commit what is pending, and close the store.

        A blocking tool that is running is waited for, up to 30 s. One that takes longer keeps its run leased, and the
        store open, until it ends.
        """
        if self._closed:
            return
        self._closed = True
        if self._own is None and self.engine.resources:
            self._own = OwnLoop()
        until = self.clock.monotonic() + live_calls.ABANDON_SECONDS
        if self._own is not None:
            self._own.close(self._finish())
        self._abandon_closed()
        self.engine.threads.close()
        if self.engine.live.of():
            self.engine.live.wait(until - self.clock.monotonic())
        self.engine.live.then(None, self._close_store)

    def _close_store(self) -> None:
        """Called when no call that began here can act any more. Until then the store knows this process as alive."""
        self.engine.folders.close()
        self.engine.leases.close()
        self.log.close()
        self.store.close()

    def _abandon_closed(self) -> None:
        """Abandon the executors of loops that are closed."""
        for loop in [known for known in self._executors if known.is_closed()]:
            self._executors.pop(loop).abandon()

    async def _finish(self) -> None:
        executor = self._executors.get(asyncio.get_running_loop())
        if executor is not None:
            await executor.close()
        await self.engine.resources.close()
