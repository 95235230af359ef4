"""Fetches the damaged events, values and messages of a run from another copy. Writes only what fits the log."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Protocol

import msgspec

from killick.errors import EventBroken, EventUnknown
from killick.log.derived import indexed_again, root_token
from killick.log.log import Log
from killick.log.paging import pages
from killick.log.verify import erased_elsewhere, lost_messages, verify
from killick.model import event_codec, hashing
from killick.model import events as e
from killick.model.chunks import Blob, children, references
from killick.store.protocol import opened, opened_message, opened_piece, raw_store
from killick.store.records import Head, InboxRow, Message, Row


class Source(Protocol):
    """Another copy: a store, an export, or a run of an archive. What it returns is data until its hash was compared."""

    def row(self, run: str, seq: int) -> Row | None: ...
    def pieces(self, hashes: Collection[bytes]) -> Mapping[bytes, Blob]: ...
    def messages(self, run: str) -> Sequence[Message]: ...


class Restored(msgspec.Struct, frozen=True):
    """What was fetched for a run and what is still missing, by name, and whether its log verifies now."""

    run: str
    fetched: tuple[str, ...]
    missing: tuple[str, ...]
    holds: bool


def restore(log: Log, run: str, source: Source, *, dry_run: bool = False) -> Restored:
    """Fetches the damaged events and values of a run. Ends its quarantine when its log verifies then."""
    log = log.unchecked()  # what is damaged is read here, and compared with what its chain names
    found = _Search(log, log.head(run), source)
    found.events()
    found.messages()
    found.values()
    fetched = (
        *(f"event {row.seq}" for row in found.rows),
        *(f"message {number}" for number in found.sent),
        *(f"value {each.hex()[:12]}" for each in found.blobs),
    )
    holds = False
    if not dry_run:
        if found.rows or found.blobs:
            raw_store(log.store).restore(run, found.rows, [*found.blobs.values()])
        if found.sent:
            raw_store(log.store).restore(run, [], [], [*found.inbox()])
            indexed_again(log.store, run, log.state(run).fold, at=log.head(run).seq)
        holds = verify(log, run).holds
        if holds and log.store.quarantined(run) is not None:
            log.store.quarantine(run, None)
            indexed_again(log.store, run, log.state(run).fold, at=log.head(run).seq)
    return Restored(run, fetched, tuple(found.missing), holds)


class _Search:
    """One search for what a run lacks."""

    def __init__(self, log: Log, head: Head, source: Source) -> None:
        self._log, self._head, self._source = log, head, source
        self._raw = raw_store(log.store)
        self._local = {row.seq: row for rows in pages(self._raw, head.run, after=head.base) for row in rows}
        self._whole: dict[int, Row] = {}
        self._erased = {
            place
            for _, event in map(_event, self._local.values())
            if isinstance(event, e.ValueErasedOnPurpose)
            for place in (*event.seqs, *event.pieces)
        }
        self.rows: list[Row] = []
        self.blobs: dict[bytes, Blob] = {}
        self.sent: dict[int, Message] = {}
        self.missing: list[str] = []

    # events -----------------------------------------------------------------------------------

    def events(self) -> None:
        """Follows the chain; an event of the source counts once the chain closes behind it."""
        head = self._head
        hash_, seq, unproved = self._first_hash(), head.base, list[Row]()
        while seq < head.seq:
            seq += 1
            row = self._local.get(seq)
            if row is None and (repair := self._repair_of(seq)) is not None:
                seq, hash_ = repair.last, e.from_text(repair.hash_head)
                continue
            if row is not None and hashing.link(hash_, row.body) == row.hash:
                self._accept(unproved)
                unproved = []
                self._whole[seq] = row
            else:
                row = self._candidate(seq, hash_, row)
                if row is None:
                    self.missing.append(f"event {seq}")
                    break
                unproved.append(row)
            hash_ = row.hash
        if hash_ == head.hash:
            self._accept(unproved)
        else:
            self.missing += [f"event {row.seq}" for row in unproved]
        self.rows = [*{row.seq: row for row in (*self.rows, *self._data())}.values()]

    def _first_hash(self) -> bytes:
        head = self._head
        if head.parent is None:
            return hashing.genesis(self._log.store.id, head.run)
        return self._log.hash_at(head.parent, head.base)

    def _candidate(self, seq: int, before: bytes, local: Row | None) -> Row | None:
        """Returns the event of the source, or the local one whose own hash alone may be damaged."""
        row = self._source.row(self._head.run, seq)
        if row is not None and hashing.link(before, row.body) == row.hash:
            return row
        return None if local is None else Row(seq, local.body, local.data, hashing.link(before, local.body))

    def _repair_of(self, first: int) -> e.RunRepaired | None:
        for row in self._local.values():
            _, event = _event(row)
            if isinstance(event, e.RunRepaired) and (event.first, event.last + 1) == (first, row.seq):
                return event
        return None

    def _accept(self, rows: list[Row]) -> None:
        self._whole.update((row.seq, row) for row in rows)
        self.rows += rows

    def _data(self) -> Iterator[Row]:
        """Yields the events of the chain whose data was damaged, with that of the source."""
        for seq, row in self._whole.items():
            named = _event(row)[1].data
            if named is None or _fits(row.data, named) or seq in self._erased:
                continue
            other = self._source.row(self._head.run, seq)
            if other is not None and _fits(other.data, named):
                self._whole[seq] = Row(seq, row.body, other.data, row.hash)
                yield self._whole[seq]
            else:
                self.missing.append(f"the data of event {seq}")

    # messages ---------------------------------------------------------------------------------

    def messages(self) -> None:
        """Looks for the messages that the inbox lost. No hash proves one: the copy must have this log's first event,
        and the message its own checksum, the lost number, an id that is not here, and that which the log says."""
        lost = lost_messages(self._log, self._head)
        ids = {each.id for each in self._raw.messages(self._head.run) if each.number not in lost}
        first = self._source.row(self._head.run, self._head.base + 1) if lost else None
        is_same = first is not None and first == self._whole.get(first.seq)
        sent = {each.number: each for each in self._source.messages(self._head.run)} if is_same else {}
        for number, taken in lost.items():
            found = sent.get(number)
            event = None if taken is None else _event(self._whole[taken])[1] if taken in self._whole else None
            said = event.id if isinstance(event, e.MessageTaken) else None
            if found is not None and found.intact and found.id not in ids and said in (None, found.id):
                self.sent[number] = found
            else:
                self.missing.append(f"message {number}")

    def inbox(self) -> Iterator[InboxRow]:
        """Yields the messages that were found. Which event took them is what this log says, once it is whole."""
        run, raw = self._head.run, self._raw
        taken, root = lost_messages(self._log, self._head), root_token(raw, run)
        for number, each in self.sent.items():
            by = taken.get(number)
            if by is None and each.taken and self._repair_of(each.taken):
                by = each.taken  # a repair set aside the event that took it
            pieces = tuple(self._below(references(opened_message(self._log.store, each) or b"")))
            yield InboxRow(msgspec.structs.replace(each, run=run, taken=by), root, pieces)

    def _below(self, wanted: Collection[bytes]) -> Iterator[bytes]:
        """Yields all chunks below some, with them."""
        while wanted:
            yield from wanted
            found = self._raw.pieces(wanted).values()
            wanted = [child for piece in found for child in children(opened_piece(self._log.store, piece))]

    # values -----------------------------------------------------------------------------------

    def values(self) -> None:
        """Looks for every value that the events, the messages and the values below them name."""
        rows = {**self._local, **self._whole}
        run, store = self._head.run, self._log.store
        clear = [opened(store, run, row.seq, row.data) or b"" for row in rows.values() if row.data is not None]
        clear += [opened_message(store, message) or b"" for message in (*self._raw.messages(run), *self.sent.values())]
        wanted = {digest for each in clear if b'{"$' in each for digest in references(each)}
        seen = set[bytes]()
        while wanted := wanted - seen:
            seen |= wanted
            local = self._raw.pieces(wanted)
            lost = {digest for digest in wanted if not _is_whole(digest, local.get(digest))}
            found = {digest: each for digest, each in self._source.pieces(lost).items() if _is_proved(digest, each)}
            for digest in sorted(lost):
                if e.to_text(digest) in self._erased or erased_elsewhere(self._log.store, digest):
                    found.pop(digest, None)
                elif digest not in found:
                    self.missing.append(f"value {digest.hex()[:12]}")
            self.blobs |= found
            whole = {digest: each for digest, each in local.items() if digest not in lost} | found
            below = (opened_piece(self._log.store, piece) for piece in whole.values())
            wanted = {child for piece in below if piece.body is not None for child in children(piece)}


def _event(row: Row) -> tuple[int, e.Event]:
    """Returns a row's event; one without values where its body is damaged."""
    try:
        return row.seq, event_codec.decode(row.body)
    except (EventBroken, EventUnknown):
        return row.seq, e.NoteMade(at=0)


def _fits(data: bytes | None, named: e.Digest) -> bool:
    return data is not None and e.to_text(hashing.data_hash(data)) == named


def _is_whole(digest: bytes, piece: Blob | None) -> bool:
    """Returns whether a value needs nothing: an empty one was erased."""
    return piece is not None and (piece.body is None or hashing.value_hash(piece.codec, piece.body) == digest)


def _is_proved(digest: bytes, piece: Blob) -> bool:
    return piece.body is not None and hashing.value_hash(piece.codec, piece.body) == digest
