"""Locks between processes and threads, on files that hold nothing. They go when their process goes, however it goes.

Whoever needs several takes them in this order, and so nobody waits for ever: the lock of a workspace, the lock of the
one who sweeps, the lock that writers share, the lock on a pack, the index's write transaction.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Final

from killick.errors import StoreBusy
from killick.permissions import open_private
from killick.workspace.vault.os_errors import explained

_FIRST_NAP_SECONDS: Final = 0.0005
_LONGEST_NAP_SECONDS: Final = 0.02


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock an open file, if that can be had at once."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def let_go(descriptor: int) -> None:
    """Unlock a file and close it. Closing alone is not enough where a process was forked meanwhile: it has a copy."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def is_still(descriptor: int, path: str | Path) -> bool:
    """Whether an open file is what stands at a path."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def locked(path: Path, place: str, *, busy_seconds: float, shared: bool = False) -> Generator[None, None, None]:
    """Hold a lock whose file stays, waiting at most so long for it."""
    descriptor = _opened(path, place)
    try:
        waited, nap = 0.0, _FIRST_NAP_SECONDS
        while not _had(descriptor, place, shared=shared):
            if waited >= busy_seconds:
                raise StoreBusy(place, busy_seconds)
            time.sleep(nap)
            waited += nap
            nap = min(nap * 2, _LONGEST_NAP_SECONDS)
        yield
    finally:
        let_go(descriptor)


@contextlib.contextmanager
def locked_alone(path: Path, place: str) -> Generator[None, None, None]:
    """Hold a lock whose file is cleared away afterwards, however long others have it.

    It is cleared away under its lock, so whoever then gets the lock of a file that is gone begins again.
    """
    while True:
        descriptor = _opened(path, place)
        try:
            with explained(place):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if is_still(descriptor, path):
                break
        except BaseException:
            let_go(descriptor)
            raise
        let_go(descriptor)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
        let_go(descriptor)


def _opened(path: Path, place: str) -> int:
    with explained(place):
        return open_private(path, os.O_RDWR | os.O_CREAT)


def _had(descriptor: int, place: str, *, shared: bool) -> bool:
    with explained(place):
        return try_lock(descriptor, shared=shared)
