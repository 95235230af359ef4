"""The PostgreSQL store keeps the contract."""

from __future__ import annotations

import atexit
from functools import cache
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest

import servers
from killick.clock import Clock
from killick.store.postgres.store import PostgresStore
from killick.store.protocol import Store
from store_contract import StoreContract

TABLES: Final = [
    "heads", "events", "pieces", "piece_uses", "inbox", "slots", "claims", "tags", "snapshots", "aside", "marks",
    "marked", "feed", "rate_limits",
]  # fmt: skip


@cache
def place() -> tuple[str, psycopg.Connection[Any]]:
    """One schema for all of these tests, and a connection to empty it: that is much quicker than making one."""
    url = servers.postgres_store()
    PostgresStore(url).close()
    connection = psycopg.connect(servers.postgres(), autocommit=True)
    atexit.register(connection.close)
    return url, connection


def emptied() -> str:
    url, connection = place()
    schema = servers.schema_of(url)
    deleted = "".join(f"DELETE FROM {schema}.{table};" for table in TABLES)
    deleted += f"UPDATE {schema}.feed_end SET position = 0; DROP TABLE IF EXISTS ledger;"
    connection.execute(f"SET client_min_messages = warning; BEGIN; {deleted} COMMIT")
    return url


@pytest.mark.gate(1)
class TestPostgresStore(StoreContract):
    placeholder = "%s"

    def make(self, tmp_path: Path, clock: Clock) -> Store:
        return PostgresStore(emptied(), clock=clock)

    def reopen(self, store: Store, clock: Clock) -> Store:
        return PostgresStore(place()[0], clock=clock)

    def connect(self, store: Store) -> psycopg.Connection[Any]:
        return psycopg.connect(servers.postgres(), autocommit=True)
