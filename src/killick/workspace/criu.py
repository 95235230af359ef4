"""Dumps and restores processes with CRIU, where it is installed and permitted. Opt-in.

An image is an ordinary folder, and contains the process's whole memory: readers of the image can read that. A process
resumes under its old pid, in the same folder, on unchanged files. So that pid must be free, and the files restored
first. Network connections come back closed, and data in a pipe without a reader is lost.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final

import msgspec

from killick.clock import SystemClock
from killick.errors import WorkspaceRefused
from killick.permissions import FOLDER_MODE, create_private, make_folder
from killick.workspace.processes import Process, descendants

_LIST: Final = "processes.json"
_SECONDS_MAX: Final = 120.0
_NOTED_SECONDS: Final = 2.0
_LINES_TOLD: Final = 3
# A shell's child stays in the shell's session. Connections are dropped, because the peer will not have waited. A
# deleted but open file is kept in the image up to this size.
_OPTIONS: Final = (
    "--shell-job", "--tcp-close", "--ext-unix-sk", "--file-locks", "--manage-cgroups=ignore", "--ghost-limit", "64M",
)  # fmt: skip


_clock: Final = SystemClock()


class _Tree(msgspec.Struct, frozen=True):
    """A process and all its descendants: the unit of an image."""

    root: int
    command: str
    members: list[int]


def available() -> str | None:
    """Returns None if processes can be dumped and restored; else the reason, in a line."""
    if sys.platform != "linux":
        return "CRIU is for Linux"
    program = _program()
    if program is None:
        return "criu is not installed; apt install criu"
    if os.geteuid() != 0:
        return "criu needs root"
    return _checked(program)


def dump(processes: Sequence[Process], images: Path, *, leave_running: bool = True) -> None:
    """Dumps processes and their descendants into a folder. They continue afterwards, or stay stopped until `go_on`, so
    that matching files can be captured: a process cannot resume on a file that grew meanwhile."""
    trees = _trees(processes)
    make_folder(images)
    dumped: list[_Tree] = []
    try:
        for number, tree in enumerate(trees):
            into = images / str(number)
            into.mkdir(FOLDER_MODE)
            leave = "--leave-running" if leave_running else "--leave-stopped"
            _run("dump", ["--tree", str(tree.root), leave], into, f"process {tree.root} ({tree.command})")
            dumped.append(tree)
    except BaseException:
        if not leave_running:
            _signal(dumped, signal.SIGCONT)
        raise
    with create_private(images / _LIST) as file:
        file.write(msgspec.json.encode(trees))


def go_on(images: Path) -> None:
    """Continues processes that a dump stopped."""
    _signal(_listed(images), signal.SIGCONT)


def restore(images: Path) -> list[int]:
    """Restores processes from their images, and returns their pids."""
    trees = _listed(images)
    # A zombie keeps its pid until its parent reaps it.
    until = _clock.monotonic() + _NOTED_SECONDS
    while (taken := _there(trees)) and _clock.monotonic() < until:
        for pid in taken:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)
    if taken:
        raise WorkspaceRefused(
            f"process {taken[0]}", "is there, and what is to be restored had that number; end it, then restore again"
        )
    for number, tree in enumerate(trees):
        _run("restore", ["--restore-detached"], images / str(number), f"process {tree.root} ({tree.command})")
    return _there(trees)


@contextlib.contextmanager
def images_folder() -> Generator[Path]:
    """A private temporary folder for images."""
    with tempfile.TemporaryDirectory(prefix="killick-processes-") as made:
        yield Path(made)


def _trees(processes: Sequence[Process]) -> list[_Tree]:
    """Returns the topmost of some processes, with their descendants."""
    below = {each.pid: descendants(each.pid) for each in processes}
    return [
        _Tree(each.pid, each.command, [each.pid, *below[each.pid]])
        for each in processes
        if not any(each.pid in members for members in below.values())
    ]


def _listed(images: Path) -> list[_Tree]:
    try:
        return msgspec.json.decode((images / _LIST).read_bytes(), type=list[_Tree])
    except (OSError, msgspec.DecodeError) as error:
        raise WorkspaceRefused(str(images), f"holds no images of processes: {error}") from error


def _there(trees: Sequence[_Tree]) -> list[int]:
    return [pid for tree in trees for pid in tree.members if Path(f"/proc/{pid}").exists()]


def _signal(trees: Sequence[_Tree], number: signal.Signals) -> None:
    for pid in (pid for tree in trees for pid in tree.members):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


# the program --------------------------------------------------------------------------------------


def _program() -> str | None:
    return shutil.which("criu") or shutil.which("criu", path="/usr/local/sbin:/usr/sbin:/sbin")


@lru_cache(maxsize=1)
def _checked(program: str) -> str | None:
    def asked(word: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run([program, word], capture_output=True, timeout=_SECONDS_MAX, check=False)

    try:
        ran = asked("check")
        if ran.returncode == 0:
            return None
        version = asked("--version").stdout.decode(errors="replace").split()[1:2]
        why = _last_words(ran.stderr.decode(errors="replace")) or "it does not say why"
    except (OSError, subprocess.TimeoutExpired) as error:
        version, why = [], str(error)
    return f"{' '.join(['criu', *version])} does not work with this kernel: {why}"


def _run(command: str, words: Sequence[str], images: Path, what: str) -> None:
    unable = available()
    if unable is not None:
        raise WorkspaceRefused(what, f"cannot be {'dumped' if command == 'dump' else 'restored'}: {unable}")
    with tempfile.TemporaryDirectory(prefix="killick-criu-") as work:
        log = Path(work) / "log"
        where = ["--images-dir", str(images), "--work-dir", work, "--log-file", log.name]
        try:
            ran = subprocess.run(
                [_program() or "criu", command, *words, *where, *_OPTIONS],
                stdin=subprocess.DEVNULL, capture_output=True, timeout=_SECONDS_MAX, check=False,
            )  # fmt: skip
            said, failed = ran.stderr.decode(errors="replace"), ran.returncode != 0
        except (OSError, subprocess.TimeoutExpired) as error:
            said, failed = str(error), True
        if failed:
            with contextlib.suppress(OSError):
                said = log.read_text(errors="replace") or said
            done = "dumped" if command == "dump" else "restored"
            raise WorkspaceRefused(what, f"could not be {done}: {_last_words(said) or 'criu does not say why'}")


def _last_words(said: str) -> str:
    """Returns a log's last errors in a line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.partition("Error ")[2] for line in lines if "Error " in line] or lines
    return "; ".join(errors[-_LINES_TOLD:])
