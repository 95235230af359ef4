"""Reads the new and changed files of a scan: short ones in this thread, long ones in a second thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, NamedTuple

from killick.clock import Clock
from killick.workspace.file_reader import CapturedFile, UnstableFile, closing, read_file
from killick.workspace.scan_cache import Folder
from killick.workspace.vault.snapshot_writer import SnapshotWriter

_LONG_BYTES: Final = 128 << 10
_ALONE_BYTES: Final = 4 << 20
"""Up to this size, this thread reads alone."""

Found = Mapping[str, CapturedFile | UnstableFile | None]
"""Files of a folder by name, as read; None for a vanished one."""


class FileRequest(NamedTuple):
    """Files of a folder to read, whether each is a regular file, and a callback for a changed one."""

    path: str
    folder: Folder
    names: dict[str, bool]
    changed: set[str]


class BatchReader:
    """Files to be read. Short files gain nothing from more threads; long ones need one extra thread."""

    def __init__(self, opened: Callable[[str], int], clock: Clock) -> None:
        self._opened, self._clock = opened, clock
        self._short: list[FileRequest] = []
        self._long: list[FileRequest] = []
        self._bytes = 0
        self._reading: list[tuple[FileRequest, Future[Found]]] = []
        self._pool: ThreadPoolExecutor | None = None

    def add(self, request: FileRequest, sizes: Mapping[str, int], writing: SnapshotWriter) -> None:
        """Queues files of a folder. If long files add up, starts reading those at once."""
        long = {name: each for name, each in request.names.items() if sizes[name] > _LONG_BYTES}
        short = {name: each for name, each in request.names.items() if name not in long} if long else request.names
        if short:
            self._short.append(request._replace(names=short))
        if not long:
            return
        self._long.append(request._replace(names=long))
        self._bytes += sum(sizes[name] for name in long)
        if self._bytes <= _ALONE_BYTES:
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="killick-read")
        for each in self._long:
            self._reading.append((each, self._pool.submit(self._read, each, writing)))
        self._long.clear()

    def read_all(self, writing: SnapshotWriter) -> Iterator[tuple[FileRequest, Found]]:
        """Returns all queued files, as read."""
        try:
            for each in (*self._short, *self._long):
                yield each, self._read(each, writing)
            for each, future in self._reading:
                yield each, future.result()
        finally:
            self.clear()

    def clear(self) -> None:
        """Drops the queue."""
        self._short, self._long, self._bytes, self._reading = [], [], 0, []
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def _read(self, request: FileRequest, writing: SnapshotWriter) -> Found:
        """Reads the files of one folder by name; None for an unreadable or vanished one."""
        try:
            fd = self._opened(request.path)
        except OSError:
            return dict.fromkeys(request.names)
        with closing(fd):
            clock, add = self._clock, writing.add
            at_ns = clock.now_us() * 1_000
            return {
                name: read_file(fd, name, add, clock, at_ns, regular=is_regular)
                for name, is_regular in request.names.items()
            }
