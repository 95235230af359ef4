"""Snapshots as tests make and read them, straight from a vault and with no folder behind them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

from killick.workspace import tree
from killick.workspace.tree import BLOCK_BYTES, FILE, FOLDER, Block, Entry, Id
from killick.workspace.vault.vault import SnapshotWriter, Vault

Files = Mapping[bytes, bytes]


def add(writing: SnapshotWriter, files: Files) -> Id:
    """Add everything that a snapshot of these files stands on; its root. Names may have one folder in them."""
    folders: dict[bytes, list[Entry]] = {b"": []}
    for path, data in sorted(files.items()):
        above, _, name = path.rpartition(b"/")
        if len(data) <= BLOCK_BYTES:
            ref = writing.add(data)
        else:
            starts = range(0, len(data), BLOCK_BYTES)
            pieces = [(start, data[start : start + BLOCK_BYTES]) for start in starts]
            ref = tree.store_blocks([Block(at, len(piece), writing.add(piece)) for at, piece in pieces], writing.add)
        folders.setdefault(above, []).append(Entry(name, FILE, 0o644, 1, len(data), ref))
    top = folders.pop(b"")
    top += [Entry(name, FOLDER, 0o755, 1, 0, tree.store_folder(held, writing.add)) for name, held in folders.items()]
    return tree.store_root(Entry(b"", FOLDER, 0o755, 1, 0, tree.store_folder(top, writing.add)), writing.add)


def publish(vault: Vault, files: Files, owner: str = "", at_us: int = 1) -> Id:
    """A snapshot of these files."""
    with vault.writing() as writing:
        root = add(writing, files)
        writing.publish(root, owner, at_us)
    return root


def read(vault: Vault, root: Id) -> dict[bytes, bytes]:
    """The files of a snapshot."""
    found: dict[bytes, bytes] = {}
    for path, entry in tree.walk(tree.root(root, vault.load), vault.load):
        if entry.is_long:
            data = bytearray(entry.size)
            for block in tree.blocks(entry.ref, vault.load):
                data[block.offset : block.offset + block.size] = vault.load(block.ref)
            found[path] = bytes(data)
        elif not entry.is_folder:
            found[path] = vault.load(entry.ref)
    return found


def some_files(chance: random.Random, count: int = 8, *, size_max: int = 9_000) -> dict[bytes, bytes]:
    """Files of any content, some of which compress and some of which others have too."""
    files: dict[bytes, bytes] = {}
    for number in range(count):
        size = chance.randrange(size_max)
        data = chance.choice([
            lambda size=size: chance.randbytes(size),
            lambda size=size: b"%d the same line\n" % chance.randrange(5) * (size // 16),
            lambda: b"shared %d" % chance.randrange(20) * 50,
        ])()  # fmt: skip
        files[b"%s%d" % (chance.choice([b"", b"sub/", b"\xff\xfe/"]), number)] = data
    return files


def packs(vault: Vault) -> list[Path]:
    """The files that hold the objects."""
    return sorted((vault.path / "packs").iterdir())


def packed_bytes(vault: Vault) -> int:
    return sum(path.stat().st_size for path in packs(vault))
