"""A PostgreSQL store in its database: schemas, formats, settings, what it says, and what was changed from outside."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from queue import Queue
from typing import Any

import psycopg
import pytest
from msgspec.structs import replace

import servers
from killick.errors import (
    RunBusy,
    StoreBroken,
    StoreError,
    StoreFormat,
    StoreReadOnly,
    StoreUnavailable,
)
from killick.store import open_store
from killick.store.postgres import server as postgres_server
from killick.store.postgres.store import PostgresStore
from killick.store.records import Head
from killick.store.slots import Slot
from killick.store.sql import schema as schema_of
from store_contract.builders import TOKEN, blob, cached, creation, following, indexed, letter
from store_contract.concurrency import in_threads
from store_contract.probes import commit, created, deliver, event, found

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def url() -> str:
    """A store that these tests share; each has runs of its own."""
    return servers.postgres_store()


@pytest.fixture
def store(url: str) -> Iterator[PostgresStore]:
    made = PostgresStore(url)
    yield made
    made.close()


@pytest.fixture
def sql(url: str) -> Iterator[psycopg.Connection[Any]]:
    """Somebody with a connection of their own, who finds the store's tables."""
    with psycopg.connect(servers.postgres(), autocommit=True) as connection:
        connection.execute(f"SET search_path = {servers.schema_of(url)}")
        yield connection


def name(request: pytest.FixtureRequest, run: str = "") -> str:
    """A run that no other test here has."""
    return f"{request.node.name}{run}"


# schemas and formats ------------------------------------------------------------------------------


@pytest.mark.parametrize("namespace", ["acme", "7", "_", "x" * 48, "killick", "select"])
def test_a_namespace_is_a_store(namespace: str) -> None:
    store = PostgresStore(f"{servers.postgres()}?namespace={namespace}")
    rung: Queue[str] = Queue()
    stop = store.watch(rung.put)
    head = created(store, "a", index=indexed("waiting", wake_at_us=1), pieces=(blob("v"),))
    assert rung.get(timeout=300) == "a"
    assert commit(store, following(head, "two", index=indexed("waiting", wake_at_us=1))).seq == 2
    assert [one.head.run for one in store.claim("w", now_us=5, seconds=9, limit=1)] == ["a"]
    assert (store.inspect(), store.outbox()) == ([], [])
    stop()
    store.close()


@pytest.mark.parametrize("namespace", ["", "Acme", "a-b", "a b", "a.b", "käse", 'a"; --', "a%00", "x" * 49, "a%0A"])
def test_a_namespace_with_another_name_is_refused(namespace: str) -> None:
    with pytest.raises(StoreUnavailable, match="a namespace has 1 to 48"):
        PostgresStore(f"{servers.postgres()}?namespace={namespace}")


def test_two_schemas_are_two_stores_and_leave_the_search_path_alone() -> None:
    one, other = (PostgresStore(servers.postgres_store()) for _ in range(2))
    created(one, "a")
    assert (other.head("a"), one.id != other.id) == (None, True)
    with one.transaction() as transaction:
        path = transaction.connection.execute("SHOW search_path").fetchone()
    assert path == ('"$user", public',)
    with psycopg.connect(servers.postgres()) as theirs:
        # A connection of psycopg begins by itself, so nobody has to.
        assert one.join(theirs).is_open
        head = commit(one, following(found(one, "a"), "two"))
        [joined] = one.join(theirs).append([following(head, "three")])
        assert isinstance(joined, Head)
        assert one.head("a") == head
        theirs.commit()
        assert one.head("a") == joined
        assert theirs.execute("SELECT count(*) FROM pg_prepared_statements").fetchone() == (0,)
    one.close()
    other.close()


def test_a_connection_to_another_database_is_refused_and_stays_as_it_was(store: PostgresStore) -> None:
    with psycopg.connect(servers.postgres(), autocommit=True) as admin:
        admin.execute("DROP DATABASE IF EXISTS elsewhere")
        admin.execute("CREATE DATABASE elsewhere")
    with psycopg.connect(servers.postgres().removesuffix("postgres") + "elsewhere") as theirs:
        theirs.execute("SELECT 1")
        with pytest.raises(StoreError, match="another database"):
            store.join(theirs)
        theirs.execute("SELECT 1")
        theirs.rollback()


def test_only_who_may_create_a_store_does() -> None:
    url = servers.postgres_store()
    with pytest.raises(StoreUnavailable, match="no store is in this schema"):
        PostgresStore(url, create=False)
    PostgresStore(url).close()
    PostgresStore(url, create=False).close()


def test_a_schema_of_somebody_else_is_left_alone(sql: psycopg.Connection[Any]) -> None:
    sql.execute("CREATE SCHEMA killick_theirs; CREATE TABLE killick_theirs.things (x integer)")
    with pytest.raises(StoreUnavailable, match="not Killick's"):
        PostgresStore(f"{servers.postgres()}?namespace=theirs")


def test_many_that_open_a_new_store_at_once_make_one() -> None:
    url = servers.postgres_store()

    def work(thread: int) -> str:
        store = PostgresStore(url)
        store.close()
        return store.id

    assert len(set(in_threads(work))) == 1


def _shape(sql: psycopg.Connection[Any], schema: str) -> list[Any]:
    """All that a schema consists of, without its name."""
    found = sql.execute(
        "SELECT table_name::text, column_name::text, data_type, is_nullable, column_default"
        " FROM information_schema.columns WHERE table_schema = %(s)s"
        " UNION ALL SELECT tablename, indexname, indexdef, '', '' FROM pg_indexes WHERE schemaname = %(s)s"
        " UNION ALL SELECT proname, pg_get_functiondef(p.oid)::text, '', '', '' FROM pg_proc p"
        " JOIN pg_namespace n ON pronamespace = n.oid WHERE nspname = %(s)s ORDER BY 1, 2, 3",
        {"s": schema},
    ).fetchall()
    return [tuple(str(cell).replace(schema, "S") for cell in row) for row in found]


def test_a_store_of_the_format_before_is_migrated_to_equal_a_new_one(
    sql: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = "ALTER TABLE killick.heads ADD COLUMN colour text; CREATE INDEX heads_by_colour ON killick.heads (colour);"
    old, new = servers.postgres_store(), servers.postgres_store()
    before = PostgresStore(old)
    head = created(before, "a")
    monkeypatch.setattr(postgres_server, "FORMAT", postgres_server.FORMAT + 1)
    monkeypatch.setattr(postgres_server, "migrations", lambda dialect, place, *, found, newest: [(newest, step)])
    monkeypatch.setattr(postgres_server, "schema", lambda dialect: schema_of(dialect) + step)
    stores = [PostgresStore(url) for url in (old, new)]
    shapes = [_shape(sql, servers.schema_of(url)) for url in (old, new)]
    assert shapes[0] == shapes[1]
    # Who had it open before goes on: a format that only adds things is no reason to stop.
    assert commit(before, following(head, "two")) == stores[0].head("a")
    PostgresStore(old).close()
    for store in (before, *stores):
        store.close()


def test_a_store_of_a_format_before_the_first_release_is_refused_with_the_way_out(sql: psycopg.Connection[Any]) -> None:
    url = servers.postgres_store()
    schema = servers.schema_of(url)
    PostgresStore(url).close()
    old = str(postgres_server.FORMAT - 1).encode()
    put = f"UPDATE {schema}.meta SET value = %s, checksum = {schema}.meta_check(key, %s) WHERE key = 'format'"
    sql.execute(put, (old, old))
    with pytest.raises(StoreUnavailable, match="export its runs with the version that wrote it"):
        PostgresStore(url)


def test_an_older_build_reads_a_newer_format_that_only_adds_and_refuses_others(sql: psycopg.Connection[Any]) -> None:
    url = servers.postgres_store()
    schema = servers.schema_of(url)
    PostgresStore(url).close()
    put = f"UPDATE {schema}.meta SET value = %s, checksum = {schema}.meta_check(key, %s) WHERE key = %s"
    sql.execute(put, (b"9", b"9", "format"))
    PostgresStore(url).close()
    sql.execute(put, (b"9", b"9", "readable_from"))
    with pytest.raises(StoreFormat, match="format 9"):
        PostgresStore(url)


# what it says -------------------------------------------------------------------------------------


def test_a_password_is_in_no_message() -> None:
    there = servers.postgres().partition("@")[2]
    store = PostgresStore(f"postgresql://postgres:hunter2@{there}?namespace=secret")
    assert store.place == f"postgresql://{there}?namespace=secret"
    store.close()
    for wrong in (
        f"postgresql://nobody:hunter2@{there}",
        f"postgresql://postgres:hunter2@{there.partition('/')[0]}/nothing",
        "postgresql://postgres:hunter2@127.0.0.1:1/x",
        "postgresql://postgres:hunter2@127.0.0.1:port/x",
        f"postgresql://postgres:hunter2@{there}?namespace=&password=hunter2",
    ):
        with pytest.raises(StoreUnavailable) as caught:
            PostgresStore(wrong, busy_seconds=0.1)
        assert "hunter2" not in str(caught.value)


def test_a_url_without_a_host_is_opened_as_libpq_does() -> None:
    with psycopg.connect(servers.postgres()) as sql:
        folder, port = sql.execute(
            "SELECT current_setting('unix_socket_directories'), current_setting('port')"
        ).fetchone() or ("", "")
    rest = f"host={folder}&port={port}&user=postgres&namespace=hostless"
    for url in (f"postgresql:///postgres?{rest}", f"postgres:///postgres?{rest}"):
        store = open_store(url)
        assert store.place == "postgresql:///postgres?namespace=hostless"
        store.close()


def test_without_psycopg_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "killick.store.postgres.store", None)
    with pytest.raises(StoreUnavailable, match=r"pip install '\.\[postgres\]'"):
        open_store("postgresql://host/db")


def test_a_store_is_opened_by_its_url() -> None:
    url = servers.postgres_store()
    for scheme in ("postgresql", "postgres"):
        store = open_store(url.replace("postgresql", scheme, 1))
        assert isinstance(store, PostgresStore)
        store.close()


@pytest.mark.parametrize(("durability", "wanted"), [("power", "on"), ("process", "off")])
def test_what_a_commit_survives_does_not_hang_on_the_servers_default(durability: Any, wanted: str) -> None:
    with psycopg.connect(servers.postgres(), autocommit=True) as admin:
        for default in ("off", "on", "local"):
            admin.execute(f"ALTER DATABASE postgres SET synchronous_commit = {default}")
            store = PostgresStore(servers.postgres_store(), durability=durability)
            with store.transaction() as transaction:
                assert transaction.connection.execute("SHOW synchronous_commit").fetchone() == (wanted,)
            store.close()
        admin.execute("ALTER DATABASE postgres RESET synchronous_commit")


def test_what_its_promises_rest_on_is_told_and_what_is_wrong() -> None:
    store = PostgresStore(servers.postgres_store())
    told = {condition.name: condition for condition in store.conditions()}
    assert [one for one in told.values() if one.wrong] == []
    assert told["engine"].value.startswith("PostgreSQL ")
    store.close()
    with servers.own_server(fsync="off", full_page_writes="off") as server:
        store = PostgresStore(server.url)
        wrong = {condition.name: condition.wrong for condition in store.conditions() if condition.wrong}
        store.close()
    assert wrong.keys() == {"fsync", "full_page_writes"}
    assert "turn fsync on" in str(wrong["fsync"])


def test_a_database_that_cannot_be_written_says_so(sql: psycopg.Connection[Any]) -> None:
    url = servers.postgres_store()
    PostgresStore(url).close()
    store = PostgresStore(f"{url}&options=-c%20default_transaction_read_only%3Don")
    with pytest.raises(StoreReadOnly):
        created(store, "a")
    assert store.head("a") is None
    store.close()


def test_text_that_postgresql_cannot_keep_is_refused_in_a_line(store: PostgresStore) -> None:
    for item in (creation(store, "zero\0", "one"), creation(store, "zero", "one", index=indexed(tags=("a\0b",)))):
        with pytest.raises(StoreError, match="NUL character"):
            store.append([item])


def test_leases_end_by_the_databases_clock(request: pytest.FixtureRequest, store: PostgresStore) -> None:
    run = name(request)
    created(store, run)
    before = store.now_us()
    held = store.lease(run, "w1", seconds=30)
    assert held.lease_until_us is not None
    assert before + 30_000_000 <= held.lease_until_us <= store.now_us() + 30_000_000
    with pytest.raises(RunBusy):
        store.lease(run, "w2", seconds=30)
    store.release(run, epoch=1, left=True)
    assert (store.lives("w1"), store.proves_life) == (True, False)
    assert store.lease(run, "w2", seconds=30).epoch == 2


# tampering ----------------------------------------------------------------------------------------

TAMPERED = (
    ("heads", "UPDATE heads SET epoch = 7 WHERE run = %(run)s"),
    ("heads", "UPDATE heads SET seq = 1 WHERE run = %(run)s"),
    ("inbox", "UPDATE inbox SET sender = 'eve' WHERE number = %(number)s"),
    ("inbox", "UPDATE inbox SET taken = NULL WHERE number = %(number)s"),
    ("inbox", "UPDATE inbox SET root = 'eve' WHERE number = %(number)s"),
    ("inbox", "UPDATE inbox SET pieces = 'eve' WHERE number = %(number)s"),
    ("slots", "UPDATE slots SET places = 9 WHERE number = %(number)s"),
    ("slots", "INSERT INTO slots SELECT 77, name, token, places, slot_check(77, name, token, places) FROM slots"),
    ("claims", "UPDATE claims SET seq = 9 WHERE number = %(number)s"),
    ("pieces", "UPDATE pieces SET body = 'eve' WHERE hash = %(hash)s"),
    ("aside", "UPDATE aside SET data = 'eve' WHERE number = %(number)s"),
    ("events", "DELETE FROM heads WHERE run = %(run)s"),
)


@pytest.mark.parametrize(("where", "change"), TAMPERED, ids=[f"{where}-{n}" for n, (where, _) in enumerate(TAMPERED)])
def test_what_was_changed_from_outside_is_found(where: str, change: str) -> None:
    url = servers.postgres_store()
    store = PostgresStore(url)
    head = created(
        store, "a", "one", "two", "three", claims=(TOKEN,), pieces=(blob("v"),), slots=(Slot("wait:1", "2", 1),)
    )
    deliver(store, letter("a", "m"))
    commit(store, following(head, "four", takes=(1,)))
    store.repair(replace(head, seq=6, hash=b"6" * 32), keep=3, rows=[replace(event(store, "a", 3), seq=6)])
    assert store.inspect() == []
    [(number, _)] = store.heads()
    with psycopg.connect(servers.postgres()) as theirs:
        theirs.execute(f"SET search_path = {servers.schema_of(url)}")
        theirs.execute(change, {"run": "a", "number": number, "hash": blob("v").hash})
    assert where in {problem.where for problem in store.inspect()}
    assert where in {problem.where for problem in store.inspect(heal=True) if not problem.healed}
    store.close()


def test_a_count_of_messages_that_was_changed_is_told_by_the_index(
    request: pytest.FixtureRequest, store: PostgresStore, sql: psycopg.Connection[Any]
) -> None:
    run = name(request)
    head = created(store, run, index=indexed())
    deliver(store, letter(run, "m"))
    sql.execute("UPDATE heads SET delivered = 0 WHERE run = %s", (run,))
    row = store.index(run)
    assert row is not None
    assert row.delivered == -1
    assert store.reindex(run, indexed(), at=head.seq)
    row = store.index(run)
    assert row is not None
    assert row.delivered == 1


def test_derived_rows_that_are_nobodys_are_cleared_away() -> None:
    url = servers.postgres_store()
    store = PostgresStore(url)
    created(store, "a", index=indexed(tags=("t",)), snapshot=cached(1))
    with psycopg.connect(servers.postgres()) as theirs:
        theirs.execute(f"SET search_path = {servers.schema_of(url)}")
        theirs.execute("INSERT INTO tags VALUES ('x', 77); INSERT INTO marks VALUES (1, 1, 77, 1)")
        theirs.execute("INSERT INTO snapshots VALUES (77, 1, 1, '', ''); INSERT INTO piece_uses VALUES (77, 0, 1)")
    assert {problem.where for problem in store.inspect()} == {"tags", "marks", "snapshots", "piece_uses"}
    assert all(problem.healed for problem in store.inspect(heal=True))
    assert store.inspect() == []
    store.close()


def test_a_store_whose_id_was_changed_is_broken(sql: psycopg.Connection[Any]) -> None:
    url = servers.postgres_store()
    PostgresStore(url).close()
    schema = servers.schema_of(url)
    sql.execute(f"UPDATE {schema}.meta SET value = 'x' WHERE key = 'secret_key'")
    with pytest.raises(StoreBroken, match="id or key is damaged"):
        PostgresStore(url)
