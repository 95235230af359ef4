"""One SQLite file: connections, transactions, format, and error translation.

Begins, commits and fails. The store decides what is read and written.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

from killick.errors import (
    KillickError,
    StoreBusy,
    StoreClosed,
    StoreFormat,
    StoreUnavailable,
)
from killick.fork_safety import ForkedMutex, keep_inherited, register_for_forks
from killick.permissions import reserve
from killick.store.records import STORE_FORMAT, Durability
from killick.store.sql import migrations, queries, schema
from killick.store.sqlite.commit_detector import CommitDetector
from killick.store.sqlite.identity import FileIdentity
from killick.store.sqlite.rows import Moved, execute_script
from killick.store.sqlite.translation import translated

APPLICATION_ID: Final = 0x6B656467
"""`kedg` in the file's header, which identifies a store."""

SQLITE_NEEDED: Final = (3, 37, 0)
PAGE_BYTES: Final = 2_048
"""Small pages: values of a few kilobytes waste little space, and a commit writes little more than its rows."""

WAL_PAGES_MAX: Final = 2_000
"""A checkpoint costs two flushes, negligible every 4 MB; a longer WAL makes each commit slower."""

GUARD_COMMITS: Final = 400
"""How many commits of a process one guard of the WAL serves."""

_NEEDS_WAL: Final = 1 << 20
"""A flag next to the format in the file's header; see `_guard`."""

_FORMAT: Final = _NEEDS_WAL - 1

_READERS_IDLE_MAX: Final = 8
_PURGE_NAPS_SECONDS: Final = (0.01, 0.05, 0.2, 0.5, 0.0)
_BUSY: Final = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_FIRST_NAP_SECONDS: Final = 0.0002
_LONGEST_NAP_SECONDS: Final = 0.005
_FORK_SECONDS_MAX: Final = 5.0
"""How long a fork waits for the reads and writes of other threads, and a new read for a fork."""

Setup = Callable[[sqlite3.Cursor], None]


class FileKind(NamedTuple):
    """The expectations of a file: its SQL dialect, its header id, its newest format, its name for people."""

    dialect: str
    application_id: int
    newest: int
    name: str


class SqliteFile(ForkedMutex):
    """One writing connection behind a mutex, and reading connections that never block."""

    def __init__(
        self,
        path: Path,
        *,
        durability: Durability,
        busy_seconds: float,
        create: bool,
        setup: Setup,
        kind: FileKind | None = None,
        accept_loss: bool = False,
        read_only: bool = False,
    ) -> None:
        if sqlite3.sqlite_version_info < SQLITE_NEEDED:
            needed = ".".join(map(str, SQLITE_NEEDED))
            raise StoreUnavailable(str(path), f"SQLite {sqlite3.sqlite_version} is too old; Killick needs {needed}")
        # A relative path or a symbolic link may name another file later.
        self.path = path = Path(os.path.realpath(path))
        self.place = str(path)
        self._kind = kind or FileKind("sqlite", APPLICATION_ID, STORE_FORMAT, "a Killick store")
        self._durability = durability
        self._busy_seconds = busy_seconds
        self._mutex = threading.Lock()
        self._writing = Writing(self)
        self._leasing = Writing(self, flushes=durability == "process")
        self._readers: deque[sqlite3.Connection] = deque()
        self._lent: dict[object, int] = {}  # what is read from, or about to be, and its thread
        self._transacting: set[sqlite3.Connection] = set()
        self._inherited = False
        self._paused = False
        self._gate = threading.Event()
        self._gate.set()
        self._closed = False
        self._guarded = 0
        self._had_wal = accept_loss or Path(f"{path}-wal").exists()
        if not create and not path.exists():
            raise StoreUnavailable(self.place, "no such file; a run, or create=True, makes a new store")
        self._copy: TemporaryDirectory[str] | None = None
        self.is_read_only = read_only or _is_read_only(path)
        # Without `mode`, SQLite would create a file that was deleted meanwhile.
        self._source = self._read_only_source() if self.is_read_only else f"{path.as_uri()}?mode=rw"
        # SQLite creates the WAL and the shared memory with this file's mode.
        reserve(path)
        self._identity = FileIdentity(path, has_wal=not self.is_read_only)
        self._identity.pin()
        with self.explained():
            self._writer = self._identity.connection = self._connect()
            self._cursor = self._writer.cursor()
            try:
                self._retry_busy(partial(self._prepare, setup))
                self._identity.pin_log()
            except BaseException:
                self._writer.close()
                self._identity.unpin_log()
                raise
        register_for_forks(self)
        weakref.finalize(self, self._identity.leave)

    def _read_only_source(self) -> str:
        """Reads a file that no process writes in place, or as a private copy: SQLite cannot read its WAL there."""
        wal = Path(f"{self.path}-wal")
        if not wal.exists() or not wal.stat().st_size:
            return f"{self.path.as_uri()}?immutable=1"
        import subprocess

        self._copy = TemporaryDirectory(prefix="killick-")
        # By another process: closing a descriptor here would cancel the locks of a connection to the same file.
        copying = ("cp", "--", self.path, wal, self._copy.name)
        if failed := subprocess.run(copying, capture_output=True, text=True, check=False).stderr:
            self._copy.cleanup()
            raise StoreUnavailable(self.place, f"cannot be copied to be read: {failed.splitlines()[0]}")
        return Path(self._copy.name, self.path.name).as_uri()

    # forks ------------------------------------------------------------------------------------

    def before_fork(self) -> None:
        """Closes every connection: SQLite counts its locks by process, so a child would believe that it holds its
        parent's. Waits for other threads up to a limit."""
        self._gate.clear()
        self._paused = self._mutex.acquire(timeout=_FORK_SECONDS_MAX)
        naps = _FORK_SECONDS_MAX / _LONGEST_NAP_SECONDS
        while self._lent and (naps := naps - 1) > 0:
            time.sleep(_LONGEST_NAP_SECONDS)
        if self._paused and not self._closed:
            self._disconnect()

    def after_fork_in_parent(self) -> None:
        if self._paused:
            with contextlib.suppress(KillickError):
                self._reopen()
            self._mutex.release()
        self._gate.set()

    def after_fork_in_child(self) -> None:
        self._inherited = bool(self._lent or self._transacting) or not self._paused
        keep_inherited(self._writer, *self._readers, *self._lent, *self._transacting)
        self._lent, self._transacting, self._readers = {}, set(), deque()
        self._gate = threading.Event()
        self._gate.set()
        if not self._inherited:
            with contextlib.suppress(KillickError):
                self._reopen()

    def _reopen(self) -> None:
        """Reopens the writing connection."""
        if not self._closed:
            with self.explained():
                self._writer = self._identity.connection = self._connect()
                self._cursor = self._writer.cursor()
                self._tune(self._writer)
                self._guarded = 0
                self._format()  # SQLite opens the WAL when it reads
                self._identity.pin_log()

    def _disconnect(self) -> None:
        """Closes every idle connection, the writer last."""
        self._identity.leave()
        while self._readers:
            self._readers.pop().close()
        if not self._identity.is_gone:
            self._writer.close()
            self._identity.unpin_log()

    def alone(self, write: Callable[[sqlite3.Cursor], None]) -> bool:
        """Writes in a transaction, if no other connection to the file exists in any process. SQLite's locks prove it.
        For a file that no other thread uses yet."""
        with self._mutex, self.explained():
            self._disconnect()
            try:
                with contextlib.closing(self._connect()) as db:
                    db.execute("PRAGMA busy_timeout = 0")
                    db.execute("PRAGMA locking_mode = EXCLUSIVE")
                    try:
                        db.execute("BEGIN IMMEDIATE")
                    except sqlite3.OperationalError as error:
                        if error.sqlite_errorcode & 0xFF in _BUSY:
                            return False
                        raise
                    write(db.cursor())
                    db.execute("COMMIT")
            finally:
                self._reopen()
        return True

    # transactions -----------------------------------------------------------------------------

    def writing(self) -> Writing:
        """The write lock and a transaction: committed at the end, rolled back by any exception."""
        return self._writing

    def leasing(self) -> Writing:
        """As `writing`, without a flush: that of the next commit covers it, and no effect comes before that. A power
        failure undoes a lease with all that its holder wrote; an undone release is the lease of a dead holder."""
        return self._leasing

    def reading(self) -> Reading:
        """A connection that sees committed data and waits for no writer."""
        return Reading(self)

    @contextlib.contextmanager
    def transacting(self) -> Generator[sqlite3.Connection, None, None]:
        """A transaction on its own connection, for the caller's statements. Committed at the end, rolled back by any
        exception, which passes unchanged."""
        with self.explained():
            self._refuse_closed()
            connection = self._connect()
            self._transacting.add(connection)
        try:
            with self.explained():
                self._tune(connection)
                self._retry_busy(partial(connection.execute, "BEGIN IMMEDIATE"))
            yield connection
            with self.explained():
                connection.execute("COMMIT")
                self._identity.check()
        finally:
            # Roll back uncommitted work.
            self._transacting.discard(connection)
            connection.close()

    def commit_detector(self) -> CommitDetector:
        """Returns a detector for commits by other connections, in any process."""
        with self.explained():
            self._refuse_closed()
            return CommitDetector(self._connect, self.check)

    def check(self) -> None:
        """Raises StoreGone if the file or its WAL was deleted or replaced."""
        self._identity.check()

    def journal_mode(self) -> str:
        """Returns SQLite's journal mode. A file that is read without locks does not show it."""
        if self._source.endswith("?immutable=1"):
            return "unknown"
        with self.reading() as db:
            return str(db.execute("PRAGMA journal_mode").fetchone()[0]).upper()

    def close(self) -> None:
        """Closes every connection. The last process checkpoints the WAL into the file."""
        with self._mutex:
            self._closed = True
            with contextlib.suppress(sqlite3.Error, KillickError):
                self._identity.check()
                self._refuse_without_wal()  # clears a flag: the last close removes the WAL
            self._disconnect()
            if self._copy is not None:
                self._copy.cleanup()

    # parts of a transaction -------------------------------------------------------------------

    def write(self, moves: Sequence[Moved], sql: str, inner: str) -> None:
        """Writes moved heads and their events as one transaction. An IntegrityError refuses all of it."""
        if len(moves) != 1 or moves[0].inner:
            with self._writing as cursor:
                cursor.executemany(inner, [row for moved in moves for row in moved.inner])
                cursor.executemany(sql, [moved.columns for moved in moves])
            return
        columns = moves[0].columns
        with self._mutex:
            try:
                self._identity.look()
                self._guarded -= 1
                if self._guarded < 0:
                    self._guard()
                # A single statement is a transaction by itself.
                try:
                    self._cursor.execute(sql, columns)
                except sqlite3.OperationalError:
                    self._execute(sql, columns)
                self._identity.check()
            except sqlite3.Error as error:
                raise self.explain(error) from error

    def begin(self, *, flushes: bool = True) -> sqlite3.Cursor:
        """Waits for the write lock, in this process and across processes, and begins."""
        self._mutex.acquire()
        try:
            self._identity.look()
            self._guarded -= 1
            if self._guarded < 0:
                self._guard()
            if not flushes:
                self._cursor.execute("PRAGMA synchronous = NORMAL")
            self._execute("BEGIN IMMEDIATE")
        except BaseException as error:
            self._free(flushes=flushes)
            raise self.explain(error) from error
        return self._cursor

    def _free(self, *, flushes: bool) -> None:
        try:
            if not flushes and not self._closed:
                self._cursor.execute("PRAGMA synchronous = FULL")
        finally:
            self._mutex.release()

    def end(self, error: BaseException | None, *, flushes: bool = True) -> None:
        """Commits, or rolls back after an error, and frees the lock."""
        try:
            if error is None:
                self._cursor.execute("COMMIT")
                self._identity.check()
        except BaseException as failed:
            error = failed
            raise self.explain(failed) from failed
        finally:
            # A full disk may have ended the transaction already.
            if error is not None and self._writer.in_transaction:
                with contextlib.suppress(sqlite3.Error):
                    self._writer.execute("ROLLBACK")
            self._free(flushes=flushes)

    def _guard(self) -> None:
        """Marks the file as incomplete without its WAL, so that a copy of the file alone is refused.

        The flag is set in the file, by a checkpoint, and cleared in the WAL. A reader of both and the last close see it
        cleared. The next checkpoint clears it in the file; a later guard sets it again. It names the schema's version,
        which SQLite changes in a backup: one that is made meanwhile is complete.
        """
        _, found = self._format()
        if not found or self._kind.application_id != APPLICATION_ID:
            self._guarded = GUARD_COMMITS if found else 0
            return  # it is being created, or is a vault
        # No flush of its own: a checkpoint flushes the WAL first, and the next commit flushes the rest.
        self._cursor.execute("PRAGMA synchronous = NORMAL")
        try:
            self._execute(f"PRAGMA user_version = {found | self._needs_wal()}")
            try:
                self._cursor.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            finally:
                self._execute(f"PRAGMA user_version = {found}")
            self._guarded = GUARD_COMMITS
        finally:
            self._cursor.execute(f"PRAGMA synchronous = {'FULL' if self._durability == 'power' else 'NORMAL'}")

    def _needs_wal(self) -> int:
        return _NEEDS_WAL * (1 + 2 * (_pragma(self._writer, "schema_version") % 512))

    def _refuse_without_wal(self) -> None:
        """Refuses a file whose WAL had commits and is missing. Clears the flag of a killed process or in a backup."""
        version, wal = _pragma(self._writer, "user_version"), Path(f"{self.path}-wal")
        self._had_wal |= wal.exists() and wal.stat().st_size > 0  # another process may set the flag just now
        if version & ~_FORMAT == self._needs_wal() and not self._had_wal:
            way = "put it back next to the file, or run `killick store verify --accept-loss`"
            raise StoreUnavailable(self.place, f"the latest commits were in {wal.name}, which is missing; {way}")
        if version & _NEEDS_WAL and not self._source.endswith("?immutable=1"):
            self._writer.execute(f"PRAGMA user_version = {version & _FORMAT}")
        self._had_wal = True

    def truncate_wal(self) -> bool:
        """Copies the write-ahead log into the file and empties it; False while a reader blocks that."""
        for nap in _PURGE_NAPS_SECONDS:
            with self._mutex, contextlib.suppress(sqlite3.OperationalError):
                self._identity.check()
                if not self._cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
                    return True
            time.sleep(nap)
        return False

    def vacuum(self) -> None:
        """Writes the file again without the pages that no table uses, which may hold erased bytes."""
        with self._mutex, self.explained():
            self._execute("VACUUM")

    def borrow(self) -> sqlite3.Connection:
        """Returns a reading connection for one reader at a time."""
        self._identity.look()
        thread = threading.get_ident()
        # Entered before the gate is looked at: a fork that begins now waits for this read.
        self._lent[place := object()] = thread
        try:
            # A read within another read of its thread does not wait, because the fork waits for that one.
            while not self._gate.is_set() and [*self._lent.values()].count(thread) == 1:
                del self._lent[place]
                is_over = self._gate.wait(_FORK_SECONDS_MAX)
                self._lent[place] = thread
                if not is_over:
                    break  # the fork waits for a lock that this thread holds
            try:
                reader = self._readers.pop()
            except IndexError:
                self._refuse_closed()
                with self.explained():
                    reader = self._connect()
                    reader.execute("PRAGMA query_only = ON")
                # Damaged text must be readable to be reported.
                reader.text_factory = partial(bytes.decode, errors="replace")
            self._lent[reader] = thread
            return reader
        finally:
            del self._lent[place]

    def return_reader(self, reader: sqlite3.Connection, *, failed: bool) -> None:
        self._lent.pop(reader, None)
        if failed or self._closed or len(self._readers) >= _READERS_IDLE_MAX:
            reader.close()
        else:
            self._readers.append(reader)

    # inside -----------------------------------------------------------------------------------

    def _connect(self) -> sqlite3.Connection:
        if self._inherited:
            reason = "was in use when this process was forked; fork while no run is active, or spawn processes"
            raise StoreUnavailable(self.place, reason)
        self._identity.check_file()
        # Autocommit, so that transactions are explicit; retries on the lock are our own.
        connection = sqlite3.connect(
            self._source, uri=True, isolation_level=None, timeout=self._busy_seconds, check_same_thread=False,
            cached_statements=256,
        )  # fmt: skip
        try:
            self._identity.check_file()  # SQLite may have opened another one
        except BaseException:
            connection.close()
            raise
        return connection

    def _refuse_closed(self) -> None:
        if self._closed:
            raise StoreClosed(self.place)

    def _execute(self, sql: str, columns: tuple[object, ...] = ()) -> None:
        """Executes a statement that needs the write lock. SQLite's own busy handler would sleep far too long."""
        self._retry_busy(partial(self._cursor.execute, sql, columns))

    def _retry_busy(self, do: Callable[[], object]) -> None:
        """Retries an operation while other connections hold its lock."""
        waited, nap = 0.0, _FIRST_NAP_SECONDS
        while True:
            try:
                do()
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF not in _BUSY:
                    raise
                if waited >= self._busy_seconds:
                    raise StoreBusy(self.place, self._busy_seconds) from error
            time.sleep(nap)
            waited += nap
            nap = min(nap * 2, _LONGEST_NAP_SECONDS)

    def _prepare(self, setup: Setup) -> None:
        writer = self._writer
        self._refuse_without_wal()
        if self._copy is not None or self._source.endswith("?immutable=1"):
            writer.execute("PRAGMA query_only = ON")
            if self._format() != (self._kind.application_id, self._kind.newest):
                raise StoreUnavailable(self.place, "is read-only, and of another format; copy it to a writable folder")
            return
        writer.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        if writer.execute("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
            raise StoreUnavailable(self.place, "this file system does not support SQLite's WAL mode; use a local disk")
        self._tune(writer)
        application, found = self._format()
        if found == 0 and application in (0, self._kind.application_id):
            self._create(setup)
        elif application != self._kind.application_id:
            raise self._not_ours()
        elif found > self._kind.newest:
            raise StoreFormat(self.place, found=found, known=self._kind.newest)
        elif found < self._kind.newest:
            self._migrate()

    def _tune(self, writer: sqlite3.Connection) -> None:
        """Configures a writing connection: durability, and no busy handler."""
        writer.execute(f"PRAGMA synchronous = {'FULL' if self._durability == 'power' else 'NORMAL'}")
        writer.execute("PRAGMA fullfsync = ON")
        writer.execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES_MAX}")
        writer.execute("PRAGMA busy_timeout = 0")
        writer.execute("PRAGMA secure_delete = ON")  # erased data must be overwritten in the file

    def _format(self) -> tuple[int, int]:
        # The version first: a process that creates the store in between sets both, and is then seen to have set it.
        found = _pragma(self._writer, "user_version") & _FORMAT
        return _pragma(self._writer, "application_id"), found

    def _create(self, setup: Setup) -> None:
        with self.writing() as writer:
            if self._format()[1]:
                return  # another process was first
            if writer.execute(queries(self._kind.dialect).count_tables).fetchone()[0]:
                raise self._not_ours()
            execute_script(writer, schema(self._kind.dialect))
            writer.execute(f"PRAGMA application_id = {self._kind.application_id}")
            writer.execute(f"PRAGMA user_version = {self._kind.newest}")
            setup(writer)

    def _not_ours(self) -> StoreUnavailable:
        return StoreUnavailable(self.place, f"this SQLite file is not {self._kind.name}; choose another name")

    def _migrate(self) -> None:
        with self.writing() as writer:
            found, newest = self._format()[1], self._kind.newest
            for step, script in migrations(self._kind.dialect, self.place, found=found, newest=newest):
                execute_script(writer, script)
                writer.execute(f"PRAGMA user_version = {step}")

    @contextlib.contextmanager
    def explained(self) -> Generator[None, None, None]:
        """Translates SQLite's errors; `database is locked` never reaches a caller."""
        try:
            yield
        except (sqlite3.Error, UnicodeError) as error:
            raise self.explain(error) from error

    def explain(self, error: BaseException) -> BaseException:
        """Translates an error; one that is not SQLite's is returned unchanged."""
        return translated(error, self.path, is_closed=self._closed, busy_seconds=self._busy_seconds)


class Writing:
    """A write transaction as a `with` block. One instance of each kind is enough, because only one can be open."""

    __slots__ = ("_file", "_flushes")

    def __init__(self, file: SqliteFile, *, flushes: bool = True) -> None:
        self._file = file
        self._flushes = flushes

    def __enter__(self) -> sqlite3.Cursor:
        return self._file.begin(flushes=self._flushes)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._file.end(error, flushes=self._flushes)
        if error is not None:
            explained = self._file.explain(error)
            if explained is not error:
                raise explained from error


class Reading:
    """A reading connection as a `with` block. A failed one is not reused."""

    __slots__ = ("_file", "_reader")

    def __init__(self, file: SqliteFile) -> None:
        self._file = file

    def __enter__(self) -> sqlite3.Cursor:
        self._reader = self._file.borrow()
        return self._reader.cursor()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._file.return_reader(self._reader, failed=error is not None)
        if error is not None:
            explained = self._file.explain(error)
            if explained is not error:
                raise explained from error


def _is_read_only(path: Path) -> bool:
    return path.exists() and not (os.access(path, os.W_OK) and os.access(path.parent, os.W_OK))


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    value: int = connection.execute(f"PRAGMA {name}").fetchone()[0]
    return value
