"""Writes one snapshot: its objects are deduplicated, and become visible together on publication."""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Final

from killick.errors import SnapshotBroken, StoreUnavailable
from killick.model.cipher import OBJECT, Cipher
from killick.workspace.tree import Id, id_of
from killick.workspace.vault.compression import compressed
from killick.workspace.vault.index import Index, ObjectRow, Reference
from killick.workspace.vault.pack_writer import PackWriter
from killick.workspace.vault.packs import Packs

_COMPRESSED_BYTES_MAX: Final = 4 << 20
"""Beyond this, new data is stored uncompressed, faster than copying files; `Vault.compress` compresses it later."""

_LOOKUPS_MAX: Final = 200
"""Up to this many objects are looked up one by one; beyond it, all ids are read at once."""

_KNOWN_MAX: Final = 400_000
"""The maximum number of ids in memory, at about 100 bytes each."""


class SnapshotWriter:
    """Returned by `Vault.writing`. Threads may add concurrently; publish after all of them."""

    def __init__(self, index: Index, packs: Packs, place: str, cipher: Cipher | None = None) -> None:
        self.sweeps: Final = index.sweeps()
        """The vault's `generation`. While unchanged, every id seen since still exists."""
        self._index = index
        self._place = place
        self._cipher = cipher
        self._appending = PackWriter(packs, index)
        self._loose = PackWriter(packs, index, loose=True)
        self._new_bytes = 0
        self._mutex = threading.Lock()
        self._added: dict[Id, object] = {}
        self._rows: list[ObjectRow] = []
        self._lookups = 0
        count = index.count()
        self._may_know = count <= _KNOWN_MAX
        self._known: Collection[Id] | None = None if count else frozenset()
        self._failed: str | None = None

    def add(self, data: bytes | memoryview) -> Id:
        """Stores an object if absent, and returns its id. The caller may reuse the buffer afterwards."""
        ref = id_of(data, self._cipher)
        if ref in self._added or self._is_known(ref):
            return ref
        token = object()
        if self._added.setdefault(ref, token) is not token:
            return ref  # another thread is at it
        self._refuse_failed()
        try:
            size = len(data)
            self._new_bytes += size
            if self._cipher is not None or self._new_bytes <= _COMPRESSED_BYTES_MAX:
                # What is encrypted cannot be compressed later.
                stored = bytes(compressed(data))
                stored = stored if self._cipher is None else self._cipher.encrypt(stored, OBJECT)
                pack, offset = self._appending.append(stored)
            else:
                stored = bytes(data)
                pack, offset = self._loose.append(stored)
            self._rows.append(ObjectRow(ref, pack, offset, len(stored), size))
        except BaseException as error:
            # Other threads may have relied on its presence.
            self._failed = str(error) or type(error).__name__
            raise
        return ref

    def publish(self, root: Id, owner: str, at_us: int) -> None:
        """Makes the snapshot visible and durable, and records its owner."""
        with self._mutex:
            self._refuse_failed()
            if root not in self._added and not self._index.has([root]):
                raise SnapshotBroken(root.hex(), f"was not added to the vault {self._place}, so it cannot be published")
            rows, self._rows = self._rows, []
            try:
                with self._appending.publishing() as ends, self._loose.publishing() as loose:
                    self._index.publish(rows, ends | loose, Reference(root, owner, at_us), loose=loose.keys())
            except BaseException as error:
                self._failed = str(error) or type(error).__name__
                raise

    def close(self) -> None:
        """Discards unpublished objects."""
        self._failed = self._failed or "it is over"
        self._appending.close()
        self._loose.close()

    def _refuse_failed(self) -> None:
        if self._failed is not None:
            raise StoreUnavailable(self._place, f"this snapshot failed: {self._failed}; start a new one")

    def _is_known(self, ref: Id) -> bool:
        known = self._known
        if known is not None:
            return ref in known
        self._lookups += 1
        if self._lookups <= _LOOKUPS_MAX or not self._may_know:
            return bool(self._index.has((ref,)))
        with self._mutex:
            if self._known is None:
                self._known = self._index.ids()
            return ref in self._known
