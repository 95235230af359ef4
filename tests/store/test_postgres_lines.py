"""A PostgreSQL store on the wire: one round trip and one flush a commit, lost answers, lost lines, restarts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import psycopg
import pytest
from msgspec.structs import replace

import servers
from killick.errors import (
    StoreUnavailable,
)
from killick.store.postgres.server import _is_transient  # pyright: ignore[reportPrivateUsage]
from killick.store.postgres.store import PostgresStore
from killick.store.records import Append, Delivered, Head, OutboxRow
from store_contract.builders import TOKEN, blob, cached, creation, following, indexed, letter
from store_contract.probes import chained, commit, created, deliver, found

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


@pytest.fixture
def proxy(url: str) -> Iterator[servers.Proxy]:
    with servers.Proxy(url) as made:
        yield made


def name(request: pytest.FixtureRequest, run: str = "") -> str:
    """A run that no other test here has."""
    return f"{request.node.name}{run}"


# one round trip, one flush ------------------------------------------------------------------------


@pytest.mark.parametrize(("runs", "rows"), [(1, 1), (1, 2), (1, 3), (1, 7), (50, 2)])
def test_a_batch_of_events_is_one_round_trip(
    request: pytest.FixtureRequest, url: str, proxy: servers.Proxy, runs: int, rows: int
) -> None:
    store = PostgresStore(proxy.url)
    heads = [created(store, name(request, f"{number}")) for number in range(runs)]
    for turn in range(4):
        before = proxy.round_trips
        results = store.append([following(head, *(f"{turn}/{row}" for row in range(rows))) for head in heads])
        # The first time a session is asked for something, it is prepared.
        assert not turn or proxy.round_trips - before == 1
        heads = [result for result in results if isinstance(result, Head)]
        assert len(heads) == runs
    store.close()


def test_whatever_a_batch_brings_is_one_round_trip(
    request: pytest.FixtureRequest, url: str, proxy: servers.Proxy
) -> None:
    store = PostgresStore(proxy.url)
    first = name(request)
    head, other = created(store, first, holder="w1"), created(store, f"{first} other")
    for turn in range(3):
        before = proxy.round_trips
        brings = {"index": indexed(), "pieces": (blob(f"{first}{turn}"),), "snapshot": cached(head.seq)}
        sends = (letter(other.run, f"m{turn}"),)
        outbox_rows = (OutboxRow(head.seq + 1, "x"),)
        child = creation(store, f"{first} child {turn}", "one", holder="w1", index=indexed())
        item = following(head, "more", sends=sends, outbox=outbox_rows, also=(child,), **brings)
        results = store.append([item, following(other, "bare"), creation(store, f"{first} new {turn}", "one")])
        assert not turn or proxy.round_trips - before == 1
        head, other, _ = [result for result in results if isinstance(result, Head)]
    store.close()


def test_a_commit_is_one_flush() -> None:
    with servers.own_server(autovacuum="off", checkpoint_timeout="1h", wal_writer_delay="10s") as server:
        store = PostgresStore(server.url)
        heads = [created(store, f"{number}") for number in range(20)]
        store.close()
        with psycopg.connect(server.url, autocommit=True) as sql:
            before = _flushes(sql)
            store = PostgresStore(server.url)
            for turn in range(100):
                heads[0] = commit(store, following(heads[0], f"{turn}"))
            for turn in range(10):
                results = store.append([following(head, "two", f"{turn}") for head in heads])
                heads = [result for result in results if isinstance(result, Head)]
            store.close()
            assert 110 <= _flushes(sql) - before <= 115


def _flushes(sql: psycopg.Connection[Any]) -> int:
    """How often the server flushed its WAL, once every session of a store has ended and told what it did."""
    patience = threading.Event()
    while sql.execute("SELECT 1 FROM pg_stat_activity WHERE application_name = 'killick'").fetchone():
        patience.wait(0.01)
    if sql.info.server_version >= 180000:
        told = sql.execute("SELECT sum(fsyncs) FROM pg_stat_io WHERE object = 'wal'").fetchone()
    else:
        told = sql.execute("SELECT wal_sync FROM pg_stat_wal").fetchone()
    assert told is not None
    return int(told[0])


# lost lines and restarts --------------------------------------------------------------------------


def test_an_append_whose_answer_was_lost_is_acknowledged_and_there_once(
    request: pytest.FixtureRequest, proxy: servers.Proxy
) -> None:
    store = PostgresStore(proxy.url)
    head = commit(store, following(created(store, name(request)), "two"))
    for item in (
        lambda head: following(head, "three"),
        lambda head: following(head, "four", claims=(replace(TOKEN, key=name(request).encode()),)),
        lambda head: following(head, *"56789"),
    ):
        proxy.cut_next_answer = True
        wanted: Append = item(head)
        head = commit(store, wanted)
        assert not proxy.cut_next_answer
        assert (head.seq, head.hash) == wanted.last
    chained(store, head.run)
    store.close()


def test_a_batch_to_one_run_whose_answer_was_lost_is_acknowledged_whole(
    request: pytest.FixtureRequest, proxy: servers.Proxy
) -> None:
    store = PostgresStore(proxy.url)
    head = created(store, name(request))
    warm = following(head, "two", index=indexed())
    [head] = [result for result in store.append([warm]) if isinstance(result, Head)]
    first = following(head, "three", index=indexed())
    second = following(replace(head, seq=3, hash=first.rows[0].hash), "four", index=indexed())
    proxy.cut_next_answer = True
    results = store.append([first, second, following(head, "another three")])
    assert [type(result).__name__ for result in results] == ["Head", "Head", "HeadMoved"]
    assert found(store, head.run) == results[1]
    chained(store, head.run)
    store.close()


def test_what_an_application_sets_for_its_session_is_undone(store: PostgresStore) -> None:
    for _ in range(2):
        with store.transaction() as transaction:
            assert transaction.connection.execute("SHOW synchronous_commit").fetchone() == ("on",)
            assert transaction.connection.execute("SHOW search_path").fetchone() == ('"$user", public',)
            transaction.connection.execute("SET synchronous_commit = off; SET search_path = pg_catalog")


def test_an_application_may_prepare_statements_and_roll_back_to_a_savepoint(
    request: pytest.FixtureRequest, store: PostgresStore
) -> None:
    head = created(store, name(request))
    for _ in range(2):
        with store.transaction() as transaction:
            [result] = transaction.append([following(head, "more")])
            assert isinstance(result, Head)
            theirs = transaction.connection
            theirs.execute("SELECT 1", prepare=True)
            with pytest.raises(psycopg.errors.DivisionByZero), theirs.transaction():
                theirs.execute("SELECT 1 / 0")
            theirs.execute("SELECT 2", prepare=True)
            [result] = transaction.append([following(result, "and more")])
            assert isinstance(result, Head)
        head = result
        assert store.head(head.run) == head
    chained(store, head.run)


def test_a_lease_or_a_claim_whose_answer_was_lost_is_taken_once(
    request: pytest.FixtureRequest, proxy: servers.Proxy
) -> None:
    store = PostgresStore(proxy.url)
    run, agent = name(request), name(request)
    created(store, run, index=indexed("waiting", agent=agent, wake_at_us=1))
    for answers, epoch in ((1, 1), (2, 2), (3, 3), (4, 4)):
        # Begin, take, commit: whichever of the answers is lost, it is taken once and known.
        _cut_after(proxy, answers - 1)
        if epoch % 2:
            assert store.lease(run, "w1", seconds=30).epoch == epoch
        else:
            [claimed] = store.claim("w1", now_us=2, seconds=30, limit=5, agents=[agent])
            assert claimed.head.epoch == epoch
        assert found(store, run).epoch == epoch
        store.release(run, epoch=epoch)
    store.close()


def _cut_after(proxy: servers.Proxy, answers: int) -> None:
    proxy.cut_after = answers
    proxy.cut_next_answer = True


def test_a_message_whose_answer_was_lost_is_still_fresh(request: pytest.FixtureRequest, proxy: servers.Proxy) -> None:
    store = PostgresStore(proxy.url)
    run = name(request)
    created(store, run)
    deliver(store, letter(run, "first"))
    proxy.cut_next_answer = True
    [told] = store.deliver([letter(run, "m", by="ann")])
    assert isinstance(told, Delivered)
    assert (told.fresh, told.message.number) == (True, 2)
    proxy.cut_next_answer = True
    [told] = store.deliver([letter(run, "m", by="bob")])
    assert isinstance(told, Delivered)
    assert (told.fresh, told.message.by) == (False, "ann")
    assert len(store.messages(run)) == 2
    store.close()


@pytest.mark.parametrize(
    ("said", "passes"),
    [
        ("the database system is shutting down", True),
        ("terminating connection due to administrator command", True),  # while a session of it was being opened
        ('password authentication failed for user "mia"', False),
    ],
)
def test_a_refusal_of_a_server_that_goes_down_passes(said: str, passes: bool) -> None:
    refused = psycopg.OperationalError(f'connection failed: connection to server at "db" failed: FATAL:  {said}')
    assert _is_transient(refused) == passes


def test_work_goes_on_across_restarts_of_the_server() -> None:
    with servers.own_server() as server:
        store = PostgresStore(server.url)
        rung: Queue[str] = Queue()
        store.watch(rung.put)
        heads = {run: created(store, run) for run in "abcd"}
        stop, done = threading.Event(), list[str]()

        def work(run: str) -> None:
            while not stop.is_set():
                heads[run] = commit(store, following(heads[run], "more"))
                done.append(run)

        threads = [threading.Thread(target=work, args=(run,)) for run in heads]
        for thread in threads:
            thread.start()
        for immediate in (True, False, True):
            many = len(done) + 20
            while len(done) < many:
                stop.wait(0.01)
            server.restart(immediate=immediate)
        many = len(done) + 20
        while len(done) < many:
            stop.wait(0.01)
        stop.set()
        for thread in threads:
            thread.join()
        for run, head in heads.items():
            assert store.head(run) == head
            chained(store, run)
        assert len(done) == sum(head.seq - 1 for head in heads.values())
        while rung.get(timeout=300) != "":
            pass
        # What is heard may be of an earlier restart than the last: whoever listens again is told to look at everything,
        # and hears of what comes after that.
        heard, number = "", 0
        while heard != "a":
            number += 1
            assert number < 1_000, "nobody is told any more"
            deliver(store, letter("a", f"after {number}"))
            with suppress(Empty):
                while (heard := rung.get(timeout=0.5)) != "a":
                    pass
        store.close()


def test_a_server_that_stays_away_is_told_of_after_a_while() -> None:
    with servers.own_server() as server:
        store = PostgresStore(server.url, busy_seconds=0.3)
        head = created(store, "a")
        server.stop()
        with pytest.raises(StoreUnavailable):
            store.append([following(head, "two")])
        with pytest.raises(StoreUnavailable):
            store.head("a")
        server.start()
        assert commit(store, following(head, "two")).seq == 2
        store.close()


def test_a_session_of_a_parent_process_is_not_used_by_its_child(store: PostgresStore, tmp_path: Path) -> None:
    import os

    store.heads()
    child = os.fork()
    if not child:
        code = 1
        try:
            store.heads()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    store.heads()


def test_a_lost_session_is_not_kept(store: PostgresStore) -> None:
    with psycopg.connect(servers.postgres(), autocommit=True) as admin:
        store.heads()
        ended = admin.execute(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = 'killick'"
        ).fetchone()
    assert ended is not None
    assert ended[0] > 0
    store.heads()
    assert isinstance(store.now_us(), int)


def test_who_watches_while_the_server_is_away_hears_as_soon_as_it_is_back() -> None:
    with servers.own_server() as server:
        store = PostgresStore(server.url, busy_seconds=0.3)
        created(store, "a")
        server.stop()
        rung: Queue[str] = Queue()
        store.watch(rung.put)
        server.start()
        assert rung.get(timeout=300) == ""
        deliver(store, letter("a", "after"))
        while rung.get(timeout=300) != "a":
            pass
        store.close()
