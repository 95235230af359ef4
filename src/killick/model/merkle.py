"""Merkle trees as in RFC 6962: growing roots, and proofs that can be checked without the tree. Pure functions of
hashes.

Leaves are hashed by the caller: leaf = sha256(0x00 ‖ content), node = sha256(0x01 ‖ left ‖ right). A tree of n leaves
is kept as its peaks: the roots of the perfect trees that n decomposes into, the largest first. That is about log n
hashes, to which leaves can always be appended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Final

EMPTY: Final = sha256(b"").digest()
"""The root of a tree without leaves."""


def node(left: bytes, right: bytes) -> bytes:
    """Returns the hash of an inner node."""
    return sha256(b"\x01" + left + right).digest()


class Frontier:
    """A growing tree, kept as its peaks."""

    __slots__ = ("peaks", "size")

    def __init__(self, size: int = 0, peaks: Iterable[bytes] = ()) -> None:
        self.size, self.peaks = size, list(peaks)
        if len(self.peaks) != size.bit_count():
            raise ValueError(f"a tree of {size} leaves has {size.bit_count()} peaks, not {len(self.peaks)}")

    def add(self, leaf: bytes) -> None:
        """Appends a leaf."""
        full = self.size
        while full & 1:
            leaf = node(self.peaks.pop(), leaf)
            full >>= 1
        self.peaks.append(leaf)
        self.size += 1

    @property
    def root(self) -> bytes:
        """Returns the root hash."""
        if not self.peaks:
            return EMPTY
        found = self.peaks[-1]
        for peak in reversed(self.peaks[:-1]):
            found = node(peak, found)
        return found

    @property
    def spans(self) -> list[range]:
        """Returns the range of leaves below each peak."""
        found: list[range] = []
        start = 0
        for bit in reversed(range(self.size.bit_length())):
            if self.size >> bit & 1:
                found.append(range(start, start + (1 << bit)))
                start += 1 << bit
        return found


def root(leaves: Iterable[bytes]) -> bytes:
    """Returns the root hash of these leaves."""
    tree = Frontier()
    for leaf in leaves:
        tree.add(leaf)
    return tree.root


# that a leaf is in a tree -------------------------------------------------------------------------


def inclusion(leaves: Sequence[bytes], index: int) -> list[bytes]:
    """Returns the sibling hashes from a leaf up to the root."""
    if not 0 <= index < len(leaves):
        raise ValueError(f"no leaf {index} in a tree of {len(leaves)}")
    path: list[bytes] = []
    level = leaves
    while len(level) > 1:
        if (sibling := index ^ 1) < len(level):
            path.append(level[sibling])
        above = [node(level[at], level[at + 1]) for at in range(0, len(level) - 1, 2)]
        level = [*above, level[-1]] if len(level) & 1 else above
        index >>= 1
    return path


def includes(root: bytes, size: int, leaf: bytes, index: int, path: Sequence[bytes]) -> bool:
    """Returns whether a path proves that a leaf is at an index of the tree with that size and root."""
    if not 0 <= index < size:
        return False
    found, last = leaf, size - 1
    for sibling in path:
        if last == 0:
            return False
        if index & 1 or index == last:
            found = node(sibling, found)
            while not index & 1 and index:
                index, last = index >> 1, last >> 1
        else:
            found = node(found, sibling)
        index, last = index >> 1, last >> 1
    return last == 0 and found == root


# that a tree grew out of another ------------------------------------------------------------------


def consistency(leaves: Sequence[bytes], older: int) -> list[bytes]:
    """Returns a proof that the tree over the first leaves is a prefix of the tree over all."""
    if not 0 < older <= len(leaves):
        raise ValueError(f"no tree of {older} leaves in one of {len(leaves)}")
    return _grown(leaves, older, whole=True)


def _grown(leaves: Sequence[bytes], older: int, *, whole: bool) -> list[bytes]:
    if older == len(leaves):
        return [] if whole else [root(leaves)]
    split = 1 << (len(leaves) - 1).bit_length() - 1
    if older <= split:
        return [*_grown(leaves[:split], older, whole=whole), root(leaves[split:])]
    return [*_grown(leaves[split:], older - split, whole=False), root(leaves[:split])]


def is_consistent(older: int, older_root: bytes, size: int, root: bytes, path: Sequence[bytes]) -> bool:
    """Returns whether a path proves that the tree with this size and root extends an older one."""
    if older == size:
        return not path and older_root == root
    if not 0 < older < size:
        return False
    steps = list(path)
    if older & (older - 1) == 0:
        steps.insert(0, older_root)
    if not steps:
        return False
    at, last = older - 1, size - 1
    while at & 1:
        at, last = at >> 1, last >> 1
    before = after = steps[0]
    for sibling in steps[1:]:
        if last == 0:
            return False
        if at & 1 or at == last:
            before, after = node(sibling, before), node(sibling, after)
            while not at & 1 and at:
                at, last = at >> 1, last >> 1
        else:
            after = node(after, sibling)
        at, last = at >> 1, last >> 1
    return last == 0 and before == older_root and after == root
