"""Reads of a log and of chunks that are remembered, for one decision or one fold."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, Final

from killick.model.chunks import Blob, Fetch
from killick.store.protocol import Store

_PIECES_KNOWN: Final = 64


class ReadOnce:
    """A store that remembers what it read of logs."""

    def __init__(self, store: Store) -> None:
        self._store, self._known = store, dict[tuple[Any, ...], Any]()
        self.pieces = remembering(store.pieces)

    def __getattr__(self, name: str) -> Any:
        return partial(self._once, name) if name in ("read", "row", "snapshot") else getattr(self._store, name)

    def _once(self, name: str, *args: Any, **named: Any) -> Any:
        key = (name, args, *named.items())
        if key not in self._known:
            self._known[key] = getattr(self._store, name)(*args, **named)
        return self._known[key]


def remembering(fetch: Fetch) -> Fetch:
    """Returns a fetch that reads a chunk once: several vectors of a snapshot may begin with the same ones."""
    known: dict[bytes, Blob] = {}

    def fetched(hashes: Collection[bytes]) -> Mapping[bytes, Blob]:
        if missing := [each for each in hashes if each not in known]:
            if len(known) >= _PIECES_KNOWN:
                known.clear()
            known.update(fetch(missing))
        return known

    return fetched
