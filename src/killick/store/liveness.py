"""Proves that a lease holder is alive: each holds an operating-system lock on its own file next to the store.

The operating system frees the lock when the process ends, in any way. So a free lock proves that the holder is dead.
The files are named after the store's real path, which is the same for every process that has the store open.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import threading
import time
from collections.abc import Callable, Collection
from hashlib import sha256
from pathlib import Path
from typing import Final

from killick.errors import StoreError, StoreUnavailable
from killick.fork_safety import ForkedMutex, register_for_forks
from killick.permissions import open_private

_NAPS_SECONDS: Final = (0.001,) * 100


class Holders(ForkedMutex):
    """Holds this process's liveness locks and tests those of others.

    A holder's file is created before its first lease, and removed when no lease on record names the holder. So a lock
    proves life, a free lock proves death, and a missing file proves neither.
    """

    def __init__(self, store_path: Path, *, named: Callable[[], Collection[str]]) -> None:
        """`named` returns the holders that leases on record name."""
        self._path = store_path
        self._named = named
        self._held: dict[str, int] = {}
        self._mutex = threading.Lock()
        register_for_forks(self)

    def after_fork_in_child(self) -> None:
        """Closes the parent's lock files in the child. The parent stays locked until its own descriptors close."""
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()

    def lock(self, holder: str) -> None:
        """Locks this holder's file until close or process death. A file that was deleted meanwhile is created again."""
        with self._mutex:
            path, before = self._file(holder), self._held.get(holder)
            if before is not None and _is_at(before, path):
                return
            for nap in _NAPS_SECONDS:
                descriptor = self._locked(path, os.O_RDWR | os.O_CREAT)
                if descriptor is not None:
                    if not self._held:
                        self._sweep()
                    self._held[holder] = descriptor
                    if before is not None:
                        os.close(before)
                    return
                # Another process may be testing the lock for a moment.
                time.sleep(nap)
        raise StoreUnavailable(str(self._path), f"another process is holder {holder!r}; give each its own name")

    def lives(self, holder: str) -> bool | None:
        """Returns whether a process holds this holder's lock; None if there is no lock to test."""
        with self._mutex:
            if holder in self._held:
                return True
            try:
                descriptor = self._locked(self._file(holder), os.O_RDONLY)
            except (FileNotFoundError, PermissionError):
                return None
            if descriptor is None:
                return True
            os.close(descriptor)
            return False

    def _sweep(self) -> None:
        """Removes the files of dead holders that no lease names."""
        free = dict[Path, int]()
        try:
            for path in self._path.parent.glob(f"{glob.escape(self._path.name)}-holder-*"):
                with contextlib.suppress(OSError, StoreUnavailable):
                    if (descriptor := self._locked(path, os.O_RDWR)) is not None:
                        free[path] = descriptor
            # Read under their locks: none of these holders takes a lease any more.
            self._remove(free)
        finally:
            for descriptor in free.values():
                os.close(descriptor)

    def _remove(self, paths: Collection[Path]) -> None:
        """Removes files, but those that prove the death of a holder that a lease names."""
        if paths:
            with contextlib.suppress(StoreError):
                needed = set(map(self._file, self._named()))
                for path in set(paths) - needed:
                    with contextlib.suppress(FileNotFoundError, PermissionError):
                        path.unlink()

    def _locked(self, path: Path, flags: int) -> int | None:
        """Opens and locks a holder's file; None if another process has the lock.

        Files are removed only under their lock. If the locked file is gone or was replaced, the caller was too late and
        retries.
        """
        while True:
            descriptor = open_private(path, flags)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(descriptor, path):
                    return descriptor
            except BlockingIOError:
                os.close(descriptor)
                return None
            os.close(descriptor)

    def close(self) -> None:
        """Releases every lock of this process."""
        with self._mutex:
            if self._held:
                self._remove([self._file(holder) for holder in self._held])
                for descriptor in self._held.values():
                    os.close(descriptor)
                self._held.clear()
                self._sweep()

    def _file(self, holder: str) -> Path:
        name = sha256(holder.encode()).hexdigest()[:16]
        return self._path.with_name(f"{self._path.name}-holder-{name}")


def _is_at(descriptor: int, path: Path) -> bool:
    """Returns whether a path still names an open file."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    return False
