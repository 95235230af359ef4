"""Stores of the formats that releases wrote open and keep what they had; a file of an unreleased format is refused.

`python tests/store/test_sqlite_formats.py` writes the fixture of today's format, before a release.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from stories import START_US, Story, started

from killick.clock import ManualClock
from killick.errors import StoreUnavailable
from killick.history.search.query import Finder
from killick.ids import SeededIds
from killick.log import Log, verify
from killick.store import SqliteStore
from killick.store.records import STORE_FORMAT
from killick.store.sql import schema
from killick.store.sqlite.file import APPLICATION_ID
from store_contract.outbox import outbox_rows
from store_contract.probes import created

FIXTURE = Path(__file__).with_name(f"format_{STORE_FORMAT}.sql")
LAYOUT = "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY name"


def written(path: Path) -> None:
    """Writes a store as this build does: one run with its events, values, snapshot and search terms."""
    store = SqliteStore(path, clock=ManualClock(START_US), ids=SeededIds(1))
    log = Log(store)
    first = started("run_1", tags=("eu",))
    handle = log.create(first.event, first.values or {})
    for batch in Story(1).entries(40):
        handle.append(*batch)
    Finder(log).catch_up()
    log.close()
    store.close()


def test_a_stored_file_of_each_released_format_opens_with_the_full_schema_and_all_it_had(tmp_path: Path) -> None:
    path = tmp_path / "stored.db"
    stored = sqlite3.connect(path)
    stored.executescript(FIXTURE.read_text(encoding="utf-8"))
    stored.close()
    store = SqliteStore(path)
    plain = sqlite3.connect(":memory:")
    plain.executescript(schema("sqlite"))
    assert store._file._writer.execute(LAYOUT).fetchall() == plain.execute(LAYOUT).fetchall()
    log = Log(store)
    assert {problem.what for problem in verify(log).problems} <= {"some snapshots are damaged, or another release's"}
    assert log.data("run_1", 1) == {"input": {"claim": 17}}
    seq = log.head("run_1").seq
    [batch, *_] = Story(2).entries(40)
    log.open("run_1").append(*batch)
    assert Finder(log).catch_up() == len(batch)
    assert (log.head("run_1").seq, verify(log).problems) == (seq + len(batch), [])
    plain.close()
    log.close()
    store.close()


def test_a_file_of_a_format_before_the_first_release_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    SqliteStore(path).close()
    plain = sqlite3.connect(path)
    plain.execute(f"PRAGMA user_version = {STORE_FORMAT - 1}")
    plain.close()
    with pytest.raises(StoreUnavailable, match="export its runs with the version that wrote it"):
        SqliteStore(path)


def test_rows_of_the_feed_that_belong_to_no_run_are_found_and_cleared(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "killick.db")
    created(store, "a", outbox=outbox_rows("x"))
    store._file._writer.execute("INSERT INTO feed (number, seq, kind) VALUES (77, 1, 'x')")
    assert [problem.where for problem in store.inspect()] == ["feed"]
    assert [problem.healed for problem in store.inspect(heal=True)] == [True]
    assert (store.inspect(), [one.run for one in store.outbox()]) == ([], ["a"])
    store.close()


def write_fixture(folder: Path) -> None:
    written(folder / "made.db")
    made = sqlite3.connect(folder / "made.db")
    header = f"PRAGMA application_id = {APPLICATION_ID};\nPRAGMA user_version = {STORE_FORMAT};\n"
    FIXTURE.write_text(header + "\n".join(made.iterdump()) + "\n", encoding="utf-8")
    made.close()


if __name__ == "__main__":
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as made_in:
        write_fixture(Path(made_in))
