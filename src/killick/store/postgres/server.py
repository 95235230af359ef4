"""One schema in a PostgreSQL database: sessions, transactions, format, and error translation.

Connects, commits and retries. The store decides what is read and written.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from itertools import count
from typing import Any, Final, TypeVar

import psycopg
from psycopg.conninfo import conninfo_to_dict

from killick.clock import SystemClock
from killick.errors import (
    StoreBroken,
    StoreBusy,
    StoreClosed,
    StoreError,
    StoreFormat,
    StoreFull,
    StoreReadOnly,
    StoreUnavailable,
)
from killick.fork_safety import Forked, keep_inherited, register_for_forks
from killick.logger import get_logger
from killick.store.namespace import namespace_of, own_options, root_name
from killick.store.postgres.wire import Failed, Q, Session, Statement, pooled
from killick.store.records import Durability
from killick.store.sql import migrations, schema

logger: Final = get_logger("killick")

FORMAT: Final = 6
"""The layout that this build reads and writes. Opening an older one migrates it, if a release wrote that."""

READABLE_FROM: Final = 4
"""The oldest format whose build can work with this layout: later formats only added things."""

SERVER_NEEDED: Final = 140000
_FIRST_NAP_SECONDS: Final = 0.01
_LONGEST_NAP_SECONDS: Final = 0.5
_CONFLICTS: Final = ("40001", "40P01")
_LOCKED: Final = "55P03"
_CALLER_CODES: Final = ("23", "40")
"""Errors in a caller's transaction that the caller caused: violated constraints and serialization conflicts."""

_OPENING_SECONDS_MAX: Final = 3.0
"""How long opening a store waits for an absent server: the URL may be mistyped."""

_TRANSIENT: Final = (
    "starting up",
    "shutting down",
    "terminating connection",
    "recovery",
    "too many clients",
    "too many connections",
    "no more connections",
    "connection slots",
    "not yet accept",
)
"""Refusals of a server, or of a pooler before it, that may be temporary."""

_LOGGED_SECONDS: Final = 0.3
"""How long an operation waits before it is logged; the next line of its store comes a minute later."""

_QUIET_SECONDS: Final = 60.0

_ALIVE: Final = {"keepalives_idle": "30", "keepalives_interval": "10", "keepalives_count": "3"}

T = TypeVar("T")


class PostgresServer(Forked):
    """A session pool for one database. Lost sessions are replaced."""

    def __init__(
        self,
        url: str,
        *,
        durability: Durability,
        busy_seconds: float,
        create: bool,
        sessions: int,
        new: dict[str, bytes],
    ) -> None:
        self._conninfo, self.schema, self.place, self.is_pooled = _parts(url)
        self.busy_seconds = busy_seconds
        self.patience_seconds = min(busy_seconds, _OPENING_SECONDS_MAX)
        self.sessions_max = sessions
        self._room = threading.BoundedSemaphore(sessions)
        self._idle: deque[Session] = deque()
        self._lent: deque[Session] = deque()
        durable = Q.durable if durability == "power" else "'off'"
        lock_ms = max(1, int(min(busy_seconds, 86_400) * 1_000))
        self._set_up = Q.set_up_session.format(synchronous_commit=durable, lock_ms=lock_ms)
        self._closed = False
        self.quiet_until = 0.0
        register_for_forks(self)
        self.q = Statements(self.qualified)
        try:
            self.format = self.run(lambda session: self._prepare(session, create=create, new=new))
            self.patience_seconds = busy_seconds
        except BaseException:
            self.close()
            raise

    # forks ------------------------------------------------------------------------------------

    def after_fork_in_child(self) -> None:
        """The parent's connections must not be closed here: that would end them in the parent."""
        keep_inherited(*self._idle, *self._lent)
        self._idle.clear()
        self._lent.clear()
        self._room = threading.BoundedSemaphore(self.sessions_max)

    # operations -------------------------------------------------------------------------------

    def qualified(self, sql: str) -> str:
        """Qualifies SQL with this schema."""
        return re.sub(r"\bkillick\.(?=\w)", f"{self.schema}.", sql)

    def run(self, work: Callable[[Session], T]) -> T:
        """Runs an idempotent operation on a pooled session, and retries it on lost sessions."""
        backoff: Backoff | None = None
        while True:
            session = self._take()
            try:
                return work(session)
            except Failed as failed:
                problem = failed
                if failed.code == "25006" and not session.is_read_only:
                    # The session leads to a former primary, or to one that is not promoted yet; connect again.
                    session.close()
                    problem = Failed(failed.code, failed.text, lost=True)
            finally:
                self._give_back(session, self._idle)
                self._room.release()
            backoff = backoff or Backoff(self)
            backoff.wait(problem)

    def resend(self, work: Callable[[Session, bool], T]) -> T:
        """As `run`; the operation learns whether an earlier try of it may have been committed."""
        tries = count()
        return self.run(lambda session: work(session, next(tries) > 0))

    def transact(self, work: Callable[[Session], T], was_committed: Callable[[Session, T], bool] | None = None) -> T:
        """Runs an operation as one transaction. If the session is lost during commit, `happened` finds out whether it
        was committed; without that, the operation is repeated."""
        committing: list[T] = []

        def attempt(session: Session) -> T:
            if committing and was_committed is not None and was_committed(session, committing[-1]):
                return committing[-1]
            committing.clear()
            session.script("BEGIN")
            result = work(session)
            committing.append(result)
            session.script("COMMIT")
            return result

        return self.run(attempt)

    @contextlib.contextmanager
    def transaction(self) -> Generator[Session, None, None]:
        """Returns a session in a transaction, outside the pool, for a caller that may take long.

        Session settings are reset before reuse. Nothing is prepared on it, because psycopg drops prepared statements,
        ours too, when the caller rolls back to a savepoint.
        """
        backoff = Backoff(self)
        while True:
            session = self._connected(self._lent)
            try:
                # Separate, so that the transaction has run no query and its isolation level can still be set.
                if not self.is_pooled:
                    session.script(f"RESET ROLE; RESET ALL; {self._set_up}")
                session.script("BEGIN")
                break
            except Failed as failed:
                session.close()
                backoff.wait(failed)
        try:
            yield self.wrap(session.connection)
            if session.has_failed:
                raise _failed_transaction()
            if session.is_lost:
                raise StoreUnavailable(self.place, "the connection was lost before the commit")
            if session.in_transaction:
                with self.explained():
                    session.script("COMMIT")
        finally:
            self._give_back(session, self._lent)

    def wrap(self, connection: psycopg.Connection[Any]) -> Session:
        """Wraps a connection of the caller."""
        if self.is_pooled:
            return pooled(connection)
        return Session(connection, learn=lambda statement: self.run(lambda own: own.prepare(statement)))

    def connect(self) -> Session:
        """Opens a session for a listener, which closes it, and which tries again by itself."""
        return self._connected(deque(), patience_seconds=0.0)

    def close(self) -> None:
        self._closed = True
        for idle in (self._idle, self._lent):
            while idle:
                idle.pop().close()

    def refuse_closed(self) -> None:
        if self._closed:
            raise StoreClosed(self.place)

    # sessions ---------------------------------------------------------------------------------

    def _take(self) -> Session:
        """Takes a pooled session. The caller returns it."""
        self.refuse_closed()
        if not self._room.acquire(timeout=self.busy_seconds):
            raise StoreBusy(self.place, self.busy_seconds)
        try:
            return self._connected(self._idle)
        except BaseException:
            self._room.release()
            raise

    def _connected(self, idle: deque[Session], patience_seconds: float | None = None) -> Session:
        """Returns an idle session, or a new one. A server that is full lends none: then one that comes back is used."""
        backoff = Backoff(self, patience_seconds)
        while True:
            with contextlib.suppress(IndexError):
                return idle.pop()
            try:
                return self._new()
            except psycopg.OperationalError as error:
                text = _first_line(error).replace(str(self._conninfo.get("password") or "\0"), "…")
                if patience_seconds is None and _is_refused_for_now(error):
                    backoff.patience_seconds = self.busy_seconds  # the URL is right, since the server answers
                backoff.wait(Failed(error.sqlstate or "", text, lost=_is_transient(error)))
            except Failed as failed:
                backoff.wait(failed)

    def _new(self) -> Session:
        self.refuse_closed()
        threshold = None if self.is_pooled else 5
        connection = psycopg.connect(**self._conninfo, autocommit=True, prepare_threshold=threshold)
        session = pooled(connection) if self.is_pooled else Session(connection)
        try:
            if not self.is_pooled:  # a pooler of transactions would hand these settings to its next client
                session.script(self._set_up)
        except BaseException:
            session.close()
            raise
        return session

    def _give_back(self, session: Session, idle: deque[Session]) -> None:
        if session.in_transaction:
            with contextlib.suppress(Failed):
                session.script("ROLLBACK")
        if session.is_idle and not self._closed and len(idle) < self.sessions_max:
            idle.append(session)
        else:
            session.close()

    # the schema -------------------------------------------------------------------------------

    def _prepare(self, session: Session, *, create: bool, new: dict[str, bytes]) -> int:
        if session.pg.server_version < SERVER_NEEDED:
            needed, found = SERVER_NEEDED // 10_000, session.pg.server_version // 10_000
            raise StoreUnavailable(self.place, f"PostgreSQL {found} is too old; Killick needs {needed} or newer")
        if self.is_pooled and session.rows(self.q.role_settings) != [("on", "read committed")]:
            settings = "synchronous_commit = on and default_transaction_isolation = 'read committed'"
            raise StoreUnavailable(self.place, f"through a pooler of transactions, the role needs {settings}; set them")
        if "meta" not in self._tables(session):
            if not create:
                raise StoreUnavailable(self.place, "no store is in this schema; a run, or create=True, makes one")
            self._create(session, new)
        return self._migrated(session)

    def _tables(self, session: Session) -> set[str]:
        return {table for (table,) in session.rows(self.q.tables, self.schema)}

    @contextlib.contextmanager
    def _exclusively(self, session: Session) -> Generator[None, None, None]:
        """A transaction with an exclusive lock on the creation and migration of this schema."""
        session.script("BEGIN")
        try:
            session.script(Q.lock_schema.format(schema=self.schema))
            yield
            session.script("COMMIT")
        except BaseException:
            if session.in_transaction:
                session.script("ROLLBACK")
            raise

    def _create(self, session: Session, new: dict[str, bytes]) -> None:
        with self._exclusively(session):
            found = self._tables(session)
            if "meta" in found:
                return  # another process was first
            if found:
                raise StoreUnavailable(
                    self.place, "this schema holds tables that are not Killick's; choose another name"
                )
            session.script(Q.make_schema.format(schema=self.schema))
            session.script(self.qualified(schema("postgres")))
            for key, value in {**new, **_formats(FORMAT, READABLE_FROM)}.items():
                session.run(self.q.put_meta, key, value)

    def _migrated(self, session: Session) -> int:
        found, readable_from = self._format(session)
        if readable_from > FORMAT:
            raise StoreFormat(self.place, found=found, known=FORMAT)
        if found < FORMAT:
            with self._exclusively(session), self._naming_lockers(session):
                session.script(Q.migrate_soon)
                found, _ = self._format(session)
                for step, script in migrations("postgres", self.place, found=found, newest=FORMAT):
                    session.script(self.qualified(script))
                    for key, value in _formats(step, READABLE_FROM).items():
                        session.run(self.q.put_meta, key, value)
                found = max(found, FORMAT)
        return found

    @contextlib.contextmanager
    def _naming_lockers(self, session: Session) -> Generator[None, None, None]:
        """Lets a migration that waits for a table be tried again, and names the session that holds it."""
        try:
            yield
        except Failed as failed:
            if failed.code != _LOCKED:
                raise
            session.script("ROLLBACK")
            [holder] = [name for (name,) in session.rows(self.q.lockers, self.schema)] or ["another session"]
            text = f"the migration of its tables waits for {holder}; end that transaction, then open the store again"
            raise Failed(failed.code, text, lost=True) from failed

    def _format(self, session: Session) -> tuple[int, int]:
        meta = {key: value for key, value, _ in session.rows(self.q.meta)}
        try:
            return int(meta["format"]), int(meta["readable_from"])
        except (KeyError, ValueError):
            raise StoreBroken(self.place, "its format number is damaged") from None

    # errors -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def explained(self) -> Generator[None, None, None]:
        """Translates errors in a caller's transaction, except the caller's own mistakes."""
        try:
            yield
        except Failed as failed:
            if failed.code == "25P02":
                raise _failed_transaction() from failed
            if failed.code[:2] in _CALLER_CODES:
                raise psycopg.errors.lookup(failed.code)(failed.text) from failed
            raise self.explain(failed) from failed

    def explain(self, failed: Failed) -> StoreError:
        """Translates a failure into a Killick error."""
        code, text = failed.code, failed.text
        if code == "53100":
            return StoreFull(self.place)
        if code == "25006":
            return StoreReadOnly(self.place)
        if code in (_LOCKED, *_CONFLICTS) and not failed.lost:
            return StoreBusy(self.place, self.busy_seconds)
        if code == "57014":
            return StoreUnavailable(self.place, f"{text}; raise statement_timeout for this role")
        if code == "23505":
            return StoreBroken(self.place, f"a row already exists where a new one belongs ({text})")
        if code in ("XX001", "XX002", "42P01", "3F000", "42703", "42883"):
            return StoreBroken(self.place, text)
        if code in ("26000", "42P05"):
            advice = "a pooler of transactions is in between; add pooler=transaction to the URL"
            return StoreUnavailable(self.place, advice)
        if code in ("22021", "22P05"):
            return StoreError(f"{self.place}: PostgreSQL stores no text with a NUL character; remove it")
        if failed.lost or code.startswith(("08", "28", "3D", "53", "57")) or code in ("", "42501"):
            return StoreUnavailable(self.place, text or "the connection is lost")
        return StoreError(f"{self.place}: {text} ({code})")


class Statements:
    """The named queries of this dialect, as statements on one schema."""

    def __init__(self, qualified: Callable[[str], str]) -> None:
        self._qualified = qualified

    def __getattr__(self, name: str) -> Statement:
        return self.of(name, lambda: getattr(Q, name))

    def of(self, name: str, sql: Callable[[], str]) -> Statement:
        """Returns a statement built from a query."""
        made: dict[str, Any] = vars(self)
        # Shared by all threads, because its parameter types are learned once.
        found: Statement = made.get(name) or made.setdefault(name, Statement(name, self._qualified(sql())))
        return found


class Backoff:
    """The retry deadline of one operation."""

    def __init__(self, server: PostgresServer, patience_seconds: float | None = None) -> None:
        self._server = server
        self.patience_seconds = server.patience_seconds if patience_seconds is None else patience_seconds
        self._waited = 0.0
        self._nap = _FIRST_NAP_SECONDS

    def wait(self, failed: Failed) -> None:
        """Returns after a backoff if a retry may help; else raises the translated error."""
        server = self._server
        server.refuse_closed()
        conflict = failed.code in _CONFLICTS
        if not (failed.lost or conflict) or self._waited >= self.patience_seconds:
            raise server.explain(failed) from failed
        if failed.lost and self._waited > _LOGGED_SECONDS and (now := SystemClock.monotonic()) > server.quiet_until:
            server.quiet_until = now + _QUIET_SECONDS
            logger.warning("%s; trying for up to %g s", server.explain(failed), self.patience_seconds)
        if self._waited or not conflict:
            time.sleep(self._nap)
        self._waited += self._nap
        self._nap = min(self._nap * 2, _LONGEST_NAP_SECONDS)


def namespaces(url: str) -> dict[str, int]:
    """Returns the namespaces of a database that the role may use, and the bytes of each."""
    conninfo, _, place, _ = _parts(url)
    try:
        with psycopg.connect(**conninfo, prepare_threshold=None) as connection:
            found = connection.execute(Q.namespaces).fetchall()
    except psycopg.Error as error:
        raise StoreUnavailable(place, _first_line(error)) from None
    return {namespace_of(schema_): size for schema_, size in found}


def _parts(url: str) -> tuple[dict[str, Any], str, str, bool]:
    """Returns the connection parameters, the schema, the display name without a password, and whether a pooler of
    transactions is in between."""
    address, _, query = url.partition("?")
    given, rest = own_options(query, "namespace", "pooler")
    schema_, shown = root_name(f"postgresql://{address.partition('://')[2].rpartition('@')[2]}", query)
    pooler = given.get("pooler", "session")
    if pooler not in ("session", "transaction"):
        raise StoreUnavailable(shown, f"pooler={pooler}; write pooler=transaction if that is what the pooler pools")
    try:
        conninfo = conninfo_to_dict(f"{address}?{rest}")
    except psycopg.ProgrammingError:
        raise StoreUnavailable(shown, "this URL cannot be read; write postgresql://user@host/database") from None
    conninfo = {**_ALIVE, "connect_timeout": "10", "application_name": "killick", **conninfo}
    return conninfo, schema_, shown, pooler == "transaction"


def _failed_transaction() -> psycopg.Error:
    return psycopg.errors.InFailedSqlTransaction(
        "a statement failed in this transaction, so PostgreSQL commits nothing of it; use a savepoint"
    )


def _formats(format_: int, readable_from: int) -> dict[str, bytes]:
    return {"format": str(format_).encode(), "readable_from": str(readable_from).encode()}


def _is_transient(error: psycopg.OperationalError) -> bool:
    """Returns whether a failed connection may succeed later."""
    return "FATAL:" not in str(error) or _is_refused_for_now(error)


def _is_refused_for_now(error: psycopg.OperationalError) -> bool:
    """Returns whether a server answered, and has no session to give yet."""
    return any(words in str(error) for words in _TRANSIENT)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else "no connection"
