"""R35: the trees of RFC 6962, against its definition written down naively."""

from __future__ import annotations

from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from killick.model import hashing, merkle
from killick.model.merkle import Frontier, consistency, includes, inclusion, is_consistent


def leaf(number: int) -> bytes:
    return hashing.leaf(str(number).encode())


def leaves(count: int) -> list[bytes]:
    return [leaf(number) for number in range(count)]


# The definition, word by word (RFC 6962, 2.1). -----------------------------------------------------


def split(count: int) -> int:
    """The largest power of two below a number."""
    power = 1
    while power * 2 < count:
        power *= 2
    return power


def mth(items: list[bytes]) -> bytes:
    if not items:
        return sha256(b"").digest()
    if len(items) == 1:
        return items[0]
    k = split(len(items))
    return sha256(b"\x01" + mth(items[:k]) + mth(items[k:])).digest()


def path(m: int, items: list[bytes]) -> list[bytes]:
    if len(items) == 1:
        return []
    k = split(len(items))
    if m < k:
        return [*path(m, items[:k]), mth(items[k:])]
    return [*path(m - k, items[k:]), mth(items[:k])]


def proof(m: int, items: list[bytes], whole: bool = True) -> list[bytes]:
    if m == len(items):
        return [] if whole else [mth(items)]
    k = split(len(items))
    if m <= k:
        return [*proof(m, items[:k], whole), mth(items[k:])]
    return [*proof(m - k, items[k:], False), mth(items[:k])]


def test_the_roots_of_small_trees_are_these_hashes_of_hashes() -> None:
    def two(left: bytes, right: bytes) -> bytes:
        return sha256(b"\x01" + left + right).digest()

    a, b, c, d, e, f, g = (
        sha256(b"\x00" + body).digest() for body in (b"", b"\x00", b"b", b"cc", b"d", b"e" * 99, b"f")
    )
    drawn = {
        (a,): a,
        (a, b): two(a, b),
        (a, b, c): two(two(a, b), c),
        (a, b, c, d): two(two(a, b), two(c, d)),
        (a, b, c, d, e): two(two(two(a, b), two(c, d)), e),
        (a, b, c, d, e, f): two(two(two(a, b), two(c, d)), two(e, f)),
        (a, b, c, d, e, f, g): two(two(two(a, b), two(c, d)), two(two(e, f), g)),
    }
    for items, root in drawn.items():
        assert merkle.root(items) == mth(list(items)) == root
    assert merkle.root([a]).hex() == "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d"


def test_a_tree_without_leaves_has_the_root_of_nothing() -> None:
    assert Frontier().root == merkle.root([]) == sha256(b"").digest()


@given(st.integers(0, 300))
def test_a_frontier_comes_to_the_root_of_the_definition_with_few_peaks(count: int) -> None:
    tree = Frontier()
    for item in leaves(count):
        tree.add(item)
    assert (tree.root, tree.size) == (mth(leaves(count)), count)
    assert len(tree.peaks) == count.bit_count()
    assert [mth([leaf(number) for number in span]) for span in tree.spans] == tree.peaks
    assert sum(map(len, tree.spans)) == count


@given(st.integers(0, 100), st.integers(0, 100))
def test_a_tree_goes_on_from_its_peaks_alone(before: int, more: int) -> None:
    items = leaves(before + more)
    kept = Frontier()
    for item in items[:before]:
        kept.add(item)
    tree = Frontier(before, kept.peaks)
    for item in items[before:]:
        tree.add(item)
    assert tree.root == mth(items)
    assert kept.root == mth(items[:before])


def test_peaks_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="a tree of 6 leaves has 2 peaks, not 1"):
        Frontier(6, [leaf(1)])


@given(st.integers(1, 130), st.data())
def test_inclusion_is_the_path_of_the_definition_and_shows_that_leaf_at_that_place_alone(
    count: int, data: st.DataObject
) -> None:
    items = leaves(count)
    index = data.draw(st.integers(0, count - 1))
    found = inclusion(items, index)
    assert found == path(index, items)
    root = mth(items)
    assert includes(root, count, items[index], index, found)
    assert [place for place in range(count + 2) if includes(root, count, items[index], place, found)] == [index]
    assert not includes(root, count, leaf(-1), index, found)
    assert not includes(root, count, items[index], index, [*found, leaf(-1)])
    if found:
        assert not includes(root, count, items[index], index, found[:-1])
        at = data.draw(st.integers(0, len(found) - 1))
        assert not includes(root, count, items[index], index, [*found[:at], leaf(-1), *found[at + 1 :]])


@given(st.integers(1, 130), st.data())
def test_consistency_is_the_proof_of_the_definition_and_shows_nothing_else(count: int, data: st.DataObject) -> None:
    items = leaves(count)
    older = data.draw(st.integers(1, count))
    found = consistency(items, older)
    assert found == proof(older, items)
    before, after = mth(items[:older]), mth(items)
    assert is_consistent(older, before, count, after, found)
    assert not is_consistent(older, leaf(-1), count, after, found)
    assert not is_consistent(older, before, count, leaf(-1), found)
    assert not is_consistent(older, before, count, after, [*found, leaf(-1)])
    for at in range(len(found)):
        assert not is_consistent(older, before, count, after, [*found[:at], leaf(-1), *found[at + 1 :]])
        assert not is_consistent(older, before, count, after, found[:at] + found[at + 1 :])


@given(st.integers(1, 60), st.data())
def test_no_honest_path_makes_one_tree_out_of_another_that_parted_from_it(count: int, data: st.DataObject) -> None:
    items = leaves(count)
    older = data.draw(st.integers(1, count))
    other = data.draw(st.integers(0, older - 1))
    forged = [*items[:other], leaf(-1), *items[other + 1 :]]
    assert not is_consistent(older, mth(items[:older]), count, mth(forged), consistency(forged, older))


def test_what_is_not_in_a_tree_has_no_proof() -> None:
    for index in (-1, 3):
        with pytest.raises(ValueError, match="no leaf"):
            inclusion(leaves(3), index)
    for older in (0, 4):
        with pytest.raises(ValueError, match="no tree of"):
            consistency(leaves(3), older)
    assert not is_consistent(0, merkle.EMPTY, 3, mth(leaves(3)), [])
    assert not is_consistent(3, mth(leaves(3)), 2, mth(leaves(2)), [])


@pytest.mark.parametrize(("count", "steps"), [(10, 4), (1_000, 10), (100_000, 17)])
def test_a_path_has_about_log_n_steps(count: int, steps: int) -> None:
    assert len(inclusion(leaves(count), count // 2)) <= steps
