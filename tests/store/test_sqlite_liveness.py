"""Locks that prove life: who looks whether a holder lives never makes one that does look dead."""

import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from killick.errors import StoreUnavailable
from killick.store import liveness
from killick.store.liveness import Holders


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "killick.db"


def holders(path: Path, *named: str) -> Holders:
    """The locks of one process, over a store whose leases name these holders."""
    return Holders(path, named=lambda: named)


def before_first_lock(monkeypatch: pytest.MonkeyPatch, do: Callable[[], object]) -> None:
    """Do something just before the next lock is asked for, once."""
    real, pending = fcntl.flock, [do]

    def flock(descriptor: int, operation: int) -> None:
        if pending:
            pending.pop()()
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)


def test_a_holder_lives_until_it_is_closed(path: Path) -> None:
    ours, theirs = holders(path), holders(path)
    assert not theirs.lives("w1")
    ours.lock("w1")
    ours.lock("w1")
    assert ours.lives("w1")
    assert theirs.lives("w1")
    ours.close()
    assert not theirs.lives("w1")
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


def test_a_lock_on_a_file_that_was_just_cleared_away_is_not_taken_for_proof(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = holders(path), holders(path)
    ours._file("w1").touch()
    before_first_lock(monkeypatch, lambda: theirs.lives("w1"))
    ours.lock("w1")
    assert theirs.lives("w1")
    ours.close()


def test_who_finds_a_dead_holder_does_not_clear_away_its_successor(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs, third = holders(path), holders(path), holders(path)
    ours._file("w1").touch()

    def succeed() -> None:
        assert not third.lives("w1")
        ours.lock("w1")

    before_first_lock(monkeypatch, succeed)
    assert theirs.lives("w1")
    assert third.lives("w1")
    ours.close()


def test_who_is_only_looked_at_can_still_become_a_holder(path: Path) -> None:
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


def test_files_of_holders_that_were_killed_are_removed_by_the_next_holder_and_no_others(path: Path) -> None:
    living, dead = holders(path), holders(path)
    living.lock("w1")
    dead.lock("w2")
    for descriptor in dead._held.values():
        os.close(descriptor)  # as the system does when a process is killed
    assert len([*path.parent.iterdir()]) == 2
    third = holders(path)
    third.lock("w3")
    assert {each.name for each in path.parent.iterdir()} == {living._file("w1").name, third._file("w3").name}
    assert third.lives("w1")
    dead._held.clear()
    living.close()
    third.close()
    assert [*path.parent.iterdir()] == []
