"""Appends to packs: bytes are synced before the index refers to them, and truncated if it never does."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeAlias

from killick.errors import StoreError
from killick.workspace.vault.index import Index
from killick.workspace.vault.locks import explained, unlock
from killick.workspace.vault.packs import Pack, Packs, sync_folder

_BUFFER_BYTES: Final = 2 << 20
_PENDING_MAX: Final = 4
"""The maximum number of pending writes, because they are in memory."""

_SHORT_PACKS_MAX: Final = 64
"""Each pack is an open file until published; beyond this number, packs are longer."""

_CHUNKS_MAX: Final = 1_000
_fdatasync: Final = getattr(os, "fdatasync", os.fsync)

_Write: TypeAlias = tuple[Pack, int, int, list[bytes]]
"""A pack, an offset, a total length, and the data."""


class PackWriter:
    """Appends objects to as many packs as needed, or to loose ones. Thread-safe. Readers find nothing before the index
    has it."""

    def __init__(self, packs: Packs, index: Index, *, loose: bool = False) -> None:
        self._packs = packs
        self._index = index
        self._is_loose = loose
        self._bytes_max = packs.loose_bytes_max if loose else packs.pack_bytes_max
        self._mutex = threading.Lock()
        self._open_packs: list[Pack] = []
        self._is_uncertain = False
        self._executor: ThreadPoolExecutor | None = None
        self._pending: deque[Future[None]] = deque()

    def append(self, stored: bytes) -> tuple[int, int]:
        """Appends, and returns the pack and the offset."""
        with self._mutex:
            pack = self._open_packs[-1] if self._open_packs else self._next()
            writes = list[_Write]()
            if pack.end >= self._bytes_max:
                writes.append(_emptied(pack))
                pack = self._next()
            offset = pack.end
            pack.end = end = offset + len(stored)
            pack.buffer.append(stored)
            pack.is_used = True
            if end - pack.written >= _BUFFER_BYTES:
                writes.append(_emptied(pack))
            oldest = self._submit(writes) if writes and self._is_loose else None
        if oldest is not None:
            oldest.result()
        elif not self._is_loose:
            # Several threads may be here at once: each writes to its own range.
            for write in writes:
                self._write(*write)
        return pack.number, offset

    def sync(self) -> dict[int, int]:
        """Syncs everything appended; returns the packs' lengths."""
        with self._mutex:
            while self._pending:
                self._pending.popleft().result()
            for pack in self._open_packs:
                self._write(*_emptied(pack))
                if pack.synced != pack.end:
                    self._sync(pack)
            if any(pack.is_new for pack in self._open_packs):
                with explained(self._packs.place):
                    sync_folder(self._packs.folder)
                for pack in self._open_packs:
                    pack.is_new = False
            return {pack.number: pack.end for pack in self._open_packs if pack.is_used}

    @contextlib.contextmanager
    def publishing(self) -> Generator[dict[int, int], None, None]:
        """Syncs, and publishes in the index. If that fails, the outcome is unknown."""
        ends = self.sync()
        self._is_uncertain = True
        yield ends
        for pack in self._open_packs:
            pack.published, pack.is_used = pack.end, False
        self._is_uncertain = False

    def close(self) -> None:
        """Returns the packs, without unpublished bytes."""
        with self._mutex:
            if self._executor is not None:
                self._executor.shutdown(cancel_futures=True)
            for pack in self._open_packs:
                # If truncation fails now, the pack's next writer does it.
                with contextlib.suppress(OSError, StoreError):
                    self._truncate(pack)
                unlock(pack.descriptor)
            self._open_packs.clear()

    def _submit(self, writes: list[_Write]) -> Future[None] | None:
        """Hands ordered writes to another thread; returns a future to wait for if much is pending."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "killick-appending")
        for write in writes:
            self._pending.append(self._executor.submit(self._write, *write))
            if write[0] is not self._open_packs[-1]:
                # It is full: the final sync has less to wait for.
                self._pending.append(self._executor.submit(self._sync, write[0]))
        return self._pending.popleft() if len(self._pending) > _PENDING_MAX else None

    def _sync(self, pack: Pack) -> None:
        with explained(self._packs.place):
            _fdatasync(pack.descriptor)
        pack.synced = pack.end

    def _next(self) -> Pack:
        if len(self._open_packs) == _SHORT_PACKS_MAX:
            self._bytes_max = self._packs.pack_bytes_max
        pack = self._packs.take_new(self._index) if self._is_loose else self._packs.take(self._index)
        self._open_packs.append(pack)
        return pack

    def _truncate(self, pack: Pack) -> None:
        if pack.end == pack.published:
            return
        if self._is_uncertain:
            self._index.supersede()
        end = self._index.pack_end(pack.number)
        if end is None:
            os.unlink(self._packs.path(pack.number))
        elif end != pack.end:
            os.ftruncate(pack.descriptor, end)

    def _write(self, pack: Pack, start: int, size: int, chunks: list[bytes]) -> None:
        with explained(self._packs.place):
            done = os.pwritev(pack.descriptor, chunks, start) if 0 < len(chunks) <= _CHUNKS_MAX else 0
            if done < size:
                # Too many buffers for one call, or a partial write.
                rest = memoryview(b"".join(chunks))
                while done < size:
                    done += os.pwrite(pack.descriptor, rest[done:], start + done)


def _emptied(pack: Pack) -> _Write:
    chunks, start = pack.buffer, pack.written
    pack.buffer, pack.written = [], pack.end
    return pack, start, pack.end - start, chunks
