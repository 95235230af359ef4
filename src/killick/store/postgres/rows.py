"""Decodes PostgreSQL rows into records."""

from __future__ import annotations

from typing import Any, Final, get_args

from msgspec.structs import replace

from killick.model.facts import Status
from killick.store.postgres.wire import Q
from killick.store.records import OWN_AGENTS, Claimed, RunQuery, RunRow
from killick.store.sql.rows import head_of

_STATUSES: Final[tuple[str, ...]] = get_args(Status)


def run_row_of(found: tuple[Any, ...]) -> RunRow:
    number, run, agent, status, priority, wake, started, changed, tags, delivered, is_counted = found
    return RunRow(
        number=number, run=run, agent=agent, status=status, priority=priority, wake_at_us=wake,
        started_at_us=started, changed_at_us=changed, tags=tuple(tags), delivered=delivered if is_counted else -1,
    )  # fmt: skip


def claimed_of(found: tuple[Any, ...]) -> Claimed:
    *columns, left, left_until_us = found
    row = run_row_of((*columns[:2], *columns[10:]))
    return Claimed(head=head_of(tuple(columns[:10])), row=row, left=left, left_until_us=left_until_us)


def runs_query(query: RunQuery) -> tuple[str, str, list[Any]]:
    """Returns a listing's SQL under a unique name, and its parameters after cursor and limit."""
    if query.status and {*query.status} <= {*_STATUSES} and not query.tag and not query.holders:
        name, conditions, values = _where(replace(query, status=()), offset=2)
        places = sorted({_STATUSES.index(status) for status in query.status})
        parts = (Q.runs_of_status.format(status=_STATUSES[place], conditions=conditions) for place in places)
        name = f"runs_{''.join(map(str, places))}{name}"
        return name, Q.runs_by_status.format(found=" UNION ALL ".join(parts)), values
    name, conditions, values = _where(query, offset=2)
    return f"runs{name}", Q.runs.format(conditions=conditions), values


def counts_query(query: RunQuery) -> tuple[str, str, list[Any]]:
    """The same for counts, of any status."""
    name, conditions, values = _where(replace(query, status=()), offset=0)
    return f"counts{name}", Q.counts.format(conditions=conditions), values


def _where(query: RunQuery, *, offset: int) -> tuple[str, str, list[Any]]:
    name, conditions, values = "", "", list[Any]()
    for part, value, condition in (
        ("status", list(query.status) or None, "status = ANY ({value})"),
        ("agent", query.agent, "agent = {value}"),
        ("tag", query.tag, Q.tagged),
        ("since", query.since_us, "changed_at_us >= {value}"),
        ("until", query.until_us, "changed_at_us < {value}"),
        ("holders", list(query.holders) or None, "holder = ANY ({value})"),
        ("contains", query.contains, Q.containing),
        ("quarantined", query.quarantined or None, "quarantined IS NOT NULL AND {value}"),
        ("other", None if query.agent or query.tag else OWN_AGENTS, "NOT starts_with(agent, {value})"),
    ):
        if value is not None:
            values.append(value)
            name += f"_{part}"
            conditions += f" AND {condition.format(value=f'${len(values) + offset}')}"
    return name, conditions, values
