"""Finds where a store can be read again after rows that are on a damaged page."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

_BITS: Final = 62


def next_readable(first: int, can_read: Callable[[int], bool]) -> int | None:
    """Returns a number after the unreadable `first` from which reading works, or None: by ever longer jumps, then by
    halves. It is the first one, if the rows between are on one page."""
    jump = 1
    while not can_read(first + jump):
        jump *= 2
        if first + jump >= 1 << _BITS:
            return None
    low, high = first + jump // 2, first + jump
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if can_read(middle) else (middle + 1, high)
    return high
