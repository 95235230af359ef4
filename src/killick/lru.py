"""A cache that drops its least recently used items. Knows nothing of what it holds."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Lru(Generic[K, V]):
    """Items up to a total size: of their number, or of what `put` is given. For any thread."""

    def __init__(self, size_max: int) -> None:
        self._size_max = size_max
        self._size = 0
        self._items: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._mutex = threading.Lock()

    def __len__(self) -> int:
        return len(self._items)

    def get(self, key: K) -> V | None:
        """Returns an item, which is now the most recently used."""
        with self._mutex:
            if (found := self._items.get(key)) is None:
                return None
            self._items.move_to_end(key)
            return found[0]

    def put(self, key: K, item: V, size: int = 1) -> None:
        """Adds or replaces an item, and drops the least recently used ones that are too much."""
        with self._mutex:
            self._size += size - self._items.pop(key, (None, 0))[1]
            self._items[key] = item, size
            while self._size > self._size_max:
                self._size -= self._items.popitem(last=False)[1][1]

    def pop(self, key: K) -> None:
        """Drops an item, if it is there."""
        with self._mutex:
            self._size -= self._items.pop(key, (None, 0))[1]

    def clear(self) -> None:
        """Drops everything."""
        with self._mutex:
            self._items.clear()
            self._size = 0
