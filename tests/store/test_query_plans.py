"""No query that is asked for one run reads a whole table: a maintenance of all runs would be quadratic."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from typing import Any, Final

import psycopg

import servers
from killick.store.postgres.store import PostgresStore
from killick.store.sql import queries, schema
from postgres_rows import FILLED

SQLITE_WALKS: Final = {
    # of a whole store
    "sweep", "lanes", "counts", "strays", "log_pieces", "count_heads", "stale_index_positions", "sweep_full",
    "all_heads", "all_messages", "all_claims", "all_slots", "all_displaced", "all_pieces", "all_terms",
    "all_index_positions", "clear_uses", "clear_runs", "clear_tags", "clear_snapshots", "clear_outbox",
    "clear_quarantine", "known_pieces", "known_runs", "keep_pieces",
    # of the search index, to drop the terms of up to 500 runs: an index by run would double it
    "drop_terms",
    # of an index, up to its first entry
    "wake_queues",
}  # fmt: skip
"""The queries that read all rows of a table."""

SMALL: Final = {"meta", "sqlite_master", "sqlite_sequence", "json_each", "CONSTANT", "names", "lines"}
"""Tables that do not grow with the runs, and the results of other parts of a query."""

SOURCES: Final = {"from_runs": "", "from_tags": " AND tag = ?", "from_heads": "", "from_held": " AND holder = ?"}
"""What a listing reads, each with the condition that it is read for."""


def sqlite_queries() -> Iterator[tuple[str, str]]:
    """Yields each complete query with its name; a listing once for each source."""
    texts = vars(queries("sqlite"))
    for name, text in texts.items():
        rebuilds = re.search(r"{(table|fresh|columns)}|sqlite_schema", text) is not None
        if name in SOURCES or text.startswith("AND ") or rebuilds:
            continue
        for source, condition in SOURCES.items() if "{source}" in text else [("", "")]:
            parts = {"source": texts.get(source, ""), "conditions": condition, "agents": "", "numbers": "?"}
            yield name, re.sub(r"{(\w+)}", lambda part: parts[part[1]], text)


def parameters(sql: str) -> list[None]:
    last = 0
    for number in re.findall(r"\?(\d*)", sql):
        last = max(last, int(number)) if number else last + 1
    return [None] * last


def test_a_sqlite_query_reads_a_whole_table_only_if_it_is_meant_to() -> None:
    db = sqlite3.connect(":memory:")
    db.executescript(schema("sqlite"))
    walks = set()
    for name, sql in sqlite_queries():
        plan = [row[3] for row in db.execute(f"EXPLAIN QUERY PLAN {sql}", parameters(sql))]
        scanned = {step.split()[1] for step in plan if step.startswith("SCAN ")}
        if {table for table in scanned - SMALL if not table.startswith("(subquery")}:
            walks.add(name)
    db.close()
    assert walks == SQLITE_WALKS


# PostgreSQL ---------------------------------------------------------------------------------------

POSTGRES_WALKS: Final = {
    # of a whole store
    "meta", "counts", "agents", "names", "wrong_rows", "wrong_pieces", "strays", "all_terms", "all_index_positions",
    "unused", "stale_index_positions", "sweep", "sweep_full", "holdings",
    "clear_uses", "clear_tags", "clear_snapshots", "clear_outbox",
    # of the search index, to drop the terms of up to 500 runs: an index by run would double it
    "drop_terms",
}  # fmt: skip


def postgres_queries() -> Iterator[tuple[str, str]]:
    """Yields each query that reads tables, with its name. What functions read is in `test_postgres_plans.py`."""
    for name, text in vars(queries("postgres")).items():
        if "killick." in text and re.match(r"\(?(WITH|SELECT|INSERT|UPDATE|DELETE)", text):
            yield name, text


def walks_of(plan: dict[str, Any], first_columns: dict[str, str]) -> Iterator[str]:
    """Yields the tables and indexes that a plan reads from end to end: without a condition on the first column."""
    index, condition = plan.get("Index Name"), plan.get("Index Cond", "")
    if plan["Node Type"] == "Seq Scan" and plan["Relation Name"] != "feed_end":
        yield plan["Relation Name"]
    elif index in first_columns and not re.search(rf"\b{re.escape(first_columns[index])}\b", condition):
        yield index
    for part in plan.get("Plans", ()):
        yield from walks_of(part, first_columns)


def test_a_postgresql_query_reads_a_whole_table_only_if_it_is_meant_to() -> None:
    url = servers.postgres_store()
    PostgresStore(url).close()
    schema_name = servers.schema_of(url)
    walks: dict[str, set[str]] = {}
    with psycopg.connect(servers.postgres(), autocommit=True) as sql:
        sql.execute(f"SET search_path = {schema_name}")
        sql.execute(FILLED.format(runs=2_000))
        # In a small table a walk is cheap: what could be a walk in a large one is made dear.
        sql.execute("ANALYZE; SET enable_seqscan = off; SET enable_mergejoin = off; SET enable_hashjoin = off")
        sql.execute("SET plan_cache_mode = force_generic_plan")
        columns = f"SELECT indexname::text, pg_get_indexdef(format('{schema_name}.%I', indexname)::regclass, 1, false)"
        indexes = sql.execute(f"{columns} FROM pg_indexes WHERE schemaname = '{schema_name}'").fetchall()
        first = {index: column.strip('"') for index, column in indexes}
        for name, text in postgres_queries():
            filled = {"rows": "($7::bigint, $8::bytea, $9::bytea, $10::bytea)", "conditions": "", "locked": ""}
            filled |= {"found": f"SELECT * FROM {schema_name}.heads WHERE number < $1", "status": "waiting"}
            made = re.sub(r"{(\w+)}", lambda part: filled[part[1]], text).replace("killick.", f"{schema_name}.")
            count = max([int(number) for number in re.findall(r"\$(\d+)", made)], default=0)
            nulls = f"({', '.join(['NULL'] * count)})" if count else ""
            sql.execute(f"PREPARE q AS {made}")
            [(found,)] = sql.execute(f"EXPLAIN (FORMAT JSON) EXECUTE q{nulls}").fetchall()
            sql.execute("DEALLOCATE q")
            if read := set(walks_of(found[0]["Plan"], first)):
                walks[name] = read
    assert not walks.keys() - POSTGRES_WALKS, walks
