"""Processes that tools leave behind are noticed, told apart from others, and ended without hitting anybody else."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from killick.clock import SystemClock
from killick.workspace.processes import HOLDER_ENV, Process, alive, end, started_by, started_since

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")

HOLDER: Final = "holder_of_these_tests"
READY_SECONDS: Final = 300

DAEMON: Final = """
import os, sys, time
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
with open(sys.argv[1] + ".part", "w") as file: file.write(str(os.getpid()))
os.rename(sys.argv[1] + ".part", sys.argv[1])
time.sleep(600)
"""

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "ws"
    made.mkdir()
    return made


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a program that says that it is ready by closing its output, and ends it in the end."""
    begun: list[subprocess.Popen[bytes]] = []

    def started(
        code: str, *words: str | Path, cwd: Path = Path("/"), mark: str | None = None
    ) -> subprocess.Popen[bytes]:
        said = "\nimport os, sys, time\nsys.stdout.close(); os.close(1); time.sleep(600)"
        env = {key: os.environ[key] for key in os.environ.keys() - {HOLDER_ENV}} | ({HOLDER_ENV: mark} if mark else {})
        made = subprocess.Popen(
            [sys.executable, "-S", "-c", code + said, *words], cwd=cwd, env=env, stdout=subprocess.PIPE
        )
        begun.append(made)
        assert made.stdout is not None
        assert made.stdout.read() == b""
        assert made.poll() is None
        return made

    yield started
    for each in begun:
        each.kill()
        each.wait()
        if each.stdout is not None:
            each.stdout.close()


def appears(file: Path) -> str:
    """What a program has written, as soon as it is there."""
    late = time.monotonic() + READY_SECONDS
    while not file.exists():
        assert time.monotonic() < late, f"{file} did not appear"
        time.sleep(0.005)
    return file.read_text()


@contextlib.contextmanager
def daemon(folder: Path, said: Path, *, mark: str | None) -> Iterator[int]:
    """A process that left its parents and its session behind, as servers do."""
    env = {key: value for key, value in os.environ.items() if key != HOLDER_ENV} | ({HOLDER_ENV: mark} if mark else {})
    subprocess.run([sys.executable, "-S", "-c", DAEMON, said], cwd=folder, env=env, check=True)
    pid = int(appears(said))
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def pids(folder: Path, mark: str = HOLDER) -> set[int]:
    return {each.pid for each in alive(folder, holder=mark)}


def test_a_daemon_that_left_everything_behind_is_known_by_its_mark(folder: Path, tmp_path: Path) -> None:
    with daemon(folder, tmp_path / "pid", mark=HOLDER) as pid:
        (found,) = alive(folder, holder=HOLDER)
        assert found.pid == pid
        assert "import os, sys, time if os.fork()" in found.command, "in a line"
        assert found.parent != os.getpid()
        assert abs(found.started_us - SystemClock().now_us()) < READY_SECONDS * 1_000_000
        assert pids(folder, "another_holder") == set()
    with daemon(folder, tmp_path / "other", mark=None):
        assert pids(folder) == set(), "somebody else's"


def test_what_a_dead_holder_left_behind_is_found_wherever_it_is(folder: Path, tmp_path: Path, start: Start) -> None:
    start("", cwd=folder)
    with daemon(tmp_path, tmp_path / "pid", mark=HOLDER) as pid:
        assert [each.pid for each in started_by(HOLDER)] == [pid]
        assert started_by(HOLDER, since_us=SystemClock().now_us() + 1_000_000) == []
        assert started_by("another_holder") == []


def test_a_copy_of_this_process_that_left_everything_behind_is_known_too(folder: Path, tmp_path: Path) -> None:
    said = tmp_path / "pid"
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        os.setsid()
        if os.fork():
            os._exit(0)
        (tmp_path / "part").write_text(str(os.getpid()))
        (tmp_path / "part").rename(said)
        signal.pause()
        os._exit(0)
    os.waitpid(child, 0)
    pid = int(appears(said))
    try:
        assert pids(folder) == {pid}
    finally:
        os.kill(pid, signal.SIGKILL)


def test_what_a_marked_process_started_without_the_mark_is_ours(folder: Path, tmp_path: Path) -> None:
    child = 'subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], env={})'
    before, after = DAEMON.split("with open", 1)
    script = f"import subprocess\n{before}child = {child}\nwith open{after}".replace(
        "os.getpid()", "[os.getpid(), child.pid]"
    )
    said = tmp_path / "pid"
    subprocess.run([sys.executable, "-c", script, said], cwd=folder, env={**os.environ, HOLDER_ENV: HOLDER}, check=True)
    ours: list[int] = json.loads(appears(said))
    try:
        assert pids(folder) == set(ours)
    finally:
        # Not those that were found: one that is not found would outlive the test.
        for pid in ours:
            os.kill(pid, signal.SIGKILL)


def test_a_process_elsewhere_with_a_file_of_the_folder_open_is_at_work_in_it(folder: Path, start: Start) -> None:
    (folder / "log").write_text("")
    at_work = start("import sys; file = open(sys.argv[1])", folder / "log")
    start("")
    assert pids(folder) == {at_work.pid}


def test_a_process_with_a_mapping_of_a_file_is_at_work_in_the_folder(folder: Path, start: Start) -> None:
    (folder / "data").write_bytes(bytes(4096))
    code = "import mmap, os, sys; fd = os.open(sys.argv[1], os.O_RDWR); kept = mmap.mmap(fd, 0); os.close(fd)"
    # A mapping of Python's keeps a descriptor of its own, which goes here.
    code += "\nfor n in range(3, 20):\n    try: os.close(n)\n    except OSError: pass"
    at_work = start(code, folder / "data")
    assert not any(
        str(folder) in os.readlink(f"/proc/{at_work.pid}/fd/{n}") for n in os.listdir(f"/proc/{at_work.pid}/fd")
    )
    assert pids(folder) == {at_work.pid}


def test_a_process_beside_the_folder_is_not_in_it(folder: Path, start: Start) -> None:
    beside = folder.with_name("ws2")
    beside.mkdir()
    start("", cwd=beside)
    inside = start("", cwd=folder)
    assert pids(folder) == {inside.pid}


def test_a_process_that_ended_is_not_alive_though_nobody_took_note(folder: Path) -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", ""], cwd=folder, stdin=subprocess.DEVNULL)
    late = time.monotonic() + READY_SECONDS
    while f"{child.pid} (" in (told := Path(f"/proc/{child.pid}/stat").read_text()) and ") Z " not in told:
        assert time.monotonic() < late
        time.sleep(0.005)
    assert pids(folder) == set()
    child.wait()


def test_what_was_started_since_is_told_from_what_was_there_before(folder: Path, start: Start) -> None:
    before = start("", cwd=folder)
    time.sleep(0.05)  # The kernel tells a start to a hundredth of a second.
    since = SystemClock().now_us()
    after = start("", cwd=folder)
    assert [each.pid for each in started_since(folder, holder=HOLDER, since_us=since)] == [after.pid]
    assert pids(folder) == {before.pid, after.pid}


def test_ending_asks_first_and_kills_what_does_not_go(folder: Path, start: Start) -> None:
    asked = start(
        "import os, signal, sys\n"
        "def said(*_):\n    open(sys.argv[1], 'w').write('asked'); os._exit(0)\n"
        "signal.signal(signal.SIGTERM, said)",
        folder / "said", cwd=folder,
    )  # fmt: skip
    deaf = start("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)", cwd=folder)
    stopped = start("", cwd=folder)
    os.kill(stopped.pid, signal.SIGSTOP)
    found = alive(folder, holder=HOLDER)
    assert {each.pid for each in found} == {asked.pid, deaf.pid, stopped.pid}
    assert end(found, seconds=0.5) == found
    assert (folder / "said").read_text() == "asked"
    assert asked.wait() == 0
    assert deaf.wait() == -signal.SIGKILL
    assert stopped.wait() < 0
    assert alive(folder, holder=HOLDER) == []
    assert end(found) == found, "what is gone is gone"


def test_another_process_with_the_number_of_one_that_is_gone_is_not_touched(folder: Path, start: Start) -> None:
    other = start("", cwd=folder)
    (now,) = alive(folder, holder=HOLDER)
    gone = Process(now.pid, now.started_us - 60_000_000, now.command, now.parent)
    assert end([gone], seconds=0.1) == [gone]
    assert other.poll() is None
    assert end([Process(os.getpid(), now.started_us, "", 0), Process(1, 0, "", 0)], seconds=0.1) == []


def test_what_may_not_be_looked_at_is_passed_over(folder: Path, tmp_path: Path, start: Start) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can become somebody else")
    (folder / "file").write_text("")
    start("import sys; kept = open(sys.argv[1], 'ab')", folder / "file", cwd=folder, mark=HOLDER)
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        mine = Path("/proc/self/environ")
        try:
            outcome = alive(folder, holder="nobody's") == []
        except BaseException:
            outcome = False
        os._exit(0 if outcome and mine else 1)
    assert os.waitpid(child, 0)[1] == 0
