"""How values are cut into pieces, what the pieces share, and what damage to them does."""

from __future__ import annotations

import json
import random
import string
from base64 import urlsafe_b64encode
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, date
from hashlib import sha256
from statistics import mean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from killick.errors import KillickError, ValueBroken, ValueErased, ValueRefused
from killick.model.chunks import (
    NODE_BYTES_MAX,
    PIECE_BYTES_MAX,
    PIECE_BYTES_MIN,
    Blob,
    Packed,
    check,
    children,
    pack,
    references,
    unpack,
)
from killick.model.codec import Erased
from killick.model.hashing import value_hash


class Shelf:
    """Pieces by their hash, and how often somebody came to fetch some."""

    def __init__(self, blobs: Iterable[Blob] = ()) -> None:
        self.blobs = {blob.hash: blob for blob in blobs}
        self.fetches = 0

    def __call__(self, hashes: Collection[bytes]) -> Mapping[bytes, Blob]:
        self.fetches += 1
        return {each: self.blobs[each] for each in hashes if each in self.blobs}

    def add(self, codec: str, body: bytes) -> str:
        blob = Blob(value_hash(codec, body), codec, body)
        self.blobs[blob.hash] = blob
        return name(blob.hash)

    def erase(self, choose: Callable[[Blob], bool]) -> bytes:
        found = next(blob for blob in self.blobs.values() if choose(blob))
        self.blobs[found.hash] = Blob(found.hash, found.codec, None)
        return found.hash


def name(digest: bytes) -> str:
    return urlsafe_b64encode(digest).decode().rstrip("=")


def through(obj: object, kind: Any = Any) -> Any:
    packed = pack(obj)
    return unpack(packed.raw, Shelf(packed.blobs), kind)


def exactly(value: Any) -> Any:
    """A form in which only what is the same in every respect is equal."""
    kind = type(value)
    if kind in (list, tuple):
        return kind.__name__, [exactly(item) for item in value]
    if kind in (set, frozenset):
        return kind.__name__, sorted(repr(exactly(item)) for item in value)
    if kind is dict:
        return "dict", [(exactly(key), exactly(item)) for key, item in value.items()]
    return kind.__name__, value.hex() if kind in (float, bytes, bytearray) else repr(value)


def words(seed: int, count: int) -> str:
    """Text that is the same on every machine."""
    chance = random.Random(seed)
    known = ["".join(chance.choices(string.ascii_lowercase, k=chance.randint(2, 9))) for _ in range(500)]
    return " ".join(chance.choices(known, k=count // 4))[:count]


# The bytes -----------------------------------------------------------------------------------------

CONVERSATION = [{"role": "user", "content": f"{turn} " * 300} for turn in range(40)]
LARGE = {
    "conversation": CONVERSATION,
    "text": "".join(f"{number:x}" for number in range(20_000)),
    "blob": bytes(range(256)) * 3,
    "table": {f"key {number}": number for number in range(200)},
    "numbers": (2**100, 0.5, None, -0.0),
    "$dollar": {"x" * 2000: ("y" * 600, {"z" * 513})},
}
PARTS = {"a": list(range(90)), "b": list(range(90, 180)), "c": list(range(400, 600, 2))}
LARGE_RAW = (
    b'{"$map":[["conversation",{"$list":["tQEY9PkgdcX_KZ7Lt_2z2KVQGGcTfw9RmrE_0VY7NuQ","zvJgJN8YQDInwU092V'
    b'RXXuHulG5WBJ6Z0rIDwCBneRU","FoC2z4yPCGaxOx3R7AZA4nG8rrEJIDErrNcaLIc8e00","9NuyHdQ4k8TqtItmlBsqqF_9yV'
    b'86CIKtopP4fp-ngro","z0CP3DP1IfTxk6tdv_SJ4F4dKI2PVBuukI1FIGnksiQ"]}],["text",{"$text":["Qu1riyM7ebZVv'
    b't089NIZy19jy1Xlsrn74UA5UTal8es","vQIkWvlu1OeQlevBwva99C1cRCKMwDNqbsMBhuU-Tx8","Y_-P1LVuZ4GTASAwVbdWy'
    b'8TF0-TkXR7cekC9bTSxfjM","Q2cf4r-7oP19Io2aDUmSKaptu7P8ISCbx7fEjFh8AYU","wh0pyuXOB-Sj6q0bZWL3QAr52RolL'
    b'kgfs1V883T--8M"]}],["blob",{"$bytes":{"$blob":["jQ1bGOwa7wxXXLzgJXj2rSbW461qpwHz2WtW6L4KPjM"]}}],["t'
    b'able",{"$map":{"$list":["9PKyCBd4GCvCB1AZC3aGOTX1a411hGyFDi-hzCfUEHk","VSvJLdnJM3xAHkq0Js0itaIWGSrS4'
    b'a4NcR5Yhqo9szU","9aGPfD0QuJ-D9mVVJ8uJS9I3AZy3KANVWs7VOPHhzpM","fALnI1eoemRraAgH-gNPFPYM2yWDGdb4XK5fN'
    b'eylQFA"]}}],["numbers",{"$tuple":[{"$int":"10000000000000000000000000"},0.5,null,-0.0]}],["$dollar",'
    b'{"$map":{"$list":["SB_guJNtWZVMy6nWNhjZRlsZOdHFB2jeuvEb-GSxCHM"]}}]]}'
)
LARGE_BLOBS = "8d588d8436c03b78c8dc5bfa4152066ef3d5716f2da4438574f29cd40ce3f183"


def test_small_values_are_json_with_tags_and_have_no_pieces() -> None:
    packed = pack({"name": "ann", "n": [1, 1.0, -0.0, True, None], "t": (1, b"\xff"), 1: {"a"}, "é": "✓"})
    assert packed == Packed(
        '{"$map":[["name","ann"],["n",[1,1.0,-0.0,true,null]],["t",{"$tuple":[1,{"$bytes":"/w=="}]}],'
        '[1,{"$set":["a"]}],["é","✓"]]}'.encode(),
        (),
    )


def test_a_large_value_has_exactly_these_bytes_and_hashes() -> None:
    packed = pack(LARGE)
    assert packed.raw == LARGE_RAW
    assert sha256(b"".join(blob.hash for blob in packed.blobs)).hexdigest() == LARGE_BLOBS
    assert unpack(packed.raw, Shelf(packed.blobs)) == LARGE


def test_each_kind_of_reference_is_written_like_this() -> None:
    text, blob = "t" * 600, b"b" * 600
    assert pack(text).raw == b'{"$text":["Y3zc-kiQnTNOWtOq7MPWDBRXzmoMdD_ZCQVM_JUvr2Y"]}'
    assert pack(blob).raw == b'{"$bytes":{"$blob":["ctoF9T0MFpoFzz0Kggw4-t6cGbsB93Q4UcfmIPw8XBE"]}}'
    assert pack(list(range(300))).raw == (
        b'{"$list":["Q_vH0C7k0KyavAvcp-nA8jdSJn6Vd05wMGHUcRAqP7c","nRhmw3h-F0Utqyocv2MNXXKksiMthpWRBRCJuLPR1-E'
        b'","G1hq_B5hq5Hk3CDPSr4spiZFnEthBxD0B8EeszZAj_U","TPU5eYgpgPxu5EIyVQYgx3y17gOhsglmRyBymt8zIWc","6zesv'
        b'5FBfnx-ClNMoeJW2gkyhtN-yh1mazAP-j08vlc","NqolLtH42DE5Ah9ySLhYUy5iDw6ub04oAMSdCTUJfng"]}'
    )
    assert pack(PARTS).raw == (
        b'{"a":{"$ref":"EfvGEZBOQIs910H3fc2tqeyjsGTKGjMtYMGdIm1LD6g"},"b":{"$ref":"6QuUnG-i5jqOFIdVl6jnMXt-57J'
        b'XtHfI2Z92Nt6ykMs"},"c":{"$ref":"jxUff2AdKQM8OqR0dWN3YP0HfT8rOnehtoxh50C9MJo"}}'
    )


# Round trips ---------------------------------------------------------------------------------------

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(2**200), max_value=2**200)
    | st.floats()
    | st.text()
    | st.text(alphabet=st.characters(), max_size=5)
    | st.sampled_from(["$ref", "$text", "\ud800", "\udfff!", "x" * 600, "ß" * 400, "\x00" * 100])
    | st.binary()
    | st.binary().map(bytearray)
    | st.decimals()
    | st.uuids()
    | st.dates()
    | st.times(timezones=st.none() | st.timezones() | st.just(UTC))
    | st.datetimes(timezones=st.none() | st.timezones() | st.just(UTC))
    | st.timedeltas()
    | st.builds(lambda text, count: text * count, st.text(), st.integers(100, 3000))
    | st.builds(lambda body, count: body * count, st.binary(), st.integers(100, 3000))
)
keys = st.recursive(
    st.none()
    | st.integers()
    | st.text()
    | st.sampled_from(["$ref", "$", "$map", "\ud800", "k" * 1200])
    | st.binary()
    | st.uuids()
    | st.dates()
    | st.floats(allow_nan=False),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)


def weight(value: Any) -> int:
    inside = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, list | tuple | set | frozenset)
        else ()
    )
    return 1 + sum(map(weight, inside))


def repeated(items: list[Any], count: int) -> list[Any]:
    """A long list, but not of long lists of long lists."""
    return items * min(count, 1 + 2_000 // weight(items))


values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner)
        | st.builds(repeated, st.lists(inner, max_size=4), st.integers(1, 200))
        | st.lists(inner).map(tuple)
        | st.sets(keys)
        | st.frozensets(keys)
        | st.dictionaries(keys, inner)
        | st.dictionaries(st.text(), inner)
    ),
    max_leaves=12,
)


@given(values)
def test_every_value_comes_back_exactly_as_it_was(value: Any) -> None:
    packed = pack(value)
    shelf = Shelf(packed.blobs)
    back = unpack(packed.raw, shelf)
    assert exactly(back) == exactly(value)
    assert pack(back) == packed

    assert len(packed.raw) <= NODE_BYTES_MAX
    assert all(map(check, packed.blobs))
    stored: set[bytes] = set()
    for blob in packed.blobs:
        assert blob.hash not in stored
        assert stored.issuperset(children(blob))
        stored.add(blob.hash)
    assert stored.issuperset(references(packed.raw))


def named_in(node: Any) -> set[str]:
    """The hashes a JSON tree names, found the slow way."""
    if isinstance(node, list):
        return set().union(*map(named_in, node))
    if not isinstance(node, dict):
        return set()
    if set(node) <= {"$ref", "$list", "$text", "$blob"} and len(node) == 1:
        [found] = node.values()
        return {found} if isinstance(found, str) else set(found)
    return set().union(*map(named_in, node.values()))


tricky = st.sampled_from(['{"$ref":"' + "A" * 43 + '"}', "$ref", '"$list":["', "{", '\\"{', "B" * 43])


@given(st.recursive(tricky, lambda inner: st.lists(inner, max_size=40) | st.dictionaries(tricky, inner)))
def test_references_are_found_and_nothing_else_is_taken_for_one(value: Any) -> None:
    packed = pack(value)
    assert through(value) == value
    for body in [packed.raw, *(blob.body or b"" for blob in packed.blobs if blob.codec == "json")]:
        assert set(map(name, references(body))) == named_in(json.loads(body))


def test_pieces_of_text_end_between_characters() -> None:
    text = "".join(random.Random(7).choices("aéü漢字🙂 \n", k=60_000))
    packed = pack(text)
    pieces = [blob.body for blob in packed.blobs if blob.codec == "text" and blob.body is not None]
    assert "".join(piece.decode() for piece in pieces) == text
    assert len(pieces) > 10


TABLE = "".join(f"{row * 7919 % 10_007},2026-01-{row % 28 + 1:02},EUR\n" for row in range(20_000))


# Sharing -------------------------------------------------------------------------------------------


def costs(states: Iterable[Any]) -> list[tuple[int, int]]:
    """What each state adds to those before it: bytes of new pieces that hold text, and of all others."""
    known: set[bytes] = set()
    found: list[tuple[int, int]] = []
    for state in states:
        fresh = [blob for blob in pack(state).blobs if blob.hash not in known]
        known.update(blob.hash for blob in fresh)
        text = sum(len(blob.body or b"") for blob in fresh if blob.codec == "text")
        found.append((text, sum(len(blob.body or b"") for blob in fresh) - text))
    return found[1:]


def messages(count: int, length: int) -> list[dict[str, str]]:
    whole = words(11, count * length)
    cut = (whole[at : at + length] for at in range(0, count * length, length))
    return [{"role": ("user", "assistant")[turn % 2], "content": content} for turn, content in enumerate(cut)]


def test_a_message_more_costs_little_more_than_the_message() -> None:
    talk = messages(140, 5000)
    added = costs(talk[:count] for count in range(40, 141))
    assert {text for text, _ in added} == {5000}
    assert mean(nodes for _, nodes in added) < 700
    assert max(nodes for _, nodes in added) < 4000


def test_a_message_more_and_the_oldest_less_costs_little_more_than_the_message() -> None:
    talk = messages(140, 5000)
    added = costs(talk[first : first + 40] for first in range(100))
    assert {text for text, _ in added} == {5000}
    assert mean(nodes for _, nodes in added) < 1000


@pytest.mark.slow
def test_short_messages_share_too() -> None:
    talk = messages(300, 200)
    added = costs(talk[:count] for count in range(100, 300))
    assert mean(nodes for _, nodes in added) < 200 + 1200


def test_a_text_that_grows_costs_what_it_grew_by_and_a_piece() -> None:
    text = words(3, 300_000)
    added = costs(text[:length] for length in range(200_000, 300_001, 5000))
    assert mean(cost for cost, _ in added) < 5000 + 6000
    assert mean(nodes for _, nodes in added) < 1000


@pytest.mark.parametrize("change", [lambda text: "new " + text, lambda text: text[100:], str.strip])
def test_a_text_that_changed_in_front_shares_the_rest(change: Callable[[str], str]) -> None:
    text = " " + words(3, 200_000)
    [(cost, nodes)] = costs([text, change(text)])
    assert cost < 2 * PIECE_BYTES_MAX
    assert nodes < 2000


def test_a_table_that_changed_in_front_shares_the_rest() -> None:
    [(cost, _)] = costs([TABLE, "total,date,currency\n" + TABLE])
    assert cost < 3 * PIECE_BYTES_MAX


def test_a_key_of_a_large_dict_costs_a_chunk_or_two() -> None:
    table = {f"key {number}": {"count": number, "name": f"name {number}"} for number in range(300)}
    added = costs([table] + [table | {f"key {number}": "changed"} for number in range(0, 300, 10)])
    assert mean(nodes for _, nodes in added) < 2000


def test_equal_parts_are_stored_once() -> None:
    part = {"text": words(5, 3000), "rows": list(range(1000))}
    once = sum(len(blob.body or b"") for blob in pack([part]).blobs)
    twice = sum(len(blob.body or b"") for blob in pack([part, {"again": part}]).blobs)
    assert twice < once + 500


@pytest.mark.gate(1)
@pytest.mark.parametrize("item", [0, 7, None, "", "same", "x" * 300, {"a": "y" * 400}, [1, 2, 3], "é" * 100])
def test_a_hundred_thousand_equal_items_become_few_pieces(item: Any) -> None:
    packed = pack([item] * 100_000)
    assert len(packed.blobs) < 60
    assert sum(len(blob.body or b"") for blob in packed.blobs) < 100_000
    assert unpack(packed.raw, Shelf(packed.blobs)) == [item] * 100_000


@pytest.mark.parametrize(
    "body",
    [
        words(1, 400_000).encode(),
        random.Random(1).randbytes(400_000),
        TABLE.encode(),
        json.dumps([{"id": row, "ok": row % 3 == 0} for row in range(12_000)]).encode(),
        ("".join(random.Random(2).choices([chr(0x4E00 + n) for n in range(3000)], k=120_000))).encode(),
    ],
    ids=["words", "random", "csv", "json", "chinese"],
)
def test_pieces_are_about_four_kilobytes_of_whatever_is_cut(body: bytes) -> None:
    sizes = [len(blob.body or b"") for blob in pack(body).blobs if blob.codec == "bytes"]
    assert 2000 < mean(sizes) < 9000
    assert max(sizes) <= PIECE_BYTES_MAX
    assert min(sizes[:-1]) >= PIECE_BYTES_MIN


def test_what_has_no_place_to_cut_is_cut_all_the_same() -> None:
    packed = pack(b"\x00" * 1_000_000)
    assert len(packed.blobs) < 10
    assert unpack(packed.raw, Shelf(packed.blobs)) == b"\x00" * 1_000_000


# Fetching ------------------------------------------------------------------------------------------


def test_a_small_value_fetches_nothing() -> None:
    shelf = Shelf()
    assert unpack(pack({"a": (1, 2)}).raw, shelf) == {"a": (1, 2)}
    assert shelf.fetches == 0


def test_pieces_are_fetched_level_by_level() -> None:
    talk = messages(140, 1000)
    packed = pack({"messages": talk, "again": talk})
    shelf = Shelf(packed.blobs)
    assert unpack(packed.raw, shelf)["again"] == talk
    assert shelf.fetches <= 5 < len(packed.blobs)


def test_a_missing_piece_is_named() -> None:
    packed = pack(LARGE)
    for blob in packed.blobs:
        shelf = Shelf(packed.blobs)
        del shelf.blobs[blob.hash]
        with pytest.raises(ValueBroken) as caught:
            unpack(packed.raw, shelf)
        assert (caught.value.digest, caught.value.reason) == (blob.hash, "missing")


# Erasing -------------------------------------------------------------------------------------------


@dataclass
class Said:
    role: str
    content: str


def test_where_a_text_was_erased_stands_a_marker() -> None:
    packed = pack([{"role": "user", "content": "x" * 600}, {"role": "user", "content": words(1, 50_000)}])
    shelf = Shelf(packed.blobs)
    first = shelf.erase(lambda blob: blob.codec == "text" and len(blob.body or b"") == 600)
    second = shelf.erase(lambda blob: blob.codec == "text" and blob.body is not None)
    assert unpack(packed.raw, shelf) == [
        {"role": "user", "content": Erased(first)},
        {"role": "user", "content": Erased(second)},
    ]


def test_a_declared_type_cannot_be_made_of_erased_pieces() -> None:
    packed = pack([Said("user", "x" * 600)])
    shelf = Shelf(packed.blobs)
    erased = shelf.erase(lambda blob: blob.codec == "text")
    for kind in (list[Said], list[Any]):
        with pytest.raises(ValueErased) as caught:
            unpack(packed.raw, shelf, kind)
        assert caught.value.digest == erased


@pytest.mark.parametrize("kind", [list, tuple, set, frozenset])
def test_where_a_part_of_a_list_was_erased_stands_one_marker(kind: type) -> None:
    packed = pack(kind(range(2000)))
    shelf = Shelf(packed.blobs)
    erased = shelf.erase(lambda blob: (blob.body or b"").startswith(b"["))
    back = unpack(packed.raw, shelf)
    assert type(back) is kind
    assert Erased(erased) in back
    assert 0 < len([item for item in back if item != Erased(erased)]) < 2000


def test_where_a_part_of_a_dict_was_erased_stands_one_marker() -> None:
    table = {number: f"name {number}" for number in range(2000)}
    packed = pack(table)
    shelf = Shelf(packed.blobs)
    erased = Erased(shelf.erase(lambda blob: (blob.body or b"").startswith(b"[")))
    back = unpack(packed.raw, shelf)
    assert back.pop(erased) == erased
    assert back.items() < table.items()


def test_an_erased_node_hides_all_below_it_and_an_erased_payload_its_tag() -> None:
    packed = pack({"a": list(range(90)), "b": list(range(90, 180)), "c": list(range(400, 600, 2)), "d": 10**5000})
    shelf = Shelf(packed.blobs)
    number = shelf.erase(lambda blob: blob.codec == "text")
    part = shelf.erase(lambda blob: (blob.body or b"").startswith(b"[0,1,2"))
    back = unpack(packed.raw, shelf)
    assert (back["a"], back["d"]) == (Erased(part), Erased(number))
    assert back["b"] == list(range(90, 180))


def test_a_marker_that_is_stored_again_comes_back_and_still_fits_no_type() -> None:
    assert pack([Erased(b"\x01" * 32)]).raw == b'[{"$erased":"' + b"01" * 32 + b'"}]'
    assert through([Erased(b"\x01" * 32)]) == [Erased(b"\x01" * 32)]
    with pytest.raises(ValueErased):
        through([Erased(b"\x01" * 32)], list[Any])


# Damage --------------------------------------------------------------------------------------------


def test_a_piece_is_checked_against_its_hash() -> None:
    [blob] = pack("x" * 600).blobs
    assert check(blob)
    assert not check(Blob(blob.hash, blob.codec, b"y" * 600))
    assert not check(Blob(blob.hash, "bytes", blob.body))
    assert check(Blob(blob.hash, blob.codec, None))


def test_a_codec_of_another_build_is_not_guessed_at() -> None:
    [blob] = pack("x" * 600).blobs
    sealed = Blob(blob.hash, "sealed", b"...")
    with pytest.raises(ValueBroken, match="codec 'sealed' is not known"):
        unpack(pack("x" * 600).raw, Shelf([sealed]))
    with pytest.raises(ValueBroken, match="codec 'sealed' is not known"):
        children(sealed)


def test_only_json_has_children() -> None:
    packed = pack(["x" * 600, b"y" * 600, "z" * 600, *range(300)])
    assert {blob.codec: bool(children(blob)) for blob in packed.blobs if blob.codec != "json"} == {
        "text": False,
        "bytes": False,
    }
    assert children(Blob(b"h" * 32, "json", None)) == []


MISSING = name(b"\x00" * 32)


@pytest.mark.parametrize(
    "raw",
    [
        "",
        "nonsense",
        '{"$nothing":1}',
        '{"$ref":"short"}',
        '{"$ref":5}',
        f'{{"$ref":["{MISSING}"]}}',
        f'{{ "$ref": "{MISSING}" }}',
        '[{"$ref":null}]',
        '{"$list":5}',
        '{"$list":[5]}',
        '{"$text":{}}',
        '{"$blob":"x"}',
        '{"$tuple":5}',
        '{"$tuple":"ab"}',
        '{"$map":[1]}',
        '{"$map":[[1]]}',
        '{"$map":[[[],1]]}',
        '{"$map":{"a":1}}',
        '{"$int":"xyz"}',
        '{"$int":5}',
        '{"$bytes":"@@@@"}',
        '{"$str":"AA"}',
        '{"$float":"big"}',
        '{"$decimal":"x"}',
        '{"$uuid":"1"}',
        '{"$date":"today"}',
        '{"$datetime":"2026-01-01T00:00:00[../../etc/passwd]"}',
        '{"$timedelta":"1"}',
        '{"$timedelta":{"$int":"ffffffffffffffffffffffffff"}}',
        '{"$secret":"zz"}',
        '{"$erased":"zz"}',
        "[" * 100_000,
        '{"$tuple":[' * 5000 + "]}" * 5000,
        '{"a":' * 100_000 + "1" + "}" * 100_000,
    ],
    ids=lambda raw: raw[:40],
)
def test_a_wrong_structure_is_broken_and_nothing_else(raw: str) -> None:
    with pytest.raises(ValueBroken):
        unpack(raw.encode(), Shelf())


def test_a_time_zone_this_machine_does_not_know_is_asked_for() -> None:
    with pytest.raises(ValueRefused, match="install the tzdata package"):
        unpack(b'{"$datetime":"2026-01-01T00:00:00+00:00[Mars/Olympus]"}', Shelf())


@pytest.mark.parametrize(
    ("codec", "body", "raw"),
    [
        ("text", b"x", '{"$ref":"%s"}'),
        ("json", b'{"a":1}', '{"$list":["%s"]}'),
        ("json", b'{"$list":5}', '{"$list":["%s"]}'),
        ("text", b"x", '{"$list":["%s"]}'),
        ("json", b'"x"', '{"$text":["%s"]}'),
        ("bytes", b"x", '{"$text":["%s"]}'),
        ("text", b"\xff", '{"$text":["%s"]}'),
        ("text", b"x", '{"$blob":["%s"]}'),
        ("json", b"", '[{"$ref":"%s"}]'),
    ],
)
def test_a_piece_of_the_wrong_kind_is_broken(codec: str, body: bytes, raw: str) -> None:
    shelf = Shelf()
    with pytest.raises(ValueBroken):
        unpack((raw % shelf.add(codec, body)).encode(), shelf)


@pytest.mark.parametrize("body", ['{"$ref":"%s"}', '[{"$ref":"%s"}]', '{"$list":["%s"]}', '{"$text":["%s"]}'])
def test_pieces_that_name_each_other_for_ever_are_broken(body: str) -> None:
    forged = Blob(b"\x07" * 32, "json", (body % name(b"\x07" * 32)).encode())
    with pytest.raises(ValueBroken):
        unpack(forged.body or b"", Shelf([forged]))


def test_pieces_nested_without_end_are_broken() -> None:
    shelf = Shelf()
    raw = "1"
    for _ in range(3000):
        raw = f'[{{"$ref":"{shelf.add("json", raw.encode())}"}}]'
    with pytest.raises(ValueBroken, match="too deeply"):
        unpack(raw.encode(), shelf)


@given(st.data())
def test_damaged_bytes_raise_our_own_errors_or_nothing(data: st.DataObject) -> None:
    packed = pack([LARGE["numbers"], words(1, 9000), list(range(400)), {1: date(2026, 1, 1), "$": {b"x"}}])
    shelf = Shelf(packed.blobs)
    bodies = [packed.raw, *(blob.body or b"" for blob in packed.blobs)]
    chosen = data.draw(st.integers(0, len(bodies) - 1))
    body = bytearray(bodies[chosen])
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    if chosen:
        blob = packed.blobs[chosen - 1]
        shelf.blobs[blob.hash] = Blob(blob.hash, blob.codec, bytes(body))
    with suppress(KillickError):
        unpack(packed.raw if chosen else bytes(body), shelf)
