"""Reports folders with changes, from Linux's inotify. Reads no file and never guesses.

The kernel queues a change before the changing call returns, so `changed` covers everything done before it was called.
An uncertain answer is `None`: the queue overflowed, or the workspace itself was moved or replaced. Then the caller must
scan and add everything again.

A caller that follows three rules misses no change, even if files are moved, replaced or recreated meanwhile:

1. Call `changed` first; then add each returned folder again, and only then list it. Changes before the adding are in
the listing, and changes after it in the next answer. 2. A folder in a listing that is new or was replaced is added
before it is listed, and so is everything below it. 3. `changed` reports a change once. A caller that could not process
it all scans everything the next time.

inotify does not see, so callers must check otherwise: writes through a shared mapping (a full scan sees the time that
the system sets); writes through a hard link in an unwatched folder, and the creation of that link; a file system that
is mounted later; changes below the file system, on another machine, in a lower overlay layer or on the disk itself.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
import sys
import termios
import threading
from functools import lru_cache
from typing import Any, Final

_MODIFY: Final = 0x2
_ATTRIB: Final = 0x4
_CLOSE_WRITE: Final = 0x8
_MOVED_FROM: Final = 0x40
_MOVED_TO: Final = 0x80
_CREATE: Final = 0x100
_DELETE: Final = 0x200
_DELETE_SELF: Final = 0x400
_MOVE_SELF: Final = 0x800
_UNMOUNT: Final = 0x2000
_OVERFLOW: Final = 0x4000
_IGNORED: Final = 0x8000
_ONLYDIR: Final = 0x1000000
_DONT_FOLLOW: Final = 0x2000000
_ISDIR: Final = 0x40000000

_PLACES: Final = _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE
_SELF: Final = _DELETE_SELF | _MOVE_SELF | _UNMOUNT | _IGNORED
# Not IN_EXCL_UNLINK: it also silences names that a stacked file system dropped from its cache and still has.
_MASK: Final = _MODIFY | _ATTRIB | _CLOSE_WRITE | _PLACES | _DELETE_SELF | _MOVE_SELF | _ONLYDIR | _DONT_FOLLOW

_VANISHED: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
_EVENT: Final = struct.Struct("iIII")
_READ_BYTES_MIN: Final = 4096
_LOCAL: Final = frozenset({
    0xEF53,      # ext2, ext3, ext4
    0x58465342,  # xfs
    0x9123683E,  # btrfs
    0x01021994,  # tmpfs
    0x858458F6,  # ramfs
    0xF2F52010,  # f2fs
    0x2FC12FC1,  # zfs
    0xCA451A4E,  # bcachefs
    0x794C7630,  # overlay
})  # fmt: skip
"""File systems, by statfs magic, that change only through this kernel."""

_Identity = tuple[int, int]


class Watch:
    """Watches folders individually, without recursion. Thread-safe; a forked child must not use it, and gets `None`."""

    @classmethod
    def begin(cls) -> Watch | None:
        """Returns an empty watch; None without inotify, or if its limits are exhausted."""
        libc = _libc()
        if libc is None:
            return None
        descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        return cls(libc, descriptor) if descriptor >= 0 else None

    def __init__(self, libc: Any, descriptor: int) -> None:
        self._libc = libc
        self._descriptor = descriptor
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._paths: dict[int, tuple[bytes, ...]] = {}
        self._watched: dict[bytes, int] = {}
        self._below: dict[bytes, set[bytes]] = {}
        self._tops: dict[bytes, _Identity] = {}
        self._unreported: set[bytes] = set()
        self._trusted: dict[int, bool] = {}

    def add(self, path: bytes) -> bool:
        """Watches a folder by its absolute path. A folder watched under two paths is reported under both. False: it
        cannot be watched (unreadable, not a local file system, too many watches); scan it every time. A folder that
        just vanished from a watched parent is True, and is reported the next time."""
        with self._lock:
            if not self._is_open():
                return False
            number, identity = self._begin(path)
            if self._watched.get(path, -1) == number >= 0:
                return True
            if path in self._watched or path in self._below:
                # It replaced another folder, whose subfolders are no longer watched; that is reported.
                self._unreported.update(self._drop(path))
                number, identity = self._begin(path)
            if number < 0:
                # It vanished, and the parent reports if it returns. The caller, who has just listed it, cannot know
                # about later changes, so it is reported the next time.
                is_reported = -number in _VANISHED and os.path.dirname(path) in self._watched
                if is_reported:
                    self._unreported.add(path)
                return is_reported
            self._place(path)
            self._paths[number] = (*self._paths.get(number, ()), path)
            self._watched[path] = number
            if os.path.dirname(path) not in self._watched:
                self._tops[path] = identity
                # No parent would report its replacement just now.
                if _identity(path) != identity:
                    self._drop(path)
                    return False
            return True

    def changed(self) -> set[bytes] | None:
        """Returns the folders in which, since the last call, an entry was created, removed, renamed, written, closed
        after writing, or changed in its attributes; also folders whose own attributes changed. A new, removed or
        replaced folder is returned with all watched ones below it, and is unwatched until it is added again. None:
        anything may have changed, and nothing is watched any more."""
        with self._lock:
            found, self._unreported = self._unreported, set()
            if not self._is_open() or not self._drain(found) or not self._is_intact():
                self._clear()
                return None
            return found

    def forget(self, path: bytes) -> None:
        """Unwatches a folder and everything below it."""
        with self._lock:
            if self._is_open():
                self._drop(path)
                self._unreported -= {each for each in self._unreported if each == path or each.startswith(path + b"/")}

    def close(self) -> None:
        with self._lock:
            self._clear()
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1

    # events ---------------------------------------------------------------------------------------

    def _drain(self, found: set[bytes]) -> bool:
        """Reads the events queued so far, and no more: a constant writer must not block us here."""
        try:
            waiting = _waiting_bytes(self._descriptor)
            while waiting > 0:
                data = os.read(self._descriptor, max(waiting, _READ_BYTES_MIN))
                waiting -= len(data)
                if not self._take(data, found):
                    return False
        except OSError:
            return False
        return True

    def _take(self, data: bytes, found: set[bytes]) -> bool:
        touched: set[int] = set()
        at, end, unpack = 0, len(data), _EVENT.unpack_from
        while at < end:
            number, mask, _, length = unpack(data, at)
            if mask & _SELF or (mask & _ISDIR and mask & (_PLACES | _ATTRIB)):
                if not self._take_folder(number, mask, data[at + 16 : at + 16 + length].rstrip(b"\0"), found):
                    return False
            elif mask & _OVERFLOW:
                return False
            else:
                touched.add(number)
            at += 16 + length
        for number in touched:
            paths = self._paths.get(number)
            if paths is not None:
                found.update(paths)
            else:
                # It was moved away before its destination was reported.
                self._libc.inotify_rm_watch(self._descriptor, number)
        return True

    def _take_folder(self, number: int, mask: int, name: bytes, found: set[bytes]) -> bool:
        """A folder was created, removed or moved: everything known below it is invalid. Or its attributes changed, and
        it may be readable only now."""
        for path in self._paths.get(number, ()):
            if mask & _SELF:
                is_top = path in self._tops
                found.update(self._drop(path))
                if is_top:
                    return False
            else:
                place = path + b"/" + name if name else path
                found.update((path, place), self._drop(place) if mask & _PLACES else ())
        return True

    def _is_intact(self) -> bool:
        """Returns whether the topmost folders are still the added ones."""
        return all(_identity(path) == identity for path, identity in self._tops.items())

    # watched folders ------------------------------------------------------------------------------

    def _is_open(self) -> bool:
        return self._descriptor >= 0 and os.getpid() == self._pid

    def _begin(self, path: bytes) -> tuple[int, _Identity]:
        """Returns a watch descriptor for a folder, and the folder's identity; a negative descriptor is an error."""
        try:
            found = os.lstat(path)
        except OSError as error:
            return -(error.errno or errno.EIO), (0, 0)
        if found.st_dev not in self._trusted:
            self._trusted[found.st_dev] = is_trusted(path)
        if not self._trusted[found.st_dev]:
            return -errno.EXDEV, (0, 0)
        number = int(self._libc.inotify_add_watch(self._descriptor, path, _MASK))
        return number if number >= 0 else -ctypes.get_errno(), (found.st_dev, found.st_ino)

    def _place(self, path: bytes) -> None:
        while True:
            above = os.path.dirname(path)
            siblings = self._below.setdefault(above, set())
            if path in siblings or above == path:
                return
            siblings.add(path)
            path = above

    def _drop(self, path: bytes) -> list[bytes]:
        dropped: list[bytes] = []
        waiting = [path]
        self._below.get(os.path.dirname(path), set()).discard(path)
        while waiting:
            current = waiting.pop()
            waiting += self._below.pop(current, ())
            self._tops.pop(current, None)
            number = self._watched.pop(current, None)
            if number is not None:
                dropped.append(current)
                others = tuple(path for path in self._paths.pop(number) if path != current)
                if others:
                    self._paths[number] = others
                else:
                    # The kernel refuses a watch that it dropped itself, which is harmless.
                    self._libc.inotify_rm_watch(self._descriptor, number)
        return dropped

    def _clear(self) -> None:
        self._unreported.clear()
        # Later events of these have no path, and are dropped.
        for known in (self._paths, self._watched, self._below, self._tops, self._trusted):
            known.clear()


def is_trusted(path: bytes) -> bool:
    """Returns whether a folder is on a local file system, all of whose changes this kernel sees."""
    libc = _libc()
    if libc is None:
        return False
    buffer = ctypes.create_string_buffer(256)
    if libc.statfs(path, buffer) != 0:
        return False
    return (ctypes.c_ulong.from_buffer(buffer).value & 0xFFFFFFFF) in _LOCAL


def _identity(path: bytes) -> _Identity | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _waiting_bytes(descriptor: int) -> int:
    (waiting,) = struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, b"\0\0\0\0"))
    return int(waiting)


# A binding would replace only these lines: the rules above are the bulk, and statfs is needed from libc anyway.
@lru_cache(maxsize=1)
def _libc() -> Any | None:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        libc.inotify_init1.argtypes = (ctypes.c_int,)
        libc.inotify_add_watch.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_uint32)
        libc.inotify_rm_watch.argtypes = (ctypes.c_int, ctypes.c_int)
        libc.statfs.argtypes = (ctypes.c_char_p, ctypes.c_char_p)
    except AttributeError:
        return None
    return libc
