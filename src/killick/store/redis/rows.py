"""Decodes a Redis store's replies into records, and encodes appends for its scripts."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from killick.model.chunks import Blob
from killick.store.records import Append, Delivery, Head, InboxRow, Message, Row, RunIndex, RunRow, Snapshot, tags_of
from killick.store.redis.server import BinaryArgs
from killick.store.slots import Slot

_HASH_BYTES: Final = 32


def packed(*parts: bytes | None) -> bytes:
    """Concatenates length-prefixed bytes, with a sign for None; scripts pack the same way."""
    return b"".join(b"-" if part is None else b"%d:%s" % (len(part), part) for part in parts)


def unpacked(text: bytes) -> list[bytes | None]:
    parts: list[bytes | None] = []
    at = 0
    while at < len(text):
        if text[at : at + 1] == b"-":
            parts.append(None)
            at += 1
            continue
        colon = text.index(b":", at)
        last = colon + 1 + int(text[at:colon])
        parts.append(text[colon + 1 : last])
        at = last
    return parts


def check(text: bytes) -> bytes:
    """Returns the checksum of a row outside the chain."""
    return hashlib.sha1(text).hexdigest()[:8].encode()


# from replies to records --------------------------------------------------------------------------


def head_of(found: Sequence[Any]) -> Head:
    _, run, seq, hash_, epoch, base, parent, holder, until = found
    return Head(
        run=run.decode(), seq=int(seq), hash=hash_, epoch=int(epoch), base=int(base), parent=text_of(parent),
        holder=text_of(holder), lease_until_us=int_of(until),
    )  # fmt: skip


def row_of(found: Sequence[Any]) -> Row:
    seq, body, hash_, data = found
    return Row(int(seq), body, data, hash_)


def run_row_of(found: Sequence[Any]) -> RunRow | None:
    """Returns a row of a listing; None: the run has no index."""
    run, (number, agent, status, priority, wake, started, changed, tags, delivered, counted) = found
    if agent is None:
        return None
    sound: bool = delivered is not None and check(packed(number, delivered)) == counted
    return RunRow(
        number=int(number), run=run.decode(), agent=agent.decode(), status=status.decode(), priority=int(priority),
        wake_at_us=int_of(wake), started_at_us=int(started), changed_at_us=int(changed),
        tags=tags_of(tags.decode(errors="replace")), delivered=int(delivered or 0) if sound else -1,
    )  # fmt: skip


def message_of(run: str, number: bytes, text: bytes) -> Message:
    id_, name, body, by, at_us, taken, *_ = unpacked(text[8:])
    return Message(
        run=run, number=int(number), id=str_of(id_), name=str_of(name), body=body or b"", by=text_of(by),
        at_us=int(at_us or 0), taken=int_of(taken),
    )  # fmt: skip


def slot_of(name: bytes, text: bytes) -> Slot:
    token, places = unpacked(text[8:])
    return Slot(name.decode(), str_of(token), int_of(places) or 0)


def snapshot_of(name: bytes, text: bytes) -> Snapshot:
    seq, _, fold = name.partition(b":")
    return Snapshot(seq=int(seq), fold=int(fold), hash=text[:_HASH_BYTES], root=text[_HASH_BYTES:])


def blob_of(hash_: bytes, text: bytes) -> Blob:
    codec, apart, body = text.partition(b"\n")
    return Blob(hash_, codec.decode(), body if apart else None)


def text_of(value: bytes | None) -> str | None:
    return None if value is None else value.decode()


def str_of(value: bytes | None) -> str:
    return (value or b"").decode()


def int_of(value: bytes | None) -> int | None:
    return None if value is None else int(value)


# from records to script arguments -----------------------------------------------------------------


def lease_us(seconds: float) -> int | None:
    """Returns the length of a lease; None: no end."""
    return None if math.isinf(seconds) else round(seconds * 1_000_000)


def append_args(items: Sequence[Append], binary: BinaryArgs) -> list[list[dict[str, Any]]]:
    return [[_append(one, binary) for one in item.group] for item in items]


def row_args(rows: Iterable[Row], binary: BinaryArgs) -> list[tuple[int, int, int, int | None]]:
    return [(row.seq, binary.put(row.body), binary.put(row.hash), binary.put_if(row.data)) for row in rows]


def message_args(row: InboxRow, binary: BinaryArgs) -> dict[str, Any]:
    message, pieces = row.message, b"".join(row.pieces)
    taken = None if message.taken is None else str(message.taken)
    return {
        "number": message.number, "id": message.id, "name": message.name, "body": binary.put(message.body),
        "by": message.by, "at_us": str(message.at_us), "taken": taken, "root": row.root,
        "pieces": binary.put(pieces) if pieces else None,
    }  # fmt: skip


def index_args(index: RunIndex) -> dict[str, Any]:
    # Times are texts, because numbers in a script are doubles.
    return {
        "agent": index.agent,
        "status": index.status,
        "priority": str(index.priority),
        "lane": str(index.lane),
        "wake": None if index.wake_at_us is None else str(index.wake_at_us),
        "started": str(index.started_at_us),
        "changed": str(index.changed_at_us),
        "tags": index.tags,
        "shown_tags": msgspec.json.encode(index.tags).decode(),
        "seen": str(index.seen),
    }


def slot_args(slots: Iterable[Slot]) -> list[tuple[Any, ...]]:
    return [msgspec.structs.astuple(slot) for slot in slots]


def delivery_args(sent: Delivery, binary: BinaryArgs) -> dict[str, Any]:
    return {
        "run": sent.run,
        "id": sent.id,
        "name": sent.name,
        "body": binary.put(sent.body),
        "by": sent.by,
        "at_us": str(sent.at_us),
        "pieces": pieces_args(sent.pieces, binary),
        "waits_for": sent.waits_for,
        "exact": sent.exact,
        "slot": None if sent.slot is None else slot_args([sent.slot])[0],
    }


def _append(item: Append, binary: BinaryArgs) -> dict[str, Any]:
    """Encodes an append for its script, without empty parts."""
    seq, hash_ = item.last
    args: dict[str, Any] = {
        "run": item.run,
        "after": item.after,
        "before": binary.put(item.before),
        "epoch": item.epoch,
        "rows": row_args(item.rows, binary),
        "last": seq,
        "last_hash": binary.put(hash_),
    }
    if item.create is not None:
        create = item.create
        args["create"] = {"parent": create.parent, "holder": create.holder, "lease_us": lease_us(create.lease_seconds)}
    if item.pieces:
        args["pieces"] = pieces_args(item.pieces, binary)
    for name, claims in (("claims", item.claims), ("releases", item.releases)):
        if claims:
            args[name] = [(claim.space, binary.put(claim.key)) for claim in claims]
    numbers = {"takes": item.takes, "returns": item.returns}
    numbers |= {"erases_rows": item.erases_rows, "erases_messages": item.erases_messages}
    args |= {name: some for name, some in numbers.items() if some}
    if item.inbox_read is not None:
        args["inbox_read"] = msgspec.structs.astuple(item.inbox_read)
    if item.erases_pieces:
        args["erases_pieces"] = [binary.put(each) for each in item.erases_pieces]
    if item.index is not None:
        args["index"] = index_args(item.index)
    if item.snapshot is not None:
        args["snapshot"] = _snapshot(item.snapshot, binary)
    if item.outbox:
        args["outbox"] = [(each.seq, each.kind) for each in item.outbox]
    if item.slots:
        args["slots"], args["renews"] = slot_args(item.slots), item.renewed_as
    if item.gives:
        args["gives"] = slot_args(item.gives)
    if item.sends:
        args["sends"] = [delivery_args(sent, binary) for sent in item.sends]
    return args


def pieces_args(pieces: Iterable[Blob], binary: BinaryArgs) -> list[tuple[int, str, int | None]]:
    return [(binary.put(piece.hash), piece.codec, binary.put_if(piece.body)) for piece in pieces]


def _snapshot(shot: Snapshot, binary: BinaryArgs) -> dict[str, Any]:
    pieces = pieces_args(shot.pieces, binary)
    return {
        "name": f"{shot.seq}:{shot.fold}",
        "hash": binary.put(shot.hash),
        "root": binary.put(shot.root),
        "pieces": pieces,
    }
