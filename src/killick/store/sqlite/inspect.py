"""Re-reads a SQLite store row by row and reports damage. Changes nothing.

The pages are the subject of `btrees`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from killick.model.hashing import value_hash
from killick.store.records import Problem, lane_of, row_check, tags_of
from killick.store.sql.rows import problems_of
from killick.store.sqlite.btrees import Holes, known_runs, readable
from killick.store.sqlite.rows import Q
from killick.store.sqlite.search_terms import damaged

_CHECKED: Final = (
    ("meta", Q.meta),
    ("heads", Q.all_heads),
    ("inbox", Q.all_messages),
    ("claims", Q.all_claims),
    ("slots", Q.all_slots),
    ("aside", Q.all_displaced),
)
_DERIVED: Final = ("piece_uses", "runs", "tags", "snapshots", "quarantine", "feed")


def inspect(db: sqlite3.Cursor, *, heal: bool) -> Iterator[Problem]:
    """Returns every row that fails its checksum, has no owner, or is missing; of a file whose pages can be read."""
    names: dict[int, str] = {row[0]: row[1] for row in db.execute(Q.all_heads)}
    for table, query in _CHECKED:
        yield from _checksums(table, db.execute(query), names)
    yield from problems_of(db.execute(Q.strays).fetchall(), damaged(db, names), names, _DERIVED, heal=heal)
    for _, number in misplaced(db):
        what = "its lane is not that of its fairness key"
        yield Problem(where="runs", what=what, run=names.get(number) or f"run number {number}", healed=heal)
    counted, highest = db.execute(Q.count_heads).fetchone()
    if counted != highest:
        yield Problem(where="heads", what=f"{highest} runs were created, {counted} have a head")


def inspect_readable(db: sqlite3.Cursor) -> Iterator[Problem]:
    """Returns the readable rows that fail their checksum, and the runs whose head cannot be read; of a damaged file."""
    rows = {table: readable(db, table, Holes()) for table, _ in _CHECKED}
    heads = list(rows["heads"])
    names: dict[int, str] = {row[0]: row[1] for row in heads}
    yield from lost_heads(db)
    for table, found in {**rows, "heads": iter(heads)}.items():
        yield from _checksums(table, found, names)


def lost_heads(db: sqlite3.Cursor) -> Iterator[Problem]:
    """Returns the runs whose head is on a damaged page."""
    names = {row[1] for row in readable(db, "heads", Holes())}
    for run in known_runs(db):
        if run not in names:
            yield Problem(where="heads", what="its head is on a damaged page", run=run)


def _checksums(table: str, rows: Iterable[tuple[Any, ...]], names: Mapping[int, str]) -> Iterator[Problem]:
    for *columns, checksum in rows:
        if row_check(*columns) != checksum:
            number = columns[0] if isinstance(columns[0], int) else columns[2] if table == "claims" else None
            number = number >> 32 if table == "aside" and number is not None else number
            what = f"row {_label(columns)} is not as it was written"
            yield Problem(where=table, what=what, run=names.get(number) if number is not None else None)


def misplaced(db: sqlite3.Cursor) -> list[tuple[int, int]]:
    """Returns the lanes that runs should be in, with the runs' numbers, of those in another."""
    wanted = ((lane_of(tags_of(tags)), lane, number) for number, tags, lane in db.execute(Q.lanes))
    return [(right, number) for right, lane, number in wanted if right != lane]


def damaged_pieces(db: sqlite3.Cursor) -> tuple[list[bytes], list[bytes]]:
    """Returns the hashes of damaged chunks: those that logs use, and those that only snapshots use."""
    used = {piece for (piece,) in db.execute(Q.log_pieces)}
    truth: list[bytes] = []
    derived: list[bytes] = []
    for piece, hash_, codec, body in db.execute(Q.all_pieces):
        if body is not None and (not isinstance(codec, str) or value_hash(codec, body) != hash_):
            (truth if piece in used else derived).append(hash_)
    return truth, derived


def _label(columns: list[object]) -> str:
    return ", ".join(str(column) for column in columns[:2] if not isinstance(column, bytes))
