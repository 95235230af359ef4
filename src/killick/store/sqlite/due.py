"""Finds the due runs of a SQLite store: past their wake time, or abandoned.

Read-only. Its cost depends on the due and the held runs, not on the parked ones.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Iterator
from itertools import groupby
from typing import Any, Final

import msgspec

from killick.store.records import LANES, RunRow, in_turns
from killick.store.sqlite.rows import HeadRow, Q, run_row_of

_NEVER_US: Final = (1 << 63) - 1

Due = tuple[RunRow, int, HeadRow]
"""A due run, since when it is due, and its current head, which names the holder that abandoned it, if any."""


class DueQuery(msgspec.Struct, frozen=True):
    """A filter: due by `now_us`, free by `clock_us`, of these agents (None: all) and not of those. The lane after
    `lane` comes first."""

    now_us: int
    clock_us: int
    lives: Callable[[str], bool]
    agents: Collection[str] | None = None
    barred: Collection[str] = ()
    lane: int = LANES - 1

    def has(self, agent: str) -> bool:
        return agent not in self.barred and (self.agents is None or agent in self.agents)

    @property
    def condition(self) -> tuple[str, list[str]]:
        """Returns the SQL condition, and its parameters."""
        sql, names = "", list[str]()
        for some, word in ((self.agents, "IN"), (self.barred or None, "NOT IN")):
            if some is not None:
                sql += f" AND agent {word} ({', '.join('?' * len(some))})"
                names += some
        return sql, names


def due(db: sqlite3.Cursor, query: DueQuery, limit: int) -> list[Due]:
    """Returns the first due runs, in order."""
    if limit <= 0 or (query.agents is not None and not set(query.agents) - set(query.barred)):
        return []
    return in_turns([*_abandoned(db, query, limit), *_waking(db, query, limit)], query.lane)[:limit]


def soonest_us(db: sqlite3.Cursor, agents: Collection[str] | None) -> int | None:
    """Returns the earliest wake time of some agents' unheld runs."""
    soonest: int | None = None
    queues = [line for line in db.execute(Q.wake_queues).fetchall() if agents is None or line[0] in agents]
    for agent, priority, lane, wake in sorted(queues, key=lambda line: line[3]):
        # The first of a line may be held or ended, but no other wakes earlier.
        if soonest is not None and wake >= soonest:
            break
        found = db.execute(Q.waking, (agent, priority, lane, _NEVER_US, 1)).fetchone()
        if found is not None and (soonest is None or found[5] < soonest):
            soonest = found[5]
    return soonest


def _waking(db: sqlite3.Cursor, query: DueQuery, limit: int) -> Iterator[Due]:
    """Returns the first unheld runs past their wake time, from the highest priority on."""
    queues = [
        (priority, agent, lane)
        for agent, priority, lane, wake in db.execute(Q.wake_queues).fetchall()
        if wake <= query.now_us and query.has(agent)
    ]
    for priority, level in groupby(sorted(queues, reverse=True), key=lambda line: line[0]):
        if limit <= 0:
            return
        rows = [
            db.execute(Q.waking, (agent, priority, lane, query.now_us, limit)).fetchall() for _, agent, lane in level
        ]
        yield from (_due(row, since=row[5]) for line in rows for row in line)
        limit -= sum(map(len, rows))


def _abandoned(db: sqlite3.Cursor, query: DueQuery, limit: int) -> Iterator[Due]:
    """Returns the runs whose holder is dead or whose lease expired, by holder."""
    agents, names = query.condition
    for (holder,) in db.execute(Q.holders).fetchall():
        ended_us = query.clock_us if query.lives(holder) else None
        values = (holder, ended_us, query.now_us, *names, limit)
        for row in db.execute(Q.abandoned.format(agents=agents), values).fetchall():
            yield _due(row, since=row[19])


def _due(row: tuple[Any, ...], *, since: int) -> Due:
    found = run_row_of(row[:11])
    head: HeadRow = (row[0], row[1], *row[11:19])
    return found, since, head
