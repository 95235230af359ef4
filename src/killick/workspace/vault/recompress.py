"""Compresses, when there is time, what was stored as it is when there was none.

A snapshot with much that is new fills loose packs. Each is short, and is done with at once: its objects are compressed
into others, and it is deleted. So a death leaves it either as it was or gone, and nothing is tried twice.
"""

from __future__ import annotations

from collections.abc import Callable

from killick.workspace.vault.compression import compressed
from killick.workspace.vault.index import Index
from killick.workspace.vault.packs import Packs
from killick.workspace.vault.repack import drop, locking, move_out


def settle(index: Index, packs: Packs, is_over: Callable[[], bool]) -> int:
    """Compress what is loose, one pack after the other, until the time is over; how many bytes that gained."""
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
            # Damaged: it stays as it is, for verification to tell.
            index.settle(number)
            return 0
        return size - stored
