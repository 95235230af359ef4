"""Attempts whose code waits for steps of the same run: such an attempt is idle while those steps are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple, Protocol

from killick.definitions.markers import InnerSteps


class AwaitedBranch(Protocol):
    """A branch that code of an attempt may await."""

    awaited_by: list[InnerSteps]
    inner: InnerSteps | None


class InnerCaller(NamedTuple):
    """Code of an attempt that awaits a branch; `notified` ends when that branch only waits."""

    inner: InnerSteps
    branch: AwaitedBranch
    notified: asyncio.Future[None]


class InnerWaits:
    """Counts the waits of each attempt, and marks the run idle or busy with them."""

    def __init__(self, mark_idle: Callable[[], None], mark_busy: Callable[[], None]) -> None:
        self._mark_idle = mark_idle
        self._mark_busy = mark_busy
        self.callers: list[InnerCaller] = []

    def begin(self, inner: InnerSteps, branch: AwaitedBranch) -> None:
        """Code of an attempt awaits a branch and does nothing else."""
        branch.awaited_by.append(inner)
        inner.running += 1
        if inner.running == 1:
            if inner.live is not None:
                inner.live.mark_idle()
            self._mark_idle()

    def end(self, inner: InnerSteps, branch: AwaitedBranch) -> None:
        """Code of an attempt awaits a branch no longer."""
        if inner in branch.awaited_by:
            branch.awaited_by.remove(inner)
            inner.running -= 1
            if not inner.running and inner.is_open:
                if inner.live is not None:
                    inner.live.mark_running()
                self._mark_busy()

    def close(self, inner: InnerSteps) -> None:
        """The code of an attempt is over, also if steps that it began are not."""
        inner.is_open = False
        if inner.running:
            self._mark_busy()

    def notify(self) -> bool:
        """Everything is idle: notify the callers inside of attempts, the innermost first. False if there are none.

        Their steps keep waiting; the attempt ends as its code decides.
        """
        innermost = [each for each in self.callers if each.branch.inner is None or not each.branch.inner.running]
        for caller in innermost:
            self.end(caller.inner, caller.branch)
            if not caller.notified.done():
                caller.notified.set_result(None)
        return bool(innermost)
