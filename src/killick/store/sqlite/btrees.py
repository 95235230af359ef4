"""Finds the damaged b-trees of a SQLite file, reads around their damaged pages, and builds derived ones again.

A page that a disk lost makes every statement fail that touches it. REINDEX and DROP touch every page of a tree, so a
damaged tree is replaced: a new one takes its place in the schema, and VACUUM frees the pages of the old one.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections.abc import Container, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from killick.store.holes import next_readable
from killick.store.records import LAST, Problem
from killick.store.sqlite.rows import SEQ_BITS, Q

_DERIVED: Final = frozenset({"piece_uses", "runs", "tags", "snapshots", "quarantine", "marks", "marked", "rate_limits"})
"""Tables that verification of the runs writes again; losing a rate limit only forgets calls."""

_NUMBERED: Final = frozenset({"heads", "events", "pieces", "runs", "quarantine", "aside", "marked", "feed"})
"""Tables with a number as their key."""

_OF_RUN: Final = "id > ?1 << 32 AND id < (?1 + 1) << 32"
_READ_BY: Final = {
    "heads": "run = ?", "pieces": "hash = ?", "events": _OF_RUN, "aside": _OF_RUN,
    "inbox": "number = ?", "slots": "number = ?", "claims": "number = ?",
}  # fmt: skip
"""How the store reads each table of truth."""

_REBUILT: Final = "_rebuilt"
_PASSING: Final = frozenset({
    sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL, sqlite3.SQLITE_INTERRUPT, sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_NOMEM,
})  # fmt: skip
_UNUSED: Final = re.compile(r"(\*\*\* in database main \*\*\*\s*)?(Page \d+( is|:) never used\s*)*")
"""What the integrity check says of pages that no tree uses: they hold nothing."""


def is_damage(error: sqlite3.Error) -> bool:
    """Returns whether an error means that the file cannot be read, and not that it is busy or the disk full."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF not in _PASSING


def check(db: sqlite3.Cursor) -> str | None:
    """Returns what is wrong with the file's pages, or None."""
    return _complaint(db, "PRAGMA integrity_check(20)")


class Tree(NamedTuple):
    """A damaged tree: its table, the index or None, and what is wrong with it."""

    table: str
    index_name: str | None
    what: str

    @property
    def is_derived(self) -> bool:
        """Whether nothing is lost with it."""
        return self.index_name is not None or self.table in _DERIVED

    def problem(self, *, healed: bool) -> Problem:
        part = f"pages of the index {self.index_name}" if self.index_name else "pages"
        return Problem(where=self.table, what=f"{part} are damaged: {self.what}", healed=healed and self.is_derived)


def damaged(db: sqlite3.Cursor) -> Iterator[Tree]:
    """Yields the damaged trees. Reads the whole file."""
    for (table,) in db.execute(Q.tables).fetchall():
        holes = Holes()
        for _ in readable(db, table, holes):
            pass
        if holes.what:
            yield Tree(table, None, holes.what)
        elif (what := _complaint(db, f"PRAGMA integrity_check({table})")) is not None:
            indexes = db.execute(Q.indexes, (table,)).fetchall()
            if "out of order" in what or not indexes:
                yield Tree(table, None, what)
            else:
                yield from (Tree(table, index, what) for index, _ in indexes)


def known_runs(db: sqlite3.Cursor) -> Iterator[str]:
    """Yields the runs that have a head, by the index of their names alone."""
    yield from (run for (run,) in _until_damaged(db, Q.known_runs, (), Holes()))


def _complaint(db: sqlite3.Cursor, pragma: str) -> str | None:
    try:
        lines = [str(line) for (line,) in db.execute(pragma) if line != "ok" and not _UNUSED.fullmatch(str(line))]
    except sqlite3.Error as error:
        if not is_damage(error):
            raise
        return str(error)
    return "; ".join(" ".join(line.removeprefix("*** in database main ***").split()) for line in lines) or None


# reading around -----------------------------------------------------------------------------------


class Holes:
    """What is wrong with the rows of a table that could not be read; "": nothing."""

    def __init__(self) -> None:
        self.what = ""


def readable(db: sqlite3.Cursor, table: str, holes: Holes) -> Iterator[tuple[Any, ...]]:
    """Yields every row that is on a readable page, in no order. Notes the rest in `holes`."""
    columns, key = _columns(db, table)
    query = partial(Q.readable.format, columns=", ".join(columns), table=table)
    order = f"ORDER BY {', '.join(key)}" if key else ""
    backwards = f"{order.replace(',', ' DESC,')} DESC"
    if key[:1] == ["number"] or (len(key) == 1 and table in _NUMBERED):
        after = query(conditions=f"WHERE {key[0]} >= ? {order}")
        before = query(conditions=f"WHERE {key[0]} >= ? AND {key[0]} < ? {backwards}")
        yield from _by_number(db, after, before, holes, SEQ_BITS if _READ_BY.get(table) == _OF_RUN else None)
        return
    yield from _until_damaged(db, query(conditions=order), (), holes)
    if holes.what and key:  # from the other end; rows that come twice are for the reader to ignore
        yield from _until_damaged(db, query(conditions=backwards), (), holes)


def _columns(db: sqlite3.Cursor, table: str) -> tuple[list[str], list[str]]:
    """Returns the names of a table's columns, and of those in its primary key."""
    columns = db.execute(f"PRAGMA table_info({table})").fetchall()
    return [column[1] for column in columns], [
        column[1] for column in sorted(columns, key=lambda column: column[5]) if column[5]
    ]


def _by_number(
    db: sqlite3.Cursor, after: str, before: str, holes: Holes, run_bits: int | None
) -> Iterator[tuple[Any, ...]]:
    """Reads a table whose key begins with a number, and finds the end of each unreadable range."""
    first: int | None = 0
    while first is not None:
        last, here = first, Holes()
        for row in _until_damaged(db, after, (first,), here):
            if isinstance(row[0], int):
                last = max(first, row[0])
            yield row
        if not here.what:
            return
        holes.what = holes.what or here.what
        first = next_readable(last, lambda at: _can_read(db, after, at), run_bits=run_bits)
        # The last rows of a number whose first ones are on the damaged page.
        yield from _until_damaged(db, before, (last, LAST if first is None else first), Holes())


def _can_read(db: sqlite3.Cursor, query: str, first: int) -> bool:
    holes = Holes()
    next(_until_damaged(db, query, (first,), holes), None)
    return not holes.what


def _until_damaged(db: sqlite3.Cursor, query: str, values: Sequence[Any], holes: Holes) -> Iterator[tuple[Any, ...]]:
    read = 0
    try:
        for row in db.connection.cursor().execute(query, values):
            yield row
            read += 1
    except sqlite3.Error as error:
        if not is_damage(error):
            raise
        holes.what = holes.what or str(error)
        # A cursor of sqlite3 reads one row ahead, and drops the last row before a damaged page.
        with contextlib.suppress(sqlite3.Error):
            yield from db.connection.cursor().execute(f"{query} LIMIT 1 OFFSET {read}", values).fetchall()


# building again -----------------------------------------------------------------------------------


def rebuild(db: sqlite3.Cursor, tree: Tree, reader: sqlite3.Cursor) -> None:
    """Replaces a damaged index, or a damaged table with its readable rows and its indexes.

    The rows come from another connection: a failed read spoils the transaction of its own. Raises RowsLost where a
    read of the store would find less in the new table.
    """
    db.execute("PRAGMA writable_schema = ON")
    table, fresh = tree.table, f"{tree.table}{_REBUILT}"
    refused = set[tuple[Any, ...]]()
    if tree.index_name is not None:
        columns = ", ".join(row[2] for row in db.execute(f"PRAGMA index_info({tree.index_name})"))
        _, where, condition = _sql(db, tree.index_name).partition(" WHERE ")
        db.execute(Q.rebuilt_index.format(fresh=fresh, table=table, columns=columns, conditions=where + condition))
        trees = {tree.index_name: fresh}
    else:
        db.execute(re.sub(rf'TABLE "?{table}"?', f"TABLE {fresh}", _sql(db, table), count=1))
        for row in readable(reader, table, Holes()):
            try:
                db.execute(Q.put_rebuilt.format(fresh=fresh, values=", ".join("?" * len(row))), row)
            except sqlite3.IntegrityError:  # a damaged row that a STRICT table refuses
                refused.add(row)
        trees = {table: fresh}
        for index, sql in db.execute(Q.indexes, (table,)).fetchall():
            if sql is None:
                trees[index] = index.replace(f"_{table}_", f"_{fresh}_")
            else:
                trees[index] = f"{index}{_REBUILT}"
                db.execute(re.sub(rf"INDEX {index} ON {table}\b", f"INDEX {trees[index]} ON {fresh}", sql))
    if tree.index_name is None and table in _READ_BY:
        _refuse_loss(db, reader, table, fresh, refused)
    db.executemany(Q.swap_tree, [(other, name) for name, other in trees.items()])
    db.executemany(Q.drop_tree, [(other,) for other in trees.values()])
    db.execute("PRAGMA writable_schema = RESET")


def _sql(db: sqlite3.Cursor, name: str) -> str:
    [(sql,)] = db.execute(Q.tree_sql, (name,)).fetchall()
    return sql or ""


class RowsLost(Exception):
    """A table was not written again, because that would lose rows that a read still finds."""


def _refuse_loss(db: sqlite3.Cursor, reader: sqlite3.Cursor, table: str, fresh: str, refused: Container[Any]) -> None:
    """Makes each read of the store that still works, and compares its rows with the new table."""
    columns, key = _columns(db, table)
    names, where = ", ".join(columns), " AND ".join(f"{name} = ?" for name in key)
    kept = Q.kept.format(columns=names, table=fresh, conditions=where)
    read = Q.kept.format(columns=names, table=table, conditions=_READ_BY[table])
    for value in _values_read(reader, table):
        holes = Holes()
        rows = list(_until_damaged(reader, read, (value,), holes))
        for row in () if holes.what else rows:
            if row not in refused and db.execute(kept, [row[columns.index(name)] for name in key]).fetchone() != row:
                raise RowsLost(f"that would lose rows of {value!r} that can be read")


def _values_read(reader: sqlite3.Cursor, table: str) -> Iterator[Any]:
    """Yields the values by which the store reads a table."""
    if table == "heads":
        return known_runs(reader)
    if table == "pieces":
        return (hash_ for (hash_,) in _until_damaged(reader, Q.known_pieces, (), Holes()))
    return (row[0] for row in readable(reader, "heads", Holes()))
