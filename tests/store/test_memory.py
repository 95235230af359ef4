"""The memory store keeps the contract."""

from __future__ import annotations

from pathlib import Path

from kedge.clock import Clock
from kedge.store.base import Store
from kedge.store.memory import MemoryStore
from kedge.testing import StoreContract


class TestMemoryStore(StoreContract):
    def make(self, tmp_path: Path, clock: Clock) -> Store:
        return MemoryStore(clock=clock)
