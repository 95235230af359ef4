"""Decodes SQLite rows into records, with the small reads and writes that transactions share."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from killick.errors import RunUnknown
from killick.model.chunks import Blob
from killick.store.records import ERASED_BODY, Row, RunRow, row_check, tags_of
from killick.store.sql import queries

Q: Final = queries("sqlite")
SEQ_BITS: Final = 32
SEQ_MAX: Final = (1 << SEQ_BITS) - 1
HeadRow = tuple[int, str, int, bytes, int, int, str | None, str | None, int | None, int]
"""number, run, seq, hash, epoch, base, parent, holder, lease_until_us, removed"""


class Moved(NamedTuple):
    """A head that moved past events, and the rows that write it: one statement takes the last two events."""

    head: HeadRow
    columns: tuple[object, ...]
    inner: list[tuple[object, ...]]
    """The events before those, for a statement of their own."""


def extended(head: HeadRow, rows: Sequence[Row]) -> Moved:
    """Moves a head past these events."""
    number, run, after, before, epoch, base, parent, holder, until, removed = head
    last = rows[-1]
    seq, hash_, data = last.seq, last.hash, last.data
    moved = (number, run, seq, hash_, epoch, base, parent, holder, until, removed)
    # sqlite3 binds a bytearray at once, but looks for an adapter of bytes.
    columns = (
        number, after, bytearray(before), epoch, holder, until, seq, bytearray(last.body), data and bytearray(data),
        bytearray(hash_), row_check(*moved),
    )  # fmt: skip
    if len(rows) == 1:
        return Moved(moved, (*columns, None, None, None), [])
    _, body, found, first = event_row(number, rows[-2])
    return Moved(moved, (*columns, body, found, first), [event_row(number, row) for row in rows[:-2]])


def event_row(number: int, row: Row) -> tuple[int, bytearray, bytearray | bytes | None, bytearray]:
    """Returns an event's columns, as `put_event` takes them."""
    return (number << SEQ_BITS) + row.seq, bytearray(row.body), row.data and bytearray(row.data), bytearray(row.hash)


def with_lease(head: HeadRow, holder: str | None, until_us: int | None, *, epoch: int | None = None) -> HeadRow:
    """Returns a head with another holder, or none."""
    number, run, seq, hash_, before, base, parent, _, _, removed = head
    return (number, run, seq, hash_, before if epoch is None else epoch, base, parent, holder, until_us, removed)


def write_lease(db: sqlite3.Cursor, row: HeadRow, before: HeadRow) -> bool:
    """Writes a run's holder; its log is unchanged. Returns False, and writes nothing, if the head as it was read fails
    its checksum: a new one would hide that."""
    number, _, _, _, epoch, _, _, holder, until, removed = row
    columns = (epoch, holder, until, removed, row_check(*row), number, row_check(*before))
    return bool(db.execute(Q.write_lease, columns).rowcount)


HEAD_DAMAGED: Final = "its head is not as it was written"


def write_head(db: sqlite3.Cursor, row: HeadRow) -> None:
    """Writes a run's head after an append."""
    number, _, seq, hash_, _, _, _, holder, until, _ = row
    db.execute(Q.write_head, (seq, hash_, holder, until, row_check(*row), number))


def find_head(db: sqlite3.Cursor, run: str) -> HeadRow | None:
    """Returns a run's head; None for an unknown or a removed run."""
    found: HeadRow | None = db.execute(Q.head, (run,)).fetchone()
    return None if found is None or found[9] else found


def require_head(db: sqlite3.Cursor, run: str) -> HeadRow:
    if (found := find_head(db, run)) is None:
        raise RunUnknown(run)
    return found


def hash_at(db: sqlite3.Cursor, head: HeadRow, seq: int) -> bytes | None:
    """Returns the chain hash at a seq, from the run or its ancestors."""
    if seq > head[2]:
        return None
    while seq <= head[5] and head[6] is not None:
        head = require_head(db, head[6])
    found = db.execute(Q.event, ((head[0] << SEQ_BITS) + seq,)).fetchone()
    return None if found is None else bytes(found[3])


def put_pieces(db: sqlite3.Cursor, number: int, kind: int, pieces: Sequence[Blob]) -> None:
    if pieces:
        db.executemany(Q.put_piece, [(piece.hash, piece.codec, piece.body) for piece in pieces])
        db.executemany(Q.use_piece, [(number, kind, piece.hash) for piece in pieces])


def erase(db: sqlite3.Cursor, id_: int) -> None:
    """Erases an event's data, also in displaced rows."""
    db.execute(Q.erase_event, (id_,))
    for columns in db.execute(Q.displaced_row, (id_,)).fetchall():
        db.execute(Q.put_displaced, (*columns, row_check(*columns)))


def erase_message(db: sqlite3.Cursor, number: int, message: int) -> None:
    """Erases the body of a message; its id, name and sender stay."""
    found = db.execute(Q.message, (number, message)).fetchone()
    if found is not None:
        check = row_check(number, *found[:3], ERASED_BODY, *found[4:])
        db.execute(Q.erase_message, (ERASED_BODY, check, number, message))


def set_taken(db: sqlite3.Cursor, number: int, message: int, taken: int | None) -> None:
    found = db.execute(Q.message, (number, message)).fetchone()
    if found is not None:
        db.execute(Q.set_taken, (taken, row_check(number, *found[:6], taken, *found[7:]), number, message))


def run_row(db: sqlite3.Cursor, number: int) -> RunRow | None:
    found = db.execute(Q.run_row, (number,)).fetchone()
    return None if found is None else run_row_of(found)


def run_row_of(row: tuple[Any, ...]) -> RunRow:
    number, run, agent, status, priority, wake, started, changed, tags, delivered, checksum = row
    delivered = intact_count(number, delivered, checksum)
    return RunRow(
        number=number, run=run, agent=agent, status=status, priority=priority, wake_at_us=wake,
        started_at_us=started, changed_at_us=changed, tags=tags_of(tags), delivered=delivered,
    )  # fmt: skip


def intact_count(number: int, delivered: int, checksum: int) -> int:
    """Returns the count of a run's messages; -1 if it fails its checksum."""
    return delivered if row_check(number, delivered) == checksum else -1


def execute_script(connection: sqlite3.Cursor, script: str) -> None:
    """Runs a script inside the open transaction; `executescript` would commit it first."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            connection.execute(statement)
            statement = ""
