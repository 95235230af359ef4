"""The machine under the figures: what it is, how fast its disk is, and how often that disk is flushed."""

from __future__ import annotations

import os
import platform
import sqlite3
from pathlib import Path
from statistics import median
from typing import Final

from bench.measure import seconds

SYNCS: Final = 100
FLUSH_FIELD: Final = 15
"""Where the kernel's `stat` of a block device counts flush requests."""

sync: Final = getattr(os, "fdatasync", os.fsync)


def description(folder: Path) -> str:
    """One line on the machine, the interpreter and the file system."""
    parts = (
        platform.machine(),
        f"{os.cpu_count()} cores",
        f"{platform.system()} {platform.release()}",
        f"Python {platform.python_version()}",
        f"SQLite {sqlite3.sqlite_version}",
        file_system(folder),
    )
    return ", ".join(parts)


def file_system(folder: Path) -> str:
    """The type of the file system that a folder is on."""
    try:
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return "file system not known"
    within = [mount for mount in mounts if folder.resolve().is_relative_to(mount[1])]
    kind = max(within, key=lambda mount: len(mount[1]))[2]
    return f"{kind}: not a disk, so no claim about durable commits holds" if kind == "tmpfs" else kind


def sync_us(folder: Path) -> float:
    """Microseconds of one append of 4 KiB and its fdatasync: what no durable commit can beat."""
    page = os.urandom(4096)
    with (folder / "sync").open("wb", buffering=0) as file:

        def append() -> None:
            file.write(page)
            sync(file.fileno())

        return median(seconds(append) for _ in range(SYNCS)) * 1e6


class Flushes:
    """The kernel's count of flush requests to the disk under a folder, whoever makes them."""

    def __init__(self, folder: Path) -> None:
        device = folder.stat().st_dev
        block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
        # Flushes are counted for whole disks alone.
        self._stat = (block.parent if (block / "partition").exists() else block) / "stat"
        before = self.count()
        sync_us(folder)
        self.counted = self.count() - before >= SYNCS

    def count(self) -> int:
        """How many there were since the machine started; 0 where nobody counts."""
        try:
            fields = self._stat.read_text().split()
        except OSError:
            return 0
        return int(fields[FLUSH_FIELD]) if len(fields) > FLUSH_FIELD else 0
