"""Wakes the logs that wait for a time that was computed while a clock was ahead, and that was set back since.

The store wakes a run at the time that its record names. Such a run is released here, as one that was left, so that
it is due at once: the worker that claims it computes its times again. Writes no event.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Final
from weakref import WeakKeyDictionary

from killick.clock import SET_BACK_US
from killick.engine.engine import Engine
from killick.errors import KillickError
from killick.store.records import READ_LIMIT, RunQuery, RunRow
from killick.triggers import TRIGGERS
from killick.workers import hooks

LOOK_SECONDS: Final = 600.0
"""How often to look for times that another process computed while its clock was ahead."""


class SetBacks:
    """When to look for such times: at first, once the clock was seen to go back, and every ten minutes, for the clocks
    of other machines."""

    def __init__(self, engine: Engine) -> None:
        self._clock, self._seen, self._looked = engine.clock, -1, -math.inf

    def is_due(self) -> bool:
        """Whether it is time to look again; it is then not, for a while."""
        watch, monotonic = self._clock.watch, self._clock.monotonic()
        watch.look(self._clock)
        if self._seen == watch.set_backs and monotonic - self._looked < LOOK_SECONDS:
            return False
        self._seen, self._looked = watch.set_backs, monotonic
        return True


def wake_soon(engine: Engine, agents: Iterable[str]) -> None:
    """As `wake`, for a caller that comes often and has no worker."""
    if (_OF_CALLERS.get(engine) or _OF_CALLERS.setdefault(engine, SetBacks(engine))).is_due():
        wake(engine, agents)


def wake(engine: Engine, agents: Iterable[str]) -> None:
    """Makes due what a wrong clock put off: runs of these agents, hooks, and the triggers declared here."""
    now_us = engine.clock.now_us()
    for row in [*_later(engine, agents, now_us), *_queued(engine, now_us)]:
        with contextlib.suppress(KillickError):  # it is leased, so it is awake
            head = engine.store.lease(row.run, engine.holder, seconds=engine.lease_seconds)
            engine.leases.release(row.run, head.epoch, left=True)


def _later(engine: Engine, agents: Iterable[str], now_us: int) -> Iterator[RunRow]:
    """The runs and hooks that wait for a time which was computed later than now."""
    since_us = now_us + SET_BACK_US
    queries = [RunQuery(agent=agent, status=("queued", "waiting"), since_us=since_us) for agent in agents]
    for query in (*queries, RunQuery(tag=hooks.TAG, since_us=since_us)):
        for row in engine.store.runs(query, limit=READ_LIMIT):
            if (row.wake_at_us or 0) > since_us and _timed_at(engine, row.run) > since_us:
                yield row


def _timed_at(engine: Engine, run: str) -> int:
    """When the time was computed that wakes it, which is right again once a worker has looked at it."""
    with contextlib.suppress(KillickError):
        return engine.log.state(run).fold.timed_at
    return 0


def _queued(engine: Engine, now_us: int) -> Iterator[RunRow]:
    """The triggers whose firing was queued later than now."""
    for trigger in list(TRIGGERS.values()):
        row = engine.store.index(trigger.log)
        if row is not None and row.wake_at_us is not None and not trigger.spec.can_be_due(row.wake_at_us, now_us):
            yield row


_OF_CALLERS: Final[WeakKeyDictionary[Engine, SetBacks]] = WeakKeyDictionary()
