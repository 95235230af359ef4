"""Detects commits by other connections to a SQLite file, in any process, and that the file is gone."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable

from killick.errors import KillickError
from killick.fork_safety import ForkedMutex, register_for_forks


class CommitDetector(ForkedMutex):
    """A connection that only detects commits by others."""

    def __init__(self, connect: Callable[[], sqlite3.Connection], check: Callable[[], None]) -> None:
        self._connect = connect
        self._check = check
        self._db: sqlite3.Connection | None = connect()
        self._mutex = threading.Lock()
        self._version = self._data_version()
        register_for_forks(self)

    def before_fork(self) -> None:
        super().before_fork()
        if self._db is not None:
            self._db.close()
            self._db = None

    def changed(self) -> bool:
        """Returns whether anything was committed since the last call, or the file is gone: then readers find out."""
        try:
            self._check()
        except KillickError:
            return True
        before, self._version = self._version, self._data_version()
        return before != self._version

    def close(self) -> None:
        with self._mutex:
            if self._db is not None:
                self._db.close()

    def _data_version(self) -> int | None:
        """Reads SQLite's data version. On a new connection it starts elsewhere, which counts as a change."""
        try:
            with self._mutex:
                self._db = self._db or self._connect()
                version: int = self._db.execute("PRAGMA data_version").fetchone()[0]
                return version
        except (sqlite3.Error, KillickError):
            return None
