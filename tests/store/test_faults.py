"""A faulty store fails exactly the operation it was told to fail, before or after it is done."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from faulty_store import faulty
from killick.clock import Clock
from killick.errors import RunUnknown, StoreFull, StoreUnavailable
from killick.model.hashing import genesis, link
from killick.store.memory import MemoryStore
from killick.store.protocol import Store
from killick.store.records import Append, CreateRun, Delivery, Head, Row
from store_contract import StoreContract


def started(store: Store, run: str) -> Append:
    before, body = genesis(store.id, run), b"{}"
    rows = (Row(1, body, None, link(before, body)),)
    return Append(run=run, after=0, before=before, epoch=0, rows=rows, create=CreateRun(holder="w1"))


def following(head: Head) -> Append:
    body = b'{"next":true}'
    rows = (Row(head.seq + 1, body, None, link(head.hash, body)),)
    return Append(run=head.run, after=head.seq, before=head.hash, epoch=head.epoch, rows=rows)


def scenario(store: Store) -> None:
    """A worker's life in small. Each operation may be done again when nobody knows whether it was done."""
    [head] = store.append([started(store, "a")])
    assert isinstance(head, Head)
    store.deliver([Delivery(run="a", id="m", name="note", body=b"", by=None, at_us=1)])
    store.append([following(head)])
    store.head("a")


class TestFaultyStoreThatDoesNotFail(StoreContract):
    def make(self, tmp_path: Path, clock: Clock) -> Store:
        return faulty(MemoryStore(clock=clock))


def test_operations_are_counted_and_properties_are_not() -> None:
    store = faulty(MemoryStore())
    assert store.place == "memory:"
    assert store.id
    assert store.operations == 0
    scenario(store)
    assert store.operations == 4
    assert store.failed is None


def test_closing_is_neither_counted_nor_failed() -> None:
    store = faulty(MemoryStore(), fail_at=1)
    store.close()
    assert store.operations == 0


def test_an_operation_failed_before_is_not_done() -> None:
    inner = MemoryStore()
    store = faulty(inner, fail_at=1, when="before")
    with pytest.raises(StoreUnavailable):
        store.append([started(inner, "a")])
    assert inner.head("a") is None
    assert store.failed == "append"


def test_an_operation_failed_after_is_done_but_not_acknowledged() -> None:
    inner = MemoryStore()
    store = faulty(inner, fail_at=1, when="after")
    with pytest.raises(StoreUnavailable):
        store.append([started(inner, "a")])
    assert inner.head("a") is not None


def test_only_that_one_operation_fails() -> None:
    inner = MemoryStore()
    store = faulty(inner, fail_at=2)
    store.append([started(inner, "a")])
    with pytest.raises(StoreUnavailable):
        store.head("a")
    assert store.head("a") == inner.head("a")
    assert store.operations == 3


def test_the_error_can_be_chosen() -> None:
    store = faulty(MemoryStore(), fail_at=1, error=StoreFull("memory:"))
    with pytest.raises(StoreFull):
        store.heads()


def test_an_error_of_the_store_itself_comes_through() -> None:
    store = faulty(MemoryStore(), fail_at=1, when="after")
    with pytest.raises(RunUnknown):
        store.lease("nobody", "w1", seconds=30)


def test_an_unknown_operation_is_an_attribute_error() -> None:
    assert not hasattr(faulty(MemoryStore()), "no_such_operation")


@pytest.mark.parametrize("when", ["before", "after"])
def test_whichever_operation_fails_going_on_ends_the_same(when: Literal["before", "after"]) -> None:
    counted = faulty(MemoryStore())
    scenario(counted)
    for number in range(1, counted.operations + 1):
        inner = MemoryStore()
        with pytest.raises(StoreUnavailable):
            scenario(faulty(inner, fail_at=number, when=when))
        head = inner.head("a")
        if head is None or head.seq == 1:
            scenario(inner)
        assert (len(inner.read("a")), len(inner.messages("a"))) == (2, 1), f"operation {number}"
