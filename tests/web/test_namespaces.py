"""Two tenants on one PostgreSQL server: nothing of one reaches the other, in one process, over HTTP or by SQL."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from typing import Any, Final, NamedTuple

import psycopg
import pytest
from starlette.testclient import TestClient

import killick
import servers
from killick.cli.main import main
from killick.errors import RunUnknown, StoreUnavailable
from killick.store import namespaces, open_store
from killick.store.limits import TokenBucket
from killick.web.app import ROUTES, asgi
from killick.web.auth.access import OwnerAccess
from killick.web.routes import Route
from killick.workers.tokens import issue
from web.desk import ask, asks, book

pytestmark = pytest.mark.slow

NAMES: Final = ("acme", "globex")


@killick.agent(name="tenants_book")
async def books(run: killick.Run, room: str) -> str:
    return await run.call(book, room)


@killick.agent(name="tenants_old")
async def archived(run: killick.Run, room: str) -> str:
    return await run.call(book, room)


async def serve_all(kd: killick.Client) -> None:
    """A worker takes what is due."""
    async with kd.worker() as worker:
        await worker.until_idle()


class Tenant(NamedTuple):
    url: str
    kd: killick.Client
    token: str


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Tenant, Tenant]]:
    """Two tenants with runs of the same ids, an admin's token each, and one's values nowhere in the other's."""
    with contextlib.ExitStack() as open_clients:
        made: list[Tenant] = []
        for name in NAMES:
            url = servers.postgres_store()
            kd = open_clients.enter_context(killick.open(url, keys=bytes(range(32))))
            kd.start(asks, f"{name} wants to know", id="r", tags=[name], subject="ann")
            kd.run(books, f"the room of {name}", id="b", subject="bob")
            kd.advance("r")
            made.append(Tenant(url, kd, issue(kd.runtime.engine, f"admin_{name}", "admin")[1]))
        yield made[0], made[1]


# runs ---------------------------------------------------------------------------------------------


def test_a_run_of_one_is_unknown_to_the_other(pair: tuple[Tenant, Tenant]) -> None:
    for here, there, name in (*((*pair, "acme"),), *((*pair[::-1], "globex"),)):
        only = here.kd.start(books, "a cabin", id=f"only_{name}").id
        assert only in {each.id for each in here.kd.list()}
        assert only not in {each.id for each in there.kd.list()}
        assert here.kd.state("b").result == f"booking of the room of {name}"
        for touch in (there.kd.state, there.kd.cancel, there.kd.pause, lambda run: there.kd.send(run, "x", 1)):
            with pytest.raises(RunUnknown):
                touch(only)
        assert not there.kd.list(tag=name)
        here.kd.advance(only)


def test_a_worker_takes_only_runs_of_its_own(pair: tuple[Tenant, Tenant]) -> None:
    acme, globex = pair
    mine, theirs = (each.kd.start(books, "an attic", id="w") for each in pair)
    asyncio.run(serve_all(acme.kd))
    assert mine.result() == "booking of an attic"
    assert globex.kd.runtime.store.claim("w", now_us=1 << 62, seconds=1, limit=9)[0].head.run == theirs.id
    globex.kd.runtime.store.release("w", epoch=globex.kd.runtime.log.head("w").epoch)
    globex.kd.advance("w")


def test_a_notification_reaches_its_own_namespace_alone(pair: tuple[Tenant, Tenant]) -> None:
    heard: tuple[Queue[str], Queue[str]] = (Queue(), Queue())
    stops = [each.kd.runtime.store.watch(queue.put) for each, queue in zip(pair, heard, strict=True)]
    for tenant, run in zip(pair, ("bell_of_acme", "bell_of_globex"), strict=True):
        tenant.kd.start(books, "a bell", id=run)
    said = [[queue.get(timeout=300)] for queue in heard]
    for tenant, run in zip(pair, ("bell_of_acme", "bell_of_globex"), strict=True):
        tenant.kd.advance(run)
    for stop in stops:
        stop()
    for found, queue in zip(said, heard, strict=True):
        while not queue.empty():
            found.append(queue.get())
    assert [{run for run in found if run.startswith("bell")} for found in said] == [
        {"bell_of_acme"},
        {"bell_of_globex"},
    ]


def test_a_rate_limit_and_a_unique_right_are_of_one_namespace(pair: tuple[Tenant, Tenant]) -> None:
    acme, globex = (each.kd.runtime.store for each in pair)
    minute = TokenBucket(b"crm", 60_000_000, 60_000_000)
    assert acme.take_tokens([minute]) == 0
    assert acme.take_tokens([minute]) > 0
    assert globex.take_tokens([minute]) == 0
    assert acme.outbox() is not globex.outbox()
    assert acme.id != globex.id
    assert acme.secret_key != globex.secret_key


# erasure and retention ----------------------------------------------------------------------------


def test_an_erased_person_and_an_archived_run_of_one_stay_in_the_other(
    pair: tuple[Tenant, Tenant], tmp_path: Path
) -> None:
    acme, globex = pair
    for each in pair:
        each.kd.run(books, "the same room", id="same", subject="carl")
        each.kd.run(archived, "the same room", id="old")
    assert acme.kd.store.erase("carl").runs == 1
    assert acme.kd.runtime.log.rows("same")[0].data is None
    assert globex.kd.state("same").result == "booking of the same room"
    pruned = acme.kd.store.prune(older=0, to=tmp_path / "old.archive", agent="tenants_old")
    assert pruned.runs == ("old",)
    with pytest.raises(RunUnknown):
        acme.kd.state("old")
    assert globex.kd.state("old").result == "booking of the same room"
    assert [each.kd.store.verify().problems for each in pair] == [[], []]
    assert globex.kd.store.rotate_keys() > 0


# over HTTP ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_a_token_of_one_opens_nothing_of_the_other_and_its_own_shows_nothing_of_the_other(
    route: Route, pair: tuple[Tenant, Tenant]
) -> None:
    for here, there, name, other in ((*pair, *NAMES), (*pair[::-1], *NAMES[::-1])):
        app, their_app = asgi(here.kd), asgi(there.kd)
        if route.scope is not None:
            assert ask(their_app, route.method, f"/api/v1{route.path}", here.token, run="r")[0] == 401
            for page in route.pages:
                assert ask(their_app, "GET", page, here.token, run="r")[0] == 303
        if route.method == "GET":
            paths = {"run": "b", "n": "1", "step": "1", "seq": "1", "name": "input"}
            for path in (f"/api/v1{route.path}", *route.pages):
                status, _, body = ask(app, "GET", path, here.token, **paths)
                assert status < 500
                assert other.encode() not in body, path
                assert name.encode() in body or "{run}/steps" not in path, "the pages do show what is theirs"


def test_a_session_of_one_is_none_of_the_other_though_the_servers_share_their_secret(
    pair: tuple[Tenant, Tenant], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KILLICK_SECRET_KEY", "k" * 32)
    with contextlib.ExitStack() as opened:
        urls = [servers.postgres_store() for _ in NAMES]
        clients = [opened.enter_context(killick.open(url)) for url in urls]
        access = [OwnerAccess(each) for each in clients]
        cookie = {"Cookie": f"{access[0].session_cookie}={access[0].session('owner')}"}
        answers = [
            TestClient(asgi(client, access=each), base_url="http://localhost").get("/api/v1/health", headers=cookie)
            for client, each in zip(clients, access, strict=True)
        ]
    assert [answer.status_code for answer in answers] == [200, 401]


# roles --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def role(name: str, *grants: str) -> Iterator[str]:
    """A role that may log in and has these rights alone. Yields the URL of the server as this role."""
    with psycopg.connect(servers.postgres(), autocommit=True) as admin:
        admin.execute(f"CREATE ROLE {name} LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE")
        try:
            for grant in grants:
                admin.execute(grant)
            yield servers.postgres().replace("postgres@", f"{name}@")
        finally:
            admin.execute(f"DROP OWNED BY {name}; DROP ROLE {name}")


def grants(schema: str, name: str) -> list[str]:
    """What a role needs to use a store that the operator created."""
    return [
        f"GRANT USAGE ON SCHEMA {schema} TO {name}",
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO {name}",
        f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA {schema} TO {name}",
    ]


def refused(sql: psycopg.Connection[Any], statement: str) -> bool:
    try:
        sql.execute(statement)
    except psycopg.errors.InsufficientPrivilege:
        return True
    return False


def test_a_role_with_the_rights_of_one_schema_works_there_and_is_locked_out_of_the_other(
    pair: tuple[Tenant, Tenant],
) -> None:
    urls = [servers.postgres_store() for _ in NAMES]
    mine, theirs = (servers.schema_of(url) for url in urls)
    for url in urls:
        open_store(url).close()
    with role("acme_app", *grants(mine, "acme_app")) as base:
        own, other = (f"{base}?{url.partition('?')[2]}" for url in urls)
        with killick.open(own) as kd:
            handle = kd.start(books, "a loft")
            asyncio.run(serve_all(kd))
            assert handle.result() == "booking of a loft"
            assert kd.store.verify().problems == []
        with pytest.raises(StoreUnavailable, match="permission denied"):
            killick.open(other)
        assert list(namespaces(base)) == [mine.removeprefix("killick_")]
        with psycopg.connect(base, autocommit=True) as sql:
            tables = [table for (table,) in sql.execute(
                "SELECT relname FROM pg_class JOIN pg_namespace n ON relnamespace = n.oid"
                " WHERE nspname = %s AND relkind = 'r'", (theirs,)
            )]  # fmt: skip
            assert len(tables) > 10
            assert all(refused(sql, f"SELECT * FROM {theirs}.{table}") for table in tables)
            for forbidden in (
                f"SELECT {theirs}.channel()", f"CREATE TABLE {mine}.x ()", "CREATE SCHEMA killick_x",
                f"SELECT nextval('{theirs}.numbers')", f"DROP SCHEMA {theirs} CASCADE", f"DELETE FROM {theirs}.heads",
            ):  # fmt: skip
                assert refused(sql, forbidden), forbidden


def test_a_role_of_the_database_can_neither_read_nor_guess_the_channel_of_a_store(pair: tuple[Tenant, Tenant]) -> None:
    url = servers.postgres_store()
    schema, store = servers.schema_of(url), open_store(url)
    heard: Queue[str] = Queue()
    stop = store.watch(heard.put)
    with role("curious") as base, psycopg.connect(base, autocommit=True) as sql:
        with psycopg.connect(servers.postgres()) as admin:
            [(channel,)] = admin.execute(f"SELECT {schema}.channel()").fetchall()
        assert channel.startswith("killick:")
        sources = sql.execute("SELECT prosrc, pg_get_functiondef(oid) FROM pg_proc WHERE prokind = 'f'").fetchall()
        seen = sql.execute("SELECT query FROM pg_stat_activity").fetchall()
        assert channel.removeprefix("killick:") not in f"{sources}{seen}"
    stop()
    store.close()


def test_a_role_that_owns_its_empty_schema_creates_its_store(pair: tuple[Tenant, Tenant]) -> None:
    url = servers.postgres_store()
    schema = servers.schema_of(url)
    with role("owns", f"CREATE SCHEMA {schema} AUTHORIZATION owns") as base:
        with killick.open(f"{base}?{url.partition('?')[2]}") as kd:
            assert kd.run(books, "a shed") == "booking of a shed"
        with pytest.raises(StoreUnavailable, match="permission denied"):
            killick.open(f"{base}?namespace=elsewhere")


# the command line ---------------------------------------------------------------------------------


def test_the_namespaces_of_a_server_are_listed_with_their_sizes(
    pair: tuple[Tenant, Tenant], capsys: pytest.CaptureFixture[str]
) -> None:
    base, wanted = servers.postgres(), {each.url.rpartition("=")[2] for each in pair}
    assert main(["store", "namespaces", "--json", "--store", base]) == 0
    found = {each["namespace"]: each["bytes"] for each in json.loads(capsys.readouterr().out)}
    assert wanted <= found.keys()
    assert all(found[name] > 100_000 for name in wanted)
    assert main(["store", "namespaces", "--store", base]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in wanted)
    assert main(["store", "namespaces", "--store", "killick.db"]) == 2
    assert "give each tenant a file of its own" in capsys.readouterr().err


def test_a_command_names_the_store_with_its_namespace_and_without_its_password(
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = servers.postgres_store().replace("postgres@", "postgres:hunter2@")
    open_store(url).close()
    for words in (["ps"], ["show", "r9"], ["store", "doctor"]):
        main([*words, "--store", url])
        said = capsys.readouterr()
        assert url.partition("?")[2] in f"{said.out}{said.err}"
        assert "hunter2" not in f"{said.out}{said.err}"
