"""Finds processes that a workspace's tools left running, from Linux's /proc; on other systems there are none.

A snapshot covers files only. It records which of our processes worked in the folder.

Other users' processes are invisible and skipped silently; so are processes that end meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from io import FileIO
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from killick.clock import SystemClock

HOLDER_ENV: Final = "KILLICK_HOLDER"
"""The environment variable of our processes: the name of the holder that started them."""

_COMMAND_CHARS_MAX: Final = 200
_TICKS_US: Final = 1_000_000 // (os.sysconf("SC_CLK_TCK") if sys.platform == "linux" else 100)
_KILLED_SECONDS: Final = 2.0
_SAME_US: Final = 1_000_000
"""Two readings of a process's start time differ by less; pids are not reused so soon."""

_ENDED: Final = (b"Z", b"X")


class Process(msgspec.Struct, frozen=True):
    """A process as observed. Its start time is known to a hundredth of a second."""

    pid: int
    started_us: int
    command: str
    parent: int


class _Seen(NamedTuple):
    parent: int
    state: bytes
    started_us: int
    image: tuple[bytes, ...]


def alive(folder: Path, *, holder: str) -> list[Process]:
    """Returns our processes that work in a folder: their working directory, or an open or mapped file, is in it. Ours
    are those with the holder's variable, those that this process started, and their descendants."""
    here = _Place(folder)
    return [
        Process(pid, seen.started_us, _command(pid), seen.parent)
        for pid, seen in sorted(_ours(holder).items())
        if seen.state not in _ENDED and here.is_used_by(pid)
    ]


def started_by(holder: str, *, since_us: int = 0) -> list[Process]:
    """Returns the processes that a holder started since a time, and their descendants, in any folder. If the holder is
    dead, no other process owns them."""
    every = _all_processes()
    started = {pid for pid in every if _has_holder(pid, holder)}
    return [
        Process(pid, every[pid].started_us, _command(pid), every[pid].parent)
        for pid in sorted(_below(started, every) - {os.getpid()})
        if every[pid].state not in _ENDED and every[pid].started_us + _TICKS_US >= since_us
    ]


def started_since(folder: Path, *, holder: str, since_us: int) -> list[Process]:
    """Returns those started since a time. One that started up to a hundredth of a second earlier may be included, since
    the kernel reports no finer time."""
    return [each for each in alive(folder, holder=holder) if each.started_us + _TICKS_US >= since_us]


def end(processes: Sequence[Process], *, seconds: float = 2.0) -> list[Process]:
    """Terminates processes, and returns those that ended: SIGTERM first, SIGKILL after a while. A process with a reused
    pid is not touched."""
    pidfds: dict[int, Process] = {}
    ended: list[Process] = []
    try:
        for each in processes:
            descriptor = _pidfd(each)
            if descriptor is None:
                ended.append(each)
            elif descriptor >= 0:
                pidfds[descriptor] = each
        waiting = set(pidfds)
        for number, patience in ((signal.SIGTERM, seconds), (signal.SIGKILL, _KILLED_SECONDS)):
            for descriptor in waiting:
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(descriptor, number)
            waiting = _still(waiting, patience)
        ended += [each for descriptor, each in pidfds.items() if descriptor not in waiting]
        return [each for each in processes if each in ended]
    finally:
        for descriptor in pidfds:
            os.close(descriptor)


class _Place:
    """A folder as /proc names it."""

    def __init__(self, folder: Path) -> None:
        self._path = os.fsencode(os.path.realpath(folder))
        self._below = self._path.rstrip(b"/") + b"/"
        # Lists of mappings escape a line break in a name.
        self._mapped = self._below.replace(b"\n", b"\\012")

    def is_used_by(self, pid: int) -> bool:
        with contextlib.suppress(OSError):
            if self._has(os.readlink(b"/proc/%d/cwd" % pid)):
                return True
        with contextlib.suppress(OSError):
            if any(self._has(target) for target in _descriptors(pid)):
                return True
        with contextlib.suppress(OSError):
            return b" " + self._mapped in _read(pid, b"maps")
        return False

    def _has(self, target: bytes) -> bool:
        return target == self._path or target.startswith(self._below)


def _ours(holder: str) -> dict[int, _Seen]:
    """Returns our processes without this one: by descent, by the variable, or as a fork without its own program yet."""
    me = os.getpid()
    every = _all_processes()
    image = every[me].image if me in every else ()
    known = {pid for pid, seen in every.items() if seen.image == image or _has_holder(pid, holder)}
    return {pid: every[pid] for pid in _below(known | {me}, every) - {me}}


def _all_processes() -> dict[int, _Seen]:
    return {pid: seen for pid in _pids() if (seen := _seen(pid)) is not None}


def _below(known: set[int], every: dict[int, _Seen]) -> set[int]:
    """Returns some processes with all their descendants."""
    children: dict[int, list[int]] = {}
    for pid, seen in every.items():
        children.setdefault(seen.parent, []).append(pid)
    found, waiting = set(known), list(known)
    while waiting:
        more = [pid for pid in children.get(waiting.pop(), ()) if pid not in found]
        found.update(more)
        waiting += more
    return found


# /proc --------------------------------------------------------------------------------------------


def _pids() -> list[int]:
    if sys.platform != "linux":
        return []
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []


def _read(pid: int, name: bytes) -> bytes:
    with FileIO(os.fsdecode(b"/proc/%d/%s" % (pid, name))) as file:
        return file.readall()


def _seen(pid: int) -> _Seen | None:
    try:
        fields = _read(pid, b"stat").rpartition(b")")[2].split()
        # The layout of code, stack and environment is randomized for each program, and inherited by a fork.
        image = (fields[23], fields[25], fields[47]) if len(fields) > 47 and fields[25] != b"0" else (b"%d" % pid,)
        return _Seen(int(fields[1]), fields[0], _booted_us() + int(fields[19]) * _TICKS_US, image)
    except (OSError, IndexError, ValueError):
        return None


def _has_holder(pid: int, holder: str) -> bool:
    try:
        return b"%s=%s" % (HOLDER_ENV.encode(), os.fsencode(holder)) in _read(pid, b"environ").split(b"\0")
    except OSError:
        return False


def _command(pid: int) -> str:
    try:
        words = _read(pid, b"cmdline").rstrip(b"\0").replace(b"\0", b" ") or b"[%s]" % _read(pid, b"comm").strip()
    except OSError:
        return ""
    return " ".join(words.decode(errors="replace").split())[:_COMMAND_CHARS_MAX]


def _descriptors(pid: int) -> Iterator[bytes]:
    """Returns the paths of a process's open files."""
    folder = b"/proc/%d/fd" % pid
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):
            yield os.readlink(folder + b"/" + name)


@lru_cache(maxsize=1)
def _booted_us() -> int:
    """Returns the boot time. Read once, so that a process has one start time."""
    with open("/proc/uptime", "rb") as file:
        seconds = file.read().split()[0]
    return SystemClock().now_us() - round(float(seconds) * 1_000_000)


# ending -------------------------------------------------------------------------------------------


def _pidfd(process: Process) -> int | None:
    """Returns a pidfd; None: the process is gone; -1: unsupported, so it is not touched."""
    if process.pid in (os.getpid(), 0, 1):
        return -1
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    except (OSError, AttributeError):
        return -1
    seen = _seen(process.pid)
    if seen is not None and abs(seen.started_us - process.started_us) < _SAME_US:
        return descriptor
    os.close(descriptor)
    return None


def _still(descriptors: set[int], seconds: float) -> set[int]:
    """Returns which processes still exist after a while; returns early once none does."""
    clock = SystemClock()
    until = clock.monotonic() + seconds
    waiting = set(descriptors)
    poll = select.poll()
    for descriptor in waiting:
        poll.register(descriptor, select.POLLIN)
    while waiting:
        left = until - clock.monotonic()
        for descriptor, _ in poll.poll(max(left, 0.0) * 1_000):
            poll.unregister(descriptor)
            waiting.discard(descriptor)
        if left <= 0:
            break
    return waiting
