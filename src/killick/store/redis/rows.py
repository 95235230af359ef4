"""Decodes a Redis store's replies into records, and encodes appends for its scripts."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from killick.errors import (
    AlreadyClaimed,
    EpochStale,
    HeadMoved,
    LogError,
    MessageGone,
    RunBroken,
    RunExists,
    RunUnknown,
)
from killick.model.chunks import Blob
from killick.store.records import Append, Delivery, Head, Message, Row, RunIndex, RunRow, Snapshot
from killick.store.redis.server import Given

_TAGS: Final = msgspec.json.Decoder(tuple[str, ...])
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
        wake_at_us=int_of(wake), started_at_us=int(started), changed_at_us=int(changed), tags=tags_of(tags),
        delivered=int(delivered or 0) if sound else -1,
    )  # fmt: skip


def tags_of(text: bytes) -> tuple[str, ...]:
    try:
        return _TAGS.decode(text)
    except msgspec.DecodeError:
        return (text.decode(errors="replace"),)  # a damaged copy: verification finds the difference and writes it anew


def message_of(run: str, number: bytes, text: bytes) -> Message:
    id_, name, body, by, at_us, taken = unpacked(text[8:])
    return Message(
        run=run, number=int(number), id=str_of(id_), name=str_of(name), body=body or b"", by=text_of(by),
        at_us=int(at_us or 0), taken=int_of(taken),
    )  # fmt: skip


def snapshot_of(name: bytes, text: bytes) -> Snapshot:
    seq, _, fold = name.partition(b":")
    return Snapshot(seq=int(seq), fold=int(fold), hash=text[:_HASH_BYTES], root=text[_HASH_BYTES:])


def blob_of(hash_: bytes, text: bytes) -> Blob:
    codec, apart, body = text.partition(b"\n")
    return Blob(hash_, codec.decode(), body if apart else None)


def refusal_of(kind: bytes, run: bytes, *rest: bytes) -> LogError:
    name = run.decode()
    match kind:
        case b"RunExists":
            return RunExists(name)
        case b"EpochStale":
            return EpochStale(name, held=int(rest[0]), actual=int(rest[1]))
        case b"HeadMoved":
            return HeadMoved(name, expected=int(rest[0]), actual=int(rest[1]))
        case b"AlreadyClaimed":
            return AlreadyClaimed(name, space=rest[0].decode(), owner=rest[1].decode(), seq=int(rest[2]))
        case b"MessageGone":
            return MessageGone(name, int(rest[0]))
        case b"RunBroken":
            return RunBroken(name, seq=int(rest[0]), reason="a row already exists where a new one belongs")
        case _:
            return RunUnknown(name)


def text_of(value: bytes | None) -> str | None:
    return None if value is None else value.decode()


def str_of(value: bytes | None) -> str:
    return (value or b"").decode()


def int_of(value: bytes | None) -> int | None:
    return None if value is None else int(value)


# from records to what scripts are told ------------------------------------------------------------


def lease_us(seconds: float) -> int | None:
    """Returns the length of a lease; None: no end."""
    return None if math.isinf(seconds) else round(seconds * 1_000_000)


def appends_told(items: Sequence[Append], given: Given) -> list[list[dict[str, Any]]]:
    return [[_append(one, given) for one in item.group] for item in items]


def rows_told(rows: Iterable[Row], given: Given) -> list[tuple[int, int, int, int | None]]:
    return [(row.seq, given.put(row.body), given.put(row.hash), given.put_if(row.data)) for row in rows]


def index_told(index: RunIndex) -> dict[str, Any]:
    # Times are texts, because numbers in a script are doubles.
    return {
        "agent": index.agent,
        "status": index.status,
        "priority": str(index.priority),
        "wake": None if index.wake_at_us is None else str(index.wake_at_us),
        "started": str(index.started_at_us),
        "changed": str(index.changed_at_us),
        "tags": index.tags,
        "shown_tags": msgspec.json.encode(index.tags).decode(),
        "seen": str(index.seen),
    }


def letter_told(sent: Delivery, given: Given) -> dict[str, Any]:
    return {
        "run": sent.run,
        "id": sent.id,
        "name": sent.name,
        "body": given.put(sent.body),
        "by": sent.by,
        "at_us": str(sent.at_us),
        "pieces": _pieces(sent.pieces, given),
    }


def _append(item: Append, given: Given) -> dict[str, Any]:
    """Encodes an append for its script, without empty parts."""
    seq, hash_ = item.last
    told: dict[str, Any] = {
        "run": item.run,
        "after": item.after,
        "before": given.put(item.before),
        "epoch": item.epoch,
        "rows": rows_told(item.rows, given),
        "last": seq,
        "last_hash": given.put(hash_),
    }
    if item.create is not None:
        birth = item.create
        told["create"] = {"parent": birth.parent, "holder": birth.holder, "lease_us": lease_us(birth.lease_seconds)}
    if item.pieces:
        told["pieces"] = _pieces(item.pieces, given)
    for name, claims in (("claims", item.claims), ("releases", item.releases)):
        if claims:
            told[name] = [(claim.space, given.put(claim.key)) for claim in claims]
    numbers = {"takes": item.takes, "returns": item.returns}
    numbers |= {"erases_rows": item.erases_rows, "erases_messages": item.erases_messages}
    told |= {name: some for name, some in numbers.items() if some}
    if item.erases_pieces:
        told["erases_pieces"] = [given.put(each) for each in item.erases_pieces]
    if item.index is not None:
        told["index"] = index_told(item.index)
    if item.snapshot is not None:
        told["snapshot"] = _snapshot(item.snapshot, given)
    if item.outbox:
        told["outbox"] = [(each.seq, each.kind) for each in item.outbox]
    if item.sends:
        told["sends"] = [letter_told(sent, given) for sent in item.sends]
    return told


def _pieces(pieces: Iterable[Blob], given: Given) -> list[tuple[int, str, int | None]]:
    return [(given.put(piece.hash), piece.codec, given.put_if(piece.body)) for piece in pieces]


def _snapshot(shot: Snapshot, given: Given) -> dict[str, Any]:
    pieces = _pieces(shot.pieces, given)
    return {
        "name": f"{shot.seq}:{shot.fold}",
        "hash": given.put(shot.hash),
        "root": given.put(shot.root),
        "pieces": pieces,
    }
