"""Reads all objects of snapshots, and reports damage in words. Changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Final

from killick.errors import SnapshotBroken, StoreBroken
from killick.workspace import tree
from killick.workspace.tree import FILE, Entry, Id, Load
from killick.workspace.vault.index import Index
from killick.workspace.vault.packs import Packs

Progress = Callable[[int, int], object]
"""Called periodically with the number of objects read, and the vault's approximate total."""

_TOLD_EVERY: Final = 500


def verify(
    index: Index, packs: Packs, load: Load, roots: Collection[Id] | None, progress: Progress | None, place: str
) -> list[str]:
    """Returns the problems of these snapshots, or of all and of the vault itself."""
    problems = list[str]()
    try:
        if roots is None:
            problems += _check_storage(index, packs, place)
        problems += _snapshots(index, load, roots, progress or (lambda done, total: None))
    except StoreBroken as error:
        # The index became unreadable; earlier findings are reported too.
        problems.append(str(error))
    return problems


def _check_storage(index: Index, packs: Packs, place: str) -> Iterator[str]:
    damage = index.damage()
    if damage is not None:
        yield f"the index of the vault {place} is damaged: {damage}"
    for number, end in index.packs().items():
        size = packs.size_bytes(number)
        if size < end:
            yield f"pack {number} of the vault {place} has {size} bytes and should have {end}"


def _snapshots(index: Index, load: Load, roots: Collection[Id] | None, tell: Progress) -> Iterator[str]:
    owners: dict[Id, str] = {}
    for reference in index.references():
        owners.setdefault(reference.root, reference.owner)
    total = index.count()
    seen: set[tuple[Id, bool]] = set()
    for root in owners if roots is None else roots:
        found = list(_snapshot(root, load, seen, lambda done: tell(done, total)))
        # Another process may have dropped and swept it meanwhile.
        if found and (roots is not None or index.is_referenced(root)):
            owner = f" of {owners[root]}" if owners.get(root) else ""
            yield from (f"snapshot {root.hex()[:12]}{owner}: {problem}" for problem in found)
    tell(len(seen), total)


def _snapshot(root: Id, load: Load, seen: set[tuple[Id, bool]], tell: Callable[[int], object]) -> Iterator[str]:
    """Returns a snapshot's problems, by path; skips objects read before."""
    waiting: list[tuple[bytes, Entry | None, Id]] = [(b"", None, root)]
    while waiting:
        path, entry, ref = waiting.pop()
        # A file may contain the same bytes as a folder's listing.
        role = ref, entry is not None and entry.kind == FILE and not entry.is_long
        if role in seen:
            continue
        seen.add(role)
        if len(seen) % _TOLD_EVERY == 0:
            tell(len(seen))
        try:
            waiting += _read(path, entry, ref, load)
        except SnapshotBroken as error:
            yield f"{path.decode(errors='backslashreplace')}: {error}" if path else str(error)


def _read(path: bytes, entry: Entry | None, ref: Id, load: Load) -> Iterator[tuple[bytes, Entry | None, Id]]:
    """Reads one object and returns its children. No entry: a snapshot itself."""
    if entry is None:
        top = tree.root(ref, load)
        yield path, top, top.ref
    elif entry.is_folder:
        for each in tree.folder(ref, load):
            if each.is_folder or each.kind == FILE:
                yield tree.joined(path, each.name), each, each.ref
    elif entry.is_long:
        for block in tree.blocks(ref, load):
            yield path, Entry(entry.name, FILE, entry.mode, entry.mtime_ns, block.size, block.ref), block.ref
    elif len(load(ref)) != entry.size:
        raise SnapshotBroken(ref.hex(), f"does not have its {entry.size} bytes")
