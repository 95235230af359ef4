"""One run's log, open for appending: encodes, chains, folds and submits. Makes no decisions about the run."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, Protocol, TypedDict, Unpack

from killick.errors import HandleClosed, LogError
from killick.ids import salt
from killick.log.append_groups import Hold, Ticket
from killick.log.derived import apply_events, events_of, index_of, snapshot_of
from killick.log.encoding import NO_VALUES, STEP_EVENTS, packed, row_of
from killick.log.group_commit import Committer, Tail, running_loop
from killick.log.slots import changed, is_open, slots_of
from killick.model.chunks import Blob
from killick.model.cipher import Cipher, Place
from killick.model.event_codec import OUTBOX_EVENTS, chained
from killick.model.events import AttemptEnded, Event, RunRewound, RunStarted, RunTaken, StepStarted
from killick.model.facts import PlainStep
from killick.model.fold import Fold
from killick.model.ledger import Ledger
from killick.store.protocol import Keys, Transaction
from killick.store.records import (
    ASKS,
    Append,
    CreateRun,
    Delivery,
    Head,
    InboxRead,
    OutboxRow,
    Row,
    RunIndex,
    Snapshot,
    UniqueRight,
    side_by_side,
)
from killick.store.slots import Slot

SNAPSHOT_EVERY: Final = 1_024
"""The number of events between snapshots: the most that opening a state folds."""

KNOWN_PIECES_MAX: Final = 100_000


class Entry(NamedTuple):
    """An event to append, and its values."""

    event: Event
    values: Mapping[str, Any] | None = None


class AppendExtras(TypedDict, total=False):
    """What an append takes, returns, erases, or does to other runs in the same commit, besides adding events."""

    claims: tuple[UniqueRight, ...]
    releases: tuple[UniqueRight, ...]
    takes: tuple[int, ...]
    returns: tuple[int, ...]
    erases_rows: tuple[int, ...]
    erases_messages: tuple[int, ...]
    erases_pieces: tuple[bytes, ...]
    also: tuple[Append, ...]
    sends: tuple[Delivery, ...]
    gives: tuple[Slot, ...]
    inbox_read: InboxRead


class AppendListener(Protocol):
    """Receives appended events."""

    def appended(self, entries: Sequence[Entry]) -> None:
        """Called once the events are chained and submitted. Must neither raise nor append."""
        ...


class RunLog:
    """A run's log with its live folds.

    The folds include submitted but uncommitted events. A failed commit closes the handle, because its folds may be
    ahead of the store; the caller opens the run again.
    """

    def __init__(
        self,
        head: Head,
        *,
        committer: Committer,
        secret_key: bytes,
        fold: Fold,
        ledger: Ledger,
        rewound: Callable[[str, RunRewound], Fold],
        snapshot_at: int = 0,
        birth: CreateRun | None = None,
        snapshot_every: int = SNAPSHOT_EVERY,
        keys: Keys | None = None,
    ) -> None:
        self.run = head.run
        self.parent = head.parent
        self.base = head.base
        """The last event that a fork shares with its parent; 0 in every other run."""
        self.seen = 0
        self.rows: Sequence[Row] | None = None
        """The last part of the log, as read on opening, for replay; or None."""
        self.listener: AppendListener | None = None
        self._fold = fold
        self._ledger = ledger
        self._unfolded: list[tuple[int, Event | PlainStep]] = []
        self._rows_alone_until = -1
        self.seq = head.seq
        """The seq of the last submitted event."""
        self.hash = head.hash
        """The chain hash there."""
        self.epoch = head.epoch
        """The epoch under which this handle appends."""
        self._birth = birth
        self._committer = committer
        self._secret_key = secret_key
        self._keys = keys
        self.key = fold.facts.key
        """The name of the key of the run's values, in an encrypted store."""
        self._rewound = rewound
        self._snapshot_at = snapshot_at
        self._snapshot_every = snapshot_every
        self._known: set[bytes] = set()
        self._indexed: RunIndex | None = None
        """The index entry as this handle wrote it last."""
        self._slots: dict[str, Slot] = {} if birth is not None else slots_of(fold.facts, secret_key)
        """The conditions of deliveries as the log's last writer left them."""
        self._tail = Tail(head.run)
        self._begun: Ticket | None = None
        self._hold: Hold | None = None
        self.failure: BaseException | None = None
        """Why the handle is closed, if it is."""
        if fold.facts.ended:
            self._index()  # an entry of an ended run releases its lease, so that none is written without a change

    @property
    def fold(self) -> Fold:
        """The fold of the timeline so far, computed lazily in batches."""
        if self._unfolded:
            self._catch_up()
        return self._fold

    @property
    def ledger(self) -> Ledger:
        """The fold of the whole log so far."""
        if self._unfolded:
            self._catch_up()
        return self._ledger

    @property
    def secret_key(self) -> bytes:
        """The key for digests of secrets, and in an encrypted store for all digests."""
        if self._keys is None or (cipher := self._cipher()) is None:
            return self._secret_key
        return cipher.digest_key

    def _cipher(self) -> Cipher | None:
        return None if self._keys is None or self.key is None else self._keys.cipher(self.key)

    # appending --------------------------------------------------------------------------------

    def append(self, *entries: Entry, **rights: Unpack[AppendExtras]) -> Head:
        """Appends durably: on return the events are committed."""
        item = self.built(entries, rights)
        try:
            return self._committer.commit(item)
        except BaseException as error:
            self._fail(error)
            raise

    async def append_soon(self, *entries: Entry, **rights: Unpack[AppendExtras]) -> Head:
        """As `append`, from a loop, batched with other tasks."""
        ticket = self.append_begun(*entries, **rights)
        if ticket.future is None:
            return ticket.result()
        try:
            return await ticket.future
        except Exception as error:
            self._fail(error)
            raise

    def append_begun(self, *entries: Entry, **rights: Unpack[AppendExtras]) -> Ticket:
        """As `append_soon`, for a caller that must not be interrupted; `settled` waits for it."""
        if self._hold is not None and (held := self._held(entries, rights, waits=True)) is not None:
            return held
        start = (self.seq, self.hash, self.epoch)
        if rights or len(entries) != 1 or (row := self._lone(*entries[0])) is None:
            item = self._appended(start, *self._chain(entries, rights))
        else:
            item = self._appended(start, [row], _NOTHING_MORE)
        return self._begin(item)

    def begin_step(self, started: StepStarted, raw: bytes) -> Ticket | None:
        """As `append_begun`, for a plain step. `raw` are its values as JSON, without the last brace.

        None: the append has more than this row, and nothing was done.
        """
        start = (self.seq, self.hash, self.epoch)
        if (row := self._plain(started, raw)) is None:
            return None
        self._unfolded.append((row.seq, started))
        return self._begin(self._appended(start, [row], _NOTHING_MORE))

    def _begin(self, item: Append) -> Ticket:
        try:
            self._begun = ticket = self._committer.begin(item)
        except Exception as error:
            self._fail(error)
            raise
        return ticket

    def end_step(self, started: StepStarted, ended: AttemptEnded, raw: bytes) -> int | None:
        """As `append_behind`, for the end of a plain step; None as for `begin_step`."""
        start = (self.seq, self.hash, self.epoch)
        if (row := self._plain(ended, raw)) is None:
            return None
        last, unfolded = (start[0], started), self._unfolded
        if unfolded and unfolded[-1] == last:
            unfolded[-1] = start[0], PlainStep(start[0], row.seq, started, started, ended)
        else:
            unfolded.append((row.seq, ended))
        self._committer.add_behind(self._tail, start, (row,))
        return row.seq

    def _plain(self, event: Event, raw: bytes) -> Row | None:
        """Chains an event of a plain step. None: its append would have more than its row."""
        if (
            (self.seq > self._rows_alone_until and not self._takes_rows_alone())
            or self.listener is not None
            or self._hold is not None
        ):
            return None
        if self.failure is not None or self._tail.last is not None:
            self._check()
        cipher, seq = self._cipher() if self._keys is not None else None, self.seq + 1
        body, data, self.hash = chained(Place(self.run, seq, self.hash), event, b"%b%b}" % (raw, salt()), cipher)
        self.seq = seq
        return Row(seq, body, data, self.hash)

    async def settled(self, ticket: Ticket) -> bool:
        """Waits for begun appends despite cancellation; True: the caller was cancelled."""
        import asyncio

        cancelled = False
        while not ticket.done:
            try:
                if ticket.future is not None and not ticket.future.done():
                    await ticket.future
                else:
                    await self._committer.wait_soon(ticket)
            except asyncio.CancelledError:
                cancelled = True
            except Exception as error:
                self._fail(error)
                raise
        if ticket.error is not None:
            self._fail(ticket.error)
        ticket.result()
        return cancelled

    def _fail(self, error: BaseException) -> None:
        """Closes the handle. If a write-behind append was refused first, that is the reason."""
        behind = self._tail.last
        first = behind.error if behind is not None and behind.done else None
        self.failure = self.failure or first or error

    def append_behind(self, *entries: Entry, **rights: Unpack[AppendExtras]) -> int:
        """Write-behind: appends without waiting. It commits with the next append, or soon; `barrier` waits for it.

        Returns the seq of the last event.
        """
        if self._hold is not None and (held := self._held(entries, rights, waits=False)) is not None:
            self._tail.last = held
            return held.item.last[0]
        start = (self.seq, self.hash, self.epoch)
        if not rights and len(entries) == 1 and (row := self._lone(*entries[0])) is not None:
            self._committer.add_behind(self._tail, start, (row,))
            return self.seq
        rows, more = self._chain(entries, rights)
        again = "takes" in rights or isinstance(entries[-1].event, RunTaken)
        if not (more or again):
            self._committer.add_behind(self._tail, start, rows)
        else:
            self._tail.last = ticket = Ticket(self._appended(start, rows, more))
            self._committer.submit(ticket, happens_again=again)
        return self.seq

    def barrier(self) -> None:
        """Returns when everything submitted so far is committed, including the appends of others."""
        if (ticket := self._newest()) is not None:
            self._committer.wait(ticket)
            self._notify(ticket)
        if self._tail.last is not None:
            self._check()

    async def barrier_soon(self) -> None:
        """As `barrier`, from a loop."""
        if (ticket := self._newest()) is not None:
            await self._committer.wait_soon(ticket)
            self._notify(ticket)
        if self._tail.last is not None:
            self._check()

    def _newest(self) -> Ticket | None:
        """Returns the newest uncommitted append. A log commits as a prefix, so it covers all earlier ones."""
        if self._tail.rows:
            self._committer.detach(self._tail)
        begun, behind = self._begun, self._tail.last
        if begun is None or begun.done:
            return None if behind is None or behind.done else behind
        return begun if behind is None or behind.done or begun.item.last > behind.item.last else behind

    def _notify(self, ticket: Ticket) -> None:
        """Closes the handle after a refusal."""
        if ticket.error is not None:
            self._fail(ticket.error)
            self._check()

    # holding back -----------------------------------------------------------------------------

    def hold(self) -> Hold:
        """Holds back later appends, for a transaction in which a step of this run ends.

        They are chained as usual, and commit in the transaction, or normally if that is abandoned. Appends and folds
        during the commit wait for it.
        """
        assert self._hold is None, "one transaction of a run at a time"
        self._committer.hold_off(1)
        self._hold = Hold(Append(run=self.run, after=self.seq, before=self.hash, epoch=self.epoch))
        return self._hold

    async def caught_up(self, hold: Hold) -> bool:
        """Waits until all earlier submissions are committed; True: the caller was cancelled."""
        if self._newest() is None:
            return False
        return await self.settled(self._committer.begin(hold.fence))

    @contextmanager
    def ending(
        self, hold: Hold, entry: Entry, transaction: Transaction, rights: AppendExtras | None = None
    ) -> Generator[Append]:
        """For the transaction's thread: writes the held-back appends into it, and the event that ends the step.

        The block ends when it is committed, or raises. Until then it changes nothing that other threads read.
        """
        values = packed(entry.event, entry.values, self._secret_key, self._cipher())
        with hold.mutex:
            if self._hold is not hold or self.failure is not None:
                given_up = LogError(f"{self.run}: its transaction was given up; nothing of it happened")
                raise HandleClosed(self.run, self.failure or given_up)
            item = self._last_one(entry.event, values, rights or {})
            *heads, head = transaction.append([*(ticket.item for ticket in hold.tickets), item])
            for result in (*heads, head):
                if isinstance(result, LogError):
                    raise result
            yield item
            self.seq, self.hash = item.last
            self._unfolded.append((self.seq, entry.event))
            self._rows_alone_until = -1
            self._known.update(piece.hash for piece in item.pieces)
            self._indexed = item.index or self._indexed
            hold.seq = self.seq
            if self.listener is not None:
                self.listener.appended((entry,))
            self._let_go()
            self._committer.finish(hold.tickets, heads)

    def _last_one(self, event: Event, values: tuple[bytes | None, Sequence[Blob]], rights: AppendExtras) -> Append:
        (data, pieces), index, seq = values, None, self.seq + 1
        if not self._fold.are_quiet([(0, event)]):
            # While a step waits, every append is folded at once, so that only this event is missing.
            index = index_of(self._fold.with_one_returned(event.at), seen=self.seen)
        return Append(
            run=self.run,
            after=self.seq,
            before=self.hash,
            epoch=self.epoch,
            rows=(Row(seq, *chained(Place(self.run, seq, self.hash), event, data, self._cipher())),),
            pieces=tuple({piece.hash: piece for piece in pieces if piece.hash not in self._known}.values()),
            index=None if index == self._indexed else index,
            **rights,
        )

    def give_up(self, hold: Hold) -> bool:
        """Detaches from the transaction; False: it was committed."""
        with hold.mutex:
            if self._hold is hold:
                self._let_go()
                self._committer.submit(*hold.tickets, urgent=True)
            return hold.seq is None

    def _let_go(self) -> None:
        self._hold = None
        self._committer.hold_off(-1)

    def _held(self, entries: Sequence[Entry], rights: AppendExtras, *, waits: bool) -> Ticket | None:
        """Chains an append and holds it back; None: the transaction has just ended."""
        hold = self._hold
        assert hold is not None
        with hold.mutex:
            if self._hold is not hold:
                return None
            future = running_loop().create_future() if waits else None
            ticket = Ticket(self.built(entries, rights), future)
            hold.tickets.append(ticket)
            return ticket

    # inside -----------------------------------------------------------------------------------

    def _check(self) -> None:
        behind = self._tail.last
        if self.failure is None and behind is not None and behind.done:
            self.failure, self._tail.last = behind.error, None
        if self.failure is not None:
            raise HandleClosed(self.run, self.failure) from self.failure

    def built(self, entries: Sequence[Entry], rights: AppendExtras | None = None) -> Append:
        """Returns an append, with the pending write-behind events where no part of it could be refused separately. The
        caller commits it, maybe with others; the handle counts it as submitted."""
        start = (self.seq, self.hash, self.epoch)
        return self._appended(start, *self._chain(entries, rights))

    def _appended(self, start: tuple[int, bytes, int], rows: list[Row], more: Mapping[str, Any]) -> Append:
        tail = self._tail
        if tail.rows:
            if not (more and more.keys() - _JOINED):
                if taken := self._committer.take(tail):
                    start, rows = tail.start, taken + rows
            else:
                self._committer.detach(tail)
        after, before, _ = start
        return Append(run=self.run, after=after, before=before, epoch=self.epoch, rows=tuple(rows), **more)

    def with_key(self, started: RunStarted) -> RunStarted:
        """Returns a run's first event with the name of its key, under which this handle encrypts from now on."""
        if self._keys is not None:
            started = self._keys.started(started)
            self.key = started.key
        return started

    def _lone(self, event: Event, values: Mapping[str, Any] | None) -> Row | None:
        """Chains an event of a step whose append has nothing but its row, as most have. None: it may have more."""
        if type(event) not in STEP_EVENTS or (type(event) is AttemptEnded and event.outcome != "returned"):
            return None
        if (self.seq > self._rows_alone_until and not self._takes_rows_alone()) or self.listener is not None:
            return None
        if self.failure is not None or self._tail.last is not None:
            self._check()
        cipher = self._cipher() if self._keys is not None else None
        data, blobs = packed(event, values, self._secret_key, cipher) if values else NO_VALUES
        if blobs:
            return None
        seq = self.seq + 1
        body, data, self.hash = chained(Place(self.run, seq, self.hash), event, data, cipher)
        self.seq = seq
        self._unfolded.append((seq, event))
        return Row(seq, body, data, self.hash)

    def _takes_rows_alone(self) -> bool:
        """Whether the next events of steps change neither the run's index nor its outbox. No snapshot is due until
        `_rows_alone_until`."""
        facts = self._fold.facts
        if facts.waits or not self._fold.is_running or self._birth is not None:
            return False
        self._rows_alone_until = self._snapshot_at + self._snapshot_every - 3
        return self.seq <= self._rows_alone_until

    def _chain(self, entries: Sequence[Entry], rights: AppendExtras | None) -> tuple[list[Row], dict[str, Any]]:
        """Encodes, chains and queues for folding. A refused value changes nothing, because all are packed first.

        Returns the rows, and the other parts of their append; most have none.
        """
        if self.failure is not None or self._tail.last is not None:
            self._check()
        if self._keys is not None and self._birth is not None and isinstance(entries[0].event, RunStarted):
            entries = (Entry(self.with_key(entries[0].event), entries[0].values), *entries[1:])
        cipher = self._cipher() if self._keys is not None else None
        seq, hash_ = self.seq, self.hash
        rows: list[Row] = []
        pieces: list[Blob] = []
        numbered: list[tuple[int, Event]] = []
        for event, values in entries:
            seq += 1
            row, blobs = row_of(Place(self.run, seq, hash_), event, values, self._secret_key, cipher)
            rows.append(row)
            hash_ = row.hash
            if blobs:
                pieces += blobs
            numbered.append((seq, event))
        self.seq, self.hash = seq, hash_
        facts = self._fold.facts
        quiet = (facts.status == "waiting" or not facts.waits) and self._fold.are_quiet(numbered)
        self._rows_alone_until = self._rows_alone_until if quiet else -1
        self._unfolded += numbered
        more = self._more(quiet, pieces, rights, numbered)
        if self.listener is not None:
            self.listener.appended(entries)
        return rows, more

    def _more(
        self, quiet: bool, pieces: Sequence[Blob], rights: AppendExtras | None, numbered: Sequence[tuple[int, Event]]
    ) -> dict[str, Any]:
        """Returns the parts of an append besides its rows; most have none."""
        more: dict[str, Any] = {name: part for name, part in rights.items() if part} if rights else {}
        if "also" in more:
            more["also"] = side_by_side(more["also"])
        if (birth := self._birth) is not None:
            self._birth = None
            self.epoch = 1 if birth.holder is not None else 0
            more["create"] = birth
        if pieces:
            more["pieces"] = self._unknown(pieces)
        rewound = False
        if not quiet or birth is not None:
            more["index"] = self._index()
            asks = self._indexed is not None and ASKS in self._indexed.tags
            if birth is not None or self._slots or asks or self._fold.facts.ended:
                self._write_slots(more, is_new=birth is not None)
            known = [(seq, event) for seq, event in numbered if type(event) in OUTBOX_EVENTS]
            rewound = any(isinstance(event, RunRewound) for _, event in known)
            if known:
                more["outbox"] = tuple(OutboxRow(seq, str(event.__struct_config__.tag)) for seq, event in known)
        # One event earlier after a step, rather than in the next one: the steps after it are folded together then.
        due = self._snapshot_every - (bool(numbered) and type(numbered[-1][1]) is AttemptEnded)
        if rewound or self.seq - self._snapshot_at >= due:
            # A rewind always writes one, so that the ended steps of the last snapshot are final.
            more["snapshot"] = self._snapshot()
        return more

    def _catch_up(self) -> None:
        if (hold := self._hold) is None:
            self._fold_on()
        else:
            with hold.mutex:
                self._fold_on()

    def _fold_on(self) -> None:
        unfolded, self._unfolded = self._unfolded, []
        at = 0
        while (at := apply_events(self._fold, self._ledger, unfolded, at)) < len(unfolded):
            [(seq, event)] = events_of(*unfolded[at])
            if isinstance(event, RunRewound):
                # Pending chunks cannot be read from the store yet.
                self.barrier()
                self._fold = self._rewound(self.run, event)
            self._fold.apply(seq, event)
            self._ledger.apply(seq, event)
            at += 1

    def _unknown(self, pieces: Sequence[Blob]) -> tuple[Blob, ...]:
        """Returns the chunks that this handle has not stored before; storing one again is harmless."""
        if len(self._known) > KNOWN_PIECES_MAX:
            self._known.clear()
        fresh = {piece.hash: piece for piece in pieces if piece.hash not in self._known}
        self._known.update(fresh)
        return tuple(fresh.values())

    @property
    def has_seen_more(self) -> bool:
        """Whether more messages were seen than the run's index has."""
        return (0 if self._indexed is None else self._indexed.seen) < self.seen

    def _index(self) -> RunIndex | None:
        """Returns the run's index entry, if changed."""
        before, self._indexed = self._indexed, index_of(self.fold, seen=self.seen)
        return None if self._indexed == before else self._indexed

    def _write_slots(self, more: dict[str, Any], *, is_new: bool) -> None:
        """Adds the slots that the last events change. An append that makes a run live holds only if the run's key is
        as it is now: a key is destroyed after no run under it is live."""
        before, self._slots = self._slots, slots_of(self.fold.facts, self._secret_key)
        if slots := changed(before, self._slots):
            more["slots"] = slots
        is_live = is_new or is_open(self._slots) > is_open(before)
        if is_live and self._keys and self.key and (fence := self._keys.fence(self.key)) is not None:
            more["also"] = (*more.get("also", ()), fence)

    def _snapshot(self) -> Snapshot:
        self._snapshot_at = self.seq
        own = None if self._keys is None else self._keys.own
        return snapshot_of(self.fold, self.ledger, Place(self.run, self.seq, self.hash), own)


_NOTHING_MORE: Final[dict[str, Any]] = {}

_JOINED: Final = frozenset({"pieces", "index", "snapshot", "outbox", "slots"})
"""The parts of an append that take no right: it cannot be refused for them."""
