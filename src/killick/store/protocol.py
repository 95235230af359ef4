"""The store interface: synchronous Protocols over bytes, and their records.

A store keeps rows, moves heads and refuses conflicting writes. It knows no event types, computes no hash chain and
decides nothing about runs; the log above it does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from killick.clock import Clock
from killick.errors import LogError
from killick.model.chunks import Blob
from killick.model.cipher import Cipher, Place
from killick.model.events import RunStarted
from killick.store import limits, records
from killick.store.slots import Slot


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

    def append(self, items: Sequence[records.Append]) -> list[records.Head | LogError]: ...

    def deliver(self, deliveries: Sequence[records.Delivery]) -> list[records.Delivered | LogError]: ...


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

    def append(self, items: Sequence[records.Append]) -> list[records.Head | LogError]:
        """Commits many appends at once. Each is accepted or refused on its own, in order.

        An append that was committed before is acknowledged again.
        """
        ...

    def head(self, run: str) -> records.Head | None: ...

    def heads(self, *, after: int = 0, limit: int = records.READ_LIMIT) -> list[tuple[int, records.Head]]:
        """Returns heads in creation order, each with its number, which is the cursor."""
        ...

    def read(
        self, run: str, *, after: int = 0, limit: int = records.READ_LIMIT, data: bool = True
    ) -> list[records.Row]:
        """Returns a run's own rows with seq > after. Without data only bodies are read, which a fold needs."""
        ...

    def row(self, run: str, seq: int) -> records.Row | None: ...

    def opening(self, run: str, *, fold: int) -> records.Opening | None:
        """Returns the data for resuming a run in one read; None: unknown run."""
        ...

    # transactions of others -------------------------------------------------------------------

    def transaction(self) -> AbstractContextManager[Transaction]:
        """Begins a transaction for one thread: committed at the end, rolled back by any exception."""
        ...

    def join(self, connection: Any) -> Transaction:
        """Joins the open transaction on the caller's own connection. The caller commits it.

        Raises StoreError if the connection is to another database, or has no open transaction.
        """
        ...

    # values -----------------------------------------------------------------------------------

    def pieces(self, hashes: Collection[bytes]) -> Mapping[bytes, Blob]:
        """Returns stored values by hash. Absent: missing. Body None: erased."""
        ...

    def references(self, run: str) -> records.References: ...

    def set_references(self, run: str, hashes: Collection[bytes], *, at: int, delivered: int) -> bool:
        """Rewrites the references of a run's log and inbox after verification found them wrong.

        Returns False, and writes nothing, if the head or the inbox changed meanwhile.
        """
        ...

    def sweep(self, *, limit: int = records.READ_LIMIT) -> int:
        """Deletes at most `limit` unreferenced values, and search terms of removed runs. Returns the number of
        values."""
        ...

    # snapshots (derived) ----------------------------------------------------------------------

    def snapshot(self, run: str, *, fold: int, at: int) -> records.Snapshot | None:
        """Returns the newest snapshot of that fold version at or before a seq, without its chunks."""
        ...

    def snapshots(self, run: str) -> list[records.Snapshot]: ...

    def forget_snapshots(self, run: str) -> None: ...

    # search terms (derived) -------------------------------------------------------------------

    def unindexed(self, *, after: int = 0, limit: int = records.READ_LIMIT) -> list[records.UnindexedRun]:
        """Returns the runs with events that are not indexed yet, in creation order."""
        ...

    def index_terms(self, items: Sequence[records.TermBatch]) -> None:
        """Writes the search terms of some runs. Skips a run whose index position is no longer `after`."""
        ...

    def search(self, query: records.IndexQuery) -> list[records.TermPosition]:
        """Returns the events of a query, newest first."""
        ...

    # leases -----------------------------------------------------------------------------------

    def lease(self, run: str, holder: str, *, seconds: float, handed: int | None = None) -> records.Head:
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
    ) -> list[records.Claimed]:
        """Leases up to `limit` due and free runs: the first that `due` would return, if it began with the lane after
        that of the last claimed run.

        `agents` restricts the runs to these agents (None: all), and `room` limits the number for some of them.
        """
        ...

    def renew(self, holder: str, runs: Collection[str], *, seconds: float) -> dict[str, int]:
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

    # rate limits ------------------------------------------------------------------------------

    def take_tokens(self, buckets: Sequence[limits.TokenBucket]) -> int:
        """Takes a token of each bucket and returns 0, or takes none and returns the microseconds until all have one.

        All processes share the buckets, by the lease clock.
        """
        ...

    # the inbox --------------------------------------------------------------------------------

    def deliver(self, deliveries: Sequence[records.Delivery]) -> list[records.Delivered | LogError]:
        """Puts messages into inboxes and makes their runs due. The first with an id wins; later ones return it.

        A message to a renewed run goes to the last renewal. DeliveryRefused: that has ended, or the slot that the
        delivery names does not allow it. Both are decided in the transaction of the delivery.
        """
        ...

    def inbox(
        self, run: str, *, name: str | None = None, after: int = 0, limit: int = records.READ_LIMIT
    ) -> list[records.Message]:
        """Returns unconsumed messages, oldest first."""
        ...

    def message(self, run: str, id: str) -> records.Message | None:  # noqa: A002
        """Returns a message by its id, consumed or not."""
        ...

    def messages(self, run: str) -> list[records.Message]:
        """Returns every message that a run ever received."""
        ...

    def slots(self, run: str) -> list[Slot]:
        """Returns the slots of a run, by name."""
        ...

    # finding ----------------------------------------------------------------------------------

    def owned(self, space: str, prefix: bytes = b"") -> dict[records.UniqueRight, records.Owner]:
        """Returns the claimed rights of a space whose keys begin with a prefix, in the order of their keys."""
        ...

    def claimed(self, run: str) -> dict[records.UniqueRight, int]:
        """Returns the rights that a run holds, and the seqs that claimed them."""
        ...

    def index(self, run: str) -> records.RunRow | None: ...

    def tags(self, run: str) -> set[str]:
        """Returns a run's index tags."""
        ...

    def reindex(
        self, run: str, index: records.RunIndex, *, at: int, slots: Collection[Slot] | None = None,
        delivered: int | None = None,
    ) -> bool:  # fmt: skip
        """Rewrites the index from the log at that seq, and with `slots` those of the run; recounts the inbox.

        Returns False, and writes nothing, if the head moved, or the inbox got another number of messages.
        """
        ...

    def runs(self, query: records.RunQuery, *, before: int | None = None, limit: int = 100) -> list[records.RunRow]:
        """Returns matching runs, newest first, below a cursor."""
        ...

    def asking(self, now_us: int, *, after: records.Urgency | None = None, limit: int) -> list[records.RunRow]:
        """Returns the waiting and running runs that may have open questions, by `urgency_of`, after a sort key."""
        ...

    def statuses(self, runs: Collection[str]) -> dict[str, records.RunStatus]:
        """Returns the status of some runs in one consistent read, without unknown ones."""
        ...

    def counts(self, query: records.RunQuery) -> dict[str, int]:
        """Counts runs by status, of those that match in all else."""
        ...

    def agents(self) -> list[str]:
        """Returns the agents that have runs, by name, without those of system logs."""
        ...

    def holders(self) -> list[records.Holder]:
        """Returns the lease holders, by name."""
        ...

    def due(self, now_us: int, *, limit: int = 100, agents: Collection[str] | None = None) -> list[records.RunRow]:
        """Returns due runs: without a live holder, and past their wake time or abandoned. Ordered by priority, then one
        of each lane in turn; in a lane by how long they have been due, then by number. Never an ended or quarantined
        run.

        An abandoned run is due since its last change; a paused abandoned run waits for its wake time. The store's clock
        decides whether a lease has expired.
        """
        ...

    def soonest_us(self, *, agents: Collection[str] | None = None) -> int | None:
        """Returns the earliest wake time among the unheld runs of some agents (None: any)."""
        ...

    def watch(self, callback: Callable[[str], None]) -> Callable[[], None]:
        """Calls `callback`, in any thread, when a run may have become due or wakes earlier, when it received a message,
        or when the outbox grew: by any process.

        The argument is the run's id, OUTBOX_CHANGED for the outbox, or "" if unknown. A notification is a hint: it may
        be missing or superfluous. Returns a function that stops it.
        """
        ...

    # the outbox -------------------------------------------------------------------------------

    def outbox(
        self, *, after: int = 0, kinds: Collection[str] | None = None, limit: int = records.READ_LIMIT
    ) -> list[records.OutboxItem]:
        """Returns outbox events after a position. No later event can appear before a returned one."""
        ...

    def outbox_end(self) -> int:
        """Returns the position of the last outbox event; 0 at first."""
        ...

    def trim_outbox(self, up_to: int) -> int:
        """Deletes outbox events up to a position, which all hooks received. Returns their number."""
        ...

    # maintenance ------------------------------------------------------------------------------

    def quarantine(self, run: str, reason: str | None) -> None:
        """Quarantines a run, or with None ends its quarantine."""
        ...

    def quarantined(self, run: str) -> str | None: ...

    def repair(self, head: records.Head, *, keep: int, rows: Sequence[records.Row]) -> None:
        """Displaces a run's rows after `keep`, writes these rows instead and moves the head onto them."""
        ...

    def restore(
        self, run: str, rows: Sequence[records.Row], pieces: Sequence[Blob], messages: Sequence[records.InboxRow] = ()
    ) -> None:
        """Writes damaged or missing rows, values and messages again. The head stays; the caller compared every hash."""
        ...

    def displaced(self, run: str) -> list[records.Row]:
        """Returns the rows that repairs displaced from the log."""
        ...

    def remove(self, run: str, *, at: int | None = None, delivered: int | None = None) -> bool:
        """Removes a run and leaves a tombstone under its id. Refused while a fork depends on it.

        Returns False, and writes nothing, if its head is not at that seq, or its inbox got another number of messages.
        """
        ...

    def purge(self) -> bool:
        """Removes erased bytes from the write-ahead log; False while a reader blocks that."""
        ...

    def inspect(self, *, heal: bool = False) -> list[records.Problem]:
        """Re-reads everything and reports damaged or unowned rows.

        With `heal`, unowned derived rows are deleted.
        """
        ...

    def conditions(self) -> list[records.Condition]:
        """Checks the preconditions of the store's guarantees: versions, settings, location."""
        ...

    def close(self) -> None: ...


class Keys(Protocol):
    """The data keys of an encrypted store, by name.

    `started` adds the name to a run's first event, `key_of` finds it by run, `key_for` makes one for a data subject's
    new run. `cipher` raises KeyRefused if the key was destroyed. `vault` encrypts the files of workspaces: those of a
    data subject have a vault with a name. It returns None if the key was destroyed. `fence` returns the condition of an
    append that makes a run live under a key: no append to the key's log meanwhile. `root_of` finds the first run in the
    chain of renewals, for which messages are sealed. `proves` compares the MAC of an event, which those of a log that
    `keeps_plain` lack. `own` is the store's key, by which snapshots have theirs.
    """

    def vault(self, name: str | None) -> Cipher | None: ...
    def vault_name(self, key: str) -> str | None: ...
    def started(self, event: RunStarted) -> RunStarted: ...
    def key_of(self, run: str) -> str: ...
    def key_for(self, subject: str | None, run: str) -> str: ...
    def cipher(self, key: str) -> Cipher: ...
    def fence(self, key: str) -> records.Append | None: ...
    @property
    def own(self) -> Cipher: ...
    def root_of(self, run: str) -> str: ...
    def keeps_plain(self, run: str) -> bool: ...
    def proves(self, place: Place, body: bytes) -> bool: ...


def lease_all(store: Store, runs: Sequence[str], holder: str, *, seconds: float) -> list[records.Head | LogError]:
    """Takes the leases of runs, in one write where the store can; returns the head or the refusal of each."""
    if (together := getattr(store, "lease_all", None)) is not None:
        done: list[records.Head | LogError] = together(runs, holder, seconds=seconds)
        return done
    leased = list[records.Head | LogError]()
    for run in runs:
        try:
            leased.append(store.lease(run, holder, seconds=seconds))
        except LogError as refused:
            leased.append(refused)
    return leased


def rebuild(store: Store) -> list[records.Problem]:
    """Writes the damaged tables of a store again, with the rows that can be read, where a store keeps its own pages.

    Returns what it did with each table, and the runs that it lost.
    """
    found: Callable[[], list[records.Problem]] = getattr(store, "rebuild", list)
    return found()


def is_tagged(store: Store, tag: str) -> bool:
    """Returns whether a run has a tag, by a read of its own where the store has one."""
    if (found := getattr(store, "is_tagged", None)) is not None:
        return bool(found(tag))
    return bool(store.runs(records.RunQuery(tag=tag), limit=1))


def keys_of(store: Store) -> Keys | None:
    """Returns the keys of an encrypted store; None: its values are in clear."""
    found: Keys | None = getattr(store, "keys", None)
    return found


def raw_store(store: Store) -> Store:
    """Returns the store itself, whose reads return what is stored: neither decrypted nor compared with the chain."""
    while (below := getattr(store, "raw", None)) is not None:
        store = below
    return store


def opened(store: Store, run: str, seq: int, data: bytes) -> bytes | None:
    """Returns an event's data in clear, as far as the store has its key; None if that was destroyed."""
    found: Callable[[str, int, bytes], bytes | None] | None = getattr(store, "opened", None)
    return data if found is None else found(run, seq, data)


def opened_message(store: Store, message: records.Message | records.Delivery) -> bytes | None:
    """Returns a message's body in clear, as far as the store has its key; None if that was destroyed."""
    found: Callable[[records.Message | records.Delivery], bytes | None] | None = getattr(store, "opened_message", None)
    return message.body if found is None else found(message)


def opened_piece(store: Store, piece: Blob) -> Blob:
    """Returns a stored chunk in clear, as far as the store has its key; erased if that was destroyed."""
    found: Callable[[Blob], Blob] | None = getattr(store, "opened_piece", None)
    return piece if found is None else found(piece)


def is_held(store: Store, head: records.Head) -> bool:
    """Returns whether a run has a live lease. It ends with its time or with its holder's life, whichever is first."""
    if head.holder is None or (head.lease_until_us is not None and head.lease_until_us <= store.now_us()):
        return False
    return store.lives(head.holder)


def holders_of(leases: Iterable[tuple[str, int | None]], now_us: int) -> list[records.Holder]:
    """Returns the holders of leases, by name. A lease without an end is `None`."""
    held: defaultdict[str, list[int | None]] = defaultdict(list)
    for holder, until_us in leases:
        held[holder].append(until_us)
    return [
        records.Holder(
            holder=holder, runs=len(ends), until_us=min((end for end in ends if end is not None), default=None),
            lives=any(end is None or end > now_us for end in ends),
        )
        for holder, ends in sorted(held.items())
    ]  # fmt: skip


def lease_clock_us(clock: Clock) -> int:
    """Returns the lease clock for holders on one machine, which setting the wall clock does not change."""
    return round(clock.monotonic() * 1_000_000)
