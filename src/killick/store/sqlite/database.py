"""What a SQLite database does for a store, in a file or in memory: transactions, and errors in Killick's terms."""

from __future__ import annotations

import contextlib
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from killick.errors import (
    StoreBroken,
    StoreBusy,
    StoreClosed,
    StoreFull,
    StoreReadOnly,
    StoreUnavailable,
    ValueRefused,
)
from killick.permissions import disk_is_full
from killick.store.sqlite.rows import Moved
from killick.text import LONE_SURROGATE, printable


class Database(ABC):
    """A database that one process writes at a time."""

    path: Path
    place: str
    _closed = False
    _busy_seconds = 0.0

    @abstractmethod
    def writing(self) -> AbstractContextManager[sqlite3.Cursor, bool | None]:
        """The write lock and a transaction: committed at the end, rolled back by any exception."""

    @abstractmethod
    def leasing(self) -> AbstractContextManager[sqlite3.Cursor, bool | None]:
        """As `writing`, for a lease, which a power failure may undo."""

    @abstractmethod
    def reading(self) -> AbstractContextManager[sqlite3.Cursor, bool | None]:
        """A connection that sees committed data."""

    @abstractmethod
    def write(self, moves: Sequence[Moved], sql: str, inner: str) -> None:
        """Writes moved heads and their events as one transaction. An IntegrityError refuses all of it."""

    @abstractmethod
    def close(self) -> None: ...

    def refuse_closed(self) -> None:
        if self._closed:
            raise StoreClosed(self.place)

    @contextlib.contextmanager
    def explained(self) -> Generator[None, None, None]:
        """Translates SQLite's errors; `database is locked` never reaches a caller."""
        try:
            yield
        except (sqlite3.Error, UnicodeError) as error:
            raise self.explain(error) from error

    def explain(self, error: BaseException) -> BaseException:
        """Translates an error; one that is not SQLite's is returned unchanged."""
        if isinstance(error, UnicodeEncodeError):
            return ValueRefused(printable(error.object), LONE_SURROGATE)
        if isinstance(error, UnicodeDecodeError):
            return StoreBroken(self.place, "has text that is not valid UTF-8")
        if not isinstance(error, sqlite3.Error) or isinstance(error, sqlite3.IntegrityError):
            return error
        if isinstance(error, sqlite3.ProgrammingError):
            return StoreClosed(self.place) if self._closed else error
        match getattr(error, "sqlite_errorcode", 0) & 0xFF:
            case sqlite3.SQLITE_FULL:
                return StoreFull(self.place)
            case sqlite3.SQLITE_IOERR | sqlite3.SQLITE_CANTOPEN if disk_is_full(self.path):
                return StoreFull(self.place)
            case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_PERM:
                return StoreReadOnly(self.place)
            case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
                return StoreBusy(self.place, self._busy_seconds)
            case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
                return StoreBroken(self.place, str(error))
            case sqlite3.SQLITE_CANTOPEN:
                return StoreUnavailable(self.place, "cannot be opened; check that its folder exists and can be written")
            case _:
                return StoreUnavailable(self.place, f"SQLite says: {error}")


def execute_script(connection: sqlite3.Cursor, script: str) -> None:
    """Runs a script inside the open transaction; `executescript` would commit it first."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            connection.execute(statement)
            statement = ""
