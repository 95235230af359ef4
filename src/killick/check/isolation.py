"""Runs the rest of a command in a child that the system keeps from the world: no network, every file system read-only.

Linux namespaces of the user, as `unshare` makes them. The child gives up its privileges in them, so that its code
cannot undo them. What was opened before, and sockets and pipes that are files, stay reachable.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from pathlib import Path
from typing import Final

_NEW: Final = 0x10000000 | 0x00020000 | 0x40000000 | 0x08000000 | 0x20000000
"""CLONE_NEWUSER, NEWNS, NEWNET, NEWIPC and NEWPID."""
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
_MOUNT_SETATTR: Final = 442
"""The number of the system call, the same on every architecture."""
_AT_FDCWD, _AT_RECURSIVE, _RDONLY = -100, 0x8000, 1
_CAPSET: Final = {"x86_64": 126, "aarch64": 91}
_CAPABILITY_VERSION: Final = 0x20080522
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _SIGKILL = 1, 38, 9
_COVERED: Final = ("/run", "/dev/shm")
"""Folders that are replaced by empty ones: sockets of services, and shared memory."""


def isolated() -> int | None:
    """Forks. Returns None in the isolated child, and in the parent the exit code of the child. Raises OSError where the
    system does not allow it; then no child continues."""
    if sys.platform != "linux" or os.uname().machine not in _CAPSET:
        raise OSError("it needs Linux on x86-64 or ARM64")
    folder = tempfile.mkdtemp(prefix="killick-check-")
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.close(reading)
        _enter(folder, writing)
        return None
    os.close(writing)
    try:
        with open(reading, encoding="utf-8") as said:
            reason = said.read()
        _, status = os.waitpid(child, 0)
    finally:
        os.rmdir(folder)
    if reason:
        raise OSError(reason)
    return os.waitstatus_to_exitcode(status)


def _enter(folder: str, writing: int) -> None:
    """Isolates this process. In its new process namespace it forks once more: the child is the first process there."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        user, group = os.geteuid(), os.getegid()
        _tried("unshare", libc.unshare(_NEW))
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            Path("/proc/self", name).write_text(text, encoding="ascii")
        _tried("mount", libc.mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None))
        read_only = (ctypes.c_uint64 * 4)(_RDONLY, 0, 0, 0)
        size = ctypes.sizeof(read_only)
        _tried(
            "mount_setattr",
            libc.syscall(
                _MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, ctypes.byref(read_only), ctypes.c_size_t(size)
            ),
        )
        for place in (*filter(os.path.isdir, _COVERED), folder):
            _tried(f"mount of {place}", libc.mount(b"tmpfs", place.encode(), b"tmpfs", ctypes.c_ulong(0), None))
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        if child := os.fork():
            os.close(writing)
            _, status = os.waitpid(child, 0)
            os._exit(abs(os.waitstatus_to_exitcode(status)))
        libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
        _tried("prctl", libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        header, none = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
        _tried("capset", libc.syscall(_CAPSET[os.uname().machine], ctypes.byref(header), ctypes.byref(none)))
        os.close(writing)
    except OSError as error:
        os.write(writing, str(error).encode())
        os._exit(1)


def _tried(what: str, result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
