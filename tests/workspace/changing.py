"""Changes a folder at random, in a process of its own. Run as a program: `go SEED COUNT` on stdin, `done` on stdout.

Whatever a file came to hold is told in a log, by path and hash, so that others can say what it may hold: after every
single call that changes content, and under one lock for all, so that nobody changes it before it was looked at.
"""

from __future__ import annotations

import fcntl
import os
import random
import stat
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

FILES = [b"a", b"b", b"c.one", b"d.two", b"\xff\xfe", "é".encode(), b"new\nline", b".hidden"]
FOLDERS = [b"p", b"q", b"skipped", b"r\xfd"]
RULES = [b"*.one", b"*.two", b"skipped/", b"/q"]
IGNORES = (b".gitignore", b".killickignore")
MODES = [0o644, 0o600, 0o755, 0o444, 0o4755, 0o000 if os.geteuid() == 0 else 0o640]
LONG = 3 << 20
FILES_MAX = 150


class Changer:
    """One process among several; what it holds open stays open from one go to the next."""

    def __init__(self, folder: Path, outside: Path, log: Path, lock: Path) -> None:
        self.top = os.fsencode(folder)
        self.outside = os.fsencode(outside)
        self.log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.lock = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
        self.chance = random.Random(0)
        self.held: list[int] = []
        self.number = 0

    def go(self, seed: int, count: int) -> None:
        self.chance = random.Random(seed)
        for _ in range(count):
            do = self.chance.choice(CHANGES)
            # Others move and remove what this one looks at: whatever fails has changed nothing, or is told.
            with suppress(OSError):
                do(self)

    # where

    def folders(self) -> list[bytes]:
        found = [b""]
        for path in found:
            with suppress(OSError), os.scandir(self.top + b"/" + path) as entries:
                found += [path + each.name + b"/" for each in entries if each.is_dir(follow_symlinks=False)]
        return found

    def somewhere(self) -> bytes:
        """A folder, by its path from the top, with a slash at its end unless it is the top."""
        return self.chance.choice(self.folders())

    def something(self, *, folder: bool | None = None) -> bytes:
        """What is there: a file or link (False), a folder (True), or either."""
        found: list[bytes] = []
        for path in self.folders():
            with suppress(OSError), os.scandir(self.top + b"/" + path) as entries:
                found += [
                    path + each.name
                    for each in entries
                    if folder in (None, each.is_dir(follow_symlinks=False)) and each.name not in IGNORES
                ]
        if not found:
            raise FileNotFoundError
        return self.chance.choice(found)

    def full(self, path: bytes) -> bytes:
        return self.top + b"/" + path

    # telling

    @contextmanager
    def alone(self) -> Generator[None]:
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self.lock, fcntl.LOCK_UN)

    def tell(self, what: str, *words: bytes) -> None:
        os.write(self.log, (what + " " + " ".join(word.hex() or "-" for word in words) + "\n").encode())

    def had(self, path: bytes, fd: int) -> None:
        """This path holds what is in the file now."""
        self.tell("had", path, hashed(fd))

    def fresh(self) -> bytes:
        return self.chance.randbytes(8).hex().encode() * self.chance.randrange(1, 12)

    # files

    def open(self, path: bytes, flags: int) -> int:
        fd = os.open(self.full(path), flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise IsADirectoryError
        return fd

    @contextmanager
    def opened(self, path: bytes, flags: int = os.O_RDWR) -> Generator[int]:
        fd = self.open(path, flags)
        try:
            yield fd
        finally:
            os.close(fd)

    def create(self) -> None:
        if sum(len(names) for _, _, names in os.walk(self.top)) > FILES_MAX:
            return
        path = self.somewhere() + self.chance.choice(FILES)
        with self.alone(), self.opened(path, os.O_RDWR | os.O_CREAT) as fd:
            self.had(path, fd)
            os.ftruncate(fd, 0)
            self.had(path, fd)
            os.write(fd, self.fresh())
            self.had(path, fd)

    def append(self) -> None:
        path = self.something(folder=False)
        with self.alone(), self.opened(path, os.O_RDWR | os.O_APPEND) as fd:
            os.write(fd, self.fresh())
            self.had(path, fd)

    def overwrite(self) -> None:
        """In place, the length as it was; sometimes the time too, sometimes the content put back."""
        path = self.something(folder=False)
        with self.alone(), self.opened(path) as fd:
            status = os.fstat(fd)
            length = min(status.st_size, 16)
            at = self.chance.randrange(status.st_size - length + 1)
            before = os.pread(fd, length, at)
            os.pwrite(fd, self.chance.randbytes(length), at)
            self.had(path, fd)
            if self.chance.random() < 0.4:
                os.pwrite(fd, before, at)
                self.had(path, fd)
            if self.chance.random() < 0.7:
                os.utime(fd, ns=(status.st_atime_ns, status.st_mtime_ns))

    def truncate(self) -> None:
        path = self.something(folder=False)
        with self.alone(), self.opened(path) as fd:
            length = os.fstat(fd).st_size
            os.ftruncate(fd, self.chance.choice([0, length // 2]))
            self.had(path, fd)
            os.pwrite(fd, self.chance.randbytes(min(length, 200)), 0)
            self.had(path, fd)

    def replace(self) -> None:
        path = self.something(folder=False)
        new = path + b".%d.new" % os.getpid()
        with self.alone(), self.opened(new, os.O_RDWR | os.O_CREAT | os.O_EXCL) as fd:
            self.had(new, fd)
            os.write(fd, self.fresh())
            self.had(new, fd)
            self.had(path, fd)
            os.rename(self.full(new), self.full(path))

    def sparse(self) -> None:
        path = self.something(folder=False)
        with self.alone(), self.opened(path) as fd:
            os.pwrite(fd, self.chance.randbytes(20), self.chance.choice([LONG, LONG + 4090, LONG // 2]))
            self.had(path, fd)

    def hold(self) -> None:
        """Keep a file open, and write to it later, whatever it is called by then."""
        if len(self.held) < 2:
            self.held.append(self.open(self.something(folder=False), os.O_RDWR))
            return
        fd = self.chance.choice(self.held)
        with self.alone():
            os.pwrite(fd, self.chance.randbytes(16), self.chance.randrange(20))
            self.tell("any", hashed(fd))
        if self.chance.random() < 0.3:
            self.held.remove(fd)
            os.close(fd)

    # other names

    def link_outside(self) -> None:
        path = self.something(folder=False)
        if not stat.S_ISREG(os.lstat(self.full(path)).st_mode):
            return
        self.number += 1
        os.link(self.full(path), self.outside + b"/%d.%d" % (os.getpid(), self.number), follow_symlinks=False)
        # Nobody is told of a name that is made elsewhere; but something else changes beside the file.
        os.utime(os.path.dirname(self.full(path)))

    def write_outside(self) -> None:
        names = os.listdir(self.outside)
        if not names:
            return
        with self.alone():
            fd = os.open(self.outside + b"/" + self.chance.choice(names), os.O_RDWR)
            try:
                os.pwrite(fd, self.chance.randbytes(8), 0)
                self.tell("any", hashed(fd))
            finally:
                os.close(fd)

    def symlink(self) -> None:
        path = self.somewhere() + self.chance.choice(FILES)
        leads = self.chance.choice([b"a", b"..", b"/nowhere", b"p/a", b"\xff\xfe", self.outside, self.top])
        new = self.full(path) + b".%d.new" % os.getpid()
        os.symlink(leads, new)
        self.tell("moved", path + b".%d.new" % os.getpid(), path)
        try:
            os.rename(new, self.full(path))
        except OSError:
            os.unlink(new)

    def fifo(self) -> None:
        os.mkfifo(self.full(self.somewhere() + self.chance.choice(FILES)), 0o600)

    def dress(self) -> None:
        path = self.something()
        status = os.lstat(self.full(path))
        if self.chance.random() < 0.5:
            os.utime(self.full(path), ns=(1, self.chance.randrange(2 << 60)), follow_symlinks=False)
        elif not stat.S_ISLNK(status.st_mode):
            is_folder = stat.S_ISDIR(status.st_mode)
            os.chmod(self.full(path), self.chance.choice([0o755, 0o711, 0o500] if is_folder else MODES))

    # places

    def mkdir(self) -> None:
        path = self.somewhere()
        if path.count(b"/") < 6:
            os.mkdir(self.full(path + self.chance.choice(FOLDERS)))

    def remove(self) -> None:
        path = self.full(self.something(folder=False))
        os.unlink(path)

    def rmdir(self) -> None:
        path = self.something(folder=True)
        if self.chance.random() < 0.3:
            remove_all(self.full(path))
        else:
            os.rmdir(self.full(path))

    def remake(self) -> None:
        """A folder goes, and another one of the same name comes, often with the same inode."""
        path = self.something(folder=True)
        remove_all(self.full(path))
        os.mkdir(self.full(path))
        name = path + b"/" + self.chance.choice(FILES)
        with self.alone(), self.opened(name, os.O_RDWR | os.O_CREAT) as fd:
            self.had(name, fd)
            os.write(fd, self.fresh())
            self.had(name, fd)

    def move(self) -> None:
        path = self.something()
        is_folder = os.path.isdir(self.full(path)) and not os.path.islink(self.full(path))
        to = self.somewhere() + self.chance.choice(FOLDERS if is_folder else FILES)
        if to.count(b"/") < 7:
            self.tell("moved", path, to)
            os.rename(self.full(path), self.full(to))

    def away(self) -> None:
        """Out of the folder and back, under the same name or another."""
        path = self.something()
        there = self.outside + b"-away.%d" % os.getpid()
        os.rename(self.full(path), there)
        to = self.chance.choice([path, self.somewhere() + self.chance.choice(FOLDERS)])
        self.tell("moved", path, to)
        try:
            os.rename(there, self.full(to))
        except OSError:
            remove_all(there)

    def ignore(self) -> None:
        path = self.somewhere() + self.chance.choice(IGNORES)
        lines = b"".join(line + b"\n" for line in self.chance.sample(RULES, self.chance.randrange(3)))
        with self.alone(), self.opened(path, os.O_RDWR | os.O_CREAT) as fd:
            self.had(path, fd)
            os.ftruncate(fd, 0)
            self.had(path, fd)
            os.write(fd, lines)
            self.had(path, fd)


CHANGES: list[Callable[[Changer], None]] = [
    *[Changer.create] * 6, *[Changer.append] * 3, *[Changer.overwrite] * 6, *[Changer.truncate] * 2,
    *[Changer.replace] * 3, Changer.sparse, *[Changer.hold] * 2, *[Changer.link_outside] * 2,
    *[Changer.write_outside] * 2, Changer.symlink, Changer.fifo, *[Changer.dress] * 2, *[Changer.mkdir] * 4,
    *[Changer.remove] * 2, Changer.rmdir, Changer.remake, *[Changer.move] * 3, Changer.away, Changer.ignore,
]  # fmt: skip


def remove_all(path: bytes) -> None:
    """Not by `shutil.rmtree`, which opens what it takes for a folder and waits for ever if that is a FIFO by now."""
    try:
        os.unlink(path)
    except (IsADirectoryError, PermissionError):
        with os.scandir(path) as entries:
            for each in entries:
                remove_all(os.path.join(path, each.name))
        os.rmdir(path)


def hashed(fd: int) -> bytes:
    found, at = sha256(), 0
    while data := os.pread(fd, 1 << 20, at):
        found.update(data)
        at += len(data)
    return found.digest()


def main() -> None:
    changer = Changer(*map(Path, sys.argv[1:5]))
    for line in sys.stdin:
        _, seed, count = line.split()
        changer.go(int(seed), int(count))
        sys.stdout.write("done\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
