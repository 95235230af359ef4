"""Runs as typed logs: create, open, fork, read, fold, erase. The public surface of this layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from hmac import compare_digest
from typing import Any, Final, Literal, NamedTuple, TypeVar, cast

import msgspec

from killick.clock import Clock, SystemClock
from killick.errors import (
    EpochStale,
    EventBroken,
    KeyRefused,
    KillickError,
    LogError,
    RunBroken,
    RunUnknown,
    ValueBroken,
    ValueErased,
)
from killick.log.ancestry import ancestry, owner_of, segments
from killick.log.checked import MISSING, broken, checked, quarantine, unchecked
from killick.log.derived import SnapshotRoot, apply_events, snapshot_of
from killick.log.group_commit import Committer
from killick.log.paging import pages
from killick.log.read_once import ReadOnce, remembering
from killick.log.writer import SNAPSHOT_EVERY, Entry, RunLog
from killick.lru import Lru
from killick.model import hashing
from killick.model.chunks import Blob, gathered, unpack
from killick.model.cipher import Cipher, Place
from killick.model.event_codec import decode
from killick.model.events import Event, RunForked, RunRewound, RunStarted, ValueErasedOnPurpose, from_text, to_text
from killick.model.fold import FOLD, Fold, goes_back
from killick.model.ledger import Ledger
from killick.model.state import State
from killick.store.protocol import Store, keys_of, raw_store
from killick.store.records import READ_LIMIT, CreateRun, Head, Opening, Row, Snapshot
from killick.type_init import ready

T = TypeVar("T")

Redact = Callable[[str, Any], Any]
"""Hides parts of a run's values from a reader."""


class Recorded(NamedTuple):
    """An event and its seq."""

    seq: int
    event: Event
    row: Row


class Leased(NamedTuple):
    """A leased run: its head, and the holder that had left it in the middle, with the end of that holder's lease."""

    head: Head
    left: str | None
    left_until_us: int | None

    @classmethod
    def since(cls, was: Head, head: Head) -> Leased:
        """The lease of a run whose head was read before."""
        if head.epoch > was.epoch + 1:  # others held it since that read, and the last may have left it in the middle
            return cls(head, head.holder, 0)
        return cls(head, was.holder, was.lease_until_us)


class Log:
    """All logs of one store. Thread-safe; a RunLog belongs to one thread at a time."""

    def __init__(
        self, store: Store, *, clock: Clock | None = None, snapshot_every: int = SNAPSHOT_EVERY, behind: bool = True
    ) -> None:
        self.store = checked(store)
        self.keys = keys_of(store)
        self.committer = Committer(store, clock or SystemClock(), behind=behind)
        self._snapshot_every = snapshot_every
        self._folds: Lru[tuple[str, str], tuple[bytes, Any]] = Lru(0)
        self._redact: Redact | None = None

    def redacted(self, redact: Redact) -> Log:
        """Returns a view of the same logs for reading, in which every value passes `redact` first."""
        view = copy(self)
        view._redact = redact
        return view

    def reading_once(self) -> Log:
        """Returns a view for one decision on a run: it reads no row, snapshot or chunk twice."""
        view = copy(self)
        view.store = cast("Store", ReadOnce(self.store))
        return view

    def unchecked(self) -> Log:
        """Returns a view of the same logs whose reads are not compared with the chain: verification does that."""
        view = copy(self)
        view.store = unchecked(self.store)
        return view

    def keep_folds(self, count: int) -> None:
        """Caches the folds of recently read runs, for a process that reads them repeatedly. It must not mutate them."""
        self._folds = Lru(count)

    def close(self) -> None:
        """Commits pending appends; the store stays open."""
        self.committer.close()

    # opening ----------------------------------------------------------------------------------

    def create(
        self, started: RunStarted, values: Mapping[str, Any], *, holder: str | None = None, seconds: float = math.inf
    ) -> RunLog:
        """Creates a run and commits its first event. With a holder, the creator holds the lease."""
        log = self.begin(started.run, holder=holder, seconds=seconds)
        log.append(Entry(started, values))
        return log

    def begin(self, run: str, *, holder: str | None = None, seconds: float = math.inf) -> RunLog:
        """Prepares a run; its first append creates it."""
        head = Head(run=run, seq=0, hash=hashing.genesis(self.store.id, run), epoch=0)
        fold, ledger = Fold(), Ledger()
        fold.plain, ledger.plain = [], []
        return self._handle(head, fold, ledger, birth=CreateRun(holder=holder, lease_seconds=seconds))

    def fork(self, forked: RunForked, fold: Fold, ledger: Ledger) -> RunLog:
        """Prepares a fork, which shares its parent's log up to its base, from the parent's folds there. Its first
        append, which starts with `forked`, creates it."""
        parent, base = forked.parent, forked.base
        head = Head(run=forked.run, seq=base, hash=self.hash_at(parent, base), epoch=0, base=base, parent=parent)
        return self._handle(head, fold, ledger, birth=CreateRun(parent=parent), snapshot_at=base)

    def lease(self, run: str, holder: str, *, seconds: float, known: Head | None = None) -> Leased:
        """Takes the lease, and tells who had left the run in the middle. `known` is its head just now."""
        was = known or self.head(run)
        return Leased.since(was, self.store.lease(run, holder, seconds=seconds))

    def open(self, run: str, *, head: Head | None = None) -> RunLog:
        """Opens a run's log for appending: under the lease of that head, or with none as it is now. Refuses a
        quarantined run, and one whose log does not reach its head."""
        opening = self.store.opening(run, fold=FOLD)
        if opening is None:
            raise RunUnknown(run)
        if head is not None and opening.head.epoch != head.epoch:
            # Another worker took it over; a process that was suspended must not continue under that epoch.
            raise EpochStale(run, held=head.epoch, actual=opening.head.epoch)
        return self.opened(opening)

    def opened(self, opening: Opening) -> RunLog:
        """The log of a run, from one read. It appends under the lease of that read."""
        self._refuse_broken(opening)
        fold, ledger, rows = self._folded(opening)
        self._refuse_keyless(opening.head, fold)
        at = opening.snapshot.seq if opening.snapshot else opening.head.base
        log = self._handle(opening.head, fold, ledger, snapshot_at=at)
        log.rows = rows
        return log

    def _folded(self, opening: Opening) -> tuple[Fold, Ledger, Sequence[Row] | None]:
        """Returns both folds at the head from one read, and its rows unless the timeline went back."""
        head, snapshot, rows = opening.head, opening.snapshot, opening.rows
        folds = None
        if snapshot is not None:
            if _follows(snapshot, opening):
                folds = self._load(head.run, snapshot)
            else:
                self._forget_snapshots(head.run)
        elif head.parent is None:
            folds = Fold(), Ledger()
        events = [] if folds is None else [(row.seq, _event(head.run, row)) for row in rows]
        if folds is None or apply_events(*folds, events) < len(events):
            return *self.folds(head.run, head.seq), None
        return *folds, rows

    def _handle(
        self, head: Head, fold: Fold, ledger: Ledger, *, birth: CreateRun | None = None, snapshot_at: int = 0
    ) -> RunLog:
        return RunLog(
            head,
            committer=self.committer,
            secret_key=self.store.secret_key,
            fold=fold,
            ledger=ledger,
            rewound=self._rewound,
            snapshot_at=snapshot_at,
            birth=birth,
            snapshot_every=self._snapshot_every,
            keys=self.keys,
        )

    def cipher(self, run: str) -> Cipher | None:
        """Returns the key of a run's values; None in a store without encryption, and for its logs of keys."""
        if self.keys is None or self.keys.keeps_plain(run):
            return None
        return self.keys.cipher(self.keys.key_of(run))

    def root_of(self, run: str, *, fork_of: str | None = None) -> str:
        """Returns the first run in the chain of renewals of a run, for which its messages are sealed; of a fork that is
        to be, its parent's, if that is a renewal."""
        assert self.keys is not None, "only an encrypted store seals"
        root = self.keys.root_of(fork_of or run)
        return run if root == fork_of else root

    def key_of(self, run: str) -> str | None:
        """Returns the name of a run's key; None in a store without encryption."""
        return None if self.keys is None else self.keys.key_of(run)

    def key_for(self, subject: str, run: str) -> str:
        """Returns the name of a data subject's key for a new run. Raises KeyRefused in a store without keys."""
        if self.keys is None:
            raise KeyRefused(self.store.place, f"subject={subject!r} needs an encrypted store; open another with keys=")
        return self.keys.key_for(subject, run)

    def secret_key(self, run: str) -> bytes:
        """Returns the key for digests of a run's values."""
        cipher = self.cipher(run)
        return self.store.secret_key if cipher is None else cipher.digest_key

    def _refuse_keyless(self, head: Head, fold: Fold) -> None:
        """Quarantines an open run whose key was destroyed: no worker can continue it."""
        facts = fold.facts
        if self.keys is None or facts.key is None or facts.ended:
            return
        try:
            self.keys.cipher(facts.key)
        except KeyRefused as refused:
            self.store.quarantine(head.run, refused.reason)
            raise RunBroken(head.run, seq=head.seq, reason=refused.reason) from None

    def _refuse_broken(self, opening: Opening) -> None:
        head, rows, reason = opening.head, opening.rows, opening.quarantined
        if reason is None:
            last = next((row for row in reversed(rows) if row.seq <= head.seq), None)
            if last is None:
                # The last snapshot is at the head, or a fork has no own event yet.
                last = self.store.row(self.owner(head.run, head.seq), head.seq)
            if last is None or last.seq != head.seq:
                reason = "the log ends before its head"
            elif last.hash != head.hash:
                reason = "the last event is not the head's"
            elif rows and rows[-1].seq > head.seq and self.goes_on_after(head):
                reason = "there are events after the head"
            else:
                return
        quarantine(self.store, head.run, reason)
        raise broken(head.run, reason, seq=head.seq)

    def damaged(self, run: str, error: RunBroken | ValueBroken, *, seq: int = 0) -> RunBroken:
        """Quarantines a run that cannot be read because of damage on the disk, its own or that of a log that it reads.
        Returns the error. `seq` is the event that has the value."""
        if isinstance(error, ValueBroken):
            reason = f"value {error.digest.hex()[:12]}: {error.reason}" + (f" at event {seq}" if seq else "")
        elif error.run == run:
            quarantine(self.store, run, f"{error.reason} at event {error.seq}" if error.seq else error.reason)
            return error
        else:
            reason = f"it reads {error.run}, where {error.reason}" + (f" at event {error.seq}" if error.seq else "")
        quarantine(self.store, run, reason)
        return broken(run, reason, seq=seq or self.head(run).seq)

    def goes_on_after(self, head: Head) -> bool:
        """Returns whether there are events after an unmoved head: no append wrote them."""
        beyond = raw_store(self.store).read(head.run, after=head.seq, limit=1, data=False)
        return bool(beyond) and self.head(head.run).seq == head.seq

    # reading ----------------------------------------------------------------------------------

    def head(self, run: str) -> Head:
        """Returns a run's head."""
        head = self.store.head(run)
        if head is None:
            raise RunUnknown(run)
        return head

    def read(self, run: str, *, after: int = 0, limit: int = READ_LIMIT) -> list[Recorded]:
        """Returns committed events after a seq with their rows, including a fork's ancestors."""
        found: list[Recorded] = []
        for owner, first, last in segments(self.head(run), after, self.head):
            while len(found) < limit and first < last:
                rows = self.store.read(owner, after=first, limit=min(limit - len(found), last - first))
                if not rows or rows[0].seq > last:
                    break
                found += [Recorded(row.seq, _event(owner, row), row) for row in rows if row.seq <= last]
                first = rows[-1].seq
        return found

    def rows(self, run: str, *, after: int = 0, before: int | None = None) -> list[Row]:
        """Returns committed rows after a seq, and before another, undecoded, including a fork's ancestors."""
        found: list[Row] = []
        for owner, first, last in segments(self.head(run), after, self.head):
            for rows in pages(self.store, owner, after=first, up_to=last if before is None else min(last, before - 1)):
                found += rows
        return found

    def event(self, run: str, seq: int) -> Event:
        """Returns one event."""
        return _event(run, self.row_at(self.head(run), seq))

    def data(self, run: str, seq: int) -> dict[str, Any]:
        """Returns the values of one event, verbatim. Raises ValueErased if they were erased."""
        return self.values(run, self.row_at(self.head(run), seq))

    def values(self, run: str, row: Row) -> dict[str, Any]:
        """Returns the values of a row that was read. Raises ValueErased if they were erased."""
        if row.data is not None:
            return dict(self.unpacked(run, row.data, at=row.seq))
        digest = _event(run, row).data
        if digest is None:
            return {}
        raise ValueErased(from_text(digest))

    def unpacked(self, run: str, packed: bytes, *, at: int = 0) -> Any:
        """Returns a stored value of a run, of the event at a seq. A damaged one quarantines the run."""
        try:
            value = unpack(packed, self.store.pieces)
        except ValueBroken as error:
            raise self.damaged(run, error, seq=at) from None
        return value if self._redact is None else self._redact(run, value)

    def hash_at(self, run: str, seq: int) -> bytes:
        """Returns the chain hash at an event, or the genesis at 0."""
        return self.row_at(self.head(run), seq).hash if seq else hashing.genesis(self.store.id, self.owner(run, 0))

    def row_at(self, head: Head, seq: int) -> Row:
        """Returns the row of one event, of a run whose head was read."""
        row = self.store.row(owner_of(head, seq, self.head).run, seq)
        if row is None:
            _place(self.head(head.run), seq or -1)
            raise RunBroken(head.run, seq=seq, reason=MISSING)
        return row

    def owner(self, run: str, seq: int) -> str:
        """Returns the ancestor whose own log holds a seq."""
        return owner_of(self.head(run), seq, self.head).run

    def ancestry(self, run: str) -> Iterator[tuple[Head, int]]:
        """Yields a run and its ancestors up to the root, each with its last seq in the log of the run."""
        return ancestry(self.head(run), self.head)

    # folding ----------------------------------------------------------------------------------

    def state(self, run: str, at: int | None = None, *, keep: Sequence[int] = ()) -> State:
        """Returns the state at the head, or at an earlier event; folds at most the events between two snapshots.

        `keep` are later events that a rewind kept.
        """
        head = self.head(run)
        if at is None and not keep:
            fold = self._cached(head, "fold", self._fold)
        else:
            fold = self._fold(head, _place(head, at))
        for seq in keep:
            fold.apply(seq, self.event(run, seq))
        return State(fold, Reader(self, head))

    def settled(self, run: str) -> Fold | None:
        """Returns the last snapshot's fold, read lazily; None if there is no valid one. Its ended steps are final: no
        rewind followed it."""
        head = self.head(run)
        snapshot = self.store.snapshot(run, fold=FOLD, at=head.seq)
        row = None if snapshot is None else self.store.row(run, snapshot.seq)
        if snapshot is None or row is None or row.hash != snapshot.hash:
            return None
        folds = self._load(run, snapshot)
        return None if folds is None else folds[0]

    def ledger_of_files(self, run: str) -> Ledger:
        """Returns the ledger at the head of a run with a workspace; of one without, as of its last snapshot."""
        head = self.head(run)
        _, ledger, start = self._base(head, head.seq, wants="ledger")
        rows = [row for page in pages(self.store, run, after=start, up_to=head.seq, data=False) for row in page]
        if ledger.facts.workspace is None and not any(row.body.startswith(_BINDS_FILES) for row in rows):
            return ledger
        return self.ledger(run)

    def ledger(self, run: str, at: int | None = None) -> Ledger:
        """Returns the ledger at a seq: rewound events count too."""
        head = self.head(run)
        return self._cached(head, "ledger", self._ledger) if at is None else self._ledger(head, _place(head, at))

    def _cached(self, head: Head, sort: str, make: Callable[[Head, int], T]) -> T:
        """Returns a fold at this head, computing it if needed without blocking other callers."""
        known = self._folds.get((head.run, sort))
        if known is None or known[0] != head.hash:
            known = head.hash, make(head, head.seq)
            self._folds.put((head.run, sort), known)
        return cast("T", known[1])

    def folds(self, run: str, at: int) -> tuple[Fold, Ledger]:
        """Returns both folds at an event, in one pass unless a rewind intervenes."""
        head = self.head(run)
        fold, ledger, start = self._base(head, at)
        is_back = False
        for events in self._pages(run, start, at):
            done = 0 if is_back else apply_events(fold, ledger, events)
            is_back = is_back or done < len(events)
            apply_events(None, ledger, events, done)
        return self._fold(head, at) if is_back else fold, ledger

    def at_base(self, run: str) -> tuple[Fold, Ledger]:
        """Returns both folds before a run's own first event, for `applied`. Uses no snapshot of this run."""
        head = self.head(run)
        return self._base(head, head.base, trust=False)[:2]

    def applied(self, run: str, fold: Fold, ledger: Ledger, events: Sequence[tuple[int, Event]]) -> Fold:
        """Applies the next events of a run's own log to both folds, without snapshots; returns the timeline's fold,
        which is another one after a rewind."""
        at = 0
        while (at := apply_events(fold, ledger, events, at)) < len(events):
            seq, event = events[at]
            assert isinstance(event, RunRewound | RunForked)
            fold = self._rewound(run, event, trust=False)
            fold.apply(seq, event)
            ledger.apply(seq, event)
            at += 1
        return fold

    def _fold(self, head: Head, at: int, *, trust: bool = True) -> Fold:
        """Folds from the last snapshot; after a later rewind, from the snapshot before the cut."""
        later: list[list[tuple[int, Event]]] = []
        while True:
            fold, _, start = self._base(head, at, trust=trust, wants="fold")
            events = self._events(head.run, start, at) if at > head.base else []
            rewinds = [place for place, (_, event) in enumerate(events) if goes_back(event)]
            if not rewinds:
                later.append(events)
                break
            _, rewound = events[rewinds[-1]]
            assert isinstance(rewound, RunRewound | RunForked)
            later.append(self._kept(head.run, rewound) + events[rewinds[-1] :])
            at = rewound.cut
        for part in reversed(later):
            done = 0
            while (done := apply_events(fold, None, part, done)) < len(part):
                fold.apply(*part[done])
                done += 1
        return fold

    def _rewound(self, run: str, event: RunRewound | RunForked, *, trust: bool = True) -> Fold:
        """Returns the timeline's fold that a rewind or a fork goes back to, before that event is applied."""
        fold = self._fold(self.head(run), event.cut, trust=trust)
        for seq, kept in self._kept(run, event):
            fold.apply(seq, kept)
        return fold

    def _kept(self, run: str, event: RunRewound | RunForked) -> list[tuple[int, Event]]:
        return [(seq, self.event(run, seq)) for seq in event.keep]

    def _ledger(self, head: Head, at: int) -> Ledger:
        _, ledger, start = self._base(head, at, wants="ledger")
        apply_events(None, ledger, self._events(head.run, start, at))
        return ledger

    def _base(
        self, head: Head, at: int, *, trust: bool = True, wants: Literal["fold", "ledger", "both"] = "both"
    ) -> tuple[Fold, Ledger, int]:
        """Returns the folds to start from, and their seq: a snapshot, the parent at the cut, or empty ones."""
        snapshot = self.store.snapshot(head.run, fold=FOLD, at=at) if trust and at > head.base else None
        if snapshot is not None:
            row = self.store.row(head.run, snapshot.seq)
            folds = self._load(head.run, snapshot) if row is not None and row.hash == snapshot.hash else None
            if folds is not None:
                return *folds, snapshot.seq
            self._forget_snapshots(head.run)
        if head.parent is None:
            return Fold(), Ledger(), 0
        cut, parent = min(at, head.base), self.head(head.parent)
        if wants == "both":
            return *self.folds(parent.run, cut), cut
        fold = self._fold(parent, cut) if wants == "fold" else Fold()
        return fold, self._ledger(parent, cut) if wants == "ledger" else Ledger(), cut

    def _load(self, run: str, snapshot: Snapshot) -> tuple[Fold, Ledger] | None:
        """Loads a snapshot's folds; None if unreadable, so that the log itself is folded."""
        fetch = remembering(partial(self._snapshot_pieces, run, snapshot.seq))
        try:
            piece = self.store.pieces([snapshot.root]).get(snapshot.root)
            if piece is None or piece.body is None:
                return None
            saved = msgspec.json.decode(piece.body, type=ready(SnapshotRoot))
            own = None if self.keys is None else self.keys.own
            sealed = saved.sealed(Place(run, snapshot.seq, snapshot.hash), own)
            if not compare_digest(saved.mac, sealed.mac):
                return None
            return Fold.load(saved.fold, fetch), Ledger.load(saved.ledger, fetch)
        except (ValueBroken, msgspec.DecodeError):
            return None

    def _snapshot_pieces(self, run: str, seq: int, hashes: Collection[bytes]) -> Mapping[bytes, Blob]:
        """Fetches chunks of a snapshot. If one is missing or damaged, the snapshots are dropped, and the log has them
        all: a fold reads its chunks long after it was opened, when it cannot begin again."""
        with suppress(ValueBroken):
            found = self.store.pieces(hashes)
            if all(digest in found for digest in hashes):
                return found
        self._forget_snapshots(run)
        head = self.head(run)
        events = self._events(run, head.base, seq)
        fold, ledger = self.at_base(run)
        fold = self.applied(run, fold, ledger, events)
        return {piece.hash: piece for piece in snapshot_of(fold, ledger, Place(run, seq, b""), None).pieces}

    def _forget_snapshots(self, run: str) -> None:
        """Drops snapshots that do not match the log; the next append of many writes one again."""
        with suppress(KillickError):
            self.store.forget_snapshots(run)

    def _events(self, run: str, after: int, up_to: int) -> list[tuple[int, Event]]:
        return [each for page in self._pages(run, after, up_to) for each in page]

    def _pages(self, run: str, after: int, up_to: int) -> Iterator[list[tuple[int, Event]]]:
        """Yields a run's own events, page by page, bodies alone."""
        for rows in pages(self.store, run, after=after, up_to=up_to, data=False):
            yield [(row.seq, _event(run, row)) for row in rows]

    # erasing ----------------------------------------------------------------------------------

    def erase(
        self,
        run: RunLog,
        *,
        at: int,
        reason: str,
        seqs: Sequence[int] = (),
        pieces: Collection[bytes] = (),
        by: str | None = None,
    ) -> bool:
        """Erases values from the store: the data of these events, the messages that they took, and these chunks.

        Their hashes and the reason stay in the log, so that verification reports them as erased, not broken. Returns
        False if the bytes stay in the store's write-ahead log while another process reads there.
        """
        erased = ValueErasedOnPurpose(
            at=at, reason=reason, seqs=tuple(seqs), pieces=tuple(to_text(piece) for piece in pieces), by=by
        )
        messages = tuple(number for seq in seqs if (number := self._message(run.run, seq)) is not None)
        run.append(Entry(erased), erases_rows=tuple(seqs), erases_messages=messages, erases_pieces=tuple(pieces))
        return self.store.purge()

    def _message(self, run: str, seq: int) -> int | None:
        """Returns the inbox number of the message that an event took, if it took one."""
        return getattr(self.event(run, seq), "message", None)

    def pieces_of(self, run: str, seq: int) -> dict[bytes, Blob]:
        """Returns every chunk of an event's values, and of the message that it took."""
        row, number = self.row_at(self.head(run), seq), self._message(run, seq)
        taken = [] if number is None else [each.body for each in self.store.messages(run) if each.number == number]
        packed = taken if row.data is None else [row.data, *taken]
        return gathered(packed, self.store.pieces)

    def blobs(self, packed: bytes) -> dict[bytes, Blob]:
        """Returns every chunk of packed values."""
        return gathered([packed], self.store.pieces)


_BINDS_FILES: Final = (b'{"kind":"workspace.bound"', b'{"kind":"run.forked"')


def _place(head: Head, at: int | None) -> int:
    """Checks a seq: 0 for before the first event, None for the head."""
    if at is None:
        return head.seq
    if not 0 <= at <= head.seq:
        raise LogError(f"{head.run}: has no event {at}; it has 1 to {head.seq}")
    return at


def _event(run: str, row: Row) -> Event:
    try:
        return decode(row.body)
    except EventBroken as error:
        raise RunBroken(run, seq=row.seq, reason="its body cannot be read") from error


def _follows(snapshot: Snapshot, opening: Opening) -> bool:
    """Returns whether a snapshot belongs to the chain that continues after it."""
    if not opening.rows:
        return snapshot.seq == opening.head.seq and snapshot.hash == opening.head.hash
    first = opening.rows[0]
    return first.seq == snapshot.seq + 1 and hashing.link(snapshot.hash, first.body) == first.hash


class Reader(NamedTuple):
    """Reads the events of one run, whose head was read."""

    log: Log
    head: Head

    def event(self, seq: int) -> Event:
        return _event(self.head.run, self.log.row_at(self.head, seq))

    def data(self, seq: int) -> dict[str, Any]:
        return self.log.values(self.head.run, self.log.row_at(self.head, seq))
