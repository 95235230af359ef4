"""The database's clock is set an hour forward or back while workers work: one holder an epoch, nothing twice."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from typing import Any, Final

import psycopg
import pytest

import killick
import servers
from killick.clock import ManualClock
from killick.engine import leases
from killick.model import events as e
from killick.store.postgres.store import PostgresStore
from killick.workers import stale_leases, worker
from killick.workers.stale_leases import StaleLeases
from store_contract.builders import indexed
from store_contract.probes import created, found

pytestmark = pytest.mark.slow

HOUR_US: Final = 3_600_000_000
RUNS: Final = 12
STEPS: Final = 8
BOOKS: Counter[str] = Counter()
"""How often the far side did each thing."""


@killick.tool(name="jumps_pay", effect="idempotent")
async def pay(what: str, key: killick.Key = killick.KEY) -> str:
    await asyncio.sleep(0.02)
    BOOKS[key] = 1
    return what


def look_up(effect: killick.Effect) -> killick.Happened | killick.DidNotHappen:
    what = str(effect.arguments["what"])
    return killick.Happened(what) if BOOKS[what] else killick.DidNotHappen()


@killick.tool(name="jumps_ship", effect="at_most_once", reconcile=look_up)
async def ship(what: str) -> str:
    """The far side knows no keys: asked twice, it ships twice."""
    await asyncio.sleep(0.02)
    BOOKS[what] += 1
    return what


@killick.agent(name="jumps_order")
async def order(run: killick.Run, number: int) -> list[str]:
    return [await run.call((pay, ship)[step % 2], f"{number}/{step}") for step in range(STEPS)]


@pytest.fixture
def url() -> str:
    """A store whose clock is the machine's, and as much later as its table `shift` says."""
    made = servers.postgres_store()
    PostgresStore(made).close()
    schema = servers.schema_of(made)
    shifted: Any = f"""
        CREATE TABLE {schema}.shift AS SELECT 0::bigint AS us;
        CREATE OR REPLACE FUNCTION {schema}.time_us(given bigint) RETURNS bigint LANGUAGE sql VOLATILE RETURN
        coalesce(given, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint + (SELECT us FROM {schema}.shift))
    """
    with psycopg.connect(servers.postgres(), autocommit=True) as sql:
        sql.execute(shifted)
    return made


def shift(url: str, by_us: int) -> None:
    with psycopg.connect(servers.postgres(), autocommit=True) as sql:
        sql.execute(f"UPDATE {servers.schema_of(url)}.shift SET us = us + {by_us}")  # type: ignore[arg-type]


@pytest.mark.parametrize("jumps", [(HOUR_US,), (-HOUR_US,), (HOUR_US, -HOUR_US), (-HOUR_US, HOUR_US)])
def test_runs_of_live_workers_end_and_each_effect_happens_once(url: str, jumps: tuple[int, ...]) -> None:
    BOOKS.clear()

    async def story() -> None:
        async with (
            killick.open_async(url, grace_seconds=1) as one, killick.open_async(url, grace_seconds=1) as other,
            one.worker(lease_seconds=1, concurrency=4), other.worker(lease_seconds=1, concurrency=4),
        ):  # fmt: skip
            handles = [await one.start(order, number, id=f"order{number}") for number in range(RUNS)]
            for jump in jumps:
                seen = BOOKS.total()
                while BOOKS.total() < seen + 10:
                    await asyncio.sleep(0.005)
                await asyncio.to_thread(shift, url, jump)
            for number, handle in enumerate(handles):
                assert await asyncio.wait_for(handle.result(), 120) == [f"{number}/{step}" for step in range(STEPS)]
            assert (await one.store.verify()).problems == []
            for number in range(RUNS):
                events = [each.event for each in await one.events(f"order{number}", limit=1_000)]
                epochs = [event.epoch for event in events if isinstance(event, e.RunTaken)]
                assert len(epochs) == len(set(epochs))

    asyncio.run(story())
    assert (len(BOOKS), set(BOOKS.values())) == (RUNS * STEPS, {1})


def test_a_run_whose_holder_died_before_the_clock_went_back_is_free_after_one_lease(url: str) -> None:
    store, clock = PostgresStore(url), ManualClock()
    stale = StaleLeases(store, clock)
    own = "killick.trigger"
    for run, agent in (("dead", "a"), ("dead own", own), ("long", "a"), ("usual", "a")):
        created(store, run, index=indexed(agent=agent))
    store.lease("dead", "gone", seconds=30)
    store.lease("dead own", "gone", seconds=30)
    store.lease("long", "patient", seconds=7_200)
    stale.free([own])
    shift(url, -HOUR_US)
    store.lease("usual", "alive", seconds=30)
    for seconds in (0, 15, 15):
        clock.advance(seconds)
        store.renew("patient", ["long"], seconds=7_200)
        stale.free([own])
        assert store.claim("w", now_us=store.now_us(), seconds=30, limit=9) == []
    clock.advance(1)
    store.renew("patient", ["long"], seconds=7_200)
    stale.free([own])
    claimed = store.claim("w", now_us=store.now_us(), seconds=30, limit=9)
    assert sorted((one.head.run, one.head.epoch, one.left) for one in claimed) == [
        ("dead", 2, "gone"),
        ("dead own", 2, "gone"),
    ]
    assert [found(store, run).holder for run in ("long", "usual")] == ["patient", "alive"]
    store.close()


def test_a_long_lease_holds_where_no_clock_went_back(url: str) -> None:
    store, clock = PostgresStore(url), ManualClock()
    stale = StaleLeases(store, clock)
    created(store, "long", index=indexed(agent="a"))
    store.lease("long", "frozen", seconds=7_200)
    for _ in range(10):
        stale.free([])
        clock.advance(60)
    assert found(store, "long").holder == "frozen"
    store.close()


def test_a_worker_takes_over_from_one_that_died_before_the_clock_went_back(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (stale_leases, worker):
        monkeypatch.setattr(module, "STALE_SECONDS", 1.0)
    looked, free = threading.Event(), StaleLeases.free
    monkeypatch.setattr(StaleLeases, "free", lambda *given: free(*given) or looked.set())  # type: ignore[func-returns-value]
    BOOKS.clear()

    async def story() -> None:
        async with killick.open_async(url) as kd:
            handle = await kd.start(order, 0, id="order0")
            head = await asyncio.to_thread(kd.runtime.store.lease, "order0", "dead", seconds=30)
            async with kd.worker(lease_seconds=1):
                await asyncio.to_thread(looked.wait)
                await asyncio.to_thread(shift, url, -HOUR_US)
                assert await asyncio.wait_for(handle.result(), 120) == [f"0/{step}" for step in range(STEPS)]
            assert found(kd.runtime.store, "order0").epoch > head.epoch

    asyncio.run(story())
    assert set(BOOKS.values()) == {1}


def test_a_long_lease_is_renewed_as_often_as_a_usual_one() -> None:
    assert [leases.Lease("a", 1, seconds, 0.0, lambda _: None).renewed_after for seconds in (3, 30, 300)] == [1, 10, 10]


BEGUN: Final = threading.Event()


@killick.tool(name="jumps_print", effect="at_most_once", reconcile=look_up)
def slow_print(what: str) -> str:
    """It blocks its thread, so its worker cannot cancel it."""
    BEGUN.set()
    time.sleep(4)
    BOOKS[what] += 1
    return what


@killick.agent(name="jumps_letter")
async def letter(run: killick.Run, what: str) -> str:
    return await run.call(slow_print, what)


def test_a_tool_that_is_open_when_the_clock_goes_forward_gets_its_grace_period(url: str) -> None:
    BOOKS.clear()

    async def story() -> None:
        async with (
            killick.open_async(url, grace_seconds=5) as one, killick.open_async(url, grace_seconds=5) as other,
            one.worker(lease_seconds=1) as first,
        ):  # fmt: skip
            handle = await one.start(letter, "dear", id="letter")
            await asyncio.to_thread(BEGUN.wait)
            first.drain()  # it does not take the run back
            async with other.worker(lease_seconds=1):
                await asyncio.to_thread(shift, url, HOUR_US)
                assert await asyncio.wait_for(handle.result(), 120) == "dear"

    asyncio.run(story())
    assert BOOKS == {"dear": 1}
