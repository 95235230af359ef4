"""Marks in SQLite: a changed or lost one is found and made again."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from stories import Story, started

from killick.history.search.query import Finder
from killick.log import Log, Report, verify
from killick.store import SqliteStore


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with two marked runs."""
    store = SqliteStore(tmp_path / "killick.db")
    log = Log(store)
    for number in (1, 2):
        first = started(f"run_{number}")
        handle = log.create(first.event, first.values or {})
        for batch in Story(number).entries(60):
            handle.append(*batch)
    Finder(log).catch_up()
    log.close()
    store.close()
    return tmp_path / "killick.db"


def rows(path: Path) -> list[tuple[int, ...]]:
    db = sqlite3.connect(path)
    found = db.execute("SELECT * FROM marks ORDER BY term, at_us, number, seq").fetchall()
    db.close()
    return found


def checked(path: Path, *, heal: bool = True) -> Report:
    store = SqliteStore(path)
    log = Log(store)
    try:
        report = verify(log, heal=heal)
        if heal:
            Finder(log).catch_up()
        return report
    finally:
        log.close()
        store.close()


ONE = "WHERE (term, at_us, number, seq) = (:term, :at_us, :number, :seq)"
CHANGES = [
    f"DELETE FROM marks {ONE}",
    f"UPDATE marks SET seq = seq + 1000 {ONE}",
    f"UPDATE marks SET term = term + 1 {ONE}",
    f"UPDATE marks SET at_us = at_us + 1 {ONE}",
    f"UPDATE marks SET number = 2 {ONE}",
    "INSERT INTO marks VALUES (12345, 1, :number, 1)",
    "INSERT INTO marks VALUES (12345, 1, 99, 1)",
    "UPDATE marked SET seq = seq + 1 WHERE number = :number",
    "UPDATE marked SET total = total + 1 WHERE number = :number",
    "UPDATE marked SET checksum = checksum + 1 WHERE number = :number",
    "UPDATE marked SET number = 77 WHERE number = :number",
    "DELETE FROM marked WHERE number = :number",
    "INSERT INTO marked VALUES (99, 1, 0, 0)",
]


@pytest.mark.gate(4)
@pytest.mark.parametrize("change", CHANGES)
def test_a_mark_that_was_changed_is_found_and_its_run_is_marked_anew(path: Path, change: str) -> None:
    before = rows(path)
    one = dict(zip(("term", "at_us", "number", "seq"), next(row for row in before if row[2] == 1), strict=True))
    db = sqlite3.connect(path)
    with db:
        db.execute(change, one)
    db.close()
    report = checked(path, heal=False)
    assert {problem.where for problem in report.problems} == {"marks"}
    report = checked(path)
    assert report.problems
    assert report.holds
    assert rows(path) == before
    assert checked(path).problems == []


def test_a_store_whose_marks_are_gone_is_sound_and_makes_them_again(path: Path) -> None:
    before = rows(path)
    db = sqlite3.connect(path)
    with db:
        db.execute("DELETE FROM marks")
        db.execute("DELETE FROM marked")
    db.close()
    assert checked(path).problems == []
    assert rows(path) == before


def test_the_marks_of_a_removed_run_go_with_the_next_sweep(path: Path) -> None:
    store = SqliteStore(path)
    store.remove("run_1")
    assert store.inspect() == []
    store.sweep()
    store.close()
    assert {number for _, _, number, _ in rows(path)} == {2}
    assert checked(path).problems == []
