"""A PostgreSQL store whose server is full, ends sessions at random, or limits the time of a statement."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections import Counter
from contextlib import ExitStack
from typing import Any, Final

import psycopg
import pytest

import killick
import servers
from killick.errors import StoreUnavailable
from killick.store.postgres import server as postgres_server
from killick.store.postgres.server import _is_transient  # pyright: ignore[reportPrivateUsage]
from killick.store.postgres.store import PostgresStore
from killick.store.records import Head
from seeds import draw_seed
from store_contract.builders import following, indexed
from store_contract.probes import chained, commit, created

pytestmark = pytest.mark.slow

SLOTS: Final = 20
CLIENTS: Final = 40
BOOKS: Counter[str] = Counter()
"""The far side's own: how often each key was asked for."""


@killick.tool(name="storms_pay", effect="idempotent")
async def pay(what: str, key: killick.Key = killick.KEY) -> str:
    BOOKS[key] += 1
    return what


@killick.agent(name="storms_order")
async def order(run: killick.Run, number: int) -> list[str]:
    return [await run.call(pay, f"{number}/{step}") for step in range(10)]


def full(server: servers.Server, opened: ExitStack, *, but: int) -> None:
    """Other programs take all sessions of a server but a few."""
    for _ in range(SLOTS - but):
        opened.enter_context(psycopg.connect(server.url))


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "trying for up to" in record.getMessage()]


def test_more_clients_than_the_server_has_room_for_all_get_through(caplog: pytest.LogCaptureFixture) -> None:
    """They come at once; each takes one session or two, and leaves."""
    heads = list[Head]()
    together = threading.Barrier(CLIENTS)

    def work(url: str, number: int) -> None:
        together.wait()
        store = PostgresStore(url, sessions=1)
        head = created(store, f"run{number}")
        for turn in range(5):
            head = commit(store, following(head, f"{turn}"))
        store.close()
        heads.append(head)

    with servers.own_server(max_connections=str(SLOTS)) as server:
        threads = [threading.Thread(target=work, args=(server.url, number)) for number in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        store = PostgresStore(server.url)
        assert sorted(head.run for head in heads) == sorted(f"run{number}" for number in range(CLIENTS))
        for head in heads:
            assert store.head(head.run) == head
            chained(store, head.run)
        store.close()
    assert len(lines(caplog)) <= CLIENTS, "a line each at most"


def test_a_full_server_is_waited_for_when_a_store_is_opened_with_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(postgres_server, "_OPENING_SECONDS_MAX", 0.01)
    logged = threading.Event()

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.set()

    logger, listening = logging.getLogger("killick"), Listening()
    logger.addHandler(listening)
    opened = list[PostgresStore]()
    with servers.own_server(max_connections=str(SLOTS)) as server:
        with ExitStack() as others:
            full(server, others, but=0)
            opening = threading.Thread(target=lambda: opened.append(PostgresStore(server.url)))
            opening.start()
            assert logged.wait(300)
            with pytest.raises(StoreUnavailable, match="too many clients"):
                PostgresStore(server.url, busy_seconds=0.1)
        opening.join()
        created(opened[0], "a")
        opened[0].close()
    logger.removeHandler(listening)
    [line] = lines(caplog)
    assert "too many clients already; trying for up to 60 s" in line


def test_threads_of_one_store_share_the_one_session_that_a_full_server_gives() -> None:
    with servers.own_server(max_connections=str(SLOTS)) as server, ExitStack() as others:
        store = PostgresStore(server.url)
        heads = [created(store, f"run{number}") for number in range(8)]
        full(server, others, but=1)
        rung = store.watch(lambda run: None)  # it listens as soon as there is room; nobody waits for that

        def work(head: Head) -> None:
            for turn in range(20):
                head = commit(store, following(head, f"{turn}"))

        threads = [threading.Thread(target=work, args=(head,)) for head in heads]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for head in heads:
            assert (store.head(head.run) or head).seq == 21
        rung()
        store.close()


@pytest.mark.parametrize(
    "said",
    [
        "sorry, too many clients already",
        "remaining connection slots are reserved for roles with the SUPERUSER attribute",
        'too many connections for role "app"',
        "no more connections allowed (max_client_conn)",
        "the database system is starting up",
    ],
)
def test_a_server_without_room_is_asked_again(said: str) -> None:
    assert _is_transient(psycopg.OperationalError(f'connection to server at "db" failed: FATAL:  {said}'))


def test_sessions_that_are_ended_at_random_lose_and_repeat_nothing() -> None:
    BOOKS.clear()
    seed = draw_seed()
    chance = random.Random(seed)
    stop, ended = threading.Event(), list[int]()

    def strike(url: str) -> None:
        sql = "SELECT pid FROM pg_stat_activity WHERE application_name = 'killick'"
        with psycopg.connect(url, autocommit=True) as admin:
            while not stop.wait(chance.uniform(0.005, 0.05)):
                pids = [pid for (pid,) in admin.execute(sql).fetchall()]
                for pid in chance.sample(pids, min(len(pids), chance.randint(1, 3))):
                    admin.execute("SELECT pg_terminate_backend(%s)", (pid,))
                    ended.append(pid)

    async def story(url: str) -> None:
        async with (
            killick.open_async(url) as one, killick.open_async(url) as other,
            one.worker(lease_seconds=3), other.worker(lease_seconds=3),
        ):  # fmt: skip
            handles = [await one.start(order, number, id=f"order{number}") for number in range(30)]
            for number, handle in enumerate(handles):
                wanted = [f"{number}/{step}" for step in range(10)]
                assert await asyncio.wait_for(handle.result(), 300) == wanted, seed
            assert (await one.store.verify()).problems == []

    with servers.own_server() as server:
        PostgresStore(server.url).close()
        striking = threading.Thread(target=strike, args=(server.url,))
        striking.start()
        try:
            asyncio.run(story(server.url))
        finally:
            stop.set()
            striking.join()
    assert len(ended) > 10
    assert (len(BOOKS), set(BOOKS.values())) == (300, {1}), seed


def test_a_statement_timeout_of_the_role_ends_no_maintenance_and_is_named_where_it_ends_a_statement() -> None:
    url = servers.postgres_store()
    schema = servers.schema_of(url)
    store = PostgresStore(url)
    created(store, "a", index=indexed())
    store.close()
    slow: Any = f"""
        CREATE OR REPLACE FUNCTION {schema}.count_check(number bigint, delivered bigint) RETURNS bytea
        LANGUAGE plpgsql AS $$ BEGIN
            PERFORM pg_sleep(0.2);
            RETURN substring(sha256(int8send(number) || int8send(delivered)) for 8);
        END $$;
        CREATE FUNCTION {schema}.wait() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            PERFORM pg_sleep(0.2);
            RETURN NULL;
        END $$;
        CREATE TRIGGER wait BEFORE DELETE ON {schema}.pieces FOR EACH STATEMENT EXECUTE FUNCTION {schema}.wait()
    """
    with psycopg.connect(servers.postgres(), autocommit=True) as admin:
        admin.execute(slow)
    hurried = PostgresStore(f"{url}&options=-c%20statement_timeout%3D100")
    with pytest.raises(StoreUnavailable, match="statement timeout; raise statement_timeout for this role"):
        hurried.index("a")
    assert hurried.sweep() == 0
    assert hurried.inspect() == []
    hurried.close()
