"""The SQLite store keeps the contract."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from killick.clock import Clock
from killick.store.protocol import Store
from killick.store.sqlite.store import SqliteStore
from store_contract import StoreContract


class TestSqliteStore(StoreContract):
    def make(self, tmp_path: Path, clock: Clock) -> Store:
        return SqliteStore(tmp_path / "killick.db", clock=clock)

    def reopen(self, store: Store, clock: Clock) -> Store:
        return SqliteStore(store.place, clock=clock)

    def connect(self, store: Store) -> sqlite3.Connection:
        return sqlite3.connect(store.place, isolation_level=None)
