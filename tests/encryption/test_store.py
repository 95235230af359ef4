"""A decrypting store keeps the contract of the store below it."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

import servers
from encryption.rings import beside, live_and_erase
from killick.clock import Clock
from killick.store.memory import MemoryStore
from killick.store.protocol import Store, raw_store
from killick.store.sqlite.store import SqliteStore
from store_contract import StoreContract


@pytest.mark.slow
class TestDecryptingSqliteStore(StoreContract):
    def make(self, tmp_path: Path, clock: Clock) -> Store:
        self._keys = MemoryStore()
        return beside(SqliteStore(tmp_path / "killick.db", clock=clock), self._keys, clock)

    def reopen(self, store: Store, clock: Clock) -> Store:
        return beside(SqliteStore(raw_store(store).place, clock=clock), self._keys, clock)

    def connect(self, store: Store) -> sqlite3.Connection:
        return sqlite3.connect(store.place, isolation_level=None)


def test_a_person_is_encrypted_and_erased_on_sqlite(tmp_path: Path) -> None:
    live_and_erase(str(tmp_path / "killick.db"))


@pytest.mark.slow
def test_a_person_is_encrypted_and_erased_on_postgresql() -> None:
    live_and_erase(servers.postgres_store())
