"""Which files a store is: a database and its write-ahead log, as they were when this process opened them.

Only reads file metadata: closing a descriptor of a database cancels the locks that SQLite has on it in this process.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from killick.clock import SystemClock
from killick.errors import StoreError, StoreGone, StoreUnavailable
from killick.fork_safety import keep_forever
from killick.logger import get_logger
from killick.permissions import Inode, inode_of, register_database

logger: Final = get_logger("killick")

MOUNTS: Final = Path("/proc/self/mountinfo")

_BESIDE: Final = ("-wal", "-shm", "-journal")

LOOK_SECONDS: Final = 0.05
"""How long a check serves the reads after it, and the beginning of a transaction. Each commit has its own."""


class FileIdentity:
    """The database and the write-ahead log that this process has open. Refuses to continue once a path names another.

    A hard link would have a write-ahead log of its own, as would a mount of the single file: both are refused.
    """

    def __init__(self, path: Path, *, has_wal: bool) -> None:
        self.is_gone = False
        self.connection: object = None
        """Open while any other one is."""
        self._paths = (str(path), f"{path}-wal", f"{path}-shm")
        self._place, self._wal, _ = self._paths
        self._has_wal = has_wal
        self._file: Inode | None = None
        self._log: Inode | None = None
        self._checked = 0.0
        self._has_warned = False

    def pin(self) -> None:
        """Takes the database for the one to keep to, before its first connection."""
        base = next((self._place.removesuffix(end) for end in _BESIDE if self._place.endswith(end)), self._place)
        if base != self._place and os.path.exists(base):
            raise StoreUnavailable(self._place, f"is a file of the store {base}; name that")
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):  # SQLite reports a bad path
            found = os.stat(self._place)
            if not stat.S_ISREG(found.st_mode):
                return  # SQLite refuses it
            if self._has_wal and found.st_nlink > 1:
                reason = f"has {found.st_nlink} hard links, each with a write-ahead log of its own"
                raise StoreUnavailable(self._place, f"{reason}; delete the other names, or open a copy of it")
            if self._has_wal and any(point == Path(self._place) for point, _ in mounts()):
                reason = "is a mount of a single file, and its write-ahead log would be outside of it"
                raise StoreUnavailable(self._place, f"{reason}; mount its folder")
            self._file = inode_of(found)
            register_database(self)

    def pin_log(self) -> None:
        """Takes the write-ahead log for the one to keep to. SQLite keeps it until its last connection closes."""
        if self._has_wal:
            with contextlib.suppress(FileNotFoundError):
                self._log = inode_of(os.stat(self._wal))

    def unpin_log(self) -> None:
        """Every connection of this process is closed: another process may close the last one."""
        self._log = self.connection = None

    def inodes(self) -> Iterator[Inode]:
        """Yields the files that SQLite has open, or may have."""
        for path in self._paths if self.connection is not None else ():
            with contextlib.suppress(OSError):
                yield inode_of(os.stat(path))

    def look(self) -> None:
        """As `check`, unless that was a moment ago."""
        if self.is_gone or SystemClock.monotonic() - self._checked > LOOK_SECONDS:
            self.check()

    def check(self) -> None:
        """Raises StoreGone if the database or its log was deleted or replaced, and from then on always."""
        self.check_file()
        if self._log is not None and self._has_other(self._wal, self._log):
            self._refuse()
        self._checked = SystemClock.monotonic()

    def check_file(self) -> None:
        """As `check`, for the database alone."""
        if self.is_gone or (self._file is not None and self._has_other(self._place, self._file)):
            self._refuse()

    def leave(self) -> None:
        """Called at the end of a process that did not close the file. If that is gone, a connection stays open: the
        last close would copy a deleted log into the database, over the commits of others."""
        with contextlib.suppress(StoreError):
            self.check()
        if self.is_gone:
            keep_forever(self.connection)

    def _has_other(self, path: str, known: Inode) -> bool:
        try:
            found = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError as error:
            raise StoreUnavailable(path, f"cannot be found ({error.strerror}); check its folder") from error
        if found.st_nlink > 1 and self._has_wal and not self._has_warned:
            self._has_warned = True
            logger.warning("%s: has a second hard link now; delete that name, and open a copy instead", path)
        return inode_of(found) != known

    def _refuse(self) -> None:
        self.is_gone = True
        raise StoreGone(self._place)


def mounts(table: Path | None = None) -> Iterator[tuple[Path, str]]:
    """Yields each mount point, and the type of its file system as Linux names it; elsewhere none."""
    try:
        lines = (table or MOUNTS).read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        fields, dash, source = line.partition(" - ")
        words = fields.split(" ")
        if dash and len(words) >= 5:
            yield Path(_unescaped(words[4])), source.split(" ")[0]


def _unescaped(text: str) -> str:
    """Decodes the octal escapes in the mount table."""
    first, *rest = text.split("\\")
    return first + "".join(chr(int(part[:3], 8)) + part[3:] for part in rest)
