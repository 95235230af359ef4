"""The in-memory store: the tables of the SQLite store, in the memory of this process."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any

from killick.clock import Clock, SystemClock
from killick.errors import StoreError
from killick.fork_safety import ForkedMutex, register_for_forks
from killick.ids import Ids, RandomIds
from killick.store import records
from killick.store.liveness import Holders
from killick.store.notify import Listener
from killick.store.protocol import Transaction
from killick.store.sql import schema
from killick.store.sqlite.database import Database, execute_script
from killick.store.sqlite.rows import HeadRow, Moved, Q, put_meta
from killick.store.sqlite.store import Tables
from killick.store.sqlite.writes import Writes

_PLACE = "memory:"


class MemoryStore(Tables):
    """A store in the memory of this process."""

    def __init__(self, *, clock: Clock | None = None, ids: Ids | None = None) -> None:
        database, ids = _without_rows().copied(), ids or RandomIds()
        id_, secret_key = ids.new("store"), ids.key()
        with database.writing() as db:
            put_meta(db, id_, bytes(secret_key))
        self._open(database, clock or SystemClock(), set())
        self.secret_key = secret_key  # that of an encrypted store digests by itself

    def _open(self, database: MemoryDatabase, clock: Clock, released: set[str | None]) -> None:
        self._memory, self._released = database, released
        writes = _Writes(released, _PLACE, holders=_Holders(released), clock=clock)
        super().__init__(database, _Holders(released), _Listener(database.refuse_closed), writes, clock)

    def copied(self, clock: Clock) -> MemoryStore:
        """Returns an independent copy with another clock."""
        twin = object.__new__(type(self))
        twin._open(self._memory.copied(), clock, set(self._released))
        twin._lane, twin.secret_key = self._lane, self.secret_key
        return twin

    def lives(self, holder: str) -> bool:
        # All holders live in this process. One that released its last lease is not known any more.
        with self._database.reading() as db:
            return holder not in self._released or db.execute(Q.held, (holder, -1)).fetchone() is not None

    def transaction(self) -> AbstractContextManager[Transaction]:
        raise StoreError("memory: cannot join a transaction of yours; use a SQLite file or PostgreSQL")

    def join(self, connection: Any) -> Transaction:
        raise StoreError("memory: cannot join a transaction of yours; use a SQLite file or PostgreSQL")

    def purge(self) -> bool:
        return True

    def conditions(self) -> list[records.Condition]:
        return [records.Condition("place", self.place)]


class MemoryDatabase(Database, ForkedMutex):
    """One connection, for one reader or writer at a time."""

    def __init__(self) -> None:
        self.place, self.path = _PLACE, Path(_PLACE)
        self._mutex = threading.Lock()
        self._db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False, cached_statements=256)
        register_for_forks(self)

    def copied(self) -> MemoryDatabase:
        twin = MemoryDatabase()
        with self.reading():
            self._db.backup(twin._db)
        return twin

    @contextlib.contextmanager
    def reading(self) -> Generator[sqlite3.Cursor]:
        with self._mutex:
            self.refuse_closed()
            try:
                with self.explained():
                    yield self._db.cursor()
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")

    @contextlib.contextmanager
    def writing(self) -> Generator[sqlite3.Cursor]:
        with self.reading() as db:
            db.execute("BEGIN")
            yield db
            db.execute("COMMIT")

    leasing = writing

    def write(self, moves: Sequence[Moved], sql: str, inner: str) -> None:
        with self.writing() as db:
            db.executemany(inner, [row for moved in moves for row in moved.inner])
            db.executemany(sql, [moved.columns for moved in moves])

    def close(self) -> None:
        with self._mutex:
            self._closed = True
            self._db.close()


@cache
def _without_rows() -> MemoryDatabase:
    """Returns a database with the schema alone: to copy it is faster than to execute the schema again."""
    made = MemoryDatabase()
    with made.writing() as db:
        execute_script(db, schema("sqlite"))
    return made


class _Holders(Holders):
    """The holders of this process. `released` has those that released a lease since they took the last one."""

    def __init__(self, released: set[str | None]) -> None:
        self._released = released

    def lock(self, holder: str) -> None:
        self._released.discard(holder)

    def lives(self, holder: str) -> bool:
        return True

    def close(self) -> None: ...


class _Writes(Writes):
    def __init__(self, released: set[str | None], *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._released = released

    def free(self, db: sqlite3.Cursor, head: HeadRow) -> HeadRow:
        self._released.add(head[7])
        return super().free(db, head)


class _Listener(Listener):
    def _start(self) -> Any:
        return lambda: None
