"""Every operation of the store fails once, in turn: nothing acknowledged is lost, and the run goes on."""

from pathlib import Path
from typing import Literal

import pytest
from stories import Story, started

from faulty_store import faulty
from killick.errors import KillickError, StoreUnavailable
from killick.log import Log, verify
from killick.store import MemoryStore, SqliteStore, Store

EVENTS = 60


def tell(store: Store, acknowledged: list[int]) -> None:
    """A story, told through one store; what was acknowledged is noted as it comes."""
    log = Log(store, snapshot_every=8)
    try:
        first = started()
        handle = log.create(first.event, first.values or {}, holder="w1")
        acknowledged.append(handle.seq)
        for number, batch in enumerate(Story(3).entries(EVENTS)):
            if number % 3 == 0:
                handle.append_behind(*batch)
                handle.barrier()
            else:
                handle.append(*batch)
            acknowledged.append(handle.seq)
            if number % 7 == 6:
                log.state("run_1", handle.seq // 2)
                handle = log.open("run_1")
    finally:
        log.close()


def operations(make: Store) -> int:
    counting = faulty(make, fail_at=10**9, when="before")
    tell(counting, [])
    return counting.operations


@pytest.mark.gate("memory-before", "memory-after")
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_failing_any_operation_loses_nothing_that_was_acknowledged(
    tmp_path: Path, kind: str, when: Literal["before", "after"]
) -> None:
    def make(name: str) -> Store:
        return MemoryStore() if kind == "memory" else SqliteStore(tmp_path / f"{name}.db", durability="process")

    clean = make("clean")
    total = operations(clean)
    expected = Log(clean).head("run_1").seq
    clean.close()
    assert total > 40
    for failing in range(1, total + 1):
        store = make(str(failing))
        acknowledged: list[int] = [0]
        broken = faulty(store, fail_at=failing, when=when, error=StoreUnavailable("disk", "it failed this once"))
        with pytest.raises(KillickError):
            tell(broken, acknowledged)
        case = f"{when} operation {failing}, {broken.failed}"
        log = Log(store, snapshot_every=8)
        head = store.head("run_1")
        assert (head.seq if head else 0) >= acknowledged[-1], case
        assert head is None or head.seq <= expected, case
        report = verify(log)
        assert report.problems == [], (case, report.problems)
        if head is not None:
            handle = log.open("run_1")
            for batch in Story(4).entries(10):
                handle.append(*batch)
            assert verify(log).problems == [], case
        log.close()
        store.close()
