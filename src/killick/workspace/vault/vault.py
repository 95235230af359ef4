"""The vault: where the content of snapshots is kept, once each, found by its hash.

A folder with an index (SQLite) and packs (files that only grow). A snapshot is published in this order: its objects are
appended to a pack, the pack is synced, and one transaction of the index then tells where they are and who wants them.
So a snapshot is there whole or not at all, and what a death leaves behind in a pack is in nobody's way. Several
processes and threads may use one vault. What a snapshot is made of matters only where it is swept and verified.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import AbstractContextManager
from hashlib import sha256
from pathlib import Path
from typing import Final

from killick.clock import Clock, SystemClock
from killick.errors import SnapshotBroken, StoreBroken, StoreBusy, StoreClosed
from killick.permissions import make_folder
from killick.workspace.tree import Id
from killick.workspace.vault import recompress
from killick.workspace.vault import sweep as sweeping
from killick.workspace.vault import verify as verifying
from killick.workspace.vault.compression import decompressed
from killick.workspace.vault.index import Index, ObjectLocation, Reference, Restoring
from killick.workspace.vault.locks import locked, locked_alone
from killick.workspace.vault.os_errors import explained
from killick.workspace.vault.packs import Packs, sync_folder
from killick.workspace.vault.snapshot_writer import Writing
from killick.workspace.vault.sweep import Swept
from killick.workspace.vault.verify import Progress

__all__ = ["Reference", "Restoring", "Swept", "Vault", "Writing"]

_INDEX: Final = "index.db"
_WRITING_BUSY_SECONDS: Final = 600.0
"""Who writes waits that long for who sweeps, which takes its time in a large vault."""

_CACHED_BYTES_MAX: Final = 16 << 20
_CACHED_OBJECT_BYTES_MAX: Final = 32 << 10
"""What lists a folder is hardly ever longer, and is read again and again."""


class Vault:
    """A store of snapshots. Nothing is touched before it is needed, and nothing made before something is written."""

    def __init__(self, path: str | os.PathLike[str], *, clock: Clock | None = None, busy_seconds: float = 60.0) -> None:
        self.path: Final = Path(os.path.abspath(path))
        self._place = str(self.path)
        self._clock = clock or SystemClock()
        self._busy_seconds = busy_seconds
        self._packs = Packs(self.path / "packs", self._place)
        self._cache = _Cache()
        self._mutex = threading.Lock()
        self._index: Index | None = None
        self._abandoned: Index | None = None
        self._process = os.getpid()
        self._closed = False

    # reading ----------------------------------------------------------------------------------

    def load(self, ref: Id) -> bytes:
        """An object by its id, proved by its hash; `SnapshotBroken` where it is missing or damaged."""
        return self._cache.get(ref) or self._cache.put(ref, self._load(ref))

    def has(self, refs: Collection[Id]) -> set[Id]:
        """Which of these objects are there."""
        index = self._opened()
        return set() if index is None else index.has(refs)

    def references(self, owner: str | None = None) -> list[Reference]:
        """Every snapshot that somebody wants, or that this owner wants, oldest first."""
        index = self._opened()
        return [] if index is None else index.references(owner)

    def size_bytes(self) -> int:
        """How much room the vault takes."""
        total = 0
        for folder, _, names in os.walk(self.path):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    total += os.lstat(os.path.join(folder, name)).st_size
        return total

    @property
    def generation(self) -> int:
        """A number that moves whenever a sweep has deleted anything. While a writing is open, it stays."""
        index = self._opened()
        return 0 if index is None else index.sweeps()

    # writing ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def writing(self) -> Generator[Writing, None, None]:
        """A snapshot that is being made. Nothing is swept meanwhile; what is not published by then was never there."""
        index = self._made()
        with self._writers(shared=True):
            writing = Writing(index, self._packs, self._place)
            try:
                yield writing
            finally:
                writing.close()

    def forget(self, owner: str) -> int:
        """Drop what an owner wants; how many snapshots that was. Their content goes with the next sweep."""
        index = self._opened()
        return 0 if index is None else index.forget(owner)

    def forget_owners(self, prefix: str, keep: Callable[[str], bool]) -> int:
        """Drop what owners want whose names begin so, except those that are to be kept; how many snapshots that was."""
        index = self._opened()
        return 0 if index is None else index.forget_owners(prefix, keep)

    # restoring --------------------------------------------------------------------------------

    def restoring(self, workspace: str) -> Restoring | None:
        """The restore of a folder that has begun and not ended."""
        index = self._opened()
        return None if index is None else index.restoring(workspace)

    def unfinished(self) -> list[Restoring]:
        """Every restore that has begun and not ended."""
        index = self._opened()
        return [] if index is None else index.unfinished()

    def begin_restoring(self, workspace: str, target: Id, before: Id | None, paths: Sequence[bytes] | None) -> None:
        """Note, for good, that a folder is being restored; what is noted of it takes the place of what was."""
        named = None if paths is None else tuple(paths)
        self._made().begin_restoring(Restoring(workspace, target, before, named, self._clock.now_us()))

    def end_restoring(self, workspace: str) -> None:
        """Note that it is done."""
        index = self._opened()
        if index is not None:
            index.end_restoring(workspace)

    @contextlib.contextmanager
    def lock(self, workspace: str) -> Generator[None, None, None]:
        """Have a folder for oneself, among all processes and threads; waits as long as it takes."""
        self._made()
        name = sha256(workspace.encode(errors="surrogateescape")).hexdigest()[:24]
        with locked_alone(self.path / f"workspace-{name}.lock", self._place):
            yield

    # keeping ----------------------------------------------------------------------------------

    def sweep(self, *, dry_run: bool = False, without: Callable[[str], bool] | None = None) -> Swept:
        """Delete what no reference reaches, and give the room back; or only tell what that would come to, as if some
        owners (those for which `without` is true) had been forgotten."""
        if without is not None and not dry_run:
            raise ValueError("`without` is for a dry run; forget the owners, then sweep")
        index = self._opened()
        if index is None:
            return Swept(0, 0, 0)
        with self._one_sweeper(busy_seconds=self._busy_seconds):
            if dry_run:
                roots = index.wanted(without or (lambda owner: False))
                return sweeping.foretold(self._packs, sweeping.mark(index, roots, self._load, self._place))
            try:
                return sweeping.sweep(
                    index, self._packs, self._load, place=self._place, alone=lambda: self._writers(shared=False)
                )
            finally:
                self._cache.clear()

    def compress(self, *, seconds: float | None = None) -> int:
        """Compress what was stored in a hurry, for about so long; how many bytes that gained. Another who is at it, or
        who sweeps, is left to it."""
        index = self._opened()
        if index is None or not index.loose_packs():
            return 0
        clock = self._clock
        until = math.inf if seconds is None else clock.monotonic() + seconds
        try:
            with self._one_sweeper(busy_seconds=0.0), explained(self._place):
                return recompress.settle(index, self._packs, lambda: clock.monotonic() >= until)
        except StoreBusy:
            return 0

    def verify(self, roots: Collection[Id] | None = None, progress: Progress | None = None) -> list[str]:
        """Read everything that snapshots stand on (all of them, or these); what does not hold, in words."""
        index = self._opened()
        if index is None:
            return [f"snapshot {root.hex()[:12]}: there is no vault at {self._place}" for root in roots or ()]
        return verifying.verify(index, self._packs, self._load, roots, progress, self._place)

    def close(self) -> None:
        """Close the index. What is being written comes to nothing."""
        with self._mutex:
            self._closed = True
            if self._index is not None and self._process == os.getpid():
                self._index.close()
            self._index = None

    # inside -----------------------------------------------------------------------------------

    def _load(self, ref: Id) -> bytes:
        """Read an object from its pack. It may have moved since the index was asked: then the index is asked again."""
        index = self._opened()
        if index is None:
            raise SnapshotBroken(ref.hex(), f"is missing, for there is no vault at {self._place}")
        place, before = index.locate(ref), None
        reason = ""
        while place is not None and place != before:
            found = self._unpacked(ref, place)
            if isinstance(found, bytes):
                return found
            reason = found
            place, before = index.locate(ref), place
        if place is None:
            raise SnapshotBroken(ref.hex(), f"is missing from the vault {self._place}")
        raise SnapshotBroken(ref.hex(), f"is damaged in the vault {self._place}: {reason}")

    def _unpacked(self, ref: Id, place: ObjectLocation) -> bytes | str:
        stored = self._packs.read(place)
        if isinstance(stored, str):
            return stored
        data = stored if place.stored == place.size else decompressed(stored, place.size)
        if data is None:
            return f"what pack {place.pack} has at byte {place.offset} cannot be unpacked"
        if sha256(data).digest() != ref:
            return f"what pack {place.pack} has at byte {place.offset} is something else"
        return data

    def _opened(self, *, make: bool = False) -> Index | None:
        """The index; None where there is no vault."""
        index = self._index
        if index is not None and self._process == os.getpid():
            return index
        with self._mutex:
            if self._closed:
                raise StoreClosed(self._place)
            if self._process != os.getpid():
                # A forked process must not use what its parent has open, nor close it.
                self._abandoned, self._index, self._process = self._index, None, os.getpid()
            if self._index is None:
                with explained(self._place):
                    if not self._is_there():
                        if not make:
                            return None
                        self._make()
                    self._index = Index(self.path / _INDEX, busy_seconds=self._busy_seconds)
            return self._index

    def _made(self) -> Index:
        index = self._opened(make=True)
        assert index is not None
        return index

    def _is_there(self) -> bool:
        path = self.path / _INDEX
        if path.exists() and path.stat().st_size:
            return True
        # A vault has its index before it has a pack. An empty one would let everything in them be overwritten.
        if any(map(self._packs.size_bytes, self._packs.numbers())) and not (path.exists() and path.stat().st_size):
            raise StoreBroken(self._place, f"the packs of this vault are there, and its {_INDEX} is not")
        return False

    def _make(self) -> None:
        make_folder(self._packs.folder)
        sync_folder(self.path)
        sync_folder(self.path.parent)

    def _writers(self, *, shared: bool) -> AbstractContextManager[None]:
        seconds = _WRITING_BUSY_SECONDS if shared else self._busy_seconds
        return locked(self.path / "writing.lock", self._place, busy_seconds=seconds, shared=shared)

    def _one_sweeper(self, *, busy_seconds: float) -> AbstractContextManager[None]:
        return locked(self.path / "sweeping.lock", self._place, busy_seconds=busy_seconds)


class _Cache:
    """Objects that were read of late, as many as fit."""

    def __init__(self) -> None:
        self._objects: OrderedDict[Id, bytes] = OrderedDict()
        self._bytes = 0
        self._mutex = threading.Lock()

    def get(self, ref: Id) -> bytes | None:
        with self._mutex:
            found = self._objects.get(ref)
            if found is not None:
                self._objects.move_to_end(ref)
            return found

    def put(self, ref: Id, data: bytes) -> bytes:
        if len(data) <= _CACHED_OBJECT_BYTES_MAX:
            with self._mutex:
                if ref not in self._objects:
                    self._objects[ref] = data
                    self._bytes += len(data)
                while self._bytes > _CACHED_BYTES_MAX:
                    self._bytes -= len(self._objects.popitem(last=False)[1])
        return data

    def clear(self) -> None:
        with self._mutex:
            self._objects.clear()
            self._bytes = 0
