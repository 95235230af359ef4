"""Leases on one machine end by time that only ever grows: whoever sets the clock breaks none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from killick.clock import ManualClock
from killick.errors import RunBusy
from killick.store import MemoryStore, SqliteStore, Store
from store_contract.probes import created

DAY_US = 86_400_000_000


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    made = MemoryStore(clock=clock) if request.param == "memory" else SqliteStore(tmp_path / "killick.db", clock=clock)
    yield made
    made.close()


@pytest.mark.parametrize(
    "by_us", [DAY_US, -DAY_US // 24, DAY_US * 365], ids=["forward a day", "back an hour", "a year"]
)
def test_setting_the_clock_ends_no_lease_and_lengthens_none(store: Store, clock: ManualClock, by_us: int) -> None:
    created(store, "a")
    held = store.lease("a", "w1", seconds=30)
    clock.advance(20)
    clock.set_wall(clock.now_us() + by_us)
    assert store.renew("w1", ["a"], seconds=30) == {"a": held.epoch}
    clock.advance(29)
    assert store.claim("w2", now_us=clock.now_us(), seconds=30, limit=10) == []
    with pytest.raises(RunBusy):
        store.lease("a", "w2", seconds=30)
    clock.advance(1)
    assert store.lease("a", "w2", seconds=30).epoch == held.epoch + 1
