"""`run.context` is a copy: code that changes it in place is refused at its next step, whatever its type."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import pydantic
import pytest

import killick
from killick.errors import ContextReadOnly


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


TYPED = [Plain, Slotted, Frozen, Model, Struct, Hard]


CHANGES: list[tuple[str, Callable[[Any], Any]]] = [
    ("total", lambda c: setattr(c, "total", 9)),
    ("lines", lambda c: c.lines.append(Line("b"))),
    ("lines", lambda c: c.lines.clear()),
    ("lines", lambda c: c.lines[0].tags.clear()),
    ("lines", lambda c: setattr(c.lines[0], "what", "b")),
    ("name", lambda c: c.lines.append(object())),
]


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
    assert kd.store.verify().problems == []


@pytest.mark.parametrize("kind", TYPED)
@pytest.mark.parametrize(("entry", "change"), CHANGES)
def test_a_typed_context_that_is_changed_in_place_is_refused_at_the_next_step(
    kd: killick.Client, kind: Any, entry: str, change: Callable[[Any], Any]
) -> None:
    refused: list[str] = []

    @killick.agent(name="context_typed", context=kind)
    async def changing(run: killick.Run[Any]) -> bool:
        try:
            change(run.context)
        except (AttributeError, dataclasses.FrozenInstanceError):
            return True  # its type refuses that itself
        try:
            await run.note("next")
        except ContextReadOnly as error:
            refused.append(str(error))
        return bool(run.context == kind())

    assert kd.run(changing, id="r") is True
    assert refused in ([], [f"run.context is read-only; change it with run.update({entry}=…)"])
    assert refused or kind in (Frozen, Hard)


UNTYPED: list[tuple[str, Callable[[Any], Any]]] = [
    ("x", lambda c: c.__setitem__("x", 1)),
    ("x", lambda c: setattr(c, "x", 1)),
    ("items", lambda c: delattr(c, "items")),
    ("items", lambda c: c.pop("items")),
    ("x", lambda c: c.update(x=1)),
    ("items", lambda c: c.clear()),
    ("items", lambda c: c["items"][1]["a"].append(1)),
    ("seen", lambda c: c.seen.add(3)),
    ("raw", lambda c: c["raw"].extend(b"c")),
    ("pair", lambda c: c["pair"][1].append(3)),
]


@pytest.mark.parametrize(("entry", "change"), UNTYPED)
def test_an_untyped_context_that_is_changed_in_place_is_refused_by_plain_code_too(
    kd: killick.Client, entry: str, change: Callable[[Any], Any]
) -> None:
    held: dict[str, Any] = {"items": [1, {"a": [2]}], "seen": {1, 2}, "raw": bytearray(b"ab"), "pair": (1, [2]),
                            "big": 2**70, "key": "\ud800", "many": {(1, 2)}}  # fmt: skip

    @killick.agent(name="context_untyped")
    def changing(run: killick.SyncRun) -> str:
        run.update(**held)
        try:
            change(run.context)
            run.note("next")
        except ContextReadOnly as error:
            assert run.context == held
            return str(error)
        return "not refused"

    assert kd.run(changing, id="r") == f"run.context is read-only; change it with run.update({entry}=…)"
    assert kd.state("r").context.document == held


def test_a_state_machine_that_changes_its_context_in_place_fails_before_its_transition_is_recorded(
    kd: killick.Client,
) -> None:
    @killick.machine(name="context_machine")
    async def counting(run: killick.Run, state: int) -> Any:
        if state == 0:
            await run.update(items=[1])
            return killick.Next(1)
        run.context["items"].append(2)
        return killick.Done(state)

    with pytest.raises(killick.RunFailed, match=r"run.update\(items=…\)"):
        kd.run(counting, 0, id="r")
    assert kd.state("r").context.document == {"items": [1]}


def test_the_code_gets_one_copy_until_its_context_changes(kd: killick.Client) -> None:
    @killick.agent(name="context_lazy", context=Plain)
    async def lazy(run: killick.Run[Plain]) -> list[bool]:
        first = run.context
        await run.note("next")
        same = run.context is first
        first.fixed  # noqa: B018
        await run.update(total=2)
        return [same, run.context is first, run.context.fixed is SHARED]

    assert kd.run(lazy, id="r") == [True, False, False]


def test_the_code_begins_with_the_context_that_is_on_record(kd: killick.Client) -> None:
    made = itertools.count()

    @dataclasses.dataclass
    class Numbered:
        number: int = dataclasses.field(default_factory=lambda: next(made))

    @killick.agent(name="context_made_once", context=Numbered)
    async def numbered(run: killick.Run[Numbered]) -> int:
        return run.context.number

    assert kd.run(numbered, id="r") == kd.state("r").context.document["number"]
