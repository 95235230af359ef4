"""A vector is a list that saves only what changed."""

from collections.abc import Collection

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from killick.errors import ValueBroken
from killick.model.chunks import Blob, unpack
from killick.model.vector import WIDTH, Vector


class Shelf:
    """Keeps pieces, and counts what is looked up."""

    def __init__(self) -> None:
        self.pieces: dict[bytes, Blob] = {}
        self.fetched = 0

    def put(self, pieces: list[Blob]) -> int:
        fresh = [piece for piece in pieces if piece.hash not in self.pieces]
        self.pieces.update((piece.hash, piece) for piece in fresh)
        return sum(len(piece.body or b"") for piece in fresh)

    def fetch(self, hashes: Collection[bytes]) -> dict[bytes, Blob]:
        self.fetched += len(hashes)
        return {hash_: self.pieces[hash_] for hash_ in hashes if hash_ in self.pieces}


@given(st.lists(st.integers(0, 1), max_size=40), st.integers(0, 3000))
def test_it_is_the_list_it_was_told_to_be(choices: list[int], grow: int) -> None:
    vector, expected, shelf = Vector(list[int]), [], Shelf()
    for turn, choice in enumerate(choices):
        for item in range(grow // (len(choices) or 1)):
            vector.append([item])
            expected.append([item])
        if choice and expected:
            place = (turn * 7919) % len(expected)
            vector.changing(place).append(turn)
            expected[place].append(turn)
        pieces: list[Blob] = []
        saved = vector.save(pieces)
        shelf.put(pieces)
        if choice:
            vector = Vector(list[int], saved, shelf.fetch)
            expected = [list(item) for item in expected]
        assert len(vector) == len(expected)
    assert list(vector) == expected
    assert vector[-5:] == expected[-5:]


def test_saving_after_growing_stores_only_what_is_new() -> None:
    vector, shelf = Vector(int), Shelf()
    for number in range(20_000):
        vector.append(number)
    pieces: list[Blob] = []
    vector.save(pieces)
    whole = shelf.put(pieces)
    for number in range(100):
        vector.append(number)
    pieces = []
    vector.save(pieces)
    assert shelf.put(pieces) < whole / 20


def test_opening_reads_nothing_and_looking_reads_one_path() -> None:
    vector, shelf, pieces = Vector(int), Shelf(), []
    for number in range(40_000):
        vector.append(number)
    saved = vector.save(pieces)
    shelf.put(pieces)
    opened = Vector(int, saved, shelf.fetch)
    assert shelf.fetched == 0
    assert opened[31_111] == 31_111
    assert shelf.fetched == saved.height + 1


def test_its_stored_form_is_an_ordinary_value() -> None:
    vector, shelf, pieces = Vector(int), Shelf(), []
    for number in range(WIDTH * WIDTH + 5):
        vector.append(number)
    saved = vector.save(pieces)
    shelf.put(pieces)
    assert unpack(msgspec.json.encode({"$ref": saved.root}), shelf.fetch) == list(range(WIDTH * WIDTH + 5))


def test_a_missing_piece_is_named() -> None:
    vector, pieces = Vector(int), []
    vector.append(1)
    saved = vector.save(pieces)
    with pytest.raises(ValueBroken, match="missing"):
        Vector(int, saved, lambda _: {})[0]


def test_an_index_out_of_range_is_an_index_error() -> None:
    with pytest.raises(IndexError):
        Vector(int)[0]
