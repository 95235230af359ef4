"""What channels hold comes back as LangGraph's serializer has it, is kept once in a thread, and takes little room."""

from __future__ import annotations

import random
import sqlite3
from collections import deque
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import ormsgpack
import pytest
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.checkpoint.serde import jsonplus
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Send
from pydantic import BaseModel

import killick
from killick.adapters.langgraph import KillickSaver
from killick.adapters.langgraph.serialization import (
    DataSerializer,
    Packer,
    Unpacker,
    digest_of,
    inflated,
    items_of,
    renumbered,
)
from pages import ROOT

SERDE = JsonPlusSerializer()


class Color(Enum):
    RED = 1


class Ship(BaseModel):
    name: str
    color: Color = Color.RED


@dataclass
class Berth:
    number: int
    ship: Ship | None = None


class Point(NamedTuple):
    x: int
    y: int


class Items:
    """The items of a thread."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.known: dict[bytes, int] = {}

    def pack(self, value: Any) -> Any:
        packer = Packer(SERDE, self.known, len(self.frames))
        packed = packer.pack(value)
        self.frames += packer.new
        self.known |= packer.digests
        return packed

    def unpack(self, packed: Any) -> Any:
        return Unpacker(SERDE, self.frames.__getitem__, lambda number, snapshot: None).unpack(packed)


def anything(rng: random.Random, depth: int = 0) -> Any:
    """Some value that a channel may hold."""
    text = "".join(rng.choices('aé€😀\n"\\$ ', k=rng.choice([0, 3, 47, 48, 49, 300])))
    kinds: list[Any] = [
        None, True, rng.randrange(-(2**63), 2**64), rng.random(), float("inf"), text, text.encode(), (1, text), {1, 2},
        datetime(2026, 1, 2, tzinfo=UTC), date(2026, 1, 2), timedelta(3), Decimal("1.50"), UUID(int=7), Color.RED,
        deque([1, 2]), HumanMessage(text, id="h"), AIMessage(text), Document(text), Send("node", {"x": text}),
        {1: text}, [], {}, {"$ref": text}, {"$tuple": [1, 2]}, [[text] * 3] * 2, list(range(rng.choice([3, 300]))),
    ]  # fmt: skip
    if depth < 3 and rng.random() < 0.5:
        made = [anything(rng, depth + 1) for _ in range(rng.randrange(6))]
        return made if rng.random() < 0.5 else {f"k{place}": each for place, each in enumerate(made)}
    return rng.choice(kinds)


def test_any_value_comes_back_as_the_serializer_has_it() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    items, other = Items(), Items()
    for _ in range(300):
        value = anything(rng)
        expected = SERDE.loads_typed(SERDE.dumps_typed(value))
        packed = items.pack(value)
        assert repr(items.unpack(packed)) == repr(expected)
        numbers = {}
        for number in items_of(packed):
            packer = Packer(SERDE, other.known, len(other.frames))
            numbers[number] = packer.item(inflated(items.frames[number]))
            other.frames += packer.new
            other.known |= packer.digests
        assert repr(other.unpack(renumbered(packed, numbers))) == repr(expected)
    numbers_of = [items.known[digest_of(inflated(frame))] for frame in items.frames]
    assert numbers_of == list(range(len(items.frames)))


def test_what_was_said_before_is_named_and_not_said_again() -> None:
    items, said = Items(), list[Any]()
    for turn in range(50):
        said += [
            HumanMessage(f"question {turn} " * 20, id=f"h{turn}"),
            AIMessage(f"answer {turn} " * 50, id=f"a{turn}"),
        ]
        items.pack({"messages": [HumanMessage(f"question {turn} " * 20)]})
        packed = items.pack(said)
        assert items.unpack(packed) == said
        assert len(items.frames) == 3 * (turn + 1)
        assert len(packed) <= 3
        assert sum(len(part) for part in packed) < 100
    assert items.unpack(items.pack(said[10:])) == said[10:]
    assert len(items.frames) == 150


def drive(saver: Any, text: str, turns: int) -> int:
    """A conversation; returns how long its messages are, as the serializer writes them."""
    rng = random.Random(7)

    def part(length: int) -> str:
        at = rng.randrange(len(text) - length)
        return text[at : at + length]

    builder = StateGraph(MessagesState)
    builder.add_node(
        "bot", lambda state: {"messages": [AIMessage(part(1650), id=f"lc_run--{rng.getrandbits(128):032x}")]}
    )
    builder.add_edge(START, "bot")
    graph = builder.compile(checkpointer=saver)
    config: Any = {"configurable": {"thread_id": "1"}}
    for _ in range(turns):
        out = graph.invoke({"messages": [HumanMessage(part(120))]}, config)
    return len(SERDE.dumps_typed(out["messages"])[1])


def test_200_turns_of_2200_bytes_take_a_hundredth_of_their_room(tmp_path: Path) -> None:
    text = " ".join(" ".join(page.read_text().split()) for page in sorted((ROOT / "docs").glob("*.md")))
    with killick.open(str(tmp_path / "killick.db"), durability="process") as kd:
        said = drive(KillickSaver(kd), text, 200)
    ours = (tmp_path / "killick.db").stat().st_size
    connection = sqlite3.connect(tmp_path / "theirs.db", check_same_thread=False, isolation_level=None)
    connection.execute("PRAGMA synchronous = OFF")
    drive(SqliteSaver(connection), text, 50)
    connection.close()
    quarter = (tmp_path / "theirs.db").stat().st_size
    # Theirs grows with the square of the turns; a quarter of them is enough to know it.
    theirs = quarter * 16
    print(f"200 turns of {said / 200:.0f} bytes: {ours:,} bytes; SqliteSaver {theirs:,}, of {quarter:,} for 50 turns")
    assert 2_150 <= said / 200 <= 2_250
    assert ours * 100 <= theirs


def test_a_custom_type_in_a_store_is_not_imported(tmp_path: Path) -> None:
    planted = tmp_path / "planted"
    call = ormsgpack.packb(("os", "system", (f"touch {planted}",)))
    crafted = ormsgpack.packb(ormsgpack.Ext(jsonplus.EXT_CONSTRUCTOR_POS_ARGS, call))
    with killick.open(str(tmp_path / "killick.db")) as kd:
        KillickSaver(kd).serde.loads_typed(("msgpack", crafted))
    assert not planted.exists()
    JsonPlusSerializer().loads_typed(("msgpack", crafted))
    assert planted.exists(), "the attack works where nothing stops it"


@pytest.mark.parametrize("value", [Ship(name="Ada"), Berth(7, Ship(name="Ada")), Color.RED, Point(1, 2), [Berth(1)]])
def test_a_program_s_own_data_types_come_back_in_the_next_process(tmp_path: Path, value: Any) -> None:
    builder: Any = StateGraph(dict)
    builder.add_node("keep", lambda state: {"kept": value})
    builder.add_edge(START, "keep")
    config: Any = {"configurable": {"thread_id": "1"}}
    with KillickSaver(tmp_path / "killick.db") as saver:
        builder.compile(checkpointer=saver).invoke({"kept": None}, config)
    with KillickSaver(tmp_path / "killick.db") as saver:
        found = builder.compile(checkpointer=saver).get_state(config).values
    assert found == {"kept": value}
    assert type(found["kept"]) is type(value)


@pytest.mark.parametrize("name", ["subprocess.Popen", "killick.adapters.langgraph.serialization.inflated", "no.Such"])
def test_a_type_that_holds_no_data_comes_back_as_its_fields(name: str) -> None:
    module, _, kind = name.rpartition(".")
    crafted = ormsgpack.packb(ormsgpack.Ext(jsonplus.EXT_CONSTRUCTOR_SINGLE_ARG, ormsgpack.packb((module, kind, "x"))))
    assert DataSerializer().loads_typed(("msgpack", crafted)) == "x"
