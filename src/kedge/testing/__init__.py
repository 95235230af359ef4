"""What tests of stores and agents need: a contract to keep, a store that fails, a process that dies anywhere.

A store of your own keeps the contract when this passes under pytest:

    class TestMyStore(StoreContract):
        def make(self, tmp_path, clock):
            return MyStore(tmp_path / "my.db", clock=clock)

Only `StoreContract` needs pytest, which is why it is imported when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kedge.testing.crashes import Scenario, Story, World, differences, killed_everywhere, simulate, tick, world
from kedge.testing.faults import FaultyStore, faulty

if TYPE_CHECKING:
    from kedge.testing.contract import StoreContract

__all__ = [
    "FaultyStore",
    "Scenario",
    "StoreContract",
    "Story",
    "World",
    "differences",
    "faulty",
    "killed_everywhere",
    "simulate",
    "tick",
    "world",
]


def __getattr__(name: str) -> Any:
    if name != "StoreContract":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import pytest

    # Asked before the first import, pytest explains failed assertions in the contract as in any test.
    pytest.register_assert_rewrite("kedge.testing.contract")
    from kedge.testing.contract import StoreContract

    return StoreContract
