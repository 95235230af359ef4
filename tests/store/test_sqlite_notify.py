"""Notifications between processes: immediate, without leftovers of dead watchers, and harmless to writers."""

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


def test_another_process_is_notified_of_a_message_and_removes_its_pipe(store: SqliteStore, folder: Path) -> None:
    child = Child(Path(store.place))
    assert len(os.listdir(folder)) == 1
    deliver(store, letter("a", "m"))
    child.hears("a")
    child.end()
    assert not folder.exists()


def test_the_pipe_of_a_killed_process_is_removed_by_the_next_notifier(store: SqliteStore, folder: Path) -> None:
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


def test_a_watcher_that_does_not_read_blocks_no_notifier(store: SqliteStore, folder: Path) -> None:
    folder.mkdir()
    os.mkfifo(folder / "stuck")
    stuck = os.open(folder / "stuck", os.O_RDWR | os.O_NONBLOCK)
    for turn in range(600):
        deliver(store, *(letter("a", f"{turn}-{number}-{'x' * 20}") for number in range(2)))
        store._notifier.notify(["r" * 400])
    assert len(store.inbox("a")) == 1_200
    os.close(stuck)
    deliver(store, letter("a", "last"))
    assert not folder.exists()


def test_a_write_without_a_notification_is_detected(store: SqliteStore) -> None:
    received: Queue[str] = Queue()
    stop = store.watch(received.put)
    other = sqlite3.connect(store.place, isolation_level=None)
    other.execute("UPDATE runs SET wake_at_us = 1")
    assert received.get(timeout=SECONDS) == ""
    with pytest.raises(Empty):
        received.get(timeout=2 * notify.POLL_SECONDS)
    other.close()
    stop()


def test_a_watcher_is_notified_where_no_pipe_can_be_created(store: SqliteStore, folder: Path) -> None:
    folder.write_text("not a folder")
    other = SqliteStore(store.place)
    received: Queue[str] = Queue()
    stop = store.watch(received.put)
    deliver(other, letter("a", "m"))
    assert received.get(timeout=SECONDS) == ""
    deliver(store, letter("a", "m2"))
    assert received.get(timeout=SECONDS) == "a"
    stop()
    other.close()


@pytest.mark.parametrize("run", ["x" * 600, "two\nlines", "ü" * 300])
def test_a_run_whose_id_fits_no_line_is_notified_without_it(store: SqliteStore, run: str) -> None:
    created(store, run, index=indexed("waiting"))
    other = SqliteStore(store.place)
    received: Queue[str] = Queue()
    other.watch(received.put)
    deliver(store, letter(run, "m"))
    assert received.get(timeout=SECONDS) == ""
    other.close()


def test_a_watcher_that_fails_harms_neither_the_writer_nor_the_others(store: SqliteStore) -> None:
    received: Queue[str] = Queue()

    def fail(run: str) -> None:
        raise RuntimeError(run)

    stops = [store.watch(fail), store.watch(received.put)]
    deliver(store, letter("a", "m"))
    assert received.get(timeout=SECONDS) == "a"
    other = SqliteStore(store.place)
    deliver(other, letter("a", "m2"))
    assert received.get(timeout=SECONDS) == "a"
    for stop in stops:
        stop()
    other.close()


def test_a_watcher_may_stop_or_close_the_store_from_within(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "other.db")
    other = SqliteStore(tmp_path / "other.db")
    created(store, "a", index=indexed("waiting"))
    received: Queue[str] = Queue()

    def end(run: str) -> None:
        store.close()
        received.put(run)

    store.watch(end)
    deliver(other, letter("a", "m"))
    assert received.get(timeout=SECONDS) in ("a", "")
    other.close()


def test_bare_appends_notify_nothing(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(store, following(found(store, "a"), "two"))
    monkeypatch.setattr(store._notifier, "notify", None)
    commit(store, following(found(store, "a"), "three"))
