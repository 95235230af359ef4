"""What every test may ask for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kedge.log import Log
from kedge.store import MemoryStore, SqliteStore, Store


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """An empty store of each kind that comes with Kedge."""
    made: Store = MemoryStore() if request.param == "memory" else SqliteStore(tmp_path / "kedge.db")
    yield made
    made.close()


@pytest.fixture
def log(store: Store) -> Iterator[Log]:
    """A log that makes snapshots often, so that short stories cross many."""
    made = Log(store, snapshot_every=16)
    yield made
    made.close()
