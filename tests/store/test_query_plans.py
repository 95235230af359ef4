"""No query that is asked for one run reads a whole table: a maintenance of all runs would be quadratic."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from typing import Final

from killick.store.sql import queries, schema

SQLITE_WALKS: Final = {
    # of a whole store
    "sweep", "lanes", "counts", "strays", "log_pieces", "count_heads", "stale_index_positions", "sweep_full",
    "all_heads", "all_messages", "all_claims", "all_slots", "all_displaced", "all_pieces", "all_terms",
    "all_index_positions", "clear_uses", "clear_runs", "clear_tags", "clear_snapshots", "clear_outbox",
    "clear_quarantine",
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
        if name in SOURCES or text.startswith("AND "):
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
