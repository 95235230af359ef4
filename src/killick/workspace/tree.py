"""A folder as a value: entries by name, folders by the hash of their contents. Reads and writes no file.

A small folder is one object. A large one is split at boundaries that depend on the names alone, so that a change stores
one chunk and not the whole list. Names are bytes: a file system has no encoding.
"""

from __future__ import annotations

import stat
from binascii import crc32
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b, sha256
from itertools import chain
from typing import Any, Final, Literal

import msgspec

from killick.errors import SnapshotBroken
from killick.model.cipher import Cipher

Id = bytes
"""An object's SHA-256 hash, 32 bytes."""

Kind = Literal["file", "folder", "link", "fifo", "socket", "device"]
KINDS: Final[tuple[Kind, ...]] = ("file", "folder", "link", "fifo", "socket", "device")
KEPT: Final = frozenset({"file", "folder", "link", "fifo"})
"""The kinds that can be restored. Sockets and devices are recorded only."""

BLOCK_BYTES: Final = 1 << 20
"""Longer files are stored in blocks of this length."""

_SPLIT_ABOVE: Final = 128
_CHUNK_MASK: Final = 0x3F
_OF_MODE: Final[Mapping[int, Kind]] = {
    stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link", stat.S_IFIFO: "fifo", stat.S_IFSOCK: "socket",
}  # fmt: skip


class Entry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One name in a folder. `ref` is the id of its content (a file of at most one block: its bytes; a longer one: its
    `Blocks`; a folder: its entries), or a link's target; empty for recorded-only kinds."""

    name: bytes
    kind: int
    mode: int
    mtime_ns: int
    size: int = 0
    ref: bytes = b""

    @property
    def sort(self) -> Kind:
        """Its kind, in a word."""
        return KINDS[self.kind]

    @property
    def is_folder(self) -> bool:
        return self.kind == FOLDER

    @property
    def is_long(self) -> bool:
        """Whether it is a file stored in blocks."""
        return self.kind == FILE and self.size > BLOCK_BYTES


FILE, FOLDER, LINK, FIFO, SOCKET, DEVICE = range(6)


class Block(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A data range of a long file; between blocks there are only zeros."""

    offset: int
    size: int
    ref: bytes


class _Folder(msgspec.Struct, array_like=True, frozen=True, tag=0):
    entries: list[Entry]


class _Chunks(msgspec.Struct, array_like=True, frozen=True, tag=1):
    refs: list[bytes]


class _Blocks(msgspec.Struct, array_like=True, frozen=True, tag=2):
    blocks: list[Block]


class _Root(msgspec.Struct, array_like=True, frozen=True, tag=3):
    entry: Entry


Add = Callable[[bytes | memoryview], Id]
"""Stores an object and returns its id."""
Load = Callable[[Id], bytes]
"""Loads an object by its id; raises `SnapshotBroken` if it is missing or damaged."""

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_Folder | _Chunks | _Blocks | _Root).decode


def id_of(data: bytes | memoryview, cipher: Cipher | None = None) -> Id:
    """Returns an object's id; keyed, in an encrypted vault."""
    return sha256(data).digest() if cipher is None else blake2b(data, digest_size=32, key=cipher.digest_key).digest()


def kind_of(mode: int) -> int:
    """Returns a file's kind, from its `st_mode`."""
    return KINDS.index(_OF_MODE.get(stat.S_IFMT(mode), "device"))


def joined(path: bytes, name: bytes) -> bytes:
    """Returns the path of a name in the folder at a path."""
    return path + b"/" + name if path else name


def is_at(path: bytes, above: bytes) -> bool:
    """Returns whether a path is another one, or below it."""
    return not above or path == above or path.startswith(above + b"/")


# writing ------------------------------------------------------------------------------------------


def store_folder(entries: Iterable[Entry], add: Add) -> Id:
    """Stores a folder's contents."""
    ordered = sorted(entries, key=lambda entry: entry.name)
    if len(ordered) <= _SPLIT_ABOVE:
        return add(_encode(_Folder(ordered)))
    refs: list[bytes] = []
    chunk: list[Entry] = []
    for entry in ordered:
        chunk.append(entry)
        if crc32(entry.name) & _CHUNK_MASK == 0:
            refs.append(add(_encode(_Folder(chunk))))
            chunk = []
    if chunk:
        refs.append(add(_encode(_Folder(chunk))))
    return add(_encode(_Chunks(refs)))


def store_blocks(blocks: Sequence[Block], add: Add) -> Id:
    """Stores the data ranges of a long file."""
    return add(_encode(_Blocks(list(blocks))))


def store_root(entry: Entry, add: Add) -> Id:
    """Stores a whole snapshot: the folder itself, with its own mode and time. Returns the snapshot's id."""
    return add(_encode(_Root(entry)))


# reading ------------------------------------------------------------------------------------------


def _loaded(ref: Id, load: Load, kinds: type | tuple[type, ...]) -> Any:
    try:
        found = _decode(load(ref))
    except msgspec.DecodeError as error:
        raise SnapshotBroken(ref.hex(), f"is damaged: {error}") from error
    if not isinstance(found, kinds):
        raise SnapshotBroken(ref.hex(), "is damaged")
    for each in found.entries if isinstance(found, _Folder) else ():
        # A snapshot may be sent by another person: a name that leads out of its folder is never followed.
        if each.name in (b"", b".", b"..") or b"/" in each.name or b"\0" in each.name:
            raise SnapshotBroken(ref.hex(), f"holds the name {each.name!r}, which is not a valid file name")
    return found


def root(ref: Id, load: Load) -> Entry:
    """Returns a snapshot's folder."""
    found: Entry = _loaded(ref, load, _Root).entry
    return found


def folder(ref: Id, load: Load) -> list[Entry]:
    """Returns a folder's entries, by name."""
    found = _loaded(ref, load, (_Folder, _Chunks))
    if isinstance(found, _Folder):
        return found.entries
    return [entry for chunk in found.refs for entry in _loaded(chunk, load, _Folder).entries]


def blocks(ref: Id, load: Load) -> list[Block]:
    """Returns the data ranges of a long file."""
    found: list[Block] = _loaded(ref, load, _Blocks).blocks
    return found


def ranges(entry: Entry, load: Load) -> Iterator[tuple[int, bytes]]:
    """Yields a file's data with their offsets; between them there are only zeros."""
    if entry.is_long:
        for block in blocks(entry.ref, load):
            yield block.offset, load(block.ref)
    elif entry.size:
        yield 0, load(entry.ref)


def content(entry: Entry, load: Load, limit: int | None = None) -> Iterator[bytes]:
    """Yields the content of a file or a link; holes as zeros."""
    if entry.kind == LINK:
        yield entry.ref[:limit]
        return
    end, at = entry.size if limit is None else min(limit, entry.size), 0
    for offset, data in chain(ranges(entry, load), [(entry.size, b"")]):
        for start in range(at, min(offset, end), BLOCK_BYTES):
            yield bytes(min(BLOCK_BYTES, min(offset, end) - start))
        if offset >= end:
            return
        yield data[: end - offset]
        at = offset + len(data)


def walk(entry: Entry, load: Load, path: bytes = b"") -> Iterator[tuple[bytes, Entry]]:
    """Yields everything below a folder with relative paths, folders before their contents."""
    waiting = [(path, iter(folder(entry.ref, load)))]
    while waiting:
        above, entries = waiting[-1]
        each = next(entries, None)
        if each is None:
            waiting.pop()
            continue
        place = joined(above, each.name)
        yield place, each
        if each.is_folder:
            waiting.append((place, iter(folder(each.ref, load))))


def find(entry: Entry, path: bytes, load: Load) -> Entry | None:
    """Returns the entry at a path below a folder."""
    found: Entry | None = entry
    for name in filter(None, path.split(b"/")):
        if found is None or not found.is_folder:
            return None
        found = next((each for each in folder(found.ref, load) if each.name == name), None)
    return found


def objects(ref: Id, load: Load, seen: set[Id]) -> Iterator[Id]:
    """Yields the objects of a snapshot, except folders seen before and what is below them. Content may come again."""
    waiting: list[Id] = [ref]
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        yield current
        found = _loaded(current, load, (_Folder, _Chunks, _Blocks, _Root))
        if isinstance(found, _Chunks):
            waiting += found.refs
        elif isinstance(found, _Blocks):
            yield from (block.ref for block in found.blocks)
        else:
            entries = found.entries if isinstance(found, _Folder) else [found.entry]
            waiting += [entry.ref for entry in entries if entry.is_folder or entry.is_long]
            yield from (entry.ref for entry in entries if entry.kind == FILE and not entry.is_long)


# comparing ----------------------------------------------------------------------------------------


class Change(msgspec.Struct, frozen=True):
    """A difference at a path: before and after, None if absent."""

    path: bytes
    before: Entry | None
    after: Entry | None

    @property
    def how(self) -> Literal["added", "removed", "changed", "touched"]:
        """The kind of change, in a word; touched: only mode or time differ."""
        if self.before is None:
            return "added"
        if self.after is None:
            return "removed"
        one, other = ((each.kind, each.size, each.ref) for each in (self.before, self.after))
        return "touched" if one == other or (self.before.is_folder and self.after.is_folder) else "changed"

    @property
    def is_time_only(self) -> bool:
        """Whether it is a folder with another time, as when its entries change."""
        one, other = self.before, self.after
        return one is not None and other is not None and one.is_folder and other.is_folder and one.mode == other.mode


def changes(before: Entry | None, after: Entry | None, load: Load) -> Iterator[Change]:
    """Yields the differences between two folders, by path: each folder's own first, then those below. Shared subtrees
    are skipped."""
    waiting = [(before, after, b"")]
    while waiting:
        one, other, place = waiting.pop()
        if one == other:
            continue
        if place or one is None or other is None or _own(one) != _own(other):
            yield Change(place, one, other)
        if one is not None and other is not None and (one.ref, one.kind) == (other.ref, other.kind):
            continue
        old = {each.name: each for each in folder(one.ref, load)} if one is not None and one.is_folder else {}
        new = {each.name: each for each in folder(other.ref, load)} if other is not None and other.is_folder else {}
        names = sorted(old.keys() | new.keys(), reverse=True)
        waiting += [(old.get(name), new.get(name), joined(place, name)) for name in names]


def _own(entry: Entry) -> tuple[int, int, int]:
    return entry.kind, entry.mode, entry.mtime_ns
