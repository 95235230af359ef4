"""A vault's packs: append-only files of concatenated objects.

Decides which pack is appended to, and by which writer: a lock on the file allows one at a time. Knows nothing of
snapshots.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from killick.permissions import open_private
from killick.workspace.file_reader import closing
from killick.workspace.vault.index import Index, ObjectRow
from killick.workspace.vault.locks import explained, is_same_file, try_lock, unlock

PACK_BYTES_MAX: Final = 256 << 20
"""A pack of this length is closed for appending."""

LOOSE_BYTES_MAX: Final = 32 << 20
"""The same for a loose pack: short, so that compressing it is quick."""

_CANDIDATES_MAX: Final = 1_000


class Pack:
    """A locked pack, for appending or deletion."""

    __slots__ = ("buffer", "descriptor", "end", "is_new", "is_used", "number", "published", "synced", "written")

    def __init__(self, number: int, descriptor: int, end: int, *, is_new: bool = False) -> None:
        self.number = number
        self.is_new = is_new
        self.descriptor = descriptor
        self.published = end
        self.synced = end
        self.written = end
        self.end = end
        self.is_used = False
        """Whether an unpublished object was appended; it may be empty."""
        self.buffer: list[bytes] = []


class Packs:
    """The folder of packs."""

    def __init__(self, folder: Path, place: str) -> None:
        self.folder = folder
        self.place = place
        self.pack_bytes_max = PACK_BYTES_MAX
        self.loose_bytes_max = LOOSE_BYTES_MAX
        self._above = os.fspath(folder)
        self._last: int | None = None

    def path(self, number: int) -> str:
        return f"{self._above}/{number:04}.pack"

    def numbers(self) -> list[int]:
        """Returns every pack that has a file."""
        with explained(self.place):
            try:
                names = os.listdir(self.folder)
            except FileNotFoundError:
                return []
        found = (name.removesuffix(".pack") for name in names if name.endswith(".pack"))
        return sorted(int(number) for number in found if number.isdecimal())

    def size_bytes(self, number: int) -> int:
        """Returns a pack file's length; 0 if absent."""
        with explained(self.place):
            try:
                return os.stat(self.path(number)).st_size
            except FileNotFoundError:
                return 0

    def read(self, place: ObjectRow) -> bytes | str:
        """Reads the bytes at a location, or raises the reason."""
        try:
            descriptor = os.open(self.path(place.pack), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return f"its pack {place.pack} is not there"
        except OSError as error:
            return f"its pack {place.pack} cannot be opened: {error.strerror}"
        try:
            found = os.pread(descriptor, place.stored, place.offset)
            while len(found) < place.stored:
                more = os.pread(descriptor, place.stored - len(found), place.offset + len(found))
                if not more:
                    return f"its pack {place.pack} is too short"
                found += more
        except (OSError, ValueError, OverflowError, MemoryError) as error:
            return f"its pack {place.pack} cannot be read: {getattr(error, 'strerror', None) or error}"
        finally:
            os.close(descriptor)
        return found

    # locking ----------------------------------------------------------------------------------

    def lock(self, number: int) -> int | None:
        """Locks a pack; None: another writer has it, or it is absent."""
        try:
            descriptor = open_private(self.path(number), os.O_RDWR)
        except FileNotFoundError:
            return None
        if try_lock(descriptor) and is_same_file(descriptor, self.path(number)):
            return descriptor
        unlock(descriptor)
        return None

    def take(self, index: Index) -> Pack:
        """Returns a pack for appending: a free one with room, else a new one."""
        with explained(self.place):
            for number in self._candidates(index):
                if (pack := self._taken(number, index)) is not None:
                    break
            else:
                pack = self._made(index)
            self._last = pack.number
            return pack

    def take_new(self, index: Index) -> Pack:
        """Returns a new pack."""
        with explained(self.place):
            return self._made(index)

    def _candidates(self, index: Index) -> Iterator[int]:
        if self._last is not None:
            yield self._last
        known = index.open_packs(below_bytes=self.pack_bytes_max, limit=_CANDIDATES_MAX)
        yield from known
        # Leftovers of processes that died before publishing.
        published, deleted = index.packs(), index.last_deleted_pack()
        yield from (number for number in self.numbers() if number not in published and number > deleted)

    def _taken(self, number: int, index: Index) -> Pack | None:
        descriptor = self.lock(number)
        if descriptor is None:
            return None
        try:
            # Read under the lock: the previous writer has published by now, or never will.
            end = index.pack_end(number)
            size = os.fstat(descriptor).st_size
            if end is None and number > index.last_deleted_pack():
                end = 0
            # A pack that is too short is damaged: leave it, so that no more is lost.
            if end is not None and end < self.pack_bytes_max and size >= end:
                if size > end:
                    index.supersede()
                    os.ftruncate(descriptor, end)
                return Pack(number, descriptor, end)
        except BaseException:
            unlock(descriptor)
            raise
        unlock(descriptor)
        return None

    def _made(self, index: Index) -> Pack:
        number = max([*self.numbers(), *index.packs(), index.last_deleted_pack()], default=0)
        while True:
            number += 1
            try:
                descriptor = open_private(self.path(number), os.O_RDWR | os.O_CREAT | os.O_EXCL)
            except FileExistsError:
                continue
            # Between the two, another process may have taken it for a leftover.
            if try_lock(descriptor) and is_same_file(descriptor, self.path(number)) and index.pack_end(number) is None:
                return Pack(number, descriptor, 0, is_new=True)
            unlock(descriptor)


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable."""
    with closing(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as descriptor:
        os.fsync(descriptor)
