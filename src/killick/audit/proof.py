"""Proofs that one event was recorded. Their verification needs only the public key.

A proof reveals only its event. It has the Merkle path from its leaf to its run's root, the run's entry, the path from
there to the root of all seals, and the checkpoint that signs it. docs/file-formats.md describes the file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from killick.audit.checkpoint import Checkpoint, SealedRun, checkpoint, frontier
from killick.audit.checkpoint import public_key as key_of
from killick.audit.seal import SEALS, LogMismatch, Past, Seal, leaves, seals
from killick.errors import ProofBroken, SealRefused, ValueBroken
from killick.log.log import Log, Recorded
from killick.model import events as e
from killick.model import hashing
from killick.model.chunks import Blob, gathered, unpack
from killick.model.merkle import consistency, includes, inclusion, is_consistent, root
from killick.type_init import ready

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

VERSION: Final = 1
"""The newest version of the file that this build writes and reads."""


class Piece(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A value chunk that the event's data refers to."""

    codec: str
    body: bytes


class ConsistencyProof(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A consistency proof: the seals extend an older checkpoint of this size and root."""

    size: int
    root: e.Digest
    path: tuple[e.Digest, ...]


class Proof(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True,
    tag_field="is", tag="killick.proof",
):  # fmt: skip
    """One event at `seq` of the run that `entry` names, and its path to the root that `checkpoint` signs."""

    version: int
    seq: int
    body: str
    path: tuple[e.Digest, ...]
    entry: str
    index: int
    entry_path: tuple[e.Digest, ...]
    checkpoint: str
    data: str | None = None
    pieces: tuple[Piece, ...] = ()
    since: ConsistencyProof | None = None

    @property
    def file(self) -> bytes:
        """The content of the proof's file."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


class Proved(msgspec.Struct, frozen=True, kw_only=True):
    """The verified statement of a proof: this event was at this position of this run before the checkpoint was signed.

    `values` are included if the proof has them. `size` is the checkpoint's number of entries, and `since` the size of
    the older checkpoint that it extends.
    """

    store: str
    run: str
    seq: int
    sealed_at: int
    event: dict[str, Any]
    values: Any = None
    size: int
    root: e.Digest
    since: int | None = None


# proving ------------------------------------------------------------------------------------------


def prove(log: Log, run: str, seq: int, *, values: bool = False, since: str | bytes | None = None) -> Proof:
    """Makes a proof of one event. `values` includes its values; `since` adds a consistency proof from that checkpoint.

    Raises SealRefused if the event is not sealed, or differs from its seal.
    """
    head = log.head(run)
    if not 1 <= seq <= head.seq:
        raise SealRefused(run, f"has no event {seq}; it has 1 to {head.seq}")
    past = Past(log)
    known = past.known.get(run)
    if known is None or past.made is None or known.seq < seq:
        sealed = f"only events up to {known.seq} are" if known is not None else "nor is any other of the run"
        raise SealRefused(run, f"event {seq} is not sealed yet, {sealed}; run `killick store seal`")
    lines = _lines(log, past.made)
    hashed = [hashing.leaf(line.encode()) for line in lines]
    entry = SealedRun.read(lines[known.index])
    path = _path(log, run, seq, entry)
    [recorded] = log.read(run, after=seq - 1, limit=1)
    data, pieces = _values(log, run, recorded) if values else (None, ())
    return Proof(
        version=VERSION,
        seq=seq,
        body=recorded.row.body.decode(),
        path=tuple(map(e.to_text, path)),
        entry=lines[known.index],
        index=known.index,
        entry_path=tuple(map(e.to_text, inclusion(hashed, known.index))),
        checkpoint=past.made.note,
        data=data,
        pieces=pieces,
        since=None if since is None else _growth(hashed, checkpoint(since)),
    )


def extends(log: Log, older: Checkpoint) -> bool:
    """Whether the seals of a store extend a checkpoint."""
    hashed = [hashing.leaf(line.encode()) for line in _all_lines(log)]
    return older.origin == log.store.id and older.size <= len(hashed) and root(hashed[: older.size]) == older.root


def _all_lines(log: Log) -> list[str]:
    return [line for each in seals(log) if isinstance(each, Seal) for line in each.lines]


def _lines(log: Log, made: Seal) -> list[str]:
    """Every entry of every seal, verified against the last root."""
    found = _all_lines(log)
    if root(hashing.leaf(line.encode()) for line in found) != e.from_text(made.event.root):
        raise SealRefused(SEALS, "its entries do not hash to the signed root; killick store verify locates the damage")
    return found


def _path(log: Log, run: str, seq: int, entry: SealedRun) -> list[bytes]:
    found: list[bytes] = []
    try:
        for leaf in leaves(log.store, log.head(run)):
            if leaf.seq > entry.seq:
                break
            if leaf.seq == seq and leaf.aside is not None:
                raise SealRefused(run, f"event {seq} was removed from the log by a repair; prove another event")
            found.append(leaf.leaf)
    except LogMismatch as mismatch:
        raise SealRefused(run, f"{mismatch.what}; killick store verify {run} says more") from None
    if entry.root is None or root(found) != e.from_text(entry.root):
        raise SealRefused(run, f"differs from the log sealed at event {entry.seq}; killick store verify locates it")
    return inclusion(found, seq - 1)


def _values(log: Log, run: str, recorded: Recorded) -> tuple[str | None, tuple[Piece, ...]]:
    seq, event, data = recorded.seq, recorded.event, recorded.row.data
    if log.keys is not None:
        raise SealRefused(run, "its values are encrypted, and a proof holds no key; prove the event without its values")
    if data is None:
        if event.data is None:
            return None, ()
        raise SealRefused(run, f"the values of event {seq} were erased; prove it without them")
    pieces: list[Piece] = []
    for blob in log.blobs(data).values():
        if blob.body is None:
            raise SealRefused(run, f"some of the values of event {seq} were erased; prove it without them")
        pieces.append(Piece(blob.codec, blob.body))
    return data.decode(), tuple(pieces)


def _growth(hashed: list[bytes], since: Checkpoint) -> ConsistencyProof:
    if not 0 < since.size <= len(hashed) or root(hashed[: since.size]) != since.root:
        why = "these seals do not extend it; killick store verify --checkpoint shows the difference"
        raise SealRefused("checkpoint", why)
    return ConsistencyProof(since.size, e.to_text(since.root), tuple(map(e.to_text, consistency(hashed, since.size))))


# verifying ----------------------------------------------------------------------------------------


def verify_proof(proof: bytes | str, public_key: bytes | str, checkpoint: bytes | str | None = None) -> Proved:
    """Verifies a proof with only the public key. Raises ProofBroken with the reason.

    With a kept checkpoint, the proof must be under that checkpoint, or under one that provably extends it.
    """
    key, given = key_of(public_key), proof.encode() if isinstance(proof, str) else proof
    try:
        read = msgspec.json.decode(given, type=ready(Proof))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProofBroken("proof", f"is not a proof ({error})") from None
    if read.version != VERSION:
        raise ProofBroken("proof", f"version {read.version}, this build of Killick reads {VERSION}; upgrade it")
    if read.file != given:
        raise ProofBroken("proof", "is not in the form of a proof: it was changed")
    return _Verifier(read, key).proved(checkpoint)


class _Verifier:
    """The verification of one proof."""

    def __init__(self, proof: Proof, key: Ed25519PublicKey) -> None:
        self._proof, self._key = proof, key
        self._signed = checkpoint(proof.checkpoint, "proof")

    def proved(self, kept: bytes | str | None) -> Proved:
        proof, signed = self._proof, self._signed
        if signed.note != proof.checkpoint:
            raise ProofBroken("proof", "its checkpoint is not in the form of a checkpoint: it was changed")
        signed.check(self._key, "proof")
        entry = self._entry()
        event = self._event(entry)
        since = self._since(kept)
        return Proved(
            store=signed.origin, run=entry.run, seq=proof.seq, sealed_at=entry.seq, event=event,
            values=self._values(event), size=signed.size, root=e.to_text(signed.root), since=since,
        )  # fmt: skip

    def _entry(self) -> SealedRun:
        proof, signed = self._proof, self._signed
        leaf = hashing.leaf(proof.entry.encode())
        if not includes(signed.root, signed.size, leaf, proof.index, _hashes(proof.entry_path)):
            raise ProofBroken("proof", "the run's entry is not under the signed root")
        return SealedRun.read(proof.entry)

    def _event(self, entry: SealedRun) -> dict[str, Any]:
        proof = self._proof
        leaf, path = hashing.leaf(proof.body.encode()), _hashes(proof.path)
        if entry.root is None or not includes(e.from_text(entry.root), entry.seq, leaf, proof.seq - 1, path):
            raise ProofBroken("proof", f"the event is not the one at {proof.seq} of {entry.run}")
        try:
            return msgspec.json.decode(proof.body.encode(), type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as error:
            raise ProofBroken("proof", f"the event cannot be read ({error})") from None

    def _values(self, event: dict[str, Any]) -> Any:
        proof = self._proof
        blobs = [Blob(hashing.value_hash(each.codec, each.body), each.codec, each.body) for each in proof.pieces]
        if proof.data is None:
            if blobs:
                raise ProofBroken("proof", "it has values that the event does not refer to")
            return None
        raw = proof.data.encode()
        if event.get("data") != e.to_text(hashing.data_hash(raw)):
            raise ProofBroken("proof", "the values are not the ones that the event refers to")
        found = {blob.hash: blob for blob in blobs}
        try:
            if gathered([raw], lambda _: found).keys() != found.keys() or len(found) != len(blobs):
                raise ProofBroken("proof", "it has values that the event does not refer to")
            return unpack(raw, lambda _: found)
        except (ValueBroken, RecursionError):
            raise ProofBroken("proof", "some of the values are missing or were changed") from None

    def _since(self, kept: bytes | str | None) -> int | None:
        """Checks the proof against the kept checkpoint."""
        signed, since = self._signed, self._proof.since
        if since is not None:
            path, older = _hashes(since.path), _hashes([since.root])[0]
            if not is_consistent(since.size, older, signed.size, signed.root, path):
                raise ProofBroken("proof", "it does not prove that its seals extend the older checkpoint")
        if kept is None:
            return None if since is None else since.size
        known = checkpoint(kept)
        known.check(self._key)
        if known.origin != signed.origin:
            raise ProofBroken("proof", f"is of store {signed.origin}, the checkpoint of {known.origin}")
        if known.size == signed.size:
            if known.root != signed.root:
                raise ProofBroken("proof", "its checkpoint and the kept one have the same size, and differ")
        elif known.size < signed.size:
            if since is None or (since.size, since.root) != (known.size, e.to_text(known.root)):
                then = "`killick store prove --since CHECKPOINT` makes one that does"
                raise ProofBroken("proof", _unshown(signed, known, then))
        elif not _begins_with(known, signed):
            raise ProofBroken("proof", _unshown(known, signed, "make a new proof, under the newer one"))
        return known.size


def _unshown(newer: Checkpoint, older: Checkpoint, then: str) -> str:
    sizes = f"the checkpoint of {newer.size} entries extends the one of {older.size}"
    return f"does not show that {sizes}; {then}"


def _begins_with(newer: Checkpoint, older: Checkpoint) -> bool:
    """Whether the entries of a newer checkpoint prove that its seal directly follows an older one."""
    listed = newer.listed
    return listed is not None and (listed.first, frontier(listed.first, listed.peaks).root) == (older.size, older.root)


def _hashes(texts: Any) -> list[bytes]:
    try:
        found = [e.from_text(text) for text in texts]
    except ValueError:
        raise ProofBroken("proof", "one of its hashes is malformed") from None
    if any(len(each) != hashing.HASH_BYTES for each in found) or [e.to_text(each) for each in found] != list(texts):
        raise ProofBroken("proof", "one of its hashes is malformed")
    return found
