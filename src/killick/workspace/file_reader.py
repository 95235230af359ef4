"""Reads one file of a folder: its stat data and content, consistently. Never follows a link."""

from __future__ import annotations

import errno
import os
import stat
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

import msgspec

from killick.clock import Clock
from killick.workspace import tree
from killick.workspace.tree import BLOCK_BYTES, Add, Block, Entry

FINE_NS: Final = 50_000_000
"""The minimum age of a timestamp at reading, for a later change to differ."""
COARSE_NS: Final = 2_100_000_000
"""The same, for file systems with timestamps of one or two seconds."""
_SECOND_NS: Final = 1_000_000_000

_AGAIN_MAX: Final = 5
_ENCODING: Final = sys.getfilesystemencoding()
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

Key = tuple[int, int, int, int, int]
"""A file's identity: mtime, ctime, size, inode, mode."""


class CapturedFile(msgspec.Struct, array_like=True, gc=False):
    """A file as read. `racy`: a later change may have left the same stat data."""

    key: Key
    entry: Entry
    racy: bool = False


class UnstableFile(msgspec.Struct, frozen=True):
    """A file that kept changing while it was read, or that is unreadable."""

    reason: str
    last: CapturedFile | None = None


def key_of(status: os.stat_result) -> Key:
    """Returns a file's identity."""
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino, status.st_mode


@contextmanager
def closing(descriptor: int) -> Generator[int]:
    """Closes a descriptor at the end of the block."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def opened(name: str, above: int) -> int:
    """Opens a folder in another one, and nothing else of that name."""
    return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)


def is_racy(key: Key, at_ns: int) -> bool:
    """Returns whether a change after a moment may leave the same stat data."""
    latest = max(key[0], key[1])
    is_coarse = key[0] % _SECOND_NS == 0 and key[1] % _SECOND_NS == 0
    return latest > at_ns - (COARSE_NS if is_coarse else FINE_NS)


def read_file(
    above: int, name: str, add: Add, clock: Clock, at_ns: int, *, regular: bool
) -> CapturedFile | UnstableFile | None:
    """Reads and stores a non-folder entry; None if it vanished. Opens only `regular` files: opening a pipe or a device
    has side effects. `at_ns` is an earlier moment."""
    last: CapturedFile | None = None
    for again in range(_AGAIN_MAX):
        if again:
            time.sleep(0.002 * (again - 1))
            at_ns = clock.now_us() * 1_000
        try:
            content = _regular(above, name, add) if regular else None
            regular = content is not None
            before, ref, after = content or _other(above, name)
        except FileNotFoundError:
            regular = True
            continue  # replaced just now, or gone
        except PermissionError:
            return UnstableFile("cannot be read")
        except OSError as error:
            return UnstableFile(f"cannot be read: {error.strerror}")
        if ref is None:
            continue
        if stat.S_ISDIR(before.st_mode):
            return None
        key = key_of(before)
        kind = tree.FILE if regular else tree.kind_of(before.st_mode)
        size = key[2] if kind == tree.FILE else 0
        entry = Entry(encoded(name), kind, key[4] & 0o7777, key[0], size, ref)
        if key == key_of(after):
            return CapturedFile(key, entry, is_racy(key, at_ns))
        last = CapturedFile(key, entry, racy=True)
    return UnstableFile("changed while it was read", last) if last is not None else None


def encoded(name: str) -> bytes:
    """Returns a name as the file system has it."""
    return name.encode(_ENCODING, "surrogateescape")


def decoded(name: bytes) -> str:
    """Returns a name as this process has it."""
    return name.decode(_ENCODING, "surrogateescape")


_Read = tuple[os.stat_result, bytes | None, os.stat_result]
"""A file's stat data before reading, its content, and its stat data after; None: its size changed."""


class _Own(threading.local):
    """A read buffer for each thread: allocating one costs more than reading."""

    def __init__(self) -> None:
        self.buffer = memoryview(bytearray(BLOCK_BYTES + 1))


_own: Final = _Own()


def _regular(above: int, name: str, add: Add) -> _Read | None:
    """Reads a regular file; None for another kind."""
    try:
        file = os.open(name, _READ, dir_fd=above)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            return None  # a link, or a socket
        raise
    try:
        before = os.fstat(file)
        if not stat.S_ISREG(before.st_mode):
            return None
        size = before.st_size
        ref: bytes | None
        if size > BLOCK_BYTES:
            ref = _blocks(file, size, add)
        else:
            have = os.readv(file, [_own.buffer])
            while 0 < have < size and (more := os.readv(file, [_own.buffer[have:]])):
                have += more
            ref = add(_own.buffer[:size]) if have == size else None
        return before, ref, os.fstat(file)
    finally:
        os.close(file)


def _other(above: int, name: str) -> _Read:
    before = os.stat(name, dir_fd=above, follow_symlinks=False)
    ref = os.readlink(os.fsencode(name), dir_fd=above) if stat.S_ISLNK(before.st_mode) else b""
    if stat.S_ISREG(before.st_mode):
        raise FileNotFoundError(name)  # it was something else just now
    return before, ref, os.stat(name, dir_fd=above, follow_symlinks=False)


def _blocks(file: int, size: int, add: Add) -> bytes | None:
    """Yields a long file in blocks, and skips its holes."""
    found: list[Block] = []
    offset = 0
    while offset < size:
        try:
            offset = os.lseek(file, offset, os.SEEK_DATA) // BLOCK_BYTES * BLOCK_BYTES
        except OSError as error:
            if error.errno == errno.ENXIO:
                break  # nothing but a hole up to its end
            # The file system does not report holes: all of it is data.
        length = min(BLOCK_BYTES, size - offset)
        data = os.pread(file, length, offset)
        if len(data) != length:
            return None
        found.append(Block(offset, length, add(data)))
        offset += length
    return tree.store_blocks(found, add)
