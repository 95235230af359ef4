"""No statement of the hot path reads a whole table, whether the tables were analyzed or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import psycopg
import pytest

import servers
from killick.store.limits import TokenBucket
from killick.store.postgres.store import PostgresStore
from killick.store.records import IndexQuery, OutboxRow, RunQuery, TermBatch, TermRow
from killick.store.slots import Slot
from postgres_rows import FILLED
from store_contract.builders import TOKEN, blob, cached, creation, following, indexed, letter
from store_contract.probes import commit, created, deliver, found
from store_contract.slots import renewal

pytestmark = pytest.mark.slow

RUNS: Final = 20_000
TIMES: Final = 8
"""How often each is done: after five times PostgreSQL may plan a prepared statement once for all parameters."""

SMALL: Final = ("meta", "feed_end")


@pytest.fixture(scope="module", params=["analyzed", "never analyzed"])
def filled(request: pytest.FixtureRequest) -> Iterator[tuple[PostgresStore, psycopg.Connection[Any]]]:
    """A store with many old runs, which uses one session; and a connection that reads its statistics."""
    with servers.own_server(autovacuum="off") as server:
        store = PostgresStore(server.url, sessions=1)
        with psycopg.connect(server.url, autocommit=True) as sql:
            sql.execute("SET search_path = killick")
            sql.execute(FILLED.format(runs=RUNS))
            if request.param == "analyzed":
                sql.execute("ANALYZE")
            yield store, sql
        store.close()


def prepared(store: PostgresStore) -> dict[str, Callable[[int], object]]:
    """The operations of the hot path, by name; each is given how often it was done before."""
    heads = {name: created(store, name, index=indexed("running")) for name in ("bare", "whole")}
    for number in range(TIMES):
        created(store, f"lease{number}", index=indexed("waiting"))
        created(store, f"claim{number}", index=indexed("waiting", agent="claimed", wake_at_us=1))
    renewing = [created(store, f"renewing{number}", index=indexed()) for number in range(TIMES)]
    deliver(store, *(letter(head.run, "m", pieces=(blob("v"),)) for head in renewing))
    held = store.lease("old3", "me", seconds=60)

    def bare(number: int) -> None:
        heads["bare"] = commit(store, following(heads["bare"], f"e{number}"))

    def whole(number: int) -> None:
        deliver(store, letter("whole", f"m{number}"))
        parts: dict[str, Any] = {
            "index": indexed("running", tags=(f"t{number}",)), "pieces": (blob(f"v{number}"),), "takes": (number + 1,),
            "snapshot": cached(heads["whole"].seq + 1), "outbox": (OutboxRow(heads["whole"].seq + 1, "x"),),
            "sends": (letter("bare", f"s{number}"),), "claims": (TOKEN,) if not number else (),
        }  # fmt: skip
        heads["whole"] = commit(store, following(heads["whole"], f"e{number}", **parts))

    def terms(number: int) -> None:
        [run] = [each for each in store.unindexed(after=RUNS, limit=9) if each.run == "bare"] or [None]
        if run is not None:
            rows = (TermRow(7, 1, heads["bare"].seq),)
            store.index_terms([TermBatch(run="bare", after=run.indexed_to, up_to=heads["bare"].seq, terms=rows)])

    return {
        "append": bare,
        "append with all parts": whole,
        "create": lambda number: store.append([creation(store, f"new{number}", "one", index=indexed())]),
        "head": lambda number: found(store, f"old{number + 1}"),
        "opening": lambda number: store.opening(f"old{number + 1}", fold=1),
        "read": lambda number: store.read(f"old{number + 1}", after=1),
        "row": lambda number: store.row(f"old{number + 1}", 1),
        "pieces": lambda number: store.pieces([blob(f"v{number}").hash]),
        "snapshot": lambda number: store.snapshot(f"old{number + 1}", fold=1, at=2),
        "lease": lambda number: store.lease(f"lease{number}", "me", seconds=60),
        "renew": lambda number: store.renew("me", ["old3"], seconds=60),
        "claim": lambda number: store.claim("me", now_us=5, seconds=60, limit=1, agents=["claimed"]),
        "due": lambda number: store.due(5, agents=["claimed"]),
        "soonest": lambda number: store.soonest_us(agents=["claimed", "agent1"]),
        "release": lambda number: store.release("old3", epoch=held.epoch, holder="me"),
        "deliver": lambda number: deliver(store, letter("old5", f"d{number}")),
        "deliver to renewed runs": lambda number: deliver(
            store, letter("old7", f"r{number}"), letter("old5", f"e{number}")
        ),
        "refused delivery": lambda number: store.deliver([letter("old9", f"f{number}", slot=Slot("wait:1", "y", 1))]),
        "renewal": lambda number: store.append([renewal(store, renewing[number], f"renewed{number}")]),
        "slots": lambda number: store.slots(f"old{number + 1}"),
        "inbox": lambda number: store.inbox(f"old{number + 1}"),
        "message": lambda number: store.message(f"old{number + 1}", "1"),
        "owned": lambda number: store.owned(TOKEN.space, TOKEN.key),
        "index": lambda number: store.index(f"old{number + 1}"),
        "tags": lambda number: store.tags(f"old{number + 1}"),
        "reindex": lambda number: store.reindex(f"old{number + 1}", indexed(), at=2),
        "remove": lambda number: store.remove(f"old{number + 100}"),
        "statuses": lambda number: store.statuses(["old1", "old2"]),
        "tokens": lambda number: store.take_tokens([TokenBucket(b"b", 1, 10**9)]),
        "outbox": lambda number: store.outbox(after=RUNS - 5, limit=5),
        "listing": lambda number: store.runs(RunQuery(), limit=50),
        "listing by status": lambda number: store.runs(RunQuery(status=("waiting",)), limit=50),
        "listing by agent": lambda number: store.runs(RunQuery(agent="agent3"), limit=50),
        "listing by tag": lambda number: store.runs(RunQuery(tag="tag7"), limit=50),
        "asking": lambda number: store.asking(5, limit=50),
        "search": lambda number: store.search(IndexQuery([[number]], limit=5)),
        "index terms": terms,
    }


def scans(store: PostgresStore, sql: psycopg.Connection[Any]) -> dict[str, int]:
    """How often each table was read from its beginning to its end."""
    # A backend tells its counts once in a second, unless it is asked to at the end of its transaction.
    store._server.run(lambda session: session.script("SELECT pg_stat_force_next_flush()"))
    store._server.run(lambda session: session.script("SELECT 1"))
    tables = "SELECT relname::text, seq_scan FROM pg_stat_user_tables WHERE schemaname = 'killick'"
    return {table: count for table, count in sql.execute(tables).fetchall() if table not in SMALL}


def test_no_operation_of_the_hot_path_reads_a_whole_table(
    filled: tuple[PostgresStore, psycopg.Connection[Any]],
) -> None:
    store, sql = filled
    whole: dict[str, list[str]] = {}
    for name, operation in prepared(store).items():
        before = scans(store, sql)
        for number in range(TIMES):
            operation(number)
        after = scans(store, sql)
        if read := [table for table, count in after.items() if count != before[table]]:
            whole[name] = read
    assert whole == {}


def test_a_page_of_a_long_run_reads_that_page_alone(filled: tuple[PostgresStore, psycopg.Connection[Any]]) -> None:
    store, sql = filled
    columns = "(run, base, seq, hash, epoch, checksum, delivered_checksum)"
    sql.execute(f"INSERT INTO heads {columns} VALUES ('long', 0, 5000, '', 0, '', '')")
    number = "(SELECT number FROM heads WHERE run = 'long')"
    rows = "FROM generate_series(1, 5000) AS n"
    sql.execute(f"INSERT INTO events SELECT {number}, n, '', '', '' {rows}")
    sql.execute(f"INSERT INTO snapshots SELECT {number}, 1, n, '', '' {rows}")
    reads: dict[str, Callable[[], object]] = {
        "events": lambda: store.read("long", after=100, limit=10),
        "bodies": lambda: store.read("long", after=100, limit=10, data=False),
        "snapshot": lambda: store.snapshot("long", fold=1, at=4900),
    }
    for name, read in reads.items():
        before = rows_read(store, sql)
        for _ in range(TIMES):
            assert read()
        assert rows_read(store, sql) - before < 40 * TIMES, name


def test_a_page_of_a_rare_status_reads_no_newer_run_of_another(
    filled: tuple[PostgresStore, psycopg.Connection[Any]],
) -> None:
    store, sql = filled
    sql.execute(
        "INSERT INTO heads (number, run, base, seq, hash, epoch, checksum, agent, status, priority, started_at_us,"
        " changed_at_us, tags, delivered_checksum) SELECT -n, 'rare' || n, 0, 0, '', 0, '', 'rare', 'paused', 0, 0, 0,"
        " '{}', '' FROM generate_series(1, 10) AS n"
    )
    before = rows_read(store, sql)
    for _ in range(TIMES):
        assert len(store.runs(RunQuery(status=("paused", "code_mismatch")), limit=50)) == 10
        assert len(store.runs(RunQuery(status=("paused",), agent="rare"), limit=50)) == 10
    assert rows_read(store, sql) - before < TIMES * 50


def rows_read(store: PostgresStore, sql: psycopg.Connection[Any]) -> int:
    """How many rows were fetched by way of an index."""
    scans(store, sql)
    [(count,)] = sql.execute("SELECT sum(idx_tup_fetch)::bigint FROM pg_stat_user_tables WHERE schemaname = 'killick'")
    return int(count)
