"""The tasks of one loop that advance child runs and unwind the code of runs that left memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Container
from functools import partial
from typing import Any, Final

from killick.engine import renewals
from killick.engine.engine import Engine
from killick.engine.execution import Execution
from killick.engine.outcome import RunOutcome
from killick.engine.signals import Interrupted, Parked
from killick.errors import KillickError, RunBusy, StoreError
from killick.logger import get_logger
from killick.store.records import ENDED

logger: Final = get_logger("killick")

BUSY_SECONDS: Final = 0.25
"""The pause before a child is tried again that another worker holds."""


class ChildTasks:
    """Advances the children of live runs, and wakes the parents that wait for them."""

    def __init__(self, engine: Engine, live: Container[str], advance: Callable[[str], Awaitable[RunOutcome]]) -> None:
        self._engine = engine
        self._live = live
        self._advance = advance
        self._tasks: dict[str, asyncio.Task[Any]] = {}
        self._parents: dict[str, set[Execution]] = {}

    def schedule(self, parent: Execution, child: str) -> None:
        """Advance a child of a live run here, unless another worker holds it."""
        child = renewals.latest(self._engine.log, child)
        row = self._engine.log.store.index(child)
        if row is None or row.status in ENDED:
            return
        task = self._tasks.get(child)
        # One that was released in this turn of the loop has a task that is done, and may be due again.
        if child not in self._live and (task is None or task.done()):
            self._start(child, self._advanced(child), partial(self._done, child))
        if child in self._tasks:
            self._parents.setdefault(child, set()).add(parent)

    def may_wake(self, ex: Execution) -> bool:
        """Whether a child that is advanced here may wake a run."""
        return any(ex in parents for parents in self._parents.values())

    def unwind(self, ex: Execution) -> None:
        """Close a parked run and let its code unwind; nothing that it does meanwhile is recorded."""
        ex.close(Parked())
        name = f"unwinding {id(ex)}"
        self._start(name, ex.unwind(), lambda _: self._tasks.pop(name, None))

    def cancel(self) -> None:
        """Cancel every task."""
        for task in self._tasks.values():
            task.cancel()

    async def wait(self, seconds: float) -> None:
        """Wait until every task is over, for a limited time."""
        if self._tasks:
            await asyncio.wait(set(self._tasks.values()), timeout=seconds)

    def _start(self, name: str, work: Any, then: Callable[[asyncio.Task[Any]], object]) -> None:
        task = self._tasks[name] = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(then)

    async def _advanced(self, child: str) -> None:
        while True:
            try:
                outcome = await self._advance(child)
                if outcome.renewed_as is None:
                    return
                child = outcome.renewed_as
            except RunBusy:
                await asyncio.sleep(BUSY_SECONDS)
            except Exception as error:
                logger.warning("%s: stopped being advanced here: %s", child, error)
                if isinstance(error, StoreError) or not isinstance(error, KillickError):
                    raise
                return

    def _done(self, child: str, task: asyncio.Task[Any]) -> None:
        """An error of the store, or a defect, interrupts the parents too: they continue from the store later."""
        error = None if task.cancelled() else task.exception()
        if self._tasks.get(child) is not task:
            return  # it is advanced again, and that task wakes them
        del self._tasks[child]
        for parent in self._parents.pop(child, set()):
            if error is not None and parent.signal is None:
                parent.close(Interrupted(error), cut=True)
            parent.stirred.set()
