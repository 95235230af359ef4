"""Moves objects out of a pack, so that it can be deleted, and compresses loose packs. The caller decides which.

A large snapshot fills loose packs with uncompressed objects. Each is short and processed atomically: its objects are
compressed into other packs, and it is deleted. So a crash leaves it either unchanged or gone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence

from killick.workspace.vault.compression import compressed
from killick.workspace.vault.index import Index, ObjectLocation, ObjectRow
from killick.workspace.vault.locks import unlock
from killick.workspace.vault.pack_writer import PackWriter
from killick.workspace.vault.packs import Packs


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
        moves = list[tuple[ObjectRow, ObjectLocation]]()
        for each in sorted(held, key=lambda each: each.offset):
            stored = packs.read(ObjectLocation(*each[1:]))
            if isinstance(stored, str):
                return False
            stored = pack_up(stored)
            pack, offset = appending.append(stored)
            moves.append((each, ObjectLocation(pack, offset, len(stored), each.size)))
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
