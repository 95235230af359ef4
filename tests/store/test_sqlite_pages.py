"""A page that the disk lost stops no verification: every run that can be read is verified, reported and exported."""

from __future__ import annotations

import json
import random
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
from stories import START_US, Story, started

from killick.archive.export import export
from killick.cli.main import main
from killick.errors import KillickError
from killick.log import Entry, Log, verify
from killick.log.restore import restore
from killick.model import events as e
from killick.store import SqliteStore
from killick.store.protocol import rebuild
from killick.store.records import Delivery, RunQuery
from killick.store.sqlite import btrees
from killick.store.sqlite.file import PAGE_BYTES
from seeds import draw_seed, repeats

RUNS = 20
NAMES = [f"run_{number}" for number in range(RUNS)]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("original") / "killick.db"
    with opened(path) as log:
        for number, name in enumerate(NAMES):
            first = started(name, tags=("vip", f"tag_{number}"))
            handle = log.create(first.event, first.values or {})
            for batch in Story(number).entries(30):
                handle.append(*batch)
            handle.append(Entry(e.NoteMade(at=START_US), {"note": [f"{name} {n} " * 60 for n in range(30)]}))
            sent = {"name": "paid", "body": b'"hello"', "by": "ann", "at_us": START_US}
            log.store.deliver([Delivery(run=name, id=f"m{n}", **sent) for n in range(3)])  # type: ignore[arg-type]
    return path


@contextmanager
def opened(path: Path) -> Iterator[Log]:
    store = SqliteStore(path)
    log = Log(store, snapshot_every=16)
    try:
        yield log
    finally:
        log.close()
        store.close()


def trees(path: Path) -> dict[str, int]:
    """The first page of every table and index."""
    with closing(sqlite3.connect(path)) as db:
        return dict(db.execute("SELECT name, rootpage FROM sqlite_schema WHERE rootpage > 0").fetchall())


def page_count(path: Path) -> int:
    return path.stat().st_size // PAGE_BYTES


def damage(original: Path, folder: Path, *pages: int, seed: int = 1) -> Path:
    """A copy whose pages are noise."""
    path = folder / "killick.db"
    for old in folder.glob("killick.db*"):
        old.unlink()
    shutil.copy(original, path)
    with path.open("r+b") as file:
        for page in pages:
            file.seek(PAGE_BYTES * (page - 1))
            file.write(random.Random(seed).randbytes(PAGE_BYTES))
    return path


def vital(path: Path) -> set[int]:
    """The pages of the header, the schema, and the store's own id."""
    with closing(sqlite3.connect(path)) as db:
        found = db.execute(
            "SELECT pageno FROM dbstat WHERE name IN ('sqlite_schema', 'meta', 'sqlite_autoindex_meta_1')"
        )
        return {1, *(page for (page,) in found)}


def exportable(log: Log) -> set[str]:
    found = set[str]()
    for name in NAMES:
        try:
            export(log, name)
        except KillickError:
            continue
        found.add(name)
    return found


def test_any_damaged_page_ends_in_a_report_and_leaves_the_other_runs_whole(
    original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chance = random.Random(draw_seed())
    for _ in range(repeats(12, 150)):
        page = chance.randint(1, page_count(original))
        path = damage(original, tmp_path, page, seed=page)
        code = main(["store", "verify", "--store", str(path)])
        out, err = capsys.readouterr()
        said = f"page {page}: {out}{err}"
        assert "Traceback" not in err, said
        assert "bug in Killick" not in err, said
        assert "killick store verify" not in out + err, said
        if err.startswith("killick:"):
            assert code == 1, said
            assert page in vital(original), said
            continue
        with opened(path) as log:
            report = verify(log)
            lost = set(report.broken)
            assert (code == 1) or not lost, said
            assert exportable(log) >= set(NAMES) - lost, said
            quarantined = {name for name in NAMES if name not in lost and log.store.quarantined(name) is not None}
            assert quarantined == set(), said


@pytest.mark.parametrize(
    "tree",
    ["sqlite_autoindex_heads_1", "sqlite_autoindex_pieces_1", "sqlite_autoindex_inbox_2", "claims_by_run",
     "heads_by_holder", "runs_by_due", "runs", "tags", "snapshots", "piece_uses", "quarantine", "marks", "marked",
     "rate_limits"],
)  # fmt: skip
def test_a_damaged_index_or_derived_table_is_rebuilt_at_once(original: Path, tmp_path: Path, tree: str) -> None:
    path = damage(original, tmp_path, trees(original)[tree])
    with opened(path) as log:
        first = verify(log)
        assert first.problems
        assert first.holds, [str(problem) for problem in first.problems if not problem.healed]
        assert verify(log).holds
        assert [each for each in verify(log).problems if each.where != "piece_uses"] == []
        assert exportable(log) == set(NAMES)
        assert {row.run for row in log.store.runs(RunQuery(tag="vip"))} == set(NAMES)


def test_a_damaged_schema_is_said_in_one_line_with_the_way_out(
    original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with closing(sqlite3.connect(original)) as db:
        found = db.execute("SELECT pageno FROM dbstat WHERE name = 'sqlite_schema' AND pageno > 1").fetchall()
    for (page,) in found:
        path = damage(original, tmp_path, page)
        for words in (["verify"], ["repair", "--from", str(original), "--yes"], ["export", "run_1"]):
            assert main(["store", *words, "--store", str(path)]) == 1
            err = capsys.readouterr().err
            assert err.startswith("killick:"), err
            assert ("killick store verify" if words[0] == "export" else "restore a backup") in err


def test_one_run_that_is_verified_alone_is_not_quarantined_for_a_damaged_index(original: Path, tmp_path: Path) -> None:
    path = damage(original, tmp_path, trees(original)["sqlite_autoindex_pieces_1"])
    with opened(path) as log:
        assert verify(log, "run_3").holds
        assert log.store.quarantined("run_3") is None


def test_values_are_kept_while_their_references_are_lost(original: Path, tmp_path: Path) -> None:
    path = damage(original, tmp_path, trees(original)["piece_uses"])
    with opened(path) as log:
        log.store.inspect(heal=True)
        assert log.store.sweep() == 0
        assert verify(log).holds
        assert exportable(log) == set(NAMES)


def test_the_runs_whose_heads_are_lost_are_named(original: Path, tmp_path: Path) -> None:
    path = damage(original, tmp_path, trees(original)["heads"])
    with opened(path) as log:
        assert set(verify(log).broken) == set(NAMES)


@pytest.mark.parametrize("source", ["backup", "export"])
def test_what_a_backup_or_an_export_has_is_fetched_and_the_run_leaves_quarantine(
    original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str
) -> None:
    place = original
    if source == "export":
        place = tmp_path / "run_7.killick"
        with opened(damage(original, tmp_path)) as log:
            place.write_bytes(export(log, "run_7"))
    path = damage(original, tmp_path)
    with closing(sqlite3.connect(path)) as db, db:
        first = db.execute("SELECT number << 32 FROM heads WHERE run = 'run_7'").fetchone()[0]
        db.execute("DELETE FROM events WHERE id IN (?, ?)", (first + 3, first + 4))
        db.execute("UPDATE events SET body = x'7b7d' WHERE id = ?", (first + 9,))
        db.execute("UPDATE events SET data = x'7b7d' WHERE id = ? + 1", (first,))
        db.execute(
            "UPDATE pieces SET body = x'00' WHERE piece = "
            "(SELECT min(piece) FROM piece_uses WHERE kind = 0 AND number = ? >> 32)", (first,)
        )  # fmt: skip
    assert main(["store", "verify", "--store", str(path)]) == 1
    capsys.readouterr()
    assert main(["store", "repair", "--from", str(place), "--yes", "--store", str(path)]) == 0
    out = capsys.readouterr().out
    assert all(f"run_7: event {seq} was fetched" in out for seq in (1, 3, 4, 9)), out
    with opened(path) as log:
        assert log.store.quarantined("run_7") is None
        assert verify(log).problems == []


def test_pages_of_events_and_values_are_fetched_from_a_backup(original: Path, tmp_path: Path) -> None:
    with closing(sqlite3.connect(original)) as db:
        leaves = [
            page
            for name in ("events", "pieces")
            for (page,) in db.execute(
                "SELECT pageno FROM dbstat WHERE name = ? AND pagetype = 'leaf' LIMIT 1 OFFSET 5", (name,)
            )
        ]
    path = damage(original, tmp_path, *leaves)
    with opened(path) as log:
        broken = verify(log).broken
        assert 0 < len(broken) < 5
        assert rebuild(log.store)
        with closing(SqliteStore(original, read_only=True)) as backup:
            assert all(restore(log, run, backup).holds for run in broken)
        assert verify(log).holds
        assert log.store.inspect() == []


def test_what_does_not_match_the_hash_of_the_log_is_not_written(original: Path, tmp_path: Path) -> None:
    (tmp_path / "forged").mkdir()
    forged = damage(original, tmp_path / "forged")
    with closing(sqlite3.connect(forged)) as db, db:
        db.execute("UPDATE events SET body = CAST(replace(CAST(body AS TEXT), '\"at\"', '\"at\" ') AS BLOB)")
        db.execute("UPDATE pieces SET body = x'00'")
    path = damage(original, tmp_path)
    with closing(sqlite3.connect(path)) as db, db:
        first = db.execute("SELECT number << 32 FROM heads WHERE run = 'run_7'").fetchone()[0]
        db.execute("DELETE FROM events WHERE id = ?", (first + 4,))
    with opened(path) as log, closing(SqliteStore(forged)) as source:
        verify(log)
        found = restore(log, "run_7", source)
        assert (found.fetched, found.holds) == ((), False)
        assert "event 4" in found.missing
        assert log.store.row("run_7", 4) is None
        assert log.store.quarantined("run_7") is not None


def test_an_erased_value_is_not_fetched_from_a_backup(original: Path, tmp_path: Path) -> None:
    path = damage(original, tmp_path)
    with opened(path) as log:
        handle = log.open("run_7")
        log.erase(handle, at=START_US, reason="asked", seqs=[1], pieces=sorted(log.pieces_of("run_7", 1)))
        with closing(SqliteStore(original, read_only=True)) as backup:
            restore(log, "run_7", backup)
        row = log.store.row("run_7", 1)
        assert row is not None
        assert row.data is None


KEYS = {
    "heads": "number", "events": "id", "pieces": "piece", "inbox": "number, message", "slots": "number, name",
    "claims": "space, key",
}  # fmt: skip


def leaves(path: Path, table: str) -> list[int]:
    with closing(sqlite3.connect(path)) as db:
        query = "SELECT pageno FROM dbstat WHERE name = ? AND pagetype = 'leaf' ORDER BY path"
        return [page for (page,) in db.execute(query, (table,))]


def read_by_key(original: Path, path: Path, table: str) -> set[tuple[object, ...]]:
    """The rows that a read of their key finds, of those that were written."""
    names, found = KEYS[table], set[tuple[object, ...]]()
    where = " AND ".join(f"{name} = ?" for name in names.split(", "))
    with closing(sqlite3.connect(original)) as whole, closing(sqlite3.connect(path)) as db:
        for key in whole.execute(f"SELECT {names} FROM {table}").fetchall():
            with suppress(sqlite3.Error):
                found |= set(db.execute(f"SELECT * FROM {table} WHERE {where} LIMIT 1", key).fetchmany(1))
    return found


@pytest.mark.parametrize("table", KEYS)
@pytest.mark.parametrize("places", [(0,), (1,), (-1,), (0, -1), (0, 2), (1, 3, 5)], ids=str)
def test_a_table_that_is_written_again_has_every_row_that_could_be_read(
    original: Path, tmp_path: Path, table: str, places: tuple[int, ...]
) -> None:
    pages = leaves(original, table)
    path = damage(original, tmp_path, *{pages[place] for place in places if place < len(pages)} or {pages[0]})
    before = read_by_key(original, path, table)
    with opened(path) as log:
        assert rebuild(log.store)
    assert read_by_key(original, path, table) >= before


def test_a_table_that_would_lose_a_row_that_can_be_read_is_not_written_again(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = damage(original, tmp_path, leaves(original, "events")[3])
    before = read_by_key(original, path, "events")
    read = btrees.readable

    def forgetful(db: sqlite3.Cursor, table: str, holes: btrees.Holes) -> Iterator[tuple[object, ...]]:
        rows = read(db, table, holes)
        return (row for row in rows if table != "events" or row[0] != (20 << 32) + 5)

    monkeypatch.setattr(btrees, "readable", forgetful)
    with opened(path) as log:
        [problem] = rebuild(log.store)
        assert problem.where == "events"
        assert "not written again" in problem.what
    assert read_by_key(original, path, "events") == before


def test_a_repair_that_loses_a_run_names_it_and_exits_with_1(
    original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = damage(original, tmp_path, leaves(original, "heads")[0])
    with opened(path) as log:
        lost = [name for name in NAMES if name in verify(log).broken]
    assert lost
    assert main(["store", "repair", "--from", str(original), "--yes", "--json", "--store", str(path)]) == 1
    found = json.loads(capsys.readouterr().out)
    assert {each["run"] for each in found["lost"]} >= set(lost)
    with opened(path) as log:
        assert exportable(log) == set(NAMES) - set(lost)
