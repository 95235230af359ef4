"""Many workers on one PostgreSQL store: each run is claimed once, nobody waits in a circle, the feed loses nothing."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from msgspec.structs import replace

import servers
from killick.errors import (
    StoreBusy,
)
from killick.store.postgres.store import PostgresStore
from killick.store.records import OutboxRow
from store_contract.builders import blob, creation, following, indexed, letter
from store_contract.concurrency import in_threads
from store_contract.probes import chained, created, found

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


# many workers -------------------------------------------------------------------------------------

CLAIMING = """
import sys
from killick.store import open_store
store = open_store(sys.argv[1])
input()
while claimed := store.claim(sys.argv[2], now_us=2, seconds=60, limit=7, agents=["many"]):
    for one in claimed:
        print(one.head.run, one.head.epoch)
store.close()
"""


def test_processes_that_claim_at_once_get_each_run_once(url: str, store: PostgresStore) -> None:
    runs = [f"many-{number}" for number in range(500)]
    index = indexed("waiting", agent="many", wake_at_us=1)
    store.append([creation(store, run, "one", index=index) for run in runs])
    workers = [
        subprocess.Popen([sys.executable, "-c", CLAIMING, url, f"w{number}"], stdin=-1, stdout=-1, text=True)
        for number in range(2)
    ]
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    told = [worker.communicate()[0].splitlines() for worker in workers]
    assert sorted(line for lines in told for line in lines) == sorted(f"{run} 1" for run in runs)
    assert all(worker.returncode == 0 for worker in workers)


def test_a_claim_passes_over_a_run_that_somebody_is_writing_to(
    request: pytest.FixtureRequest, url: str, store: PostgresStore, sql: psycopg.Connection[Any]
) -> None:
    agent = name(request)
    for number in range(3):
        created(store, f"{agent}{number}", index=indexed("waiting", agent=agent, wake_at_us=number))
    impatient = PostgresStore(url, busy_seconds=0.1)
    with sql.transaction():
        sql.execute("SELECT * FROM heads WHERE run = %s FOR UPDATE", (f"{agent}0",))
        [first] = impatient.claim("w1", now_us=9, seconds=30, limit=1, agents=[agent])
        assert first.head.run == f"{agent}1"
        # What waits for the lock is told that somebody has it.
        with pytest.raises(StoreBusy):
            impatient.release(f"{agent}0", epoch=0, holder="w1")
            impatient.lease(f"{agent}0", "w1", seconds=30)
    impatient.close()


@pytest.mark.parametrize("counted", [False, True])
def test_many_due_runs_of_others_and_parked_ones_do_not_slow_a_claim(counted: bool) -> None:
    url = servers.postgres_store()
    store = PostgresStore(url)
    with psycopg.connect(servers.postgres(), autocommit=True) as sql:
        sql.execute(f"SET search_path = {servers.schema_of(url)}")
        # A third are due and somebody else's, a third wake later, and a third have no time to wake.
        sql.execute(
            "INSERT INTO heads (run, base, seq, hash, epoch, checksum, agent, status, priority, wake_at_us,"
            " started_at_us, changed_at_us, tags, delivered_checksum) SELECT n, 0, 0, '', 0, '', CASE n % 3 WHEN 0"
            " THEN 'else' ELSE 'mine' END, 'waiting', n % 4, CASE n % 3 WHEN 1 THEN 9000 WHEN 0 THEN 1 END, 0, 0,"
            " '{}', '' FROM generate_series(1, 20000) AS n"
        )
        if counted:
            sql.execute("ANALYZE heads")
        created(store, "due", index=indexed("waiting", agent="mine", wake_at_us=5))
        for _ in range(8):
            plan = sql.execute(
                "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON)"
                " SELECT * FROM due_runs(6, 6, ARRAY['mine'], NULL, NULL, 20, 63)"
            ).fetchone()
    assert plan is not None
    assert plan[0][0]["Plan"]["Shared Hit Blocks"] + plan[0][0]["Plan"]["Shared Read Blocks"] < 100
    [claimed] = store.claim("w1", now_us=6, seconds=30, limit=8, agents=["mine"])
    assert claimed.head.run == "due"
    store.close()


def test_batches_that_cross_each_other_never_wait_in_a_circle(
    request: pytest.FixtureRequest, url: str, store: PostgresStore, sql: psycopg.Connection[Any]
) -> None:
    other = PostgresStore(url)
    runs = [name(request, f"{number}") for number in range(6)]
    for run in runs:
        created(store, run, index=indexed())
    deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    before = sql.execute(deadlocks).fetchone()

    def work(thread: int) -> None:
        mine = (store, other)[thread % 2]
        for turn in range(12):
            order = runs[thread % 6 :] + runs[: thread % 6]
            order = order[:: -1 if turn % 2 else 1]
            shared = tuple(blob(f"{turn}-{number}") for number in range(5))[:: -1 if thread % 2 else 1]
            sends = tuple(letter(run, f"{thread}-{turn}") for run in order[1:4])
            items = [following(found(mine, run), f"{thread}", pieces=shared[:2]) for run in order[:2]]
            items += [following(found(mine, order[4]), "bare"), following(found(mine, order[5]), "bare")]
            mine.append([replace(items[0], sends=sends), *items[1:]])
            mine.deliver([letter(run, f"{thread}/{turn}", pieces=shared) for run in order])

    in_threads(work)
    for run in runs:
        chained(store, run)
        assert len(store.messages(run)) >= 96
    assert sql.execute(deadlocks).fetchone() == before
    assert store.inspect() == []
    other.close()


def test_who_is_stopped_because_of_a_circle_tries_again_and_nobody_hears_of_it(
    request: pytest.FixtureRequest, store: PostgresStore, sql: psycopg.Connection[Any]
) -> None:
    heads = [created(store, name(request, run)) for run in "ab"]
    results = list[Any]()
    appending = threading.Thread(target=lambda: results.extend(store.append([following(h, "two") for h in heads])))
    sql.execute("SET deadlock_timeout = '1min'")
    waiting = "SELECT 1 FROM pg_stat_activity WHERE application_name = 'killick' AND wait_event_type = 'Lock'"
    with sql.transaction():
        sql.execute("SELECT 1 FROM heads WHERE run = %s FOR UPDATE", (heads[1].run,))
        appending.start()
        while not sql.execute(waiting).fetchone():
            pass
        sql.execute("SELECT 1 FROM heads WHERE run = %s FOR UPDATE", (heads[0].run,))
    appending.join()
    assert [result.seq for result in results] == [2, 2]


def test_a_feed_that_many_write_to_loses_nothing(request: pytest.FixtureRequest, url: str) -> None:
    stores = [PostgresStore(url) for _ in range(3)]
    first = stores[0].outbox_end()
    seen, writing = list[Any](), threading.Event()

    def read() -> None:
        while not writing.is_set():
            seen.extend(stores[2].outbox(after=seen[-1].position if seen else first, limit=7))

    reader = threading.Thread(target=read)
    reader.start()

    def write(thread: int) -> None:
        mine = stores[thread % 2]
        for turn in range(25):
            run = name(request, f"{thread}-{turn}")
            mine.append([creation(mine, run, "one", outbox=(OutboxRow(1, "x"),))])

    in_threads(write)
    writing.set()
    reader.join()
    while more := stores[2].outbox(after=seen[-1].position, limit=50):
        seen += more
    assert sorted(one.run for one in seen) == sorted(name(request, f"{t}-{n}") for t in range(8) for n in range(25))
    assert [one.position for one in seen] == sorted({one.position for one in seen})
    for each in stores:
        each.close()
