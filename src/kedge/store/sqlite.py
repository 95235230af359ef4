"""The embedded default: one SQLite file in WAL mode, shared by threads and processes.

Owns the row layout and what each transaction checks and writes. Knows no event types.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec

from kedge.clock import Clock, SystemClock
from kedge.errors import (
    AlreadyClaimed,
    EpochStale,
    HeadMoved,
    LogError,
    MessageGone,
    RunBusy,
    RunExists,
    RunUnknown,
    StoreBroken,
    StoreError,
)
from kedge.ids import Ids, RandomIds
from kedge.model.values import Blob
from kedge.store import sqlite_marks as marks
from kedge.store.base import (
    ENDED,
    READ_LIMIT,
    Append,
    Behind,
    Claim,
    Delivered,
    Delivery,
    Durability,
    Head,
    Marking,
    Message,
    Owner,
    Place,
    Problem,
    References,
    Row,
    RunIndex,
    RunQuery,
    RunRow,
    Snapshot,
    row_check,
)
from kedge.store.holders import Holders
from kedge.store.sqlite_file import SqliteFile
from kedge.store.sqlite_inspect import damaged_pieces, inspect, short
from kedge.store.sqlite_rows import (
    SEQ_BITS,
    SEQ_MAX,
    HeadRow,
    Q,
    erase,
    hash_at,
    head_found,
    head_of,
    hold,
    inner_rows,
    is_there,
    lengthened,
    mark,
    message_of,
    number_known,
    number_of,
    put_pieces,
    run_row,
    run_row_of,
    runs_wanted,
    snapshot_of,
)

SEEN_MAX: Final = 10_000
_LOG, _SNAPSHOT = 0, 1


class SqliteStore:
    """A store in one file. Several processes may open the same file at once."""

    def __init__(
        self,
        path: str | Path,
        *,
        durability: Durability = "power",
        busy_seconds: float = 60.0,
        create: bool = True,
        clock: Clock | None = None,
        ids: Ids | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        ids = ids or RandomIds()

        def setup(writer: sqlite3.Cursor) -> None:
            for key, value in (("id", ids.new("store").encode()), ("secret_key", ids.key())):
                writer.execute(Q.put_meta, (key, value, row_check(key, value)))

        path = Path(path)
        self._file = SqliteFile(path, durability=durability, busy_seconds=busy_seconds, create=create, setup=setup)
        try:
            with self._file.reading() as db:
                meta = {key: value for key, value, checksum in db.execute(Q.meta) if row_check(key, value) == checksum}
            if meta.keys() != {"id", "secret_key"}:
                raise StoreBroken(self.place, "its own id or key is damaged")
        except BaseException:
            self._file.close()
            raise
        self.id: str = meta["id"].decode()
        self.secret_key: bytes = meta["secret_key"]
        self._holders = Holders(path)
        self._seen: dict[str, HeadRow] = {}

    @property
    def place(self) -> str:
        return self._file.place

    def close(self) -> None:
        self._holders.close()
        self._file.close()

    # the log ----------------------------------------------------------------------------------

    def append(self, items: Sequence[Append]) -> list[Head | LogError]:
        heads = self._append_bare_ones(items)
        if heads is not None:
            return heads
        with self._file.writing() as db:
            return [self._append(db, item) for item in items]

    def _append_bare_ones(self, items: Sequence[Append]) -> list[Head | LogError] | None:
        """Events of some runs, after heads as we last saw them, without looking at each.

        None, and nothing is written: some head is not so any more, so each must be looked at.
        """
        moves: dict[str, HeadRow] = {}
        inner: list[tuple[object, ...]] = []
        last: list[tuple[object, ...]] = []
        for item in items:
            seen = self._seen.get(item.run)
            twice = item.run in moves
            if seen is None or twice or not item.is_bare or (item.after, item.before, item.epoch) != seen[2:5]:
                return None
            moves[item.run], columns = lengthened(seen, item.rows)
            inner += inner_rows(seen, item.rows)
            last.append(columns)
        try:
            self._file.write(Q.put_event, inner, Q.lengthen, last)
        except sqlite3.IntegrityError:
            return None
        self._seen.update(moves)
        return [head_of(moved) for moved in moves.values()]

    def _append(self, db: sqlite3.Cursor, item: Append) -> Head | LogError:
        """Check everything, then write everything: a refused item has written nothing."""
        found: HeadRow | None = db.execute(Q.head, (item.run,)).fetchone()
        if found is not None and not found[9] and item.rows and is_there(item, found):
            return head_of(found)
        refused = self._refuse(db, item, found)
        if refused is not None:
            return refused
        try:
            return self._write(db, found or self._give_birth(db, item), item)
        except sqlite3.IntegrityError as error:
            reason = f"{item.run}: something stands where the next event belongs ({error})"
            raise StoreBroken(self.place, reason) from error

    def _refuse(self, db: sqlite3.Cursor, item: Append, found: HeadRow | None) -> LogError | None:
        if item.birth is not None:
            refused = RunExists(item.run) if found is not None else self._refuse_birth(db, item)
        elif found is None or found[9]:
            refused = RunUnknown(item.run)
        elif found[4] != item.epoch:
            refused = EpochStale(item.run, held=item.epoch, actual=found[4])
        elif found[2] != item.after or found[3] != item.before:
            refused = HeadMoved(item.run, expected=item.after, actual=found[2])
        else:
            refused = None
        return refused or self._refuse_rights(db, item, found)

    def _refuse_birth(self, db: sqlite3.Cursor, item: Append) -> LogError | None:
        assert item.birth is not None
        parent = item.birth.parent
        if parent is None:
            return HeadMoved(item.run, expected=item.after, actual=0) if item.after else None
        standing: HeadRow | None = db.execute(Q.head, (parent,)).fetchone()
        if standing is None or standing[9]:
            return RunUnknown(parent)
        if hash_at(db, standing, item.after) != item.before:
            return HeadMoved(parent, expected=item.after, actual=standing[2])
        return None

    def _refuse_rights(self, db: sqlite3.Cursor, item: Append, found: HeadRow | None) -> LogError | None:
        for claim in item.claims:
            owned = db.execute(Q.owner, (claim.space, claim.key)).fetchone()
            given_back = claim in item.releases and owned is not None and owned[0] == item.run
            if owned is not None and not given_back:
                return AlreadyClaimed(item.run, space=claim.space, owner=owned[0], seq=owned[1])
        for number in item.takes:
            message = found and db.execute(Q.message, (found[0], number)).fetchone()
            if message is None or (message[6] is not None and number not in item.returns):
                return MessageGone(item.run, number)
        return None

    def _give_birth(self, db: sqlite3.Cursor, item: Append) -> HeadRow:
        """A head that stands before the first event."""
        birth = item.birth
        assert birth is not None
        if birth.holder is not None:
            self._holders.hold(birth.holder)
        number: int = db.execute(Q.next_number).fetchone()[0]
        until = self._until(birth.lease_seconds) if birth.holder is not None else None
        epoch = 1 if birth.holder is not None else 0
        at, lease = (item.after, item.before), (birth.holder, until)
        row: HeadRow = (number, item.run, *at, epoch, item.after, birth.parent, *lease, 0)
        db.execute(Q.put_head, (*row, row_check(*row)))
        return row

    def _write(self, db: sqlite3.Cursor, head: HeadRow, item: Append) -> Head:
        """Everything that an accepted append brings; most bring rows alone."""
        number = head[0]
        for place, row in enumerate(item.rows):
            if row.seq != head[2] + 1 + place:
                raise ValueError(f"{item.run}: row {row.seq} where {head[2] + 1 + place} belongs")
        if item.rows:
            db.executemany(Q.put_event, inner_rows(head, item.rows))
            head, columns = lengthened(head, item.rows)
            db.execute(Q.lengthen, columns)
        if item.pieces:
            put_pieces(db, number, _LOG, item.pieces)
        if not item.is_plain:
            self._write_rights(db, number, item)
        if item.index is not None:
            self._put_index(db, number, item.index, delivered=None)
        if item.snapshot is not None:
            shot = item.snapshot
            put_pieces(db, number, _SNAPSHOT, shot.pieces)
            db.execute(Q.put_snapshot, (number, shot.fold, shot.seq, shot.hash, shot.root))
        if len(self._seen) >= SEEN_MAX:
            self._seen.clear()
        self._seen[item.run] = head
        return head_of(head)

    def _write_rights(self, db: sqlite3.Cursor, number: int, item: Append) -> None:
        """Giving back comes before taking, so that one append can do both."""
        seq = item.last[0]
        for claim in item.releases:
            db.execute(Q.drop_claim, (claim.space, claim.key, number))
        for claim in item.claims:
            columns = (claim.space, claim.key, number, seq)
            db.execute(Q.put_claim, (*columns, row_check(*columns)))
        for taken, messages in ((None, item.returns), (seq, item.takes)):
            for message in messages:
                mark(db, number, message, taken)
        for erased in item.erases_rows:
            erase(db, (number << SEQ_BITS) + erased)
        for piece in item.erases_pieces:
            db.execute(Q.erase_piece, (piece,))

    def head(self, run: str) -> Head | None:
        with self._file.reading() as db:
            found: HeadRow | None = db.execute(Q.head, (run,)).fetchone()
        return None if found is None or found[9] else head_of(found)

    def heads(self, *, after: int = 0, limit: int = READ_LIMIT) -> list[tuple[int, Head]]:
        with self._file.reading() as db:
            return [(found[0], head_of(found)) for found in db.execute(Q.heads, (after, limit))]

    def read(self, run: str, *, after: int = 0, limit: int = READ_LIMIT, data: bool = True) -> list[Row]:
        with self._file.reading() as db:
            number = number_of(db, run)
            if number is None:
                return []
            first = number << SEQ_BITS
            span = (first + after, first + SEQ_MAX, min(limit, READ_LIMIT))
            rows = db.execute(Q.events if data else Q.bodies, span)
            return [Row(*row) for row in rows.fetchall()]

    def row(self, run: str, seq: int) -> Row | None:
        with self._file.reading() as db:
            number = number_of(db, run)
            found = None if number is None else db.execute(Q.event, ((number << SEQ_BITS) + seq,)).fetchone()
        return None if found is None else Row(*found)

    # values -----------------------------------------------------------------------------------

    def pieces(self, hashes: Collection[bytes]) -> Mapping[bytes, Blob]:
        with self._file.reading() as db:
            found = (db.execute(Q.piece, (hash_,)).fetchone() for hash_ in hashes)
            return {row[0]: Blob(*row) for row in found if row is not None}

    def references(self, run: str) -> References:
        with self._file.reading() as db:
            number = number_of(db, run)
            rows = [] if number is None else db.execute(Q.uses, (number,)).fetchall()
        return References(*({hash_ for kind, hash_ in rows if kind == wanted} for wanted in (_LOG, _SNAPSHOT)))

    def refer(self, run: str, hashes: Collection[bytes], *, at: int, delivered: int) -> bool:
        with self._file.writing() as db:
            found: HeadRow | None = db.execute(Q.head, (run,)).fetchone()
            if found is None or found[9] or found[2] != at:
                return False
            if db.execute(Q.last_message, (found[0],)).fetchone()[0] != delivered:
                return False
            db.execute(Q.drop_log_uses, (found[0],))
            db.executemany(Q.use_piece, [(found[0], _LOG, hash_) for hash_ in hashes])
            return True

    def sweep(self, *, limit: int = READ_LIMIT) -> int:
        with self._file.writing() as db:
            marks.sweep(db)
            return db.execute(Q.sweep, (limit,)).rowcount

    # snapshots --------------------------------------------------------------------------------

    def snapshot(self, run: str, *, fold: int, at: int) -> Snapshot | None:
        with self._file.reading() as db:
            number = number_of(db, run)
            found = None if number is None else db.execute(Q.snapshot, (number, fold, at)).fetchone()
        return None if found is None else snapshot_of(found)

    def snapshots(self, run: str) -> list[Snapshot]:
        with self._file.reading() as db:
            number = number_of(db, run)
            return [] if number is None else [snapshot_of(row) for row in db.execute(Q.snapshots, (number,))]

    def forget_snapshots(self, run: str) -> None:
        with self._file.writing() as db:
            number = number_known(db, run)
            db.execute(Q.drop_snapshots, (number,))
            db.execute(Q.drop_snapshot_uses, (number,))

    # marks ------------------------------------------------------------------------------------

    def unmarked(self, *, after: int = 0, limit: int = READ_LIMIT) -> list[Behind]:
        with self._file.reading() as db:
            return marks.unmarked(db, after, limit)

    def mark(self, items: Sequence[Marking]) -> None:
        with self._file.writing() as db:
            marks.mark(db, items)

    def marked(
        self,
        all_of: Sequence[Collection[int]],
        *,
        since_us: int | None = None,
        until_us: int | None = None,
        before: Place | None = None,
        limit: int = READ_LIMIT,
    ) -> list[Place]:
        start = marks.start_of(until_us, before)
        with self._file.reading() as db:
            return list(islice(marks.marked(db, all_of, 0 if since_us is None else since_us, start), limit))

    # leases -----------------------------------------------------------------------------------

    def lease(self, run: str, holder: str, *, seconds: float) -> Head:
        with self._file.writing() as db:
            found = head_found(db, run)
            self._holders.hold(holder)
            if self._held(found[7], found[8]):
                raise RunBusy(run, holder=str(found[7]))
            moved = (*found[:4], found[4] + 1, *found[5:7], holder, self._until(seconds), 0)
            hold(db, moved)
            return head_of(moved)

    def renew(self, run: str, *, epoch: int, seconds: float) -> bool:
        with self._file.writing() as db:
            found: HeadRow | None = db.execute(Q.head, (run,)).fetchone()
            if found is None or found[9] or found[4] != epoch or found[7] is None:
                return False
            hold(db, (*found[:8], self._until(seconds), 0))
            return True

    def release(self, run: str, *, epoch: int, holder: str | None = None) -> None:
        with self._file.writing() as db:
            found: HeadRow | None = db.execute(Q.head, (run,)).fetchone()
            if found is None or found[9] or found[4] != epoch or found[7] is None:
                return
            if holder in (None, found[7]):
                hold(db, (*found[:7], None, None, 0))

    def lives(self, holder: str) -> bool:
        return self._holders.lives(holder)

    def _held(self, holder: str | None, until_us: int | None) -> bool:
        """A lease ends with its time or with its holder's life, whichever is first."""
        if holder is None or (until_us is not None and until_us <= self._clock.now_us()):
            return False
        return self._holders.lives(holder)

    def _until(self, seconds: float) -> int | None:
        return None if math.isinf(seconds) else self._clock.now_us() + round(seconds * 1_000_000)

    # the inbox --------------------------------------------------------------------------------

    def deliver(self, deliveries: Sequence[Delivery]) -> list[Delivered | LogError]:
        with self._file.writing() as db:
            return [self._deliver(db, delivery) for delivery in deliveries]

    def _deliver(self, db: sqlite3.Cursor, delivery: Delivery) -> Delivered | LogError:
        number = number_of(db, delivery.run)
        if number is None:
            return RunUnknown(delivery.run)
        before = db.execute(Q.message_by_id, (number, delivery.id)).fetchone()
        if before is not None:
            return Delivered(message_of(delivery.run, before), fresh=False)
        row = run_row(db, number)
        message = 1 + max(row.delivered if row else 0, db.execute(Q.last_message, (number,)).fetchone()[0])
        columns = (message, delivery.id, delivery.name, delivery.body, delivery.by, delivery.at_us, None)
        db.execute(Q.put_message, (number, *columns, row_check(number, *columns)))
        put_pieces(db, number, _LOG, delivery.pieces)
        if row is not None:
            wake = row.wake_at_us
            if row.status not in ENDED:
                wake = delivery.at_us if wake is None else min(wake, delivery.at_us)
            db.execute(Q.run_delivered, (message, row_check(number, message), wake, number))
        return Delivered(message_of(delivery.run, columns), fresh=True)

    def inbox(self, run: str, *, name: str | None = None, after: int = 0, limit: int = READ_LIMIT) -> list[Message]:
        with self._file.reading() as db:
            number = number_of(db, run)
            return (
                []
                if number is None
                else [message_of(run, m) for m in db.execute(Q.inbox, (number, after, name, limit))]
            )

    def messages(self, run: str) -> list[Message]:
        with self._file.reading() as db:
            number = number_of(db, run)
            return [] if number is None else [message_of(run, m) for m in db.execute(Q.messages, (number,))]

    # finding ----------------------------------------------------------------------------------

    def owner(self, claim: Claim) -> Owner | None:
        with self._file.reading() as db:
            found = db.execute(Q.owner, (claim.space, claim.key)).fetchone()
        return None if found is None else Owner(*found)

    def claimed(self, run: str) -> dict[Claim, int]:
        with self._file.reading() as db:
            number = number_of(db, run)
            rows = [] if number is None else db.execute(Q.claims_of, (number,)).fetchall()
        return {Claim(space, key): seq for space, key, seq in rows}

    def index(self, run: str) -> RunRow | None:
        with self._file.reading() as db:
            number = number_of(db, run)
            return None if number is None else run_row(db, number)

    def tags(self, run: str) -> set[str]:
        with self._file.reading() as db:
            number = number_of(db, run)
            return set() if number is None else {row[0] for row in db.execute(Q.tags_of, (number,))}

    def reindex(self, run: str, index: RunIndex, *, at: int) -> bool:
        with self._file.writing() as db:
            found: HeadRow | None = db.execute(Q.head, (run,)).fetchone()
            if found is None or found[9] or found[2] != at:
                return False
            number = found[0]
            counted: int = db.execute(Q.last_message, (number,)).fetchone()[0]
            db.execute(Q.drop_tags, (number,))
            db.execute(Q.drop_run, (number,))
            self._put_index(db, number, index, delivered=counted)
            return True

    def _put_index(self, db: sqlite3.Cursor, number: int, index: RunIndex, *, delivered: int | None) -> None:
        before = run_row(db, number)
        if delivered is None:
            last: int = before.delivered if before else db.execute(Q.last_message, (number,)).fetchone()[0]
            delivered = last
        wake = index.wake_at_us
        unseen = db.execute(Q.unseen, (number, index.seen)).fetchone()[0] if delivered > index.seen else None
        if unseen is not None and index.status not in ENDED:
            wake = unseen if wake is None else min(wake, unseen)
        tags = msgspec.json.encode(index.tags).decode()
        times = (index.started_at_us, index.changed_at_us)
        counted = (delivered, row_check(number, delivered))
        db.execute(Q.put_run, (number, index.agent, index.status, index.priority, wake, *times, tags, *counted))
        had = set[str](before.tags if before else ())
        for tag in had - set(index.tags):
            db.execute(Q.drop_tag, (tag, number))
        for tag in set(index.tags) - had:
            db.execute(Q.put_tag, (tag, number))

    def runs(self, query: RunQuery, *, before: int | None = None, limit: int = 100) -> list[RunRow]:
        sql, values = runs_wanted(query)
        with self._file.reading() as db:
            return [run_row_of(row) for row in db.execute(sql, (SEQ_MAX if before is None else before, *values, limit))]

    def due(self, now_us: int, *, limit: int = 100) -> list[RunRow]:
        with self._file.reading() as db:
            free = (run_row_of(row[:11]) for row in db.execute(Q.due, (now_us,)) if not self._held(row[11], row[12]))
            return list(islice(free, limit))

    def soonest_us(self) -> int | None:
        with self._file.reading() as db:
            waking = db.execute(Q.waking)
            return next((wake for wake, holder, until in waking if not self._held(holder, until)), None)

    # keeping ----------------------------------------------------------------------------------

    def quarantine(self, run: str, reason: str | None) -> None:
        with self._file.writing() as db:
            number = number_known(db, run)
            if reason is None:
                db.execute(Q.drop_quarantine, (number,))
            else:
                db.execute(Q.put_quarantine, (number, reason))

    def quarantined(self, run: str) -> str | None:
        with self._file.reading() as db:
            number = number_of(db, run)
            found = None if number is None else db.execute(Q.quarantined, (number,)).fetchone()
        return None if found is None else str(found[0])

    def repair(self, head: Head, *, keep: int, rows: Sequence[Row]) -> None:
        with self._file.writing() as db:
            found: HeadRow | None = db.execute(Q.head, (head.run,)).fetchone()
            if found is not None and min([head.seq, *(row.seq for row in rows)]) <= found[2]:
                raise StoreError(f"{head.run}: a repair moves the head forward, {found[2]} to {head.seq} does not")
            number = db.execute(Q.next_number).fetchone()[0] if found is None else found[0]
            first = number << SEQ_BITS
            for seq, body, data, hash_ in db.execute(Q.events, (first + keep, first + SEQ_MAX, -1)).fetchall():
                columns = (first + seq, body, data, hash_)
                db.execute(Q.put_aside, (*columns, row_check(*columns)))
            db.execute(Q.drop_events, (first + keep, first + SEQ_MAX))
            for row in rows:
                db.execute(Q.put_event, (first + row.seq, row.body, row.data, row.hash))
            lease = (head.holder, head.lease_until_us, 0)
            moved = (number, head.run, head.seq, head.hash, head.epoch, head.base, head.parent, *lease)
            db.execute(Q.drop_head, (number,))
            db.execute(Q.put_head, (*moved, row_check(*moved)))
            marks.forget(db, [number])

    def aside(self, run: str) -> list[Row]:
        with self._file.reading() as db:
            number = number_of(db, run)
            if number is None:
                return []
            first = number << SEQ_BITS
            return [Row(*row) for row in db.execute(Q.asides, (first, first + SEQ_MAX))]

    def remove(self, run: str) -> None:
        with self._file.writing() as db:
            found = head_found(db, run)
            if db.execute(Q.has_fork, (run,)).fetchone():
                raise StoreError(f"{run}: a fork stands on it; remove the fork first")
            number = found[0]
            first = number << SEQ_BITS
            db.execute(Q.drop_events, (first, first + SEQ_MAX))
            for drop in (
                Q.drop_tags,
                Q.drop_uses,
                Q.drop_snapshots,
                Q.drop_messages,
                Q.drop_run,
                Q.drop_quarantine,
            ):
                db.execute(drop, (number,))
            hold(db, (*found[:7], None, None, 1))

    def inspect(self, *, heal: bool = False) -> list[Problem]:
        with self._file.reading() as db:
            found = list(inspect(db, heal=heal))
            damaged = damaged_pieces(db)
        for hashes, healed in zip(damaged, (False, heal), strict=True):
            what = "value {} does not match its hash"
            found += [Problem(where="pieces", what=what.format(short(h)), healed=healed) for h in hashes]
        if any(problem.healed for problem in found):
            with self._file.writing() as db:
                names = {row[0]: row[1] for row in db.execute(Q.all_heads)}
                marks.forget(db, list(marks.damaged(db, names)))
                db.executemany(Q.drop_piece, [(hash_,) for hash_ in damaged[1]])
                for clear in (
                    Q.clear_uses,
                    Q.clear_runs,
                    Q.clear_tags,
                    Q.clear_snapshots,
                    Q.clear_quarantine,
                ):
                    db.execute(clear)
        return found
