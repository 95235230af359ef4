"""Compresses loose packs in the background.

A large snapshot fills loose packs with uncompressed objects. Each is short and processed atomically: its objects are
compressed into other packs, and it is deleted. So a crash leaves it either unchanged or gone.
"""

from __future__ import annotations

from collections.abc import Callable

from killick.workspace.vault.compression import compressed
from killick.workspace.vault.index import Index
from killick.workspace.vault.packs import Packs
from killick.workspace.vault.repack import drop, locking, move_out


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
