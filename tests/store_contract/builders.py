"""Builds inputs for the contract: genuine chains, valid appends, and their extras."""

from __future__ import annotations

from typing import Any, Final

from msgspec.structs import replace

from killick.model.chunks import Blob
from killick.model.hashing import genesis, link, value_hash
from killick.store.protocol import Store
from killick.store.records import Append, CreateRun, Delivery, Head, Row, RunIndex, Snapshot, UniqueRight

SECOND_US: Final = 1_000_000
TOKEN: Final = UniqueRight("token", b"17")


def blob(text: str) -> Blob:
    body = text.encode()
    return Blob(hash=value_hash("json", body), codec="json", body=body)


def chain(after: int, before: bytes, *texts: str) -> tuple[Row, ...]:
    """Returns rows after (after, before), linked as a log links them."""
    rows: list[Row] = []
    for seq, text in enumerate(texts, after + 1):
        body = f'{{"event":"{text}"}}'.encode()
        before = link(before, body)
        rows.append(Row(seq, body, f"data of {text}".encode(), before))
    return tuple(rows)


def creation(store: Store, run: str, *texts: str, holder: str | None = None, **fields: Any) -> Append:
    """Returns an append that creates a run."""
    before = genesis(store.id, run)
    rows, created = chain(0, before, *texts), CreateRun(holder=holder)
    return replace(Append(run=run, after=0, before=before, epoch=0, rows=rows, create=created), **fields)


def following(head: Head, *texts: str, **fields: Any) -> Append:
    """Returns an append that fits a head."""
    rows = chain(head.seq, head.hash, *texts)
    item = Append(run=head.run, after=head.seq, before=head.hash, epoch=head.epoch, rows=rows)
    return replace(item, **fields)


def fork(parent: str, run: str, at: Row, *texts: str) -> Append:
    """Returns an append that forks a run at an event."""
    rows, created = chain(at.seq, at.hash, *texts), CreateRun(parent=parent)
    return Append(run=run, after=at.seq, before=at.hash, epoch=0, rows=rows, create=created)


def moved(item: Append) -> Head:
    """Returns the head after an append, for its successor in the same batch."""
    seq, last = item.last
    return Head(run=item.run, seq=seq, hash=last, epoch=item.epoch)


def indexed(status: str = "running", **fields: Any) -> RunIndex:
    """Returns an index entry. It changed after the messages of these tests, so that these make it due as of theirs."""
    return replace(RunIndex(agent="clerk", status=status, changed_at_us=1_000), **fields)


def letter(run: str, id: str, name: str = "note", **fields: Any) -> Delivery:  # noqa: A002
    return replace(Delivery(run=run, id=id, name=name, body=id.encode(), by="ann", at_us=1), **fields)


def cached(seq: int, fold: int = 1, mark: bytes = b"h") -> Snapshot:
    """Returns a snapshot with one chunk, `blob("{seq}/{fold}")`."""
    return Snapshot(seq=seq, fold=fold, hash=mark * 32, root=b"r" * 32, pieces=(blob(f"{seq}/{fold}"),))
