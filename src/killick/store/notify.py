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
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, Protocol

from killick.fork_safety import ForkedMutex, register_for_forks
from killick.permissions import FILE_MODE, FOLDER_MODE, is_own_folder
from killick.threads import start_thread

Callback = Callable[[str], None]

POLL_SECONDS: Final = 0.25
"""The polling interval for writes without a notification."""

RECONNECT_SECONDS: Final = 1.0
"""How long a listener on a server waits before it connects again. It then notifies with "": it may have missed some."""

_LINE_BYTES_MAX: Final = 512
"""The largest write to a pipe that is atomic on every system."""

_READ_BYTES: Final = 65_536
_NAMES_MAX: Final = 1_000


class ChangeDetector(Protocol):
    """Detects writes by any connection."""

    def changed(self) -> bool:
        """Returns whether anything was written since the last call."""
        ...

    def close(self) -> None: ...


class Listener(ABC):
    """The watchers of a store. Listens while there is one."""

    def __init__(self, refuse_closed: Callable[[], None] = lambda: None) -> None:
        self._refuse_closed = refuse_closed
        self._mutex = threading.Lock()
        self._watchers: list[Callback] = []
        self._end: Callable[[], None] | None = None

    @abstractmethod
    def _start(self) -> Callable[[], None]:
        """Starts the thread, which calls `_notify`. Returns a function that ends it."""

    def watch(self, callback: Callback) -> Callable[[], None]:
        watcher: Callback = lambda run: callback(run)  # noqa: E731  one callback may watch twice; each is stopped separately
        with self._mutex:
            self._refuse_closed()
            self._end = self._end or self._start()
            self._watchers.append(watcher)

        def stop() -> None:
            self._stop([watcher])

        return stop

    def close(self) -> None:
        self._stop(list(self._watchers))

    def _stop(self, watchers: Iterable[Callback]) -> None:
        end = None
        with self._mutex:
            self._watchers = [each for each in self._watchers if each not in watchers]
            if not self._watchers:
                end, self._end = self._end, None
        if end is not None:
            end()

    def _notify(self, runs: Iterable[str]) -> None:
        with self._mutex:
            watchers = list(self._watchers)
        for run in runs:
            for watcher in watchers:
                # A failing callback, say of a closed loop, must not affect the other watchers.
                with contextlib.suppress(Exception):
                    watcher(run)


class Notifier(Listener, ForkedMutex):
    """One store's notifications: its own pipe, if watched, and the pipes of others."""

    def __init__(self, path: Path, *, detector: Callable[[], ChangeDetector]) -> None:
        super().__init__()
        self._folder = f"{path}-bells"
        self._detector = detector
        self._own: _Pipe | None = None
        register_for_forks(self)

    def after_fork_in_child(self) -> None:
        """The pipe and its thread belong to the parent."""
        if self._own is not None:
            self._own.close_inherited()
        self._watchers, self._own, self._end = [], None, None

    def _start(self) -> Callable[[], None]:
        pipe = self._own = _Pipe(self._folder, self._notify, self._detector())

        def end() -> None:
            if self._own is pipe:
                self._own = None
            pipe.stop_reading()

        return end

    def notify(self, runs: Iterable[str]) -> None:
        """Notifies watchers of some runs, in this process and in others."""
        runs = list(dict.fromkeys(runs))
        if not runs:
            return
        own = self._own
        if own is not None:
            self._notify(runs)
        # Without watchers this is the whole cost.
        if not is_own_folder(self._folder):
            return
        try:
            names = os.listdir(self._folder)
        except OSError:
            return
        line = _line(runs)
        for name in names:
            if not name.startswith(".") and (own is None or name != own.name):
                _write_pipe(self._folder, name, line)


class _Pipe:
    """A named pipe next to the store, and the thread that reads it."""

    def __init__(self, folder: str, call: Callable[[Iterable[str]], None], detector: ChangeDetector) -> None:
        self._folder, self._call, self._detector = folder, call, detector
        self.name, self._reads, self._writes = _create_pipe(folder)
        self._stopped = False
        self._closing = threading.Lock()
        self._thread = start_thread("killick-notify", self._listen)

    def stop_reading(self) -> None:
        # The reader may have finished and closed its descriptors.
        with self._closing:
            if not self._stopped:
                self._stopped = True
                # A full pipe also wakes its reader.
                with contextlib.suppress(BlockingIOError):
                    os.write(self._writes, b"\n")
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=1.0)

    def close_inherited(self) -> None:
        """Closes an inherited pipe in a forked child, so that it ends with its reader."""
        for descriptor in {self._reads, self._writes}:
            os.close(descriptor)

    def _listen(self) -> None:
        poller = select.poll()
        poller.register(self._reads, select.POLLIN)
        rest = b""
        while not self._stopped:
            if poller.poll(POLL_SECONDS * 1_000):
                *lines, rest = (rest + os.read(self._reads, _READ_BYTES)).split(b"\n")
                if not self._stopped:
                    self._call([line.decode(errors="replace") for line in dict.fromkeys(lines)])
            elif self._detector.changed():
                self._call([""])
        self._detector.close()
        if self.name:
            _remove_pipe(self._folder, self.name)
        with self._closing:
            for descriptor in {self._reads, self._writes}:
                os.close(descriptor)


def _create_pipe(folder: str) -> tuple[str, int, int]:
    """Creates a uniquely named pipe. If that fails, uses an anonymous pipe that other processes cannot notify."""
    for number in range(_NAMES_MAX):
        name = f"{os.getpid()}-{number}"
        hidden = f"{folder}/.{name}"
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, FOLDER_MODE)
            if not is_own_folder(folder):
                break
            os.mkfifo(hidden, FILE_MODE)
            try:
                # Opened for reading and writing, so that it never ends. It is published only when open: writers remove
                # a pipe without a reader.
                descriptor = os.open(hidden, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    os.link(hidden, f"{folder}/{name}")
                except OSError:
                    os.close(descriptor)
                    raise
            finally:
                os.unlink(hidden)
        except (FileExistsError, FileNotFoundError):
            # The name exists, or another process removed the empty folder.
            continue
        except OSError:
            break
        return name, descriptor, descriptor
    return "", *os.pipe()


def _remove_pipe(folder: str, name: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(f"{folder}/{name}")
    with contextlib.suppress(OSError):
        os.rmdir(folder)


def _write_pipe(folder: str, name: str, line: bytes) -> None:
    try:
        descriptor = os.open(f"{folder}/{name}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        # A pipe without a reader belongs to a dead process.
        if error.errno == errno.ENXIO:
            _remove_pipe(folder, name)
        return
    with contextlib.suppress(OSError):
        # Never write to a foreign file in this folder.
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            os.write(descriptor, line)
    os.close(descriptor)


def _line(runs: list[str]) -> bytes:
    """Returns the runs, one a line; an empty line if they do not fit, which means any run."""
    line = "".join(f"{run}\n" for run in runs).encode(errors="replace")
    fits = len(line) <= _LINE_BYTES_MAX and line.count(b"\n") == len(runs)
    return line if fits else b"\n"
