"""The memory store keeps the contract."""

from __future__ import annotations

from pathlib import Path

from killick.clock import Clock
from killick.store.memory import MemoryStore
from killick.store.protocol import Store
from store_contract import StoreContract


class TestMemoryStore(StoreContract):
    def make(self, tmp_path: Path, clock: Clock) -> Store:
        return MemoryStore(clock=clock)
