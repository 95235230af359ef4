"""Re-reads whole logs and reports damage, with the first broken event. Heals derived data, never the log.

It recomputes the chain, hashes every value, compares every copy, and folds again. A broken run is quarantined; other
runs are unaffected.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Final, TypeVar, get_args

import msgspec
from msgspec import structs

from killick.errors import EventBroken, EventUnknown, StoreBroken, StoreError, StoreReadOnly
from killick.log.checked import FORGED, UNCHAINED
from killick.log.derived import index_fits, indexed_again, missing_messages, slots_fit, snapshot_of
from killick.log.log import Log
from killick.log.paging import heads, pages
from killick.model import event_codec, hashing
from killick.model import events as e
from killick.model.chunks import Blob, children, references
from killick.model.cipher import Place, is_encrypted
from killick.model.fold import FOLD, Fold
from killick.model.ledger import Ledger
from killick.store.holes import next_readable
from killick.store.protocol import Store, opened, opened_piece, raw_store
from killick.store.records import ERASED_BODY, Head, Problem, Row, Snapshot

_TRIES: Final = 20
_DERIVED: Final = ("piece_uses", "snapshots", "runs")
_REBUILT: Final = (*_DERIVED, "slots")
"""What is built again without a quarantine. A wrong slot is a problem still: a message may have been lost by it."""

_NOTED: Final = frozenset({
    e.MessageTaken, e.WaitClosed, e.WaitVoted, e.RunRewound, e.RunRenewed, e.RunRepaired, e.ValueErasedOnPurpose,
    e.RunTaken,
    *get_args(e.Started),
})  # fmt: skip
"""The events whose parts are compared at the end."""
Progress = Callable[[str, int], None]
T = TypeVar("T")


class Report(msgspec.Struct):
    """The result of a verification. `explained` lists legitimate differences from a seal.

    `reached` is the number of the last run that was verified, from which an interrupted verification continues.
    `inspected` is whether the store's tables were.
    """

    runs: int = 0
    events: int = 0
    erased: int = 0
    repaired: int = 0
    seals: int = 0
    problems: list[Problem] = []
    explained: list[Problem] = []
    reached: int = 0
    inspected: bool = False

    @property
    def holds(self) -> bool:
        """Whether only derived data, now rebuilt, was wrong."""
        return all(problem.healed for problem in self.problems)

    @property
    def broken(self) -> list[str]:
        """The runs that fail verification, in the order in which they were found."""
        return list(dict.fromkeys(each.run for each in self.problems if each.run is not None and not each.healed))

    def first(self, run: str) -> Problem | None:
        """Returns the first break of a run's log."""
        found = [problem for problem in self.problems if problem.run == run and not problem.healed]
        return min(found, key=lambda problem: (problem.seq is None, problem.seq or 0), default=None)


def verify(
    log: Log,
    run: str | None = None,
    *,
    heal: bool = True,
    tables: bool = True,
    progress: Progress | None = None,
    report: Report | None = None,
    keep: Callable[[Report], None] = lambda _: None,
) -> Report:
    """Verifies one run or the whole store. Quarantines broken runs; rebuilds wrong derived data if `heal`.

    Concurrent appends are allowed: a run is verified up to its head at the time of reading. A damaged page stops
    nothing: every run that can be read is verified. With the report of an interrupted verification it continues after
    the last run there. `keep` gets the report after each run. Without `tables` the store's tables are inspected only
    when a run cannot be read.
    """
    report = report or Report()
    if run is None and tables and not report.inspected:
        _inspect(log, report, heal=heal)
        keep(report)
    for number, head in [(0, log.head(run))] if run is not None else _heads(log.store, report):
        check = _settled(log, head, progress)
        if check.unreadable and not report.inspected:
            # A damaged index fails every run, and must quarantine none.
            _inspect(log, report, heal=heal)
            check = _settled(log, head, progress)
        _file(log, check, report, heal=heal)
        report.reached = number
        keep(report)
    return report


def _inspect(log: Log, report: Report, *, heal: bool) -> None:
    """Inspects the store's tables and rebuilds their damaged indexes."""
    report.inspected = True
    try:
        report.problems += log.store.inspect(heal=heal)
    except StoreBroken as error:
        report.problems.append(Problem(where="file", what=error.reason))


def _heads(store: Store, report: Report) -> Iterator[tuple[int, Head]]:
    """Yields the heads after the last verified run, and reports those that cannot be read."""
    after: int | None = report.reached
    while after is not None:
        try:
            for number, head in heads(store, after=after):
                after = number
                yield number, head
            return
        except StoreBroken as error:
            what = f"heads after run number {after} cannot be read ({error.reason})"
        # One at a time: those before the damaged page.
        while found := _head_after(store, after):
            after = found[0]
            yield found
        if found is None:
            report.problems.append(Problem(where="heads", what=what))
            after = next_readable(after, lambda at: _head_after(store, at) is not None)


def _head_after(store: Store, after: int) -> tuple[int, Head] | tuple[()] | None:
    """Returns the next head, () after the last, or None where the store is damaged."""
    try:
        return next(iter(store.heads(after=after, limit=1)), ())
    except StoreBroken:
        return None


def _settled(log: Log, head: Head, progress: Progress | None) -> _RunCheck:
    """Examines one run until the findings are final."""
    check = _RunCheck(log, head)
    tries = 0
    while not _examined(check, progress):
        # The run advanced meanwhile, so differences outside its log may only be new.
        tries += 1
        if tries == _TRIES:
            check.problems, check.healings = [], []
            break
        check = _RunCheck(log, log.store.head(head.run) or head)
    return check


def _file(log: Log, check: _RunCheck, report: Report, *, heal: bool) -> None:
    """Adds the findings to the report, heals the run's derived data, and quarantines it if broken."""
    run = check.head.run
    healed = heal and _healed(check)
    report.runs += 1
    report.events += check.events
    report.erased += check.erased
    report.repaired += check.repaired
    report.problems += [
        structs.replace(problem, healed=True) if healed and problem.where in _DERIVED else problem
        for problem in check.problems
    ]
    broken = next((problem for problem in check.problems if problem.where not in _REBUILT), None)
    with contextlib.suppress(StoreBroken, StoreReadOnly):
        if broken is not None and log.store.head(run) is not None and log.store.quarantined(run) is None:
            log.store.quarantine(run, f"{broken.what} at event {broken.seq}" if broken.seq else broken.what)


def _healed(check: _RunCheck) -> bool:
    """Rebuilds the derived data of a run. False: a damaged page is in the way."""
    try:
        for healing in check.healings:
            healing()
    except StoreBroken:
        return False
    return True


def _examined(check: _RunCheck, progress: Progress | None) -> bool:
    """Returns whether the findings are final: a chain break always is, the rest only if the run did not advance."""
    walk = check.walk()
    while (events := check.guarded(partial(next, walk, None))) is not None:
        if progress is not None:
            progress(check.head.run, events)
    if check.problems:
        return True
    stood = (check.head, check.store.index(check.head.run))
    if check.guarded(check.compare) is None:
        return True
    return not check.problems or stood == (check.store.head(check.head.run), check.store.index(check.head.run))


def last_good(log: Log, head: Head) -> tuple[int, bytes, str]:
    """Returns the last valid seq, its hash, and the first problem after it ("" if none)."""
    check = _RunCheck(log, head)
    try:
        for _ in check.walk():
            pass
    except StoreBroken as error:
        return check.good_seq, check.good_hash, error.reason
    return check.good_seq, check.good_hash, check.problems[0].what if check.problems else ""


def lost_messages(log: Log, head: Head) -> dict[int, int | None]:
    """Returns the numbers of the messages that a run received, and that its inbox lost or cannot read, each with the
    event that took it."""
    check = _RunCheck(log, head)
    with contextlib.suppress(StoreBroken):
        for _ in check.walk():
            pass
    row, messages = check.store.index(head.run), check.store.messages(head.run)
    lost = missing_messages(row, messages, check.taken)
    lost += (message.number for message in messages if not message.intact)
    return {number: check.taken.get(number, check.renewed_at or None) for number in lost}


class _RunCheck:
    """One pass over one run's own rows."""

    def __init__(self, log: Log, head: Head) -> None:
        self.log = log.unchecked()
        self.store, self.head = self.log.store, head
        self.raw, self.keys = raw_store(log.store), log.keys
        self.hidden = self.unreadable = False
        self.problems: list[Problem] = []
        self.seq: int = head.base
        self.hash = b""
        self.good_seq, self.good_hash = head.base, b""
        self.events = self.erased = self.repaired = 0
        self.healings: list[Callable[[], object]] = []
        self.used: set[bytes] = set()
        self.taken: dict[int, int] = {}
        self.erased_seqs: set[int] = set()
        self.erased_pieces: set[bytes] = set()
        self.set_aside = self.renewed_at = 0
        self.gaps: list[range] = []
        self.epoch = self.messages = 0
        self.without_data: list[tuple[int, str]] = []
        self.gone: list[tuple[int, bytes]] = []
        self.checked: set[bytes] = set()
        self.fold, self.ledger = Fold(), Ledger()
        self.snapshots: dict[int, Snapshot] = {}
        """The stored snapshots that the log does not fold to, as far as it was read."""
        self.snapshot_pieces: set[bytes] = set()
        self.unfolded: Exception | None = None
        """Why the log cannot be folded."""

    def say(self, where: str, what: str, seq: int | None = None) -> None:
        self.problems.append(Problem(where=where, what=what, run=self.head.run, seq=seq))

    def guarded(self, step: Callable[[], T]) -> T | None:
        """Makes one step. What cannot be read is a problem of this run, and hides no other's."""
        try:
            return step()
        except StoreError as error:
            if not isinstance(error, StoreBroken):
                raise  # the store is out of reach or busy, and the run as it was
            self.unreadable = True
            self.say("events", f"cannot be read ({error.reason})", self.seq + 1)
        except Exception as error:  # a damaged row can be anything
            what = f"cannot be read ({getattr(error, 'reason', error)})"
            self.say("events", what, self.seq + 1 if type(self.seq) is int else 1)
        return None

    # the log itself ---------------------------------------------------------------------------

    def walk(self) -> Iterator[int]:
        """Checks every row in order up to the first chain break, then the invariants at the end."""
        self._start()
        for rows in pages(self.raw, self.head.run, after=self.seq, up_to=self.head.seq) if not self.problems else ():
            events = self._rows(rows)
            if not self.problems and self.unfolded is None:
                try:
                    self._fold(rows, events)
                except Exception as error:  # reported once the chain is known to hold
                    self.unfolded = error
            yield self.events
            if self.problems:
                return
        if not self.problems:
            self._end()

    def _start(self) -> None:
        head = self.head
        if head.parent is None:
            self.hash = hashing.genesis(self.store.id, head.run)
        elif self.store.head(head.parent) is None:
            self.say("heads", f"its parent {head.parent} is not there", head.base)
            return
        else:
            self.hash = self.log.hash_at(head.parent, head.base)
        self.good_hash = self.hash

    def _fold(self, rows: Sequence[Row], events: Sequence[tuple[int, e.Event]]) -> None:
        """Folds the next events, and compares each snapshot there: hash, root and all chunks."""
        run, done, own = self.head.run, 0, None if self.keys is None else self.keys.own
        if rows[0].seq == self.head.base + 1:
            self.fold, self.ledger = self.log.at_base(run)
            self.snapshots = {shot.seq: shot for shot in self.store.snapshots(run)}
        for at, row in enumerate(rows, 1):
            shot = self.snapshots.get(row.seq)
            if shot is not None and shot.fold == FOLD:
                self.fold = self.log.applied(run, self.fold, self.ledger, events[done:at])
                done, fresh = at, snapshot_of(self.fold, self.ledger, Place(run, row.seq, row.hash), own)
                self.snapshot_pieces.update(piece.hash for piece in fresh.pieces)
                if (fresh.hash, fresh.root) == (shot.hash, shot.root) and self._whole(fresh.pieces):
                    del self.snapshots[row.seq]
        self.fold = self.log.applied(run, self.fold, self.ledger, events[done:])

    def _rows(self, rows: Sequence[Row]) -> list[tuple[int, e.Event]]:
        """Checks rows up to the first with a problem, and returns the events of those before it."""
        decode, copy = event_codec.decode, hashing.LINKED.copy
        events: list[tuple[int, e.Event]] = []
        for row in rows:
            seq, body, data = row.seq, row.body, row.data
            try:
                event = decode(body)
            except (EventBroken, EventUnknown) as error:
                self.say("events", str(error), seq)
                break
            kind = type(event)
            if kind is e.RunRepaired and not self._repair_fits(seq, event):  # type: ignore[arg-type]
                break
            if seq != self.seq + 1:
                self.say("events", f"events {self.seq + 1} to {seq - 1} are missing", self.seq + 1)
                break
            linked = copy()  # as `hashing.link`, without a call for every event
            linked.update(self.hash + body)
            before, self.hash, self.seq = self.hash, linked.digest(), seq
            if self.hash != row.hash:
                self.say("events", UNCHAINED, seq)
                break
            if self.keys is not None and not self.keys.proves(Place(self.head.run, seq, before), body):
                self.say("events", FORGED, seq)
                break
            if kind in _NOTED:
                self._event(seq, event)
            if (data is not None or event.data is not None) and not self._data_fits(seq, event.data, data):
                break
            events.append((seq, event))
        if events and events[0][0] == self.head.base + 1 and not self._first_fits(*events[0]):
            events.clear()
        if events:
            self.good_seq, self.good_hash = events[-1][0], rows[len(events) - 1].hash
        self.events += len(events)
        return events

    def _repair_fits(self, seq: int, event: e.RunRepaired) -> bool:
        """Skips the events that a repair right after them set aside. False: it does not fit those before them."""
        if seq != event.last + 1 or self.seq != event.first - 1:
            return True
        if e.to_text(self.hash) != event.hash_before:
            self.say("events", "a repair does not fit the events before it", seq)
            return False
        self.seq, self.hash = event.last, e.from_text(event.hash_head)
        self.repaired += 1
        self.gaps.append(range(event.first, event.last + 1))
        self.set_aside += event.set_aside
        return True

    def _first_fits(self, seq: int, event: e.Event) -> bool:
        """Checks the first own event against its copies in the head."""
        said: tuple[str, str | None, int] | None = None
        if isinstance(event, e.RunStarted):
            said = (event.run, None, 0)
        if isinstance(event, e.RunForked):
            said = (event.run, event.parent, event.base)
        if said == (self.head.run, self.head.parent, self.head.base):
            return True
        self.say("heads", "the head does not fit the log's first event", seq)
        return False

    def _data_fits(self, seq: int, named: e.Digest | None, data: bytes | None) -> bool:
        """Checks an event's data, and the chunks that it names."""
        if named is None:
            self.say("events", "carries data that its body does not name", seq)
        elif data is None:
            self.without_data.append((seq, named))
        elif e.to_text(hashing.data_hash(data)) != named:
            self.say("events", "the data does not match its hash", seq)
        elif b'{"$' in data:
            self._pieces(seq, references(self._opened(seq, data)))
        return not self.problems

    def _opened(self, seq: int, data: bytes) -> bytes:
        """Returns data in clear, as far as its key is here; a destroyed key erased it."""
        found = opened(self.store, self.head.run, seq, data)
        self.hidden |= found is None or (found is data and is_encrypted(data))
        self.erased += found is None
        return found or b""

    def _pieces(self, seq: int, wanted: Collection[bytes]) -> None:
        """Checks every chunk below, each once: present, and equal to its hash."""
        while wanted:
            self.used.update(wanted)
            fresh = [digest for digest in wanted if digest not in self.checked]
            self.checked.update(fresh)
            found = self.raw.pieces(fresh)
            below: dict[bytes, None] = {}
            for digest in fresh:
                piece = found.get(digest)
                if piece is None:
                    self.say("pieces", f"value {digest.hex()[:12]} is missing", seq)
                elif piece.body is None:
                    self.gone.append((seq, digest))
                elif hashing.value_hash(piece.codec, piece.body) != digest:
                    self.say("pieces", f"value {digest.hex()[:12]} does not match its hash", seq)
                else:
                    below.update(dict.fromkeys(children(opened_piece(self.store, piece))))
            wanted = list(below)

    def _keep(self, wanted: Collection[bytes]) -> None:
        """Keeps the existing chunks of rows that were moved aside."""
        while wanted:
            found = self.store.pieces([digest for digest in wanted if digest not in self.used])
            self.used.update(found)
            wanted = [child for piece in found.values() for child in children(piece)]

    def _event(self, seq: int, event: e.Event) -> None:
        match event:
            case e.AttemptStarted() | e.StepStarted():
                self.epoch = max(self.epoch, event.epoch)
            case e.MessageTaken():
                self.taken[event.message] = seq
            case e.WaitClosed() | e.WaitVoted() if event.message is not None:
                self.taken[event.message] = seq
            case e.RunRewound():
                for message in event.returned:
                    self.taken.pop(message, None)
            case e.ValueErasedOnPurpose():
                self.erased_seqs.update(event.seqs)
                self.erased_pieces.update(map(e.from_text, event.pieces))
            case e.RunTaken():
                self.epoch = event.epoch
            case e.RunRepaired():
                for message in event.messages:
                    self.taken.setdefault(message, seq)
            case e.RunRenewed():
                self.renewed_at = seq
            case _:
                pass

    def _end(self) -> None:
        head = self.head
        if self.seq < head.seq:
            self.say("heads", f"the log ends at {self.seq}, its head says {head.seq}", self.seq + 1)
        elif self.hash != head.hash:
            self.say("heads", "the head's hash is not the last event's", head.seq)
        if self.log.goes_on_after(head):
            self.say("heads", "there are events after the head", head.seq + 1)
        if head.epoch < self.epoch:
            self.say("heads", f"the head's epoch {head.epoch} is below the log's {self.epoch}", head.seq)
        if self.without_data or self.gone:
            for seq, event in _readable(self.store.displaced(head.run)):
                if isinstance(event, e.ValueErasedOnPurpose):
                    self._event(seq, event)  # what it says stays so, though it was set aside
        for seq, _ in self.without_data:
            if seq in self.erased_seqs:
                self.erased += 1
            else:
                self.say("events", "the data is missing, and no event says it was erased", seq)
        for seq, digest in self.gone:
            if digest in self.erased_pieces or erased_elsewhere(self.store, digest):
                self.erased += 1
            else:
                self.say("pieces", f"value {digest.hex()[:12]} is empty, and no event says it was erased", seq)

    # derived data -----------------------------------------------------------------------------

    def compare(self) -> bool:
        """Compares each stored copy of a run's facts with the fold of the log: one method a copy."""
        if self.unfolded is not None:
            raise self.unfolded
        copies = (self._snapshots, self._messages, self._claims, self._aside, self._references, self._index)
        for compare in copies:
            compare()
        return True

    def _aside(self) -> None:
        aside = self.store.displaced(self.head.run)
        # A repair that a later one moved aside had moved rows aside itself.
        again = (event.set_aside for _, event in _readable(aside) if isinstance(event, e.RunRepaired))
        set_aside = self.set_aside + sum(again)
        if len(aside) != set_aside:
            self.say("aside", f"{set_aside} events were set aside, {len(aside)} are there")
        for row in aside:
            self._keep(references(row.data or b""))

    def _references(self) -> None:
        """Checks that the references are exactly the chunks that the log uses; erased chunks hide their children."""
        run, found = self.head.run, self.store.references(self.head.run).log
        hidden = bool(self.gone or self.without_data or self.hidden)
        if self.used - found or (found - self.used and not hidden):
            self.say("piece_uses", f"{len(self.used ^ found)} references are lost or too many")
            wanted = self.used | found if hidden else self.used
            refer = partial(self.store.set_references, run, wanted, at=self.head.seq, delivered=self.messages)
            self.healings.append(refer)

    def _snapshots(self) -> None:
        other = bool(self.snapshots) and all(shot.fold != FOLD for shot in self.snapshots.values())
        if other:
            self.say("snapshots", "some snapshots are damaged, or another release's")
        elif self.snapshots or self.snapshot_pieces != self.store.references(self.head.run).snapshots:
            self.say("snapshots", "some snapshots are not what the log folds to")
        else:
            return
        self.healings.append(partial(self.store.forget_snapshots, self.head.run))

    def _whole(self, pieces: Collection[Blob]) -> bool:
        found = self.store.pieces([piece.hash for piece in pieces])
        return all(found.get(piece.hash) == piece for piece in pieces)

    def _messages(self) -> None:
        row, messages = self.store.index(self.head.run), self.store.messages(self.head.run)
        self.messages = len(messages)
        for number in missing_messages(row, messages, self.taken):
            self.say("inbox", f"message {number} is missing", self.taken.pop(number, None))
            self.hidden = True  # the values that it names stay
        for message in messages:
            place = message.number
            self._pieces(self.head.seq, references(message.body))
            if message.body == ERASED_BODY and not (self.erased_seqs or self.hidden or self.repaired):
                self.say("inbox", f"message {place} is empty, and no event says it was erased")
            said = self.taken.pop(place, None)
            if said is None and message.taken and message.taken == self.renewed_at:
                continue  # it moved to the run that continues
            if (said is None) != (message.taken is None) and not self._set_aside(message.taken):
                self.say(
                    "inbox",
                    f"message {place} is {'' if message.taken else 'not '}marked as taken, the log differs",
                    said,
                )

    def _claims(self) -> None:
        held = {
            f"{claim.space}:{e.to_text(claim.key)}": seq for claim, seq in self.store.claimed(self.head.run).items()
        }
        said = self.ledger.claims()
        for claim in said.keys() - held.keys():
            if said[claim] > self.head.base:  # an elder's claims are the elder's
                self.say("claims", f"the claim on {claim} is missing", said[claim])
        for claim in held.keys() - said.keys():
            if not self._set_aside(held[claim]):
                self.say("claims", f"a claim on {claim} that the log does not know", held[claim])

    def _set_aside(self, seq: int | None) -> bool:
        """Returns whether a repair removed the event at a seq: the messages and rights it consumed stay consumed."""
        return seq is not None and any(seq in gap for gap in self.gaps)

    def _index(self) -> None:
        """Compares the index entry, and the conditions of deliveries: what one should have refused may be lost."""
        run, store, fold = self.head.run, self.store, self.fold
        if any(problem.where == "inbox" for problem in self.problems):
            return  # they count its messages
        healing = partial(indexed_again, store, run, fold, at=self.head.seq)
        if not index_fits(store, run, fold):
            self.say("runs", "the index does not say what the log says")
            self.healings.append(healing)
        if not slots_fit(store, run, fold):
            what = "what it accepts was not what its log and its inbox say; deliveries since may be wrong"
            self.say("slots", what)
            self.healings.append(healing)


def _readable(rows: Collection[Row]) -> Iterator[tuple[int, e.Event]]:
    """Returns the readable events among the removed ones."""
    for row in rows:
        with contextlib.suppress(EventBroken, EventUnknown):
            yield row.seq, event_codec.decode(row.body)


def erased_elsewhere(store: Store, digest: bytes) -> bool:
    """Returns whether any run erased a shared chunk; that erases it for all runs."""
    text = e.to_text(digest)
    runs = (pages(store, head.run, data=False) for _, head in heads(store))
    bodies = (row.body for run in runs for rows in run for row in rows)
    erased = (event_codec.decode(body) for body in bodies if body.startswith(b'{"kind":"value.erased"'))
    return any(isinstance(event, e.ValueErasedOnPurpose) and text in event.pieces for event in erased)
