"""The search-term index in SQLite: runs to index, writes, and queries for several terms at once.

Terms are opaque numbers. The index is derived: if one row is damaged, all of its run's rows are rebuilt.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import cycle
from typing import Final

from killick.store.records import IndexQuery, Key, TermBatch, TermPosition, row_check
from killick.store.sql.rows import damaged_terms
from killick.store.sqlite.rows import Q

_TOGETHER: Final = 500
"""The number of runs whose terms one statement drops."""

_Row = tuple[int, int, int, int]


def index_terms(db: sqlite3.Cursor, items: Sequence[TermBatch]) -> None:
    """Writes the terms of some runs, except where another process was first."""
    fresh: set[_Row] = set()
    for item in items:
        found = db.execute(Q.index_position, (item.run,)).fetchone()
        if found is None:
            continue
        number, base, seq, total = found
        if item.reset:
            forget(db, [number])
            seq, total = base, 0
        if seq != item.after:
            continue
        rows = {(each.term, each.at_us, number, each.seq) for each in item.terms}
        if seq == base:
            fresh |= rows
        else:
            # A term may exist already; it counts once.
            rows = {row for row in rows if db.execute(Q.put_term, row).rowcount}
        total += sum(row_check(*row) for row in rows)
        db.execute(Q.put_index_position, (number, item.up_to, total, row_check(number, item.up_to, total)))
    # In index order, so that neighbouring entries are written together.
    db.executemany(Q.put_term, sorted(fresh))


def forget(db: sqlite3.Cursor, numbers: Sequence[int]) -> None:
    """Drops all terms of some runs by a full scan: only removal, erasure and repair need it."""
    for first in range(0, len(numbers), _TOGETHER):
        some = numbers[first : first + _TOGETHER]
        places = ", ".join("?" * len(some))
        for drop in (Q.drop_terms, Q.drop_index_positions):
            db.execute(drop.format(numbers=places), some)


# finding ------------------------------------------------------------------------------------------


def search(db: sqlite3.Cursor, query: IndexQuery) -> Iterator[TermPosition]:
    """Yields events with a term of every group, newest first.

    Each group in turn names its newest candidate and the others skip to it, so the cost is bounded by the rarest group.
    """
    runs: dict[int, str | None] = {}
    key, agreed = query.start, 0
    for terms in cycle(query.all_of):
        found = _newest(db, terms, key)
        if found is None or found[0] < (query.since_us or 0):
            return
        agreed = agreed + 1 if found == key else 1
        key = found
        if agreed < len(query.all_of):
            continue
        at_us, number, seq = key
        if number not in runs:
            named = db.execute(Q.indexed_run, (number,)).fetchone()
            runs[number] = None if named is None else str(named[0])
        run = runs[number]
        if run is not None:
            yield TermPosition(at_us, number, seq, run)
        key, agreed = (at_us, number, seq - 1), 0


def _newest(db: sqlite3.Cursor, terms: Collection[int], key: Key) -> Key | None:
    found = (db.execute(Q.newest_term, (term, *key)).fetchone() for term in terms)
    return max((each for each in found if each is not None), default=None)


# checking -----------------------------------------------------------------------------------------


def damaged(db: sqlite3.Cursor, names: Mapping[int, str]) -> dict[int, str]:
    """Returns the runs, by number, whose search terms are damaged, with the message."""
    positions = db.execute(Q.all_index_positions).fetchall()
    return damaged_terms(db.execute(Q.all_terms), positions, names)
