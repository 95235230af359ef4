"""A PostgreSQL store among other programs' sessions: open transactions, locked tables and locked rows."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, Final

import psycopg
import pytest

import killick
import servers
from killick.errors import StoreBusy, StoreUnavailable
from killick.store.postgres import server as postgres_server
from killick.store.postgres.store import PostgresStore
from store_contract.builders import following, indexed
from store_contract.probes import commit, created, found

pytestmark = pytest.mark.slow

STEPS: Final = 40
CALLS: list[int] = []
_numbers: Final = count()


@killick.tool(name="sessions_count", effect="idempotent")
async def counted(number: int, key: killick.Key = killick.KEY) -> int:
    CALLS.append(number)
    return number


@killick.agent(name="sessions_many")
async def many(run: killick.Run, steps: int) -> int:
    await run.wait("go")
    return sum([await run.call(counted, number) for number in range(steps)])


@killick.tool(name="sessions_gated", effect="idempotent")
async def gated(key: killick.Key = killick.KEY) -> int:
    BEGUN.set()
    await GOES_ON.wait()
    return 1


@killick.agent(name="sessions_long")
async def long(run: killick.Run) -> int:
    return await run.call(gated)


BEGUN, GOES_ON = asyncio.Event(), asyncio.Event()


@pytest.fixture
def url() -> str:
    return servers.postgres_store()


@contextmanager
def foreign(url: str, sql: str = "") -> Iterator[psycopg.Connection[Any]]:
    """Another program's session, in a transaction that it does not end."""
    with psycopg.connect(servers.postgres(), application_name="report") as theirs:
        theirs.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        theirs.execute(f"SET search_path = {servers.schema_of(url)}")
        theirs.execute(sql or "SELECT 1 FROM pg_class")
        yield theirs


def served(url: str, run: str) -> int:
    """A worker takes a run to its end. Returns the round trips of the run's steps."""

    async def story(through: str, proxy: servers.Proxy) -> int:
        async with killick.open_async(through) as kd, kd.worker():
            handle = await kd.start(many, STEPS, id=run)
            while not (await kd.info(run)).waits:
                await asyncio.sleep(0.01)
            before = proxy.round_trips
            await kd.send(run, "go", None)
            assert await asyncio.wait_for(handle.result(), 300) == sum(range(STEPS))
            return proxy.round_trips - before

    with servers.Proxy(url) as proxy:
        return asyncio.run(story(proxy.url, proxy))


@pytest.mark.parametrize(
    "sql",
    ["SELECT 1 FROM pg_class", "SELECT count(*) FROM heads, events", "LOCK TABLE heads, events IN ACCESS SHARE MODE"],
    ids=["a snapshot", "a snapshot of our tables", "a shared lock"],
)
def test_workers_serve_runs_beside_a_transaction_that_stays_open(url: str, sql: str) -> None:
    CALLS.clear()
    alone = served(url, "alone")
    with foreign(url, sql):
        crowded = served(url, "crowded")
    assert sorted(CALLS) == sorted([*range(STEPS)] * 2)
    # A step is one commit; polls and renewals come by the clock.
    assert crowded < alone * 1.5 + 20


def test_a_locked_head_is_waited_for_and_its_other_leases_are_kept(url: str) -> None:
    store = PostgresStore(url)
    heads = {run: created(store, run, holder="w1") for run in "abc"}
    with foreign(url, "SELECT 1 FROM heads WHERE run = 'b' FOR UPDATE") as theirs:
        assert store.renew("w1", "abc", seconds=60) == {"a": 1, "c": 1}
        written = list[Any]()
        writer = threading.Thread(target=lambda: written.append(commit(store, following(heads["b"], "two"))))
        writer.start()
        waiting = "SELECT 1 FROM pg_locks WHERE NOT granted"
        while not theirs.execute(waiting).fetchone():
            pass
        assert commit(store, following(heads["a"], "two")).seq == 2
    writer.join()
    assert [head.seq for head in written] == [2]
    assert store.renew("w1", "abc", seconds=60) == dict.fromkeys("abc", 1)
    store.close()


def test_a_lock_is_waited_for_no_longer_than_the_store_is_patient(url: str) -> None:
    store = PostgresStore(url, busy_seconds=0.2)
    head = created(store, "a", index=indexed("waiting", wake_at_us=1))
    with foreign(url, "SELECT 1 FROM heads WHERE run = 'a' FOR UPDATE"):
        for write in (
            lambda: store.append([following(head, "two")]),
            lambda: store.lease("a", "w1", seconds=30),
            lambda: store.release("a", epoch=1) if store.quarantine("a", None) else None,
            lambda: store.remove("a"),
        ):
            with pytest.raises(StoreBusy, match=r"for 0\.2 s"):
                write()
        assert store.claim("w1", now_us=2, seconds=30, limit=1) == []
    assert [one.head.run for one in store.claim("w1", now_us=2, seconds=30, limit=1)] == ["a"]
    store.close()


def test_a_run_whose_row_is_locked_for_longer_than_its_lease_stays_with_its_worker(url: str) -> None:
    async def story() -> None:
        async with killick.open_async(url) as kd, kd.worker(lease_seconds=1), kd.worker(lease_seconds=1):
            handles = [await kd.start(long, id=f"long{number}") for number in range(3)]
            await BEGUN.wait()
            store = kd.runtime.store
            while any(found(store, f"long{number}").holder is None for number in range(3)):
                await asyncio.sleep(0.01)
            until = found(store, "long1").lease_until_us or 0
            with foreign(url, "SELECT 1 FROM heads WHERE run = 'long0' FOR UPDATE"):
                while store.now_us() < until + 3_000_000:
                    await asyncio.sleep(0.05)
                assert [found(store, f"long{number}").epoch for number in (1, 2)] == [1, 1]
            GOES_ON.set()
            assert [await asyncio.wait_for(handle.result(), 300) for handle in handles] == [1, 1, 1]

    asyncio.run(story())


def test_a_migration_that_others_block_lets_workers_through_and_names_who_blocks_it(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = PostgresStore(url)
    head = created(store, "a")
    step = "ALTER TABLE killick.heads ADD COLUMN colour text;"
    monkeypatch.setattr(postgres_server, "FORMAT", postgres_server.FORMAT + 1)
    monkeypatch.setattr(postgres_server, "migrations", lambda dialect, place, *, found, newest: [(newest, step)])
    refusals = list[str]()

    def migrate() -> None:
        with pytest.raises(StoreUnavailable) as caught:
            PostgresStore(url)
        refusals.append(str(caught.value))

    with foreign(url, "SELECT 1 FROM heads"):
        migrating = threading.Thread(target=migrate)
        migrating.start()
        appended = 0
        while migrating.is_alive():
            head = commit(store, following(head, "more"))
            appended += 1
    migrating.join()
    assert appended > 50, "appends do not wait behind the migration"
    assert "the migration of its tables waits for session" in refusals[0]
    assert "(report, idle in transaction for" in refusals[0]
    PostgresStore(url).close()
    assert commit(store, following(head, "after")).seq == appended + 2
    store.close()


def test_the_doctor_names_a_transaction_that_stays_open(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from killick.store.postgres import inspect

    store = PostgresStore(url)
    told = {one.name: one for one in store.conditions()}
    assert (told["transactions"].wrong, told["lock_timeout"].wrong) == (None, None)
    monkeypatch.setattr(inspect, "_TRANSACTION_SECONDS_MAX", -1)
    with foreign(url, "SELECT 1 FROM heads"):
        [wrong] = [one.wrong for one in store.conditions() if one.wrong]
    assert "idle_in_transaction_session_timeout" in str(wrong)
    store.close()
