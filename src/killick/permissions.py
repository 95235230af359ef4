"""Creates files and folders that only their owner may read, and opens none that another user planted.

A file has its mode from its first byte on, under every umask. An existing file keeps its mode.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterable
from io import BufferedReader
from pathlib import Path
from typing import IO, Final, Protocol
from weakref import WeakSet

from killick.errors import KeyRefused, StoreUnavailable

FILE_MODE: Final = 0o600
FOLDER_MODE: Final = 0o700
_ROOM_BYTES: Final = 128 * 1024
INPUT_BYTES_MAX: Final = 64 << 20
OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
"""The permission bits of group and others."""


def open_private(path: str | Path, flags: int) -> int:
    """Opens a regular file under a guessable name, and creates it with mode 0600 if `flags` say so.

    A symbolic link, a pipe or a device under that name raises StoreUnavailable: another process planted it.
    """
    try:
        # Without O_NONBLOCK a planted pipe would block the caller until another process opens it.
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, FILE_MODE)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENXIO):
            raise _planted(path) from None
        raise
    try:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        raise _planted(path)
    except BaseException:
        os.close(descriptor)
        raise


def _planted(path: str | Path) -> StoreUnavailable:
    return StoreUnavailable(str(path), "is a link, a pipe or a device where a file belongs; remove it")


def create_private(path: str | Path) -> IO[bytes]:
    """Creates a file for writing; FileExistsError if the name exists, also as a symbolic link."""
    return os.fdopen(open_private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb")


def open_output(path: str | Path) -> IO[bytes]:
    """Opens a user's output file: created with 0600, or truncated with its mode kept. Follows symbolic links."""
    refuse_database(path)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE), "wb")


def disk_is_full(path: Path) -> bool:
    """Whether a file's disk has no room for SQLite to open it: a new index of the write-ahead log, and some pages."""
    with contextlib.suppress(OSError):
        return shutil.disk_usage(path.absolute().parent).free < _ROOM_BYTES
    return False


def reserve(path: str | Path) -> None:
    """Creates an empty 0600 file for SQLite, which would use the umask; an existing one stays unchanged."""
    with contextlib.suppress(OSError):  # SQLite reports a bad path
        try:
            # Opens nothing: another thread may have the file open by SQLite the moment it exists.
            os.mknod(path, stat.S_IFREG | FILE_MODE)
        except PermissionError:  # a system on which only root makes nodes
            os.close(open_private(path, os.O_RDWR | os.O_CREAT | os.O_EXCL))


# databases ----------------------------------------------------------------------------------------

Inode = tuple[int, int]
"""A device, and a file on it."""


class OpenDatabase(Protocol):
    """The files of a database that SQLite has open in this process."""

    def inodes(self) -> Iterable[Inode]: ...


_databases: Final[WeakSet[OpenDatabase]] = WeakSet()


def inode_of(found: os.stat_result) -> Inode:
    """Returns what identifies a file under every name."""
    return found.st_dev, found.st_ino


def register_database(database: OpenDatabase) -> None:
    """Registers a database, weakly referenced, for as long as it is open."""
    _databases.add(database)


def open_databases() -> set[Inode]:
    """Returns the files that only SQLite may open: closing another descriptor of one cancels SQLite's locks on it."""
    return {inode for database in list(_databases) for inode in database.inodes()}


def refuse_database(path: str | os.PathLike[str]) -> None:
    """Raises StoreUnavailable for a file of a database that this process has open."""
    with contextlib.suppress(OSError):
        if inode_of(os.stat(path)) in open_databases():
            raise StoreUnavailable(os.fspath(path), "is a file of an open store; name another file")


def open_input(path: str | os.PathLike[str]) -> BufferedReader:
    """Opens a user's input file."""
    refuse_database(path)
    return open(path, "rb")


def read_input(path: str | os.PathLike[str]) -> bytes:
    """Reads a user's input file whole. A longer one than any that Killick writes is refused before it is read."""
    with open_input(path) as file:
        if os.fstat(file.fileno()).st_size > INPUT_BYTES_MAX:
            raise OSError(errno.EFBIG, f"it has more than {INPUT_BYTES_MAX:,} bytes")
        return file.read()


def state_folder() -> Path:
    """Returns the folder for what Killick keeps for this user on this machine, outside any store."""
    return Path(os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state"), "killick")


def make_folder(path: str | Path) -> None:
    """Creates a folder and its missing parents with 0700. Existing folders stay unchanged."""
    missing = [Path(path)]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    for each in reversed(missing):
        each.mkdir(FOLDER_MODE, exist_ok=True)


def is_own_folder(path: str | Path) -> bool:
    """Returns whether a path is this user's folder, no symbolic link, and not writable by others."""
    with contextlib.suppress(OSError):
        found = os.lstat(path)
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
    return False


def keep(path: Path, text: str) -> str:
    """Returns the text of a small 0600 file, created with `text` if absent. The first of several writers wins.

    Raises StoreUnavailable if others could have read or replaced it.
    """
    making = path.with_name(f"{path.name}.{os.getpid()}.making")
    if not os.path.lexists(path):
        making.unlink(missing_ok=True)
        with create_private(making) as file:
            file.write(text.encode())
        try:
            with contextlib.suppress(FileExistsError):
                os.link(making, path)
        finally:
            making.unlink()
    with os.fdopen(open_private(path, os.O_RDONLY), "rb") as file:
        if exposure(os.fstat(file.fileno())):
            raise StoreUnavailable(str(path), "others may read this key; remove the file, and a new one is made")
        return file.read().decode()


def exposure(found: os.stat_result) -> str | None:
    """Returns how others may reach a file or folder of secrets; None: it is this user's or root's, and theirs alone."""
    if found.st_uid not in (os.geteuid(), 0):
        return "it is another user's; make it yours with chown"
    if not (mode := stat.S_IMODE(found.st_mode)) & OTHERS:
        return None
    private = FOLDER_MODE if stat.S_ISDIR(found.st_mode) else FILE_MODE
    return f"others may read or change it (mode {mode:04o}); run chmod {private:o}"


LINK_SECRET: Final = "KILLICK_LINK_SECRET"
"""The environment variable with the secret that signs answer links."""

SECRET_FILE: Final = "file:"
"""Begins a setting that names the file of a secret, in place of the secret."""


def read_secret(path: str | Path) -> bytes:
    """Reads a file with a key or a secret, also through a link. Raises KeyRefused if others may reach it."""
    refuse_database(path)
    with open(path, "rb") as file:
        if reason := exposure(os.fstat(file.fileno())):
            raise KeyRefused(str(path), f"{reason}, and replace the secret if another user may have read it")
        return file.read()


def exposed(paths: Iterable[Path]) -> list[Path]:
    """Returns those files and folders that the group or others may read, write or enter."""
    found: list[Path] = []
    for path in paths:
        with contextlib.suppress(OSError):
            if path.lstat().st_mode & OTHERS:
                found.append(path)
    return found
