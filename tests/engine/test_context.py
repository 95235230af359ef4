"""`run.context` is read-only by construction: whatever it holds, and of whatever type it is declared."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import pydantic
import pytest

import killick
from killick.engine.readonly import document, read_only
from killick.errors import ContextReadOnly
from killick.model.chunks import through_codec
from killick.model.codec import digest

T = TypeVar("T")


class Bag(dict[str, int]):
    """Somebody's own dict."""


@dataclasses.dataclass
class Line:
    what: str
    tags: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Fixed:
    parts: list[int]


SHARED = Fixed([1])


@dataclasses.dataclass
class Plain:
    total: int = 0
    lines: list[Line] = dataclasses.field(default_factory=lambda: [Line("a", ["x"])])
    by_name: dict[str, Line] = dataclasses.field(default_factory=lambda: {"b": Line("b")})
    fixed: Fixed = SHARED


@dataclasses.dataclass(slots=True)
class Slotted:
    total: int = 0
    lines: list[Line] = dataclasses.field(default_factory=lambda: [Line("a", ["x"])])


@dataclasses.dataclass(slots=True, frozen=True)
class Frozen:
    total: int = 0
    lines: list[Line] = dataclasses.field(default_factory=lambda: [Line("a", ["x"])])


@dataclasses.dataclass
class Boxed(Generic[T]):
    total: int = 0
    lines: list[T] = dataclasses.field(default_factory=list)


class Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    total: int = 0
    lines: list[Line] = pydantic.Field(default_factory=lambda: [Line("a", ["x"])])
    _hidden: int = 3


class Struct(msgspec.Struct, tag=True, rename="camel"):
    total: int = 0
    lines: list[Line] = msgspec.field(default_factory=lambda: [Line("a", ["x"])])


class Hard(msgspec.Struct, frozen=True):
    total: int = 0
    lines: list[Line] = msgspec.field(default_factory=lambda: [Line("a", ["x"])])


class Pair(NamedTuple):
    first: list[int]
    second: int


TYPED = [Plain, Slotted, Frozen, Model, Struct, Hard]


def assigns(target: Any, name: str = "total", value: Any = 9) -> Callable[[], Any]:
    return lambda: setattr(target, name, value)


def changes_of(built: Any) -> list[Callable[[], Any]]:
    """Ways to change a typed context in place, from its fields down to what they hold."""
    first = built.lines[0]
    return [
        assigns(built),
        assigns(built, "other"),
        lambda: delattr(built, "total"),
        lambda: built.lines.append(1),
        lambda: built.lines.__setitem__(0, 1),
        lambda: first.tags.clear(),
        assigns(first, "what"),
        lambda: delattr(first, "what"),
    ]


@pytest.mark.parametrize("kind", TYPED)
def test_a_typed_context_refuses_every_change_in_place_and_names_the_entry(kind: Any) -> None:
    built = read_only(kind())
    for number, change in enumerate(changes_of(built)):
        with pytest.raises(ContextReadOnly) as refused:
            change()
        entry = "other" if number == 1 else "total" if number in (0, 2) else "lines"
        assert str(refused.value) == f"run.context is read-only; change it with run.update({entry}=…)"
    assert built == kind()


@pytest.mark.parametrize("kind", TYPED)
def test_a_typed_context_still_passes_for_what_it_is(kind: Any) -> None:
    built, plain = read_only(kind()), kind()
    assert isinstance(built, kind)
    assert built.__class__ is kind
    assert (built == plain, plain == built, repr(built)) == (True, True, repr(plain))
    assert digest(built) == digest(plain)
    assert through_codec(built) == through_codec(plain)


@pytest.mark.parametrize("kind", TYPED)
def test_copies_of_a_typed_context_are_plain_and_can_be_changed(kind: Any) -> None:
    built = read_only(kind())
    shallow, deep = copy.copy(built), copy.deepcopy(built)
    assert (type(shallow), type(deep), type(deep.lines), type(deep.lines[0])) == (kind, kind, list, Line)
    deep.lines[0].tags.append("y")
    deep.lines.append(Line("z"))
    assert built == kind()


def test_the_ways_of_each_library_to_copy_give_plain_objects() -> None:
    replaced = dataclasses.replace(read_only(Plain()), total=2)
    assert (type(replaced), replaced.total) == (Plain, 2)
    modelled = read_only(Model(more=[1])).model_copy(update={"total": 2}, deep=True)
    assert (type(modelled), type(modelled.lines), modelled.total) == (Model, list, 2)
    modelled.lines.append(Line("b"))
    modelled._hidden = 4
    assert dataclasses.asdict(read_only(Plain())) == dataclasses.asdict(Plain())
    assert read_only(Model()).model_dump_json() == Model().model_dump_json()
    assert msgspec.json.encode(read_only(Struct())) == msgspec.json.encode(Struct())
    assert msgspec.to_builtins(read_only(Plain())) == msgspec.to_builtins(Plain())


def test_what_a_model_has_beside_its_fields_cannot_be_changed_either() -> None:
    built = read_only(Model(more=[1]))
    with pytest.raises(ContextReadOnly):
        built.more.append(2)
    with pytest.raises(ContextReadOnly):
        built.model_extra["more"] = 1
    with pytest.raises(ContextReadOnly):
        built._hidden = 4


def test_a_default_that_a_class_shares_stays_as_it_is() -> None:
    built = read_only(Plain())
    with pytest.raises(ContextReadOnly, match=r"fixed=…"):
        built.fixed.parts.append(2)
    assert (type(SHARED), type(SHARED.parts), built.fixed is SHARED) == (Fixed, list, False)


def test_a_generic_context_is_read_only_too() -> None:
    built = read_only(Boxed[int](lines=[1]))
    with pytest.raises(ContextReadOnly):
        built.lines.append(2)
    assert built == Boxed(lines=[1])


HELD: dict[str, Any] = {
    "items": [1, {"a": [2]}],
    "names": {"a": {"b": 1}},
    "seen": {1, 2},
    "raw": bytearray(b"ab"),
    "pair": (1, [2]),
}

CHANGES: list[tuple[str, Callable[[Any], Any]]] = [
    ("x", lambda c: c.__setitem__("x", 1)),
    ("x", lambda c: setattr(c, "x", 1)),
    ("items", lambda c: c.__delitem__("items")),
    ("items", lambda c: delattr(c, "items")),
    ("items", lambda c: c.pop("items")),
    ("name", lambda c: c.popitem()),
    ("x", lambda c: c.update(x=1)),
    ("x", lambda c: c.update({"x": 1})),
    ("name", lambda c: c.update([("x", 1)])),
    ("x", lambda c: c.setdefault("x", 1)),
    ("name", lambda c: c.clear()),
    ("x", lambda c: c.__ior__({"x": 1})),
    ("items", lambda c: c["items"].append(1)),
    ("items", lambda c: c["items"].extend([1])),
    ("items", lambda c: c["items"].insert(0, 1)),
    ("items", lambda c: c["items"].pop()),
    ("items", lambda c: c["items"].remove(1)),
    ("items", lambda c: c["items"].sort()),
    ("items", lambda c: c["items"].reverse()),
    ("items", lambda c: c["items"].clear()),
    ("items", lambda c: c["items"].__iadd__([1])),
    ("items", lambda c: c["items"].__imul__(2)),
    ("items", lambda c: c["items"].__setitem__(slice(None), [])),
    ("items", lambda c: c["items"].__delitem__(0)),
    ("items", lambda c: c["items"][1]["a"].append(1)),
    ("items", lambda c: c["items"][1].update(b=1)),
    ("names", lambda c: c["names"]["a"].__setitem__("b", 2)),
    ("names", lambda c: c.names["a"].pop("b")),
    ("seen", lambda c: c["seen"].add(3)),
    ("seen", lambda c: c["seen"].discard(1)),
    ("seen", lambda c: c["seen"].update({3})),
    ("seen", lambda c: c["seen"].__ior__({3})),
    ("seen", lambda c: c["seen"].clear()),
    ("raw", lambda c: c["raw"].append(1)),
    ("raw", lambda c: c["raw"].__setitem__(0, 1)),
    ("pair", lambda c: c["pair"][1].append(1)),
]


@pytest.mark.parametrize(("entry", "change"), CHANGES)
def test_an_untyped_context_refuses_every_change_in_place(entry: str, change: Callable[[Any], Any]) -> None:
    built = document(HELD)
    with pytest.raises(ContextReadOnly) as refused:
        change(built)
    assert str(refused.value) == f"run.context is read-only; change it with run.update({entry}=…)"
    assert built == HELD


def test_an_untyped_context_is_stored_compared_copied_and_written_as_ever() -> None:
    built = document(HELD)
    assert digest(built) == digest(HELD)
    assert through_codec(built) == HELD
    deep = copy.deepcopy(built)
    assert deep == HELD
    assert [type(deep), *map(type, deep.values())] == [dict, list, dict, set, bytearray, tuple]
    deep["items"][1]["a"].append(3)
    told = {"items": HELD["items"], "names": HELD["names"]}
    shown = {name: built[name] for name in told}
    assert json.dumps(shown) == json.dumps(told)
    assert msgspec.json.encode(shown) == msgspec.json.encode(told)
    assert msgspec.json.encode(document(told)) == msgspec.json.encode(told)
    assert repr(built) == repr(HELD)
    plain: list[Any] = [
        built.copy(), dict(built), built["items"] + [1], built["items"][:], built["items"].copy(), built["seen"] | {3},
        {3} | built["seen"], built["seen"].copy(), built["seen"].union({3}), built["raw"] + b"c", built | {"x": 1},
        copy.copy(built["seen"]), sorted(built["seen"]),
    ]  # fmt: skip
    assert {type(each) for each in plain} == {dict, list, set, bytearray}
    for each in plain:
        each.clear()
    assert built == HELD


def test_dicts_and_tuples_of_ones_own_are_read_only_and_keep_their_type() -> None:
    bag = read_only({"bag": Bag(a=1), "pair": Pair([1], 2), "odd": OrderedDict(b=[1])})
    assert (bag["bag"].__class__, bag["pair"], type(bag["pair"])) == (Bag, Pair([1], 2), Pair)
    for change in (
        lambda: bag["bag"].update(a=2),
        lambda: bag["bag"].__setitem__("a", 2),
        lambda: bag["pair"].first.append(2),
        lambda: bag["odd"]["b"].append(2),
        lambda: bag["odd"].__setitem__("c", 2),
    ):
        with pytest.raises(ContextReadOnly):
            change()
    assert (copy.deepcopy(bag["bag"]), type(copy.deepcopy(bag["bag"]))) == ({"a": 1}, Bag)


# in a run -----------------------------------------------------------------------------------------


@killick.tool(name="context_sum", effect="reads")
async def summed(items: list[int], line: Line) -> int:
    return sum(items) + len(line.tags)


@pytest.fixture
def kd() -> Any:
    with killick.open("memory:") as client:
        yield client


def test_a_run_that_changes_its_context_in_place_fails_with_one_clear_line(kd: killick.Client) -> None:
    @killick.agent(name="context_careless")
    async def careless(run: killick.Run) -> None:
        await run.update(items=[1])
        run.context["items"].append(2)

    with pytest.raises(killick.RunFailed, match=r"run.context is read-only; change it with run.update\(items=…\)"):
        kd.run(careless, id="r")
    assert kd.state("r").context.document == {"items": [1]}


def test_what_is_read_from_a_context_can_be_passed_on_to_tools_results_and_the_context_itself(
    kd: killick.Client,
) -> None:
    @killick.agent(name="context_passing", context=Plain)
    async def passing(run: killick.Run[Plain]) -> Any:
        total = await run.call(summed, [1, 2], run.context.lines[0])
        await run.update(total=total, lines=[*run.context.lines, Line("new")])
        await run.note(run.context.by_name)
        return {"lines": run.context.lines, "whole": run.context}

    found = kd.run(passing, id="r")
    assert [line["what"] for line in found["lines"]] == ["a", "new"]
    assert found["whole"]["total"] == 4
    assert type(found["lines"]) is list
    kd.replay("r", passing, check=True)
    assert kd.verify().problems == []


def test_a_context_is_made_read_only_once_a_version_and_only_when_it_is_looked_at(
    kd: killick.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    def counted(value: Any, entry: str | None = None) -> Any:
        made.append(value)
        return read_only(value, entry)

    monkeypatch.setattr("killick.engine.context.read_only", counted)

    @killick.agent(name="context_lazy", context=Plain)
    async def lazy(run: killick.Run[Plain]) -> int:
        await run.update(total=1)
        await run.update(total=2)
        return (run.context.total, run.context.total, len(made))[2] if run.context is run.context else -1

    assert kd.run(lazy, id="r") == 1


def test_what_somebody_forces_into_the_view_never_reaches_the_record(kd: killick.Client) -> None:
    @killick.agent(name="context_forcing")
    async def forcing(run: killick.Run) -> Any:
        await run.update(items=[1], deep={"a": [1]})
        list.append(run.context["deep"]["a"], 2)
        await run.update(more=1)
        return run.context["deep"]

    assert kd.run(forcing, id="r") == {"a": [1]}
    assert kd.state("r").context.document == {"items": [1], "deep": {"a": [1]}, "more": 1}
