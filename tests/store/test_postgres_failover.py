"""PostgreSQL fails over: the primary dies, its streaming replica takes its place, and workers go on there."""

from __future__ import annotations

import asyncio
import threading

import psycopg
import pytest

import killick
import servers
from killick.errors import RunUnknown, StoreReadOnly
from killick.store.postgres.store import PostgresStore
from store_contract.builders import following
from store_contract.probes import commit, created, found

pytestmark = pytest.mark.slow

BOOKS: dict[str, int] = {}
"""The far side's own: a receipt for each key."""

REQUESTS: list[str] = []
HELD, GOES_ON = asyncio.Event(), asyncio.Event()


@killick.tool(name="failover_pay", effect="idempotent")
async def pay(what: str, key: killick.Key = killick.KEY) -> int:
    REQUESTS.append(key)
    return BOOKS.setdefault(key, len(BOOKS) + 1)


@killick.agent(name="failover_order")
async def order(run: killick.Run, what: str) -> list[int]:
    first = await run.call(pay, f"{what} first")
    await run.wait("go")
    return [first, await run.call(pay, f"{what} second"), await run.wait("done")]


@killick.tool(name="failover_hold", effect="idempotent")
async def hold(key: killick.Key = killick.KEY) -> int:
    REQUESTS.append(key)
    HELD.set()
    await GOES_ON.wait()
    return BOOKS.setdefault(key, len(BOOKS) + 1)


@killick.agent(name="failover_long")
async def long(run: killick.Run) -> int:
    await run.wait("go")
    return await run.call(hold)


def ask(url: str, sql: str) -> list[tuple[object, ...]]:
    with psycopg.connect(url, autocommit=True) as connection:
        answer = connection.execute(sql)
        return answer.fetchall() if answer.description else []


async def waits(kd: killick.AsyncClient, run: str, name: str) -> None:
    """Returns when a run waits for a message."""
    while [wait.name for wait in (await kd.info(run)).waits] != [name]:
        await asyncio.sleep(0.01)


def cut_off(pair: servers.Pair) -> None:
    """The replica has all there is, and receives nothing more."""
    [(end,)] = ask(pair.primary.url, "SELECT pg_current_wal_flush_lsn()")
    waits = f"SELECT pg_last_wal_replay_lsn() >= '{end}'"
    while ask(pair.replica.url, waits) != [(True,)]:
        pass
    ask(pair.replica.url, "ALTER SYSTEM SET primary_conninfo = ''")
    ask(pair.replica.url, "SELECT pg_reload_conf()")
    while ask(pair.primary.url, "SELECT 1 FROM pg_stat_replication"):
        pass


def test_a_step_that_runs_while_its_record_is_lost_is_taken_up_again_and_its_log_stays_whole() -> None:
    REQUESTS.clear()

    async def story(pair: servers.Pair) -> None:
        async with killick.open_async(pair.url) as kd, kd.worker(lease_seconds=3):
            handle = await kd.start(long, id="long")
            await waits(kd, "long", "go")
            await asyncio.to_thread(cut_off, pair)
            await kd.send("long", "go", None, id="go")
            await HELD.wait()
            await asyncio.to_thread(pair.restart)
            GOES_ON.set()
            await kd.send("long", "go", None, id="go")
            await asyncio.wait_for(handle.result(), 300)
            assert (await kd.store.verify()).problems == []

    with servers.Pair(synchronous=False) as pair:
        asyncio.run(story(pair))
    assert len(REQUESTS) == 2
    assert len(set(REQUESTS)) == 1, "under the same key"


def test_what_an_asynchronous_replica_had_not_received_happens_again_under_the_same_key() -> None:
    REQUESTS.clear()
    BOOKS.clear()

    async def story(pair: servers.Pair) -> list[int]:
        async with killick.open_async(pair.url) as kd, kd.worker(lease_seconds=3):
            kept = await kd.start(order, "kept", id="kept")
            await waits(kd, "kept", "go")
            await asyncio.to_thread(cut_off, pair)
            await kd.send("kept", "go", None, id="go")
            await kd.start(order, "lost", id="lost")
            await waits(kd, "kept", "done")
            await waits(kd, "lost", "go")
            assert len(REQUESTS) == 3
            await asyncio.to_thread(pair.restart)
            with pytest.raises(RunUnknown):
                await kd.state("lost")
            assert (await kd.store.verify()).problems == []
            # People and programs repeat what was lost: its acknowledgement says no more than the replica knew.
            await kd.send("kept", "go", None, id="go")
            again = await kd.start(order, "lost", id="lost")
            await kd.send("lost", "go", None, id="go")
            for run in ("kept", "lost"):
                await kd.send(run, "done", 7, id="done")
            results = [await asyncio.wait_for(each.result(), 300) for each in (kept, again)]
            assert (await kd.store.verify()).problems == []
        return [number for result in results for number in result]

    with servers.Pair(synchronous=False) as pair:
        assert sorted(asyncio.run(story(pair))) == [1, 2, 3, 4, 7, 7]
    assert len(BOOKS) == 4, "each effect is in the far side's books once"
    assert len(REQUESTS) == 6, "two that the replica had not received were asked for again"


def test_a_session_that_leads_to_a_standby_waits_for_its_promotion() -> None:
    """A name or a pooler may lead to the replica before it is promoted."""
    with servers.Pair() as pair:
        store = PostgresStore(pair.primary.url)
        created(store, "a")
        store.close()
        early = PostgresStore(pair.replica.url)
        while early.head("a") is None:
            pass  # it flushed the commit, and applies it a moment later
        head = found(early, "a")
        impatient = PostgresStore(pair.replica.url, busy_seconds=0.1)
        with pytest.raises(StoreReadOnly):
            impatient.append([following(head, "two")])
        impatient.close()
        written: list[int] = []
        writer = threading.Thread(target=lambda: written.append(commit(early, following(head, "two")).seq))
        writer.start()
        pair.restart()
        writer.join(300)
        assert written == [2]
        early.close()
