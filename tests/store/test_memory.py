"""The memory store keeps the contract."""

from __future__ import annotations

from pathlib import Path

import pytest

import killick
from killick.clock import Clock
from killick.errors import StoreUnavailable
from killick.store.memory import MemoryStore
from killick.store.protocol import Store
from store_contract import StoreContract


class TestMemoryStore(StoreContract):
    def make(self, tmp_path: Path, clock: Clock) -> Store:
        return MemoryStore(clock=clock)


@pytest.mark.parametrize(
    ("url", "option", "says"),
    [
        ("memory:", "busy_seconds", "memory: has no option 'busy_seconds'; it has clock, ids"),
        (
            "never.db",
            "bussy_seconds",
            "never.db: has no option 'bussy_seconds'; it has durability, busy",
        ),
    ],
)
def test_an_option_that_a_store_does_not_have_is_refused_with_those_it_has(url: str, option: str, says: str) -> None:
    with pytest.raises(StoreUnavailable) as refused:
        killick.open(url, **{option: 1})
    assert str(refused.value).startswith(says)
