"""The embedded default: one SQLite file in WAL mode, shared by threads and processes.

Owns the reads and writes of each transaction. Knows no event types.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Final

import msgspec

from killick.clock import Clock, SystemClock
from killick.errors import LogError, RunBroken, RunBusy, StoreBroken, StoreError
from killick.ids import Ids, RandomIds
from killick.model.chunks import Blob
from killick.store import limits, records
from killick.store.liveness import Holders
from killick.store.notify import Notifier
from killick.store.protocol import is_held, lease_clock_us
from killick.store.slots import Slot
from killick.store.sql.reads import LOG, SqlReads
from killick.store.sql.rows import damaged_values, head_of, snapshot_of
from killick.store.sqlite import btrees, listing, search_terms
from killick.store.sqlite.conditions import conditions
from killick.store.sqlite.due import DueQuery, due, soonest_us
from killick.store.sqlite.file import SqliteFile
from killick.store.sqlite.inspect import damaged_pieces, inspect, inspect_readable, lost_heads, misplaced
from killick.store.sqlite.rows import (
    HEAD_DAMAGED,
    SEQ_BITS,
    SEQ_MAX,
    HeadRow,
    Q,
    find_head,
    require_head,
    run_row,
    run_row_of,
    with_lease,
    write_lease,
)
from killick.store.sqlite.transaction import SqliteTransaction, join, transaction
from killick.store.sqlite.writes import RunsToNotify, Writes, bare, put_slots, restore_messages

_ALONE_NAPS_SECONDS: Final = (0.002, 0.005, 0.01, 0.02, 0.04)


class SqliteStore(SqlReads):
    """A store in one file. Several processes may open the same file at once.

    path          the path of the file
    durability    "power": a commit survives a power failure; "process": only the end of the process
    busy_seconds  how long to wait for the write lock
    create        whether to create a missing file
    accept_loss   open a file whose write-ahead log is missing, without the commits that were in it
    read_only     write nothing; for a file that no process writes meanwhile
    """

    def __init__(
        self,
        path: str | Path,
        *,
        durability: records.Durability = "power",
        busy_seconds: float = 60.0,
        create: bool = True,
        accept_loss: bool = False,
        read_only: bool = False,
        clock: Clock | None = None,
        ids: Ids | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        ids = ids or RandomIds()

        def setup(writer: sqlite3.Cursor) -> None:
            for key, value in (("id", ids.new("store").encode()), ("secret_key", ids.key())):
                writer.execute(Q.put_meta, (key, value, records.row_check(key, value)))

        self._file = SqliteFile(
            Path(path), durability=durability, busy_seconds=busy_seconds, create=create, setup=setup,
            accept_loss=accept_loss, read_only=read_only,
        )  # fmt: skip
        self.place: Final = self._file.place
        self.proves_life: Final = True
        try:
            with self._file.reading() as db:
                meta = {
                    key: value
                    for key, value, checksum in db.execute(Q.meta)
                    if records.row_check(key, value) == checksum
                }
            if meta.keys() != {"id", "secret_key"}:
                raise StoreBroken(self.place, "its own id or key is damaged")
        except BaseException:
            self._file.close()
            raise
        self.id: str = meta["id"].decode()
        self.secret_key: bytes = meta["secret_key"]
        self._holders = Holders(self._file.path, named=self._holder_names)
        self._notifier = Notifier(self._file.path, detector=self._file.commit_detector)
        self._lane = 0  # of the run that this process claimed last
        self._writes = Writes(self.place, holders=self._holders, clock=self._clock)
        try:
            with contextlib.suppress(StoreBroken):  # a damaged index; `verify` rebuilds it
                self._end_unproven_leases()
        except BaseException:
            self._file.close()
            raise

    def now_us(self) -> int:
        return lease_clock_us(self._clock)

    def _clock_us(self) -> int:
        return self.now_us()

    def _found(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        plain = [msgspec.json.encode(value).decode() if isinstance(value, list) else value for value in values]
        with self._file.reading() as db:
            return db.execute(getattr(Q, query), plain).fetchall()

    _run_row = staticmethod(run_row_of)

    def _is_intact(self, message: tuple[Any, ...]) -> bool:
        *columns, number, checksum = message
        return bool(records.row_check(number, *columns) == checksum)

    def close(self) -> None:
        self._notifier.close()
        self._holders.close()
        self._file.close()

    # the log ----------------------------------------------------------------------------------

    def append(self, items: Sequence[records.Append]) -> list[records.Head | LogError]:
        if (moves := bare(self._writes.seen, items)) is not None:
            try:
                self._file.write(moves, Q.append_events, Q.put_event)
            except sqlite3.IntegrityError:
                pass  # some head is not as it was seen any more: nothing is written, and each is looked at
            else:
                self._writes.seen.update([(moved.head[1], moved.head) for moved in moves])
                return [head_of(moved.head) for moved in moves]
        to_notify = RunsToNotify()
        with self._file.writing() as db:
            heads = [self._writes.append(db, item, to_notify) for item in items]
        self._notifier.notify(to_notify)
        return heads

    def read(
        self, run: str, *, after: int = 0, limit: int = records.READ_LIMIT, data: bool = True
    ) -> list[records.Row]:
        with self._file.reading() as db:
            if (found := find_head(db, run)) is None:
                return []
            first = found[0] << SEQ_BITS
            span = (first + after, first + SEQ_MAX, min(limit, records.READ_LIMIT))
            rows = db.execute(Q.events if data else Q.bodies, span)
            return [records.Row(*row) for row in rows.fetchall()]

    def opening(self, run: str, *, fold: int) -> records.Opening | None:
        with self._file.reading() as db:
            # Both statements read the same database snapshot.
            db.execute("BEGIN")
            found = db.execute(Q.opening, (fold, run)).fetchone()
            rows = list[records.Row]()
            if found is not None and not found[9]:
                first = found[0] << SEQ_BITS
                rows = [
                    records.Row(*row) for row in db.execute(Q.events, (first + (found[11] or 0), first + SEQ_MAX, -1))
                ]
            db.execute("COMMIT")
        if found is None or found[9]:
            return None
        snapshot = None if found[11] is None else snapshot_of(found[11:15])
        intact = records.row_check(*found[:10]) == found[15]
        return records.Opening(
            head=head_of(found[:10]), quarantined=found[10], snapshot=snapshot, rows=rows, intact=intact
        )

    # transactions of others -------------------------------------------------------------------

    def transaction(self) -> AbstractContextManager[SqliteTransaction]:
        return transaction(self._file, self._writes, self._notifier.notify)

    def join(self, connection: Any) -> SqliteTransaction:
        return join(connection, self._file, self._writes)

    # values -----------------------------------------------------------------------------------

    def pieces(self, hashes: Collection[bytes]) -> Mapping[bytes, Blob]:
        with self._file.reading() as db:
            found = (db.execute(Q.piece, (hash_,)).fetchone() for hash_ in hashes)
            return {row[0]: Blob(*row) for row in found if row is not None}

    def set_references(self, run: str, hashes: Collection[bytes], *, at: int, delivered: int) -> bool:
        with self._file.writing() as db:
            found = find_head(db, run)
            if found is None or found[2] != at:
                return False
            if db.execute(Q.last_message, (found[0],)).fetchone()[0] != delivered:
                return False
            db.execute(Q.drop_log_uses, (found[0],))
            db.executemany(Q.use_piece, [(found[0], LOG, hash_) for hash_ in hashes])
            return True

    def sweep(self, *, limit: int = records.READ_LIMIT) -> int:
        with self._file.writing() as db:
            search_terms.forget(db, [number for (number,) in db.execute(Q.stale_index_positions).fetchall()])
            db.execute(Q.sweep_full, (self.now_us(),))
            return db.execute(Q.sweep, (limit,)).rowcount

    # snapshots --------------------------------------------------------------------------------

    def forget_snapshots(self, run: str) -> None:
        with self._file.writing() as db:
            number = require_head(db, run)[0]
            db.execute(Q.drop_snapshots, (number,))
            db.execute(Q.drop_snapshot_uses, (number,))

    # search terms -----------------------------------------------------------------------------

    def index_terms(self, items: Sequence[records.TermBatch]) -> None:
        with self._file.writing() as db:
            search_terms.index_terms(db, items)

    def search(self, query: records.IndexQuery) -> list[records.TermPosition]:
        with self._file.reading() as db:
            return list(islice(search_terms.search(db, query), query.limit))

    # leases -----------------------------------------------------------------------------------

    def lease(self, run: str, holder: str, *, seconds: float, handed: int | None = None) -> records.Head:
        with self._file.leasing() as db:
            return self._lease(db, run, holder, seconds, handed)

    def lease_all(self, runs: Sequence[str], holder: str, *, seconds: float) -> list[records.Head | LogError]:
        leased = list[records.Head | LogError]()
        with self._file.leasing() as db:
            for run in runs:
                try:
                    leased.append(self._lease(db, run, holder, seconds, None))
                except LogError as refused:
                    leased.append(refused)
        return leased

    def _lease(self, db: sqlite3.Cursor, run: str, holder: str, seconds: float, handed: int | None) -> records.Head:
        found = require_head(db, run)
        self._holders.lock(holder)
        if found[4] != handed and is_held(self, head_of(found)):
            raise RunBusy(run, holder=str(found[7]))
        if (head := self._take(db, found, holder, seconds)) is None:
            raise RunBroken(run, seq=found[2], reason=HEAD_DAMAGED)
        return head_of(head)

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
        query, room = self._due_query(now_us, agents, room or {}, self._lane), dict(room or {})
        self._file.check()
        with self._file.reading() as db:
            if not due(db, query, min(limit, 1)):
                return []
        taken = list[records.Claimed]()
        with self._file.leasing() as db:
            self._holders.lock(holder)
            while some := due(db, query, limit - len(taken)):
                for row, _, found in some:
                    agent, left = row.agent, found[7:9]
                    if room.get(agent, 1) > 0:
                        if (head := self._take(db, found, holder, seconds)) is None:
                            db.execute(Q.put_quarantine, (found[0], f"{HEAD_DAMAGED} at event {found[2]}"))
                            continue
                        claimed = records.Claimed(head=head_of(head), row=row, left=left[0], left_until_us=left[1])
                        taken.append(claimed)
                        self._lane = row.lane
                    if agent in room:
                        room[agent] -= 1
                # If an agent's room was exhausted, runs of other agents may be due behind its own.
                query = self._due_query(now_us, agents, room, self._lane)
        return taken

    def _take(self, db: sqlite3.Cursor, found: HeadRow, holder: str, seconds: float) -> HeadRow | None:
        """Returns the head with the lease; None if it is damaged."""
        moved = with_lease(found, holder, self._writes.until_us(seconds), epoch=found[4] + 1)
        if not write_lease(db, moved, found):
            return None
        self._writes.see(moved)
        return moved

    def _due_query(
        self, now_us: int, agents: Collection[str] | None, room: Mapping[str, int], lane: int = records.LANES - 1
    ) -> DueQuery:
        barred = frozenset(agent for agent, free in room.items() if free <= 0)
        names = None if agents is None else frozenset(agents)
        return DueQuery(now_us, self.now_us(), cache(self.lives), names, barred, lane)

    def renew(self, holder: str, runs: Collection[str], *, seconds: float) -> dict[str, int]:
        with self._file.writing() as db:
            until = self._writes.until_us(seconds)
            held: list[HeadRow] = db.execute(Q.held, (holder, self.now_us())).fetchall()
            moved = ((with_lease(head, holder, until), head) for head in held if head[1] in runs)
            renewed = [head for head, before in moved if write_lease(db, head, before)]
            for head in renewed:
                self._writes.see(head)
            return {head[1]: head[4] for head in renewed}

    def release(self, run: str, *, epoch: int, holder: str | None = None, left: bool = False) -> None:
        with self._file.leasing() as db:
            found = find_head(db, run)
            if found is None or found[4] != epoch or found[7] is None or holder not in (None, found[7]):
                return
            write_lease(db, with_lease(found, found[7], 0) if left else with_lease(found, None, None), found)
            row = run_row(db, found[0])
        if left or (row is not None and row.wake_at_us is not None and row.status not in records.ENDED):
            self._notifier.notify([run])

    def lives(self, holder: str) -> bool:
        proof = self._holders.lives(holder)
        # Without a lock to test, a lease proves itself until its time.
        return bool(self._unexpired(holder)) if proof is None else proof

    def _holder_names(self) -> list[str]:
        with self._file.reading() as db:
            return [name for (name,) in db.execute(Q.holders)]

    def _unexpired(self, holder: str, db: sqlite3.Cursor | None = None) -> list[HeadRow]:
        """Returns the heads with an unexpired lease of a holder. None of a file that no process writes."""
        if self._file.is_read_only:
            return []
        if db is None:
            with self._file.reading() as db:
                return self._unexpired(holder, db)
        return db.execute(Q.held, (holder, self.now_us())).fetchall()

    def _unproven(self) -> list[str]:
        """Returns the holders of unexpired leases whose life no lock proves."""
        return [name for name in self._holder_names() if self._holders.lives(name) is None and self._unexpired(name)]

    def _end_unproven_leases(self) -> None:
        """Ends the leases of holders whose life no lock proves, if no other process has the file open: none lives.

        A backup and a copy name such holders, which are processes on another file.
        """

        def end(db: sqlite3.Cursor) -> None:
            for (holder,) in db.execute(Q.holders).fetchall():
                for head in self._unexpired(holder, db) if self._holders.lives(holder) is None else ():
                    write_lease(db, with_lease(head, holder, 0), head)

        for nap in _ALONE_NAPS_SECONDS:
            if not self._unproven() or self._file.alone(end):
                return
            time.sleep(nap)  # another process may be doing the same

    def take_tokens(self, buckets: Sequence[limits.TokenBucket]) -> int:
        with self._file.leasing() as db:
            now_us = self.now_us()
            found = {each: db.execute(Q.full_at, (each.id,)).fetchone() for each in buckets}
            taken = {each.id: each.taken(row and row[0], now_us) for each, row in found.items()}
            wait_us = max((wait_us for _, wait_us in taken.values()), default=0)
            if wait_us <= 0:
                db.executemany(Q.put_full_at, [(bucket, at_us) for bucket, (at_us, _) in taken.items()])
            return max(wait_us, 0)

    # the inbox --------------------------------------------------------------------------------

    def deliver(self, deliveries: Sequence[records.Delivery]) -> list[records.Delivered | LogError]:
        to_notify = RunsToNotify()
        with self._file.writing() as db:
            delivered = [self._writes.deliver(db, delivery, to_notify) for delivery in deliveries]
        self._notifier.notify(to_notify)
        return delivered

    # finding ----------------------------------------------------------------------------------

    def reindex(
        self, run: str, index: records.RunIndex, *, at: int, slots: Collection[Slot] | None = None,
        delivered: int | None = None,
    ) -> bool:  # fmt: skip
        with self._file.writing() as db:
            found = find_head(db, run)
            if found is None or found[2] != at:
                return False
            number = found[0]
            counted: int = db.execute(Q.last_message, (number,)).fetchone()[0]
            if delivered not in (None, counted):
                return False
            db.execute(Q.drop_tags, (number,))
            db.execute(Q.drop_run, (number,))
            self._writes.put_index(db, number, index, delivered=counted)
            if slots is not None:
                put_slots(db, number, slots)
        self._notifier.notify([run])
        return True

    def is_tagged(self, tag: str) -> bool:
        with self._file.reading() as db:
            return bool(db.execute(Q.is_tagged, (tag,)).fetchone()[0])

    def runs(self, query: records.RunQuery, *, before: int | None = None, limit: int = 100) -> list[records.RunRow]:
        with self._file.reading() as db:
            return listing.listed(db, query, before, limit)

    def counts(self, query: records.RunQuery) -> dict[str, int]:
        with self._file.reading() as db:
            return listing.counted(db, query)

    def due(self, now_us: int, *, limit: int = 100, agents: Collection[str] | None = None) -> list[records.RunRow]:
        with self._file.reading() as db:
            return [row for row, *_ in due(db, self._due_query(now_us, agents, {}), limit)]

    def soonest_us(self, *, agents: Collection[str] | None = None) -> int | None:
        with self._file.reading() as db:
            return soonest_us(db, agents)

    def watch(self, callback: Callable[[str], None]) -> Callable[[], None]:
        return self._notifier.watch(callback)

    # the outbox -------------------------------------------------------------------------------

    def outbox_end(self) -> int:
        with self._file.reading() as db:
            return int(db.execute(Q.outbox_end).fetchone()[0])

    def trim_outbox(self, up_to: int) -> int:
        with self._file.writing() as db:
            return db.execute(Q.trim_outbox, (up_to,)).rowcount

    # maintenance ------------------------------------------------------------------------------

    def quarantine(self, run: str, reason: str | None) -> None:
        with self._file.writing() as db:
            number = require_head(db, run)[0]
            if reason is None:
                db.execute(Q.drop_quarantine, (number,))
            else:
                db.execute(Q.put_quarantine, (number, reason))
        if reason is None:
            self._notifier.notify([run])

    def repair(self, head: records.Head, *, keep: int, rows: Sequence[records.Row]) -> None:
        with self._file.writing() as db:
            found: HeadRow | None = db.execute(Q.head, (head.run,)).fetchone()
            if found is not None and min([head.seq, *(row.seq for row in rows)]) <= found[2]:
                raise StoreError(f"{head.run}: a repair moves the head forward, {found[2]} to {head.seq} does not")
            number = db.execute(Q.next_number).fetchone()[0] if found is None else found[0]
            first = number << SEQ_BITS
            for seq, body, data, hash_ in db.execute(Q.events, (first + keep, first + SEQ_MAX, -1)).fetchall():
                columns = (first + seq, body, data, hash_)
                db.execute(Q.put_displaced, (*columns, records.row_check(*columns)))
            db.execute(Q.drop_events, (first + keep, first + SEQ_MAX))
            for row in rows:
                db.execute(Q.put_event, (first + row.seq, row.body, row.data, row.hash))
            lease = (head.holder, head.lease_until_us, 0)
            moved = (number, head.run, head.seq, head.hash, head.epoch, head.base, head.parent, *lease)
            db.execute(Q.drop_head, (number,))
            db.execute(Q.put_head, (*moved, records.row_check(*moved)))
            search_terms.forget(db, [number])

    def restore(
        self, run: str, rows: Sequence[records.Row], pieces: Sequence[Blob], messages: Sequence[records.InboxRow] = ()
    ) -> None:
        with self._file.writing() as db:
            number = require_head(db, run)[0]
            first = number << SEQ_BITS
            restore_messages(db, number, messages)
            for row in rows:
                db.execute(Q.drop_events, (first + row.seq - 1, first + row.seq))
                db.execute(Q.put_event, (first + row.seq, row.body, row.data, row.hash))
            db.executemany(Q.restore_piece, [(piece.hash, piece.codec, piece.body) for piece in pieces])

    def remove(self, run: str, *, at: int | None = None, delivered: int | None = None) -> bool:
        with self._file.writing() as db:
            found = require_head(db, run)
            if at not in (None, found[2]):
                return False
            if delivered not in (None, db.execute(Q.last_message, found[:1]).fetchone()[0]):
                return False
            if db.execute(Q.has_fork, (run,)).fetchone():
                raise StoreError(f"{run}: a fork depends on it; remove the fork first")
            number = found[0]
            first = number << SEQ_BITS
            db.execute(Q.drop_events, (first, first + SEQ_MAX))
            drops = (Q.drop_tags, Q.drop_uses, Q.drop_snapshots, Q.drop_messages, Q.drop_run, Q.drop_quarantine)
            for drop in (*drops, Q.drop_slots, Q.drop_outbox):
                db.execute(drop, (number,))
            write_lease(db, (*found[:7], None, None, 1), found)
            return True

    def purge(self) -> bool:
        return self._file.truncate_wal()

    def inspect(self, *, heal: bool = False) -> list[records.Problem]:
        with self._file.reading() as db:
            wrong = btrees.check(db)
            trees = [] if wrong is None else list(btrees.damaged(db))
        derived = [tree for tree in trees if heal and tree.is_derived]
        rebuilt = {tree.table for tree in derived} - self._rebuild(derived).keys()
        found = [tree.problem(healed=tree.table in rebuilt) for tree in trees]
        if wrong is not None and not trees:
            found.append(records.Problem(where="file", what=wrong))
        if any(tree.table not in rebuilt for tree in trees):
            with self._file.reading() as db:
                return found + list(inspect_readable(db))
        with self._file.reading() as db:
            found += inspect(db, heal=heal)
            damaged = damaged_pieces(db)
        found += damaged_values(damaged, heal=heal)
        if any(problem.healed for problem in found):
            with self._file.writing() as db:
                names = {row[0]: row[1] for row in db.execute(Q.all_heads)}
                search_terms.forget(db, list(search_terms.damaged(db, names)))
                db.executemany(Q.drop_piece, [(hash_,) for hash_ in damaged[1]])
                db.executemany(Q.set_lane, misplaced(db))
                clears = (Q.clear_uses, Q.clear_runs, Q.clear_tags, Q.clear_snapshots, Q.clear_quarantine)
                for clear in (*clears, Q.clear_outbox):
                    db.execute(clear)
                if "piece_uses" in rebuilt:
                    db.execute(Q.keep_pieces)
        return found

    def rebuild(self) -> list[records.Problem]:
        """Writes every damaged table again, with the rows that can be read, and frees the damaged pages."""
        with self._file.reading() as db:
            trees = list(btrees.damaged(db))
            lost = list(lost_heads(db)) if trees else []
        kept = self._rebuild(trees)
        if len(kept) < len({tree.table for tree in trees}):
            self._file.vacuum()
        what = {table: f"not written again: {why}" for table, why in kept.items()}
        done = "written again, with the rows that could be read"
        tables = dict.fromkeys(tree.table for tree in trees)
        return [records.Problem(where=table, what=what.get(table, done)) for table in tables] + lost

    def _rebuild(self, trees: Sequence[btrees.Tree]) -> dict[str, str]:
        """Builds damaged trees again, each in a transaction of its own; returns the tables that are still damaged, and
        why."""
        failed = dict[str, str]()
        for tree in trees:
            try:
                with self._file.reading() as reader, self._file.writing() as db:
                    btrees.rebuild(db, tree, reader)
                    if tree.table == "piece_uses":
                        db.execute(Q.keep_pieces)
            except (sqlite3.Error, StoreBroken, btrees.RowsLost) as error:
                failed[tree.table] = str(error)
        return failed

    def conditions(self) -> list[records.Condition]:
        found = conditions(self._file)
        if unproven := self._unproven():
            value = f"{', '.join(unproven)} without a lock file"
            wrong = "it is unknown whether they live; end every process that has the store open, and open it again"
            found.append(records.Condition("holders", value, wrong))
        return found
