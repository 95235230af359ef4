"""The vault: a content-addressed, deduplicating store for snapshots.

A folder with an index (SQLite) and packs (append-only files). Publishing a snapshot appends its objects to packs, syncs
them, and then commits locations and owner to the index in one transaction. So a snapshot exists completely or not at
all, and a crash leaves only unused bytes. Processes and threads may share a vault. Only sweeps and verification look
inside snapshots.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import AbstractContextManager
from hashlib import sha256
from pathlib import Path
from typing import Final

from killick.clock import Clock, SystemClock
from killick.errors import SnapshotBroken, StoreBroken, StoreBusy, StoreClosed
from killick.lru import Lru
from killick.model.cipher import OBJECT, Cipher
from killick.permissions import make_folder
from killick.workspace.tree import Id, id_of
from killick.workspace.vault import sweep as sweeping
from killick.workspace.vault import verify as verifying
from killick.workspace.vault.compression import decompressed
from killick.workspace.vault.index import Index, ObjectRow, Reference, RestoreRecord
from killick.workspace.vault.locks import explained, locked, locked_alone
from killick.workspace.vault.packs import Packs, sync_folder
from killick.workspace.vault.snapshot_writer import SnapshotWriter
from killick.workspace.vault.sweep import Swept
from killick.workspace.vault.verify import Progress

__all__ = ["Reference", "RestoreRecord", "SnapshotWriter", "Swept", "Vault"]

_INDEX: Final = "index.db"
_WRITING_BUSY_SECONDS: Final = 600.0
"""How long a writer waits for a sweep, which is slow in a large vault."""

_CACHED_BYTES_MAX: Final = 16 << 20
_CACHED_OBJECT_BYTES_MAX: Final = 32 << 10
"""Folder listings are rarely longer, and are read repeatedly."""


class Vault:
    """A store of snapshots. Opens lazily, and creates nothing before the first write."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        clock: Clock | None = None,
        busy_seconds: float = 60.0,
        cipher: Cipher | None = None,
        home: Path | None = None,
        is_foreign: bool = False,
    ) -> None:
        self.cipher: Final = cipher
        """Encrypts every object, and keys its id; None: objects are in clear."""
        self.path: Final = Path(os.path.abspath(path))
        self.home: Final = self.path if home is None else home
        """The folder that no snapshot contains: this vault, or the one that it is in."""
        self.is_foreign: Final = is_foreign
        """Whether another person may have made the snapshots: their files are restored without set-ID bits."""
        self._place = str(self.path)
        self._clock = clock or SystemClock()
        self._busy_seconds = busy_seconds
        self._packs = Packs(self.path / "packs", self._place)
        self._cache: Lru[Id, bytes] = Lru(_CACHED_BYTES_MAX)
        self._mutex = threading.Lock()
        self._index: Index | None = None
        self._abandoned: Index | None = None
        self._process = os.getpid()
        self._closed = False

    # reading ----------------------------------------------------------------------------------

    def load(self, ref: Id) -> bytes:
        """Loads an object and checks its hash; raises `SnapshotBroken` if it is missing or damaged."""
        if (data := self._cache.get(ref)) is None:
            data = self._load(ref)
            if len(data) <= _CACHED_OBJECT_BYTES_MAX:
                self._cache.put(ref, data, len(data))
        return data

    def has(self, refs: Collection[Id]) -> set[Id]:
        """Returns which of these objects exist."""
        index = self._opened()
        return set() if index is None else index.has(refs)

    def references(self, owner: str | None = None) -> list[Reference]:
        """Returns every referenced snapshot, or one owner's, oldest first."""
        index = self._opened()
        return [] if index is None else index.references(owner)

    def size_bytes(self) -> int:
        """Returns the vault's size on disk."""
        total = 0
        for folder, _, names in os.walk(self.path):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    total += os.lstat(os.path.join(folder, name)).st_size
        return total

    @property
    def generation(self) -> int:
        """A counter that changes when a sweep has deleted anything. Constant while a writer is open."""
        index = self._opened()
        return 0 if index is None else index.sweeps()

    # writing ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def writing(self) -> Generator[SnapshotWriter, None, None]:
        """Opens a snapshot writer. Sweeps wait meanwhile; unpublished objects are discarded."""
        index = self._made()
        with self._writers(shared=True):
            writing = SnapshotWriter(index, self._packs, self._place, self.cipher)
            try:
                yield writing
            finally:
                writing.close()

    def forget(self, owner: str) -> int:
        """Drops an owner's references; returns their number. Their content goes with the next sweep."""
        index = self._opened()
        return 0 if index is None else index.forget(owner)

    def forget_owners(self, prefix: str, keep: Callable[[str], bool]) -> int:
        """Drops the references of owners with a name prefix, except some; returns their number."""
        index = self._opened()
        return 0 if index is None else index.forget_owners(prefix, keep)

    # restoring --------------------------------------------------------------------------------

    def restoring(self, workspace: str) -> RestoreRecord | None:
        """Returns the unfinished restore of a folder."""
        index = self._opened()
        return None if index is None else index.restoring(workspace)

    def unfinished(self) -> list[RestoreRecord]:
        """Returns every unfinished restore."""
        index = self._opened()
        return [] if index is None else index.unfinished()

    def begin_restoring(self, workspace: str, target: Id, before: Id | None, paths: Sequence[bytes] | None) -> None:
        """Records durably that a folder is being restored; replaces an earlier record."""
        named = None if paths is None else tuple(paths)
        self._made().begin_restoring(RestoreRecord(workspace, target, before, named, self._clock.now_us()))

    def end_restoring(self, workspace: str) -> None:
        """Records that the restore is finished."""
        index = self._opened()
        if index is not None:
            index.end_restoring(workspace)

    @contextlib.contextmanager
    def lock(self, workspace: str) -> Generator[None, None, None]:
        """Locks a folder across processes and threads, without a timeout."""
        self._made()
        name = sha256(workspace.encode(errors="surrogateescape")).hexdigest()[:24]
        with locked_alone(self.path / f"workspace-{name}.lock", self._place):
            yield

    # keeping ----------------------------------------------------------------------------------

    def sweep(self, *, dry_run: bool = False, without: Callable[[str], bool] | None = None) -> Swept:
        """Deletes unreferenced objects and frees their space; or only predicts the result, without the owners for which
        `without` is true."""
        if without is not None and not dry_run:
            raise ValueError("`without` is for a dry run; forget the owners, then sweep")
        index = self._opened()
        if index is None:
            return Swept(0, 0, 0)
        with self._one_sweeper(busy_seconds=self._busy_seconds):
            if dry_run:
                roots = index.live_roots(without or (lambda owner: False))
                return sweeping.preview(self._packs, sweeping.mark(index, roots, self._load, self._place))
            try:
                return sweeping.sweep(
                    index, self._packs, self._load, place=self._place, alone=lambda: self._writers(shared=False)
                )
            finally:
                self._cache.clear()

    def compress(self, *, seconds: float | None = None) -> int:
        """Compresses loose packs for about this long; returns the bytes gained. Skips if another process compresses or
        sweeps."""
        index = self._opened()
        if index is None or not index.loose_packs():
            return 0
        clock = self._clock
        until = math.inf if seconds is None else clock.monotonic() + seconds
        try:
            with self._one_sweeper(busy_seconds=0.0), explained(self._place):
                return sweeping.settle(index, self._packs, lambda: clock.monotonic() >= until)
        except StoreBusy:
            return 0

    def verify(self, roots: Collection[Id] | None = None, progress: Progress | None = None) -> list[str]:
        """Reads all objects of snapshots (all of them, or these); returns the problems, in words."""
        index = self._opened()
        if index is None:
            return [f"snapshot {root.hex()[:12]}: there is no vault at {self._place}" for root in roots or ()]
        return verifying.verify(index, self._packs, self._load, roots, progress, self._place)

    def close(self) -> None:
        """Closes the index. Open writers are discarded."""
        with self._mutex:
            self._closed = True
            if self._index is not None and self._process == os.getpid():
                self._index.close()
            self._index = None

    # inside -----------------------------------------------------------------------------------

    def _load(self, ref: Id) -> bytes:
        """Reads an object from its pack. If it moved since the index was read, reads the index again."""
        index = self._opened()
        if index is None:
            raise SnapshotBroken(ref.hex(), f"is missing, because there is no vault at {self._place}")
        place, before = index.locate(ref), None
        reason = ""
        while place is not None and place != before:
            found = self._unpacked(place)
            if isinstance(found, bytes):
                return found
            reason = found
            place, before = index.locate(ref), place
        if place is None:
            raise SnapshotBroken(ref.hex(), f"is missing from the vault {self._place}")
        raise SnapshotBroken(ref.hex(), f"is damaged in the vault {self._place}: {reason}")

    def _unpacked(self, place: ObjectRow) -> bytes | str:
        stored = self._packs.read(place)
        if isinstance(stored, str):
            return stored
        opened = stored if self.cipher is None else self.cipher.decrypt(stored, OBJECT)
        if opened is None:
            return f"what pack {place.pack} has at byte {place.offset} is not encrypted by the key of this store"
        data = opened if len(opened) == place.size else decompressed(opened, place.size)
        if data is None:
            return f"what pack {place.pack} has at byte {place.offset} cannot be unpacked"
        if id_of(data, self.cipher) != place.id:
            return f"what pack {place.pack} has at byte {place.offset} is something else"
        return data

    def _opened(self, *, make: bool = False) -> Index | None:
        """Returns the index; None if there is no vault."""
        index = self._index
        if index is not None and self._process == os.getpid():
            return index
        with self._mutex:
            if self._closed:
                raise StoreClosed(self._place)
            if self._process != os.getpid():
                # A forked process must neither use nor close its parent's index.
                self._abandoned, self._index, self._process = self._index, None, os.getpid()
            if self._index is None:
                with explained(self._place):
                    if not self._is_there():
                        if not make:
                            return None
                        make_folder(self._packs.folder)
                        sync_folder(self.path)
                        sync_folder(self.path.parent)
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
        # A vault has its index before its first pack. A new index would let all packs be overwritten.
        if any(map(self._packs.size_bytes, self._packs.numbers())) and not (path.exists() and path.stat().st_size):
            raise StoreBroken(self._place, f"this vault has its packs, but its {_INDEX} is missing")
        return False

    def _writers(self, *, shared: bool) -> AbstractContextManager[None]:
        seconds = _WRITING_BUSY_SECONDS if shared else self._busy_seconds
        return locked(self.path / "writing.lock", self._place, busy_seconds=seconds, shared=shared)

    def _one_sweeper(self, *, busy_seconds: float) -> AbstractContextManager[None]:
        return locked(self.path / "sweeping.lock", self._place, busy_seconds=busy_seconds)
