"""Finds where a store can be read again after rows that are on a damaged page."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

_BITS: Final = 62
_NEAR: Final = 60
"""How many numbers are tried one by one: more than the rows of a page."""

_RUNS: Final = 30
"""How many runs are tried one by one: more than those whose events are on one page."""


def next_readable(first: int, can_read: Callable[[int], bool], *, run_bits: int | None = None) -> int | None:
    """Returns a number after the unreadable `first` from which reading works, or None.

    Tries the next numbers one by one, those of the next runs with `run_bits`, which is how many bits of a number are
    the seq, and ever longer jumps. It is the first one, unless more than a page is damaged there.
    """
    starts = [first]
    if run_bits is not None:
        starts += (((first >> run_bits) + ahead) << run_bits for ahead in range(1, _RUNS))
    near = (start + ahead for start in starts for ahead in range(1, _NEAR))
    if (found := next(filter(can_read, near), None)) is not None and found < first + _NEAR:
        return found
    return min(filter(None, (found, _by_jumps(first, can_read))), default=None)


def _by_jumps(first: int, can_read: Callable[[int], bool]) -> int | None:
    jump = next((1 << bits for bits in range(_BITS) if can_read(first + (1 << bits))), None)
    if jump is None:
        return None
    low, high = first + jump // 2, first + jump
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if can_read(middle) else (middle + 1, high)
    return high
