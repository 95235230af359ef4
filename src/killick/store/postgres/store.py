"""The store for many workers on many machines: one schema in a PostgreSQL database.

Owns the reads and writes of each operation. Knows no event types. Decisions that depend on the written data are made in
the database, in one statement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final
from weakref import WeakSet

import msgspec
import psycopg

from killick.clock import Clock, SystemClock
from killick.errors import LogError, RunBusy, RunUnknown, StoreBroken, StoreBusy, StoreError
from killick.ids import Ids, RandomIds
from killick.model.chunks import Blob
from killick.store import limits, records
from killick.store.postgres import search_terms
from killick.store.postgres.append import PostgresTransaction, append, committed, deliver, index_fields
from killick.store.postgres.inspect import conditions, damaged_pieces, problems
from killick.store.postgres.notify import PostgresListener
from killick.store.postgres.rows import claimed_of, counts_query, run_row_of, runs_query
from killick.store.postgres.server import PostgresServer, T, namespaces
from killick.store.postgres.wire import Failed, Q, Rows, Session, Statement
from killick.store.protocol import Transaction
from killick.store.server_replies import acknowledged
from killick.store.slots import Slot
from killick.store.sql.reads import SqlReads
from killick.store.sql.rows import damaged_terms, damaged_values, head_of, snapshot_of

SESSIONS: Final = 8
_SHORTLY: Final = "SET LOCAL lock_timeout = 250"
"""How long a renewal waits for a row: an append of the holder locks it for a moment, a foreign session for any time."""

_RENEW_FREE, _RENEW_LOCKED = (lambda: Q.renew.format(locked="SKIP LOCKED")), (lambda: Q.renew.format(locked=""))


class PostgresStore(SqlReads):
    """A store in one schema of a database. Any number of processes may open it at once.

    url           `postgresql://user@host/database`; `?namespace=acme` selects a tenant's store
    durability    "power": a commit survives a power failure; "process": only the end of the process
    busy_seconds  how long to retry while the server is away
    create        whether to create a missing schema
    sessions      the maximum number of connections
    """

    def __init__(
        self,
        url: str,
        *,
        durability: records.Durability = "power",
        busy_seconds: float = 60.0,
        create: bool = True,
        clock: Clock | None = None,
        ids: Ids | None = None,
        sessions: int = SESSIONS,
    ) -> None:
        # Leases end by the database's clock, which all machines share, unless a test supplies a clock.
        self._clock = None if isinstance(clock, SystemClock) else clock
        ids = ids or RandomIds()
        self._server = PostgresServer(
            url,
            durability=durability,
            busy_seconds=busy_seconds,
            create=create,
            sessions=sessions,
            new={"id": ids.new("store").encode(), "secret_key": ids.key()},
        )
        self._q = self._server.q
        self._listener = PostgresListener(self._server)
        self._joined: WeakSet[psycopg.Connection[Any]] = WeakSet()
        self._lane = 0
        self.place: Final = self._server.place
        self.proves_life: Final = False
        try:
            meta = {key: value for key, value, is_sound in self._rows(self._q.meta) if is_sound}
            if not meta.keys() >= {"id", "secret_key"}:
                raise StoreBroken(self.place, "its own id or key is damaged")
        except BaseException:
            self._server.close()
            raise
        self.id: Final[str] = meta["id"].decode()
        self.secret_key: Final[bytes] = meta["secret_key"]

    namespaces = staticmethod(namespaces)
    _run_row = staticmethod(run_row_of)

    def now_us(self) -> int:
        return int(self._rows(self._q.now_us)[0][0]) if self._clock is None else self._clock.now_us()

    def close(self) -> None:
        # In this order, so that the listener stops waiting for an absent server.
        self._server.close()
        self._listener.close()

    # the log ----------------------------------------------------------------------------------

    def append(self, items: Sequence[records.Append]) -> list[records.Head | LogError]:
        records.refuse_misnumbered(items)
        if not items:
            self._server.refuse_closed()
            return []

        def write(session: Session, again: bool) -> list[records.Head | LogError]:
            results = append(session, self._q, items, self._clock_us())
            return acknowledged(items, results, partial(committed, session, self._q)) if again else results

        return self._server.resend(write)

    def read(
        self, run: str, *, after: int = 0, limit: int = records.READ_LIMIT, data: bool = True
    ) -> list[records.Row]:
        statement = self._q.events if data else self._q.bodies
        return [records.Row(*row) for row in self._rows(statement, run, after, min(limit, records.READ_LIMIT))]

    def opening(self, run: str, *, fold: int) -> records.Opening | None:
        found = self._rows(self._q.opening, run, fold)
        if not found:
            return None
        first = found[0]
        rows = [records.Row(row[2], row[15], row[16], row[3]) for row in found[1:]]
        shot = None if first[11] is None else snapshot_of(first[11:15])
        return records.Opening(head=head_of(first[:10]), quarantined=first[10], snapshot=shot, rows=rows)

    # transactions of others -------------------------------------------------------------------

    @contextmanager
    def transaction(self) -> Generator[Transaction, None, None]:
        with self._server.transaction() as session:
            yield PostgresTransaction(self._server, session, self._clock_us)

    def join(self, connection: Any) -> Transaction:
        self._server.refuse_closed()
        if not isinstance(connection, psycopg.Connection):
            raise StoreError(f"{self.place}: takes a psycopg.Connection, not a {type(connection).__name__}")
        session = self._server.wrap(connection)  # pyright: ignore[reportUnknownArgumentType]
        with self._server.explained():
            if session.is_idle and not connection.autocommit:
                session.script("BEGIN")  # as psycopg does itself, before the first statement
            if not session.in_transaction:
                raise StoreError(f"{self.place}: no transaction is open on that connection; begin one first")
            if connection not in self._joined and self._id_through(session) != self.id:
                raise StoreError(f"{self.place}: that connection is to another database; connect to the store's own")
        self._joined.add(connection)  # pyright: ignore[reportUnknownArgumentType]
        return PostgresTransaction(self._server, session, self._clock_us)

    def _id_through(self, session: Session) -> str | None:
        """Returns the id of the store that a session reaches, without changing its transaction."""
        session.script("SAVEPOINT killick")
        try:
            found = {key: value for key, value, _ in session.rows(self._q.meta)}
        except Failed as failed:
            if failed.lost:
                raise
            found = {}
        session.script("ROLLBACK TO SAVEPOINT killick; RELEASE SAVEPOINT killick")
        return bytes(found.get("id", b"")).decode()

    # values -----------------------------------------------------------------------------------

    def pieces(self, hashes: Collection[bytes]) -> Mapping[bytes, Blob]:
        return {row[0]: Blob(*row) for row in self._rows(self._q.pieces, list(hashes))}

    def set_references(self, run: str, hashes: Collection[bytes], *, at: int, delivered: int) -> bool:
        def write(session: Session) -> bool:
            found = session.rows(self._q.head_for_update, run)
            if not found or found[0][9] or found[0][2] != at:
                return False
            number = found[0][0]
            if session.rows(self._q.last_message, number)[0][0] != delivered:
                return False
            session.run(self._q.drop_log_uses, number)
            session.run(self._q.use_pieces, number, list(hashes))
            return True

        return self._server.transact(write)

    def sweep(self, *, limit: int = records.READ_LIMIT) -> int:
        def write(session: Session) -> int:
            search_terms.forget(session, self._q, [number for (number,) in session.rows(self._q.stale_index_positions)])
            session.run(self._q.sweep_full, self._clock_us())
            unused = [piece for (piece,) in session.rows(self._q.unused, limit)]
            return int(session.rows(self._q.sweep, unused)[0][0])

        return self._unhurried(write)

    # snapshots --------------------------------------------------------------------------------

    def forget_snapshots(self, run: str) -> None:
        def write(session: Session) -> None:
            number = self._known(session, run)[0]
            session.run(self._q.drop_snapshots, number)
            session.run(self._q.drop_snapshot_uses, number)

        self._server.transact(write)

    # search terms -----------------------------------------------------------------------------

    def index_terms(self, items: Sequence[records.TermBatch]) -> None:
        self._server.transact(lambda session: search_terms.index_terms(session, self._q, items))

    def search(self, query: records.IndexQuery) -> list[records.TermPosition]:
        groups = msgspec.json.encode([list(terms) for terms in query.all_of])
        found = self._rows(self._q.search, groups, query.since_us or 0, *query.start, query.limit)
        return [records.TermPosition(*row) for row in found] if query.all_of else []

    # leases -----------------------------------------------------------------------------------

    def lease(self, run: str, holder: str, *, seconds: float, handed: int | None = None) -> records.Head:
        def write(session: Session) -> records.Head:
            found = session.rows(self._q.lease, run, holder, self._clock_us(), _seconds(seconds), handed)
            if not found:
                raise RunBusy(run, holder=str(self._known(session, run)[7]))
            return head_of(found[0])

        return self._server.transact(write, self._is_held)

    def claim(
        self,
        holder: str,
        *,
        now_us: int,
        seconds: float,
        limit: int,
        agents: Collection[str] | None = None,
        room: Mapping[str, int] | None = None,
    ) -> list[records.Claimed]:
        names = None if agents is None else list(agents)
        rooms = (list(room), list(room.values())) if room else (None, None)

        def write(session: Session) -> list[records.Claimed]:
            params = (holder, now_us, self._clock_us(), _seconds(seconds), limit, names, *rooms, self._lane)
            return [claimed_of(row) for row in session.rows(self._q.claim, *params)]

        def was_committed(session: Session, claimed: list[records.Claimed]) -> bool:
            return not claimed or self._is_held(session, claimed[0].head)

        claimed = self._server.transact(write, was_committed)
        self._lane = claimed[-1].row.lane if claimed else self._lane
        return claimed

    def _is_held(self, session: Session, head: records.Head) -> bool:
        """Returns whether a lease was taken although the session was lost."""
        found = session.rows(self._q.head, head.run)
        return bool(found) and (found[0][4], found[0][7]) == (head.epoch, head.holder)

    def renew(self, holder: str, runs: Collection[str], *, seconds: float) -> dict[str, int]:
        params = (holder, self._clock_us(), _seconds(seconds))
        kept: dict[str, int] = dict(self._rows(self._q.of("renew", _RENEW_FREE), *params, list(runs)))
        for run in {*runs} - kept.keys():

            def write(session: Session, run: str = run) -> Rows:
                session.script(_SHORTLY)
                return session.rows(self._q.of("renew_locked", _RENEW_LOCKED), *params, [run])

            with suppress(StoreBusy):
                kept |= self._server.transact(write)
        return kept

    def release(self, run: str, *, epoch: int, holder: str | None = None, left: bool = False) -> None:
        self._rows(self._q.release, run, epoch, holder, left)

    def lives(self, holder: str) -> bool:
        return True

    def _clock_us(self) -> int | None:
        """The time passed to statements; None: the database's."""
        return None if self._clock is None else self._clock.now_us()

    def take_tokens(self, buckets: Sequence[limits.TokenBucket]) -> int:
        columns = zip(*map(msgspec.structs.astuple, dict.fromkeys(buckets)), strict=True)
        return int(self._rows(self._q.take_tokens, *map(list, columns), self._clock_us())[0][0]) if buckets else 0

    # the inbox --------------------------------------------------------------------------------

    def deliver(self, deliveries: Sequence[records.Delivery]) -> list[records.Delivered | LogError]:
        if not deliveries:
            self._server.refuse_closed()
            return []
        return self._server.resend(lambda session, again: deliver(session, self._q, deliveries, again=again))

    # finding ----------------------------------------------------------------------------------

    def reindex(
        self, run: str, index: records.RunIndex, *, at: int, slots: Collection[Slot] | None = None,
        delivered: int | None = None,
    ) -> bool:  # fmt: skip
        def write(session: Session) -> bool:
            found = session.rows(self._q.head_for_update, run)
            if not found or found[0][9] or found[0][2] != at:
                return False
            number = found[0][0]
            counted = session.rows(self._q.last_message, number)[0][0]
            if delivered not in (None, counted):
                return False
            session.run(self._q.count_inbox, number, counted)
            session.run(self._q.write_index, number, msgspec.json.encode(index_fields(index)))
            session.run(self._q.drop_tags, number)
            session.run(self._q.put_tags, number, index.tags)
            if slots is not None:
                session.run(self._q.drop_slots, number)
                written = [msgspec.structs.astuple(slot) for slot in slots]
                session.run(self._q.write_slots, number, msgspec.json.encode(written))
            return True

        return self._server.transact(write)

    def runs(self, query: records.RunQuery, *, before: int | None = None, limit: int = 100) -> list[records.RunRow]:
        name, sql, values = runs_query(query)
        statement = self._q.of(name, lambda: sql)
        return [
            run_row_of(row) for row in self._rows(statement, records.LAST if before is None else before, limit, *values)
        ]

    def counts(self, query: records.RunQuery) -> dict[str, int]:
        name, sql, values = counts_query(query)
        return dict(self._rows(self._q.of(name, lambda: sql), *values))

    def due(self, now_us: int, *, limit: int = 100, agents: Collection[str] | None = None) -> list[records.RunRow]:
        names = None if agents is None else list(agents)
        return [run_row_of(row) for row in self._rows(self._q.due, now_us, self._clock_us(), names, limit)]

    def soonest_us(self, *, agents: Collection[str] | None = None) -> int | None:
        found: int | None = self._rows(self._q.soonest, None if agents is None else list(agents))[0][0]
        return found

    def watch(self, callback: Callable[[str], None]) -> Callable[[], None]:
        return self._listener.watch(callback)

    # the outbox -------------------------------------------------------------------------------

    def outbox(
        self, *, after: int = 0, kinds: Collection[str] | None = None, limit: int = records.READ_LIMIT
    ) -> list[records.OutboxItem]:
        self._rows(self._q.place_outbox)
        return super().outbox(after=after, kinds=kinds, limit=limit)

    def outbox_end(self) -> int:
        return int(self._rows(self._q.place_outbox)[0][0])

    def trim_outbox(self, up_to: int) -> int:
        return int(self._rows(self._q.trim_outbox, up_to)[0][0])

    # maintenance ------------------------------------------------------------------------------

    def quarantine(self, run: str, reason: str | None) -> None:
        if not self._rows(self._q.quarantine, run, reason):
            raise RunUnknown(run)

    def repair(self, head: records.Head, *, keep: int, rows: Sequence[records.Row]) -> None:
        def write(session: Session) -> None:
            found = session.rows(self._q.head_for_update, head.run)
            if found and min([head.seq, *(row.seq for row in rows)]) <= found[0][2]:
                raise StoreError(f"{head.run}: a repair moves the head forward, {found[0][2]} to {head.seq} does not")
            at, lease = (head.run, head.seq, head.hash, head.epoch), (head.holder, head.lease_until_us)
            number = session.rows(self._q.repair_head, *at, head.base, head.parent, *lease)[0][0]
            session.run(self._q.seal_head, number)
            session.run(self._q.displace, number, keep)
            session.run(self._q.drop_events, number, keep)
            columns = zip(*((row.seq, row.body, row.hash, row.data) for row in rows), strict=True)
            session.run(self._q.put_events, number, *([list(column) for column in columns] or [[]] * 4))
            search_terms.forget(session, self._q, [number])

        def was_committed(session: Session, _: None) -> bool:
            found = session.rows(self._q.head, head.run)
            return bool(found) and (found[0][2], found[0][3]) == (head.seq, head.hash)

        self._server.transact(write, was_committed)

    def restore(
        self, run: str, rows: Sequence[records.Row], pieces: Sequence[Blob], messages: Sequence[records.InboxRow] = ()
    ) -> None:
        def write(session: Session) -> None:
            number = self._known(session, run)[0]
            session.run(self._q.drop_rows, number, [row.seq for row in rows])
            columns = zip(*((row.seq, row.body, row.hash, row.data) for row in rows), strict=True)
            session.run(self._q.put_events, number, *([list(column) for column in columns] or [[]] * 4))
            values = zip(*((piece.hash, piece.codec, piece.body) for piece in pieces), strict=True)
            session.run(self._q.restore_pieces, *([list(column) for column in values] or [[]] * 3))
            for row in messages:
                sent = row.message
                stored = (sent.id, sent.name, sent.body, sent.by, sent.at_us, sent.taken, row.root)
                session.run(self._q.restore_message, number, sent.number, *stored, b"".join(row.pieces) or None)

        self._server.transact(write)

    def remove(self, run: str, *, at: int | None = None, delivered: int | None = None) -> bool:
        def write(session: Session) -> bool:
            number, _, seq, *_ = self._known(session, run)
            if at not in (None, seq) or delivered not in (None, session.rows(self._q.last_message, number)[0][0]):
                return False
            if session.rows(self._q.has_fork, run):
                raise StoreError(f"{run}: a fork depends on it; remove the fork first")
            session.run(self._q.drop_events, number, -1)
            q = self._q
            drops = (q.drop_tags, q.drop_uses, q.drop_snapshots, q.drop_messages, q.drop_slots, q.drop_outbox)
            for each in (*drops, q.write_tombstone):
                session.run(each, number)
            return True

        def was_committed(session: Session, _: bool) -> bool:
            return not session.rows(self._q.number, run)

        return self._server.transact(write, was_committed)

    def purge(self) -> bool:
        return True

    def inspect(self, *, heal: bool = False) -> list[records.Problem]:
        found = self._unhurried(lambda session: list(problems(session, self._q, heal=heal)))
        damaged = self._unhurried(lambda session: damaged_pieces(session, self._q))
        found += damaged_values(damaged, heal=heal)
        if any(problem.healed for problem in found):
            self._unhurried(lambda session: self._heal(session, damaged[1]))
        return found

    def _heal(self, session: Session, pieces: list[bytes]) -> None:
        q = self._q
        names: dict[int, str] = dict(session.rows(q.names))
        search_terms.forget(
            session, q, list(damaged_terms(session.rows(q.all_terms), session.rows(q.all_index_positions), names))
        )
        session.run(q.drop_pieces, pieces)
        for clear in (q.clear_uses, q.clear_tags, q.clear_snapshots, q.clear_outbox):
            session.run(clear)

    def conditions(self) -> list[records.Condition]:
        return self._server.run(lambda session: list(conditions(session, self._server, SystemClock())))

    # inside -----------------------------------------------------------------------------------

    def _unhurried(self, work: Callable[[Session], T]) -> T:
        """Runs maintenance, which reads whole tables, without the role's statement_timeout."""

        def write(session: Session) -> T:
            session.script("SET LOCAL statement_timeout = 0")
            return work(session)

        return self._server.transact(write)

    def _found(self, query: str, *values: Any) -> Rows:
        return self._rows(getattr(self._q, query), *values)

    def _is_intact(self, message: tuple[Any, ...]) -> bool:
        return bool(message[7])

    def _rows(self, statement: Statement, *values: Any) -> Rows:
        return self._server.run(lambda session: session.rows(statement, *values))

    def _known(self, session: Session, run: str) -> tuple[Any, ...]:
        """Returns and locks the head of a run that must exist."""
        found = session.rows(self._q.head_for_update, run)
        if not found or found[0][9]:
            raise RunUnknown(run)
        return found[0]


def _seconds(seconds: float) -> float | None:
    return None if math.isinf(seconds) else seconds
