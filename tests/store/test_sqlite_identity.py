"""A store is one file under every name, opened by SQLite alone, and nothing is acknowledged once it is gone."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from killick.cli.context import text_of
from killick.definitions.agents import read_contract
from killick.errors import RunBusy, StoreGone, StoreUnavailable
from killick.log import Log
from killick.permissions import open_output, read_input, read_secret
from killick.store import SqliteStore
from killick.store.sqlite import identity
from store_contract.builders import creation, following, indexed, letter
from store_contract.probes import commit, created, deliver, found

SECONDS = 300.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data" / "killick.db"


@pytest.fixture
def store(path: Path) -> Iterator[SqliteStore]:
    store = SqliteStore(path)
    created(store, "a", index=indexed("waiting"))
    yield store
    store.close()


def python(code: str, *arguments: object) -> str:
    """What another process prints."""
    ran = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True, text=True, check=False, timeout=SECONDS,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


# locks --------------------------------------------------------------------------------------------

OPEN_AND_CLOSE = "import sys; from killick.store import SqliteStore; SqliteStore(sys.argv[1]).close()"
HEAD = "import sys; from killick.store import SqliteStore; print(SqliteStore(sys.argv[1]).head('a').seq)"


def test_a_store_that_checked_its_conditions_still_has_its_locks(store: SqliteStore) -> None:
    """Without them, the other process would be the last to close the file, and delete the log under this one."""
    store.conditions()
    python(OPEN_AND_CLOSE, store.place)
    commit(store, following(found(store, "a"), "two"))
    assert python(HEAD, store.place) == "2\n"


def test_a_read_only_copy_of_a_log_takes_no_locks_from_an_open_store(store: SqliteStore) -> None:
    with contextlib.closing(SqliteStore(store.place, read_only=True)) as reader:
        assert found(reader, "a").seq == 1
    python(OPEN_AND_CLOSE, store.place)
    commit(store, following(found(store, "a"), "two"))
    assert python(HEAD, store.place) == "2\n"


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm"])
def test_a_file_of_an_open_store_is_no_input_and_no_output(store: SqliteStore, suffix: str) -> None:
    for use in (read_input, open_output, read_secret, read_contract, lambda path: text_of(f"@{path}")):
        with pytest.raises(StoreUnavailable, match="open store"):
            use(store.place + suffix)


EVERYTHING = """
import contextlib, io, json, os, sys
from pathlib import Path
own, opened, said = set(), [], []

def note(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, bytes)):
        name = os.path.basename(os.fsdecode(arguments[0]))
        if name in own:
            opened.append(name)

from killick.cli.main import main
Path("app.py").write_text('''
import killick
@killick.tool(effect="workspace")
def write(): open("note.txt", "w").write("x")
@killick.agent(workspace=".")
async def pay(run, n: int):
    await run.call(write)
    return str((await run.ask("Pay?")).approved)
''')
own |= {f"{name}{end}" for name in ("killick.db", "index.db") for end in ("", "-wal", "-shm")}
sys.addaudithook(note)

def command(*words):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(words)
    said.append([*words, code, err.getvalue()])

import killick
with killick.open("killick.db") as held:  # so that commands are not alone with the file
    for n in range(2):
        command("run", "app.py:pay", "--input", str(n), "--id", f"p{n}")
    for words in ("ps", "show p0", "show p0 --files", "inbox", "answer p0 approve", "store doctor", "store verify",
                  "store export p0 --output p0.export", "find answers", "worker app.py --until-idle",
                  "store seal --new-key key --out checkpoint", "store prune --older 0s --to old.gz --yes"):
        command(*words.split())
    held.store.verify(); held.store.export("p1"); raw = held.runtime.store
    raw.inspect(heal=True); raw.purge(); raw.conditions()
print(json.dumps([sorted(set(opened)), said]))
"""


def test_python_opens_no_file_of_a_store(tmp_path: Path) -> None:
    """SQLite's own opening passes no audit hook of Python."""
    ran = subprocess.run(
        [sys.executable, "-c", EVERYTHING], capture_output=True, text=True, check=False, cwd=tmp_path, timeout=SECONDS
    )
    assert ran.returncode == 0, ran.stderr
    opened, said = json.loads(ran.stdout)
    refused = [words for *words, code, _ in said if code not in (0, 1, 3)]
    assert refused == [], said
    assert opened == []


# names --------------------------------------------------------------------------------------------


def spelled(path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Another name of a file."""
    other = path.parent.with_name("other")
    other.mkdir()
    if how == "relative":
        monkeypatch.chdir(path.parent)
        return path.name
    if how == "dots":
        return f"{other}/../{path.parent.name}/{path.name}"
    link = other / "link.db" if how == "link" else other / "folder"
    link.symlink_to(path if how == "link" else path.parent)
    return str(link if how == "link" else link / path.name)


@pytest.mark.parametrize("how", ["relative", "dots", "link", "linked folder"])
def test_a_lease_holds_under_every_name(
    store: SqliteStore, path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(SqliteStore(spelled(path, how, monkeypatch))) as other:
        monkeypatch.chdir("/")
        assert other.place == store.place
        store.lease("a", "me", seconds=math.inf)
        with pytest.raises(RunBusy):
            other.lease("a", "you", seconds=math.inf)
        assert other.claim("you", now_us=1 << 60, seconds=1, limit=10) == []


def test_a_message_is_heard_under_every_name(store: SqliteStore, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    received, heard = list[str](), threading.Event()
    with contextlib.closing(SqliteStore(spelled(path, "relative", monkeypatch))) as other:
        monkeypatch.chdir("/")

        def hear(run: str) -> None:
            received.append(run)
            if run == "a":
                heard.set()

        other.watch(hear)
        deliver(store, letter("a", "m"))
        assert heard.wait(SECONDS), received


@pytest.mark.parametrize("suffix", ["-wal", "-shm", "-journal"])
def test_a_file_that_belongs_to_a_store_is_no_store(store: SqliteStore, path: Path, suffix: str) -> None:
    with pytest.raises(StoreUnavailable, match=store.place):
        SqliteStore(f"{path}{suffix}")


def test_a_second_hard_link_is_refused(path: Path) -> None:
    SqliteStore(path).close()
    os.link(path, path.with_name("other.db"))
    for name in (path, path.with_name("other.db")):
        with pytest.raises(StoreUnavailable, match="2 hard links"):
            SqliteStore(name)
    path.with_name("other.db").unlink()
    SqliteStore(path).close()


def test_a_hard_link_that_is_made_meanwhile_is_warned_of_once(
    store: SqliteStore, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.link(path, path.with_name("other.db"))
    with caplog.at_level(logging.WARNING, "killick"):
        for turn in range(3):
            commit(store, following(found(store, "a"), str(turn)))
    assert [record.getMessage().startswith(f"{path}: ") for record in caplog.records] == [True]


def test_a_mount_of_the_single_file_is_refused(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SqliteStore(path).close()
    table = tmp_path / "mounts"
    for point, is_refused in ((path.parent, False), (path, True)):
        table.write_text(f"25 1 8:1 /x {point} rw - ext4 /dev/sda1 rw\n")
        monkeypatch.setattr(identity, "MOUNTS", table)
        with pytest.raises(StoreUnavailable, match="mount its folder") if is_refused else contextlib.nullcontext():
            SqliteStore(path).close()


# files that are gone ------------------------------------------------------------------------------


def delete(path: Path) -> None:
    for each in path.parent.glob(f"{path.name}*"):
        if each.is_file():
            each.unlink()


def delete_log(path: Path) -> None:
    Path(f"{path}-wal").unlink()
    Path(f"{path}-shm").unlink()


def replace(path: Path) -> None:
    """As a deploy script does, or a restore."""
    new = path.with_name("new.db")
    SqliteStore(new).close()
    new.replace(path)


def move(path: Path) -> None:
    path.rename(path.with_name("moved.db"))


GONE = [delete, delete_log, replace, move]


@pytest.mark.parametrize("lose", GONE)
def test_nothing_is_acknowledged_once_the_file_is_gone(
    store: SqliteStore, path: Path, lose: Callable[[Path], None]
) -> None:
    head = found(store, "a")
    lose(path)
    calls: list[Callable[[], object]] = [
        lambda: store.append([following(head, "two")]),
        lambda: store.append([creation(store, "b", "one")]),
        lambda: store.deliver([letter("a", "m")]),
        lambda: store.lease("a", "me", seconds=1),
        lambda: store.claim("me", now_us=1, seconds=1, limit=1),
        lambda: store.head("a"),
        store.heads,
        store.purge,
    ]
    for call in calls:
        with pytest.raises(StoreGone, match=str(path)):
            call()


@pytest.mark.parametrize("lose", GONE)
def test_a_transaction_that_is_open_while_the_file_goes_is_not_acknowledged(
    store: SqliteStore, path: Path, lose: Callable[[Path], None]
) -> None:
    with pytest.raises(StoreGone), store._file.writing() as db:
        db.execute("UPDATE runs SET wake_at_us = 1")
        lose(path)
    with pytest.raises(StoreGone), store.transaction():
        pass


@pytest.mark.parametrize("durability", ["power", "process"])
def test_a_transaction_of_a_step_is_not_acknowledged_after_its_file_went(path: Path, durability: str) -> None:
    with contextlib.closing(SqliteStore(path, durability=durability)) as store:  # type: ignore[arg-type]
        created(store, "a", index=indexed("waiting"))
        with pytest.raises(StoreGone), store.transaction() as opened:
            opened.connection.execute("CREATE TABLE mine (x)")
            delete(path)


@pytest.mark.parametrize("lose", GONE)
def test_watchers_hear_of_a_file_that_is_gone(store: SqliteStore, path: Path, lose: Callable[[Path], None]) -> None:
    heard = threading.Event()
    store.watch(lambda run: heard.set())
    heard.clear()
    lose(path)
    assert heard.wait(SECONDS)
    with pytest.raises(StoreGone):
        store.heads()


def test_a_file_that_came_back_is_not_trusted(store: SqliteStore, path: Path) -> None:
    move(path)
    with pytest.raises(StoreGone):
        store.append([creation(store, "b", "one")])
    path.with_name("moved.db").rename(path)
    with pytest.raises(StoreGone):
        store.heads()


def test_a_deleted_file_is_not_created_again(store: SqliteStore, path: Path) -> None:
    delete(path)
    with pytest.raises(StoreGone):
        store._file._connect()
    assert not path.exists()


WITHOUT_LOG = """
import os, subprocess, sys
from killick.errors import StoreGone
from killick.store import SqliteStore
from store_contract.builders import creation
path = sys.argv[1]
store = SqliteStore(path)
store.append([creation(store, f"old{n}", "x" * 5_000) for n in range(20)])
os.unlink(path + "-wal"); os.unlink(path + "-shm")
code = ("import sys; sys.path[:0] = sys.path[:0]; from killick.store import SqliteStore\\n"
        "from store_contract.builders import creation\\n"
        "store = SqliteStore(sys.argv[1], accept_loss=True)\\n"
        "store.append([creation(store, f'new{n}', 'y' * 5_000) for n in range(40)]); store.close()")
subprocess.run([sys.executable, "-c", code, path], check=True)
if sys.argv[2] == "close":
    store.close()
"""


@pytest.mark.parametrize("end", ["close", "exit"])
def test_a_process_whose_log_was_deleted_overwrites_nothing_at_its_end(path: Path, end: str) -> None:
    SqliteStore(path).close()
    python(WITHOUT_LOG, path, end)
    database = sqlite3.connect(path)
    assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert database.execute("SELECT count(*) FROM heads WHERE run LIKE 'new%'").fetchone() == (40,)
    database.close()


def test_a_fork_of_a_process_notices_what_happened_before_it(store: SqliteStore, path: Path) -> None:
    store._file.before_fork()
    replace(path)
    store._file.after_fork_in_parent()
    with pytest.raises(StoreGone):
        store.append([creation(store, "b", "one")])


def test_another_process_may_close_the_file_last_during_a_fork(store: SqliteStore) -> None:
    store._file.before_fork()
    python(OPEN_AND_CLOSE, store.place)
    store._file.after_fork_in_parent()
    commit(store, following(found(store, "a"), "two"))
    assert python(HEAD, store.place) == "2\n"


@pytest.mark.parametrize("checkpoint", ["TRUNCATE", "RESTART", "FULL"])
def test_a_checkpoint_of_another_process_replaces_nothing(store: SqliteStore, checkpoint: str) -> None:
    python(
        f"import sqlite3, sys; sqlite3.connect(sys.argv[1]).execute('PRAGMA wal_checkpoint({checkpoint})')", store.place
    )
    assert store.purge()
    commit(store, following(found(store, "a"), "two"))
    assert found(store, "a").seq == 2


# lost locks and restored backups ------------------------------------------------------------------

HOLD = """
import math, sys
from killick.store import SqliteStore
store = SqliteStore(sys.argv[1])
store.lease("a", "other", seconds=math.inf)
print("held", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def holding(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds a lease without an end."""
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def remove_locks(path: Path) -> None:
    for each in path.parent.glob(f"{path.name}-holder-*"):
        each.unlink()


def test_a_living_holder_whose_lock_file_was_deleted_keeps_its_run(store: SqliteStore, path: Path) -> None:
    with holding(path):
        remove_locks(path)
        assert store.lives("other")
        with contextlib.closing(SqliteStore(path)) as later:
            for holder, each in (("me", store), ("you", later)):
                with pytest.raises(RunBusy, match="other"):
                    each.lease("a", holder, seconds=1)
                assert each.claim(holder, now_us=1 << 60, seconds=1, limit=1) == []


def test_a_dead_holder_whose_lock_file_was_deleted_is_found_dead_by_the_first_that_is_alone(path: Path) -> None:
    with contextlib.closing(SqliteStore(path)) as store:
        created(store, "a", index=indexed("running"))
    with holding(path):
        pass
    remove_locks(path)
    with contextlib.closing(SqliteStore(path)) as store:
        assert store.lease("a", "me", seconds=1).epoch == 2


def test_a_lease_without_a_lock_file_ends_with_its_time(store: SqliteStore, path: Path) -> None:
    store.lease("a", "gone", seconds=1_000)
    store._holders.close()
    remove_locks(path)
    assert store.lives("gone")
    monotonic = store._clock.monotonic()
    store._clock.monotonic = lambda: monotonic + 2_000  # type: ignore[method-assign]
    assert not store.lives("gone")


@pytest.mark.parametrize("restore", [shutil.copy, shutil.move])
def test_runs_of_a_restored_backup_are_taken_over(path: Path, restore: Callable[[str, str], object]) -> None:
    backup = path.with_name("backup.db")
    with contextlib.closing(SqliteStore(path)) as store:
        created(store, "a", index=indexed("running"))
        source, target = sqlite3.connect(path), sqlite3.connect(backup)
        with holding(path), contextlib.closing(source), contextlib.closing(target):
            source.backup(target)
        store.lease("a", "next", seconds=math.inf)
        store.release("a", epoch=found(store, "a").epoch)
    restore(str(backup), str(path))
    with contextlib.closing(SqliteStore(path)) as store:
        assert found(store, "a").holder == "other"
        assert store.lease("a", "me", seconds=1).epoch == 2
        assert [one.runs for one in store.holders()] == [1]
    assert Log(store)
