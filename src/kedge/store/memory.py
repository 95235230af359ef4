"""The store in dicts under one lock: the reference for all others, so plain comes before fast."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, fields
from itertools import count
from math import isinf
from threading import Lock
from typing import Any, Final

from msgspec.structs import asdict, replace

from kedge import errors
from kedge.clock import Clock, SystemClock
from kedge.ids import Ids, RandomIds
from kedge.model.values import Blob
from kedge.store.base import (
    ENDED,
    READ_LIMIT,
    Append,
    Behind,
    Birth,
    Claim,
    Delivered,
    Delivery,
    Head,
    Mark,
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
)

_NEVER_US: Final = 1 << 63


@dataclass(slots=True)
class _Run:
    """All that is kept under one id. Without a head there is no such run: somebody only asked."""

    head: Head | None = None
    number: int = 0
    index: RunRow | None = None
    rows: dict[int, Row] = field(default_factory=dict[int, Row])
    aside: list[Row] = field(default_factory=list[Row])
    inbox: dict[int, Message] = field(default_factory=dict[int, Message])
    numbers: dict[str, int] = field(default_factory=dict[str, int])
    snapshots: dict[tuple[int, int], Snapshot] = field(default_factory=dict[tuple[int, int], Snapshot])
    references: References = field(default_factory=lambda: References(set(), set()))
    marks: set[Mark] = field(default_factory=set[Mark])
    marked: int | None = None
    quarantined: str | None = None
    removed: bool = False


class MemoryStore:
    """Keeps everything in this process and loses it with the process."""

    def __init__(self, *, clock: Clock | None = None, ids: Ids | None = None) -> None:
        ids = ids or RandomIds()
        self.place: Final = "memory:"
        self.id: Final = ids.new("store")
        self.secret_key: Final = ids.key()
        self._clock = clock or SystemClock()
        self._lock, self._closed = Lock(), False
        self._runs: defaultdict[str, _Run] = defaultdict(_Run)
        self._gone: set[str | None] = set()
        self._numbers = count(1)
        self._pieces: dict[bytes, Blob] = {}
        self._claims: dict[Claim, Owner] = {}

    def copied(self, clock: Clock) -> MemoryStore:
        """The same store, from here on on its own, by another clock."""
        with self._open():
            twin = copy(self)
            _part(self, twin, vars(self))
            twin._lock, twin._clock, twin._numbers = Lock(), clock, count(len(self._runs) + 1)
            for name, run in self._runs.items():
                twin._runs[name] = kept = copy(run)
                _part(run, kept, [part.name for part in fields(run)])
                kept.references = References(set(run.references.log), set(run.references.snapshots))
        return twin

    # the log ----------------------------------------------------------------------------------
    def append(self, items: Sequence[Append]) -> list[Head | errors.LogError]:
        for item in items:
            if [row.seq for row in item.rows] != list(range(item.after + 1, item.after + 1 + len(item.rows))):
                raise ValueError(f"{item.run}: rows must be numbered one by one after {item.after}")
        with self._open():
            return [self._append(item) for item in items]

    def _append(self, item: Append) -> Head | errors.LogError:
        head = self._runs[item.run].head
        if head is not None and _is_there(item, head):
            return head
        try:
            head = self._standing(item, head)
            self._check_rights(item)
        except errors.LogError as refusal:
            return refusal
        return self._write(item, head)

    def _standing(self, item: Append, head: Head | None) -> Head:
        """The head that an append builds on, or the refusal of one that does not fit it."""
        if item.birth is not None:
            if head is not None or self._runs[item.run].removed:
                raise errors.RunExists(item.run)
            return self._born(item, item.birth)
        if head is None:
            raise errors.RunUnknown(item.run)
        if head.epoch != item.epoch:
            raise errors.EpochStale(item.run, held=item.epoch, actual=head.epoch)
        if (head.seq, head.hash) != (item.after, item.before):
            raise errors.HeadMoved(item.run, expected=item.after, actual=head.seq)
        return head

    def _born(self, item: Append, birth: Birth) -> Head:
        if birth.parent is None and item.after != 0:
            raise errors.HeadMoved(item.run, expected=item.after, actual=0)
        parent = None if birth.parent is None else self._known(birth.parent)
        if parent is not None and self._hash_at(parent, item.after) != item.before:
            raise errors.HeadMoved(parent.run, expected=item.after, actual=parent.seq)
        head = Head(run=item.run, seq=0, hash=item.before, epoch=0, base=item.after, parent=birth.parent)
        return head if birth.holder is None else self._held(head, birth.holder, 1, birth.lease_seconds)

    def _hash_at(self, head: Head, seq: int) -> bytes | None:
        """A lineage's chain hash at an event, from whichever of its runs owns that event."""
        while seq <= head.base and head.parent is not None:
            head = self._known(head.parent)
        row = self._runs[head.run].rows.get(seq)
        return None if row is None else row.hash

    def _check_rights(self, item: Append) -> None:
        """Refuse claims and messages that are gone. What this append itself gives back it may have again."""
        for claim in item.claims:
            owner = self._claims.get(claim)
            if owner is not None and not (owner.run == item.run and claim in item.releases):
                raise errors.AlreadyClaimed(item.run, space=claim.space, owner=owner.run, seq=owner.seq)
        for number in item.takes:
            message = self._runs[item.run].inbox.get(number)
            if message is None or (message.taken is not None and number not in item.returns):
                raise errors.MessageGone(item.run, number)

    def _write(self, item: Append, head: Head) -> Head:
        """All that an accepted append does. Giving back comes before taking, and erasing after storing."""
        run, (seq, last) = self._runs[item.run], item.last
        run.head = replace(head, seq=seq, hash=last)
        run.number = run.number or next(self._numbers)
        run.rows |= {row.seq: row for row in item.rows}
        self._keep(item.pieces, run.references.log)
        for claim in item.releases:
            if (owner := self._claims.get(claim)) is not None and owner.run == item.run:
                del self._claims[claim]
        self._claims |= {claim: Owner(item.run, seq) for claim in item.claims}
        for number in run.inbox.keys() & item.returns:
            run.inbox[number] = replace(run.inbox[number], taken=None)
        for number in item.takes:
            run.inbox[number] = replace(run.inbox[number], taken=seq)
        if item.snapshot is not None:
            self._keep(item.snapshot.pieces, run.references.snapshots)
            run.snapshots[item.snapshot.seq, item.snapshot.fold] = replace(item.snapshot, pieces=())
        for erased in run.rows.keys() & item.erases_rows:
            run.rows[erased] = replace(run.rows[erased], data=None)
        run.aside = [replace(row, data=None) if row.seq in item.erases_rows else row for row in run.aside]
        for digest in self._pieces.keys() & item.erases_pieces:
            self._pieces[digest] = replace(self._pieces[digest], body=None)
        if item.index is not None:
            self._write_index(item.run, item.index)
        return run.head

    def head(self, run: str) -> Head | None:
        with self._open():
            return self._runs[run].head

    def heads(self, *, after: int = 0, limit: int = READ_LIMIT) -> list[tuple[int, Head]]:
        with self._open():
            return [(run.number, head) for run, head in self._present() if run.number > after][:limit]

    def read(self, run: str, *, after: int = 0, limit: int = READ_LIMIT, data: bool = True) -> list[Row]:
        with self._open():
            rows = [row for row in self._runs[run].rows.values() if row.seq > after]
        return [row if data else replace(row, data=None) for row in rows[: min(limit, READ_LIMIT)]]

    def row(self, run: str, seq: int) -> Row | None:
        with self._open():
            return self._runs[run].rows.get(seq)

    # values -----------------------------------------------------------------------------------
    def pieces(self, hashes: Collection[bytes]) -> Mapping[bytes, Blob]:
        with self._open():
            return {digest: self._pieces[digest] for digest in hashes if digest in self._pieces}

    def references(self, run: str) -> References:
        with self._open():
            kept = self._runs[run].references
            return References(set(kept.log), set(kept.snapshots))

    def refer(self, run: str, hashes: Collection[bytes], *, at: int, delivered: int) -> bool:
        with self._open():
            kept = self._runs[run]
            if kept.head is None or kept.head.seq != at or len(kept.inbox) != delivered:
                return False
            kept.references = replace(kept.references, log=set(hashes))
            return True

    def sweep(self, *, limit: int = READ_LIMIT) -> int:
        with self._open():
            kept = [run.references for run in self._runs.values()]
            alive = {digest for one in kept for digest in one.log | one.snapshots}
            dead = [digest for digest in self._pieces if digest not in alive][:limit]
            for digest in dead:
                del self._pieces[digest]
            return len(dead)

    # snapshots --------------------------------------------------------------------------------
    def snapshot(self, run: str, *, fold: int, at: int) -> Snapshot | None:
        newest = reversed([one for one in self.snapshots(run) if one.fold == fold and one.seq <= at])
        return next(newest, None)

    def snapshots(self, run: str) -> list[Snapshot]:
        with self._open():
            return [one for _, one in sorted(self._runs[run].snapshots.items())]

    def forget_snapshots(self, run: str) -> None:
        with self._open():
            self._runs[run].snapshots.clear()
            self._runs[run].references.snapshots.clear()

    # marks ------------------------------------------------------------------------------------
    def unmarked(self, *, after: int = 0, limit: int = READ_LIMIT) -> list[Behind]:
        with self._open():
            found = [(run, head, _marked(run, head)) for run, head in self._present() if run.number > after]
        behind = [(run, head, seq) for run, head, seq in found if seq < head.seq]
        return [Behind(number=r.number, run=head.run, base=head.base, marked=seq) for r, head, seq in behind][:limit]

    def mark(self, items: Sequence[Marking]) -> None:
        with self._open():
            for item in items:
                run = self._runs[item.run]
                if item.anew:
                    run.marks, run.marked = set(), None
                if run.head is not None and _marked(run, run.head) == item.after:
                    run.marks |= set(item.marks)
                    run.marked = item.up_to

    def marked(
        self,
        all_of: Sequence[Collection[int]],
        *,
        since_us: int | None = None,
        until_us: int | None = None,
        before: Place | None = None,
        limit: int = READ_LIMIT,
    ) -> list[Place]:
        with self._open():
            bearing: defaultdict[Place, set[int]] = defaultdict(set)
            for run, head in self._present():
                for mark in run.marks:
                    bearing[Place(mark.at_us, run.number, mark.seq, head.run)].add(mark.term)
        found = [place for place, terms in bearing.items() if all(terms & set(group) for group in all_of)]
        found = [place for place in found if since_us is None or place.at_us >= since_us]
        found = [place for place in found if until_us is None or place.at_us < until_us]
        return sorted((place for place in found if before is None or place < before), reverse=True)[:limit]

    # leases -----------------------------------------------------------------------------------
    def lease(self, run: str, holder: str, *, seconds: float) -> Head:
        with self._open():
            head = self._known(run)
            if _lease_end_us(head) > self._clock.now_us():
                raise errors.RunBusy(run, holder=str(head.holder))
            self._runs[run].head = head = self._held(head, holder, head.epoch + 1, seconds)
            return head

    def renew(self, run: str, *, epoch: int, seconds: float) -> bool:
        with self._open():
            if (head := self._runs[run].head) is None or head.holder is None or head.epoch != epoch:
                return False
            self._runs[run].head = self._held(head, head.holder, epoch, seconds)
            return True

    def release(self, run: str, *, epoch: int, holder: str | None = None) -> None:
        with self._open():
            head = self._runs[run].head
            if head is not None and head.epoch == epoch and holder in (None, head.holder):
                self._runs[run].head = replace(head, holder=None, lease_until_us=None)
                self._gone.add(head.holder)

    def lives(self, holder: str) -> bool:
        # Nobody outlives this process; one that let go of everything it had is at nothing any more.
        with self._open():
            return holder not in self._gone or any(
                run.head is not None and run.head.holder == holder for run in self._runs.values()
            )

    # the inbox --------------------------------------------------------------------------------
    def deliver(self, deliveries: Sequence[Delivery]) -> list[Delivered | errors.LogError]:
        with self._open():
            return [self._deliver(delivery) for delivery in deliveries]

    def _deliver(self, sent: Delivery) -> Delivered | errors.LogError:
        run = self._runs[sent.run]
        if run.head is None:
            return errors.RunUnknown(sent.run)
        if sent.id in run.numbers:
            return Delivered(run.inbox[run.numbers[sent.id]], fresh=False)
        number = len(run.inbox) + 1
        fields = {name: value for name, value in asdict(sent).items() if name != "pieces"}
        message = run.inbox[number] = Message(number=number, **fields)
        run.numbers[sent.id] = number
        self._keep(sent.pieces, run.references.log)
        if run.index is not None:
            run.index = _woken(replace(run.index, delivered=number), sent.at_us)
        return Delivered(message, fresh=True)

    def inbox(self, run: str, *, name: str | None = None, after: int = 0, limit: int = READ_LIMIT) -> list[Message]:
        waiting = [one for one in self.messages(run) if one.taken is None and one.number > after]
        return [one for one in waiting if name is None or one.name == name][:limit]

    def messages(self, run: str) -> list[Message]:
        with self._open():
            return list(self._runs[run].inbox.values())

    # finding ----------------------------------------------------------------------------------
    def owner(self, claim: Claim) -> Owner | None:
        with self._open():
            return self._claims.get(claim)

    def claimed(self, run: str) -> dict[Claim, int]:
        with self._open():
            if self._runs[run].head is None:
                return {}
            return {claim: owner.seq for claim, owner in self._claims.items() if owner.run == run}

    def index(self, run: str) -> RunRow | None:
        with self._open():
            return self._runs[run].index

    def tags(self, run: str) -> set[str]:
        return set() if (line := self.index(run)) is None else set(line.tags)

    def reindex(self, run: str, index: RunIndex, *, at: int) -> bool:
        with self._open():
            head = self._runs[run].head
            if head is None or head.seq != at:
                return False
            self._runs[run].index = None
            self._write_index(run, index)
            return True

    def runs(self, query: RunQuery, *, before: int | None = None, limit: int = 100) -> list[RunRow]:
        with self._open():
            lines = [run.index for run, _ in reversed(self._present()) if run.index is not None]
        lines = [line for line in lines if before is None or line.number < before]
        lines = [line for line in lines if not query.status or line.status in query.status]
        lines = [line for line in lines if query.agent is None or line.agent == query.agent]
        lines = [line for line in lines if query.since_us is None or line.changed_at_us >= query.since_us]
        lines = [line for line in lines if query.until_us is None or line.changed_at_us < query.until_us]
        return [line for line in lines if query.tag is None or query.tag in line.tags][:limit]

    def due(self, now_us: int, *, limit: int = 100) -> list[RunRow]:
        with self._open():
            lines = [line for at, line in self._waking() if at <= now_us]
        return sorted(lines, key=lambda line: (-line.priority, line.wake_at_us, line.number))[:limit]

    def soonest_us(self) -> int | None:
        with self._open():
            return min((at for at, _ in self._waking() if at < _NEVER_US), default=None)

    def _waking(self) -> Iterator[tuple[int, RunRow]]:
        """Runs that will be due, and when: at their wake time, but not before a lease on them ends."""
        for run, head in self._present():
            if run.index is None or run.index.wake_at_us is None or run.quarantined is not None:
                continue
            if run.index.status not in ENDED:
                yield max(run.index.wake_at_us, _lease_end_us(head)), run.index

    # keeping ----------------------------------------------------------------------------------
    def quarantine(self, run: str, reason: str | None) -> None:
        with self._open():
            self._runs[run].quarantined = reason

    def quarantined(self, run: str) -> str | None:
        with self._open():
            return self._runs[run].quarantined

    def repair(self, head: Head, *, keep: int, rows: Sequence[Row]) -> None:
        with self._open():
            run, old = self._runs[head.run], self._runs[head.run].head
            if old is not None and any(seq <= old.seq for seq in (head.seq, *(row.seq for row in rows))):
                raise ValueError(f"{head.run}: a repair must move the head forward from event {old.seq}")
            run.number = run.number or next(self._numbers)
            run.aside += [row for seq, row in run.rows.items() if seq > keep]
            run.rows = {seq: row for seq, row in run.rows.items() if seq <= keep}
            run.rows |= {row.seq: row for row in rows}
            run.head, run.marks, run.marked = head, set(), None

    def aside(self, run: str) -> list[Row]:
        with self._open():
            return list(self._runs[run].aside)

    def remove(self, run: str) -> None:
        with self._open():
            self._known(run)
            for _, head in self._present():
                if head.parent == run:
                    raise errors.StoreError(f"{run}: {head.run} is a fork of it; remove that run first")
            # Its claims stay: a right that was used does not come back when the user of it is forgotten.
            self._runs[run] = _Run(removed=True)

    def inspect(self, *, heal: bool = False) -> list[Problem]:
        with self._open():
            wrong = [head for run, head in self._present() if run.rows and max(run.rows) != head.seq]
        return [Problem(where="rows", what="end elsewhere", run=one.run, seq=one.seq) for one in wrong]

    def close(self) -> None:
        with self._lock:
            self._closed = True

    @contextmanager
    def _open(self) -> Generator[None]:
        with self._lock:
            if self._closed:
                raise errors.StoreClosed(self.place)
            yield

    def _known(self, name: str) -> Head:
        if (head := self._runs[name].head) is None:
            raise errors.RunUnknown(name)
        return head

    def _present(self) -> list[tuple[_Run, Head]]:
        """Every run there is, in order of creation."""
        found = [(run, run.head) for run in self._runs.values() if run.head is not None]
        return sorted(found, key=lambda one: one[0].number)

    def _held(self, head: Head, holder: str, epoch: int, seconds: float) -> Head:
        until_us = None if isinf(seconds) else self._clock.now_us() + round(seconds * 1_000_000)
        self._gone.discard(holder)
        return replace(head, holder=holder, epoch=epoch, lease_until_us=until_us)

    def _keep(self, pieces: Sequence[Blob], references: set[bytes]) -> None:
        """Store values that are new or were erased, and refer to all of them."""
        for piece in pieces:
            held = self._pieces.get(piece.hash)
            if held is None or held.body is None:
                self._pieces[piece.hash] = piece
            references.add(piece.hash)

    def _write_index(self, name: str, index: RunIndex) -> None:
        run, fields = self._runs[name], asdict(index)
        seen = fields.pop("seen")
        line = RunRow(number=run.number, run=name, delivered=len(run.inbox), **fields)
        unseen = [one.at_us for one in run.inbox.values() if one.taken is None and one.number > seen]
        run.index = _woken(line, min(unseen)) if unseen else line


def _is_there(item: Append, head: Head) -> bool:
    """Whether this very append was committed before, and its acknowledgement lost.

    Two may send the same birth, so only the one that holds the run is taken for who made it.
    """
    made = item.birth is None or (item.birth.holder is not None and item.birth.holder == head.holder)
    return made and bool(item.rows) and (head.seq, head.hash) == item.last


def _woken(line: RunRow, at_us: int) -> RunRow:
    """The index of a run to which a message came. Nothing wakes a run that ended."""
    soonest = at_us if line.wake_at_us is None else min(line.wake_at_us, at_us)
    return line if line.status in ENDED else replace(line, wake_at_us=soonest)


def _lease_end_us(head: Head) -> int:
    """Until when a run is held. A lease may have no end; a run that nobody holds is free since ever."""
    end = _NEVER_US if head.lease_until_us is None else head.lease_until_us
    return 0 if head.holder is None else end


def _marked(run: _Run, head: Head) -> int:
    """The seq up to which a run is marked."""
    return head.base if run.marked is None else run.marked


def _part(one: object, twin: object, names: Iterable[str]) -> None:
    """What two twins hold is from now on each one's own."""
    for name in names:
        value: Any = getattr(one, name)
        if isinstance(value, dict | list | set):
            setattr(twin, name, copy(value))  # pyright: ignore[reportUnknownArgumentType]
