"""Stores of older formats: opened once, they have the newest layout, keep what they had, and hide no damage."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from stories import Story, started

from killick.history.search.query import Finder
from killick.log import Entry, Log, verify
from killick.model import events as e
from killick.model.hashing import genesis
from killick.store import SqliteStore
from killick.store.records import ASKS, OutboxItem, RunQuery, row_check
from killick.store.sql import schema
from store_contract.outbox import outbox_rows
from store_contract.probes import created

HERE = Path(__file__).parent
LAYOUT = "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY name"


def older(path: Path, number: int) -> sqlite3.Connection:
    """An empty store of an older format, to be filled; close it before it is opened."""
    made = SqliteStore(path.with_name("new.db"))
    meta = made._file._writer.execute("SELECT * FROM meta").fetchall()
    made.close()
    old = sqlite3.connect(path, isolation_level=None)
    old.executescript((HERE / f"format_{number}.sql").read_text(encoding="utf-8"))
    old.execute("PRAGMA application_id = 0x6B656467")
    old.execute(f"PRAGMA user_version = {number}")
    old.executemany("INSERT INTO meta VALUES (?, ?, ?)", meta)
    return old


@pytest.mark.parametrize("number", [1, 2, 3])
def test_migrations_lead_to_the_full_schema(tmp_path: Path, number: int) -> None:
    path = tmp_path / "old.db"
    older(path, number).close()
    store = SqliteStore(path)
    plain = sqlite3.connect(":memory:")
    plain.executescript(schema("sqlite"))
    layout = store._file._writer.execute(LAYOUT).fetchall()
    assert layout == plain.execute(LAYOUT).fetchall()
    log = Log(store)
    first = started("run_1")
    handle = log.create(first.event, first.values or {})
    for batch in Story(1).entries(40):
        handle.append(*batch)
    assert Finder(log).catch_up() == handle.seq
    assert verify(log).problems == []
    plain.close()
    log.close()
    store.close()


def put_run(old: sqlite3.Connection, number: int, run: str, status: str, holder: str | None, **wrong: Any) -> None:
    """A run without events, as formats before 3 kept it."""
    key = old.execute("SELECT value FROM meta WHERE key = 'id'").fetchone()[0].decode()
    head = (number, run, 0, genesis(key, run), 1, 0, None, holder, None, 0)
    old.execute(f"INSERT INTO heads VALUES ({', '.join('?' * 11)})", (*head, wrong.get("checksum", row_check(*head))))
    row = (number, "clerk", status, 0, None, 1, 2, "[]", 0, row_check(number, 0))
    old.execute(f"INSERT INTO runs VALUES ({', '.join('?' * 10)})", row)


def test_in_a_store_of_format_2_runs_that_are_over_lose_their_holders_and_others_do_not(tmp_path: Path) -> None:
    old = older(tmp_path / "old.db", 2)
    put_run(old, 1, "done", "completed", "w1")
    put_run(old, 2, "at work", "running", "w1")
    put_run(old, 3, "parked", "waiting", None)
    old.close()
    store = SqliteStore(tmp_path / "old.db")
    assert [head.holder for _, head in store.heads()] == [None, "w1", None]
    assert store.inspect() == []
    assert [row.run for row in store.due(store.now_us())] == ["at work"]
    [taken] = store.claim("w2", now_us=store.now_us(), seconds=30, limit=9)
    assert (taken.head.run, taken.left) == ("at work", "w1")
    created(store, "new", outbox=outbox_rows("run.started"))
    assert store.outbox() == [OutboxItem(position=1, run="new", seq=1, kind="run.started")]
    store.close()


def test_in_a_store_of_format_3_every_run_that_may_ask_somebody_is_found_by_the_tag(tmp_path: Path) -> None:
    old = older(tmp_path / "old.db", 3)
    for number, status in enumerate(("waiting", "completed", "paused", "running", "queued"), 1):
        put_run(old, number, status, status, None)
    old.execute("INSERT INTO tags VALUES ('eu', 1)")
    old.execute("UPDATE runs SET tags = '[\"eu\"]' WHERE number = 1")
    old.close()
    store = SqliteStore(tmp_path / "old.db")
    asking = {row.run: row.tags for row in store.runs(RunQuery(tag=ASKS))}
    assert asking == {"waiting": ("eu", ASKS), "paused": (ASKS,), "running": (ASKS,)}
    assert [store.tags(run) == set(tags) for run, tags in asking.items()] == [True] * 3
    assert store.counts(RunQuery()) == dict.fromkeys(("waiting", "completed", "paused", "running", "queued"), 1)
    assert store.inspect() == []
    store.close()


def test_a_tag_that_the_migration_gave_too_much_is_taken_away_by_verification(tmp_path: Path) -> None:
    path = tmp_path / "killick.db"
    store = SqliteStore(path)
    log = Log(store)
    first = started("run_1")
    handle = log.create(first.event, first.values or {}, holder="w1")
    handle.append(Entry(e.RunTaken(at=9, epoch=1, holder="w1")))
    log.close()
    store.close()
    plain = sqlite3.connect(path)
    plain.executescript("DROP INDEX runs_by_standing; DROP TABLE rate_limits; PRAGMA user_version = 3")
    plain.close()
    store = SqliteStore(path)
    log = Log(store)
    assert [row.run for row in store.runs(RunQuery(tag=ASKS))] == ["run_1"]
    assert [(problem.where, problem.healed) for problem in verify(log, heal=True).problems] == [("runs", True)]
    assert (store.runs(RunQuery(tag=ASKS)), verify(log).problems) == ([], [])
    log.close()
    store.close()


def test_a_head_that_was_damaged_before_a_migration_is_found_after_it(tmp_path: Path) -> None:
    old = older(tmp_path / "old.db", 2)
    put_run(old, 1, "done", "completed", "w1", checksum=1)
    old.close()
    store = SqliteStore(tmp_path / "old.db")
    assert [(problem.where, problem.run) for problem in store.inspect()] == [("heads", "done")]
    store.close()


def test_rows_of_the_feed_that_belong_to_no_run_are_found_and_cleared(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "killick.db")
    created(store, "a", outbox=outbox_rows("x"))
    store._file._writer.execute("INSERT INTO feed (number, seq, kind) VALUES (77, 1, 'x')")
    assert [problem.where for problem in store.inspect()] == ["feed"]
    assert [problem.healed for problem in store.inspect(heal=True)] == [True]
    assert (store.inspect(), [one.run for one in store.outbox()]) == ([], ["a"])
    store.close()
