"""`killick check --isolate`: what the rehearsal cannot see does not reach the world either, or nothing is executed."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

APP = """
import _thread, contextlib, ctypes, os, queue, socket, sqlite3, tempfile, threading
import killick

OUT, PORT = {out!r}, {port}
QUEUE = queue.Queue()


def pump():
    while True:
        with contextlib.suppress(OSError):
            QUEUE.get()()
        QUEUE.task_done()


threading.Thread(target=pump, daemon=True).start()


def sqlite_connection():
    sqlite3.connect(f"{{OUT}}/db.sqlite").execute("create table t (x)")


def descriptor():
    os.write(os.open(f"{{OUT}}/fd", os.O_WRONLY | os.O_CREAT), b"x")


def over_a_socket():
    with socket.create_connection(("127.0.0.1", PORT), 5) as there, open("/etc/hostname", "rb") as file:
        os.sendfile(there.fileno(), file.fileno(), 0, 5)


def raw_thread():
    done = _thread.allocate_lock()
    done.acquire()

    def go():
        try:
            with contextlib.suppress(OSError):
                open(f"{{OUT}}/raw", "w").write("x")
        finally:
            done.release()

    _thread.start_new_thread(go, ())
    done.acquire()


def by_c():
    libc = ctypes.CDLL(None, use_errno=True)
    libc.creat(f"{{OUT}}/c".encode(), 0o600)
    libc.mount(b"none", b"/", None, ctypes.c_ulong(32 | 4096), None)  # back to writable
    libc.creat(f"{{OUT}}/c2".encode(), 0o600)
    four = (ctypes.c_uint64 * 4)(0, 1, 0, 0)
    libc.syscall(442, -100, b"/", 0x8000, ctypes.byref(four), ctypes.c_size_t(32))
    libc.creat(f"{{OUT}}/c3".encode(), 0o600)


WAYS = [
    sqlite_connection, descriptor, over_a_socket, raw_thread, by_c, lambda: os.mkfifo(f"{{OUT}}/fifo"),
    lambda: QUEUE.put(lambda: open(f"{{OUT}}/queue", "w").write("x")) or QUEUE.join(),
]


def all_ways():
    for way in WAYS[: 6 if threading.current_thread().daemon else 7]:  # the thread does not wait for itself
        with contextlib.suppress(OSError, sqlite3.Error):
            way()


all_ways()
tempfile.NamedTemporaryFile().write(b"x")  # a temporary file can be written


@killick.tool(effect="idempotent")
async def book(slot: str, key: killick.Key = killick.KEY) -> str:
    return slot


@killick.agent
async def escapes(run: killick.Run, slot: str) -> str:
    QUEUE.put(all_ways)
    QUEUE.join()
    by_c()
    raw_thread()
    return await run.call(book, slot)
"""
UNSHARE = shutil.which("unshare")
NAMESPACES = UNSHARE and subprocess.run([UNSHARE, "-rnm", "true"], check=False).returncode == 0
allowed = pytest.mark.skipif(not NAMESPACES, reason="this system allows no user namespaces")


class World:
    """A folder, and a port that counts connections."""

    def __init__(self, folder: Path) -> None:
        self.out = folder / "out"
        self.out.mkdir()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.reached = 0
        threading.Thread(target=self._count, daemon=True).start()
        self.app = folder / "app.py"
        self.app.write_text(APP.format(out=str(self.out), port=self.listener.getsockname()[1]))

    def _count(self) -> None:
        while True:
            try:
                self.listener.accept()[0].close()
            except OSError:
                return
            self.reached += 1

    def check(self, *before: str, isolate: bool = True) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "killick", "check", "app.py:escapes", "--max", "4", "--json"]
        return subprocess.run(
            [*before, *command, *["--isolate"] * isolate], cwd=self.app.parent, capture_output=True, text=True,
            timeout=300, check=False,
        )  # fmt: skip


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.mark.slow
@allowed
def test_no_way_out_of_an_isolated_check_reaches_files_or_the_network(world: World) -> None:
    done = world.check()
    assert json.loads(done.stdout)["ways"]["death"], done.stderr
    assert (list(world.out.iterdir()), world.reached) == ([], 0)
    world.check(isolate=False)
    assert world.reached
    assert {each.name for each in world.out.iterdir()} >= {"c", "db.sqlite", "fd", "fifo", "queue", "raw"}


@allowed
def test_where_namespaces_are_forbidden_nothing_is_executed_and_one_line_says_so(world: World) -> None:
    forbid = ["unshare", "-rm", "sh", "-c", 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"', "sh"]
    done = world.check(*forbid)
    assert done.returncode == 2
    assert (done.stdout, len(done.stderr.splitlines())) == ("", 1)
    assert "--isolate: this system isolates no process" in done.stderr
    assert (list(world.out.iterdir()), world.reached) == ([], 0)


def test_a_raw_thread_of_the_agent_does_not_end_the_check(world: World) -> None:
    source = world.app.read_text().replace("    QUEUE.put(all_ways)\n    QUEUE.join()\n    by_c()\n", "")
    world.app.write_text(source.replace("\nall_ways()\n", "\n"))
    done = world.check(isolate=False)
    assert done.returncode in (0, 1), done.stderr
    assert json.loads(done.stdout)["ways"]["death"]
