"""A PostgreSQL store through PgBouncer, which gives each transaction another session of the server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import psycopg
import pytest

import killick
import servers
from killick.errors import StoreUnavailable
from killick.store.postgres.store import PostgresStore

pytestmark = pytest.mark.slow


@killick.tool(effect="transaction")
def put(number: int, tx: killick.Tx = killick.TX) -> int:
    tx.execute("INSERT INTO pooled VALUES (%s)", (number,))
    return number


@killick.tool(effect="idempotent")
async def double(number: int) -> int:
    return number * 2


@killick.agent
async def pooled_agent(run: killick.Run, number: int) -> int:
    for _ in range(3):
        number = await run.call(double, number)
        await run.call(put, number)
    return number + await run.wait("more")


@pytest.fixture(scope="module")
def pooler() -> Iterator[str]:
    with servers.pooler(servers.postgres()) as url:
        yield url


def namespace() -> str:
    return servers.postgres_store().rpartition("=")[2]


def test_a_store_needs_no_option_where_sessions_are_pooled() -> None:
    with (
        servers.pooler(servers.postgres(), mode="session", sessions=20) as url,
        contextlib.closing(PostgresStore(f"{url}?namespace={namespace()}")) as store,
    ):
        assert store.heads() == []


def test_a_store_that_does_not_know_of_its_pooler_names_the_option(pooler: str) -> None:
    with contextlib.closing(PostgresStore(f"{pooler}?namespace={namespace()}")) as store:
        assert store.heads() == []
        with psycopg.connect(pooler, prepare_threshold=None) as other:
            other.execute("SELECT 1")  # its transaction keeps the session that the statement was prepared on
            with pytest.raises(StoreUnavailable, match="pooler=transaction"):
                store.heads()


def test_a_role_that_commits_without_waiting_for_the_disk_is_refused(pooler: str) -> None:
    with psycopg.connect(servers.postgres(), autocommit=True) as direct:
        direct.execute("ALTER ROLE postgres SET synchronous_commit = off")
        try:
            with servers.pooler(servers.postgres()) as url, pytest.raises(StoreUnavailable, match="synchronous_commit"):
                PostgresStore(f"{url}?namespace={namespace()}&pooler=transaction")
        finally:
            direct.execute("ALTER ROLE postgres RESET synchronous_commit")
    with pytest.raises(StoreUnavailable, match="pooler=transaction"):
        PostgresStore(f"{pooler}?pooler=statement")


def test_runs_of_two_workers_complete_with_two_sessions_of_the_server(pooler: str) -> None:
    url = f"{pooler}?namespace={namespace()}&pooler=transaction"

    async def serve() -> list[int]:
        async with killick.open_async(url) as one, killick.open_async(url) as other:
            with psycopg.connect(servers.postgres(), autocommit=True) as direct:
                direct.execute("CREATE TABLE pooled (number bigint)")
            async with one.worker(), other.worker():
                handles = [await one.start(pooled_agent, number) for number in range(12)]
                for handle in handles:
                    await other.send(handle.id, "more", 1)
                return [await handle.result() for handle in handles]

    assert asyncio.run(serve()) == [number * 8 + 1 for number in range(12)]
    with psycopg.connect(servers.postgres(), autocommit=True) as direct:
        assert direct.execute("SELECT count(*) FROM pooled").fetchone() == (36,)
        direct.execute("DROP TABLE pooled")
