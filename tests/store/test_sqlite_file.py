"""What only a file on a disk can do: fill up, be read-only, be shared by processes, be somebody else's."""

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stories import START_US, started

import killick
from killick.cli.main import main
from killick.clock import ManualClock
from killick.errors import (
    RunBusy,
    RunUnknown,
    StoreBroken,
    StoreBusy,
    StoreClosed,
    StoreFormat,
    StoreFull,
    StoreUnavailable,
)
from killick.log import Entry, Log, RunLog, verify
from killick.model import events as e
from killick.store import SqliteStore, open_store
from killick.store.records import STORE_FORMAT
from killick.store.sql import schema
from killick.store.sqlite import file
from killick.store.sqlite.file import SqliteFile
from store_contract.builders import creation, indexed

TESTS = Path(__file__).parent.parent


def begin(log: Log, run: str = "run_1") -> RunLog:
    first = started(run)
    return log.create(first.event, first.values or {})


def note(text: object) -> Entry:
    return Entry(e.NoteMade(at=START_US), {"note": text})


def python(
    code: str, *arguments: object, prefix: tuple[str, ...] = (), stdin: int | None = None
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", code, *map(str, arguments)],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
    )


HAMMER = """
import json, sys
from killick.errors import HeadMoved, RunExists
from killick.log import Entry, Log
from killick.model import events as e
from killick.store import SqliteStore
from stories import START_US, started

path, who, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
store = SqliteStore(path)
log = Log(store)
mine, conflicts = 0, 0
for number in range(rounds):
    run = f"run_{number % 3}"
    try:
        if store.head(run) is None:
            first = started(run, at=START_US + int(who))
            log.create(first.event, first.values)
        handle = log.open(run)
        for turn in range(3):
            handle.append(Entry(e.NoteMade(at=START_US), {"note": [who, number, turn]}))
            mine += 1
    except (HeadMoved, RunExists):
        conflicts += 1
print(json.dumps([mine, conflicts]))
log.close(); store.close()
"""


@pytest.mark.slow
def test_processes_that_hammer_the_same_runs_are_refused_cleanly_and_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "killick.db"
    children = [python(HAMMER, path, who, 60) for who in range(3)]
    mine, conflicts = 0, 0
    for child in children:
        out, err = child.communicate(timeout=300)
        assert child.returncode == 0, err
        counted = json.loads(out)
        mine, conflicts = mine + counted[0], conflicts + counted[1]
    store = SqliteStore(path)
    log = Log(store)
    report = verify(log)
    assert report.problems == []
    assert report.events == mine + 3
    assert conflicts > 0
    store.close()


FILL = """
import sys
from killick.errors import StoreError, StoreFull
from killick.log import Entry, Log, verify
from killick.model import events as e
from killick.store import SqliteStore
from stories import START_US, started
import os, pathlib

folder = pathlib.Path(sys.argv[1])
ballast = folder / "ballast"
ballast.write_bytes(b"x" * 600_000)
store = SqliteStore(folder / "killick.db")
log = Log(store)
first = started("run_1")
handle = log.create(first.event, first.values)
done = 1
try:
    for number in range(5_000):
        text = os.urandom(1_000).hex()
        handle.append(Entry(e.NoteMade(at=START_US), {"note": text}))
        done += 1
    raise SystemExit("the disk never filled up")
except StoreFull as error:
    assert "nothing was lost" in str(error), error
for _ in range(3):
    try:
        log.open("run_1").append(Entry(e.NoteMade(at=START_US), {"note": os.urandom(200_000)}))
    except StoreFull:
        pass
assert log.head("run_1").seq == done, (log.head("run_1").seq, done)
ballast.unlink()
handle = log.open("run_1")
handle.append(Entry(e.NoteMade(at=START_US), {"note": "there is room again"}))
report = verify(log)
assert report.problems == [] and report.events == done + 1, report
log.close(); store.close()
print("held")
"""


def test_a_full_disk_is_a_clear_error_and_appending_works_again_when_there_is_room(tmp_path: Path) -> None:
    mount = f'mount -t tmpfs -o size=2m tmpfs {tmp_path} && exec "$@"'
    inside = ("unshare", "--mount", "--map-root-user", "sh", "-c", mount, "sh")
    allowed = subprocess.run([*inside, "true"], capture_output=True, check=False)
    if allowed.returncode:
        pytest.skip(f"this machine lets nobody mount a small disk: {allowed.stderr.decode().strip()}")
    child = python(FILL, tmp_path, prefix=inside)
    out, err = child.communicate(timeout=300)
    assert out.strip() == "held", err


def test_a_page_limit_is_a_full_disk_too(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "killick.db")
    log = Log(store)
    handle = begin(log)
    pages = store._file._writer.execute("PRAGMA page_count").fetchone()[0]
    store._file._writer.execute(f"PRAGMA max_page_count = {pages + 8}")
    with pytest.raises(StoreFull):
        for _ in range(100):
            handle.append(note(os.urandom(2_000)))
    before = log.head("run_1").seq
    store._file._writer.execute("PRAGMA max_page_count = 1000000")
    log.open("run_1").append(note("again"))
    assert log.head("run_1").seq == before + 1
    assert verify(log).problems == []
    store.close()


def test_a_write_that_the_system_refuses_is_a_clear_error_and_loses_nothing(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "killick.db")
    log = Log(store)
    handle = begin(log)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    size = Path(f"{store.place}-wal").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20_000, before[1]))
    try:
        with pytest.raises((StoreUnavailable, StoreFull)):
            for _ in range(100):
                handle.append(note(os.urandom(4_000)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    log.open("run_1").append(note("again"))
    assert verify(log).problems == []
    store.close()


READ_ONLY = """
import os, sys
import killick, killick.log, killick.store.sqlite.store, encodings.idna
from killick.errors import StoreReadOnly
if os.getuid() == 0:
    os.setgid(65534); os.setuid(65534)
log = killick.log.Log(killick.store.SqliteStore(sys.argv[1]))
assert log.head("run_1").seq == 1
try:
    log.store.quarantine("run_1", "it cannot")
except StoreReadOnly as error:
    print(error)
"""


def test_a_lease_and_its_release_are_not_flushed_and_every_commit_after_them_is(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "killick.db")

    def flushes() -> int:
        return int(store._file._writer.execute("PRAGMA synchronous").fetchone()[0])

    normal, full = 1, 2
    assert flushes() == full
    with store._file.leasing():
        assert flushes() == normal
    assert flushes() == full
    with pytest.raises(RunUnknown):
        store.lease("nothing", "me", seconds=1)
    assert flushes() == full
    first, statements = started("run_1"), list[str]()
    Log(store).create(first.event, first.values or {}, holder="me")
    store._file._writer.set_trace_callback(statements.append)
    store.release("run_1", epoch=1)
    assert statements[0] == "PRAGMA synchronous = NORMAL"
    assert flushes() == full
    store.close()


def test_writing_to_a_read_only_file_is_a_clear_error() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "killick.db"
        store = SqliteStore(path)
        begin(Log(store))
        store.close()
        path.chmod(stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH)
        Path(folder).chmod(0o555)
        child = python(READ_ONLY, path)
        out, err = child.communicate(timeout=300)
        Path(folder).chmod(0o755)
        assert "cannot be written; check the permissions" in out, err
        path.chmod(0o644)
        store = SqliteStore(path)
        Log(store).open("run_1").append(note("writable again"))
        store.close()


def test_a_write_lock_that_is_never_given_back_is_busy_not_locked(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "killick.db", busy_seconds=0.05)
    log = Log(store)
    handle = begin(log)
    other = sqlite3.connect(tmp_path / "killick.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreBusy, match="write lock"):
        handle.append(note("waits"))
    other.execute("ROLLBACK")
    other.close()
    log.open("run_1").append(note("goes on"))
    store.close()


def test_readers_are_not_blocked_by_a_writer(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "killick.db")
    log = Log(store)
    begin(log).append(note("there"))
    with store._file.writing():
        assert log.data("run_1", 2) == {"note": "there"}
    store.close()


def test_a_dead_holders_run_is_taken_over_at_once_and_a_live_ones_is_not(tmp_path: Path) -> None:
    path = tmp_path / "killick.db"
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[2])\n"
        "from killick.log import Log; from killick.store import SqliteStore; from stories import started\n"
        "first = started('run_1'); log = Log(SqliteStore(sys.argv[1]))\n"
        "log.create(first.event, first.values, holder='other'); print('held', flush=True); time.sleep(60)"
    )
    child = python(code, path, TESTS)
    assert child.stdout is not None
    assert child.stdout.readline().strip() == "held"
    store = SqliteStore(path)
    with pytest.raises(RunBusy, match="other"):
        store.lease("run_1", "me", seconds=10)
    child.kill()
    child.communicate()
    assert store.lease("run_1", "me", seconds=10).epoch == 2
    store.release("run_1", epoch=2)
    store.close()
    assert sorted(os.listdir(tmp_path)) == ["killick.db"]


CLAIM = """
import sys
from killick.store import SqliteStore
from store_contract.builders import following, indexed

path, holder, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
store = SqliteStore(path)
for _ in range(rounds):
    some = store.claim(holder, now_us=store.now_us(), seconds=float("inf"), limit=7)
    if not some:
        break
    for one in some:
        if rounds > 1:
            [head] = store.append([following(one.head, "done by " + holder, index=indexed("completed"))])
            assert head.holder is None, head
print("claimed", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_processes_that_claim_share_the_runs_and_what_a_killed_one_had_is_due_at_once(tmp_path: Path) -> None:
    path = tmp_path / "killick.db"
    store = SqliteStore(path)
    store.append([creation(store, f"r{n}", "born", index=indexed("queued", wake_at_us=1)) for n in range(200)])
    killed = python(CLAIM, path, "killed", 1, stdin=subprocess.PIPE)
    assert killed.stdout is not None
    assert killed.stdout.readline() == "claimed\n"
    assert len(store.due(store.now_us(), limit=500)) == 193
    others = [python(CLAIM, path, f"w{n}", 500, stdin=subprocess.PIPE) for n in range(3)]
    for other in others:
        out, err = other.communicate(timeout=300)
        assert out == "claimed\n", err
    assert store.claim("me", now_us=store.now_us(), seconds=30, limit=500) == []
    killed.kill()
    killed.communicate()
    left = store.claim("me", now_us=store.now_us(), seconds=30, limit=500)
    assert [(one.left, one.head.epoch, one.left_until_us) for one in left] == [("killed", 2, None)] * 7
    assert [head.seq for _, head in store.heads() if head.holder != "me"] == [2] * 193
    assert store.inspect() == []
    store.close()


def test_a_lease_of_a_frozen_holder_ends_with_its_time(tmp_path: Path) -> None:
    clock = ManualClock()
    store = SqliteStore(tmp_path / "killick.db", clock=clock)
    first = started()
    Log(store).create(first.event, first.values or {}, holder="frozen", seconds=30)
    with pytest.raises(RunBusy):
        store.lease("run_1", "next", seconds=30)
    clock.advance(31)
    assert store.lease("run_1", "next", seconds=30).holder == "next"
    store.close()


def test_a_file_that_is_not_a_store_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE theirs (x)")
    db.close()
    with pytest.raises(StoreUnavailable, match="not a Killick store"):
        SqliteStore(path)
    text = tmp_path / "notes.txt"
    text.write_text("dear diary, " * 500)
    with pytest.raises(StoreBroken):
        SqliteStore(text)
    assert text.read_text().startswith("dear diary")


def test_a_newer_format_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "killick.db"
    SqliteStore(path).close()
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA user_version = {STORE_FORMAT + 1}")
    db.close()
    with pytest.raises(StoreFormat, match="upgrade killick"):
        SqliteStore(path)


def test_a_new_store_has_exactly_the_schema_of_its_file(tmp_path: Path) -> None:
    SqliteStore(tmp_path / "made.db").close()
    plain = sqlite3.connect(":memory:")
    plain.executescript(schema("sqlite"))
    made = sqlite3.connect(tmp_path / "made.db")
    query = "SELECT type, name, sql FROM sqlite_master ORDER BY name"
    assert made.execute(query).fetchall() == plain.execute(query).fetchall()
    made.close()
    plain.close()


@pytest.mark.parametrize("url", ["killick.db", "sqlite:///killick.db"])
def test_a_store_is_opened_by_path_or_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.chdir(tmp_path)
    open_store(url).close()
    assert (tmp_path / "killick.db").exists()
    open_store(f"sqlite:///{tmp_path}/absolute.db").close()
    assert (tmp_path / "absolute.db").exists()


@pytest.mark.parametrize(("free", "expected"), [(4096, StoreFull), (1 << 30, StoreUnavailable)])
def test_an_io_error_on_a_full_disk_is_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, expected: type[Exception]
) -> None:
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR | 18 << 8  # the shared memory of the write-ahead log cannot grow
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free))
    with contextlib.closing(SqliteStore(tmp_path / "killick.db")) as store:
        assert type(store._file.explain(error)) is expected


@pytest.mark.parametrize("place", [3, None, b"killick.db"])
def test_what_is_no_path_makes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for opens in (killick.open, killick.open_async):
        with pytest.raises(StoreUnavailable, match="is neither a path nor a URL"):
            opens(place)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_opened_says_what_to_check(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="its folder exists"):
        SqliteStore(tmp_path / "no" / "such" / "killick.db")
    with pytest.raises(StoreUnavailable, match="no such file"):
        SqliteStore(tmp_path / "killick.db", create=False)
    with pytest.raises(StoreUnavailable, match="no store has the scheme 'mongodb'"):
        open_store("mongodb://x")


@pytest.mark.parametrize("url", ["sqlite:///{}/a.db?namespace=acme", "{}/a.db?namespace=", "memory:?namespace=acme"])
def test_a_tenant_in_a_file_has_a_file_of_its_own(tmp_path: Path, url: str) -> None:
    with pytest.raises(StoreUnavailable, match="give each tenant a file of its own"):
        open_store(url.format(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "killick.db")
    store.close()
    with pytest.raises(StoreClosed, match="open it again"):
        store.head("run_1")
    with pytest.raises(StoreClosed):
        store.append([])


def test_an_older_format_is_migrated_step_by_step_and_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "killick.db"
    store = SqliteStore(path)
    begin(Log(store)).append(note("from before"))
    store.close()
    newer = STORE_FORMAT + 2
    scripts = {
        STORE_FORMAT + 1: "CREATE TABLE later (x INTEGER) STRICT;\nINSERT INTO later VALUES (1);",
        newer: "ALTER TABLE later ADD COLUMN y TEXT;",
    }
    monkeypatch.setattr(file, "STORE_FORMAT", newer)
    monkeypatch.setattr(file, "migrations", lambda dialect, place, *, found, newest: scripts.items())
    store = SqliteStore(path)
    assert store._file._writer.execute("PRAGMA user_version").fetchone()[0] == newer
    assert store._file._writer.execute("SELECT x, y FROM later").fetchall() == [(1, None)]
    assert Log(store).data("run_1", 2) == {"note": "from before"}
    store.close()


def test_a_migration_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "killick.db"
    SqliteStore(path).close()
    monkeypatch.setattr(file, "STORE_FORMAT", STORE_FORMAT + 1)
    scripts = {STORE_FORMAT + 1: "CREATE TABLE later (x);\nNONSENSE;"}
    monkeypatch.setattr(file, "migrations", lambda dialect, place, *, found, newest: scripts.items())
    with pytest.raises(StoreUnavailable, match="NONSENSE"):
        SqliteStore(path)
    monkeypatch.undo()
    store = SqliteStore(path)
    assert store.heads() == []
    assert store.inspect() == []
    store.close()


# read-only media ----------------------------------------------------------------------------------


@killick.tool(name="media_pay", effect="idempotent")
async def media_pay(amount: int) -> int:
    return amount


@killick.agent(name="media")
async def media(run: killick.Run) -> int:
    return await run.call(media_pay, 5)


@pytest.mark.parametrize("has_wal", [True, False], ids=["with a WAL", "closed"])
@pytest.mark.parametrize("by", ["a mount", "permissions"])
def test_a_store_on_read_only_media_is_listed_shown_exported_and_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, has_wal: bool, by: str
) -> None:
    folder = tmp_path / "media"
    folder.mkdir()
    with killick.open(str(tmp_path / "killick.db")) as kd:
        kd.run(media, id="r")
        if has_wal:
            shutil.copy(tmp_path / "killick.db-wal", folder)
            shutil.copy(tmp_path / "killick.db", folder)
    if not has_wal:
        shutil.copy(tmp_path / "killick.db", folder)
    for path in (*folder.iterdir(), folder):
        path.chmod(0o555 if path is folder else 0o444)
    if by == "a mount" or os.geteuid() == 0:  # the permissions of files do not bind root
        monkeypatch.setattr("killick.store.sqlite.file._is_read_only", lambda path: True)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    store = str(folder / "killick.db")
    for command in (["ps"], ["show", "r"], ["store", "verify"], ["store", "export", "r", "-o", str(tmp_path / "out")]):
        assert main([*command, "--store", store]) == 0, capsys.readouterr()
    assert "the record is intact: 1 run" in capsys.readouterr().out
    with killick.open(store) as kd, pytest.raises(killick.errors.StoreReadOnly):
        kd.start(media, id="other")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    folder.chmod(0o755)


def test_a_store_that_another_process_creates_while_it_is_opened_is_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, tune, seen = tmp_path / "killick.db", SqliteFile._tune, list[str]()

    def tuned(file: SqliteFile, writer: sqlite3.Connection) -> None:
        def looked(sql: str) -> None:
            seen.extend(re.findall("PRAGMA (application_id|user_version)$", sql))
            if len(seen) == 2:  # between the two reads
                seen.clear()
                monkeypatch.undo()
                writer.set_trace_callback(None)
                SqliteStore(path).close()

        tune(file, writer)
        writer.set_trace_callback(looked)

    monkeypatch.setattr(SqliteFile, "_tune", tuned)
    with contextlib.closing(SqliteStore(path)) as store:
        assert store.heads() == []
    assert not seen


# a file without its WAL ---------------------------------------------------------------------------


def copied(path: Path, *, wal: bool) -> Path:
    """A copy of an open store, as `cp` makes it."""
    copy = path.with_name("copy.db")
    for suffix in ("", "-wal") if wal else ("",):
        shutil.copyfile(f"{path}{suffix}", f"{copy}{suffix}")
    return copy


@pytest.fixture
def written(tmp_path: Path) -> Iterator[Path]:
    """An open store with a run whose last events are in the WAL alone."""
    store = SqliteStore(tmp_path / "killick.db", durability="process")
    log = Log(store)
    handle = begin(log)
    for number in range(file.GUARD_COMMITS * 3):
        handle.append(note(number))
    yield tmp_path / "killick.db"
    log.close()
    store.close()


def test_a_copy_without_its_wal_is_refused_until_the_loss_is_accepted(written: Path) -> None:
    copy = copied(written, wal=False)
    for _ in range(2):
        with pytest.raises(
            StoreUnavailable, match="put it back next to the file, or run `killick store verify --accept-loss`"
        ):
            SqliteStore(copy)
    assert main(["ps", "--store", str(copy)]) == 2
    assert main(["store", "verify", "--accept-loss", "--store", str(copy)]) == 0
    assert main(["ps", "--store", str(copy)]) == 0


def test_a_copy_with_its_wal_a_backup_and_a_closed_file_are_whole(written: Path) -> None:
    db = sqlite3.connect(written)
    with contextlib.closing(sqlite3.connect(written.with_name("backup.db"))) as backup:
        db.backup(backup)
    db.execute(f"VACUUM INTO '{written.with_name('vacuum.db')}'")
    db.close()
    for each in (copied(written, wal=True), written.with_name("backup.db"), written.with_name("vacuum.db")):
        for _ in range(2):  # the first close checkpoints
            with contextlib.closing(SqliteStore(each)) as store:
                assert [row.seq for row in store.read("run_1", after=file.GUARD_COMMITS * 3)][-1:] != []


def test_a_process_that_died_while_it_guarded_its_wal_leaves_a_store_that_opens(written: Path) -> None:
    db = sqlite3.connect(written)
    db.execute(f"PRAGMA user_version = {STORE_FORMAT | file._NEEDS_WAL}")
    copy = copied(written, wal=True)
    db.close()
    for _ in range(2):
        SqliteStore(copy).close()


def test_the_guard_of_a_killed_process_is_cleared_when_the_last_one_closes(written: Path) -> None:
    store = SqliteStore(written.with_name("other.db"))
    with contextlib.closing(sqlite3.connect(store.place)) as killed:
        killed.execute(f"PRAGMA user_version = {STORE_FORMAT | store._file._needs_wal()}")
        killed.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    store.close()
    assert not Path(f"{store.place}-wal").exists()
    SqliteStore(store.place).close()


def test_a_backup_that_is_made_while_the_wal_is_guarded_is_whole(written: Path) -> None:
    backup, vacuum = written.with_name("backup.db"), written.with_name("vacuum.db")
    with contextlib.closing(sqlite3.connect(written)) as db, contextlib.closing(sqlite3.connect(backup)) as other:
        flag = file._NEEDS_WAL * (1 + 2 * db.execute("PRAGMA schema_version").fetchone()[0])
        db.execute(f"PRAGMA user_version = {STORE_FORMAT | flag}")
        db.backup(other)
        db.execute(f"VACUUM INTO '{vacuum}'")
        db.execute("PRAGMA wal_checkpoint(PASSIVE)")
    with pytest.raises(StoreUnavailable, match="is missing"):
        SqliteStore(copied(written, wal=False))
    for each in (backup, vacuum):
        for _ in range(2):
            with contextlib.closing(SqliteStore(each)) as store:
                assert store.read("run_1", after=file.GUARD_COMMITS * 3)


def test_a_guard_that_fails_leaves_flushes_on_and_no_flag(tmp_path: Path) -> None:
    with contextlib.closing(SqliteStore(tmp_path / "killick.db")) as store:
        log, writer = Log(store), store._file._writer
        handle = begin(log)
        denied: list[str] = []

        def deny(action: int, pragma: str | None, *_: object) -> int:
            if action == sqlite3.SQLITE_PRAGMA and pragma == "wal_checkpoint":
                denied.append(pragma)
                return sqlite3.SQLITE_DENY
            return sqlite3.SQLITE_OK

        writer.set_authorizer(deny)
        store._file._guarded = 0
        with pytest.raises(StoreUnavailable):
            handle.append(note("refused"))
        writer.set_authorizer(None)
        assert denied
        assert writer.execute("PRAGMA synchronous").fetchone()[0] == 2, (
            "what is committed next must outlive a power cut"
        )
        assert writer.execute("PRAGMA user_version").fetchone()[0] == STORE_FORMAT
        assert store._file._guarded < 0, "the next commit guards"
        log.open("run_1").append(note("again"))
        assert store._file._guarded == file.GUARD_COMMITS
        log.close()


# forks --------------------------------------------------------------------------------------------


def test_a_fork_waits_for_a_read_that_is_about_to_open_its_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child would inherit a connection that nobody knows of, and SQLite's view of its locks."""
    opening, go_on, connect, done = threading.Event(), threading.Event(), SqliteFile._connect, list[str]()
    with contextlib.closing(SqliteStore(tmp_path / "killick.db")) as store:

        def slowly(file: SqliteFile) -> sqlite3.Connection:
            monkeypatch.undo()
            opening.set()
            assert go_on.wait(600)
            done.append("read")
            return connect(file)

        def fork() -> None:
            store._file.before_fork()
            done.append("fork")
            store._file.after_fork_in_parent()

        while store._file._readers:
            store._file._readers.pop().close()
        monkeypatch.setattr(SqliteFile, "_connect", slowly)
        threads = [threading.Thread(target=store.heads)]
        threads[0].start()
        assert opening.wait(600)
        threads.append(threading.Thread(target=fork))
        threads[1].start()
        threads[1].join(0.05)
        go_on.set()
        for thread in threads:
            thread.join(600)
    assert done == ["read", "fork"]


def test_a_read_that_comes_during_a_fork_waits_for_its_end_and_one_within_a_read_does_not(tmp_path: Path) -> None:
    done: list[str] = []
    with contextlib.closing(SqliteStore(tmp_path / "killick.db")) as store:
        with store._file.reading():
            store._file._gate.clear()
            assert store.heads() == []
        reading = threading.Thread(target=lambda: done.append(str(store.heads())))
        reading.start()
        reading.join(0.3)
        assert done == []
        store._file.after_fork_in_parent()
        reading.join(600)
    assert done == ["[]"]
