"""Translates the errors of SQLite."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from killick.errors import StoreBroken, StoreBusy, StoreClosed, StoreFull, StoreReadOnly, StoreUnavailable, ValueRefused
from killick.permissions import disk_is_full
from killick.text import LONE_SURROGATE, printable


def translated(error: BaseException, path: Path, *, is_closed: bool, busy_seconds: float) -> BaseException:
    """Returns the error to raise for one of SQLite's; another one is returned unchanged."""
    place = str(path)
    if isinstance(error, UnicodeEncodeError):
        return ValueRefused(printable(error.object), LONE_SURROGATE)
    if isinstance(error, UnicodeDecodeError):
        return StoreBroken(place, "has text that is not valid UTF-8")
    if not isinstance(error, sqlite3.Error) or isinstance(error, sqlite3.IntegrityError):
        return error
    if isinstance(error, sqlite3.ProgrammingError):
        return StoreClosed(place) if is_closed else error
    match getattr(error, "sqlite_errorcode", 0) & 0xFF:
        case sqlite3.SQLITE_FULL:
            return StoreFull(place)
        case sqlite3.SQLITE_IOERR | sqlite3.SQLITE_CANTOPEN if disk_is_full(path):
            return StoreFull(place)
        case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_PERM:
            return StoreReadOnly(place)
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return StoreBusy(place, busy_seconds)
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
            return StoreBroken(place, str(error))
        case sqlite3.SQLITE_CANTOPEN:
            return StoreUnavailable(place, "cannot be opened; check that its folder exists and can be written")
        case _:
            return StoreUnavailable(place, f"SQLite says: {error}")
