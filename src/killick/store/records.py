"""The records that a store reads and writes, and the names that Killick keeps for itself. Does no I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Final, Literal, TypeVar
from zlib import crc32

import msgspec

from killick.model.chunks import Blob
from killick.model.facts import OWN_AGENTS as OWN_AGENTS
from killick.model.facts import OWN_TAGS
from killick.store.slots import NO_SLOT, RENEWED_SLOT, Slot

STORE_FORMAT: Final = 8
"""The layout that this build reads and writes. Opening an older one migrates it, if a release wrote that."""

READ_LIMIT: Final = 10_000
"""The maximum number of rows in one read."""

ENDED: Final = ("completed", "failed", "cancelled")
"""The statuses of ended runs. A message does not wake such a run."""

OWN_RUNS: Final = "killick:"
"""The id prefix of system logs that only an admin may see."""


def is_own(run: str) -> bool:
    """Returns whether an id is reserved for system logs."""
    return run == "seal" or run.startswith((OWN_RUNS, "trigger:", "hook:"))


OUTBOX_CHANGED: Final = "killick:feed"
"""Notified instead of a run id when the outbox grows."""

HIDDEN_TAGS: Final = ("killick:", *OWN_TAGS)
"""Prefixes of internal tags."""

ASKS: Final = "killick:asks"
"""The tag of a run that may wait for a person: for an answer, or to resolve an unknown outcome."""

ASKING: Final = ("waiting", "running")
"""The statuses of runs whose questions are open."""

COMMAND: Final = "killick.command"
"""The name of a message with a command, to the holder of a run."""

CRASHING: Final = "killick:crashing"
"""The tag of a run whose holders crashed since its last step ended."""

DIED_ALONE: Final = "killick:died_alone"
"""The tag of a run that crashed alone in its process, which explains the crashes that it shared."""

SUBJECT: Final = "killick:subject:"
"""The prefix of the tag of a run under the key of a data subject; the key's owner follows."""

KEY_DESTROYED: Final = "the key of its data subject was destroyed, so no worker can continue it"
"""Why an open run of an erased subject is quarantined."""

STORE_OWNER: Final = "A" * 16
"""The owner of the store's own key, as a key's name begins with it."""

FAIR: Final = "fair:"
"""The prefix of the tag with a run's fairness key: due runs of one priority take turns by it."""

LANES: Final = 64


def lane_of(tags: Sequence[str]) -> int:
    """Returns the lane in which a run with these tags is due: 0 without a fairness key.

    Keys share a fixed number of lanes (stochastic fair queueing), so that a claim looks at no more of them.
    """
    key = next((tag for tag in tags if tag.startswith(FAIR)), None)
    return 0 if key is None else 1 + crc32(key.encode()) % (LANES - 1)


T = TypeVar("T")


def in_turns(found: Iterable[tuple[RunRow, int, T]], after: int) -> list[tuple[RunRow, int, T]]:
    """Returns due runs, each with the time since which it is due, in the order in which they are claimed: by priority;
    then a run of each lane in turn, beginning after a lane; in a lane by age."""
    turns = Counter[tuple[int, int]]()

    def place(one: tuple[RunRow, int, T]) -> tuple[int, ...]:
        row, since, _ = one
        turns[row.priority, row.lane] += 1
        return -row.priority, turns[row.priority, row.lane], (row.lane - after - 1) % LANES, since, row.number

    return sorted(sorted(found, key=lambda one: (one[1], one[0].number)), key=place)


_TAGS: Final = msgspec.json.Decoder(tuple[str, ...])


def tags_of(text: str) -> tuple[str, ...]:
    """Decodes the stored tags of a run. Damaged ones are shown as they are: verification rewrites them from the log."""
    try:
        return _TAGS.decode(text)
    except msgspec.DecodeError:
        return (text,)


def shown_tags(tags: Sequence[str]) -> tuple[str, ...]:
    """Returns a run's tags without the internal ones."""
    return tuple(tag for tag in tags if not tag.startswith(HIDDEN_TAGS))


class Row(msgspec.Struct, frozen=True, gc=False):
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

    @property
    def lane(self) -> int:
        return lane_of(self.tags)


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

    @property
    def lane(self) -> int:
        return lane_of(self.tags)


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
    quarantined: bool = False
    """Only runs in quarantine."""


Urgency = tuple[int, int, int, int]
"""The sort key of a run in the inbox: its deadline, its negated priority, its last change, its number."""

NO_DEADLINE: Final = 1 << 62


def urgency_of(row: RunRow, now_us: int) -> Urgency:
    """Returns a run's sort key. First the runs whose log must be read, because they are executed or have a message;
    then by deadline; last those whose deadline has passed, which continue by themselves."""
    when = NO_DEADLINE if row.wake_at_us is None else row.wake_at_us
    if when <= now_us:
        when = 0 if row.delivered else NO_DEADLINE + 1
    return 0 if row.status == "running" else when, -row.priority, row.changed_at_us, row.number


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """A lease holder. `until_us` is the earliest end of its leases, by the store's clock (None: no end); `lives` says
    whether it may still be working on any of them."""

    holder: str
    runs: int
    until_us: int | None
    lives: bool


class RunStatus(msgspec.Struct, frozen=True):
    """A run's head, its index status (None: no index), why it is quarantined, and the count of its messages."""

    head: Head
    status: str | None
    quarantined: str | None
    delivered: int


class UniqueRight(msgspec.Struct, frozen=True):
    """A right that exists once in the store, by space and key."""

    space: str
    key: bytes


class Owner(msgspec.Struct, frozen=True):
    """The run and the event that claimed a right."""

    run: str
    seq: int


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """A message to a run. Deduplicated by id, over all renewals of the run; an answer's id is that of its wait.

    It goes to the last renewal of the run, and is refused if that has ended, unless it is `exact`: meant for this log
    in any state. With `slot` it is accepted only as that slot allows.

    With `waits_for`, in an append's `sends`: to the oldest run with this tag that is not due yet, whatever `run` says.
    """

    run: str
    id: str
    name: str
    body: bytes
    by: str | None
    at_us: int
    pieces: tuple[Blob, ...] = ()
    waits_for: str | None = None
    slot: Slot | None = None
    exact: bool = False


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """A message in an inbox. `taken` is the seq of the event that consumed it. `intact`: it fits its checksum."""

    run: str
    number: int
    id: str
    name: str
    body: bytes
    by: str | None
    at_us: int
    taken: int | None = None
    intact: bool = True


class InboxRow(msgspec.Struct, frozen=True):
    """A message as a store keeps it: with the first run of its chain of renewals, and the hashes of its chunks."""

    message: Message
    root: str | None
    pieces: tuple[bytes, ...] = ()


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
    """The search terms of a run's events between two seqs. `reset` drops all existing ones first."""

    run: str
    after: int
    up_to: int
    terms: tuple[TermRow, ...] = ()
    reset: bool = False


class UnindexedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run with events that are not indexed yet. `number` is the cursor; `base` is its head's."""

    number: int
    run: str
    base: int
    indexed_to: int


class TermPosition(msgspec.Struct, frozen=True, order=True):
    """The position of an event with a term. Later events compare greater."""

    at_us: int
    number: int
    seq: int
    run: str = ""


Key = tuple[int, int, int]
"""at_us, number, seq: time order, equal for all search terms of an event."""

LAST: Final = (1 << 63) - 1
"""Later than any time, and more than any number."""


class IndexQuery(msgspec.Struct, frozen=True):
    """Asks for the events with a term of each group, within the times and below a cursor."""

    all_of: Sequence[Collection[int]]
    since_us: int | None = None
    until_us: int | None = None
    before: TermPosition | None = None
    limit: int = READ_LIMIT

    @property
    def start(self) -> Key:
        """Where the answer may begin."""
        first = (LAST, LAST, LAST) if self.until_us is None else (self.until_us, 0, -1)
        before = self.before
        return first if before is None else min(first, (before.at_us, before.number, before.seq - 1))


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
    """A consistent read for resuming a run: the newest snapshot, without its chunks, and the run's own rows after it,
    with their data. Without a snapshot, all own rows. Rows beyond the head are included, so that damage is visible.
    `intact`: the head fits its checksum."""

    head: Head
    quarantined: str | None
    snapshot: Snapshot | None
    rows: Sequence[Row]
    intact: bool = True


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


ERASED_BODY: Final = b'{"$erased":""}'
"""The body of an erased message. It names no hash, by which a short one could be guessed."""


class InboxRead(msgspec.Struct, frozen=True):
    """A condition of an append: its writer knows the messages of these names up to this number, and there is none after
    it."""

    number: int
    names: tuple[str, ...]


class Append(msgspec.Struct, frozen=True, kw_only=True):
    """One conditional write to one run. Atomic: applied completely, or refused completely.

    `pieces` are the values of the rows that the run may not have stored yet; the store deduplicates them. `takes` and
    `returns` are inbox numbers, `erases_rows` seqs whose data is erased, `erases_messages` inbox numbers whose body is
    erased, `erases_pieces` values whose bytes are erased. `outbox` puts events of its rows into the outbox.

    `also` are appends to other runs, and `sends` messages, in the same transaction. If one of `also` is refused, all
    are, for that reason. Each must fit the state before any of them, and no two may claim the same right. The order is:
    the append, `also`, then the `sends` of all. A message to an unknown or ended run, or with a known id, is skipped.

    `slots` are those that it writes or removes, `gives` the places that it gives back, if the token is still the same.
    With a slot RENEWED, all messages in the inbox that it does not take move to that run. With `inbox_read` it is
    refused if such a message came meanwhile.

    An index with an ended status releases the lease in the same write.
    """

    run: str
    after: int
    before: bytes
    epoch: int
    rows: tuple[Row, ...] = ()
    create: CreateRun | None = None
    pieces: tuple[Blob, ...] = ()
    index: RunIndex | None = None
    takes: tuple[int, ...] = ()
    returns: tuple[int, ...] = ()
    claims: tuple[UniqueRight, ...] = ()
    releases: tuple[UniqueRight, ...] = ()
    snapshot: Snapshot | None = None
    erases_rows: tuple[int, ...] = ()
    erases_messages: tuple[int, ...] = ()
    erases_pieces: tuple[bytes, ...] = ()
    outbox: tuple[OutboxRow, ...] = ()
    also: tuple[Append, ...] = ()
    sends: tuple[Delivery, ...] = ()
    slots: tuple[Slot, ...] = ()
    gives: tuple[Slot, ...] = ()
    inbox_read: InboxRead | None = None

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
    def renewed_as(self) -> str | None:
        """The run in which this one continues, if the append renews it."""
        return next((slot.token for slot in self.slots if slot.name == RENEWED_SLOT and slot.places != NO_SLOT), None)

    @property
    def is_plain(self) -> bool:
        """Whether it takes, returns and erases nothing, has no companions, and leaves the inbox aside."""
        taken = self.claims or self.releases or self.takes or self.returns or self.gives or self.inbox_read
        return not (taken or self.erases_rows or self.erases_messages or self.erases_pieces or self.also or self.sends)

    @property
    def is_bare(self) -> bool:
        """Whether it contains only events: the common case, which a store may optimize."""
        rows = self.rows
        if not rows or msgspec.structs.astuple(self)[_ROWS_ALONE:] != _NO_OTHERS:
            return False
        return rows[0].seq == self.after + 1 and rows[-1].seq == self.after + len(rows)

    def joins(self, later: Append) -> bool:
        """Returns whether the run's next append may be merged into this one: no part of it could be refused separately.

        A snapshot needs the chunks of the previous one, and an append holds one snapshot.
        """
        return self.is_plain and later.is_plain and later.create is None and later.snapshot is None

    def joined(self, later: Append) -> Append:
        """Merges the run's next append into this one."""
        return msgspec.structs.replace(
            self,
            epoch=later.epoch,
            rows=self.rows + later.rows,
            pieces=self.pieces + later.pieces,
            index=later.index or self.index,
            snapshot=later.snapshot or self.snapshot,
            outbox=self.outbox + later.outbox,
            slots=self.slots + later.slots,
        )

    @property
    def last(self) -> tuple[int, bytes]:
        """The head after this append."""
        return (self.rows[-1].seq, self.rows[-1].hash) if self.rows else (self.after, self.before)

    def is_committed(self, head: Head) -> bool:
        """Returns whether this append was already committed and its acknowledgement lost. Of two callers that create
        the same run with the same event, only the current holder counts as its creator."""
        made = self.create is None or (self.create.holder is not None and self.create.holder == head.holder)
        return made and bool(self.rows) and (head.seq, head.hash) == self.last

    @property
    def size_bytes(self) -> int:
        """The approximate size, for back-pressure."""
        size = 0
        for row in self.rows:
            size += len(row.body) + len(row.data or b"")
        for piece in self.pieces:
            size += len(piece.body or b"")
        return size


def side_by_side(items: Sequence[Append]) -> tuple[Append, ...]:
    """Returns the companions of an append with their own companions, each run once."""
    flat = [each for item in items for each in (msgspec.structs.replace(item, also=()), *item.also)]
    return tuple({item.run: item for item in reversed(flat)}.values())[::-1]


def refuse_misnumbered(items: Sequence[Append]) -> None:
    """Raises ValueError if the rows of an append do not follow its head one by one."""
    for item in items:
        for one in item.group:
            for seq, row in enumerate(one.rows, one.after + 1):
                if row.seq != seq:
                    raise ValueError(f"{one.run}: rows must be numbered one by one after {one.after}")


_ROWS_ALONE: Final = Append.__struct_fields__.index("rows") + 1
_NO_OTHERS: Final = Append.__struct_defaults__[1:]
"""The other parts of an append that has rows alone."""


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


def row_check(*columns: str | bytes | int | None) -> int:
    """Returns a checksum for a row outside the chain."""
    return crc32(msgspec.json.encode(columns))
