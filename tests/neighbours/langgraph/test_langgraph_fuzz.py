"""Fuzzing of the serializer of channel values: a frame of a store becomes a value, or is refused as damaged."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from uuid import UUID

import ormsgpack
import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.types import Send

from fuzz.fuzzing import Target, bounded, hunt, known, tried
from killick.adapters.langgraph.serialization import _COMMON, SERDE, Packer, Unpacker
from killick.errors import ValueRefused
from seeds import repeats


@dataclass
class Berth:
    number: int
    ship: str = ""


def frames() -> Iterator[bytes]:
    """Frames of values of each kind, deflated and not."""
    for value in (
        HumanMessage("hello", id="h"),
        AIMessage("é " * 200, id="a", tool_calls=[{"name": "t", "args": {"x": 1}, "id": "1"}]),
        Send("node", {"x": [1, None]}), Berth(5, "Vela" * 30), {1: UUID(int=7), 2: Decimal("1.5")}, b"raw" * 50,
        {"many": [{"n": n, "text": "x" * 60} for n in range(20)]}, bytearray(b"x" * 60),
        datetime(2026, 1, 2, tzinfo=UTC),
    ):  # fmt: skip
        packer = Packer(SERDE, {}, 0)
        packed = packer.whole(value)
        yield from [packed] if isinstance(packed, bytes) else packer.new


def restored(data: bytes) -> None:
    """Restores a frame, and imports nothing for it."""
    loaded, asked = set(sys.modules), 0

    def frame_of(number: int) -> bytes:
        nonlocal asked
        asked += 1
        if asked > 100:
            raise ValueRefused("a test", "asks for no more items than it has")
        return data

    try:
        Unpacker(SERDE, frame_of, lambda number, snapshot: None).unpack([(0,), data])
    finally:
        foreign = {
            name for name in set(sys.modules) - loaded if not name.startswith(("langgraph", "langchain", "numpy"))
        }
        assert not foreign


TARGET = Target("langgraph_serializer", restored, lambda: list(frames()))


def test_frames_are_restored_and_what_failed_once_is_refused() -> None:
    for data in TARGET.seeds():
        restored(data)
    for path in known(TARGET.name):
        assert tried(TARGET, path.read_bytes()) is None, path


def test_a_frame_that_a_seed_makes_is_restored_or_refused() -> None:
    hunt(TARGET, repeats(1_500, 20_000))


def test_a_small_frame_that_inflates_to_a_huge_value_is_refused() -> None:
    work = zlib.compressobj(9, zlib.DEFLATED, -15, zdict=_COMMON)
    bomb = b"M" + work.compress(b"\xc6\x20\x00\x00\x00" + bytes(1 << 29)) + work.flush()
    with pytest.raises(ValueRefused, match="inflates"), bounded():
        restored(bomb)


def test_no_method_of_a_loaded_type_is_called_and_no_module_is_imported() -> None:
    for extension, told in (
        (3, (__name__, "Berth", "x", "__init_subclass__")),
        (3, ("langchain_core.messages", "HumanMessage", "/etc/hostname", "parse_file")),
        (3, ("builtins", "str", "x", "upper")),
        (2, ("antigravity", "webbrowser", {})),
    ):
        frame = b"m" + ormsgpack.packb(ormsgpack.Ext(extension, ormsgpack.packb(told)))
        value = Unpacker(SERDE, [frame].__getitem__, lambda number, snapshot: None).unpack((0,))
        assert value == told[2]
    assert "antigravity" not in sys.modules
