"""SQLite transactions shared with an application: on our connection, or on the application's.

Decides who may end one, and which connection may be joined. `writes` contains the store's statements.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, Final

from killick.errors import LogError, StoreError
from killick.store.records import Append, Delivered, Delivery, Head
from killick.store.sqlite.file import SqliteFile
from killick.store.sqlite.writes import RunsToNotify, Writes

NOT_YOURS: Final = (
    "this transaction is committed when the tool returns and rolled back when it raises; "
    "take out its own BEGIN, COMMIT, commit(), rollback(), or `with connection`"
)


class SqliteTransaction:
    """A transaction that is open on a connection."""

    def __init__(self, connection: sqlite3.Connection, file: SqliteFile, writes: Writes) -> None:
        self.connection = connection
        self.to_notify: RunsToNotify = []
        self.was_denied = False
        self._file = file
        self._writes = writes

    @property
    def is_open(self) -> bool:
        try:
            return self.connection.in_transaction
        except sqlite3.ProgrammingError:
            return False

    def append(self, items: Sequence[Append]) -> list[Head | LogError]:
        with self.cursor() as db:
            return [self._writes.append(db, item, self.to_notify) for item in items]

    def deliver(self, deliveries: Sequence[Delivery]) -> list[Delivered | LogError]:
        with self.cursor() as db:
            return [self._writes.deliver(db, delivery, self.to_notify) for delivery in deliveries]

    @contextlib.contextmanager
    def cursor(self) -> Generator[sqlite3.Cursor, None, None]:
        """Returns a cursor with our row and text formats, independent of the connection's."""
        texts, self.connection.text_factory = self.connection.text_factory, str
        try:
            with self._file.explained():
                cursor = self.connection.cursor()
                cursor.row_factory = None
                yield cursor
        finally:
            self.connection.text_factory = texts

    def authorize(self, action: int, *_: str | None) -> int:
        """SQLite's authorizer: refuses statements that would end the transaction."""
        if action != sqlite3.SQLITE_TRANSACTION:
            return sqlite3.SQLITE_OK
        self.was_denied = True
        return sqlite3.SQLITE_DENY


@contextlib.contextmanager
def transaction(
    file: SqliteFile, writes: Writes, callback: Callable[[RunsToNotify], None]
) -> Generator[SqliteTransaction, None, None]:
    """A transaction on our own connection, which only the end of the block ends."""
    with file.transacting() as connection:
        opened = SqliteTransaction(connection, file, writes)
        connection.set_authorizer(opened.authorize)
        try:
            yield opened
        except sqlite3.DatabaseError as error:
            if opened.was_denied:
                raise StoreError(NOT_YOURS) from error
            raise
        finally:
            with contextlib.suppress(sqlite3.ProgrammingError):  # the caller closed it
                connection.set_authorizer(None)
    callback(opened.to_notify)


def join(connection: Any, file: SqliteFile, writes: Writes) -> SqliteTransaction:
    """Joins a transaction on the caller's connection, if that is to the same file."""
    if not isinstance(connection, sqlite3.Connection):
        kind = f"{type(connection).__module__}.{type(connection).__qualname__}"
        raise StoreError(f"{file.place}: tx= takes a sqlite3.Connection to this file, not a {kind}")
    joined = SqliteTransaction(connection, file, writes)
    with joined.cursor() as db:
        path = next(str(path) for _, name, path in db.execute("PRAGMA database_list") if name == "main")
    if not path or not file.path.exists() or not Path(path).samefile(file.path):
        raise StoreError(f"{file.place}: tx= is a connection to {path or 'memory'}; open one to this file")
    if not connection.in_transaction:
        raise StoreError(f"{file.place}: no transaction is open on tx=; execute BEGIN IMMEDIATE on it first")
    return joined
