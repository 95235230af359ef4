"""Folders as tests look at them: everything that stands in one, told, and kept as the objects of a snapshot.

Nothing here shares code with what captures and restores: it is what they are held against.
"""

from __future__ import annotations

import os
import stat
from hashlib import sha256
from pathlib import Path

from killick.workspace import tree
from killick.workspace.tree import BLOCK_BYTES, FILE, FOLDER, LINK, Block, Entry, Id, Load

Told = dict[bytes, tuple[str, int, int, str]]
"""By path: what it is, its mode, its mtime, and what it holds (a hash, or where a link leads)."""


def told(folder: Path, *, without: tuple[bytes, ...] = ()) -> Told:
    """Everything in a folder, and the folder itself; less some paths and what is below them."""
    found: Told = {}
    waiting = [b""]
    top = os.fsencode(folder)
    while waiting:
        path = waiting.pop()
        if path in without:
            continue
        full = top + b"/" + path if path else top
        status = os.stat(full) if not path else os.lstat(full)
        kind = tree.KINDS[tree.kind_of(status.st_mode)]
        mode = stat.S_IMODE(status.st_mode)
        holds = ""
        if kind == "folder":
            waiting += [path + b"/" + name if path else name for name in os.listdir(full)]
        elif kind == "file":
            holds = f"{status.st_size} {hashed(full)}"
        elif kind == "link":
            holds, mode = repr(os.readlink(full)), 0
        found[path] = (kind, mode, status.st_mtime_ns, holds)
    return found


def held(root: Id, load: Load) -> Told:
    """What a snapshot holds, as a folder is told."""
    top = tree.root(root, load)
    found: Told = {b"": ("folder", top.mode, top.mtime_ns, "")}
    for path, entry in tree.walk(top, load):
        holds = ""
        if entry.kind == FILE:
            digest, at = sha256(), 0
            pieces = tree.blocks(entry.ref, load) if entry.is_long else [Block(0, entry.size, entry.ref)]
            for piece in pieces:
                digest.update(bytes(piece.offset - at) + load(piece.ref))
                at = piece.offset + piece.size
            digest.update(bytes(entry.size - at))
            holds = f"{entry.size} {digest.hexdigest()}"
        elif entry.kind == LINK:
            holds = repr(entry.ref)
        found[path] = (entry.sort, 0 if entry.kind == LINK else entry.mode, entry.mtime_ns, holds)
    return found


def differing(one: Told, other: Told) -> list[str]:
    """What is not the same, a line each: easier to read than two long dicts."""
    return [
        f"{path!r}: {one.get(path)} and {other.get(path)}"
        for path in sorted(one.keys() | other.keys())
        if one.get(path) != other.get(path)
    ]


def hashed(path: bytes) -> str:
    found = sha256()
    with open(path, "rb") as file:
        while data := file.read(BLOCK_BYTES):
            found.update(data)
    return found.hexdigest()


class Objects(dict[Id, bytes]):
    """A vault in a dict."""

    def add(self, data: bytes | memoryview) -> Id:
        ref = tree.id_of(data)
        self[ref] = bytes(data)
        return ref

    def load(self, ref: Id) -> bytes:
        return self[ref]

    def keep(self, folder: Path) -> Entry:
        """A folder as the entry of a snapshot's root."""
        return self._entry(os.fsencode(folder), b"")

    def _entry(self, full: bytes, name: bytes) -> Entry:
        status = os.lstat(full)
        kind = tree.kind_of(status.st_mode)
        size, ref = 0, b""
        if kind == FOLDER:
            ref = tree.store_folder([self._entry(full + b"/" + each, each) for each in os.listdir(full)], self.add)
        elif kind == LINK:
            ref = os.readlink(full)
        elif kind == FILE:
            size, ref = status.st_size, self._file(full, status.st_size)
        return Entry(name, kind, stat.S_IMODE(status.st_mode), status.st_mtime_ns, size, ref)

    def _file(self, full: bytes, size: int) -> Id:
        with open(full, "rb") as file:
            if size <= BLOCK_BYTES:
                return self.add(file.read())
            blocks = []
            for offset in range(0, size, BLOCK_BYTES):
                data = file.read(BLOCK_BYTES)
                if data.strip(b"\0"):
                    blocks.append(Block(offset, len(data), self.add(data)))
            return tree.store_blocks(blocks, self.add)
