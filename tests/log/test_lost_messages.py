"""A message that was acknowledged and lost is found each time, until a copy has it or a person accepts its loss."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import killick
from killick.archive.export import ExportSource, export, read
from killick.cli.main import main
from killick.log import repair
from killick.log.index_scrub import IndexScrub
from killick.log.restore import Source, restore
from killick.store import SqliteStore
from killick.store.memory import MemoryStore
from killick.store.records import ENDED

TEXT = "a long message " * 100


@killick.agent(name="lost.three")
async def three(run: killick.Run) -> list[str]:
    return [await run.wait("paid") for _ in range(3)]


@killick.agent(name="lost.asker")
async def asker(run: killick.Run) -> str:
    return (await run.ask("pay?", need=2)).kind


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A run that took message 1 and has two more, and one with a vote."""
    with killick.open(str(tmp_path / "killick.db")) as kd:
        kd.start(three, id="r")
        kd.advance("r")
        kd.send("r", "paid", "one", id="m1")
        kd.advance("r")
        kd.send("r", "paid", f"two {TEXT}", id="m2")
        kd.send("r", "paid", "three", id="m3")
        kd.start(asker, id="q")
        kd.advance("q")
        kd.answer("q", "approve", by="ann")
    with closing(sqlite3.connect(tmp_path / "killick.db")) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    shutil.copy(tmp_path / "killick.db", tmp_path / "backup.db")
    return tmp_path / "killick.db"


@pytest.fixture
def kd(path: Path) -> Iterator[killick.Client]:
    with killick.open(str(path)) as client:
        yield client


def lose(path: Path, run: str, message: int) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        query = "DELETE FROM inbox WHERE message = ? AND number = (SELECT number FROM heads WHERE run = ?)"
        assert db.execute(query, (message, run)).rowcount == 1


LOST = [("r", 1), ("r", 2), ("r", 3), ("q", 1)]


@pytest.mark.parametrize(("run", "message"), LOST)
def test_a_lost_message_is_found_each_time_and_by_the_scrub(
    path: Path, kd: killick.Client, run: str, message: int
) -> None:
    lose(path, run, message)
    assert IndexScrub(kd.runtime.log).scrub() == []
    assert f"message {message} is missing" in str(kd.runtime.store.quarantined(run))
    for _ in range(3):
        found = kd.store.verify()
        assert [(each.run, each.where) for each in found.problems] == [(run, "inbox")]
        assert not found.holds
        IndexScrub(kd.runtime.log).scrub()


def test_an_index_entry_that_is_rebuilt_keeps_the_evidence(path: Path, kd: killick.Client) -> None:
    lose(path, "r", 3)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE runs SET agent = 'another'")
    assert not kd.store.verify().holds
    assert not kd.store.verify().holds


@pytest.mark.parametrize("source", ["backup", "export"])
@pytest.mark.parametrize(("run", "message"), LOST)
def test_a_lost_message_is_fetched_from_a_copy(
    path: Path, kd: killick.Client, run: str, message: int, source: str
) -> None:
    copy: Source = SqliteStore(path.with_name("backup.db"), read_only=True)
    if source == "export":
        path.with_name("copy.killick").write_bytes(export(kd.runtime.log, run))
        copy = ExportSource(read(path.with_name("copy.killick")))
    before = kd.runtime.store.messages(run)
    lose(path, run, message)
    kd.store.verify()
    found = restore(kd.runtime.log, run, copy)
    assert (found.holds, found.missing) == (True, ())
    assert f"message {message}" in found.fetched
    assert kd.runtime.store.messages(run) == before
    assert kd.store.verify().problems == []
    if run == "r":
        assert kd.advance("r").status == "completed"
        assert kd.state("r").result == ["one", f"two {TEXT}", "three"]
    else:
        kd.answer("q", "approve", by="bob")
        assert kd.advance("q").result == "approve"


def test_a_message_that_no_copy_of_the_log_has_is_not_fetched(tmp_path: Path, path: Path, kd: killick.Client) -> None:
    with killick.open(str(tmp_path / "other.db")) as other:
        other.start(three, id="r")
        for number in range(3):
            other.send("r", "paid", "forged", id=f"m{number + 1}")
    lose(path, "r", 3)
    with closing(SqliteStore(tmp_path / "other.db")) as copy:
        found = restore(kd.runtime.log, "r", copy)
    assert (found.fetched, found.missing, found.holds) == ((), ("message 3",), False)


@pytest.mark.parametrize(("run", "message"), LOST)
def test_a_loss_that_a_person_accepts_is_on_record_and_the_run_goes_on(
    path: Path, kd: killick.Client, run: str, message: int
) -> None:
    lose(path, run, message)
    kd.store.verify()
    event = repair(kd.runtime.log, run, at=1, reason="no backup", by="ops")
    assert event.messages == (() if message == 1 and run == "r" else (message,))
    assert f"message {message} is missing" in kd.runtime.log.data(run, event.last + 1)["found"]
    assert kd.store.verify().holds
    assert IndexScrub(kd.runtime.log).scrub() == []
    assert kd.store.verify().problems == []
    copy = path.with_name("copy.killick")
    copy.write_bytes(export(kd.runtime.log, run))
    found = read(copy)
    found.verify(found.store(MemoryStore))
    kd.resume(run)
    for name in ("m1", "m2", "m3"):  # a sender repeats what was lost
        if run == "r":
            kd.send("r", "paid", f"again {name}", id=name)
    if run == "q":
        for name in ("ann", "bob"):
            kd.answer("q", "approve", by=name)
    assert kd.advance(run).status in ENDED
    if run == "r":
        again = {2: ["one", "three", "again m2"], 3: ["one", f"two {TEXT}", "again m3"]}
        assert kd.state("r").result == again.get(message, ["one", f"two {TEXT}", "three"])
    assert kd.store.verify().problems == []


@pytest.mark.parametrize("zeroed", [True, False])
def test_an_inbox_whose_pages_were_lost_is_filled_from_a_backup(
    path: Path, kd: killick.Client, zeroed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {run: kd.runtime.store.messages(run) for run in ("r", "q")}
    with closing(sqlite3.connect(path)) as db:
        [page] = db.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'inbox'").fetchone()
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with path.open("r+b") as file:
        file.seek(2048 * (page - 1))
        empty = bytes([10, 0, 0, 0, 0, 8, 0]).ljust(2048, b"\0")  # a page without rows, or one of noise
        file.write(empty if zeroed else b"\xa5" * 2048)
    place = ["--store", str(path)]
    backup = str(path.with_name("backup.db"))
    assert main(["store", "verify", *place]) == 1
    assert main(["store", "verify", *place]) == 1
    assert main(["store", "repair", "--from", backup, "--yes", *place]) == 0
    assert main(["store", "verify", *place]) == 0
    assert "intact" in capsys.readouterr().out
    with killick.open(str(path)) as again:
        assert {run: again.runtime.store.messages(run) for run in ("r", "q")} == before
