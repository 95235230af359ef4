"""The services that all executions of one client share: log, clock, leases, threads, resources, workspaces."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from killick.clock import Clock
from killick.definitions.agents import AnyAgent
from killick.definitions.markers import Resource
from killick.engine.effects.run_tree import Forks
from killick.engine.leases import Leases
from killick.engine.replay import Tracer
from killick.engine.steps.attempt import LiveCall, LiveCalls, Threads, ToolInterceptor
from killick.engine.steps.workspace_folders import Folders
from killick.errors import KillickError, StillRunning
from killick.ids import Ids
from killick.log.log import Log
from killick.logger import get_logger
from killick.model import events as e
from killick.store.records import Head, UniqueRight

logger: Final = get_logger("killick")


class Engine:
    """The shared state of all executions of a client."""

    def __init__(
        self, log: Log, *, clock: Clock, ids: Ids, holder: str, build: Callable[[AnyAgent], e.Build],
        lease_seconds: float = math.inf, grace_seconds: float = 5.0, stand_in: ToolInterceptor | None = None,
        roles: Callable[[str], Iterable[str]] | None = None, tracer: Tracer | None = None,
    ) -> None:  # fmt: skip
        self.log = log
        self.store = log.store
        self.clock = clock
        self.ids = ids
        self.holder = holder
        self.host, self.slots = "", 0  # of a worker: where it is, and how many runs it executes at once
        self.build = build
        self.lease_seconds = lease_seconds
        self.grace_seconds = grace_seconds
        self.stand_in = stand_in
        self.tracer = tracer
        self.roles = roles
        """The roles of a person, where the caller declared them."""
        self.live = LiveCalls()
        self.permits: set[UniqueRight] = set()
        """The permits of limits that steps in this process chose, which the store may not know yet."""
        self._kept: dict[str, ReleasedRun] = {}
        self._mutex = threading.Lock()
        self.threads = Threads()
        self.resources = Resources()
        self.leases = Leases(log.store, holder, clock)
        self.folders = Folders(log.store)
        self.forks = Forks(log)

    def release(self, run: str, epoch: int, *, left: bool, dropped: Callable[[], object] = lambda: None) -> None:
        """Release a run. While a call of it still runs here, the lease is kept, and its outcome is recorded first.

        `dropped` is called when the lease is kept no longer. A run that is kept already stays so.
        """
        with self._mutex:
            if run in self._kept:
                return
            running = self.live.of(run)  # read before the ended ones: a call that ends in between is in both
            calls = {*running, *self.live.untaken(run)}
            kept = self._kept[run] = ReleasedRun(epoch, left, dropped, tuple(calls))
        if running:
            logger.warning("%s", StillRunning(run, running))
        self.live.then(run, partial(self._release, run, kept))

    def take_over(self, run: str, *, seconds: float) -> tuple[Head, bool] | None:
        """Take over a run that is kept here: its head, and whether it was left in the middle. None if none is kept."""
        with self._mutex:
            kept = self._kept.pop(run, None)
        if kept is None:
            return None
        kept.dropped()
        if self.log.store.renew(self.holder, [run], seconds=seconds).get(run) != kept.epoch:
            return None
        return self.log.head(run), kept.left

    def _release(self, run: str, kept: ReleasedRun) -> None:
        with self._mutex:
            if self._kept.get(run) is not kept:
                return
        try:
            for call in kept.calls:
                call.record_late()
        except Exception as error:
            logger.warning("%s: the outcome of a call could not be recorded: %s", run, error)
        finally:
            with self._mutex:
                mine = self._kept.pop(run, None) is kept
            if mine:
                kept.dropped()
                self.leases.release(run, kept.epoch, left=kept.left)


class ReleasedRun(NamedTuple):
    """A run that was released while calls of it still run here."""

    epoch: int
    left: bool
    dropped: Callable[[], object]
    calls: Sequence[LiveCall]


class Resources:
    """Open resources, one of each per event loop: most cannot be used on another loop."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, asyncio.AbstractEventLoop], tuple[Resource[Any], asyncio.Future[Any]]] = {}

    def __bool__(self) -> bool:
        return bool(self._open)

    async def get(self, resource: Resource[Any]) -> Any:
        loop = asyncio.get_running_loop()
        place = id(resource), loop
        if place in self._open:
            return await asyncio.shield(self._open[place][1])
        future: asyncio.Future[Any] = loop.create_future()
        self._open[place] = resource, future
        try:
            opened: Any = resource.open()
            future.set_result(await opened if asyncio.iscoroutine(opened) else opened)
        except BaseException as error:
            del self._open[place]
            future.set_exception(
                error if isinstance(error, Exception) else KillickError(f"{resource.name}: not opened")
            )
            future.exception()
            raise
        return future.result()

    async def close(self) -> None:
        """Closes the resources, the last one first. Runs of a closed loop can only be released."""
        opened, self._open = list(self._open.items()), {}
        for (_, loop), (resource, future) in reversed(opened):
            if resource.close is None or not future.done() or future.cancelled() or future.exception() is not None:
                continue
            try:
                closing = resource.close(future.result())
                if asyncio.iscoroutine(closing):
                    await closing
            except Exception as error:
                gone = "" if loop is asyncio.get_running_loop() else ", because it was opened on a closed loop"
                logger.warning("%s: could not be closed%s: %s", resource.name, gone, error)
