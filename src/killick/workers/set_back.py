"""Wakes the logs that wait for a time that was computed while a clock was ahead, and that was set back since.

The store wakes a run at the time that its record names. Such a run is released here, as one that was left, so that
it is due at once: the worker that claims it computes its times again. Writes no event.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from killick.clock import SET_BACK_US
from killick.engine.engine import Engine
from killick.errors import KillickError
from killick.store.records import READ_LIMIT, RunQuery, RunRow
from killick.triggers import TRIGGERS
from killick.workers import hooks


def wake(engine: Engine, agents: Iterable[str]) -> None:
    """Makes due what a wrong clock put off: runs of these agents, hooks, and the triggers declared here."""
    now_us = engine.clock.now_us()
    for row in [*_later(engine, agents, now_us), *_queued(engine, now_us)]:
        with contextlib.suppress(KillickError):  # it is leased, so it is awake
            head = engine.store.lease(row.run, engine.holder, seconds=engine.lease_seconds)
            engine.leases.release(row.run, head.epoch, left=True)


def _later(engine: Engine, agents: Iterable[str], now_us: int) -> Iterator[RunRow]:
    """The runs and hooks whose last change is later than now, and that a later time wakes."""
    since_us = now_us + SET_BACK_US
    queries = [RunQuery(agent=agent, status=("queued", "waiting"), since_us=since_us) for agent in agents]
    for query in (*queries, RunQuery(tag=hooks.TAG, since_us=since_us)):
        for row in engine.store.runs(query, limit=READ_LIMIT):
            if (row.wake_at_us or 0) > since_us and _last_at(engine, row.run) > since_us:
                yield row


def _last_at(engine: Engine, run: str) -> int:
    """When the log's last event was, which is right again once a worker has looked at it."""
    with contextlib.suppress(KillickError):
        return engine.log.event(run, engine.log.head(run).seq).at
    return 0


def _queued(engine: Engine, now_us: int) -> Iterator[RunRow]:
    """The triggers whose firing was queued later than now."""
    for trigger in list(TRIGGERS.values()):
        row = engine.store.index(trigger.log)
        if row is not None and row.wake_at_us is not None and not trigger.spec.can_be_due(row.wake_at_us, now_us):
            yield row
