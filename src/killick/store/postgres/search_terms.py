"""The search-term index in PostgreSQL: runs to index, writes, and queries for several terms at once.

Terms are opaque numbers. The index is derived: if one row is damaged, all of its run's rows are rebuilt.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import msgspec

from killick.store.postgres.server import Statements
from killick.store.postgres.wire import Session
from killick.store.records import Behind, TermBatch, TermPosition, row_check

_LAST: Final = (1 << 63) - 1
"""Later than any time, and more than any number."""


def unmarked(session: Session, q: Statements, after: int, limit: int) -> list[Behind]:
    rows = session.rows(q.unmarked, after, limit)
    return [Behind(number=number, run=run, base=base, marked=seq) for number, run, base, seq in rows]


def mark(session: Session, q: Statements, items: Sequence[TermBatch]) -> None:
    """Writes the terms of some runs, except where another process was first."""
    # In a fixed order, against deadlocks.
    for item in sorted(items, key=lambda item: item.run):
        found = session.rows(q.marked_to, item.run)
        if not found:
            continue
        number, base, seq, total = found[0]
        if item.anew:
            forget(session, q, [number])
            seq, total = base, 0
        if seq != item.after:
            continue
        marks = sorted({(each.term, each.at_us, each.seq) for each in item.marks})
        # A term may exist already; it counts once.
        put = session.rows(q.put_marks, number, *(list(column) for column in zip(*marks, strict=True))) if marks else []
        total += sum(row_check(*row) for row in put)
        session.run(q.put_marked, number, item.up_to, total, row_check(number, item.up_to, total))


def forget(session: Session, q: Statements, numbers: Sequence[int]) -> None:
    """Drops all terms of some runs by a full scan: only removal, erasure and repair need it."""
    if numbers:
        session.run(q.drop_marks, numbers)
        session.run(q.drop_marked, numbers)


def marked(
    session: Session,
    q: Statements,
    all_of: Sequence[Collection[int]],
    since_us: int | None,
    until_us: int | None,
    before: TermPosition | None,
    limit: int,
) -> list[TermPosition]:
    first = (_LAST, _LAST, _LAST) if until_us is None else (until_us, 0, -1)
    if before is not None:
        first = min(first, (before.at_us, before.number, before.seq - 1))
    groups = msgspec.json.encode([list(terms) for terms in all_of])
    found = session.rows(q.marked, groups, 0 if since_us is None else since_us, *first, limit)
    return [TermPosition(*row) for row in found] if all_of else []
