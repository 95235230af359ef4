"""Garbage collection of a vault, and the compression of its loose packs.

First, with writers excluded: marks all objects of the referenced snapshots, and deletes the rows of all others in one
transaction. Then, with writers active: copies the live objects of mostly dead packs to others, moves their rows in one
transaction, and only then deletes the old files. A reader with an old row finds the file gone and reads the index
again. A crash at any point wastes space, and never loses an object.

A large snapshot fills loose packs with uncompressed objects. Each is short and processed atomically: its objects are
compressed into other packs, and it is deleted. So a crash leaves it either unchanged or gone.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from typing import Final

import msgspec

from killick.errors import SnapshotBroken
from killick.workspace import tree
from killick.workspace.tree import Id, Load
from killick.workspace.vault.compression import compressed
from killick.workspace.vault.index import Index, ObjectRow
from killick.workspace.vault.locks import explained, unlock
from killick.workspace.vault.pack_writer import PackWriter
from killick.workspace.vault.packs import Packs

_AT_ONCE_MAX: Final = 32
"""Packs that are rewritten together; each is an open file."""


class Swept(msgspec.Struct, frozen=True):
    """A sweep's result: unreferenced objects, freed bytes, remaining bytes."""

    objects: int
    bytes_freed: int
    bytes_kept: int


class Marked(msgspec.Struct, frozen=True):
    """The garbage, and each pack's live objects."""

    garbage: list[Id]
    live_bytes: dict[int, int]
    live_objects: dict[int, int]


def mark(index: Index, roots: Iterable[Id], load: Load, place: str) -> Marked:
    """Separates the objects that these snapshots need from the rest. An unreadable snapshot aborts it."""
    live_ids: set[Id] = set()
    seen: set[Id] = set()
    for root in roots:
        try:
            live_ids.update(tree.objects(root, load, seen))
        except SnapshotBroken as error:
            reason = (
                f"{error.reason}; snapshot {root.hex()[:12]} needs it, so nothing was swept: verify the vault {place}"
            )
            raise SnapshotBroken(error.subject, reason) from error
    garbage = list[Id]()
    live_bytes, live_objects = Counter[int](), Counter[int]()
    for each in index.objects():
        if each.id in live_ids:
            live_bytes[each.pack] += each.stored
            live_objects[each.pack] += 1
        else:
            garbage.append(each.id)
    return Marked(garbage, live_bytes, live_objects)


def is_mostly_garbage(size: int, live: int) -> bool:
    """Returns whether a pack is worth copying."""
    return size > 2 * live


def preview(packs: Packs, marked: Marked) -> Swept:
    """Returns the expected result of a sweep."""
    sizes = {number: packs.size_bytes(number) for number in packs.numbers()}
    live = marked.live_bytes
    freed = sum(size - live.get(pack, 0) for pack, size in sizes.items() if is_mostly_garbage(size, live.get(pack, 0)))
    return Swept(len(marked.garbage), freed, sum(sizes.values()) - freed)


def sweep(
    index: Index, packs: Packs, load: Load, *, place: str, alone: Callable[[], AbstractContextManager[None]]
) -> Swept:
    """Sweeps; `alone` excludes writers, and is held as briefly as possible."""
    with alone():
        marked = mark(index, index.live_roots(), load, place)
        index.discard(marked.garbage, {pack: marked.live_objects.get(pack, 0) for pack in index.packs()})
    with explained(place):
        before = sum(map(packs.size_bytes, packs.numbers()))
        live = marked.live_bytes
        # Deletions need no space, and free some for the copies.
        for some in _batches([pack for pack in index.packs() if not live.get(pack, 0)], _AT_ONCE_MAX):
            _rewrite(index, packs, some)
        settle(index, packs, lambda: False)
        worth = index.packs().keys() - set(index.loose_packs())
        worth = {pack for pack in worth if is_mostly_garbage(packs.size_bytes(pack), live.get(pack, 0))}
        for some in _batches(sorted(worth), _AT_ONCE_MAX):
            _rewrite(index, packs, some)
        _delete_orphans(index, packs)
        after = sum(map(packs.size_bytes, packs.numbers()))
    return Swept(len(marked.garbage), max(before - after, 0), after)


def _rewrite(index: Index, packs: Packs, numbers: Sequence[int]) -> None:
    """Copies live objects out of packs, and deletes these. Packs in use wait for another sweep."""
    with locking(packs, numbers) as locked:
        remaining: dict[int, list[ObjectRow]] = {number: [] for number in locked}
        for each in index.objects():
            if each.pack in remaining:
                remaining[each.pack].append(each)
        drop(index, packs, [number for number, held in remaining.items() if not held])
        for number, held in remaining.items():
            # Written to since: it may no longer be worth it. Damaged packs stay.
            if held and is_mostly_garbage(packs.size_bytes(number), sum(each.stored for each in held)):
                move_out(index, packs, number, held)


def _delete_orphans(index: Index, packs: Packs) -> None:
    """Deletes packs without rows: leftovers of processes that died before publishing or deleting them."""
    published = index.packs()
    with locking(packs, [number for number in packs.numbers() if number not in published]) as locked:
        if locked:
            index.supersede()
            published = index.packs()
            delete(packs, [number for number in locked if number not in published])


def _batches(numbers: Iterable[int], size: int) -> Iterator[list[int]]:
    each = iter(numbers)
    while some := list(islice(each, size)):
        yield some


# moving objects ---------------------------------------------------------------------------------


@contextlib.contextmanager
def locking(packs: Packs, numbers: Iterable[int]) -> Generator[list[int], None, None]:
    """Locks the packs that are free."""
    held: Mapping[int, int | None] = {}
    try:
        held = {number: packs.lock(number) for number in numbers}
        yield [number for number, descriptor in held.items() if descriptor is not None]
    finally:
        for descriptor in held.values():
            if descriptor is not None:
                unlock(descriptor)


def move_out(
    index: Index, packs: Packs, number: int, held: Sequence[ObjectRow], pack_up: Callable[[bytes], bytes] = bytes
) -> bool:
    """Moves the remaining objects out of a locked pack, and deletes it. False: one is damaged, and all stay.

    The copies are synced before the rows move, in one transaction, and the pack is deleted after that. A reader with an
    old row finds the pack gone, and reads the index again.
    """
    appending = PackWriter(packs, index)
    try:
        moves = list[tuple[ObjectRow, ObjectRow]]()
        for each in sorted(held, key=lambda each: each.offset):
            stored = packs.read(each)
            if isinstance(stored, str):
                return False
            stored = pack_up(stored)
            pack, offset = appending.append(stored)
            moves.append((each, each._replace(pack=pack, offset=offset, stored=len(stored))))
        with appending.publishing() as ends:
            index.move(moves, ends, [number])
        delete(packs, [number])
        return True
    finally:
        appending.close()


def drop(index: Index, packs: Packs, numbers: Sequence[int]) -> None:
    """Deletes locked packs that are empty."""
    if numbers:
        index.move((), {}, numbers)
        delete(packs, numbers)


def delete(packs: Packs, numbers: Iterable[int]) -> None:
    """Deletes the files of locked packs without rows."""
    for number in numbers:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(packs.path(number))


# compressing loose packs --------------------------------------------------------------------------


def settle(index: Index, packs: Packs, is_over: Callable[[], bool]) -> int:
    """Compresses loose packs, one by one, until the deadline; returns the bytes gained."""
    gained = 0
    for number in index.loose_packs():
        if is_over():
            break
        gained += _settled(index, packs, number)
    return gained


def _settled(index: Index, packs: Packs, number: int) -> int:
    with locking(packs, [number]) as locked:
        if not locked:
            return 0
        size, stored = packs.size_bytes(number), 0

        def pack_up(data: bytes) -> bytes:
            nonlocal stored
            packed = bytes(compressed(data))
            stored += len(packed)
            return packed

        held = index.members(number)
        if not held:
            drop(index, packs, [number])
        elif not move_out(index, packs, number, held, pack_up):
            # Damaged: left for verification to report.
            index.settle(number)
            return 0
        return size - stored
