"""Notifies other processes on the same file that a run may be due, without polling.

Each watching store creates a named pipe in a folder next to the file, and a thread blocks on it. A process that makes a
run due writes the run's id to every pipe there. A notification is a hint: nothing is stored, and a full pipe is
skipped. For writers that do not notify, the thread polls a change counter a few times a second.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import stat
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, Protocol

from killick.fork_safety import hears_of_forks
from killick.permissions import FILE_MODE, FOLDER_MODE, is_own_folder

LOOK_SECONDS: Final = 0.25
"""The polling interval for writes without a notification."""

_LINE_BYTES_MAX: Final = 512
"""The largest write to a pipe that is atomic on every system."""

_READ_BYTES: Final = 65_536
_NAMES_MAX: Final = 1_000

Ring = Callable[[str], None]


class Look(Protocol):
    """Detects writes by any connection."""

    def changed(self) -> bool:
        """Returns whether anything was written since the last call."""
        ...

    def close(self) -> None: ...


class Bells:
    """One store's notifications: its own pipe, if watched, and the pipes of others."""

    def __init__(self, path: Path, *, look: Callable[[], Look]) -> None:
        self._folder = f"{path}-bells"
        self._look = look
        self._mutex = threading.Lock()
        self._watchers: list[Ring] = []
        self._own: _Bell | None = None
        hears_of_forks(self)

    def before_fork(self) -> None:
        self._mutex.acquire()

    def after_fork_in_parent(self) -> None:
        self._mutex.release()

    def after_fork_in_child(self) -> None:
        """The pipe and its thread belong to the parent."""
        self._mutex = threading.Lock()
        if self._own is not None:
            self._own.leave()
        self._watchers, self._own = [], None

    def watch(self, ring: Ring) -> Callable[[], None]:
        """Calls `ring` with a run's id, or "", on each notification. Returns a function that stops it."""
        watcher = [ring]

        def call(run: str) -> None:
            for each in watcher:
                each(run)

        with self._mutex:
            if self._own is None:
                self._own = _Bell(self._folder, self._call, self._look())
            self._watchers = [*self._watchers, call]

        def stop() -> None:
            watcher.clear()
            with self._mutex:
                self._watchers = [each for each in self._watchers if each is not call]
                bell = None if self._watchers else self._own
                if bell is not None:
                    self._own = None
            if bell is not None:
                bell.take_down()

        return stop

    def ring(self, runs: Iterable[str]) -> None:
        """Notifies watchers of some runs, in this process and in others."""
        runs = list(dict.fromkeys(runs))
        if not runs:
            return
        own = self._own
        if own is not None:
            self._call(runs)
        # Without watchers this is the whole cost.
        if not is_own_folder(self._folder):
            return
        try:
            hung = os.listdir(self._folder)
        except OSError:
            return
        line = _line(runs)
        for name in hung:
            if not name.startswith(".") and (own is None or name != own.name):
                _strike(self._folder, name, line)

    def close(self) -> None:
        with self._mutex:
            self._watchers, bell, self._own = [], self._own, None
        if bell is not None:
            bell.take_down()

    def _call(self, runs: Iterable[str]) -> None:
        for run in runs:
            for ring in self._watchers:
                # A failing callback must not affect the notifier or other watchers.
                with contextlib.suppress(Exception):
                    ring(run)


class _Bell:
    """A named pipe next to the store, and the thread that reads it."""

    def __init__(self, folder: str, call: Callable[[Iterable[str]], None], look: Look) -> None:
        self._folder, self._call, self._look = folder, call, look
        self.name, self._reads, self._writes = _hang(folder)
        self._down = False
        self._closing = threading.Lock()
        self._thread = threading.Thread(target=self._listen, name="killick-bell", daemon=True)
        self._thread.start()

    def take_down(self) -> None:
        # The reader may have finished and closed its descriptors.
        with self._closing:
            if not self._down:
                self._down = True
                # A full pipe also wakes its reader.
                with contextlib.suppress(BlockingIOError):
                    os.write(self._writes, b"\n")
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=1.0)

    def leave(self) -> None:
        """Closes an inherited pipe in a forked child, so that it ends with its reader."""
        for descriptor in {self._reads, self._writes}:
            os.close(descriptor)

    def _listen(self) -> None:
        heard = select.poll()
        heard.register(self._reads, select.POLLIN)
        rest = b""
        while not self._down:
            if heard.poll(LOOK_SECONDS * 1_000):
                *lines, rest = (rest + os.read(self._reads, _READ_BYTES)).split(b"\n")
                if not self._down:
                    self._call([line.decode(errors="replace") for line in dict.fromkeys(lines)])
            elif self._look.changed():
                self._call([""])
        self._look.close()
        if self.name:
            _unhang(self._folder, self.name)
        with self._closing:
            for descriptor in {self._reads, self._writes}:
                os.close(descriptor)


def _hang(folder: str) -> tuple[str, int, int]:
    """Creates a uniquely named pipe. If that fails, uses an anonymous pipe that other processes cannot notify."""
    for number in range(_NAMES_MAX):
        name = f"{os.getpid()}-{number}"
        making = f"{folder}/.{name}"
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, FOLDER_MODE)
            if not is_own_folder(folder):
                break
            os.mkfifo(making, FILE_MODE)
            try:
                # Opened for reading and writing, so that it never ends. It is published only when open: writers remove
                # a pipe without a reader.
                descriptor = os.open(making, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    os.link(making, f"{folder}/{name}")
                except OSError:
                    os.close(descriptor)
                    raise
            finally:
                os.unlink(making)
        except (FileExistsError, FileNotFoundError):
            # The name exists, or another process removed the empty folder.
            continue
        except OSError:
            break
        return name, descriptor, descriptor
    return "", *os.pipe()


def _unhang(folder: str, name: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(f"{folder}/{name}")
    with contextlib.suppress(OSError):
        os.rmdir(folder)


def _strike(folder: str, name: str, line: bytes) -> None:
    try:
        descriptor = os.open(f"{folder}/{name}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        # A pipe without a reader belongs to a dead process.
        if error.errno == errno.ENXIO:
            _unhang(folder, name)
        return
    with contextlib.suppress(OSError):
        # Never write to a foreign file in this folder.
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            os.write(descriptor, line)
    os.close(descriptor)


def _line(runs: list[str]) -> bytes:
    """Returns the runs, one a line; an empty line if they do not fit, which means "look at all"."""
    line = "".join(f"{run}\n" for run in runs).encode(errors="replace")
    fits = len(line) <= _LINE_BYTES_MAX and line.count(b"\n") == len(runs)
    return line if fits else b"\n"
