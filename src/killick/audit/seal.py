"""Seals: the state of every log, in one append-only Merkle tree with a signed root. No key is stored.

A seal is an event of the internal log `seal`. It adds an entry for each run that changed since the last seal: its seq,
its hash and the root over its leaves. The checkpoint, which is the signed root, is kept outside the store.
docs/file-formats.md describes the files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from killick.audit.checkpoint import Listed, SealedRun, checkpoint, entries_in, frontier, key_id, private_key, signed
from killick.engine.control.inbox import delivery
from killick.errors import HeadMoved, KillickError, ProofBroken, RunExists, SealRefused, ValueErased
from killick.log.ancestry import segments
from killick.log.log import Log
from killick.log.paging import heads, pages
from killick.log.progress import Progress, silent
from killick.log.writer import Entry, RunLog
from killick.model import event_codec, hashing, system_events
from killick.model import events as e
from killick.model.chunks import unpack
from killick.model.merkle import Frontier
from killick.store.protocol import Store, raw_store
from killick.store.records import OWN_AGENTS, Head, Message, Row
from killick.type_init import ready

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

SEALS: Final = "seal"
"""The log of the seals."""

AGENT: Final = f"{OWN_AGENTS}seal"
PRUNED: Final = f"{OWN_AGENTS}pruned"
"""The name of the messages in which a prune lists its archived runs for the next seal."""

GAP: Final = hashing.leaf(b"")
"""The leaf of an event that a repair removed."""

_REPAIRED: Final = b'{"kind":"run.repaired"'
_TAKEN: Final = b'{"kind":"message.taken"'
_encode: Final = msgspec.json.Encoder().encode


# entries ------------------------------------------------------------------------------------------


class Known(msgspec.Struct, frozen=True, array_like=True):
    """The state that the next seal needs of a run: its last entry, at `index`, and the peaks over its leaves."""

    run: str
    seq: int
    hash: e.Digest
    index: int
    peaks: tuple[e.Digest, ...] = ()
    gone: bool = False


class Pruned(msgspec.Struct, frozen=True):
    """The message of a prune: the removed runs, as `[run, seq, hash]`, and their archive."""

    file: str
    sha256: str
    runs: list[tuple[str, int, e.Digest]]
    by: str | None = None


class Seal(NamedTuple):
    """A recorded seal."""

    seq: int
    event: system_events.StoreSealed
    listed: Listed
    lines: list[str]
    peaks: tuple[e.Digest, ...]
    known: list[Known]
    note: str

    @property
    def file(self) -> str:
        """The file to keep outside: the checkpoint, and the entries of its seal."""
        return "\n".join((self.note, _encode(self.listed).decode(), *self.lines, ""))


def _seal(log: Log, seq: int, event: system_events.StoreSealed) -> Seal:
    data = log.data(SEALS, seq)
    listed, lines = entries_in(data["entries"])
    lined = data["runs"].removesuffix("\n").split("\n")
    known = [msgspec.json.decode(line.encode(), type=ready(Known)) for line in lined if line]
    return Seal(seq, event, listed, lines, tuple(data["peaks"]), known, data["checkpoint"])


def seals(log: Log) -> Iterator[Seal | tuple[int, str]]:
    """Every recorded seal, in order; for an unreadable one, its seq and the reason."""
    for seq, body in _bodies(log):
        try:
            event = event_codec.decode(body)
            if isinstance(event, system_events.StoreSealed):
                yield _seal(log, seq, event)
        except ValueErased:
            yield seq, "its entries were erased, and nothing that was sealed before can be proved"
        except (KillickError, KeyError, ValueError, AttributeError) as error:
            yield seq, f"its entries cannot be read ({error})"


def last(log: Log) -> Seal | None:
    """The last seal, or None."""
    head = log.store.head(SEALS)
    for seq in range(head.seq if head is not None else 0, 0, -1):
        event = log.event(SEALS, seq)
        if isinstance(event, system_events.StoreSealed):
            return _seal(log, seq, event)
    return None


def _bodies(log: Log) -> Iterator[tuple[int, bytes]]:
    for rows in pages(log.store, SEALS, data=False):
        yield from ((row.seq, row.body) for row in rows)


def recorded_prunes(log: Log) -> dict[str, tuple[Pruned, int, e.Digest]]:
    """Every run that a prune removed, and its archive: from the seals, and from messages for the next seal."""
    found: list[Pruned] = []
    for seq, body in _bodies(log):
        if body.startswith(_TAKEN):
            with contextlib.suppress(KillickError, KeyError, ValueError):  # unreadable messages are skipped
                found.append(msgspec.convert(log.data(SEALS, seq)["body"], ready(Pruned)))
    return _by_run((*found, *(body for _, body in _waiting(log.store))))


def _by_run(found: Iterable[Pruned]) -> dict[str, tuple[Pruned, int, e.Digest]]:
    return {run: (pruned, seq, hash_) for pruned in found for run, seq, hash_ in pruned.runs}


def _waiting(store: Store) -> list[tuple[Message, Pruned]]:
    if store.head(SEALS) is None:
        return []
    messages = store.inbox(SEALS, name=PRUNED)
    return [(message, unpack(message.body, store.pieces, Pruned)) for message in messages]


def announce_prune(log: Log, pruned: Pruned, *, at_us: int) -> None:
    """Records for the next seal which runs are removed. Does nothing if the store was never sealed."""
    if pruned.runs and log.store.head(SEALS) is not None:
        log.store.deliver([delivery(log, SEALS, PRUNED, pruned, id=pruned.sha256, by=pruned.by, at_us=at_us)])


# the leaves of a run ------------------------------------------------------------------------------


class LogMismatch(Exception):
    """A log is damaged, or differs from its seal: the first such event, and the reason."""

    def __init__(self, seq: int, what: str) -> None:
        super().__init__(what)
        self.seq = seq
        self.what = what


class EventsRemoved(Exception):
    """A repair removed events before the requested start."""


class Leaf(NamedTuple):
    """An event's leaf in its run's tree. An event removed by a repair has no hash, and GAP as its leaf."""

    seq: int
    leaf: bytes
    hash: bytes | None
    aside: e.RunRepaired | None = None


def leaves(store: Store, head: Head, *, after: int = 0, before: bytes | None = None) -> Iterator[Leaf]:
    """The leaves of a log up to its head, with those of a fork's ancestors; `before` is the hash at `after`.

    Raises LogMismatch where the chain is broken, and EventsRemoved where a repair removed events before `after`.
    """

    def head_of(parent: str) -> Head:
        found = store.head(parent)
        if found is None:
            raise LogMismatch(head.base, f"its parent {parent} is missing")
        return found

    raw, parts = raw_store(store), segments(head, after, head_of)  # the chain is computed here
    hash_ = hashing.genesis(store.id, parts[0][0]) if before is None else before
    seq, start = after, after
    for run, begin, end in parts:
        for row in (row for rows in pages(raw, run, after=begin, up_to=end, data=False) for row in rows):
            if row.body.startswith(_REPAIRED):
                repaired = _repair(row)
                if repaired.first <= start and start:
                    raise EventsRemoved
                if (seq + 1, row.seq) == (repaired.first, repaired.last + 1):
                    yield from (Leaf(gone, GAP, None, repaired) for gone in range(seq + 1, row.seq))
                    seq, hash_ = repaired.last, e.from_text(repaired.hash_head)
            if row.seq != seq + 1:
                raise LogMismatch(seq + 1, f"events {seq + 1} to {row.seq - 1} are missing")
            seq, hash_ = row.seq, hashing.link(hash_, row.body)
            if hash_ != row.hash:
                raise LogMismatch(seq, "body and hash do not fit the chain")
            yield Leaf(seq, hashing.leaf(row.body), hash_)
    if seq < head.seq:
        raise LogMismatch(seq + 1, f"its log ends at event {seq}, its head says {head.seq}")
    if hash_ != head.hash:
        raise LogMismatch(seq, "the head's hash is not the last event's")


def _repair(row: Row) -> e.RunRepaired:
    try:
        found = event_codec.decode(row.body)
    except KillickError as error:
        raise LogMismatch(row.seq, str(error)) from None
    assert isinstance(found, e.RunRepaired)
    return found


# sealing ------------------------------------------------------------------------------------------


class Sealed(msgspec.Struct, frozen=True, kw_only=True):
    """The result of sealing. `file` is to be kept outside the store. `refused` are runs that are damaged or differ from
    their last seal: they are not sealed. `fresh` is False if nothing changed since the last seal; `other_key` is the
    key of the last seal, if it differs."""

    number: int
    size: int
    root: e.Digest
    key: str
    file: str
    fresh: bool
    runs: tuple[str, ...] = ()
    gone: dict[str, str | None] = {}
    refused: dict[str, str] = {}
    events: int = 0
    other_key: str | None = None


def seal(log: Log, key: bytes, *, at_us: int, by: str | None = None, progress: Progress = silent) -> Sealed:
    """Seals the changes since the last seal, signed with a private key in PEM.

    Reads the heads of all runs, the new events of those that changed, and about log n seals.
    """
    store, signer = log.store, private_key(key)
    _refuse_another(store)
    named = key_id(store.id, signer.public_key()).hex()
    # Opened before any read, so that a concurrent seal makes this append conflict.
    handle = log.begin(SEALS) if store.head(SEALS) is None else log.open(SEALS)
    past = Past(log)
    past.check(signer)
    found = _Changes(log, past)
    found.look(progress)
    if not found.entries and past.made is not None and past.made.event.key == named:
        return _sealed(past.made, found, fresh=False)
    event = system_events.StoreSealed(at=at_us, number=past.number + 1, size=0, root="", key=named, by=by)
    made = _build(log, past, found, signer, event)
    _append(handle, made, found)
    before = past.made.event.key if past.made is not None else named
    return _sealed(made, found, fresh=True, other_key=before if before != named else None)


def _sealed(made: Seal, found: _Changes, *, fresh: bool, other_key: str | None = None) -> Sealed:
    event = made.event
    gone = {entry.run: entry.file for entry in found.entries if entry.gone is not None}
    return Sealed(
        number=event.number,
        size=event.size,
        root=event.root,
        key=event.key,
        file=made.file,
        fresh=fresh,
        runs=tuple(entry.run for entry in found.entries if entry.gone is None),
        gone=gone,
        refused=found.refused,
        events=found.events,
        other_key=other_key,
    )


def _refuse_another(store: Store) -> None:
    row = store.index(SEALS)
    if row is not None and row.agent != AGENT:
        raise SealRefused(SEALS, f"is a run of {row.agent}, but this id is for seals; use a store without it")


class Past:
    """The last seal, and the known entry of every run from it and earlier seals.

    Seal n repeats the runs of as many seals as its lowest bit says, and links to the one before those. So about log n
    seals cover all runs, and each run's state is written about log n times.
    """

    def __init__(self, log: Log) -> None:
        self.made = last(log)
        self.number = self.made.event.number if self.made is not None else 0
        self.nodes: list[Seal] = []
        made = self.made
        while made is not None:
            self.nodes.append(made)
            before = log.event(SEALS, made.event.before) if made.event.before else None
            made = _seal(log, made.event.before, before) if isinstance(before, system_events.StoreSealed) else None

    @cached_property
    def known(self) -> dict[str, Known]:
        """Every run that was ever sealed."""
        return {known.run: known for made in reversed(self.nodes) for known in made.known}

    @property
    def tree(self) -> Frontier:
        """The tree over the entries of all seals."""
        return frontier(self.made.event.size, self.made.peaks) if self.made is not None else Frontier()

    def check(self, signer: Ed25519PrivateKey) -> None:
        """Refuses to extend a seal that names this key but has an invalid signature."""
        if self.made is None:
            return
        event = self.made.event
        try:
            found = checkpoint(self.made.note)
            fits = (found.size, found.root) == (event.size, self.tree.root) and e.to_text(found.root) == event.root
            if event.key == key_id(found.origin, signer.public_key()).hex():
                found.check(signer.public_key())
        except (ProofBroken, ValueError):
            fits = False
        if not fits:
            why = "the last seal differs from its signature; killick store verify --checkpoint FILE --key PUB says more"
            raise SealRefused(SEALS, why)

    def back(self, number: int) -> tuple[int, list[Seal]]:
        """For a new seal: the index of the seal that it links to, and the seals whose runs it repeats."""
        until = number & (number - 1)
        older = next((made.seq for made in self.nodes if made.event.number <= until), 0)
        return older, [made for made in self.nodes if made.event.number > until]


class _Changes:
    """The changes since the last seal: an entry for each changed run, and its state for the next seal."""

    def __init__(self, log: Log, past: Past) -> None:
        self._log, self._store, self._past = log, log.store, past
        self.entries: list[SealedRun] = []
        self.peaks: dict[str, tuple[e.Digest, ...]] = {}
        self.refused: dict[str, str] = {}
        self.events = 0
        self.messages = _waiting(log.store)

    def look(self, progress: Progress) -> None:
        """Compares every head, and finds removed runs."""
        present: set[str] = set()
        changed: list[tuple[Head, Known | None]] = []
        for _, head in heads(self._store):
            present.add(head.run)
            known = self._past.known.get(head.run)
            if known is None or (known.seq, known.hash) != (head.seq, e.to_text(head.hash)) or known.gone:
                changed.append((head, known))
        total = sum(head.seq - (known.seq if known is not None else 0) for head, known in changed)
        for head, known in changed:
            try:
                self._run(head, known)
            except LogMismatch as mismatch:
                self.refused[head.run] = mismatch.what
            progress("sealing", self.events, total)
        self.entries += self._gone(present)
        if all(entry.run == SEALS for entry in self.entries):
            self.entries = []  # a seal changes the log of seals: no reason for another seal

    def _run(self, head: Head, known: Known | None) -> None:
        if known is not None and known.gone:
            raise LogMismatch(1, "was sealed as removed, and exists again")
        try:
            tree = self._grown(head, known)
        except EventsRemoved:
            tree = self._grown(head, None)
        hash_, root = e.to_text(head.hash), e.to_text(tree.root)
        self.entries.append(SealedRun(run=head.run, seq=head.seq, hash=hash_, root=root))
        self.peaks[head.run] = tuple(map(e.to_text, tree.peaks))

    def _grown(self, head: Head, known: Known | None) -> Frontier:
        """The tree over a run's leaves, extended from its last seal."""
        if known is None:
            tree, before = Frontier(), None
        else:
            tree, before = frontier(known.seq, known.peaks), e.from_text(known.hash)
            if head.seq < known.seq:
                raise LogMismatch(head.seq + 1, f"ends at event {head.seq}, and was sealed at event {known.seq}")
            if head.seq == known.seq:
                raise LogMismatch(1, f"differs from the log sealed at event {known.seq}")
        for leaf in leaves(self._store, head, after=tree.size, before=before):
            tree.add(leaf.leaf)
            self.events += 1
        return tree

    def _gone(self, present: set[str]) -> list[SealedRun]:
        """Runs that were sealed, or named by a prune, and no longer exist."""
        pruned_runs = _by_run(body for _, body in self.messages)
        sealed = {run: known for run, known in self._past.known.items() if run not in present and not known.gone}
        if sealed.keys() - pruned_runs.keys():
            pruned_runs = recorded_prunes(self._log)  # a prune that was announced before may have continued after it
        found: list[SealedRun] = []
        for run in dict.fromkeys((*sealed, *pruned_runs)):
            known = self._past.known.get(run)
            if run in present or (known is not None and known.gone):
                continue
            if run in pruned_runs:
                pruned, seq, hash_ = pruned_runs[run]
                found.append(SealedRun(run, seq, hash_, gone="pruned", file=pruned.file, sha256=pruned.sha256))
            elif known is not None:
                found.append(SealedRun(run, known.seq, known.hash, gone="removed"))
        return found


def _build(log: Log, past: Past, found: _Changes, signer: Ed25519PrivateKey, event: system_events.StoreSealed) -> Seal:
    tree = past.tree
    listed = Listed(first=tree.size, peaks=tuple(map(e.to_text, tree.peaks)))
    before, merged = past.back(event.number)
    known = {each.run: each for past_one in reversed(merged) for each in past_one.known}
    lines: list[str] = []
    for entry in found.entries:
        gone = entry.gone is not None
        known[entry.run] = Known(entry.run, entry.seq, entry.hash, tree.size, found.peaks.get(entry.run, ()), gone)
        lines.append(entry.line)
        tree.add(hashing.leaf(lines[-1].encode()))
    event = msgspec.structs.replace(event, size=tree.size, root=e.to_text(tree.root), before=before)
    note = signed(log.store.id, tree.size, tree.root, signer)
    return Seal(0, event, listed, lines, tuple(map(e.to_text, tree.peaks)), list(known.values()), note)


def _append(handle: RunLog, made: Seal, found: _Changes) -> None:
    """One commit: creates the log if needed, consumes the messages, and appends the seal."""
    at = made.event.at
    values: Mapping[str, Any] = {
        "entries": "\n".join((_encode(made.listed).decode(), *made.lines, "")),
        "peaks": list(made.peaks),
        "runs": "".join(f"{_encode(known).decode()}\n" for known in made.known),
        "checkpoint": made.note,
    }
    entries: list[Entry] = []
    if handle.seq == 0:
        entries.append(Entry(e.RunStarted(at=at, run=SEALS, agent=AGENT), {"input": None}))
    for message, body in found.messages:
        taken = e.MessageTaken(at=at, message=message.number, name=message.name, id=message.id)
        entries.append(Entry(taken, {"body": msgspec.to_builtins(body)}))
        handle.seen = max(handle.seen, message.number)
    numbers = tuple(message.number for message, _ in found.messages)
    try:
        handle.append(*entries, Entry(made.event, values), takes=numbers)
    except (HeadMoved, RunExists) as moved:
        raise SealRefused(SEALS, "another process sealed the store at the same time; seal it again") from moved
