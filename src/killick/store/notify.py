"""Bells: how processes that share a file tell each other that a run may be due, without looking again and again.

Each store that is watched hangs a named pipe into a folder beside the file, and a thread sleeps on it. Who made a run
due writes its id to every pipe there. A hint and never the truth: nothing is kept, and a full pipe is passed over.
Of writers who do not ring the thread learns by asking a few times a second whether anything was written at all.
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
"""How often a watcher asks whether somebody wrote who does not ring."""

_LINE_BYTES_MAX: Final = 512
"""What every system writes to a pipe in one piece."""

_READ_BYTES: Final = 65_536
_NAMES_MAX: Final = 1_000

Ring = Callable[[str], None]


class Look(Protocol):
    """An eye on what is written, by whoever it is."""

    def changed(self) -> bool:
        """Whether anything was written since this was last asked."""
        ...

    def close(self) -> None: ...


class Bells:
    """The bells of one store: its own, if somebody watches, and those of others, to be rung."""

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
        """The bell is the parent's, and so is the thread that listens to it."""
        self._mutex = threading.Lock()
        if self._own is not None:
            self._own.leave()
        self._watchers, self._own = [], None

    def watch(self, ring: Ring) -> Callable[[], None]:
        """Call `ring` with a run's id, or "", when somebody rings; returns how to stop."""
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
        """Ring for some runs, here and in every process that watches."""
        runs = list(dict.fromkeys(runs))
        if not runs:
            return
        own = self._own
        if own is not None:
            self._call(runs)
        # Where nobody watches this is all that ringing costs.
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
                # What a watcher does with a hint must harm neither who rings nor who else is to hear.
                with contextlib.suppress(Exception):
                    ring(run)


class _Bell:
    """A named pipe that hangs beside the store, and the thread that sleeps on it."""

    def __init__(self, folder: str, call: Callable[[Iterable[str]], None], look: Look) -> None:
        self._folder, self._call, self._look = folder, call, look
        self.name, self._reads, self._writes = _hang(folder)
        self._down = False
        self._closing = threading.Lock()
        self._thread = threading.Thread(target=self._listen, name="killick-bell", daemon=True)
        self._thread.start()

    def take_down(self) -> None:
        # Whoever listens may have seen it and gone already, and its descriptors with it.
        with self._closing:
            if not self._down:
                self._down = True
                # A pipe that is full wakes who sleeps on it just as well.
                with contextlib.suppress(BlockingIOError):
                    os.write(self._writes, b"\n")
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=1.0)

    def leave(self) -> None:
        """In a process that inherited it: close the pipe here, so that it ends with who listens to it."""
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
    """Hang a pipe under a name of its own. Where that cannot be, a pipe that nobody else can ring will do."""
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
                # Open for both, so that it never ends; and it hangs only when it can be rung: one that nobody
                # listens to is cleared away.
                descriptor = os.open(making, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    os.link(making, f"{folder}/{name}")
                except OSError:
                    os.close(descriptor)
                    raise
            finally:
                os.unlink(making)
        except (FileExistsError, FileNotFoundError):
            # The name is taken, or the folder went with somebody else's last bell.
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
        # A pipe that nobody reads is a dead process's.
        if error.errno == errno.ENXIO:
            _unhang(folder, name)
        return
    with contextlib.suppress(OSError):
        # A file that another process put here is none of ours to write to.
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            os.write(descriptor, line)
    os.close(descriptor)


def _line(runs: list[str]) -> bytes:
    """The runs, one a line; an empty line where they do not fit, for then everything has to be looked at."""
    line = "".join(f"{run}\n" for run in runs).encode(errors="replace")
    fits = len(line) <= _LINE_BYTES_MAX and line.count(b"\n") == len(runs)
    return line if fits else b"\n"
