"""Proof that a lease holder lives: an operating-system lock on a file of its own, beside the store.

The lock goes when its process goes, however it goes, so a free lock means that nobody will come back.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from hashlib import sha256
from pathlib import Path
from typing import Final

from killick.errors import StoreUnavailable
from killick.fork_safety import hears_of_forks
from killick.permissions import open_private

_NAPS_SECONDS: Final = (0.001,) * 100


class Holders:
    """The locks of holders that live in this process, and a look at those of others."""

    def __init__(self, store_path: Path) -> None:
        self._path = store_path
        self._held: dict[str, int] = {}
        self._mutex = threading.Lock()
        hears_of_forks(self)

    def before_fork(self) -> None:
        self._mutex.acquire()

    def after_fork_in_parent(self) -> None:
        self._mutex.release()

    def after_fork_in_child(self) -> None:
        """Let go of the parent's locks here. They stay locked there: a lock belongs to all copies of its descriptor,
        and goes with the last of them."""
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()
        self._mutex = threading.Lock()

    def hold(self, holder: str) -> None:
        """Prove from now on that this holder lives, until close or death."""
        with self._mutex:
            if holder in self._held:
                return
            for nap in _NAPS_SECONDS:
                descriptor = self._locked(holder, os.O_CREAT)
                if descriptor is not None:
                    self._held[holder] = descriptor
                    return
                # Perhaps somebody only looks whether this holder lives, which takes no time.
                time.sleep(nap)
        raise StoreUnavailable(str(self._path), f"another process is holder {holder!r}; give each its own name")

    def lives(self, holder: str) -> bool:
        """Whether some process holds this holder's lock. A dead one's file is cleared away."""
        with self._mutex:
            if holder in self._held:
                return True
            try:
                descriptor = self._locked(holder, 0)
            except FileNotFoundError:
                return False
            if descriptor is None:
                return True
            self._clear(holder)
            os.close(descriptor)
            return False

    def _locked(self, holder: str, flags: int) -> int | None:
        """The holder's file with its lock on it; None: somebody else has that.

        The file is cleared away only under its lock, so whoever got the lock of one that is not there any more, or
        is another by now, was too late and tries again.
        """
        while True:
            descriptor = open_private(self._file(holder), os.O_RDWR | flags)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(descriptor), os.stat(self._file(holder))):
                        return descriptor
            except BlockingIOError:
                os.close(descriptor)
                return None
            os.close(descriptor)

    def close(self) -> None:
        """Let every lock of this process go."""
        with self._mutex:
            for holder, descriptor in self._held.items():
                self._clear(holder)
                os.close(descriptor)
            self._held.clear()

    def _clear(self, holder: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._file(holder))

    def _file(self, holder: str) -> Path:
        name = sha256(holder.encode()).hexdigest()[:16]
        return self._path.with_name(f"{self._path.name}-holder-{name}")
