"""Proof that a lease holder lives: an operating-system lock on a file of its own, beside the store.

The lock goes when its process goes, however it goes, so a free lock means that nobody will come back.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from hashlib import sha256
from pathlib import Path

from kedge.errors import StoreUnavailable


class Holders:
    """The locks of holders that live in this process, and a look at those of others."""

    def __init__(self, store_path: Path) -> None:
        self._path = store_path
        self._held: dict[str, int] = {}
        self._mutex = threading.Lock()

    def hold(self, holder: str) -> None:
        """Prove from now on that this holder lives, until close or death."""
        with self._mutex:
            if holder in self._held:
                return
            descriptor = os.open(self._file(holder), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(descriptor)
                raise StoreUnavailable(
                    str(self._path), f"another process is holder {holder!r}; give each its own name"
                ) from error
            self._held[holder] = descriptor

    def lives(self, holder: str) -> bool:
        """Whether some process holds this holder's lock. A dead one's file is cleared away."""
        with self._mutex:
            if holder in self._held:
                return True
            try:
                descriptor = os.open(self._file(holder), os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                return False
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return True
            else:
                self._clear(holder)
                return False
            finally:
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
