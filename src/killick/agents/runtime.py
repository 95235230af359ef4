"""An engine in one process: its log, and one executor for each event loop.

A forked child creates all of these again. The parent keeps its runs.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib
import math
import os
from collections.abc import Callable, Coroutine, Iterable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar
from weakref import WeakSet

from killick.agents.run import run_of
from killick.blocking import LOOP_THREAD
from killick.clock import Clock, SystemClock
from killick.definitions.agents import AnyAgent
from killick.definitions.current import mark_log_records
from killick.engine.engine import Engine
from killick.engine.executor import Executor
from killick.engine.leases import LEASE_SECONDS
from killick.engine.replay import Tracer
from killick.engine.steps import attempt as calls
from killick.engine.steps.attempt import ToolInterceptor
from killick.errors import KillickError
from killick.fork_safety import Forked, keep_inherited, register_for_forks
from killick.ids import Ids, RandomIds
from killick.log.checked import checked
from killick.log.log import Log
from killick.model import events as e
from killick.model.events import Build
from killick.store.protocol import Store

R = TypeVar("R")

_OPEN: Final[WeakSet[Runtime]] = WeakSet()


@atexit.register
def _close_open() -> None:
    """Closes the clients that a script left open, so that no lease, file or pending task remains."""
    for runtime in list(_OPEN):
        with contextlib.suppress(Exception):
            runtime.close()


def build_of(agent: AnyAgent) -> Build:
    """The build of an agent. `KILLICK_BUILD` names it where neither a package nor a repository does."""
    given = os.environ.get("KILLICK_BUILD")
    return Build(version=given) if given else _build(agent.fn.__module__, agent.folder)


@lru_cache(maxsize=256)
def _build(module: str, folder: str) -> Build:
    return Build(version=_version(module.partition(".")[0]), commit=_commit(Path(folder)) if folder else "")


def _version(package: str) -> str:
    try:  # a script belongs to no distribution, and looking for one imports thirty modules
        return "" if package == "__main__" else str(importlib.import_module("importlib.metadata").version(package))
    except (ModuleNotFoundError, ValueError):
        return ""


def _commit(folder: Path) -> str:
    """The commit of the repository around a folder, without asking git."""
    try:
        for place in (folder, *folder.parents):
            if (place / ".git" / "HEAD").is_file():
                return _resolved(place / ".git")
    except OSError:
        pass
    return ""


def _resolved(git: Path) -> str:
    head = (git / "HEAD").read_text().strip()
    name = head.removeprefix("ref: ")
    if name == head:
        return head[:12]
    if (git / name).is_file():
        return (git / name).read_text().strip()[:12]
    packed = (git / "packed-refs").read_text() if (git / "packed-refs").is_file() else ""
    return next((line.split()[0][:12] for line in packed.splitlines() if line.endswith(f" {name}")), "")


class Runtime(Forked):
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
        self.store = store = checked(store)
        # A file by its real path: the URL may be relative, and code may change the folder.
        self.url = store.place if url is not None and store.proves_life else url
        """The URL by which another process can open the same store; None if unknown or impossible."""
        self.clock = clock or SystemClock()
        self.ids = ids or RandomIds()
        # A lease may be endless if the store notices a dead holder at once; elsewhere it must expire.
        endless = math.inf if store.proves_life else LEASE_SECONDS
        self._new_log = partial(Log, store, clock=self.clock, behind=behind)
        self._new_engine = partial(
            Engine, clock=self.clock, ids=self.ids, build=build, grace_seconds=grace_seconds, stand_in=stand_in,
            lease_seconds=endless if lease_seconds is None else lease_seconds, roles=roles, tracer=tracer,
        )  # fmt: skip
        self.loop_thread = LOOP_THREAD
        self.is_closed = False
        self._begin()
        mark_log_records()
        register_for_forks(self)
        _OPEN.add(self)

    def _begin(self) -> None:
        """Creates the parts of one process: its holder name, its log, its loops and threads."""
        holder = f"{os.getpid()}-{self.ids.new('h')}"
        self.log = self._new_log()
        self.engine = self._new_engine(self.log, holder=holder)
        self._executors: dict[asyncio.AbstractEventLoop, Executor] = {}

    def after_fork_in_child(self) -> None:
        """Recreates the parts of the process."""
        keep_inherited(self.log, self.engine, self._executors)
        self._begin()

    def __reduce__(self) -> NoReturn:
        raise KillickError("a client cannot be sent to another process; call killick.open there")

    # loops ------------------------------------------------------------------------------------

    def executor(self) -> Executor:
        """The executor of the running loop."""
        loop = asyncio.get_running_loop()
        executor = self._executors.get(loop)
        if executor is None:
            self._abandon_closed()
            executor = self._executors[loop] = Executor(self.engine, run_of)
        return executor

    @property
    def own_loop(self) -> asyncio.AbstractEventLoop:
        """The loop of blocking callers."""
        if self.is_closed:
            raise KillickError("this client is closed; open the store again")
        return self.loop_thread.loop

    def blocking(self, work: Coroutine[Any, Any, R]) -> R:
        """Runs a coroutine on the loop of blocking callers, and waits for it."""
        if self.is_closed:
            work.close()
        _ = self.own_loop  # refuses if closed
        return self.loop_thread.run(work)

    def notify(self, run: str) -> None:
        """Wakes a run that is live here to read its inbox. From any thread."""
        for loop, executor in list(self._executors.items()):
            if not loop.is_closed():
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(executor.notify, run)

    # the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Parks the runs that are live here, commits pending appends, and closes the store.

        Waits up to 30 s for a blocking tool. One that takes longer keeps its run leased, and the store open, until it
        ends.
        """
        if self.is_closed:
            return
        self.is_closed = True
        until = self.clock.monotonic() + calls.ABANDON_SECONDS
        own = self.loop_thread
        if self.engine.resources or (own.is_started and own.loop in self._executors):
            own.run(self.finish())
        self._abandon_closed()
        self.engine.threads.close()
        if self.engine.live.of():
            self.engine.live.wait(until - self.clock.monotonic())
        self.engine.live.then(None, self._close_store)

    def _close_store(self) -> None:
        """Closes the store once no call that began here is active: until then the process counts as alive."""
        self.engine.folders.close()
        self.engine.leases.close()
        self.log.close()
        self.store.close()

    def _abandon_closed(self) -> None:
        """Abandon the executors of loops that are closed."""
        for loop in [known for known in self._executors if known.is_closed()]:
            self._executors.pop(loop).abandon()

    async def finish(self) -> None:
        """Parks the runs of the running loop, and closes the resources."""
        loop = asyncio.get_running_loop()
        if (executor := self._executors.get(loop)) is not None:
            await executor.close()
            executor.abandon()
            del self._executors[loop]
        await self.engine.resources.close()
