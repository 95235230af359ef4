"""The memory store's runs, and the effects of appends and deliveries on them. Takes no locks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from math import isinf
from typing import Final

from msgspec.structs import asdict, replace

from killick import errors
from killick.clock import Clock
from killick.model.chunks import Blob
from killick.store import records
from killick.store.protocol import lease_clock_us
from killick.store.slots import NO_SLOT, RENEWED_SLOT, ROOT_SLOT, Slot, refusal

NEVER_US: Final = 1 << 63


@dataclass(slots=True)
class StoredRun:
    """All data of one run id. Without a head the run does not exist; it was only queried."""

    head: records.Head | None = None
    number: int = 0
    index: records.RunRow | None = None
    rows: dict[int, records.Row] = field(default_factory=dict[int, records.Row])
    displaced: list[records.Row] = field(default_factory=list[records.Row])
    inbox: dict[int, records.Message] = field(default_factory=dict[int, records.Message])
    numbers: dict[str, int] = field(default_factory=dict[str, int])
    message_pieces: dict[int, frozenset[bytes]] = field(default_factory=dict[int, frozenset[bytes]])
    slots: dict[str, Slot] = field(default_factory=dict[str, Slot])
    snapshots: dict[tuple[int, int], records.Snapshot] = field(default_factory=dict[tuple[int, int], records.Snapshot])
    references: records.References = field(default_factory=lambda: records.References(set(), set()))
    terms: set[records.TermRow] = field(default_factory=set[records.TermRow])
    indexed_to: int | None = None
    quarantined: str | None = None
    removed: bool = False

    def copied(self) -> StoredRun:
        """Returns an independent copy."""
        return StoredRun(
            self.head, self.number, self.index, self.rows.copy(), self.displaced.copy(), self.inbox.copy(),
            self.numbers.copy(), self.message_pieces.copy(), self.slots.copy(), self.snapshots.copy(),
            records.References(set(self.references.log), set(self.references.snapshots)),
            self.terms.copy(), self.indexed_to, self.quarantined, self.removed,
        )  # fmt: skip


class Runs:
    """All runs, with their appends and deliveries. The caller holds the lock.

    `_to_notify` collects the runs to notify for, and the outbox if it grew.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._runs: defaultdict[str, StoredRun] = defaultdict(StoredRun)
        self._released: set[str | None] = set()
        self._numbers = count(1)
        self._pieces: dict[bytes, Blob] = {}
        self._claims: dict[records.UniqueRight, records.Owner] = {}
        self._outbox: list[records.OutboxItem] = []
        self._outbox_end = 0
        self._to_notify: list[str] = []

    def _append(self, item: records.Append) -> records.Head | errors.LogError:
        """Checks everything, then writes everything."""
        run, head = self._runs[item.run], self._runs[item.run].head
        if head is not None and (head.seq, head.hash, head.epoch) == (item.after, item.before, item.epoch):
            if item.is_bare:
                run.rows.update((row.seq, row) for row in item.rows)
                run.head = head = replace(head, seq=item.rows[-1].seq, hash=item.rows[-1].hash)
                return head
        elif head is not None and item.is_committed(head):
            return head
        group, heads, claimed = item.group, list[records.Head](), dict[records.UniqueRight, records.Owner]()
        try:
            for one in group:
                heads.append(self._checked_head(one, self._runs[one.run].head))
                self._check_rights(one, claimed)
        except errors.LogError as refusal:
            return refusal
        first, *_ = [self._write(one, head) for one, head in zip(group, heads, strict=True)]
        self._move_messages(item)
        for sent in (sent for one in group for sent in one.sends):
            self._deliver(
                sent if sent.waits_for is None else replace(sent, run=self._first_waiting(sent), waits_for=None)
            )
        return first

    def _first_waiting(self, sent: records.Delivery) -> str:
        """Returns the oldest run with the tag that is not due yet; "" without one."""
        rows = [run.index for run in self._runs.values() if run.index is not None and sent.waits_for in run.index.tags]
        waiting = [
            row for row in rows if (row.wake_at_us or 0) > sent.at_us and self._runs[row.run].quarantined is None
        ]
        return min(waiting, key=lambda row: row.number).run if waiting else ""

    def _checked_head(self, item: records.Append, head: records.Head | None) -> records.Head:
        """Returns the head that an append builds on, or a refusal."""
        if item.create is not None:
            if head is not None or self._runs[item.run].removed:
                raise errors.RunExists(item.run)
            return self._new_head(item, item.create)
        if head is None:
            raise errors.RunUnknown(item.run)
        if head.epoch != item.epoch:
            raise errors.EpochStale(item.run, held=item.epoch, actual=head.epoch)
        if (head.seq, head.hash) != (item.after, item.before):
            raise errors.HeadMoved(item.run, expected=item.after, actual=head.seq)
        return head

    def _new_head(self, item: records.Append, create: records.CreateRun) -> records.Head:
        if create.parent is None and item.after != 0:
            raise errors.HeadMoved(item.run, expected=item.after, actual=0)
        parent = None if create.parent is None else self._known(create.parent)
        if parent is not None and self._hash_at(parent, item.after) != item.before:
            raise errors.HeadMoved(parent.run, expected=item.after, actual=parent.seq)
        head = records.Head(run=item.run, seq=0, hash=item.before, epoch=0, base=item.after, parent=create.parent)
        return head if create.holder is None else self._with_lease(head, create.holder, 1, create.lease_seconds)

    def _hash_at(self, head: records.Head, seq: int) -> bytes | None:
        """Returns the chain hash at an event, from the ancestor that owns it."""
        while seq <= head.base and head.parent is not None:
            head = self._known(head.parent)
        row = self._runs[head.run].rows.get(seq)
        return None if row is None else row.hash

    def _check_rights(self, item: records.Append, claimed: dict[records.UniqueRight, records.Owner]) -> None:
        """Refuses consumed claims and messages. The append may consume again what it returns itself."""
        for claim in item.claims:
            owner = claimed.get(claim) or self._claims.get(claim)
            if owner is not None and not (owner.run == item.run and claim in item.releases):
                raise errors.AlreadyClaimed(item.run, space=claim.space, owner=owner.run, seq=owner.seq)
        claimed |= {claim: records.Owner(item.run, item.last[0]) for claim in item.claims}
        for number in item.takes:
            message = self._runs[item.run].inbox.get(number)
            if message is None or (message.taken is not None and number not in item.returns):
                raise errors.MessageGone(item.run, number)
        if (read := item.inbox_read) is not None:
            for number, message in self._runs[item.run].inbox.items():
                if number > read.number and message.name in read.names:
                    raise errors.InboxMoved(item.run, number)

    def _write(self, item: records.Append, head: records.Head) -> records.Head:
        """Writes an accepted append. Returns come before takes, and erasure after storage."""
        run, (seq, last) = self._runs[item.run], item.last
        run.head = head = replace(head, seq=seq, hash=last)
        self._released.discard(head.holder)
        run.number = run.number or next(self._numbers)
        run.rows |= {row.seq: row for row in item.rows}
        self._store_pieces(item.pieces, run.references.log)
        for claim in item.releases:
            if (owner := self._claims.get(claim)) is not None and owner.run == item.run:
                del self._claims[claim]
        self._claims |= {claim: records.Owner(item.run, seq) for claim in item.claims}
        for number in run.inbox.keys() & item.returns:
            run.inbox[number] = replace(run.inbox[number], taken=None)
        for number in item.takes:
            run.inbox[number] = replace(run.inbox[number], taken=seq)
        if item.snapshot is not None:
            self._store_pieces(item.snapshot.pieces, run.references.snapshots)
            run.snapshots[item.snapshot.seq, item.snapshot.fold] = replace(item.snapshot, pieces=())
        for erased in run.rows.keys() & item.erases_rows:
            run.rows[erased] = replace(run.rows[erased], data=None)
        run.displaced = [replace(row, data=None) if row.seq in item.erases_rows else row for row in run.displaced]
        for number in run.inbox.keys() & item.erases_messages:
            run.inbox[number] = replace(run.inbox[number], body=records.ERASED_BODY)
        for digest in self._pieces.keys() & item.erases_pieces:
            self._pieces[digest] = replace(self._pieces[digest], body=None)
        for each in item.outbox:
            self._outbox_end += 1
            self._outbox.append(
                records.OutboxItem(position=self._outbox_end, run=item.run, seq=each.seq, kind=each.kind)
            )
            self._to_notify.append(records.OUTBOX_CHANGED)
        self._write_slots(run, item)
        if item.index is not None:
            before = None if run.index is None else run.index.wake_at_us
            self._write_index(item.run, item.index)
            if item.index.status in records.ENDED:
                run.head = self._without_lease(head)
            self._notify_if_sooner(item.run, before)
        return run.head

    def _write_index(self, name: str, index: records.RunIndex) -> None:
        run, fields = self._runs[name], asdict(index)
        seen = fields.pop("seen")
        line = records.RunRow(number=run.number, run=name, delivered=len(run.inbox), **fields)
        unseen = [one.at_us for one in run.inbox.values() if one.taken is None and one.number > seen]
        run.index = woken(line, min(unseen)) if unseen else line

    def _write_slots(self, run: StoredRun, item: records.Append) -> None:
        run.slots |= {slot.name: slot for slot in item.slots}
        run.slots = {name: slot for name, slot in run.slots.items() if slot.places != NO_SLOT}
        for given in item.gives:
            found = run.slots.get(given.name)
            if found is not None and found.token == given.token:
                run.slots[given.name] = found.with_places(given.places)

    def _move_messages(self, item: records.Append) -> None:
        """Moves what is in the inbox to the run that continues this one, if the append renews it."""
        run = self._runs[item.run]
        renewed = item.renewed_as
        if renewed is None or self._runs[renewed].head is None:
            return
        for number, message in list(run.inbox.items()):
            if message.taken is None:
                run.inbox[number] = replace(message, taken=item.last[0])
                self._put_message(self._runs[renewed], replace(message, run=renewed), run.message_pieces[number])

    def _deliver(self, sent: records.Delivery) -> records.Delivered | errors.LogError:
        """Delivers a message to the last renewal of its run, if the slots there allow it."""
        run, name = self._runs[sent.run], sent.run
        while not sent.exact and run.head is not None and (renewed := run.slots.get(RENEWED_SLOT)) is not None:
            run, name = self._runs[renewed.token], renewed.token
        if run.head is None:
            return errors.RunUnknown(name)
        for one in [run] if sent.exact else self._chain(run):
            if sent.id in one.numbers:
                return records.Delivered(one.inbox[one.numbers[sent.id]], fresh=False)
        if not sent.exact and (refused := refusal(name, sent.slot, run.slots)) is not None:
            return refused
        message = records.Message(
            run=name, number=0, id=sent.id, name=sent.name, body=sent.body, by=sent.by, at_us=sent.at_us
        )
        message = self._put_message(run, message, frozenset(piece.hash for piece in sent.pieces))
        self._store_pieces(sent.pieces, run.references.log)
        if (taken := sent.slot) is not None and taken.places:
            run.slots[taken.name] = run.slots[taken.name].with_places(-taken.places)
        return records.Delivered(message, fresh=True)

    def _chain(self, run: StoredRun) -> list[StoredRun]:
        """Returns the logs of a chain of renewals, the newest first."""
        root = run.slots.get(ROOT_SLOT)
        if root is None:
            return [run]
        later = [one for one in self._runs.values() if one.slots.get(ROOT_SLOT) == root]
        return [*sorted(later, key=lambda one: -one.number), self._runs[root.token]]

    def _put_message(self, run: StoredRun, message: records.Message, pieces: frozenset[bytes]) -> records.Message:
        number = len(run.inbox) + 1
        message = run.inbox[number] = replace(message, number=number)
        run.numbers[message.id], run.message_pieces[number] = number, pieces
        run.references.log.update(pieces)
        if run.index is not None:
            run.index = woken(replace(run.index, delivered=number), message.at_us)
        self._to_notify.append(message.run)
        return message

    def _take(self, head: records.Head, holder: str, seconds: float) -> records.Head:
        self._released.discard(holder)
        self._runs[head.run].head = head = self._with_lease(head, holder, head.epoch + 1, seconds)
        return head

    def _without_lease(self, head: records.Head) -> records.Head:
        self._released.add(head.holder)
        return replace(head, holder=None, lease_until_us=None)

    def _with_lease(self, head: records.Head, holder: str, epoch: int, seconds: float) -> records.Head:
        until_us = None if isinf(seconds) else lease_clock_us(self._clock) + round(seconds * 1_000_000)
        return replace(head, holder=holder, epoch=epoch, lease_until_us=until_us)

    def _store_pieces(self, pieces: Sequence[Blob], references: set[bytes]) -> None:
        """Stores new or erased values, and references all of them."""
        for piece in pieces:
            held = self._pieces.get(piece.hash)
            if held is None or held.body is None:
                self._pieces[piece.hash] = piece
            references.add(piece.hash)

    def _notify_if_sooner(self, name: str, before: int | None) -> None:
        """Notifies if an unheld run wakes earlier than before. For a held run, the release notifies."""
        run = self._runs[name]
        wake = None if run.index is None or run.index.status in records.ENDED else run.index.wake_at_us
        if wake is not None and (before is None or wake < before) and run.head is not None and run.head.holder is None:
            self._to_notify.append(name)

    def _known(self, name: str) -> records.Head:
        if (head := self._runs[name].head) is None:
            raise errors.RunUnknown(name)
        return head

    def _present(self) -> list[tuple[StoredRun, records.Head]]:
        """Returns all runs in creation order."""
        found = [(run, run.head) for run in self._runs.values() if run.head is not None]
        return sorted(found, key=lambda one: one[0].number)


def woken(line: records.RunRow, at_us: int) -> records.RunRow:
    """Returns the index of a run after a message. An ended run does not wake. The sender's clock may be ahead: the run
    is due since its last change at the latest."""
    due_us = min(at_us, line.changed_at_us)
    soonest = due_us if line.wake_at_us is None else min(line.wake_at_us, due_us)
    return line if line.status in records.ENDED else replace(line, wake_at_us=soonest)


def lease_end_us(head: records.Head) -> int:
    """Returns the end of a lease. A lease may have no end; a free run's lease ended at the start of time."""
    end = NEVER_US if head.lease_until_us is None else head.lease_until_us
    return 0 if head.holder is None else end


def indexed_to(run: StoredRun, head: records.Head) -> int:
    """Returns the seq up to which a run's search terms are indexed."""
    return head.base if run.indexed_to is None else run.indexed_to
