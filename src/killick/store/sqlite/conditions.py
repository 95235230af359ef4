"""Checks the preconditions of a SQLite store's guarantees: settings, file system, file and free space.

Changes nothing, and reports "unknown" where a system gives no answer.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shlex
import shutil
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from killick.errors import StoreError
from killick.permissions import exposed
from killick.store.records import STORE_FORMAT, Condition
from killick.store.sqlite.file import SqliteFile
from killick.store.sqlite.identity import mounts
from killick.text import size_text

WAL_BYTES_MAX: Final = 64_000_000
FREE_BYTES_MIN: Final = 200_000_000
CHECKED_BYTES_MAX: Final = 200_000_000
"""A file up to this size is checked for damage; a larger one would take too long."""

_REMOTE: Final = frozenset({
    "9p", "afp", "afs", "beegfs", "ceph", "cifs", "coda", "drvfs", "fhgfs", "gfs2", "gpfs", "lustre", "ncpfs",
    "nfs", "nfs4", "ocfs2", "pvfs2", "smb", "smb2", "smb3", "smbfs", "vboxsf", "vmhgfs", "webdav",
    "fuse.ceph-fuse", "fuse.davfs", "fuse.davfs2", "fuse.gcsfuse", "fuse.glusterfs", "fuse.goofys", "fuse.grpcfuse",
    "fuse.gvfsd-fuse", "fuse.juicefs", "fuse.osxfs", "fuse.rclone", "fuse.s3fs", "fuse.smbnetfs", "fuse.sshfs",
    "fuse.vmhgfs-fuse",
})  # fmt: skip
"""File systems on which SQLite's locks and shared memory fail, or fail across machines."""

_SYNCHRONOUS: Final = {0: "OFF", 1: "NORMAL", 2: "FULL", 3: "EXTRA"}


def conditions(file: SqliteFile) -> list[Condition]:
    """Returns all conditions of the file and of this process's connection to it."""
    return [*_settings(file), *_file(file), *_room(file.path)]


def _settings(file: SqliteFile) -> Iterator[Condition]:
    yield Condition("engine", f"SQLite {sqlite3.sqlite_version}")
    yield Condition("format", str(STORE_FORMAT))
    mode = file.journal_mode()
    is_safe = mode in ("WAL", "unknown")
    wrong = None if is_safe else "commits are not safe; close every process that has it open, and check again"
    yield Condition("journal", mode, wrong)
    try:
        with file.writing() as db:
            synchronous = int(db.execute("PRAGMA synchronous").fetchone()[0])
    except StoreError as error:
        yield Condition("durability", "unknown", f"it cannot be written: {error}")
        return
    survives = "power loss" if synchronous >= 2 else "a killed process, but no power loss"
    wrong = "a commit may be lost; something else than Killick set this" if synchronous == 0 else None
    yield Condition("durability", f"a commit survives {survives} (synchronous {_SYNCHRONOUS[synchronous]})", wrong)


def _file(file: SqliteFile) -> Iterator[Condition]:
    path = file.path
    kind = kind_of_file_system(path)
    remote = kind in _REMOTE
    wrong = "its locks do not hold there, and runs may be lost; move the file to a local disk" if remote else None
    value = f"{kind}, in memory: gone when the machine restarts" if kind in ("tmpfs", "ramfs") else kind or "unknown"
    yield Condition("file system", value, wrong)
    yield _permissions(path)
    size = path.stat().st_size
    if size > CHECKED_BYTES_MAX:
        yield Condition("file", f"not checked, because it is large ({size_text(size)}); killick store verify proves it")
        return
    with file.reading() as db:
        [line] = db.execute("PRAGMA quick_check(1)").fetchone()
    wrong = None if line == "ok" else "it is damaged; copy it away, run killick store verify, and restore a backup"
    yield Condition("file", "whole, by a quick check" if line == "ok" else str(line), wrong)


def _permissions(path: Path) -> Condition:
    mode = path.stat().st_mode
    wrong = None
    if not os.access(path, os.R_OK | os.W_OK) or not os.access(path.parent, os.W_OK | os.X_OK):
        wrong = f"this process may not write it and its folder; let it, with chmod or chown, on {path.parent}"
    elif seen := exposed([path, *sorted(path.parent.glob(f"{glob.escape(path.name)}-*")), path.with_suffix(".files")]):
        wrong = f"other users may read or change it; chmod go= {shlex.join(map(str, seen))}"
    return Condition("permissions", stat.filemode(mode), wrong)


def _room(path: Path) -> Iterator[Condition]:
    wal = path.with_name(f"{path.name}-wal")
    wal_bytes = 0
    with contextlib.suppress(FileNotFoundError):
        wal_bytes = wal.stat().st_size
    wrong = None
    if wal_bytes > WAL_BYTES_MAX:
        wrong = "something reads the store without end and keeps it from shrinking; find that process and end it"
    yield Condition(
        "size", f"{size_text(path.stat().st_size)}, and {size_text(wal_bytes)} in the write-ahead log", wrong
    )
    free = shutil.disk_usage(path.absolute().parent).free
    wrong = "the next runs may find no room; make some, killick store prune archives old runs"
    yield Condition("free", f"{size_text(free)} on its device", wrong if free < FREE_BYTES_MIN else None)


def kind_of_file_system(path: Path, table: Path | None = None) -> str | None:
    """Returns the file system type of a file, as Linux names it; None if unknown."""
    real, best, kind = Path(os.path.realpath(path)), -1, None
    for point, each in mounts(table):
        # Of two mounts on one path, the later one hides the other.
        if (real == point or point in real.parents) and len(point.parts) >= best:
            best, kind = len(point.parts), each
    return kind
