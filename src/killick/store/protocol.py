"""What a store is: a synchronous Protocol over bytes, and the records that pass through it.

A store keeps rows, moves heads and refuses what does not fit. It knows no event types, computes no
hash chain and decides nothing about runs; the log above it does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Literal, Protocol
from zlib import crc32

import msgspec

from killick.clock import Clock
from killick.errors import LogError
from killick.model.chunks import Blob
from killick.model.fold import OWN_TAGS

STORE_FORMAT: Final = 4
"""The newest layout this build reads and writes; opening an older one migrates it."""

READ_LIMIT: Final = 10_000
"""Rows that one read returns at the most, unless a smaller limit is given."""


ENDED: Final = ("completed", "failed", "cancelled")
"""The statuses of runs that are over; a message makes no such run due."""


OWN_AGENTS: Final = "killick."
"""How agents are named under which Killick keeps logs for itself."""

OWN_RUNS: Final = "killick:"
"""How such logs are named that are nobody's business but an admin's."""


def is_own(run: str) -> bool:
    """Whether an id is that of a log that Killick keeps for itself, or may come to be: nobody's run is called so."""
    return run == "seal" or run.startswith((OWN_RUNS, "trigger:", "hook:"))


FEED_RANG: Final = "killick:feed"
"""What a bell says, instead of a run's id, when something was told to the feed."""


HIDDEN_TAGS: Final = ("killick:", *OWN_TAGS)
"""How tags begin that runs are found by, and that nobody gave them."""


ASKS: Final = "killick:asks"
"""The tag of a run that may wait for a person: for an answer, or to say what became of an effect."""


CRASHING: Final = "killick:crashing"
"""The tag of a run whose holders died since a step of it last ended."""

DIED_ALONE: Final = "killick:died_alone"
"""The tag of such a run that died in a process of its own: it explains the deaths that it shared with others."""


def shown_tags(tags: Sequence[str]) -> tuple[str, ...]:
    """Those of a run's tags that somebody gave it."""
    return tuple(tag for tag in tags if not tag.startswith(HIDDEN_TAGS))


class Row(msgspec.Struct, frozen=True):
    """One event as stored. `data` holds its values; the body names their hash. None: no values, or erased."""

    seq: int
    body: bytes
    data: bytes | None
    hash: bytes


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The truth about how long a log is and who may lengthen it.

    `base` is the seq before the run's first own event: 0, or the cut where a fork leaves its parent.
    A head names a holder for as long as that holder is at work on it. One whose holder is dead, or whose time is up,
    was left in the middle and is due at once; a run that is parked, or over, has none.
    """

    run: str
    seq: int
    hash: bytes
    epoch: int
    base: int = 0
    parent: str | None = None
    holder: str | None = None
    lease_until_us: int | None = None


class CreateRun(msgspec.Struct, frozen=True, kw_only=True):
    """Makes an append create its run. With a holder the creator has the lease, at epoch 1."""

    parent: str | None = None
    holder: str | None = None
    lease_seconds: float = 60.0


class RunIndex(msgspec.Struct, frozen=True, kw_only=True):
    """What runs are found by: a copy of what their logs say.

    `seen` is the number of the last inbox message that the writer had looked at: if more have come
    since, the store makes the run due as of the first of them, so that no message is slept through.
    """

    agent: str
    status: str
    priority: int = 0
    wake_at_us: int | None = None
    started_at_us: int = 0
    changed_at_us: int = 0
    tags: tuple[str, ...] = ()
    seen: int = 0


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a listing. `number` is the cursor; runs are numbered as they are created.

    `delivered` counts the messages a run ever got; -1: that count was tampered with.
    """

    number: int
    run: str
    agent: str
    status: str
    priority: int
    wake_at_us: int | None
    started_at_us: int
    changed_at_us: int
    tags: tuple[str, ...]
    delivered: int


class RunQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which runs a listing wants. Every field that is given must match.

    The times are of a run's last change: at or after `since_us`, and before `until_us`. What Killick keeps for itself
    in logs of their own, under agents named `killick.…`, is listed only where an agent or a tag is asked for.
    """

    status: tuple[str, ...] = ()
    agent: str | None = None
    tag: str | None = None
    since_us: int | None = None
    until_us: int | None = None
    contains: str | None = None
    """A part of the run's id; A and a are the same, as all letters of ASCII are."""
    holders: tuple[str, ...] = ()
    """Whom the run's head names as its holder: one of these."""


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """Who names itself on the heads of runs. `until_us` is the soonest end of its leases, by the store's own clock
    (None: they have no end); `lives` says whether it may still be at work on any of them."""

    holder: str
    runs: int
    until_us: int | None
    lives: bool


class RunStanding(msgspec.Struct, frozen=True):
    """How a run stands: its head, its status (None: it has no index), and why it is set apart, if it is."""

    head: Head
    status: str | None
    quarantined: str | None


class UniqueRight(msgspec.Struct, frozen=True):
    """A right that exists once in the whole store, by space and key."""

    space: str
    key: bytes


class Owner(msgspec.Struct, frozen=True):
    """Who claimed a right, and at which event."""

    run: str
    seq: int


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """A message on its way to a run. The id makes it count once; an answer's id is its wait's."""

    run: str
    id: str
    name: str
    body: bytes
    by: str | None
    at_us: int
    pieces: tuple[Blob, ...] = ()


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """A message in an inbox. `taken` is the seq of the event that took it, if one did."""

    run: str
    number: int
    id: str
    name: str
    body: bytes
    by: str | None
    at_us: int
    taken: int | None = None


class Delivered(msgspec.Struct, frozen=True):
    """What became of a delivery: the message as it stands, and whether this delivery made it."""

    message: Message
    fresh: bool


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A cached fold at `seq`. It counts only while fold version, seq and chain hash all fit."""

    seq: int
    fold: int
    hash: bytes
    root: bytes
    pieces: tuple[Blob, ...] = ()


class References(msgspec.Struct, frozen=True):
    """The hashes that keep values alive for a run: used by its log and inbox, and by its snapshots."""

    log: set[bytes]
    snapshots: set[bytes]


class TermRow(msgspec.Struct, frozen=True):
    """Says that a term, given as a 64-bit number, stands at an event. `at_us` is that event's time."""

    term: int
    at_us: int
    seq: int


class TermBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Marks of one run, from the events after one seq up to another. `anew` drops all that it has first."""

    run: str
    after: int
    up_to: int
    marks: tuple[TermRow, ...] = ()
    anew: bool = False


class Behind(msgspec.Struct, frozen=True, kw_only=True):
    """A run that went on since it was marked. `number` is the cursor; `base` is that of its head."""

    number: int
    run: str
    base: int
    marked: int


class TermPosition(msgspec.Struct, frozen=True, order=True):
    """An event that bears a mark; later ones are greater."""

    at_us: int
    number: int
    seq: int
    run: str = ""


class OutboxRow(msgspec.Struct, frozen=True):
    """An event that hooks may want to hear of, by its seq and kind."""

    seq: int
    kind: str


class OutboxItem(msgspec.Struct, frozen=True, kw_only=True):
    """An event at its place in the feed, which is the order in which hooks hear of events of all runs."""

    position: int
    run: str
    seq: int
    kind: str


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """What is needed to go on with a run, read at one time: the newest snapshot, and the run's own rows after it.

    Without a snapshot the rows are all of the run's own. They are not cut at the head: what stands beyond it is seen.
    The rows come with their data, for whoever goes on with a run replays it next; a snapshot comes without its pieces.
    """

    head: Head
    quarantined: str | None
    snapshot: Snapshot | None
    rows: Sequence[Row]


class Claimed(msgspec.Struct, frozen=True, kw_only=True):
    """A run that was claimed: its head with the new lease, and how it is found. `left` says who left it in the middle,
    and `left_until_us` until when they may believe to have it, where that is known; 0: they let it go."""

    head: Head
    row: RunRow
    left: str | None = None
    left_until_us: int | None = None


class Condition(msgspec.Struct, frozen=True):
    """Something about a store that its promises rest on, and what is wrong with it, if anything is."""

    name: str
    value: str
    wrong: str | None = None


class Append(msgspec.Struct, frozen=True, kw_only=True):
    """One conditional write to one run. All of it happens, or it is refused and nothing does.

    `pieces` are values that the rows refer to and that this run may not have stored yet; one that the
    store holds already is shared. `takes` and `returns` are inbox numbers, `erases_rows` seqs whose
    data goes, `erases_pieces` values whose bytes go. `tells` puts events of its rows into the feed.

    `also` are appends to other runs, and `sends` messages, that happen with it or not at all: if one of `also` is
    refused, all of it is, for that reason. Each must fit what was there before any of them, and no two may claim the
    same. They are carried out in this order: the append, `also`, then the `sends` of all of them. A message to a run
    that is not there, or whose id is taken, is passed over.

    An index whose status is an ended one lets the run's lease go in the same write.
    """

    run: str
    after: int
    before: bytes
    epoch: int
    rows: tuple[Row, ...] = ()
    birth: CreateRun | None = None
    pieces: tuple[Blob, ...] = ()
    index: RunIndex | None = None
    takes: tuple[int, ...] = ()
    returns: tuple[int, ...] = ()
    claims: tuple[UniqueRight, ...] = ()
    releases: tuple[UniqueRight, ...] = ()
    snapshot: Snapshot | None = None
    erases_rows: tuple[int, ...] = ()
    erases_pieces: tuple[bytes, ...] = ()
    tells: tuple[OutboxRow, ...] = ()
    also: tuple[Append, ...] = ()
    sends: tuple[Delivery, ...] = ()

    @property
    def group(self) -> tuple[Append, ...]:
        """It and those that happen with it. ValueError if one of them has others with it, or two are to one run."""
        if not self.also:
            return (self,)
        if any(one.also for one in self.also):
            raise ValueError(f"{self.run}: an append that happens with another can have none with itself")
        group = (self, *self.also)
        if len({one.run for one in group}) < len(group):
            raise ValueError(f"{self.run}: appends that happen together are each to another run")
        return group

    @property
    def is_plain(self) -> bool:
        """Whether it takes, gives back and erases nothing, and nothing else hangs on it."""
        taken = self.claims or self.releases or self.takes or self.returns
        return not (taken or self.erases_rows or self.erases_pieces or self.also or self.sends)

    @property
    def is_bare(self) -> bool:
        """Whether it is events in a row and nothing else: the common case, which a store may treat specially."""
        rows = self.rows
        if self.birth or self.pieces or self.index or self.snapshot or self.tells or not rows or not self.is_plain:
            return False
        return rows[0].seq == self.after + 1 and rows[-1].seq == self.after + len(rows)

    def joins(self, later: Append) -> bool:
        """Whether the next append of this run may be one with this: nothing in it could be refused by itself.

        A snapshot needs the pieces of the one before it, and no append holds two.
        """
        return self.is_plain and later.is_plain and later.birth is None and later.snapshot is None

    def joined(self, later: Append) -> Append:
        """This append and the next of its run as one."""
        return Append(
            run=self.run,
            after=self.after,
            before=self.before,
            epoch=later.epoch,
            rows=self.rows + later.rows,
            birth=self.birth,
            pieces=self.pieces + later.pieces,
            index=later.index or self.index,
            snapshot=later.snapshot or self.snapshot,
            tells=self.tells + later.tells,
        )

    @property
    def last(self) -> tuple[int, bytes]:
        """The head that this append leads to."""
        return (self.rows[-1].seq, self.rows[-1].hash) if self.rows else (self.after, self.before)

    @property
    def size_bytes(self) -> int:
        """About how much this append carries, for back-pressure."""
        rows = sum(len(row.body) + len(row.data or b"") for row in self.rows)
        return rows + sum(len(piece.body or b"") for piece in self.pieces)


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One thing found wrong. `healed` problems were in derived data, which was rebuilt."""

    where: str
    what: str
    run: str | None = None
    seq: int | None = None
    healed: bool = False

    def __str__(self) -> str:
        place = self.run or self.where
        at = "" if self.seq is None else f" at event {self.seq}"
        return f"{place}{at}: {self.what} ({self.where}){' — rebuilt' if self.healed else ''}"


Durability = Literal["power", "process"]
"""What a commit survives: power loss, or only the death of the process."""


class Transaction(Protocol):
    """A transaction on the store's own database, in which rows of an application and of the store commit together.

    `connection` is the database's own (a `sqlite3.Connection`, a `psycopg.Connection`), for the application's
    statements. Both methods are as the store's, but nothing holds before the transaction is committed.
    """

    @property
    def connection(self) -> Any: ...

    @property
    def is_open(self) -> bool:
        """Whether the transaction is still open: False when somebody ended it who should not have."""
        ...

    def append(self, items: Sequence[Append]) -> list[Head | LogError]: ...

    def deliver(self, deliveries: Sequence[Delivery]) -> list[Delivered | LogError]: ...


class Store(Protocol):
    """Keeps logs as bytes. Safe to share between threads; every method is one transaction."""

    @property
    def place(self) -> str:
        """Where it is, for messages to people."""
        ...

    @property
    def id(self) -> str:
        """The store's own id, bound into every genesis."""
        ...

    @property
    def secret_key(self) -> bytes:
        """The key under which secrets are digested."""
        ...

    @property
    def proves_life(self) -> bool:
        """Whether `lives` knows of a dead holder at once. Where it does not, leases have to end by time."""
        ...

    def now_us(self) -> int:
        """The time by the clock that leases end by, which need not be anybody's wall clock: leases on one machine end
        by time that only ever grows, so that setting the clock breaks none."""
        ...

    # the log ----------------------------------------------------------------------------------

    def append(self, items: Sequence[Append]) -> list[Head | LogError]:
        """Commit many appends at once. Each succeeds or is refused on its own, in order.

        An append whose outcome is already the head was committed before: it is acknowledged again.
        """
        ...

    def head(self, run: str) -> Head | None: ...

    def heads(self, *, after: int = 0, limit: int = READ_LIMIT) -> list[tuple[int, Head]]:
        """Heads in order of creation, each with its number, which is the cursor."""
        ...

    def read(self, run: str, *, after: int = 0, limit: int = READ_LIMIT, data: bool = True) -> list[Row]:
        """A run's own rows with seq > after. Without data only bodies are read, which is all a fold needs."""
        ...

    def row(self, run: str, seq: int) -> Row | None: ...

    def opening(self, run: str, *, fold: int) -> Opening | None:
        """All that is needed to go on with a run, in one read; None: there is no such run."""
        ...

    # transactions of others -------------------------------------------------------------------

    def transaction(self) -> AbstractContextManager[Transaction]:
        """Begin a transaction, for one thread: committed at the end, rolled back by any exception."""
        ...

    def joining(self, connection: Any) -> Transaction:
        """Take part in the transaction that is open on somebody's own connection; they commit it, or do not.

        StoreError if the connection is not to this store's database, or no transaction is open on it.
        """
        ...

    # values -----------------------------------------------------------------------------------

    def pieces(self, hashes: Collection[bytes]) -> Mapping[bytes, Blob]:
        """Stored values by hash. Absent: missing. Body None: erased."""
        ...

    def references(self, run: str) -> References: ...

    def refer(self, run: str, hashes: Collection[bytes], *, at: int, delivered: int) -> bool:
        """Write the references of a run's log and inbox anew, for verification found them wrong.

        False, and nothing is written, if its head is not at that seq or its inbox has not that many messages any more.
        """
        ...

    def sweep(self, *, limit: int = READ_LIMIT) -> int:
        """Delete values that nothing refers to, at most `limit` of them, and marks of runs that are gone;
        returns how many values went."""
        ...

    # snapshots (derived) ----------------------------------------------------------------------

    def snapshot(self, run: str, *, fold: int, at: int) -> Snapshot | None:
        """The newest snapshot of that fold version at or before a seq, without its pieces."""
        ...

    def snapshots(self, run: str) -> list[Snapshot]: ...

    def forget_snapshots(self, run: str) -> None: ...

    # marks (derived) --------------------------------------------------------------------------

    def unmarked(self, *, after: int = 0, limit: int = READ_LIMIT) -> list[Behind]:
        """Runs whose logs went on since they were marked, in order of creation."""
        ...

    def mark(self, items: Sequence[TermBatch]) -> None:
        """Write the marks of some runs. A run that is not marked up to `after` any more is passed over:
        somebody else was first."""
        ...

    def marked(
        self,
        all_of: Sequence[Collection[int]],
        *,
        since_us: int | None = None,
        until_us: int | None = None,
        before: TermPosition | None = None,
        limit: int = READ_LIMIT,
    ) -> list[TermPosition]:
        """Events that bear a term of each group, newest first, below a cursor; from `since_us` on, until `until_us`."""
        ...

    # leases -----------------------------------------------------------------------------------

    def lease(self, run: str, holder: str, *, seconds: float, handed: int | None = None) -> Head:
        """Take the run, raising its epoch; infinite seconds hold until released or dead.

        RunBusy while a holder lives and its time is not up, unless that holder handed the run over: `handed` is its
        epoch. RunUnknown if there is no such run.
        """
        ...

    def claim(
        self,
        holder: str,
        *,
        now_us: int,
        seconds: float,
        limit: int,
        agents: Collection[str] | None = None,
        room: Mapping[str, int] | None = None,
    ) -> list[Claimed]:
        """Take up to `limit` runs that are due and free, as `lease` would: the first that `due` would give.

        `agents` are those whose runs are wanted (None: all), and `room` says of some how many at the most.
        """
        ...

    def keep(self, holder: str, runs: Collection[str], *, seconds: float) -> dict[str, int]:
        """Keep those of some runs that a holder has and whose time is not up, from now on for this long.

        Returns them with their epochs: what the holder believes to have and is not among them was lost.
        """
        ...

    def release(self, run: str, *, epoch: int, holder: str | None = None, left: bool = False) -> None:
        """Let the run go, if it is still held at that epoch, and by that holder where one is named.

        With `left` it was left in the middle: the holder stays named, its time is up (at 0, which tells it from a
        lease that lapsed), and the run is due at once.
        """
        ...

    def lives(self, holder: str) -> bool:
        """Whether a holder may still be at work. False is proof that it is not."""
        ...

    # the inbox --------------------------------------------------------------------------------

    def deliver(self, deliveries: Sequence[Delivery]) -> list[Delivered | LogError]:
        """Put messages into inboxes and make their runs due. The first of an id wins; later ones are told of it."""
        ...

    def inbox(self, run: str, *, name: str | None = None, after: int = 0, limit: int = READ_LIMIT) -> list[Message]:
        """Messages not yet taken, oldest first."""
        ...

    def message(self, run: str, id: str) -> Message | None:  # noqa: A002
        """A message by its id, taken or not."""
        ...

    def messages(self, run: str) -> list[Message]:
        """Every message a run ever got, taken or not."""
        ...

    # finding ----------------------------------------------------------------------------------

    def owner(self, claim: UniqueRight) -> Owner | None: ...

    def claimed(self, run: str) -> dict[UniqueRight, int]:
        """What a run holds claims on, and the seqs that claimed."""
        ...

    def index(self, run: str) -> RunRow | None: ...

    def tags(self, run: str) -> set[str]:
        """The tags that a run is found by."""
        ...

    def reindex(self, run: str, index: RunIndex, *, at: int) -> bool:
        """Write the index anew from what the log says at that seq, and count the inbox anew.

        False, and nothing is written, if the head is somewhere else.
        """
        ...

    def runs(self, query: RunQuery, *, before: int | None = None, limit: int = 100) -> list[RunRow]:
        """Runs that match, newest first, below a cursor."""
        ...

    def standings(self, runs: Collection[str]) -> dict[str, RunStanding]:
        """How some runs stand, all at one time; those that are not there are left out."""
        ...

    def counts(self, query: RunQuery) -> dict[str, int]:
        """How many runs there are of each status, of those that match in all else."""
        ...

    def agents(self) -> list[str]:
        """The agents that have runs, by name, without those under which Killick keeps logs for itself."""
        ...

    def holders(self) -> list[Holder]:
        """Who names itself as the holder of runs, by name."""
        ...

    def due(self, now_us: int, *, limit: int = 100, agents: Collection[str] | None = None) -> list[RunRow]:
        """Runs that nobody is at work on and whose time to wake has come, or that were left in the middle: by priority,
        then by how long they have been due, then by number. Nothing that is over or quarantined.

        One that was left has been due since its last change; a paused one that was left waits for its time to wake.
        Whether a holder's time is up is for the store's own clock to say.
        """
        ...

    def soonest_us(self, *, agents: Collection[str] | None = None) -> int | None:
        """When the next run of some agents (None: any) is due by its time to wake, of those that name no holder."""
        ...

    def watch(self, ring: Callable[[str], None]) -> Callable[[], None]:
        """From now on call `ring`, in any thread, when a run may have become due, or will be sooner than it was, when
        it got a message, or when something was told to the feed: by any process.

        It is given the run's id, FEED_RANG for the feed, or "" where nothing is known. A hint and never the truth:
        rings may be missing or too many. Returns how to stop.
        """
        ...

    # the feed ---------------------------------------------------------------------------------

    def feed(
        self, *, after: int = 0, kinds: Collection[str] | None = None, limit: int = READ_LIMIT
    ) -> list[OutboxItem]:
        """Events that were told, after a position, in an order that nothing can slip into later."""
        ...

    def feed_end(self) -> int:
        """The position of the last event that was told; 0 at first."""
        ...

    def trim_feed(self, up_to: int) -> int:
        """Forget what was told up to a position, for everybody heard it; returns how many."""
        ...

    # keeping ----------------------------------------------------------------------------------

    def quarantine(self, run: str, reason: str | None) -> None:
        """Set a run apart, or with None let it back."""
        ...

    def quarantined(self, run: str) -> str | None: ...

    def repair(self, head: Head, *, keep: int, rows: Sequence[Row]) -> None:
        """Set aside a run's rows after `keep`, write these rows instead and move the head forward onto them."""
        ...

    def aside(self, run: str) -> list[Row]:
        """Rows that repairs set aside."""
        ...

    def remove(self, run: str) -> None:
        """Take a run out and leave a tombstone under its id. Refused while a fork stands on it."""
        ...

    def inspect(self, *, heal: bool = False) -> list[Problem]:
        """Re-read everything and report what is wrong in itself: rows that are not what was written, or are nobody's.

        With `heal`, derived rows that are nobody's are cleared away.
        """
        ...

    def conditions(self) -> list[Condition]:
        """What its promises rest on: versions, settings, where it lies; and what of that is wrong."""
        ...

    def close(self) -> None: ...


def is_held(store: Store, head: Head) -> bool:
    """Whether a live lease is on a run: it ends with its time or with its holder's life, whichever is first."""
    if head.holder is None or (head.lease_until_us is not None and head.lease_until_us <= store.now_us()):
        return False
    return store.lives(head.holder)


def lease_clock_us(clock: Clock) -> int:
    """The time by which leases end where all holders are on one machine: setting its clock breaks none."""
    return round(clock.monotonic() * 1_000_000)


def row_check(*columns: str | bytes | int | None) -> int:
    """A number that tells when a row outside the chain was changed."""
    return crc32(msgspec.json.encode(columns))
