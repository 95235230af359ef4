"""The writes of a SQLite transaction: appends and messages, on any open cursor.

Checks before it writes. Neither begins nor commits; returns the runs to notify for after the commit.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Collection, Sequence
from typing import Any, Final

import msgspec

from killick.clock import Clock
from killick.errors import (
    AlreadyClaimed,
    EpochStale,
    HeadMoved,
    InboxMoved,
    LogError,
    MessageGone,
    RunExists,
    RunUnknown,
    StoreBroken,
)
from killick.store import records
from killick.store.liveness import Holders
from killick.store.protocol import lease_clock_us
from killick.store.slots import NO_SLOT, RENEWED_SLOT, ROOT_SLOT, Slot, refusal
from killick.store.sql.reads import LOG, SNAPSHOT
from killick.store.sql.rows import head_of, message_of
from killick.store.sqlite import search_terms
from killick.store.sqlite.rows import (
    SEQ_BITS,
    HeadRow,
    Moved,
    Q,
    erase,
    erase_message,
    event_row,
    extended,
    find_head,
    hash_at,
    intact_count,
    put_pieces,
    run_row,
    set_taken,
    with_lease,
    write_head,
)

SEEN_MAX: Final = 10_000

RunsToNotify = list[str]
"""Runs to notify for after the commit; "" for the outbox."""


class Writes:
    """A store's appends and deliveries. `seen` caches heads; the file validates them."""

    def __init__(self, place: str, *, holders: Holders, clock: Clock) -> None:
        self.seen: dict[str, HeadRow] = {}
        self._place, self._holders, self._clock = place, holders, clock

    def see(self, head: HeadRow) -> None:
        if len(self.seen) >= SEEN_MAX:
            self.seen.clear()
        self.seen[head[1]] = head

    def until_us(self, seconds: float) -> int | None:
        """Returns when a lease taken now ends."""
        return None if math.isinf(seconds) else lease_clock_us(self._clock) + round(seconds * 1_000_000)

    # appends ----------------------------------------------------------------------------------

    def append(self, db: sqlite3.Cursor, item: records.Append, to_notify: RunsToNotify) -> records.Head | LogError:
        """Checks everything, then writes everything: a refused item has written nothing."""
        records.refuse_misnumbered([item])
        group = item.group
        found: HeadRow | None = db.execute(Q.head, (item.run,)).fetchone()
        if found is not None and not found[9] and item.rows and item.is_committed(head := head_of(found)):
            return head
        claimed: dict[records.UniqueRight, records.Owner] = {}
        refused = self._refuse(db, item, found, claimed)
        if refused is not None:
            return refused
        others: list[tuple[records.Append, HeadRow | None]] = []
        for one in item.also:
            others.append((one, db.execute(Q.head, (one.run,)).fetchone()))
            refused = self._refuse(db, *others[-1], claimed)
            if refused is not None:
                return refused
        head = self._put(db, item, found, to_notify)
        for one, head_row in others:
            self._put(db, one, head_row, to_notify)
        if found is not None and item.slots:
            move_messages(db, found[0], item, to_notify)
        for one in group:
            for sent in one.sends:
                if sent.waits_for is not None:
                    first = db.execute(Q.first_waiting, (sent.waits_for, sent.at_us)).fetchone()
                    sent = msgspec.structs.replace(sent, run=first[0] if first else "")
                self.deliver(db, sent, to_notify)
        return head

    def _refuse(
        self,
        db: sqlite3.Cursor,
        item: records.Append,
        found: HeadRow | None,
        claimed: dict[records.UniqueRight, records.Owner],
    ) -> LogError | None:
        if item.create is not None:
            refused = RunExists(item.run) if found is not None else self._refuse_creation(db, item)
        elif found is None or found[9]:
            refused = RunUnknown(item.run)
        elif found[4] != item.epoch:
            refused = EpochStale(item.run, held=item.epoch, actual=found[4])
        elif found[2] != item.after or found[3] != item.before:
            refused = HeadMoved(item.run, expected=item.after, actual=found[2])
        else:
            refused = None
        return refused or self._refuse_rights(db, item, found, claimed)

    def _refuse_creation(self, db: sqlite3.Cursor, item: records.Append) -> LogError | None:
        assert item.create is not None
        parent = item.create.parent
        if parent is None:
            return HeadMoved(item.run, expected=item.after, actual=0) if item.after else None
        if (parent_head := find_head(db, parent)) is None:
            return RunUnknown(parent)
        if hash_at(db, parent_head, item.after) != item.before:
            return HeadMoved(parent, expected=item.after, actual=parent_head[2])
        return None

    def _refuse_rights(
        self,
        db: sqlite3.Cursor,
        item: records.Append,
        found: HeadRow | None,
        claimed: dict[records.UniqueRight, records.Owner],
    ) -> LogError | None:
        for claim in item.claims:
            owned = db.execute(Q.owner, (claim.space, claim.key)).fetchone()
            owner = claimed.get(claim) or (None if owned is None else records.Owner(*owned))
            if owner is not None and not (claim in item.releases and owner.run == item.run):
                return AlreadyClaimed(item.run, space=claim.space, owner=owner.run, seq=owner.seq)
        if item.claims:
            claimed |= {claim: records.Owner(item.run, item.last[0]) for claim in item.claims}
        for number in item.takes:
            message = found and db.execute(Q.message, (found[0], number)).fetchone()
            if message is None or (message[6] is not None and number not in item.returns):
                return MessageGone(item.run, number)
        if (read := item.inbox_read) is not None and found is not None:
            for number, name in db.execute(Q.names_after, (found[0], read.number)):
                if name in read.names:
                    return InboxMoved(item.run, number)
        return None

    def _put(
        self, db: sqlite3.Cursor, item: records.Append, found: HeadRow | None, to_notify: RunsToNotify
    ) -> records.Head:
        try:
            return self._write(db, found or self._new_head(db, item), item, to_notify)
        except sqlite3.IntegrityError as error:
            reason = f"{item.run}: a row already exists where the next event belongs ({error})"
            raise StoreBroken(self._place, reason) from error

    def _new_head(self, db: sqlite3.Cursor, item: records.Append) -> HeadRow:
        """Returns the head before a new run's first event."""
        create = item.create
        assert create is not None
        if create.holder is not None:
            self._holders.lock(create.holder)
        number: int = db.execute(Q.next_number).fetchone()[0]
        until = self.until_us(create.lease_seconds) if create.holder is not None else None
        epoch = 1 if create.holder is not None else 0
        at, lease = (item.after, item.before), (create.holder, until)
        return (number, item.run, *at, epoch, item.after, create.parent, *lease, 0)

    def _write(self, db: sqlite3.Cursor, head: HeadRow, item: records.Append, to_notify: RunsToNotify) -> records.Head:
        """Writes an accepted append. Its transaction has read the head, so that no condition is checked again."""
        number, was_held = head[0], head[7] is not None
        if item.rows:
            head = (*head[:2], *item.last, *head[4:])
            db.executemany(Q.put_event, [event_row(number, row) for row in item.rows])
        if item.index is not None and item.index.status in records.ENDED:
            head = with_lease(head, None, None)
        if item.create is not None:
            db.execute(Q.put_head, (*head, records.row_check(*head)))
        else:
            write_head(db, head)
        if item.pieces:
            put_pieces(db, number, LOG, item.pieces)
        if not item.is_plain:
            self._write_rights(db, number, item)
        if item.slots or item.gives:
            write_slots(db, number, item)
        if item.outbox:
            db.executemany(Q.put_outbox, [(number, each.seq, each.kind) for each in item.outbox])
            to_notify.append(records.OUTBOX_CHANGED)
        if item.index is not None:
            is_sooner = self.put_index(db, number, item.index, delivered=None, new=item.create is not None)
            if is_sooner and not was_held:
                to_notify.append(item.run)
        if item.snapshot is not None:
            shot = item.snapshot
            put_pieces(db, number, SNAPSHOT, shot.pieces)
            db.execute(Q.put_snapshot, (number, shot.fold, shot.seq, shot.hash, shot.root))
        # A creation may be rolled back, and a head without own events does not distinguish a fork from its copy.
        if item.rows or item.create is None:
            self.see(head)
        return head_of(head)

    def _write_rights(self, db: sqlite3.Cursor, number: int, item: records.Append) -> None:
        """Returns rights before taking, so that one append can do both."""
        seq = item.last[0]
        for claim in item.releases:
            db.execute(Q.drop_claim, (claim.space, claim.key, number))
        for claim in item.claims:
            columns = (claim.space, claim.key, number, seq)
            db.execute(Q.put_claim, (*columns, records.row_check(*columns)))
        for taken, messages in ((None, item.returns), (seq, item.takes)):
            for message in messages:
                set_taken(db, number, message, taken)
        if item.erases_rows:  # terms are hashes of words; the next search indexes the run again
            search_terms.forget(db, [number])
        for erased in item.erases_rows:
            erase(db, (number << SEQ_BITS) + erased)
        for message in item.erases_messages:
            erase_message(db, number, message)
        for piece in item.erases_pieces:
            db.execute(Q.erase_piece, (piece,))

    def put_index(
        self, db: sqlite3.Cursor, number: int, index: records.RunIndex, *, delivered: int | None, new: bool = False
    ) -> bool:
        """Writes a run's index. Returns whether the run now wakes earlier."""
        before = None if new else db.execute(Q.index_before, (number,)).fetchone()
        if new:
            delivered = 0
        elif delivered is None:
            last: int = (
                intact_count(number, *before[2:]) if before else db.execute(Q.last_message, (number,)).fetchone()[0]
            )
            delivered = last
        wake = index.wake_at_us
        unseen = db.execute(Q.unseen, (number, index.seen)).fetchone()[0] if delivered > index.seen else None
        if unseen is not None and index.status not in records.ENDED:
            wake = _due_us(unseen, index.changed_at_us, wake)
        tags = msgspec.json.encode(index.tags).decode()
        times = (index.started_at_us, index.changed_at_us)
        counted = (delivered, records.row_check(number, delivered))
        db.execute(
            Q.put_run, (number, index.agent, index.status, index.priority, wake, *times, tags, *counted, index.lane)
        )
        if tags != (before[1] if before else "[]"):
            had = set[str](records.tags_of(before[1]) if before else ())
            for tag in had - set(index.tags):
                db.execute(Q.drop_tag, (tag, number))
            for tag in set(index.tags) - had:
                db.execute(Q.put_tag, (tag, number))
        if wake is None or index.status in records.ENDED:
            return False
        return before is None or before[0] is None or bool(wake < before[0])

    # messages ---------------------------------------------------------------------------------

    def deliver(
        self, db: sqlite3.Cursor, delivery: records.Delivery, to_notify: RunsToNotify
    ) -> records.Delivered | LogError:
        """Delivers a message to the last renewal of its run, if the slots there allow it."""
        if (head := find_head(db, delivery.run)) is None:
            return RunUnknown(delivery.run)
        slots = self._slots(db, head)
        while not delivery.exact and (renewed := slots.get(RENEWED_SLOT)) is not None:
            if (head := find_head(db, renewed.token)) is None:
                return RunUnknown(renewed.token)
            slots = self._slots(db, head)
        number, run, root = head[0], head[1], slots.get(ROOT_SLOT)
        before = db.execute(Q.message_by_id, (number, delivery.id)).fetchone()
        if before is not None:
            return records.Delivered(message_of(run, before), fresh=False)
        if root is not None and not delivery.exact:
            before = db.execute(Q.message_in_chain, (root.token, delivery.id)).fetchone()
            if before is not None:
                return records.Delivered(message_of(before[0], before[1:]), fresh=False)
        if not delivery.exact and (refused := refusal(run, delivery.slot, slots)) is not None:
            return refused
        pieces = b"".join(piece.hash for piece in delivery.pieces) or None
        columns = (delivery.id, delivery.name, delivery.body, delivery.by, delivery.at_us, None)
        message = _put_message(db, number, columns, root.token if root else None, pieces, to_notify, run)
        put_pieces(db, number, LOG, delivery.pieces)
        if (taken := delivery.slot) is not None and taken.places:
            _put_slot(db, number, slots[taken.name].with_places(-taken.places))
        return records.Delivered(message_of(run, (message, *columns)), fresh=True)

    def _slots(self, db: sqlite3.Cursor, head: HeadRow) -> dict[str, Slot]:
        """Returns the slots of a run. Raises StoreBroken if one was changed or lost: a wrong one accepts too much."""
        rows = db.execute(Q.slots, (head[0],)).fetchall()
        total = db.execute(Q.slot, (head[0], _SUM)).fetchone()
        is_whole = total is None or total[2] == sum(row[3] for row in rows)
        if not is_whole or any(records.row_check(head[0], *row[:3]) != row[3] for row in rows):
            raise StoreBroken(self._place, f"{head[1]}: its conditions of deliveries are damaged")
        return {row[0]: Slot(*row[:3]) for row in rows}


_SUM: Final = ""
"""The name of the row that has the sum of the checksums of a run's slots, by which a lost one is noticed."""


def _slots(db: sqlite3.Cursor, number: int) -> dict[str, Slot]:
    return {row[0]: Slot(*row[:3]) for row in db.execute(Q.slots, (number,)).fetchall()}


def _put_slot(db: sqlite3.Cursor, number: int, slot: Slot) -> None:
    """Writes a slot, or removes it if it has NO_SLOT places, and moves the sum by the difference: a row that is lost or
    damaged meanwhile stays noticed."""
    found, summed = (db.execute(Q.slot, (number, name)).fetchone() for name in (slot.name, _SUM))
    total = summed[2] if summed else sum(row[3] for row in db.execute(Q.slots, (number,)).fetchall())
    columns, check = (number, slot.name, slot.token, slot.places), 0
    if slot.places == NO_SLOT:
        db.execute(Q.drop_slot, (number, slot.name))
    else:
        check = records.row_check(*columns)
        db.execute(Q.put_slot, (*columns, check))
    whole = (number, _SUM, "", total + check - (found[3] if found else 0))
    db.execute(Q.put_slot, (*whole, records.row_check(*whole)))


def put_slots(db: sqlite3.Cursor, number: int, slots: Collection[Slot]) -> None:
    """Writes all slots of a run, in place of those that are there."""
    db.execute(Q.drop_slots, (number,))
    for slot in slots:
        _put_slot(db, number, slot)


def write_slots(db: sqlite3.Cursor, number: int, item: records.Append) -> None:
    """Writes and removes slots, and gives places back."""
    for slot in item.slots:
        _put_slot(db, number, slot)
    for given in item.gives:
        found = db.execute(Q.slot, (number, given.name)).fetchone()
        if found and found[1] == given.token and records.row_check(number, *found[:3]) == found[3]:
            _put_slot(db, number, Slot(*found[:3]).with_places(given.places))


def move_messages(db: sqlite3.Cursor, number: int, item: records.Append, to_notify: RunsToNotify) -> None:
    """Moves what is in the inbox to the run that continues this one, if the append renews it."""
    head = None if item.renewed_as is None else find_head(db, item.renewed_as)
    if head is None:
        return
    root = _slots(db, head[0]).get(ROOT_SLOT)
    for message, *columns, _, pieces in db.execute(Q.untaken, (number,)).fetchall():
        set_taken(db, number, message, item.last[0])
        _put_message(db, head[0], tuple(columns), root.token if root else None, pieces, to_notify, head[1])
        hashes = [pieces[at : at + 32] for at in range(0, len(pieces or b""), 32)]
        db.executemany(Q.use_piece, [(head[0], LOG, hash_) for hash_ in hashes])


def restore_messages(db: sqlite3.Cursor, number: int, rows: Sequence[records.InboxRow]) -> None:
    """Writes messages with the numbers that they had, in place of damaged ones."""
    for row in rows:
        each, pieces = row.message, b"".join(row.pieces) or None
        columns = (each.id, each.name, each.body, each.by, each.at_us, each.taken, row.root, pieces)
        stored = (number, each.number, *columns)
        db.execute(Q.drop_message, (number, each.number))
        db.execute(Q.put_message, (*stored, records.row_check(*stored)))


def _put_message(
    db: sqlite3.Cursor, number: int, columns: tuple[Any, ...], root: str | None, pieces: bytes | None,
    to_notify: RunsToNotify, run: str,
) -> int:  # fmt: skip
    """Puts a message into an inbox, makes the run due, and returns its number."""
    row, at_us = run_row(db, number), columns[4]
    message: int = 1 + max(row.delivered if row else 0, db.execute(Q.last_message, (number,)).fetchone()[0])
    stored = (number, message, *columns, root, pieces)
    db.execute(Q.put_message, (*stored, records.row_check(*stored)))
    if row is not None:
        wake = row.wake_at_us
        if row.status not in records.ENDED:
            wake = _due_us(at_us, row.changed_at_us, wake)
        db.execute(Q.run_delivered, (message, records.row_check(number, message), wake, number))
    to_notify.append(run)
    return message


def _due_us(at_us: int, changed_at_us: int, wake: int | None) -> int:
    """When a run is due that has a message. The sender's clock may be ahead: since its last change at the latest."""
    due_us = min(at_us, changed_at_us)
    return due_us if wake is None else min(wake, due_us)


def bare(seen: dict[str, HeadRow], items: Sequence[records.Append]) -> list[Moved] | None:
    """Prepares plain events of several runs from cached heads, to write them without reading.

    None: an append has other parts, or its head is not cached.
    """
    moves: list[Moved] = []
    for item in items:
        head = seen.get(item.run)
        if head is None or head[2:5] != (item.after, item.before, item.epoch) or not item.is_bare:
            return None
        moves.append(extended(head, item.rows))
    is_once = len(moves) == 1 or len({moved.head[0] for moved in moves}) == len(moves)
    return moves if is_once else None
