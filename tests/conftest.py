"""What every test may ask for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kedge
from kedge.log import Log
from kedge.runtime.registry import AGENTS, TOOLS
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


@pytest.fixture(autouse=True)
def _declared_here(request: pytest.FixtureRequest) -> None:
    """Agents and tools are found by name, and the last one declared counts: a test's own come last."""
    beside = [module for name, module in list(sys.modules.items()) if name.startswith("simulation.")]
    mine = [request.module] if "simulation" not in request.module.__name__ else [*beside, request.module]
    for value in [value for module in mine for value in vars(module).values()]:
        if isinstance(value, kedge.Agent):
            AGENTS.add(value)
        elif isinstance(value, kedge.Tool):
            TOOLS[value.name] = value
