"""Proves that a lease holder is alive: each holds an operating-system lock on its own file next to the store.

The operating system frees the lock when the process ends, in any way. So a free lock proves that the holder is dead.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import threading
import time
from hashlib import sha256
from pathlib import Path
from typing import Final

from killick.errors import StoreUnavailable
from killick.fork_safety import ForkedMutex, register_for_forks
from killick.permissions import open_private

_NAPS_SECONDS: Final = (0.001,) * 100


class Holders(ForkedMutex):
    """Holds this process's liveness locks and tests those of others."""

    def __init__(self, store_path: Path) -> None:
        self._path = store_path
        self._held: dict[str, int] = {}
        self._mutex = threading.Lock()
        register_for_forks(self)

    def after_fork_in_child(self) -> None:
        """Closes the parent's lock files in the child. The parent stays locked until its own descriptors close."""
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()

    def lock(self, holder: str) -> None:
        """Locks this holder's file until close or process death."""
        with self._mutex:
            if holder in self._held:
                return
            for nap in _NAPS_SECONDS:
                descriptor = self._locked(self._file(holder), os.O_CREAT)
                if descriptor is not None:
                    if not self._held:
                        self._sweep()
                    self._held[holder] = descriptor
                    return
                # Another process may be testing the lock for a moment.
                time.sleep(nap)
        raise StoreUnavailable(str(self._path), f"another process is holder {holder!r}; give each its own name")

    def lives(self, holder: str) -> bool:
        """Returns whether a process holds this holder's lock. Removes a dead holder's file."""
        with self._mutex:
            if holder in self._held:
                return True
            try:
                descriptor = self._locked(self._file(holder), 0)
            except OSError as error:
                # A process that holds a lock here has created its file here.
                if error.errno in (errno.ENOENT, errno.EROFS):
                    return False
                raise
            if descriptor is None:
                return True
            _clear(self._file(holder))
            os.close(descriptor)
            return False

    def _sweep(self) -> None:
        """Removes the files of holders that died without a run, which no other process asks about."""
        for path in self._path.parent.glob(f"{glob.escape(self._path.name)}-holder-*"):
            with contextlib.suppress(OSError, StoreUnavailable):
                if (descriptor := self._locked(path, 0)) is not None:
                    _clear(path)
                    os.close(descriptor)

    def _locked(self, path: Path, flags: int) -> int | None:
        """Opens and locks a holder's file; None if another process has the lock.

        Files are removed only under their lock. If the locked file is gone or was replaced, the caller was too late and
        retries.
        """
        while True:
            descriptor = open_private(path, os.O_RDWR | flags)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                        return descriptor
            except BlockingIOError:
                os.close(descriptor)
                return None
            os.close(descriptor)

    def close(self) -> None:
        """Releases every lock of this process."""
        with self._mutex:
            for holder, descriptor in self._held.items():
                _clear(self._file(holder))
                os.close(descriptor)
            self._held.clear()

    def _file(self, holder: str) -> Path:
        name = sha256(holder.encode()).hexdigest()[:16]
        return self._path.with_name(f"{self._path.name}-holder-{name}")


def _clear(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError, PermissionError):
        path.unlink()
