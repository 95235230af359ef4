"""The scan cache of a folder, kept between scans and between processes. Reads no folder."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from killick.model.cipher import SCAN, Cipher
from killick.permissions import create_private, make_folder
from killick.type_init import ready
from killick.workspace import tree
from killick.workspace.file_reader import CapturedFile, decoded, encoded
from killick.workspace.ignore import Scope
from killick.workspace.tree import Entry, Id

_SEEN: Final = 1
"""The version of the cache on disk; other versions are ignored."""


@dataclass(slots=True, eq=False)
class Folder:
    """The cache of one folder. `ref` is None while its contents are not stored."""

    inode: int = 0
    mode: int = 0
    mtime_ns: int = 0
    ref: Id | None = None
    totals: tuple[int, int] = (0, 0)
    rules: tuple[bytes | None, ...] = ()
    files: dict[str, CapturedFile] = field(default_factory=dict[str, CapturedFile])
    folders: dict[str, Folder] = field(default_factory=dict[str, "Folder"])
    ignored: set[str] = field(default_factory=set[str])
    scope: Scope | None = None
    is_same: bool = False
    """Whether it comes from the cache and its ignore rules are unchanged."""

    def entry(self, name: bytes) -> Entry:
        """The folder as an entry of its parent."""
        assert self.ref is not None
        return Entry(name, tree.FOLDER, stat.S_IMODE(self.mode), self.mtime_ns, 0, self.ref)


class _Remembered(msgspec.Struct, array_like=True):
    inode: int
    mode: int
    mtime_ns: int
    ref: Id | None
    totals: tuple[int, int]
    rules: tuple[bytes | None, ...]
    files: dict[bytes, CapturedFile]
    folders: dict[bytes, _Remembered]


class _Cache(msgspec.Struct, array_like=True):
    version: int
    generation: int
    rules: str
    top: _Remembered


def every(top: Folder) -> Iterator[Folder]:
    """Yields all folders."""
    waiting = [top]
    while waiting:
        folder = waiting.pop()
        yield folder
        waiting += folder.folders.values()


def refs_of(folder: Folder) -> Iterator[Id]:
    """Returns the stored objects of a folder and of its files."""
    yield from (each.entry.ref for each in folder.files.values() if each.entry.kind == tree.FILE)
    if folder.ref is not None:
        yield folder.ref


def _remember(folder: Folder) -> _Remembered:
    return _Remembered(
        folder.inode, folder.mode, folder.mtime_ns, folder.ref, folder.totals, folder.rules,
        {encoded(name): each for name, each in folder.files.items()},
        {encoded(name): _remember(below) for name, below in folder.folders.items()},
    )  # fmt: skip


def _recall(saved: _Remembered) -> Folder:
    return Folder(
        saved.inode, saved.mode, saved.mtime_ns, saved.ref, saved.totals, saved.rules,
        {decoded(name): each for name, each in saved.files.items()},
        {decoded(name): _recall(below) for name, below in saved.folders.items()}, is_same=True,
    )  # fmt: skip


def save(place: Path, top: Folder, *, sweeps: int, rules: str, cipher: Cipher | None) -> None:
    """Saves the cache to disk, so that another process need not read everything again."""
    written = msgspec.msgpack.encode(_Cache(_SEEN, sweeps, rules, _remember(top)))
    make_folder(place.parent)
    new = place.with_name(f"{place.name}.{os.getpid()}")
    new.unlink(missing_ok=True)
    with create_private(new) as file:
        file.write(written if cipher is None else cipher.encrypt(written, SCAN))
    new.replace(place)


def saved(place: Path, *, rules: str, cipher: Cipher | None) -> tuple[Folder, int] | None:
    """Loads another process's cache for the same rules, and its sweep count; None if unusable."""
    try:
        read = place.read_bytes()
        clear = read if cipher is None else cipher.decrypt(read, SCAN) or b""
        cache = msgspec.msgpack.decode(clear, type=ready(_Cache))
    except (OSError, msgspec.DecodeError, RecursionError):
        return None
    return (_recall(cache.top), cache.generation) if (cache.version, cache.rules) == (_SEEN, rules) else None
