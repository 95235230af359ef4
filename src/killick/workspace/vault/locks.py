"""Locks between processes and threads, on empty files; the operating system frees them when a process ends. Also
translates the operating system's errors into store errors.

Lock order, against deadlocks: workspace lock, sweep lock, shared writer lock, pack lock, the index's write transaction.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Final

from killick.errors import StoreBusy, StoreFull, StoreReadOnly, StoreUnavailable
from killick.permissions import open_private

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_READ_ONLY: Final = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


@contextlib.contextmanager
def explained(place: str) -> Generator[None, None, None]:
    """Translates operating-system errors raised in the block."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StoreFull(place) from error
        if error.errno in _READ_ONLY:
            raise StoreReadOnly(place) from error
        reason = f"the system says: {error.strerror or error}"
        if isinstance(error, FileNotFoundError):
            reason = "part of this vault is missing; check its folder, or restore it from a backup"
        elif isinstance(error, NotADirectoryError | FileExistsError):
            reason = "is not a folder, so it cannot be a vault; choose another name"
        raise StoreUnavailable(place, reason) from error


_FIRST_NAP_SECONDS: Final = 0.0005
_LONGEST_NAP_SECONDS: Final = 0.02


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Tries to lock an open file without waiting."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(descriptor: int) -> None:
    """Unlocks a file and closes it. Closing alone is not enough if a process was forked meanwhile: it has a copy."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def is_same_file(descriptor: int, path: str | Path) -> bool:
    """Returns whether an open file is the one at a path."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def locked(path: Path, place: str, *, busy_seconds: float, shared: bool = False) -> Generator[None, None, None]:
    """Holds a lock on a permanent file, with a timeout."""
    descriptor = _opened(path, place)
    try:
        waited, nap = 0.0, _FIRST_NAP_SECONDS
        while True:
            with explained(place):
                if try_lock(descriptor, shared=shared):
                    break
            if waited >= busy_seconds:
                raise StoreBusy(place, busy_seconds)
            time.sleep(nap)
            waited += nap
            nap = min(nap * 2, _LONGEST_NAP_SECONDS)
        yield
    finally:
        unlock(descriptor)


@contextlib.contextmanager
def locked_alone(path: Path, place: str) -> Generator[None, None, None]:
    """Holds a lock on a temporary file, without a timeout.

    The file is removed under its lock, so a caller that locks a removed file starts again.
    """
    while True:
        descriptor = _opened(path, place)
        try:
            with explained(place):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if is_same_file(descriptor, path):
                break
        except BaseException:
            unlock(descriptor)
            raise
        unlock(descriptor)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
        unlock(descriptor)


def _opened(path: Path, place: str) -> int:
    with explained(place):
        return open_private(path, os.O_RDWR | os.O_CREAT)
