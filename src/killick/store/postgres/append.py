"""Appends and deliveries on one session, one statement each.

Works inside or outside a caller's transaction. The statement itself decides which appends are accepted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import msgspec
import psycopg

from killick.errors import LogError
from killick.model.chunks import Blob
from killick.store.postgres.server import PostgresServer, Statements
from killick.store.postgres.wire import Q, Session, Statement
from killick.store.records import (
    Append,
    Delivered,
    Delivery,
    Head,
    Row,
    RunIndex,
    Snapshot,
    refuse_misnumbered,
)
from killick.store.server_replies import delivered, refusal_of
from killick.store.sql.rows import message_of

FEW_ROWS: Final = 3
"""The number of events that a statement takes as plain parameters; more are passed as arrays."""


def append(session: Session, q: Statements, items: Sequence[Append], clock_us: int | None) -> list[Head | LogError]:
    if len(items) == 1 and len(items[0].rows) <= FEW_ROWS and items[0].is_bare:
        head = _append_few(session, q, items[0])
        return [head] if head else _append_all(session, q, [], items, clock_us)[1]
    # An append to a run that no other append touches may be reordered to the front.
    touched = Counter(run for item in items for runs in _touched([item]) for run in runs)
    bare = [item for item in items if item.is_bare and touched[item.run] == 1]
    apart = {item.run for item in bare}
    moved, results = _append_all(session, q, bare, [item for item in items if item.run not in apart], clock_us)
    # Examine a refusal: the append was committed before, or there is a reason.
    odd = [item for item in bare if item.run not in moved]
    reasons = iter(_append_all(session, q, [], odd, clock_us)[1] if odd else ())
    rest = iter(results)
    return [
        next(rest) if item.run not in apart else moved[item.run] if item.run in moved else next(reasons)
        for item in items
    ]


def committed(session: Session, q: Statements, item: Append) -> Head | None:
    """Returns the head after an append that is in the log."""
    found = session.rows(q.acknowledged, item.run, *item.last, item.epoch)
    return _head(*found[0]) if found else None


def _touched(items: Iterable[Append], deliveries: Iterable[Delivery] = ()) -> tuple[set[str], set[str]]:
    """Returns the runs whose heads are locked, and those to whose last renewals messages go."""
    group = [one for item in items for one in item.group]
    sent = [letter for one in group for letter in one.sends if letter.waits_for is None]
    sent += deliveries
    runs = {one.run for one in group} | {one.renewed_as for one in group if one.renewed_as is not None}
    exact = {letter.run for letter in sent if letter.exact}
    return runs | exact, {letter.run for letter in sent if not letter.exact}


def _append_few(session: Session, q: Statements, item: Append) -> Head | None:
    """The hot path: a few events of one run."""
    rows = item.rows
    last = rows[-1]
    values: list[Any] = [item.run, item.after, item.before, item.epoch, last.seq, last.hash, last.body, last.data]
    for row in rows[:-1]:
        values += (row.seq, row.body, row.hash, row.data)
    found = session.rows(_few(len(rows), q), *values)
    if not found:
        return None
    return _head(item.run, last.seq, last.hash, item.epoch, *found[0])


def _few(rows: int, q: Statements) -> Statement:
    """Returns the statement for this many events; the last one is the new head."""
    firsts = range(9, 9 + 4 * (rows - 1), 4)
    places = [f"(${at}::bigint, ${at + 1}::bytea, ${at + 2}::bytea, ${at + 3}::bytea)" for at in firsts]
    return q.of(f"append_{rows}", lambda: Q.append_one.format(rows=", ".join([_LAST_ROW, *places])))


_names: Final = msgspec.json.Decoder(list[str]).decode
_LAST_ROW: Final = "($5, $7::bytea, $6, $8::bytea)"


def _append_all(
    session: Session, q: Statements, bare: Sequence[Append], items: Sequence[Append], clock_us: int | None
) -> tuple[dict[str, Head], list[Head | LogError]]:
    """Writes plain events by array, and all other appends, in one statement. Returns the heads of the accepted ones, by
    run, and the results of the others."""
    groups = [item.group for item in items]
    flat = [one for group in groups for one in group]
    sent = [letter for one in flat for letter in one.sends]
    shots = [one.snapshot for one in flat if one.snapshot is not None]
    binary = BinaryParams(piece for source in (flat, shots, sent) for each in source for piece in each.pieces)
    payload = msgspec.json.encode([[_append_fields(one, binary) for one in group] for group in groups])
    runs, receivers = _touched((*bare, *items))
    rows = [(item.run, row) for item in bare for row in item.rows]
    found = session.rows(
        q.append_all,
        [item.run for item in bare],
        [item.after for item in bare],
        [item.before for item in bare],
        [item.epoch for item in bare],
        [item.rows[-1].seq for item in bare],
        [item.rows[-1].hash for item in bare],
        [run for run, _ in rows],
        [row.seq for _, row in rows],
        [row.body for _, row in rows],
        [row.hash for _, row in rows],
        [row.data for _, row in rows],
        payload,
        binary.blobs,
        [row.body for row in binary.rows],
        [row.hash for row in binary.rows],
        [row.data for row in binary.rows],
        list(runs),
        list(receivers),
        *binary.pieces,
        clock_us,
    )
    moved = {row[0]: _head(*row) for place, _, *row in found if place is None}
    others = [(refusal, row) for place, refusal, *row in found if place is not None]
    return moved, [_head(*row) if refusal is None else refusal_of(*_names(refusal)) for refusal, row in others]


def _head(run: str, seq: int, hash_: bytes, epoch: int, base: int, parent: str | None, *lease: Any) -> Head:
    holder, until_us = lease
    return Head(
        run=run, seq=seq, hash=hash_, epoch=epoch, base=base, parent=parent, holder=holder, lease_until_us=until_us
    )


def deliver(
    session: Session, q: Statements, deliveries: Sequence[Delivery], *, again: bool = False
) -> list[Delivered | LogError]:
    """Delivers messages. A resent delivery owns the stored message if their contents are equal."""
    binary = BinaryParams(piece for sent in deliveries for piece in sent.pieces)
    payload = msgspec.json.encode([_delivery_fields(sent, binary) for sent in deliveries])
    runs, receivers = _touched((), deliveries)
    found = session.rows(q.deliver_items, payload, binary.blobs, list(runs), list(receivers), *binary.pieces)
    return [
        refusal_of(*_names(refusal))
        if refusal is not None
        else delivered(sent, message_of(run, tuple(row)), fresh=fresh, again=again)
        for sent, (refusal, fresh, run, *row) in zip(deliveries, found, strict=True)
    ]


class PostgresTransaction:
    """A caller's transaction in which the store writes too. Nothing is retried: the owner of the commit does that."""

    def __init__(self, server: PostgresServer, session: Session, clock_us: Callable[[], int | None]) -> None:
        self._server = server
        self._session = session
        self._clock_us = clock_us

    @property
    def connection(self) -> psycopg.Connection[Any]:
        return self._session.connection

    @property
    def is_open(self) -> bool:
        # A lost connection is not an ended transaction.
        return self._session.in_transaction or self._session.connection.broken

    def append(self, items: Sequence[Append]) -> list[Head | LogError]:
        refuse_misnumbered(items)
        with self._server.explained():
            return append(self._session, self._server.q, items, self._clock_us()) if items else []

    def deliver(self, deliveries: Sequence[Delivery]) -> list[Delivered | LogError]:
        with self._server.explained():
            return deliver(self._session, self._server.q, deliveries) if deliveries else []


class BinaryParams:
    """Binary parameters next to a JSON parameter, which refers to them by index."""

    def __init__(self, pieces: Iterable[Blob]) -> None:
        self.blobs: list[bytes] = []
        self.rows: list[Row] = []
        known: dict[bytes, Blob] = {}
        for piece in pieces:
            if piece.hash not in known or known[piece.hash].body is None:
                known[piece.hash] = piece
        stored = [known[hash_] for hash_ in sorted(known)]
        self.pieces = ([one.hash for one in stored], [one.codec for one in stored], [one.body for one in stored])
        self._places = {one.hash: place for place, one in enumerate(stored, 1)}

    def put(self, blob: bytes) -> int:
        """Adds bytes and returns their index."""
        self.blobs.append(blob)
        return len(self.blobs)

    def put_rows(self, rows: Sequence[Row]) -> int:
        """Adds events and returns the index of the first."""
        self.rows += rows
        return len(self.rows) - len(rows) + 1

    def places(self, pieces: Iterable[Blob]) -> list[int]:
        return [self._places[piece.hash] for piece in pieces]


def _append_fields(item: Append, binary: BinaryParams) -> dict[str, Any]:
    """Encodes an append for the database function, without empty parts."""
    fields: dict[str, Any] = {
        "run": item.run,
        "after": item.after,
        "before": binary.put(item.before),
        "epoch": item.epoch,
        "rows": len(item.rows),
        "first": binary.put_rows(item.rows),
        "last": binary.put(item.last[1]),
        "claims": [],
        "takes": [],
        "sends": [_delivery_fields(sent, binary) for sent in item.sends],
    }
    if item.create is not None:
        seconds = None if math.isinf(item.create.lease_seconds) else item.create.lease_seconds
        fields["birth"] = {"parent": item.create.parent, "holder": item.create.holder, "seconds": seconds}
    if item.pieces:
        fields["pieces"] = binary.places(item.pieces)
    if not item.is_plain:
        fields["rights"] = True
        fields["claims"] = [[c.space, binary.put(c.key), "again" if c in item.releases else ""] for c in item.claims]
        fields["releases"] = [[claim.space, binary.put(claim.key)] for claim in item.releases]
        fields["takes"], fields["returns"] = item.takes, item.returns
    if item.inbox_read is not None:
        fields["read"] = msgspec.structs.astuple(item.inbox_read)
    if item.erases_rows:
        fields["erases_rows"] = item.erases_rows
    if item.erases_messages:
        fields["erases_messages"] = item.erases_messages
    if item.erases_pieces:
        fields["erases_pieces"] = [binary.put(hash_) for hash_ in item.erases_pieces]
    if item.index is not None:
        fields["index"] = index_fields(item.index)
    if item.snapshot is not None:
        fields["snapshot"] = _snapshot_fields(item.snapshot, binary)
    if item.slots:
        fields["slots"] = [msgspec.structs.astuple(slot) for slot in item.slots]
    if item.renewed_as is not None:
        fields["renews"] = item.renewed_as
    if item.gives:
        fields["gives"] = [msgspec.structs.astuple(slot) for slot in item.gives]
    if item.outbox:
        fields["tells"] = [(row.seq, row.kind) for row in item.outbox]
    return fields


def index_fields(index: RunIndex) -> dict[str, Any]:
    """Encodes an index entry for the database functions."""
    return {**msgspec.structs.asdict(index), "lane": index.lane}


def _snapshot_fields(shot: Snapshot, binary: BinaryParams) -> dict[str, Any]:
    places = binary.places(shot.pieces)
    hash_, root = binary.put(shot.hash), binary.put(shot.root)
    return {"seq": shot.seq, "fold": shot.fold, "hash": hash_, "root": root, "pieces": places}


def _delivery_fields(sent: Delivery, binary: BinaryParams) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "run": sent.run,
        "id": sent.id,
        "name": sent.name,
        "body": binary.put(sent.body),
        "by": sent.by,
        "at_us": sent.at_us,
    }
    if sent.waits_for is not None:
        fields["waits_for"] = sent.waits_for
    if sent.exact:
        fields["exact"] = True
    if sent.slot is not None:
        fields["slot"] = msgspec.structs.astuple(sent.slot)
    if sent.pieces:
        fields["pieces"] = binary.places(sent.pieces)
        fields["hashes"] = binary.put(b"".join(piece.hash for piece in sent.pieces))
    return fields
