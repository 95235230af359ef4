"""Values that share pieces are read once: what is alike in two of them is the same object, and as it was put in."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from killick.errors import ValueBroken
from killick.model.chunks import Blob, SharedReader, pack, unpack
from killick.model.codec import Erased
from seeds import repeats


class Pieces:
    """A store of pieces that counts what is fetched."""

    def __init__(self) -> None:
        self.known: dict[bytes, Blob] = {}
        self.fetched = 0

    def put(self, value: Any) -> bytes:
        packed = pack(value)
        self.known |= {blob.hash: blob for blob in packed.blobs}
        return packed.raw

    def __call__(self, hashes: Collection[bytes]) -> Mapping[bytes, Blob]:
        self.fetched += len(hashes)
        return {each: self.known[each] for each in hashes if each in self.known}


def talk(count: int) -> dict[str, Any]:
    said = [{"role": "user", "content": f"{at} " + "words and more words " * (at % 60)} for at in range(count)]
    return {"arguments": {"messages": said, "model": "m"}}


def test_what_is_alike_in_two_values_is_the_same_object() -> None:
    pieces = Pieces()
    raws = [pieces.put(talk(count)) for count in (80, 81)]
    sharing = SharedReader(pieces)
    old, new = (sharing.unpack(raw)["arguments"]["messages"] for raw in raws)
    assert (old, new) == (talk(80)["arguments"]["messages"], talk(81)["arguments"]["messages"])
    assert sum(one is other for one, other in zip(old, new, strict=False)) > 70


def test_a_conversation_that_grows_is_fetched_at_the_cost_of_what_is_new() -> None:
    pieces = Pieces()
    raws = [pieces.put(talk(count)) for count in range(1, 161)]
    sharing = SharedReader(pieces)
    sharing.expect(raws)
    once = pieces.fetched
    assert once == len(pieces.known)
    assert [len(sharing.unpack(raw)["arguments"]["messages"]) for raw in raws] == list(range(1, 161))
    assert pieces.fetched == once


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text()
    | st.binary(max_size=900)
    | st.text(min_size=500, max_size=900),
    lambda inner: (
        st.lists(inner, max_size=12) | st.dictionaries(st.text(max_size=8) | st.just("$ref"), inner, max_size=6)
    ),
    max_leaves=40,
)


@settings(max_examples=repeats(15, 60))
@given(st.lists(VALUES, min_size=1, max_size=4))
def test_values_read_as_they_do_alone(values: list[Any]) -> None:
    pieces = Pieces()
    raws = [pieces.put(value) for value in [*values, values, [values] * 3]]
    sharing = SharedReader(pieces)
    assert [sharing.unpack(raw) for raw in raws] == [unpack(raw, pieces) for raw in raws]


def test_what_was_erased_is_told_and_what_is_missing_is_broken() -> None:
    pieces = Pieces()
    raw = pieces.put({"letter": "x" * 3_000, "name": "Ada"})
    [digest] = [each for each, blob in pieces.known.items() if blob.codec == "text"]
    pieces.known[digest] = Blob(digest, "text", None)
    assert SharedReader(pieces).unpack(raw) == {"letter": Erased(digest), "name": "Ada"}
    del pieces.known[digest]
    with pytest.raises(ValueBroken, match="missing"):
        SharedReader(pieces).unpack(raw)
