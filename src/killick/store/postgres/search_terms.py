"""The search-term index in PostgreSQL: runs to index, writes, and queries for several terms at once.

Terms are opaque numbers. The index is derived: if one row is damaged, all of its run's rows are rebuilt.
"""

from __future__ import annotations

from collections.abc import Sequence

from killick.store.postgres.server import Statements
from killick.store.postgres.wire import Session
from killick.store.records import TermBatch, row_check


def index_terms(session: Session, q: Statements, items: Sequence[TermBatch]) -> None:
    """Writes the terms of some runs, except where another process was first."""
    session.run(q.lock_heads, [item.run for item in items])
    for item in items:
        found = session.rows(q.index_position, item.run)
        if not found:
            continue
        number, base, seq, total = found[0]
        if item.reset:
            forget(session, q, [number])
            seq, total = base, 0
        if seq != item.after:
            continue
        terms = sorted({(each.term, each.at_us, each.seq) for each in item.terms})
        # A term may exist already; it counts once.
        put = session.rows(q.put_terms, number, *(list(column) for column in zip(*terms, strict=True))) if terms else []
        total += sum(row_check(*row) for row in put)
        session.run(q.put_index_position, number, item.up_to, total, row_check(number, item.up_to, total))


def forget(session: Session, q: Statements, numbers: Sequence[int]) -> None:
    """Drops all terms of some runs by a full scan: only removal, erasure and repair need it."""
    if numbers:
        session.run(q.drop_terms, numbers)
        session.run(q.drop_index_positions, numbers)
