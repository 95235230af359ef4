"""Several processes, one store: under every name of its file a run is executed once, and a store that is gone stops
them all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from killick.store import SqliteStore

APP = """
import asyncio, os, sys
from pathlib import Path
import killick

HERE = Path(__file__).parent

@killick.tool(effect="reads")
def roam() -> None:
    (HERE / "elsewhere").mkdir(exist_ok=True)
    os.chdir(HERE / "elsewhere")

@killick.tool(effect="idempotent")
async def pay(key: killick.Key = killick.KEY) -> None:
    with open(HERE / "book", "a") as book:
        book.write(f"{key}\\n")
    while not (HERE / "go").exists():
        await asyncio.sleep(0.02)

@killick.agent
async def roamer(run):
    await run.call(roam)

@killick.agent
async def payer(run):
    await run.call(pay)
"""

PAY = """
import os, sys, app, killick
store, folder = sys.argv[1:3]
with killick.open(store) as kd:
    if folder:
        os.chdir(folder)
    try:
        kd.run(app.payer, id="p")
    except killick.errors.RunBusy:
        print("busy")
"""
SECONDS = 300.0

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "data").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "link.db").symlink_to(tmp_path / "data" / "k.db")
    return tmp_path


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Starts processes, and kills them in the end."""
    started: list[subprocess.Popen[str]] = []

    def start(*command: str) -> subprocess.Popen[str]:
        env = {**os.environ, "PYTHONPATH": str(folder), "PYTHONUNBUFFERED": "1"}
        env.pop("KILLICK_STORE", None)
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(subprocess.Popen([sys.executable, *command], cwd=folder, env=env, text=True, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def ends(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=SECONDS)
    return process.returncode, out, err


def comes(path: Path, process: subprocess.Popen[str]) -> None:
    """Waits for a file that a process writes."""
    while not path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("ours", "ours_goes_to", "theirs", "theirs_goes_to"),
    [
        ("data/k.db", "", "other/link.db", ""),
        ("data/k.db", "", "data/k.db", "other"),
        ("data/k.db", "other", "data/k.db", ""),
        ("k.db", "other", "k.db", "data"),
    ],
    ids=["link", "they leave", "we leave", "both leave"],
)
def test_a_run_is_executed_once_under_every_name_of_its_store(
    folder: Path, start: Start, ours: str, ours_goes_to: str, theirs: str, theirs_goes_to: str
) -> None:
    first = start("-c", PAY, ours, ours_goes_to)
    comes(folder / "book", first)
    assert ends(start("-c", PAY, theirs, theirs_goes_to)) == (0, "busy\n", "")
    (folder / "go").touch()
    assert ends(first) == (0, "", "")
    assert len((folder / "book").read_text().splitlines()) == 1


def begin(folder: Path, agent: str) -> None:
    code = f"import app, killick\nwith killick.open('killick.db') as kd: kd.start(app.{agent}, id={agent!r})"
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True)


def until(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if word in line:
            return
    raise AssertionError(process.communicate())


@pytest.mark.slow
def test_a_worker_whose_tool_changed_the_folder_leaves_the_runs_of_another_alone(folder: Path, start: Start) -> None:
    roaming = start("-m", "killick", "worker", "app.py")
    until(roaming, "started")
    begin(folder, "roamer")
    until(roaming, "completed")
    roaming.send_signal(signal.SIGSTOP)
    begin(folder, "payer")
    paying = start("-m", "killick", "worker", "app.py", "-c", "1")
    comes(folder / "book", paying)
    code = "import app, killick\nwith killick.open('killick.db') as kd: kd.start(app.roamer, id='again')"
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True)
    roaming.send_signal(signal.SIGCONT)
    until(roaming, "completed")  # the other worker is busy, so this one looked for due runs
    (folder / "go").touch()
    until(paying, "completed")
    assert len((folder / "book").read_text().splitlines()) == 1


def delete(store: Path) -> None:
    for each in store.parent.glob("killick.db*"):
        if each.is_file():
            each.unlink()


def replace(store: Path) -> None:
    """As a deploy script does."""
    SqliteStore(store.with_name("new.db")).close()
    store.with_name("new.db").replace(store)


@pytest.mark.slow
@pytest.mark.parametrize("lose", [delete, replace])
@pytest.mark.parametrize("busy", [False, True])
def test_a_worker_whose_store_is_gone_says_so_and_stops(
    folder: Path, start: Start, lose: Callable[[Path], None], busy: bool
) -> None:
    worker = start("-m", "killick", "worker", "app.py")
    until(worker, "started")
    if busy:
        begin(folder, "payer")
        comes(folder / "book", worker)
    lose(folder / "killick.db")
    code, _, err = ends(worker)
    assert code == 1
    [line] = [line for line in err.splitlines() if line.startswith("killick: ")]
    assert line.startswith(f"killick: {folder / 'killick.db'}: ")


@pytest.mark.slow
@pytest.mark.parametrize("lose", [delete, replace])
@pytest.mark.parametrize("options", [(), ("--worker",)])
def test_a_server_whose_store_is_gone_says_so_and_stops(
    folder: Path, start: Start, lose: Callable[[Path], None], options: tuple[str, ...]
) -> None:
    pytest.importorskip("uvicorn")
    server = start("-m", "killick", "serve", "app.py", "--port", "0", *options)
    until(server, "sign in")
    lose(folder / "killick.db")
    code, _, err = ends(server)
    assert code == 1
    assert f"killick: {folder / 'killick.db'}: " in err


@pytest.mark.slow
def test_a_run_whose_store_is_deleted_is_not_reported_as_done(folder: Path, start: Start) -> None:
    running = start("-m", "killick", "run", "app.py:payer", "--id", "p")
    comes(folder / "book", running)
    delete(folder / "killick.db")
    (folder / "go").touch()
    code, out, err = ends(running)
    assert code == 1
    assert "completed" not in out + err
    assert str(folder / "killick.db") in err
    assert not (folder / "killick.db").exists()
