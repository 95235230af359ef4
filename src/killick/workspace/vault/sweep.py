"""Takes away what no snapshot needs, and gives the room back.

First, while nobody writes: everything that a wanted snapshot stands on is marked, and the rows of all else are deleted
in one transaction. Then, while others may write again: a pack that is mostly garbage is copied, without it, to the end
of others; the rows move in one transaction; and only then is its file deleted. Whoever read an old row in between finds
the file gone and asks the index again. A death at any point leaves room unused, and never an object lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from typing import Final

import msgspec

from killick.errors import SnapshotBroken
from killick.workspace import tree
from killick.workspace.tree import Id, Load
from killick.workspace.vault.index import Index, Placed
from killick.workspace.vault.os_errors import explained
from killick.workspace.vault.packs import Packs
from killick.workspace.vault.recompress import settle
from killick.workspace.vault.repack import delete, drop, locking, move_out

_AT_ONCE_MAX: Final = 32
"""Packs that are rewritten together; each is an open file."""


class Swept(msgspec.Struct, frozen=True):
    """What a sweep came to: objects that no snapshot needs, bytes of packs that are free again, bytes that stay."""

    objects: int
    bytes_freed: int
    bytes_kept: int


class Marked(msgspec.Struct, frozen=True):
    """What is garbage, and what of each pack is not."""

    garbage: list[Id]
    live_bytes: dict[int, int]
    live_objects: dict[int, int]


def mark(index: Index, roots: Iterable[Id], load: Load, place: str) -> Marked:
    """Tell what these snapshots need from what they do not. One that cannot be followed stops it."""
    wanted: set[Id] = set()
    seen: set[Id] = set()
    for root in roots:
        try:
            wanted.update(ref for ref, _ in tree.objects(root, load, seen))
        except SnapshotBroken as error:
            reason = (
                f"{error.reason}; snapshot {root.hex()[:12]} needs it, so nothing was swept: verify the vault {place}"
            )
            raise SnapshotBroken(error.what, reason) from error
    garbage = list[Id]()
    live_bytes, live_objects = Counter[int](), Counter[int]()
    for each in index.objects():
        if each.id in wanted:
            live_bytes[each.pack] += each.stored
            live_objects[each.pack] += 1
        else:
            garbage.append(each.id)
    return Marked(garbage, live_bytes, live_objects)


def is_mostly_garbage(size: int, live: int) -> bool:
    """Whether a pack is worth being copied."""
    return size > 2 * live


def foretold(packs: Packs, marked: Marked) -> Swept:
    """What a sweep would come to."""
    sizes = {number: packs.size_bytes(number) for number in packs.numbers()}
    live = marked.live_bytes
    freed = sum(size - live.get(pack, 0) for pack, size in sizes.items() if is_mostly_garbage(size, live.get(pack, 0)))
    return Swept(len(marked.garbage), freed, sum(sizes.values()) - freed)


def sweep(
    index: Index, packs: Packs, load: Load, *, place: str, alone: Callable[[], AbstractContextManager[None]]
) -> Swept:
    """Sweep; `alone` keeps all others from writing, and is held no longer than it must."""
    with alone():
        marked = mark(index, index.wanted(), load, place)
        index.discard(marked.garbage, {pack: marked.live_objects.get(pack, 0) for pack in index.packs()})
    with explained(place):
        before = sum(map(packs.size_bytes, packs.numbers()))
        live = marked.live_bytes
        # What is only deleted needs no room, and gives some to what is copied.
        for some in _batches([pack for pack in index.packs() if not live.get(pack, 0)], _AT_ONCE_MAX):
            _rewrite(index, packs, some)
        settle(index, packs, lambda: False)
        worth = index.packs().keys() - set(index.loose_packs())
        worth = {pack for pack in worth if is_mostly_garbage(packs.size_bytes(pack), live.get(pack, 0))}
        for some in _batches(sorted(worth), _AT_ONCE_MAX):
            _rewrite(index, packs, some)
        _clear_left_behind(index, packs)
        after = sum(map(packs.size_bytes, packs.numbers()))
    return Swept(len(marked.garbage), max(before - after, 0), after)


def _rewrite(index: Index, packs: Packs, numbers: Sequence[int]) -> None:
    """Copy what is left in packs to others, and delete them. Those that somebody appends to wait for another sweep."""
    with locking(packs, numbers) as locked:
        left: dict[int, list[Placed]] = {number: [] for number in locked}
        for each in index.objects():
            if each.pack in left:
                left[each.pack].append(each)
        drop(index, packs, [number for number, held in left.items() if not held])
        for number, held in left.items():
            # Written to since it was looked at: perhaps it is not worth it any more. What is damaged stays as it is.
            if held and is_mostly_garbage(packs.size_bytes(number), sum(each.stored for each in held)):
                move_out(index, packs, number, held)


def _clear_left_behind(index: Index, packs: Packs) -> None:
    """Delete packs that no row knows: of processes that died before they published, or before they deleted them."""
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
