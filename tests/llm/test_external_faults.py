"""A host whose store fails at any operation hangs no caller, and does nothing twice."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

import killick
from faulty_store import faulty
from killick.errors import KillickError, StoreFull
from killick.llm.external import Host
from killick.store import MemoryStore, SqliteStore, Store
from seeds import repeats

BACKSTOP_SECONDS = 600.0
TRIES = 40
When = Literal["before", "after"]

BOOKS: dict[str, int] = {}
PAID: Counter[str] = Counter()


def settle(effect: killick.Effect) -> killick.Happened | killick.DidNotHappen:
    found = BOOKS.get(effect.key)
    return killick.DidNotHappen() if found is None else killick.Happened(found)


@killick.tool(name="faults_pay", reconcile=settle)
async def pay(amount: int, key: killick.Key = killick.KEY) -> int:
    PAID[str(key)] += 1
    BOOKS[str(key)] = amount
    await asyncio.sleep(0)
    return amount


@killick.tool(name="faults_pay_blocking", reconcile=settle)
def pay_blocking(amount: int, key: killick.Key = killick.KEY) -> int:
    PAID[str(key)] += 1
    BOOKS[str(key)] = amount
    return amount


async def paid(host: Host) -> list[int]:
    first = await host.call(pay, {"amount": 1}, key="a")
    both = await asyncio.gather(host.call(pay, {"amount": 2}, key="b"), host.call(pay_blocking, {"amount": 3}, key="c"))
    return [first, *both, await host.call(pay, {"amount": 1}, key="a")]


def paid_blocking(host: Host) -> list[int]:
    return [host.call_sync(tool, {"amount": amount}, key=key) for tool, amount, key in (
        (pay, 1, "a"), (pay_blocking, 2, "b"), (pay, 3, "c"), (pay, 1, "a"))]  # fmt: skip


async def anew(kd: killick.Client) -> list[int]:
    """A block for each try."""
    for _ in range(TRIES):
        try:
            async with kd.host("r") as host:
                return await paid(host)
        except KillickError as error:
            last = error
    raise AssertionError(f"it never went on: {last!r}")


async def in_one_block(kd: killick.Client) -> list[int]:
    """One block for all tries."""
    for _ in range(TRIES):
        try:
            async with kd.host("r") as host:
                for _ in range(TRIES):
                    try:
                        return await paid(host)
                    except KillickError as error:
                        last = error
                raise AssertionError(f"it never went on: {last!r}")
        except KillickError as error:
            last = error
    raise AssertionError(f"it never began: {last!r}")


async def from_threads(kd: killick.Client) -> list[int]:
    def blocking() -> list[int]:
        for _ in range(TRIES):
            try:
                with kd.host("r") as host:
                    return paid_blocking(host)
            except KillickError as error:
                last = error
        raise AssertionError(f"it never went on: {last!r}")

    return await asyncio.to_thread(blocking)


@killick.agent(name="faults_hosting")
async def hosting(run: killick.Run) -> list[int]:
    async with run.hosting() as host:
        return await paid(host)


async def by_an_agent(kd: killick.Client) -> list[int]:
    for _ in range(TRIES):
        try:
            return await kd.as_async().run(hosting, id="r")
        except KillickError as error:
            last = error
    raise AssertionError(f"it never went on: {last!r}")


def tried(way: Callable[[killick.Client], Any], inner: Store, **fault: Any) -> int:
    """Take the steps over a store that fails; how many operations that took."""
    BOOKS.clear()
    PAID.clear()
    store = faulty(inner, **fault)
    kd, plain = killick.Client(store), killick.Client(inner)
    found: list[Any] = []

    def to_its_end() -> None:
        try:
            found.append(asyncio.run(way(kd)))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=to_its_end, daemon=True)
    thread.start()
    thread.join(BACKSTOP_SECONDS)
    told = f"{store.failed} {fault}"
    assert found, f"hangs: {told}"
    assert found == [[1, 2, 3, 1]], f"{found}: {told}"
    assert max(PAID.values()) == 1, f"{PAID}: {told}"
    assert sorted(BOOKS.values()) == [1, 2, 3]
    operations = store.operations
    assert plain.store.verify().problems == []
    await_release(inner, told)
    closing = threading.Thread(target=kd.close, daemon=True)
    closing.start()
    closing.join(BACKSTOP_SECONDS)
    assert not closing.is_alive(), f"close hangs: {told}"
    plain.close()
    return operations


def await_release(store: Store, told: str) -> None:
    end = time.monotonic() + BACKSTOP_SECONDS
    while (head := store.head("r")) is None or head.holder is not None:
        assert time.monotonic() < end, f"still held: {told}"
        time.sleep(0.005)


def swept(
    way: Callable[[killick.Client], Any], make: Callable[[], Store], *, every: int, first: int = 1, **fault: Any
) -> None:
    for number in range(first, tried(way, make()) + 1, every):
        tried(way, make(), fail_at=number, error=StoreFull("killick.db"), **fault)


WAYS = pytest.mark.parametrize("way", [anew, in_one_block, from_threads, by_an_agent])


@pytest.mark.gate(2)
@pytest.mark.parametrize("when", ["before", "after"])
@WAYS
def test_a_host_whose_store_fails_once_hangs_nobody_and_pays_once(way: Any, when: When) -> None:
    swept(way, MemoryStore, every=4, when=when)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("times", [1, 8])
@WAYS
def test_a_host_whose_store_fails_at_any_operation_hangs_nobody_and_pays_once(
    way: Any, when: When, times: int, tmp_path: Path
) -> None:
    """Before or after its effect, once or eight times goes in turn from one operation to the next; in `make soak` it is
    all of them."""
    number = iter(range(100_000))
    swept(
        way, lambda: SqliteStore(tmp_path / f"{next(number)}.db", durability="process"),
        every=repeats(4, 1), first=repeats(1 + 2 * (times > 1) + (when == "after"), 1), when=when, times=times,
    )  # fmt: skip
