"""The walk from a fork to its ancestors, whose events its log begins with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from killick.store.records import Head


class Segment(NamedTuple):
    """The rows of one run in the log of a fork: after `after`, up to `up_to`."""

    run: str
    after: int
    up_to: int


def ancestry(head: Head, head_of: Callable[[str], Head]) -> Iterator[tuple[Head, int]]:
    """Yields a run and its ancestors up to the root, each with its last seq in the log of the run."""
    up_to = head.seq
    while True:
        yield head, min(up_to, head.seq)
        if head.parent is None:
            return
        up_to = min(up_to, head.base)  # a fork may leave a fork before its first own event
        head = head_of(head.parent)


def owner_of(head: Head, seq: int, head_of: Callable[[str], Head]) -> Head:
    """Returns the run or ancestor whose own log holds a seq."""
    return next(each for each, _ in ancestry(head, head_of) if each.parent is None or seq > each.base)


def segments(head: Head, after: int, head_of: Callable[[str], Head]) -> list[Segment]:
    """Returns the segments that make up a log after a seq, eldest first; at least one."""
    found: list[Segment] = []
    for each, up_to in ancestry(head, head_of):
        found.append(Segment(each.run, max(after, each.base), up_to))
        if after >= each.base:
            break
    return found[::-1]
