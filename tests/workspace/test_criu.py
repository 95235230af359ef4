"""A process goes on from its image with what it had in memory."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from killick.errors import WorkspaceRefused
from killick.workspace import criu
from killick.workspace.processes import MARK, alive, end

pytestmark = pytest.mark.slow

HOLDER: Final = "holder_of_images"
PATIENCE_SECONDS: Final = 300

COUNTER: Final = """
import os, sys, time
os.setsid()
count, word = int(sys.argv[1]), sys.argv[2]
while True:
    count += 1
    with open("count.part", "w") as file:
        file.write(f"{os.getpid()} {word} {count}")
    os.rename("count.part", "count")
    time.sleep(0.01)
"""


@pytest.fixture
def works() -> None:
    """Whoever may install criu has it; where it cannot work, it says so."""
    may_install = sys.platform == "linux" and os.geteuid() == 0 and shutil.which("apt-get") is not None
    unable = criu.available()
    if unable is not None and may_install:
        assert "not installed" not in unable, "no criu here, which these tests dump with; apt install criu"
    if unable is not None:
        pytest.skip(unable)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "ws"
    made.mkdir()
    return made


def counted(folder: Path) -> tuple[int, str, int]:
    pid, word, count = (folder / "count").read_text().split()
    return int(pid), word, int(count)


def until(folder: Path, count: int) -> tuple[int, str, int]:
    """What the counter says once it has come so far."""
    late = time.monotonic() + PATIENCE_SECONDS
    while not (folder / "count").exists() or counted(folder)[2] < count:
        assert time.monotonic() < late, "nobody counts"
        time.sleep(0.005)
    return counted(folder)


@contextlib.contextmanager
def counting(folder: Path, begin: int, word: str) -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", COUNTER, str(begin), word], cwd=folder, env={**os.environ, MARK: HOLDER},
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        end(alive(folder, mark=HOLDER))


@pytest.mark.usefixtures("works")
def test_a_process_goes_on_from_where_it_was_with_all_it_knew(folder: Path) -> None:
    with criu.images_folder() as images, counting(folder, 1_000_000, "knew") as child:
        until(folder, 1_000_010)
        criu.dump(alive(folder, mark=HOLDER), images)
        dumped = counted(folder)[2]
        until(folder, dumped + 10)
        child.kill()
        last = counted(folder)[2]
        (folder / "count").unlink()
        assert criu.restore(images) == [child.pid]
        pid, word, count = until(folder, 1_000_011)
        assert (pid, word) == (child.pid, "knew"), "nothing but its memory has the word and the number"
        assert count < last, "it went on from the image, not from where it was ended"
        (found,) = alive(folder, mark=HOLDER)
        assert found.pid == child.pid


@pytest.mark.usefixtures("works")
def test_two_trees_of_processes_come_back(folder: Path) -> None:
    daemons = []
    script = (
        "import os, subprocess, sys, time\n"
        "if os.fork(): os._exit(0)\n"
        "os.setsid()\n"
        "if os.fork(): os._exit(0)\n"
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'])\n"
        "open(sys.argv[1], 'w').write('x'); time.sleep(600)"
    )
    env = {**os.environ, MARK: HOLDER}
    try:
        for name in ("one", "two"):
            words = [sys.executable, "-S", "-c", script, folder / name]
            subprocess.run(words, cwd=folder, env=env, check=True, stdin=subprocess.DEVNULL)
            late = time.monotonic() + PATIENCE_SECONDS
            while not (folder / name).exists() or not (folder / name).read_text():
                assert time.monotonic() < late
                time.sleep(0.005)
        daemons = alive(folder, mark=HOLDER)
        assert len(daemons) == 4
        with criu.images_folder() as images:
            criu.dump(daemons, images)
            with pytest.raises(WorkspaceRefused, match="end it, then restore again"):
                criu.restore(images)
            assert end(daemons) == daemons
            assert sorted(criu.restore(images)) == sorted(each.pid for each in daemons)
        assert {each.pid for each in alive(folder, mark=HOLDER)} == {each.pid for each in daemons}
    finally:
        end(alive(folder, mark=HOLDER))


@pytest.mark.usefixtures("works")
def test_processes_stand_still_until_the_files_are_taken(folder: Path) -> None:
    with criu.images_folder() as images, counting(folder, 0, "still"):
        until(folder, 5)
        criu.dump(alive(folder, mark=HOLDER), images, leave_running=False)
        still = counted(folder)
        time.sleep(0.1)  # It would have counted ten times meanwhile.
        assert counted(folder) == still
        criu.go_on(images)
        until(folder, still[2] + 5)


@pytest.mark.usefixtures("works")
def test_what_cannot_be_dumped_is_told_in_a_line_and_goes_on(folder: Path) -> None:
    # Nobody can put a process that traces another one into an image, nor one that is traced.
    tracing = (
        "import ctypes, os, sys, time\n"
        "libc = ctypes.CDLL(None)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    libc.ptrace(0, 0, 0, 0)\n"
        "    open(sys.argv[1], 'w').write('x'); time.sleep(600)\n"
        "time.sleep(600)"
    )
    env = {**os.environ, MARK: HOLDER}
    child = subprocess.Popen([sys.executable, "-S", "-c", tracing, folder / "ready"], cwd=folder, env=env)
    try:
        late = time.monotonic() + PATIENCE_SECONDS
        while not (folder / "ready").exists():
            assert time.monotonic() < late
            time.sleep(0.005)
        with criu.images_folder() as images:
            with pytest.raises(WorkspaceRefused) as refused:
                criu.dump(alive(folder, mark=HOLDER), images)
            assert f"process {child.pid}" in str(refused.value)
            assert "could not be dumped: " in str(refused.value)
            assert "\n" not in str(refused.value)
        assert child.poll() is None
    finally:
        end(alive(folder, mark=HOLDER))
        child.kill()
        child.wait()


def test_images_are_for_nobody_else_and_go_in_the_end() -> None:
    with criu.images_folder() as images:
        assert images.stat().st_mode & 0o777 == 0o700
        (images / "0").mkdir()
    assert not images.exists()


def test_a_folder_without_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkspaceRefused, match="holds no images of processes"):
        criu.restore(tmp_path)


def test_somebody_who_is_not_root_is_told(tmp_path: Path) -> None:
    if os.getuid() != 0 or criu._program() is None:
        pytest.skip("only root can become somebody else, and only where criu is there is it asked for")
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        os._exit(0 if criu.available() == "criu needs root" else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_it_says_why_it_cannot_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(criu, "_program", lambda: None)
    assert criu.available() == "criu is not installed; apt install criu"
    broken = tmp_path / "criu"
    broken.write_text(
        "#!/bin/sh\necho Version: 3.17; echo Warn: hm >&2\necho 'Error (vdso.c:381): no such area' >&2; exit 1\n"
    )
    broken.chmod(0o755)
    assert criu._checked(str(broken)) == "criu 3.17 does not work with this kernel: (vdso.c:381): no such area"
    criu._checked.cache_clear()
