"""A run as one file of JSON lines, and such a file as a store: complete, deterministic and verified.

The first line is a header. Then come the events of the run and its fork parents, its messages, and the stored values
that they need. The store's own key is never included.
docs/file-formats.md describes every line.
"""

from __future__ import annotations

import os
from base64 import b64decode, b64encode
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from io import BufferedIOBase, BytesIO
from itertools import islice
from typing import Any, Final, TypeVar

import msgspec
from msgspec.structs import replace

from killick.archive import rebuild
from killick.errors import ExportBroken, KillickError, LogError, RunBroken, ValueBroken
from killick.ids import RandomIds
from killick.log.checked import stored
from killick.log.derived import indexed_again
from killick.log.log import Log
from killick.log.paging import pages
from killick.log.verify import verify
from killick.model import event_codec, hashing
from killick.model import events as e
from killick.model.chunks import Blob, check, gathered
from killick.model.cipher import is_encrypted
from killick.permissions import open_input
from killick.store.memory import MemoryStore
from killick.store.protocol import Store, keys_of, opened, opened_message, opened_piece
from killick.store.records import ERASED_BODY, Append, CreateRun, Delivery, Message, Row
from killick.type_init import ready

M = TypeVar("M", bound=MemoryStore)

FORMAT: Final = "killick.run"
VERSION: Final = 1
"""The version of the file that this build writes and reads."""

LINE_BYTES_MAX: Final = 8 << 20
"""Longer than any line that is written: values are stored in pieces, and lists of an event are short."""

RUN_BYTES_MAX: Final = 2 << 30

UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, ValueError, RecursionError)
"""What a parser raises for a text that is not in its form, or is nested too deeply."""


# the lines ----------------------------------------------------------------------------------------


class Ancestor(msgspec.Struct, frozen=True, omit_defaults=True):
    """A run of the ancestry: where its own events begin and end here, and the hash before the first."""

    run: str
    base: int
    last: int
    genesis: e.Digest
    parent: str | None = None


class Header(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="is", tag=FORMAT):
    """The header: the run, and the number of lines of each kind."""

    version: int
    format: int
    store: str
    run: str
    lineage: tuple[Ancestor, ...]
    hash: e.Digest
    events: int
    messages: int
    values: int


class EventLine(
    msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, tag_field="is", tag="event"
):
    """One event: its body as it was hashed, the chain's hash, and its values; no values if they were erased."""

    run: str
    seq: int
    hash: e.Digest
    body: msgspec.Raw
    data: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class MessageLine(
    msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, tag_field="is", tag="message"
):
    """A message in an inbox, consumed or not: the events say which."""

    run: str
    number: int
    id: str
    name: str
    at: int
    body: msgspec.Raw
    by: str | None = None


class ValueLine(
    msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, tag_field="is", tag="value"
):
    """A stored chunk, in the form that fits its codec; or a note that it was erased."""

    hash: e.Digest
    codec: str
    text: str | None = None
    json: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    base64: str | None = None
    erased: bool = False


class _Dated(msgspec.Struct, frozen=True):
    """The hash of its data, in the body of an event."""

    data: e.Digest | None = None


AnyLine = Header | EventLine | MessageLine | ValueLine

_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(AnyLine).decode
_dated: Final = msgspec.json.Decoder(_Dated).decode


# writing ------------------------------------------------------------------------------------------


def export(log: Log, run: str) -> bytes:
    """Exports a run as it is stored, encrypted or not. Raises RunBroken if an event, a value or a message is damaged:
    that is not exported."""
    raw, lineage = stored(log.store), _lineage(log, run)
    found = dict[bytes, Blob]()
    events: list[EventLine] = []
    messages: list[MessageLine] = []
    for ancestor in lineage:
        rows = _rows(raw, ancestor)
        sent = _messages(raw, ancestor.run, rows, whole=ancestor.run == run)
        for row in rows:
            data = msgspec.UNSET if row.data is None else msgspec.Raw(row.data)
            events.append(EventLine(ancestor.run, row.seq, e.to_text(row.hash), msgspec.Raw(row.body), data))
        for each in sent:
            body = msgspec.Raw(each.body)
            messages.append(MessageLine(each.run, each.number, each.id, each.name, each.at_us, body, each.by))
        store, of = log.store, ancestor.run
        clear = [opened(store, of, row.seq, row.data) for row in rows if row.data is not None]
        clear += [opened_message(store, each) for each in sent]
        try:
            gathered([each or b"" for each in clear], store.pieces, found)
        except ValueBroken as error:
            raise log.damaged(run, error) from None
    if raw is not log.store:
        encrypted = raw.pieces(found)
        found = {digest: encrypted[digest] for digest in found}
    header = Header(
        version=VERSION,
        format=hashing.FORMAT,
        store=log.store.id,
        run=run,
        lineage=tuple(lineage),
        hash=events[-1].hash,
        events=len(events),
        messages=len(messages),
        values=len(found),
    )
    lines = (header, *events, *messages, *map(_value_line, found.values()))
    return b"".join(_encode(line) + b"\n" for line in lines)


def _messages(store: Store, run: str, rows: Iterable[Row], *, whole: bool) -> list[Message]:
    """A run's messages that belong to the export: of an ancestor, those that its events before the cut took."""
    messages = store.messages(run)
    if whole:
        return messages
    taken = {number for row in rows for number in rebuild.claims_of(event_codec.decode(row.body)).takes}
    return messages[: max(taken, default=0)]


def _lineage(log: Log, run: str) -> list[Ancestor]:
    """The run and its fork ancestors, eldest first, each up to its fork point."""
    found: list[Ancestor] = []
    last = log.head(run).seq
    for head, _ in log.ancestry(run):
        reason = log.store.quarantined(head.run)
        if reason is not None:
            raise RunBroken(head.run, seq=head.seq, reason=reason)
        genesis = e.to_text(log.hash_at(head.run, head.base))
        # A fork of a fork may branch off before its parent's first own event, which still names the parent.
        last = max(last, head.base + 1)
        found.append(Ancestor(head.run, head.base, last, genesis, head.parent))
        last = head.base
    return found[::-1]


def _rows(store: Store, ancestor: Ancestor) -> list[Row]:
    """A run's own rows that belong to the export, which the store compared with the hash chain."""
    parts = pages(store, ancestor.run, after=ancestor.base, up_to=ancestor.last)
    rows = [row for part in parts for row in part]
    if not rows or rows[-1].seq != ancestor.last:
        raise RunBroken(ancestor.run, seq=ancestor.last, reason="the log ends before its head")
    return rows


def _value_line(piece: Blob) -> ValueLine:
    line = ValueLine(e.to_text(piece.hash), piece.codec, erased=piece.body is None)
    if piece.body is None:
        return line
    match piece.codec:
        case "text":
            return replace(line, text=piece.body.decode())
        case "json":
            return replace(line, json=msgspec.Raw(piece.body))
        case _:
            return replace(line, base64=b64encode(piece.body).decode())


def _used(pieces: dict[bytes, Blob], written: list[bytes]) -> tuple[Blob, ...]:
    """The chunks of data in a file: all of them, if the data hides which."""
    hides = any(map(is_encrypted, written))
    return tuple((pieces if hides else gathered(written, lambda _: pieces)).values())


# reading ------------------------------------------------------------------------------------------


def refuse_other(place: str, line: bytes, kind: str, name: str, version: int) -> None:
    """Raises ExportBroken unless a file begins as one of this kind, in a version that this build reads."""
    header: dict[str, Any] = {}
    with suppress(*UNREADABLE):
        header = msgspec.json.decode(line, type=dict[str, Any])
    if header.get("is") != kind:
        raise ExportBroken(place, f"is not {name}")
    if header.get("version") != version or header.get("format") != hashing.FORMAT:
        reason = f"version {header.get('version')}, this build of Killick reads {version}"
        raise ExportBroken(place, reason, remedy="read it with the version that wrote it, or export the run again")


def read(source: str | os.PathLike[str] | bytes) -> Export:
    """The content of a file, not verified yet."""
    place = "export" if isinstance(source, bytes) else os.fspath(source)
    try:
        with BytesIO(source) if isinstance(source, bytes) else open_input(source) as file:
            lines = bounded(place, file)
            found = Export(place, lines)
            if next(lines, b""):
                raise ExportBroken(place, "has more lines than its header counts; it was truncated or changed")
            return found
    except OSError as error:
        raise ExportBroken(place, f"cannot be read ({error.strerror})") from None


def bounded(place: str, file: BufferedIOBase, bytes_max: int | None = None) -> Iterator[bytes]:
    """The lines of a file, read one by one: a few bytes of a compressed file can unpack to any length."""
    total = 0
    while line := file.readline(LINE_BYTES_MAX + 1):
        total += len(line)
        if len(line) > LINE_BYTES_MAX:
            raise ExportBroken(place, f"has a line of more than {LINE_BYTES_MAX:,} bytes, which no such file has")
        if bytes_max is not None and total > bytes_max:
            raise ExportBroken(place, f"unpacks to more than {bytes_max:,} bytes, which no file of its size does")
        yield line


class Export:
    """A run that was read from lines: its header, and its lines by run. Each is compared with its hash before the next
    is read, and as many are read as the header counts."""

    def __init__(self, place: str, lines: Iterable[bytes]) -> None:
        self.place = place
        self.rows: dict[str, list[Row]] = {}
        self.messages: dict[str, list[Delivery]] = {}
        self.pieces: dict[bytes, Blob] = {}
        self.secret_key: bytes | None = None
        self._is_verified = False
        self._last: dict[str, Row] = {}
        lines, size = iter(lines), 0
        self.header = header = self._header(next(lines, b""))
        self._first = {each.run: e.from_text(each.genesis) for each in header.lineage}
        count = header.events + header.messages + header.values
        for number, line in enumerate(islice(lines, min(max(count, 0), RUN_BYTES_MAX)), 2):
            if (size := size + len(line)) > RUN_BYTES_MAX:
                raise ExportBroken(place, f"{header.run} has over {RUN_BYTES_MAX:,} bytes; this build reads no more")
            self._take(number, line)
        self._check_counts()

    def _header(self, line: bytes) -> Header:
        refuse_other(self.place, line, FORMAT, "an export of a run", VERSION)
        try:
            return msgspec.json.decode(line, type=ready(Header))
        except UNREADABLE as error:
            raise ExportBroken(self.place, f"line 1 is damaged ({error})") from None

    def _take(self, number: int, line: bytes) -> None:
        try:
            found: AnyLine = _decode(line)
            match found:
                case EventLine():
                    data = bytes(found.data) if isinstance(found.data, msgspec.Raw) else None
                    row = Row(found.seq, bytes(found.body), data, e.from_text(found.hash))
                    self._compare(found.run, row)
                    self.rows.setdefault(found.run, []).append(row)
                case MessageLine():
                    about: dict[str, Any] = {"run": found.run, "id": found.id, "name": found.name, "by": found.by}
                    delivery = Delivery(**about, body=bytes(found.body), at_us=found.at)
                    self.messages.setdefault(found.run, []).append(delivery)
                case ValueLine():
                    piece = _piece(found)
                    if piece.hash in self.pieces or not check(piece):
                        raise ValueError("it does not match its hash, or is there twice")
                    self.pieces[piece.hash] = piece
                case Header():
                    raise ExportBroken(self.place, f"line {number} begins another run")
        except UNREADABLE as error:
            raise ExportBroken(self.place, f"line {number} is damaged ({error})") from None

    def _compare(self, run: str, row: Row) -> None:
        """Compares an event with its hash. What follows a repair is compared when the log is verified."""
        before = self._last.get(run)
        hash_ = self._first.get(run) if before is None else before.hash if before.seq + 1 == row.seq else None
        if hash_ is not None and hashing.link(hash_, row.body) != row.hash:
            raise ValueError("the event does not match its hash")
        if row.data is not None and e.to_text(hashing.data_hash(row.data)) != _dated(row.body).data:
            raise ValueError("the data does not match its hash")
        self._last[run] = row

    def _check_counts(self) -> None:
        header = self.header
        there = {
            "events": (sum(map(len, self.rows.values())), header.events),
            "messages": (sum(map(len, self.messages.values())), header.messages),
            "values": (len(self.pieces), header.values),
        }
        for what, (found, said) in there.items():
            if found != said:
                raise ExportBroken(self.place, f"holds {found} of {said} {what}; it was truncated or changed")
        ends = {each.run: each.last for each in header.lineage}
        for run, rows in self.rows.items():
            if rows[-1].seq != ends.get(run):
                raise ExportBroken(self.place, f"{run} does not end where its header says; it was truncated or changed")

    def verify(self, store: MemoryStore) -> None:
        """Raises unless the log in a store built from this export verifies."""
        if self._is_verified:
            return
        log = Log(store)
        problems = verify(log).problems
        log.close()
        for problem in problems:
            # Events removed by a repair keep their position. A shared value may have been erased by another run, and an
            # ancestor's value after the fork point.
            elsewhere = problem.where == "pieces" or (problem.where == "events" and problem.run != self.header.run)
            erased = elsewhere and problem.what.endswith("no event says it was erased")
            if not (problem.healed or erased or problem.where == "aside"):
                raise ExportBroken(self.place, f"its log does not verify: {problem}")

    def loaded(self) -> MemoryStore:
        """A store with only this run and its ancestors. Raises ExportBroken if its log does not verify."""
        store = self.store(MemoryStore)
        self.verify(store)
        return store

    def decrypt(self, store: Store) -> Export:
        """Verifies the file, and decrypts its values by the keys of the store that it comes from. A store without keys
        changes nothing."""
        if (keys := keys_of(store)) is None:
            return self
        self.loaded()
        first = event_codec.decode(self.rows[self.header.lineage[0].run][0].body)
        if isinstance(first, e.RunStarted) and first.key is not None:
            self.secret_key = keys.cipher(first.key).digest_key
        for run, rows in self.rows.items():
            self.rows[run] = [replace(row, data=row.data and opened(store, run, row.seq, row.data)) for row in rows]
        for run, sent in self.messages.items():
            self.messages[run] = [replace(each, body=opened_message(store, each) or ERASED_BODY) for each in sent]
        self.pieces = {digest: opened_piece(store, piece) for digest, piece in self.pieces.items()}
        self._is_verified = True  # the hashes cover the stored form
        return self

    def store(self, kind: type[M], *, before: int | None = None, secret_key: bytes | None = None) -> M:
        """A store of that kind with the run and its ancestors; or with the run's events before a seq."""
        store = kind(ids=_Known(self.header.store, secret_key))
        log = Log(store)
        try:
            for ancestor in self.header.lineage:
                self._play(store, ancestor, before if ancestor.run == self.header.run else None)
                fold = log.state(ancestor.run).fold
                indexed_again(store, ancestor.run, fold, at=fold.facts.seq)
        except (KillickError, ValueError, RecursionError) as error:
            raise ExportBroken(self.place, f"its log does not verify: {error}") from None
        finally:
            log.close()
        return store

    def _play(self, store: MemoryStore, ancestor: Ancestor, before: int | None) -> None:
        run = ancestor.run
        rows = [row for row in self.rows.get(run, ()) if before is None or row.seq < before]
        messages = self.messages.get(run, [])
        if not rows:
            raise LogError(f"{run}: none of its events are in this store; import the whole export")
        used = _used(self.pieces, [row.data for row in rows if row.data is not None])
        first, *rest = rows
        born = Append(
            run=run,
            after=ancestor.base,
            before=e.from_text(ancestor.genesis),
            epoch=0,
            rows=(first,),
            create=CreateRun(parent=ancestor.parent),
            pieces=used,
        )
        rebuild.raise_refused(store.append([born]))
        for message in messages:
            pieces = _used(self.pieces, [message.body])
            rebuild.raise_refused(store.deliver([replace(message, pieces=pieces)]))
        rebuild.append_all(store, run, rest)


class _Known(RandomIds):
    """Gives a store the id of the run's original store, so that its chain begins with the same hash."""

    def __init__(self, store: str, secret_key: bytes | None) -> None:
        self._store = store
        self._secret_key = secret_key

    def new(self, prefix: str) -> str:
        return self._store

    def key(self) -> bytes:
        return self._secret_key or super().key()


def _piece(line: ValueLine) -> Blob:
    body: bytes | None = None
    if line.text is not None:
        body = line.text.encode()
    elif isinstance(line.json, msgspec.Raw):
        body = bytes(line.json)
    elif line.base64 is not None:
        body = b64decode(line.base64, validate=True)
    if (body is None) != line.erased:
        raise ValueError("a value is either present or erased")
    return Blob(e.from_text(line.hash), line.codec, body)


class ExportSource:
    """The rows and values of an export as they were read, not verified."""

    def __init__(self, export: Export) -> None:
        self._rows = {(run, row.seq): row for run, rows in export.rows.items() for row in rows}
        self._pieces = export.pieces
        self._sent = export.messages

    def row(self, run: str, seq: int) -> Row | None:
        """Returns an event."""
        return self._rows.get((run, seq))

    def pieces(self, hashes: Collection[bytes]) -> Mapping[bytes, Blob]:
        """Returns stored values by hash."""
        return {digest: self._pieces[digest] for digest in hashes if digest in self._pieces}

    def messages(self, run: str) -> list[Message]:
        """Returns the messages of a run."""
        return [
            Message(run=run, number=number, id=sent.id, name=sent.name, body=sent.body, by=sent.by, at_us=sent.at_us)
            for number, sent in enumerate(self._sent.get(run, ()), 1)
        ]
