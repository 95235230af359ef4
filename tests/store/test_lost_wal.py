"""A SQLite file that lost its WAL is refused: what was acknowledged is not silently forgotten."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

import killick
from killick.errors import StoreUnavailable
from killick.store import SqliteStore
from killick.store.records import row_check
from killick.store.sqlite import file as sqlite_file

PROGRAM = """
import os, signal, sys, killick
from killick.store.sqlite import file

file.WAL_CHANGES_MAX = int(sys.argv[3])


@killick.tool(effect="idempotent")
async def count(number: int) -> int:
    return number


@killick.agent
async def counting(run: killick.Run, steps: int) -> int:
    for number in range(steps):
        await run.call(count, number)
    return steps


kd = killick.open(sys.argv[1])
kd.run(counting, int(sys.argv[2]), id="counted")
if sys.argv[4:] == ["erases"]:
    kd.runtime.store.purge()
    kd.run(counting, 1, id="after")
os.kill(os.getpid(), signal.SIGKILL)
"""


def killed(path: Path, *more: str, steps: int = 2, changes_max: int = 1_500) -> None:
    """A process that writes to a store and is killed, so that its WAL stays."""
    command = [sys.executable, "-c", PROGRAM, str(path), str(steps), str(changes_max), *more]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == -9, ended.stderr
    assert wal_of(path).stat().st_size


def wal_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


def events_of(path: Path) -> int:
    with killick.open(path) as kd:
        report = kd.verify()
        assert report.problems == []
        return report.events


CASES = pytest.mark.parametrize(
    ("steps", "changes_max", "more"),
    [(2, 1_500, ()), (30, 20, ()), (2, 1_500, ("erases",))],
    ids=["young", "checkpointed", "erased"],
)


@pytest.mark.gate(1)
@CASES
def test_a_store_whose_wal_was_deleted_after_a_kill_is_refused(
    tmp_path: Path, steps: int, changes_max: int, more: tuple[str, ...]
) -> None:
    path = tmp_path / "killick.db"
    killed(path, *more, steps=steps, changes_max=changes_max)
    wal_of(path).unlink()
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match=r"killick\.db-wal, is gone.*accept_lost_wal"):
            SqliteStore(path)


@pytest.mark.gate(1)
@CASES
def test_a_copy_without_the_wal_is_refused_and_one_with_it_is_whole(
    tmp_path: Path, steps: int, changes_max: int, more: tuple[str, ...]
) -> None:
    path, alone, both = (tmp_path / name for name in ("killick.db", "alone.db", "both.db"))
    killed(path, *more, steps=steps, changes_max=changes_max)
    shutil.copy(path, alone)
    shutil.copy(path, both)
    shutil.copy(wal_of(path), wal_of(both))
    with pytest.raises(StoreUnavailable, match="is gone"):
        SqliteStore(alone)
    assert events_of(both) == events_of(path)


def test_what_sqlite_copies_or_closes_is_whole(tmp_path: Path) -> None:
    """Also where SQLite's own tools recovered the WAL of a killed process."""
    path, copy, closed = (tmp_path / name for name in ("killick.db", "copy.db", "closed.db"))
    killed(path)
    source, target = sqlite3.connect(path), sqlite3.connect(copy)
    source.backup(target)
    target.close()
    source.close()
    assert not wal_of(path).exists()
    count = events_of(path)
    assert events_of(copy) == count
    shutil.copy(path, closed)
    assert events_of(closed) == count


def test_a_loss_that_was_accepted_is_not_told_again(tmp_path: Path) -> None:
    path = tmp_path / "killick.db"
    killed(path, steps=30, changes_max=20)
    wal_of(path).unlink()
    with killick.open(path, accept_lost_wal=True) as kd:
        assert kd.list()
    with killick.open(path) as kd:
        assert kd.list()


def test_a_process_killed_in_the_middle_of_a_checkpoint_lost_nothing(tmp_path: Path) -> None:
    path = tmp_path / "killick.db"
    killed(path)
    db = sqlite3.connect(path)
    mark = sqlite_file.COPIED
    db.execute("UPDATE meta SET value = ?, checksum = ? WHERE key = 'wal'", (mark, row_check("wal", mark)))
    db.commit()
    copy = tmp_path / "copy.db"
    shutil.copy(path, copy)
    shutil.copy(wal_of(path), wal_of(copy))
    db.close()
    assert events_of(copy)
    assert events_of(copy)


def test_a_store_of_a_build_that_set_no_mark_opens(tmp_path: Path) -> None:
    path = tmp_path / "killick.db"
    SqliteStore(path).close()
    db = sqlite3.connect(path)
    db.execute("DELETE FROM meta WHERE key = 'wal'")
    db.commit()
    db.close()
    SqliteStore(path).close()


def test_a_read_only_copy_without_its_wal_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, alone = tmp_path / "killick.db", tmp_path / "alone.db"
    killed(path)
    shutil.copy(path, alone)
    monkeypatch.setattr(sqlite_file, "_is_read_only", lambda _: True)
    with pytest.raises(StoreUnavailable, match="is gone"):
        SqliteStore(alone)
