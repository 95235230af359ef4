"""A persistent append-only list. Saving it writes only the changed chunks.

A radix tree of fixed width, stored as ordinary values: leaves are JSON arrays and inner nodes are `$list`s, so any
value reader can read them. Loading is lazy: opening reads nothing, and an access reads one path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, Self, TypeVar, overload

import msgspec

from killick.errors import ValueBroken
from killick.model.chunks import Blob, Fetch
from killick.model.events import from_text, to_text
from killick.model.hashing import value_hash
from killick.type_init import ready

T = TypeVar("T")
F = TypeVar("F")

BITS: Final = 5
WIDTH: Final = 1 << BITS


class Saved(msgspec.Struct, frozen=True, array_like=True):
    """The stored root of a vector, and its shape."""

    length: int
    height: int
    root: str | None


class _Node:
    """Items at height 0, children above; `saved` is its hash while unchanged."""

    __slots__ = ("items", "saved")

    def __init__(self, items: list[Any], saved: bytes | None = None) -> None:
        self.items = items
        self.saved = saved


class _Inner(msgspec.Struct, rename={"children": "$list"}):
    children: list[str]


_inner: Final = msgspec.json.Decoder(_Inner).decode


@cache
def _decoder(of: type[Any]) -> Callable[[bytes], list[Any]]:
    return msgspec.json.Decoder(list[ready(of)]).decode  # type: ignore[misc]


class Vector(Sequence[T], Generic[T]):
    """An append-only sequence. Items may be mutated if fetched with `changing`."""

    __slots__ = ("_fetch", "_height", "_length", "_of", "_root", "_tail", "_tail_at")

    def __init__(self, of: type[T], saved: Saved | None = None, fetch: Fetch | None = None) -> None:
        self._of, self._fetch, self._tail_at = of, fetch, 0
        self._tail: list[T] | None = None
        self._root: _Node | bytes | None = None  # made with the first item: most vectors of a run stay empty
        self._length = self._height = 0
        if saved is not None and saved.root is not None:
            self._length, self._height, self._root = saved.length, saved.height, from_text(saved.root)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(self._length))]
        if index < 0:
            index += self._length
        if not 0 <= index < self._length:
            raise IndexError(index)
        if self._tail is not None and index >= self._tail_at:
            return self._tail[index - self._tail_at]
        item: T = self._leaf(index).items[index & (WIDTH - 1)]
        return item

    def __iter__(self) -> Iterator[T]:
        for start in range(0, self._length, WIDTH):
            yield from self._leaf(start).items

    def __reversed__(self) -> Iterator[T]:
        for start in range((self._length - 1) & -WIDTH, -1, -WIDTH):
            yield from reversed(self._leaf(start).items)

    def append(self, item: T) -> int:
        """Appends an item and returns its index."""
        index = self._length
        tail = self._tail
        if tail is None or len(tail) == WIDTH:
            tail = self._open_tail(index)
        tail.append(item)
        self._length = index + 1
        return index

    def extend(self, items: Sequence[T]) -> None:
        """Appends items."""
        while items:
            tail = self._tail
            if tail is None or len(tail) == WIDTH:
                tail = self._open_tail(self._length)
            room = WIDTH - len(tail)
            part, items = (items, ()) if len(items) <= room else (items[:room], items[room:])
            tail += part
            self._length += len(part)

    def changing(self, index: int) -> T:
        """Returns an item for mutation."""
        if self._tail is not None and index >= self._tail_at:
            return self._tail[index - self._tail_at]
        item: T = self._leaf(index, change=True).items[index & (WIDTH - 1)]
        return item

    def save(self, pieces: list[Blob]) -> Saved:
        """Adds the chunks changed since the last save to `pieces`, and returns the root."""
        if self._root is None:
            return Saved(0, 0, None)
        root = self._root if isinstance(self._root, bytes) else self._save(self._root, self._height, pieces)
        # The tail's path is clean now, so the next append must mark it again.
        self._tail = None
        return Saved(self._length, self._height, to_text(root))

    # inside -----------------------------------------------------------------------------------

    def _leaf(self, index: int, *, change: bool = False) -> _Node:
        node = self._node(self._root, self._height)
        self._root = node
        for height in range(self._height, 0, -1):
            if change:
                node.saved = None
            slot = (index >> (BITS * height)) & (WIDTH - 1)
            if slot == len(node.items):
                node.items.append(_Node([]))
            child = self._node(node.items[slot], height - 1)
            node.items[slot] = child
            node = child
        if change:
            node.saved = None
        return node

    def _node(self, node: _Node | bytes | None, height: int) -> _Node:
        if node is None:
            return _Node([])
        if isinstance(node, _Node):
            return node
        piece = self._fetch([node]).get(node) if self._fetch else None
        if piece is None or piece.body is None:
            raise ValueBroken(node, "missing")
        try:
            if height:
                return _Node([from_text(child) for child in _inner(piece.body).children], node)
            return _Node(_decoder(self._of)(piece.body), node)  # type: ignore[arg-type]
        except msgspec.DecodeError as error:
            raise ValueBroken(node, f"is not a valid vector ({error})") from error

    def _open_tail(self, index: int) -> list[T]:
        """Returns the leaf for the next item, with its path marked dirty. A full tree grows by one level."""
        if not index:
            self._root = first = _Node([])
            self._tail = first.items
            return first.items
        if index == WIDTH << (BITS * self._height):
            self._root = _Node([self._root])
            self._height += 1
        self._tail_at = index & ~(WIDTH - 1)
        self._tail = self._leaf(index, change=True).items
        return self._tail

    def _save(self, node: _Node, height: int, pieces: list[Blob]) -> bytes:
        if node.saved is not None:
            return node.saved
        if height:
            hashes = [
                child if isinstance(child, bytes) else self._save(child, height - 1, pieces) for child in node.items
            ]
            body = msgspec.json.encode({"$list": [to_text(child) for child in hashes]})
        else:
            body = msgspec.json.encode(node.items)
        node.saved = value_hash("json", body)
        pieces.append(Blob(node.saved, "json", body))
        return node.saved


class SavedFold(msgspec.Struct, Generic[F]):
    """A stored fold: its scalar facts, and the roots of its vectors."""

    facts: F
    vectors: dict[str, Saved]


class VectorFold:
    """Scalar facts, and the vectors that `VECTORS` names, each made at its first use: most runs use few of them.

    In a new run, and after each snapshot, plain steps wait in `plain` until a vector that has them is read. `OF_STEPS`
    names those; meanwhile they rest in `resting`, so that no code reads them unawares.
    """

    __slots__ = ("plain", "resting")

    VECTORS: ClassVar[Mapping[str, type[Any]]]
    OF_STEPS: ClassVar[frozenset[str]]
    FACTS: ClassVar[type[Any]]
    DECODER: ClassVar[msgspec.json.Decoder[SavedFold[Any]]]
    """Decodes a stored fold. Each class makes it at import, in one thread: see `killick.type_init`."""

    facts: Any
    plain: list[Any] | None
    resting: dict[str, Vector[Any]]

    def __init__(self, facts: Any = None) -> None:
        self.facts, self.plain, self.resting = facts or self.FACTS(), None, {}

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name not in self.VECTORS:
                raise AttributeError(f"{type(self).__name__} has no {name!r}")
            if self.plain is not None and name in self.OF_STEPS:
                plain, self.plain = self.plain, None
                for each, vector in self.resting.items():
                    setattr(self, each, vector)
                self.add_steps(plain)
                return getattr(self, name)
            vector = Vector(self.VECTORS[name])
            setattr(self, name, vector)
            return vector

    def keep(self, plain: Sequence[Any]) -> None:
        """Puts plain steps into the vectors, or keeps them until a vector is read."""
        if self.plain is None:
            self.add_steps(plain)
        else:
            self.plain += plain

    def add_steps(self, plain: Sequence[Any]) -> None:
        """Puts plain steps into the vectors."""
        raise NotImplementedError

    @classmethod
    def load(cls, root: bytes | msgspec.Raw, fetch: Fetch) -> Self:
        """Loads a snapshot. Its vectors are read lazily."""
        saved = cls.DECODER.decode(root)
        made = cls(saved.facts)
        for name, of in cls.VECTORS.items():
            setattr(made, name, Vector(of, saved.vectors.get(name), fetch))
        return made

    def save(self, pieces: list[Blob]) -> bytes:
        """Returns the root of a snapshot. Adds the chunks that earlier snapshots did not store to `pieces`."""
        saved = {name: getattr(self, name).save(pieces) for name in self.VECTORS}
        self.resting = {name: getattr(self, name) for name in self.OF_STEPS}
        self.plain = []
        for name in self.OF_STEPS:
            delattr(self, name)
        return msgspec.json.encode(SavedFold(self.facts, saved))
