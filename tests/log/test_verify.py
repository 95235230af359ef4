"""Whatever is changed behind Killick's back is found and located, and never healed into a shorter log."""

import random
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from stories import START_US, Story, started

from families import fork_of
from killick.errors import KillickError, RunBroken, StoreBroken, StoreUnavailable
from killick.log import Entry, Log, Report, repair, verify
from killick.model import events as e
from killick.store import SqliteStore
from killick.store.records import Delivery, UniqueRight
from seeds import draw_seed, repeats

TRUTH = ("meta", "heads", "events", "pieces", "inbox", "claims", "aside")
DERIVED = ("piece_uses", "runs", "tags", "snapshots")
RUNS = ("run_1", "run_2", "fork_1", "mended")


def build(path: Path) -> None:
    """A store with something in every table."""
    store = SqliteStore(path)
    log = Log(store, snapshot_every=16)
    for number in (1, 2):
        first = started(f"run_{number}", tags=("vip", f"tag_{number}"))
        handle = log.create(first.event, first.values or {})
        for batch in Story(number).entries(80):
            handle.append(*batch)
        big = Entry(e.NoteMade(at=START_US), {"note": [f"message {n} " * 60 for n in range(40)]})
        handle.append(big)
        digest = e.to_text(bytes([number]) * 32)
        attempt = e.AttemptStarted(at=1, step="900", attempt=1, key="k", epoch=0, claims=(f"token:{digest}",))
        handle.append(Entry(attempt), claims=(UniqueRight("token", bytes([number]) * 32),))
        for name in ("paid", "paid", "other"):
            id_ = f"{name}-{handle.seq}-{random.Random(number).random()}"
            store.deliver(
                [
                    Delivery(
                        run=handle.run,
                        id=id_ + name * 2,
                        name=name,
                        body=b'"hello"',
                        by="ann",
                        at_us=START_US,
                    )
                ]
            )
        taken = e.MessageTaken(at=START_US, message=1, name="paid", id="x")
        handle.append(Entry(taken), takes=(1,))
    fork = fork_of(log, e.RunForked(at=START_US, run="fork_1", parent="run_1", cut=40, generation=1))
    fork.append(Entry(e.NoteMade(at=START_US), {"note": "forked"}))
    first = started("mended")
    handle = log.create(first.event, first.values or {})
    for number in range(6):
        handle.append(Entry(e.NoteMade(at=START_US), {"note": number}))
    log.close()
    store.close()
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("DELETE FROM events WHERE id = (SELECT (number << 32) + 4 FROM heads WHERE run = 'mended')")
    db.close()
    store = SqliteStore(path)
    log = Log(store)
    repair(log, "mended", at=START_US, reason="a row was lost", by="ops")
    log.close()
    store.close()


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("original") / "killick.db"
    build(path)
    report = check(path)
    assert report.problems == []
    assert report.runs == len(RUNS)
    return path


def check(path: Path) -> Report:
    store = SqliteStore(path)
    log = Log(store)
    try:
        return verify(log)
    finally:
        log.close()
        store.close()


def tamper(original: Path, tmp_path: Path, change: Callable[[sqlite3.Connection], object]) -> Path:
    path = tmp_path / "killick.db"
    shutil.copy(original, path)
    db = sqlite3.connect(path)
    with db:
        change(db)
    db.close()
    return path


def dump(path: Path, tables: tuple[str, ...]) -> dict[str, list[tuple[Any, ...]]]:
    db = sqlite3.connect(path)
    try:
        return {table: db.execute(f"SELECT * FROM {table} ORDER BY 1, 2").fetchall() for table in tables}
    finally:
        db.close()


def columns(db: sqlite3.Connection, table: str) -> list[str]:
    return [row[1] for row in db.execute(f"PRAGMA table_info({table})")]


def key_of(table: str) -> str:
    return {
        "meta": "key",
        "heads": "number",
        "events": "id",
        "pieces": "piece",
        "piece_uses": "number || '.' || kind || '.' || piece",
        "inbox": "number || '.' || message",
        "claims": "space || hex(key)",
        "runs": "number",
        "tags": "tag || number",
        "snapshots": "number || '.' || seq",
        "aside": "id",
    }[table]


def keys(path: Path, table: str, most: int, seed: int) -> list[Any]:
    db = sqlite3.connect(path)
    found = [row[0] for row in db.execute(f"SELECT {key_of(table)} FROM {table}")]
    db.close()
    return random.Random(seed).sample(found, min(most, len(found)))


def only_in_snapshots(path: Path) -> set[int]:
    db = sqlite3.connect(path)
    kinds: dict[int, set[int]] = {}
    for kind, piece in db.execute("SELECT kind, piece FROM piece_uses"):
        kinds.setdefault(piece, set()).add(kind)
    db.close()
    return {piece for piece, found in kinds.items() if found == {1}}


def flipped(value: Any, chance: random.Random) -> Any:
    """A value with one bit of one byte turned over."""
    if isinstance(value, int):
        return value ^ (1 << chance.randrange(8))
    if isinstance(value, str):
        raw = bytearray(value.encode())
        raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(7)
        return raw.decode(errors="replace")
    raw = bytearray(value)
    raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
    return bytes(raw)


def cases(original: Path) -> Iterator[tuple[str, str, Any]]:
    db = sqlite3.connect(original)
    every = {table: columns(db, table) for table in TRUTH + DERIVED}
    db.close()
    for table, names in every.items():
        for name in names:
            for key in keys(original, table, 3, seed=len(name)):
                yield table, name, key


@pytest.mark.slow
def test_any_flipped_bit_of_any_column_of_any_table_is_found(original: Path, tmp_path: Path) -> None:
    chance = random.Random(20)
    tried = 0
    for table, name, key in cases(original):
        db = sqlite3.connect(original)
        value = db.execute(f"SELECT {name} FROM {table} WHERE {key_of(table)} = ?", (key,)).fetchone()[0]
        db.close()
        if value is None or value in ("", b""):
            continue
        new = flipped(value, chance)
        case = f"{table}.{name} of {key}"

        def change(db: sqlite3.Connection, table=table, name=name, key=key, new=new) -> None:
            db.execute(f"UPDATE OR REPLACE {table} SET {name} = ? WHERE {key_of(table)} = ?", (new, key))

        path = tamper(original, tmp_path, change)
        before = dump(path, TRUTH)
        try:
            report = check(path)
        except StoreBroken:
            assert table == "meta", case
            continue
        assert report.problems, case
        if table != "pieces":  # what only snapshots used may be gone with them
            assert dump(path, TRUTH) == before, f"{case}: verification changed the record"
        if report.holds:
            again = check(path)
            assert again.problems == [], (case, again.problems)
        derived = table in DERIVED or (table == "pieces" and key in only_in_snapshots(original))
        if (table, name) != ("pieces", "piece"):  # a number that only references use, and they are rebuilt
            assert report.holds == derived, (case, report.problems)
        tried += 1
    assert tried > 100


@pytest.mark.gate(3)
@pytest.mark.parametrize("table", TRUTH + DERIVED)
def test_a_dropped_row_is_found(original: Path, tmp_path: Path, table: str) -> None:
    for key in keys(original, table, 8, seed=1):
        path = tamper(
            original,
            tmp_path,
            lambda db, key=key: db.execute(f"DELETE FROM {table} WHERE {key_of(table)} = ?", (key,)),
        )
        if table == "meta":
            with pytest.raises(StoreBroken):
                check(path)
            continue
        if table == "snapshots":
            continue  # a missing snapshot is only slower
        report = check(path)
        assert report.problems, f"{table} {key}"
        derived = table in DERIVED or (table == "pieces" and key in only_in_snapshots(original))
        assert report.holds == derived, (table, key, report.problems)


def test_a_snapshot_that_is_whole_and_not_what_the_log_folds_to_is_found(original: Path, tmp_path: Path) -> None:
    def change(db: sqlite3.Connection) -> None:
        """The root of an earlier snapshot: its chunks are there, and match their hashes."""
        roots = db.execute("SELECT seq, root FROM snapshots WHERE number = 1 ORDER BY seq").fetchall()
        assert len(roots) > 1
        db.execute("UPDATE snapshots SET root = ? WHERE number = 1 AND seq = ?", (roots[0][1], roots[-1][0]))

    path = tamper(original, tmp_path, change)
    found = check(path).problems
    assert [(problem.run, problem.where, problem.healed) for problem in found] == [("run_1", "snapshots", True)]
    assert check(path).problems == []


def test_a_verification_continues_after_the_last_run_that_it_verified(original: Path, tmp_path: Path) -> None:
    path = tamper(original, tmp_path, lambda db: db.execute("DELETE FROM events WHERE id = (1 << 32) + 5"))
    store = SqliteStore(path)
    log, visited = Log(store), list[str]()

    class Killed(Exception):
        pass

    kept = list[bytes]()

    def keep(report: Report) -> None:
        kept.append(msgspec.json.encode(report))
        if report.runs == 2:
            raise Killed

    with pytest.raises(Killed):
        verify(log, keep=keep)
    resumed = msgspec.json.decode(kept[-1], type=Report)
    report = verify(log, report=resumed, progress=lambda run, _: visited.append(run))
    assert set(visited) == set(RUNS[2:])
    assert report.runs == len(RUNS)
    assert report.broken == ["run_1"]
    log.close()
    store.close()


def test_a_store_that_cannot_be_reached_quarantines_nothing(original: Path, tmp_path: Path) -> None:
    store = SqliteStore(tamper(original, tmp_path, lambda _: None))
    log, read = Log(store), store.read

    def refused(*args: Any, **options: Any) -> Any:
        raise StoreUnavailable(store.place, "the network is gone")

    store.read = refused  # type: ignore[method-assign]
    with pytest.raises(StoreUnavailable):
        verify(log, "run_1")
    store.read = read  # type: ignore[method-assign]
    assert store.quarantined("run_1") is None
    log.close()
    store.close()


def test_a_missing_snapshot_is_no_fault(original: Path, tmp_path: Path) -> None:
    path = tamper(original, tmp_path, lambda db: db.execute("DELETE FROM snapshots"))
    assert check(path).holds


@pytest.mark.parametrize(
    "table", ["heads", "events", "pieces", "inbox", "claims", "aside", "runs", "tags", "snapshots"]
)
def test_a_row_copied_to_another_key_is_found(original: Path, tmp_path: Path, table: str) -> None:
    moved = {
        "heads": {"number": "number + 50", "run": "run || 'x'"},
        "events": {"id": "id + 1000"},
        "pieces": {"piece": "piece + 100000", "hash": "randomblob(32)"},
        "inbox": {"message": "message + 50", "id": "id || 'x'"},
        "claims": {"key": "randomblob(32)"},
        "aside": {"id": "id + 77"},
        "runs": {"number": "number + 50"},
        "tags": {"tag": "tag || 'x'"},
        "snapshots": {"seq": "seq + 1"},
    }[table]

    def change(db: sqlite3.Connection) -> None:
        names = columns(db, table)
        values = [moved.get(name, name) for name in names]
        key = keys(original, table, 1, seed=3)[0]
        copied = f"SELECT {', '.join(values)} FROM {table} WHERE {key_of(table)} = ?"
        db.execute(f"INSERT INTO {table} ({', '.join(names)}) {copied}", (key,))

    assert check(tamper(original, tmp_path, change)).problems


def test_an_event_slipped_in_after_the_head_stops_a_live_handle_with_a_clear_error(
    original: Path, tmp_path: Path
) -> None:
    path = tmp_path / "killick.db"
    shutil.copy(original, path)
    store = SqliteStore(path)
    log = Log(store)
    handle = log.open("run_1")
    with closing(sqlite3.connect(path)) as db, db:
        where = ((1 << 32) + handle.seq + 1, (1 << 32) + handle.seq)
        db.execute(
            "INSERT INTO events (id, body, data, hash) SELECT ?, body, data, hash FROM events WHERE id = ?", where
        )
    db.close()
    with pytest.raises(StoreBroken, match="run_1: a row already exists where the next event belongs"):
        handle.append(Entry(e.NoteMade(at=1), {"note": "refused"}))
    with pytest.raises(RunBroken, match="there are events after the head"):
        log.open("run_1")
    log.open("run_2").append(Entry(e.NoteMade(at=1), {"note": "unharmed"}))
    log.close()
    store.close()


def test_swapped_events_are_found_where_they_begin(original: Path, tmp_path: Path) -> None:
    def change(db: sqlite3.Connection) -> None:
        first = (1 << 32) + 20
        for old, new in ((first, -1), (first + 1, first), (-1, first + 1)):
            db.execute("UPDATE events SET id = ? WHERE id = ?", (new, old))

    report = check(tamper(original, tmp_path, change))
    assert (report.first("run_1").run, report.first("run_1").seq) == ("run_1", 20)


@pytest.mark.parametrize("dropped", [1, 5])
def test_a_dropped_tail_is_found_and_quarantines_that_run_alone(original: Path, tmp_path: Path, dropped: int) -> None:
    path = tmp_path / "killick.db"
    shutil.copy(original, path)
    db = sqlite3.connect(path)
    with db:
        number, seq = db.execute("SELECT number, seq FROM heads WHERE run = 'run_2'").fetchone()
        db.execute(
            "DELETE FROM events WHERE id > ? AND id <= ?",
            ((number << 32) + seq - dropped, (number << 32) + seq),
        )
    db.close()
    store = SqliteStore(path)
    log = Log(store)
    with pytest.raises(RunBroken, match="ends before its head"):
        log.open("run_2")
    assert store.quarantined("run_2")
    log.open("run_1").append(Entry(e.NoteMade(at=1), {"note": "unharmed"}))
    first = verify(log).first("run_2")
    assert first is not None
    assert first.seq == seq - dropped + 1
    log.close()
    store.close()


def test_a_log_that_was_rewritten_with_its_hashes_is_found_by_the_head(original: Path, tmp_path: Path) -> None:
    from killick.model import hashing

    def change(db: sqlite3.Connection) -> None:
        rows = db.execute(
            "SELECT id, body, hash FROM events WHERE id > 1 << 32 AND id < 2 << 32 ORDER BY id"
        ).fetchall()
        before = rows[-3][2]
        for id_, body, _ in rows[-2:]:
            body = body.replace(b'"at":', b'"at":1')
            before = hashing.link(before, body)
            db.execute("UPDATE events SET body = ?, hash = ? WHERE id = ?", (body, before, id_))

    report = check(tamper(original, tmp_path, change))
    assert "the head's hash is not the last event's" in {problem.what for problem in report.problems}


@pytest.mark.parametrize("times", [30, pytest.param(repeats(45, 150), marks=pytest.mark.slow)])
def test_any_flipped_byte_of_the_file_is_found_or_changes_nothing(original: Path, tmp_path: Path, times: int) -> None:
    seed = draw_seed()
    chance = random.Random(seed)
    data = original.read_bytes()
    every = TRUTH + DERIVED
    before = dump(original, every)
    for number in range(times):
        path = tmp_path / f"{number}.db"  # what a broken one leaves beside it must not meet the next
        offset = chance.randrange(100, len(data))
        raw = bytearray(data)
        raw[offset] ^= 1 << chance.randrange(8)
        path.write_bytes(raw)
        try:
            if check(path).problems:
                continue
            assert dump(path, every) == before, f"seed {seed}, offset {offset}: changed and not found"
        except (KillickError, sqlite3.DatabaseError):
            continue


def test_repair_keeps_what_holds_and_leaves_the_run_to_a_person(original: Path, tmp_path: Path) -> None:
    path = tamper(original, tmp_path, lambda db: db.execute("UPDATE events SET body = x'00' WHERE id = (1 << 32) + 30"))
    store = SqliteStore(path)
    log = Log(store)
    head = log.head("run_1")
    assert not verify(log).holds
    event = repair(log, "run_1", at=START_US, reason="disk trouble", by="ops")
    assert (event.first, event.last) == (30, head.seq)
    assert log.head("run_1").seq == head.seq + 1
    assert log.head("run_1").epoch == head.epoch + 1
    assert len(store.displaced("run_1")) == head.seq - 29
    state = log.state("run_1")
    assert state.status == "waiting"
    doubts = {effect.key for effect in log.ledger("run_1").in_doubt()}
    assert doubts >= {doubt.key for doubt in event.doubts}
    assert event.doubts
    log.open("run_1").append(Entry(e.RunResumed(at=START_US, by="ops")))
    report = verify(log, "run_1")
    assert report.holds, report.problems
    assert report.repaired == 1
    log.close()
    store.close()


@pytest.mark.slow
def test_verifying_while_others_append_finds_nothing_wrong(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "killick.db", durability="process")
    log = Log(store, snapshot_every=32)
    first = started("run_1")
    handle = log.create(first.event, first.values or {})
    done = threading.Event()

    def work() -> None:
        for batch in Story(5).entries(1_500):
            handle.append(*batch)
            store.deliver([Delivery(run="run_1", id=f"m{handle.seq}", name="x", body=b'"y"', by=None, at_us=START_US)])
        done.set()

    worker = threading.Thread(target=work)
    worker.start()
    while not done.is_set():
        report = verify(log)
        assert report.problems == []
        log.open("run_1")
    worker.join()
    assert verify(log).problems == []
    log.close()
    store.close()


def test_a_run_that_holds_is_not_repaired(original: Path, tmp_path: Path) -> None:
    path = tmp_path / "killick.db"
    shutil.copy(original, path)
    store = SqliteStore(path)
    with pytest.raises(KillickError, match="nothing to repair"):
        repair(Log(store), "run_1", at=1, reason="curiosity")
    store.close()
