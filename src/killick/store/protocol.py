"""The store interface: synchronous Protocols over bytes, and their records.

A store keeps rows, moves heads and refuses conflicting writes. It knows no event types, computes no hash chain and
decides nothing about runs; the log above it does.
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

STORE_FORMAT: Final = 5
"""The newest layout that this build reads and writes; opening an older one migrates it."""

READ_LIMIT: Final = 10_000
"""The maximum number of rows in one read."""


ENDED: Final = ("completed", "failed", "cancelled")
"""The statuses of ended runs. A message does not wake such a run."""


OWN_AGENTS: Final = "killick."
"""The name prefix of the agents of system logs."""

OWN_RUNS: Final = "killick:"
"""The id prefix of system logs that only an admin may see."""


def is_own(run: str) -> bool:
    """Returns whether an id is reserved for system logs."""
    return run == "seal" or run.startswith((OWN_RUNS, "trigger:", "hook:"))


FEED_RANG: Final = "killick:feed"
"""Notified instead of a run id when the outbox grows."""


HIDDEN_TAGS: Final = ("killick:", *OWN_TAGS)
"""Prefixes of internal tags."""


ASKS: Final = "killick:asks"
"""The tag of a run that may wait for a person: for an answer, or to resolve an unknown outcome."""


CRASHING: Final = "killick:crashing"
"""The tag of a run whose holders crashed since its last step ended."""

DIED_ALONE: Final = "killick:died_alone"
"""The tag of a run that crashed alone in its process, which explains the crashes that it shared."""


def shown_tags(tags: Sequence[str]) -> tuple[str, ...]:
    """Returns a run's tags without the internal ones."""
    return tuple(tag for tag in tags if not tag.startswith(HIDDEN_TAGS))


class Row(msgspec.Struct, frozen=True):
    """One stored event. `data` holds its values; the body holds their hash. None: no values, or erased."""

    seq: int
    body: bytes
    data: bytes | None
    hash: bytes


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The authority on a log's length and on its lease.

    `base` is the seq before the run's first own event: 0, or a fork's cut. A head names its holder while that holder
    works on the run. If the holder is dead or its lease expired, the run was abandoned and is due at once. A parked or
    ended run has no holder.
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
    """Makes an append create its run. With a holder, the creator has the lease at epoch 1."""

    parent: str | None = None
    holder: str | None = None
    lease_seconds: float = 60.0


class RunIndex(msgspec.Struct, frozen=True, kw_only=True):
    """The index entry of a run, derived from its log.

    `seen` is the number of the last inbox message that the writer had read. If more arrived since, the store makes the
    run due from the first of them, so that no message is missed.
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
    """One row of a listing. `number` is the cursor; runs are numbered in creation order.

    `delivered` counts the messages that a run ever received; -1: the count fails its checksum.
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
    """A listing's filter. Every given field must match.

    Times refer to a run's last change: at or after `since_us`, and before `until_us`. System logs, under agents named
    `killick.…`, are listed only for an explicit agent or tag.
    """

    status: tuple[str, ...] = ()
    agent: str | None = None
    tag: str | None = None
    since_us: int | None = None
    until_us: int | None = None
    contains: str | None = None
    """A part of the run's id, compared without ASCII case."""
    holders: tuple[str, ...] = ()
    """The run's head must name one of these holders."""


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """A lease holder. `until_us` is the earliest end of its leases, by the store's clock (None: no end); `lives` says
    whether it may still be working on any of them."""

    holder: str
    runs: int
    until_us: int | None
    lives: bool


class RunStanding(msgspec.Struct, frozen=True):
    """The status of a run: its head, its index status (None: no index), and the quarantine reason, if any."""

    head: Head
    status: str | None
    quarantined: str | None


class UniqueRight(msgspec.Struct, frozen=True):
    """A right that exists once in the store, by space and key."""

    space: str
    key: bytes


class Owner(msgspec.Struct, frozen=True):
    """The run and the event that claimed a right."""

    run: str
    seq: int


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """A message to a run. Deduplicated by id; an answer's id is that of its wait."""

    run: str
    id: str
    name: str
    body: bytes
    by: str | None
    at_us: int
    pieces: tuple[Blob, ...] = ()


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """A message in an inbox. `taken` is the seq of the event that consumed it, if any."""

    run: str
    number: int
    id: str
    name: str
    body: bytes
    by: str | None
    at_us: int
    taken: int | None = None


class Delivered(msgspec.Struct, frozen=True):
    """The result of a delivery: the stored message, and whether this delivery created it."""

    message: Message
    fresh: bool


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A cached fold at `seq`, valid only while fold version, seq and chain hash match."""

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
    """A search term, as a 64-bit number, at an event. `at_us` is that event's time."""

    term: int
    at_us: int
    seq: int


class TermBatch(msgspec.Struct, frozen=True, kw_only=True):
    """The search terms of a run's events between two seqs. `anew` drops all existing ones first."""

    run: str
    after: int
    up_to: int
    marks: tuple[TermRow, ...] = ()
    anew: bool = False


class Behind(msgspec.Struct, frozen=True, kw_only=True):
    """A run with events that are not indexed yet. `number` is the cursor; `base` is its head's."""

    number: int
    run: str
    base: int
    marked: int


class TermPosition(msgspec.Struct, frozen=True, order=True):
    """The position of an event with a term. Later events compare greater."""

    at_us: int
    number: int
    seq: int
    run: str = ""


class OutboxRow(msgspec.Struct, frozen=True):
    """An event for hooks, by its seq and kind."""

    seq: int
    kind: str


class OutboxItem(msgspec.Struct, frozen=True, kw_only=True):
    """An event in the outbox, which orders the events of all runs for hooks."""

    position: int
    run: str
    seq: int
    kind: str


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """A consistent read for resuming a run: the newest snapshot, and the run's own rows after it.

    Without a snapshot, all own rows. Rows beyond the head are included, so that damage is visible. Rows include their
    data, because the caller replays them next; a snapshot comes without its chunks.
    """

    head: Head
    quarantined: str | None
    snapshot: Snapshot | None
    rows: Sequence[Row]


class Claimed(msgspec.Struct, frozen=True, kw_only=True):
    """A claimed run: its head with the new lease, and its index. `left` is the holder that abandoned it, and
    `left_until_us` the end of that holder's lease, if known; 0: it released the run."""

    head: Head
    row: RunRow
    left: str | None = None
    left_until_us: int | None = None


class Condition(msgspec.Struct, frozen=True):
    """A precondition of a store's guarantees, and its violation, if any."""

    name: str
    value: str
    wrong: str | None = None


class Append(msgspec.Struct, frozen=True, kw_only=True):
    """One conditional write to one run. Atomic: applied completely, or refused completely.

    `pieces` are the values of the rows that the run may not have stored yet; the store deduplicates them. `takes` and
    `returns` are inbox numbers, `erases_rows` seqs whose data is erased, `erases_pieces` values whose bytes are erased.
    `tells` puts events of its rows into the outbox.

    `also` are appends to other runs, and `sends` messages, in the same transaction. If one of `also` is refused, all
    are, for that reason. Each must fit the state before any of them, and no two may claim the same right. The order is:
    the append, `also`, then the `sends` of all. A message to an unknown run, or with a known id, is skipped.

    An index with an ended status releases the lease in the same write.
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
        """Returns it and its companions. ValueError if a companion has its own, or two are to one run."""
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
        """Whether it takes, returns and erases nothing, and has no companions."""
        taken = self.claims or self.releases or self.takes or self.returns
        return not (taken or self.erases_rows or self.erases_pieces or self.also or self.sends)

    @property
    def is_bare(self) -> bool:
        """Whether it contains only events: the common case, which a store may optimize."""
        rows = self.rows
        if self.birth or self.pieces or self.index or self.snapshot or self.tells or not rows or not self.is_plain:
            return False
        return rows[0].seq == self.after + 1 and rows[-1].seq == self.after + len(rows)

    def joins(self, later: Append) -> bool:
        """Returns whether the run's next append may be merged into this one: no part of it could be refused separately.

        A snapshot needs the chunks of the previous one, and an append holds one snapshot.
        """
        return self.is_plain and later.is_plain and later.birth is None and later.snapshot is None

    def joined(self, later: Append) -> Append:
        """Merges the run's next append into this one."""
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
        """The head after this append."""
        return (self.rows[-1].seq, self.rows[-1].hash) if self.rows else (self.after, self.before)

    @property
    def size_bytes(self) -> int:
        """The approximate size, for back-pressure."""
        size = 0
        for row in self.rows:
            size += len(row.body) + len(row.data or b"")
        for piece in self.pieces:
            size += len(piece.body or b"")
        return size


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One problem found. A `healed` one was in derived data, which was rebuilt."""

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
"""What a commit survives: power loss, or only process death."""


class Transaction(Protocol):
    """A transaction on the store's own database, which commits application rows together with the store's.

    `connection` is the database's own (a `sqlite3.Connection`, a `psycopg.Connection`), for the application's
    statements. Both methods work as the store's, but take effect only at commit.
    """

    @property
    def connection(self) -> Any: ...

    @property
    def is_open(self) -> bool:
        """Whether the transaction is still open: False if the application's code ended it."""
        ...

    def append(self, items: Sequence[Append]) -> list[Head | LogError]: ...

    def deliver(self, deliveries: Sequence[Delivery]) -> list[Delivered | LogError]: ...


class Store(Protocol):
    """Keeps logs as bytes. Thread-safe; every method is one transaction."""

    @property
    def place(self) -> str:
        """The location, for messages."""
        ...

    @property
    def id(self) -> str:
        """The store's own id, bound into every genesis."""
        ...

    @property
    def secret_key(self) -> bytes:
        """The key for digests of secrets."""
        ...

    @property
    def proves_life(self) -> bool:
        """Whether `lives` detects a dead holder at once. If not, leases must expire by time."""
        ...

    def now_us(self) -> int:
        """The time of the lease clock. On one machine it is monotonic, so that setting the wall clock breaks no
        lease."""
        ...

    # the log ----------------------------------------------------------------------------------

    def append(self, items: Sequence[Append]) -> list[Head | LogError]:
        """Commits many appends at once. Each is accepted or refused on its own, in order.

        An append that was committed before is acknowledged again.
        """
        ...

    def head(self, run: str) -> Head | None: ...

    def heads(self, *, after: int = 0, limit: int = READ_LIMIT) -> list[tuple[int, Head]]:
        """Returns heads in creation order, each with its number, which is the cursor."""
        ...

    def read(self, run: str, *, after: int = 0, limit: int = READ_LIMIT, data: bool = True) -> list[Row]:
        """Returns a run's own rows with seq > after. Without data only bodies are read, which a fold needs."""
        ...

    def row(self, run: str, seq: int) -> Row | None: ...

    def opening(self, run: str, *, fold: int) -> Opening | None:
        """Returns the data for resuming a run in one read; None: unknown run."""
        ...

    # transactions of others -------------------------------------------------------------------

    def transaction(self) -> AbstractContextManager[Transaction]:
        """Begins a transaction for one thread: committed at the end, rolled back by any exception."""
        ...

    def joining(self, connection: Any) -> Transaction:
        """Joins the open transaction on the caller's own connection. The caller commits it.

        Raises StoreError if the connection is to another database, or has no open transaction.
        """
        ...

    # values -----------------------------------------------------------------------------------

    def pieces(self, hashes: Collection[bytes]) -> Mapping[bytes, Blob]:
        """Returns stored values by hash. Absent: missing. Body None: erased."""
        ...

    def references(self, run: str) -> References: ...

    def refer(self, run: str, hashes: Collection[bytes], *, at: int, delivered: int) -> bool:
        """Rewrites the references of a run's log and inbox after verification found them wrong.

        Returns False, and writes nothing, if the head or the inbox changed meanwhile.
        """
        ...

    def sweep(self, *, limit: int = READ_LIMIT) -> int:
        """Deletes at most `limit` unreferenced values, and search terms of removed runs. Returns the number of
        values."""
        ...

    # snapshots (derived) ----------------------------------------------------------------------

    def snapshot(self, run: str, *, fold: int, at: int) -> Snapshot | None:
        """Returns the newest snapshot of that fold version at or before a seq, without its chunks."""
        ...

    def snapshots(self, run: str) -> list[Snapshot]: ...

    def forget_snapshots(self, run: str) -> None: ...

    # marks (derived) --------------------------------------------------------------------------

    def unmarked(self, *, after: int = 0, limit: int = READ_LIMIT) -> list[Behind]:
        """Returns the runs with events that are not indexed yet, in creation order."""
        ...

    def mark(self, items: Sequence[TermBatch]) -> None:
        """Writes the search terms of some runs. Skips a run whose index position is no longer `after`."""
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
        """Returns events with a term of each group, newest first, below a cursor and within the times."""
        ...

    # leases -----------------------------------------------------------------------------------

    def lease(self, run: str, holder: str, *, seconds: float, handed: int | None = None) -> Head:
        """Takes the lease and raises the epoch. Infinite seconds: until released or dead.

        Raises RunBusy while a live holder's lease lasts, unless that holder handed the run over: `handed` is its epoch.
        Raises RunUnknown if there is no such run.
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
        """Leases up to `limit` due and free runs: the first that `due` would return.

        `agents` restricts the runs to these agents (None: all), and `room` limits the number for some of them.
        """
        ...

    def keep(self, holder: str, runs: Collection[str], *, seconds: float) -> dict[str, int]:
        """Renews a holder's unexpired leases on these runs.

        Returns the renewed runs with their epochs. A run that is missing was lost.
        """
        ...

    def release(self, run: str, *, epoch: int, holder: str | None = None, left: bool = False) -> None:
        """Releases the run, if it is still held at that epoch, and by that holder if given.

        With `left` the run was abandoned midway: the holder stays named, its lease ends (at 0, which distinguishes it
        from a lapsed lease), and the run is due at once.
        """
        ...

    def lives(self, holder: str) -> bool:
        """Returns whether a holder may still be alive. False is proof of death."""
        ...

    # the inbox --------------------------------------------------------------------------------

    def deliver(self, deliveries: Sequence[Delivery]) -> list[Delivered | LogError]:
        """Puts messages into inboxes and makes their runs due. The first with an id wins; later ones return it."""
        ...

    def inbox(self, run: str, *, name: str | None = None, after: int = 0, limit: int = READ_LIMIT) -> list[Message]:
        """Returns unconsumed messages, oldest first."""
        ...

    def message(self, run: str, id: str) -> Message | None:  # noqa: A002
        """Returns a message by its id, consumed or not."""
        ...

    def messages(self, run: str) -> list[Message]:
        """Returns every message that a run ever received."""
        ...

    # finding ----------------------------------------------------------------------------------

    def owner(self, claim: UniqueRight) -> Owner | None: ...

    def claimed(self, run: str) -> dict[UniqueRight, int]:
        """Returns the rights that a run holds, and the seqs that claimed them."""
        ...

    def index(self, run: str) -> RunRow | None: ...

    def tags(self, run: str) -> set[str]:
        """Returns a run's index tags."""
        ...

    def reindex(self, run: str, index: RunIndex, *, at: int) -> bool:
        """Rewrites the index from the log at that seq, and recounts the inbox.

        Returns False, and writes nothing, if the head moved.
        """
        ...

    def runs(self, query: RunQuery, *, before: int | None = None, limit: int = 100) -> list[RunRow]:
        """Returns matching runs, newest first, below a cursor."""
        ...

    def standings(self, runs: Collection[str]) -> dict[str, RunStanding]:
        """Returns the status of some runs in one consistent read, without unknown ones."""
        ...

    def counts(self, query: RunQuery) -> dict[str, int]:
        """Counts runs by status, of those that match in all else."""
        ...

    def agents(self) -> list[str]:
        """Returns the agents that have runs, by name, without those of system logs."""
        ...

    def holders(self) -> list[Holder]:
        """Returns the lease holders, by name."""
        ...

    def due(self, now_us: int, *, limit: int = 100, agents: Collection[str] | None = None) -> list[RunRow]:
        """Returns due runs: without a live holder, and past their wake time or abandoned. Ordered by priority, then by
        how long they have been due, then by number. Never an ended or quarantined run.

        An abandoned run is due since its last change; a paused abandoned run waits for its wake time. The store's clock
        decides whether a lease has expired.
        """
        ...

    def soonest_us(self, *, agents: Collection[str] | None = None) -> int | None:
        """Returns the earliest wake time among the unheld runs of some agents (None: any)."""
        ...

    def watch(self, ring: Callable[[str], None]) -> Callable[[], None]:
        """Calls `ring`, in any thread, when a run may have become due or wakes earlier, when it received a message, or
        when the outbox grew: by any process.

        The argument is the run's id, FEED_RANG for the outbox, or "" if unknown. A notification is a hint: it may be
        missing or superfluous. Returns a function that stops it.
        """
        ...

    # the feed ---------------------------------------------------------------------------------

    def feed(
        self, *, after: int = 0, kinds: Collection[str] | None = None, limit: int = READ_LIMIT
    ) -> list[OutboxItem]:
        """Returns outbox events after a position. No later event can appear before a returned one."""
        ...

    def feed_end(self) -> int:
        """Returns the position of the last outbox event; 0 at first."""
        ...

    def trim_feed(self, up_to: int) -> int:
        """Deletes outbox events up to a position, which all hooks received. Returns their number."""
        ...

    # keeping ----------------------------------------------------------------------------------

    def quarantine(self, run: str, reason: str | None) -> None:
        """Quarantines a run, or with None ends its quarantine."""
        ...

    def quarantined(self, run: str) -> str | None: ...

    def repair(self, head: Head, *, keep: int, rows: Sequence[Row]) -> None:
        """Moves a run's rows after `keep` aside, writes these rows instead and moves the head onto them."""
        ...

    def aside(self, run: str) -> list[Row]:
        """Returns the rows that repairs moved aside."""
        ...

    def remove(self, run: str) -> None:
        """Removes a run and leaves a tombstone under its id. Refused while a fork depends on it."""
        ...

    def inspect(self, *, heal: bool = False) -> list[Problem]:
        """Re-reads everything and reports damaged or unowned rows.

        With `heal`, unowned derived rows are deleted.
        """
        ...

    def conditions(self) -> list[Condition]:
        """Checks the preconditions of the store's guarantees: versions, settings, location."""
        ...

    def close(self) -> None: ...


def is_held(store: Store, head: Head) -> bool:
    """Returns whether a run has a live lease. It ends with its time or with its holder's life, whichever is first."""
    if head.holder is None or (head.lease_until_us is not None and head.lease_until_us <= store.now_us()):
        return False
    return store.lives(head.holder)


def lease_clock_us(clock: Clock) -> int:
    """Returns the lease clock for holders on one machine, which setting the wall clock does not change."""
    return round(clock.monotonic() * 1_000_000)


def row_check(*columns: str | bytes | int | None) -> int:
    """Returns a checksum for a row outside the chain."""
    return crc32(msgspec.json.encode(columns))
