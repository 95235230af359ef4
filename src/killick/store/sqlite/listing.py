"""Run listings and counts of a SQLite store. Read-only.

Every query is answered in order from an index, so that a page costs only its rows.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator
from typing import Final

from msgspec.structs import replace

from killick.store.records import OWN_AGENTS, RunQuery, RunRow
from killick.store.sqlite.rows import SEQ_MAX, Q, run_row_of

_SINCE: Final = "changed_at_us >= ?"
_UNTIL: Final = "changed_at_us < ?"
_LITERALLY: Final = str.maketrans({sign: f"\\{sign}" for sign in "\\%_"})


def listed(db: sqlite3.Cursor, query: RunQuery, before: int | None, limit: int) -> list[RunRow]:
    """Returns matching runs, newest first. Each status is read separately and merged."""
    apart = len(query.status) > 1 and query.tag is None and query.contains is None and not query.holders
    queries = [replace(query, status=(status,)) for status in dict.fromkeys(query.status)] if apart else [query]
    found = list[RunRow]()
    if apart:
        db.execute("BEGIN")
    for one in queries:
        source, conditions, values = _where(one)
        sql = Q.runs.format(source=source, conditions=conditions)
        found += map(run_row_of, db.execute(sql, (SEQ_MAX if before is None else before, *values, limit)))
    if apart:
        db.execute("COMMIT")
    return sorted(found, key=lambda row: -row.number)[:limit] if apart else found


def counted(db: sqlite3.Cursor, query: RunQuery) -> dict[str, int]:
    """Counts runs by status, of those that match in all else."""
    if query.tag is not None or query.contains is not None or query.holders or query.quarantined:
        source, conditions, values = _where(replace(query, status=()))
        return dict(db.execute(Q.counts.format(source=source, conditions=conditions), values).fetchall())
    counts = Counter[str]()
    conditions, times = _conditions((query.since_us, _SINCE), (query.until_us, _UNTIL))
    sql = Q.count_by_status.format(conditions=conditions)
    agents = [agent for (agent,) in db.execute(Q.agents).fetchall() if not agent.startswith(OWN_AGENTS)]
    for agent in agents if query.agent is None else [query.agent]:
        for status in _steps(db, Q.next_status, agent):
            counts[status] += db.execute(sql, (agent, status, *times)).fetchone()[0]
    return {status: count for status, count in counts.items() if count}


def _steps(db: sqlite3.Cursor, sql: str, *prefix: str) -> Iterator[str]:
    """Returns the distinct values of an index by repeated seeks."""
    last: str | None = db.execute(sql, (*prefix, "")).fetchone()[0]
    while last is not None:
        yield last
        last = db.execute(sql, (*prefix, last)).fetchone()[0]


def _where(query: RunQuery) -> tuple[str, str, list[str | int]]:
    """Returns a query's table, conditions and parameters."""
    part = None if query.contains is None else f"%{query.contains.translate(_LITERALLY)}%"
    conditions, values = _conditions(
        (query.agent, "agent = ?"),
        (query.tag, "tag = ?"),
        (query.since_us, _SINCE),
        (query.until_us, _UNTIL),
        (part, "run LIKE ? ESCAPE '\\'"),
    )
    for column, names in (("status", query.status), ("holder", query.holders)):
        if names:
            conditions += f" AND {column} IN ({', '.join('?' * len(names))})"
    if query.agent is None and query.tag is None:
        conditions += f" AND agent NOT GLOB '{OWN_AGENTS}*'"
    conditions += Q.only_quarantined if query.quarantined else ""
    source = Q.from_held if query.holders else Q.from_runs
    if query.tag is not None:
        source = Q.from_tags
    elif part is not None and not query.holders:
        source = Q.from_heads
    return source, conditions, [*values, *query.status, *query.holders]


def _conditions(*conditions: tuple[str | int | None, str]) -> tuple[str, list[str | int]]:
    """Returns the conditions of the given values, and their parameters."""
    used = [(value, condition) for value, condition in conditions if value is not None]
    return "".join(f" AND {condition}" for _, condition in used), [value for value, _ in used]
