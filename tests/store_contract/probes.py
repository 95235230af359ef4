"""Checks on a store for the contract: each returns an answer, or fails its test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from msgspec.structs import replace

from killick.errors import LogError
from killick.model.hashing import genesis, link
from killick.store.protocol import Store
from killick.store.records import (
    Append,
    Delivered,
    Delivery,
    Head,
    Message,
    Owner,
    References,
    Row,
    RunRow,
    UniqueRight,
)
from store_contract.builders import chain, creation

Refusal = TypeVar("Refusal", bound=LogError)

Again = Callable[[], Store]
"""Opens the same location again."""


def commit(store: Store, item: Append) -> Head:
    [result] = store.append([item])
    assert isinstance(result, Head), result
    return result


def refused(store: Store, item: Append, kind: type[Refusal]) -> Refusal:
    [result] = store.append([item])
    assert isinstance(result, kind), result
    return result


def created(store: Store, run: str, *texts: str, **fields: Any) -> Head:
    return commit(store, creation(store, run, *(texts or ("started",)), **fields))


def deliver(store: Store, *deliveries: Delivery) -> list[Message]:
    results = store.deliver(deliveries)
    messages = [result.message for result in results if isinstance(result, Delivered)]
    assert len(messages) == len(deliveries), results
    return messages


def repaired(store: Store, *, keep: int, seq: int) -> tuple[Head, tuple[Row, ...]]:
    """Repairs run "a": keeps its rows up to one, and continues with two rows from another."""
    rows = chain(seq - 1, event(store, "a", keep).hash, "repaired", "waiting")
    head = replace(found(store, "a"), seq=rows[-1].seq, hash=rows[-1].hash)
    store.repair(head, keep=keep, rows=rows)
    return head, rows


def found(store: Store, run: str) -> Head:
    head = store.head(run)
    assert head is not None, f"{run} is not in the store"
    return head


def event(store: Store, run: str, seq: int) -> Row:
    row = store.row(run, seq)
    assert row is not None, f"{run} has no event {seq}"
    return row


def owner(store: Store, claim: UniqueRight) -> Owner | None:
    return store.owned(claim.space, claim.key).get(claim)


def line(store: Store, run: str) -> RunRow:
    index = store.index(run)
    assert index is not None, f"{run} has no index"
    return index


def everything(store: Store) -> dict[str, tuple[object, ...]]:
    """Returns all contents of a store's runs, to compare before and after."""
    told: dict[str, tuple[object, ...]] = {}
    for number, head in store.heads():
        run, references = head.run, store.references(head.run)
        pieces = dict(store.pieces(references.log | references.snapshots))
        snapshots = sorted((one.seq, one.fold, one.hash, one.root) for one in store.snapshots(run))
        log = (number, head, store.read(run), references, pieces, snapshots)
        rest = (store.messages(run), store.claimed(run), store.index(run), store.tags(run))
        told[run] = (*log, *rest, store.quarantined(run), store.displaced(run))
    return told


def absent(store: Store, run: str) -> None:
    """Asserts that a store has nothing of a run, and that reading does not create one."""
    assert (store.head(run), store.row(run, 1), store.index(run), store.quarantined(run)) == (None,) * 4
    assert store.snapshot(run, fold=1, at=9) is None
    assert [store.read(run), store.snapshots(run), store.inbox(run), store.messages(run)] == [[]] * 4
    assert (store.claimed(run), store.tags(run), store.displaced(run)) == ({}, set(), [])
    assert store.references(run) == References(set(), set())
    assert run not in [head.run for _, head in store.heads()]


def chained(store: Store, run: str) -> None:
    """Asserts that a run's rows are consecutive, linked, and end at its head."""
    rows, before = store.read(run), genesis(store.id, run)
    for seq, row in enumerate(rows, 1):
        before = link(before, row.body)
        assert (row.seq, row.hash) == (seq, before)
    assert (found(store, run).seq, found(store, run).hash) == (len(rows), before)
