"""Locks that prove life: a held one that its holder lives, a free one that it is dead, a missing file neither."""

import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from killick.errors import StoreGone, StoreUnavailable
from killick.store import liveness
from killick.store.liveness import Holders


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "killick.db"


def holders(path: Path, *named: str) -> Holders:
    """The locks of one process, over a store whose leases name these holders."""
    return Holders(path, named=lambda: named)


def killed(path: Path, holder: str) -> None:
    """A process that took its lock and was killed: the system closes its descriptors."""
    dead = holders(path, holder, "named")
    dead.lock(holder)
    for descriptor in dead._held.values():
        os.close(descriptor)
    dead._held.clear()


def before_first_lock(monkeypatch: pytest.MonkeyPatch, do: Callable[[], object]) -> None:
    """Do something just before the next lock is asked for, once."""
    real, pending = fcntl.flock, [do]

    def flock(descriptor: int, operation: int) -> None:
        if pending:
            pending.pop()()
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)


def test_a_held_lock_proves_life_a_free_one_death_and_a_missing_file_neither(path: Path) -> None:
    ours, theirs = holders(path, "w1"), holders(path)
    assert theirs.lives("w1") is None
    ours.lock("w1")
    ours.lock("w1")
    assert ours.lives("w1")
    assert theirs.lives("w1")
    ours.close()
    assert theirs.lives("w1") is False


def test_a_holder_that_no_lease_names_removes_its_file_at_the_end(path: Path) -> None:
    ours = holders(path)
    ours.lock("w1")
    ours.close()
    assert os.listdir(path.parent) == []


def test_two_cannot_be_the_same_holder(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "_NAPS_SECONDS", (0.0,))
    ours, theirs = holders(path), holders(path)
    ours.lock("w1")
    with pytest.raises(StoreUnavailable, match="another process is holder 'w1'"):
        theirs.lock("w1")
    ours.close()
    theirs.lock("w1")
    theirs.close()


def test_a_lock_on_a_file_that_was_just_removed_is_not_taken_for_proof(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = holders(path), holders(path)
    killed(path, "w1")
    before_first_lock(monkeypatch, ours._file("w1").unlink)
    ours.lock("w1")
    assert theirs.lives("w1")
    ours.close()


def test_a_test_of_a_dead_holder_does_not_find_its_successor_dead(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs, third = holders(path), holders(path), holders(path)
    killed(path, "w1")

    def succeed() -> None:
        ours._file("w1").unlink()
        ours.lock("w1")

    before_first_lock(monkeypatch, succeed)
    assert theirs.lives("w1")
    assert third.lives("w1")
    ours.close()


def test_a_holder_that_is_only_tested_can_still_take_its_lock(path: Path) -> None:
    looking, stop = holders(path), threading.Event()

    def look() -> None:
        while not stop.is_set():
            looking.lives("w1")

    thread = threading.Thread(target=look)
    thread.start()
    failed: list[Any] = []
    try:
        for _ in range(200):
            ours = holders(path)
            ours.lock("w1")
            failed += [] if holders(path).lives("w1") else ["dead"]
            ours.close()
    finally:
        stop.set()
        thread.join()
    assert failed == []


def test_a_deleted_file_of_a_living_holder_is_created_again_with_its_next_lease(path: Path) -> None:
    ours, theirs = holders(path), holders(path)
    ours.lock("w1")
    ours._file("w1").unlink()
    assert theirs.lives("w1") is None
    ours.lock("w1")
    assert theirs.lives("w1")
    ours.close()


def test_the_next_holder_removes_the_files_of_dead_ones_that_no_lease_names(path: Path) -> None:
    living, third = holders(path, "named"), holders(path, "named")
    living.lock("living")
    killed(path, "named")
    killed(path, "unnamed")
    third.lock("third")
    left = {living._file(each).name for each in ("living", "named", "third")}
    assert {each.name for each in path.parent.iterdir()} == left
    assert third.lives("named") is False
    living.close()
    third.close()
    assert [each.name for each in path.parent.iterdir()] == [third._file("named").name]


def test_a_store_that_cannot_be_read_loses_no_proof(path: Path) -> None:
    def fail() -> list[str]:
        raise StoreGone(str(path))

    ours = Holders(path, named=fail)
    ours.lock("w1")
    ours.close()
    assert holders(path).lives("w1") is False
