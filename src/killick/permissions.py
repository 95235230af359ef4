"""Makes files and folders that only their owner may read, and opens none that another user planted.

A file has its mode from its first byte on, under every umask. A file that exists keeps its mode.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Final

from killick.errors import StoreUnavailable

FILE_MODE: Final = 0o600
FOLDER_MODE: Final = 0o700
OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
"""What nobody but the owner may do: every right of the group and of everybody."""


def open_private(path: str | Path, flags: int) -> int:
    """Open a regular file under a name that others may know, and make it 0600 where `flags` say to make it.

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
    """A new file to write; FileExistsError where the name is taken, by a symbolic link too."""
    return os.fdopen(open_private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb")


def open_output(path: str | Path) -> IO[bytes]:
    """The file that a user named for output: made 0600, or emptied with its mode kept. Follows symbolic links."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE), "wb")


def reserve(path: str | Path) -> None:
    """Make an empty 0600 file for a library that would make it by the umask; one that exists stays as it is."""
    with contextlib.suppress(OSError):  # the library reports what is wrong with the path
        os.close(open_private(os.path.realpath(path), os.O_RDWR | os.O_CREAT | os.O_EXCL))


def make_folder(path: str | Path) -> None:
    """Make a folder and its missing parents, each 0700. Folders that exist stay as they are."""
    missing = [Path(path)]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    for each in reversed(missing):
        each.mkdir(FOLDER_MODE, exist_ok=True)


def is_own_folder(path: str | Path) -> bool:
    """Whether a path is a folder of this user, no symbolic link, which nobody else may write to."""
    with contextlib.suppress(OSError):
        found = os.lstat(path)
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
    return False


def keep(path: Path, text: str) -> str:
    """The text of a small 0600 file, written with `text` where there is none. The first of several writers wins.

    StoreUnavailable where others could have read or replaced it.
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
        found = os.fstat(file.fileno())
        if found.st_mode & OTHERS or found.st_uid != os.geteuid():
            raise StoreUnavailable(str(path), "others may read this key; remove the file, and a new one is made")
        return file.read().decode()


def exposed(paths: Iterable[Path]) -> list[Path]:
    """Those of some files and folders that the group or everybody may read, write or enter."""
    found: list[Path] = []
    for path in paths:
        with contextlib.suppress(OSError):
            if path.lstat().st_mode & OTHERS:
                found.append(path)
    return found
