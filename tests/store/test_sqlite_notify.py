"""Bells between processes: who watches hears at once, the dead leave nothing behind, and who rings is not harmed."""

import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, Queue

import pytest

from killick.store import SqliteStore, notify
from store_contract.builders import following, indexed, letter
from store_contract.probes import commit, created, deliver, found

SECONDS = 300.0

WATCH = """
import sys
from killick.store import SqliteStore
store = SqliteStore(sys.argv[1])
store.watch(lambda run: print(run, flush=True))
print("watching", flush=True)
sys.stdin.readline()
store.close()
"""


class Child:
    """A process that watches a store and says what it hears."""

    def __init__(self, path: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WATCH, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.hears("watching")

    def hears(self, run: str) -> None:
        assert self.process.stdout is not None
        while (line := self.process.stdout.readline()) != f"{run}\n":
            assert line == "\n", f"heard {line!r} instead of {run}"

    def end(self) -> None:
        self.process.communicate("\n", timeout=SECONDS)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    store = SqliteStore(tmp_path / "killick.db")
    created(store, "a", index=indexed("waiting"))
    yield store
    store.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "killick.db-bells"


def test_another_process_hears_of_a_message_and_takes_its_bell_along(store: SqliteStore, folder: Path) -> None:
    child = Child(Path(store.place))
    assert len(os.listdir(folder)) == 1
    deliver(store, letter("a", "m"))
    child.hears("a")
    child.end()
    assert not folder.exists()


def test_the_bell_of_a_killed_process_is_cleared_away_by_who_rings_next(store: SqliteStore, folder: Path) -> None:
    killed, other = Child(Path(store.place)), Child(Path(store.place))
    killed.process.kill()
    killed.process.communicate()
    assert len(os.listdir(folder)) == 2
    deliver(store, letter("a", "m"))
    other.hears("a")
    assert len(os.listdir(folder)) == 1
    other.end()
    assert not folder.exists()


def test_a_killed_process_was_the_last_and_nothing_is_left_of_it(store: SqliteStore, folder: Path) -> None:
    child = Child(Path(store.place))
    child.process.kill()
    child.process.communicate()
    deliver(store, letter("a", "m"))
    assert not folder.exists()


def test_who_does_not_read_harms_nobody_who_rings(store: SqliteStore, folder: Path) -> None:
    folder.mkdir()
    os.mkfifo(folder / "stuck")
    stuck = os.open(folder / "stuck", os.O_RDWR | os.O_NONBLOCK)
    for turn in range(600):
        deliver(store, *(letter("a", f"{turn}-{number}-{'x' * 20}") for number in range(2)))
        store._bells.ring(["r" * 400])
    assert len(store.inbox("a")) == 1_200
    os.close(stuck)
    deliver(store, letter("a", "last"))
    assert not folder.exists()


def test_a_writer_who_does_not_ring_is_heard_of_too(store: SqliteStore) -> None:
    rung: Queue[str] = Queue()
    stop = store.watch(rung.put)
    other = sqlite3.connect(store.place, isolation_level=None)
    other.execute("UPDATE runs SET wake_at_us = 1")
    assert rung.get(timeout=SECONDS) == ""
    with pytest.raises(Empty):
        rung.get(timeout=2 * notify.LOOK_SECONDS)
    other.close()
    stop()


def test_where_no_bell_can_be_hung_a_watcher_still_hears(store: SqliteStore, folder: Path) -> None:
    folder.write_text("not a folder")
    other = SqliteStore(store.place)
    rung: Queue[str] = Queue()
    stop = store.watch(rung.put)
    deliver(other, letter("a", "m"))
    assert rung.get(timeout=SECONDS) == ""
    deliver(store, letter("a", "m2"))
    assert rung.get(timeout=SECONDS) == "a"
    stop()
    other.close()


@pytest.mark.parametrize("run", ["x" * 600, "two\nlines", "ü" * 300])
def test_a_run_whose_id_fits_no_line_is_rung_for_without_it(store: SqliteStore, run: str) -> None:
    created(store, run, index=indexed("waiting"))
    other = SqliteStore(store.place)
    rung: Queue[str] = Queue()
    other.watch(rung.put)
    deliver(store, letter(run, "m"))
    assert rung.get(timeout=SECONDS) == ""
    other.close()


def test_a_watcher_that_fails_harms_neither_the_writer_nor_the_others(store: SqliteStore) -> None:
    rung: Queue[str] = Queue()

    def fail(run: str) -> None:
        raise RuntimeError(run)

    stops = [store.watch(fail), store.watch(rung.put)]
    deliver(store, letter("a", "m"))
    assert rung.get(timeout=SECONDS) == "a"
    other = SqliteStore(store.place)
    deliver(other, letter("a", "m2"))
    assert rung.get(timeout=SECONDS) == "a"
    for stop in stops:
        stop()
    other.close()


def test_a_watcher_may_stop_or_close_the_store_from_within(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "other.db")
    other = SqliteStore(tmp_path / "other.db")
    created(store, "a", index=indexed("waiting"))
    rung: Queue[str] = Queue()

    def end(run: str) -> None:
        store.close()
        rung.put(run)

    store.watch(end)
    deliver(other, letter("a", "m"))
    assert rung.get(timeout=SECONDS) in ("a", "")
    other.close()


def test_bare_appends_ring_no_bell(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(store, following(found(store, "a"), "two"))
    monkeypatch.setattr(store._bells, "ring", None)
    commit(store, following(found(store, "a"), "three"))
