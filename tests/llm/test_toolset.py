"""How tools are described to models, and how what models ask for is bound, called and answered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal, TypedDict
from uuid import UUID

import jsonschema
import msgspec
import pydantic
import pytest
from pydantic import Field

from killick.definitions.markers import KEY, Key
from killick.definitions.parameters import Parameters, described
from killick.definitions.tools import AnyTool, tool
from killick.errors import DeclarationRefused, KillickError, ValueRefused
from killick.llm.toolset import Toolset, dispatch, dispatch_sync
from killick.model.codec import Secret
from playing import (
    JSON,
    ListedRun,
    ListedSyncRun,
    chat,
    message,
    response,
    response_call,
    response_text,
    text_block,
    thinking_block,
    use_block,
)


class Unit(Enum):
    C = "celsius"
    F = "fahrenheit"


@dataclass
class Place:
    """Somewhere."""

    city: str
    tags: list[str] = field(default_factory=list)


class Item(msgspec.Struct):
    sku: str
    count: int = 1


class Person(pydantic.BaseModel):
    first_name: str = Field(alias="firstName")
    title: str = "none"
    born: date | None = None


class Box(TypedDict):
    width: int


@tool
def weather(
    city: str,
    unit: Unit = Unit.C,
    days: Annotated[int, Field(ge=1, le=7, description="How far ahead.")] = 1,
    detail: Literal["low", "high"] | None = None,
    key: Key = KEY,
) -> dict[str, Any]:
    """The weather of a place.

    Ask for a city at a time.

    Args:
        city (str): Its name,
            in English.
        unit: Of temperatures.
        days: Not what the model reads: the annotation says more.
    """
    return {"city": city, "unit": unit, "days": days, "detail": detail}


@tool
async def order(person: Person, items: list[Item], at: Place, box: Box, when: datetime) -> str:
    """Order things.

    Parameters
    ----------
    person : Person
        Who pays.
    items, at : whatever
        What, and where.

    Returns
    -------
    str
        A number.
    """
    return "17"


def made(name: str, fn: Callable[..., Any]) -> AnyTool:
    declared: AnyTool = tool(name=name)(fn)
    return declared


def offered(given: AnyTool) -> JSON:
    [schema] = Toolset(given).schemas("anthropic")
    jsonschema.Draft202012Validator.check_schema(schema["input_schema"])
    parameters: JSON = schema["input_schema"]
    return parameters


# Toolsets ------------------------------------------------------------------------------------------


def test_a_toolset_keeps_its_tools_in_order_and_finds_them_by_name() -> None:
    tools = Toolset(weather, order)
    assert list(tools) == [weather, order]
    assert tools.names == ["weather", "order"]
    assert tools.get("order") is order
    assert tools.get("pay") is None
    assert len(tools) == 2


def test_what_no_provider_takes_is_refused_when_the_toolset_is_made() -> None:
    with pytest.raises(DeclarationRefused, match="weather: is in the toolset twice"):
        Toolset(weather, order, weather)
    with pytest.raises(DeclarationRefused, match="declare it with @killick"):
        Toolset(len)  # type: ignore[arg-type]
    with pytest.raises(DeclarationRefused, match=r"crm\.find: .*64 letters"):
        Toolset(made("crm.find", lambda: None))


@pytest.mark.parametrize(
    "declared",
    [
        lambda *cities: None,
        lambda **cities: None,
        lambda city, /: None,
    ],
)
def test_a_parameter_that_has_no_name_of_its_own_is_refused(declared: Callable[..., None]) -> None:
    with pytest.raises(DeclarationRefused, match=r"f: a model cannot give .*take it by name"):
        Toolset(made("f", declared)).schemas()


def test_a_parameter_that_no_model_can_write_is_refused() -> None:
    @tool
    def log_in(password: Secret) -> None: ...

    with pytest.raises(DeclarationRefused, match="log_in: its parameters cannot be described to a model"):
        Toolset(log_in).schemas()


# Schemas -------------------------------------------------------------------------------------------


def test_a_tool_is_described_in_the_form_of_each_provider() -> None:
    tools = Toolset(weather)
    [chat_form], [flat], [anthropic] = (tools.schemas(p) for p in ("openai", "openai-responses", "anthropic"))
    about = "The weather of a place.\n\nAsk for a city at a time."
    told = {"name": "weather", "description": about}
    parameters = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Its name, in English."},
            "unit": {"$ref": "#/$defs/Unit", "description": "Of temperatures.", "default": "celsius"},
            "days": {"type": "integer", "minimum": 1, "maximum": 7, "description": "How far ahead.", "default": 1},
            "detail": {"anyOf": [{"type": "string", "enum": ["low", "high"]}, {"type": "null"}]},
        },
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"Unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
    }
    assert anthropic == told | {"input_schema": parameters}
    assert flat == told | {"type": "function", "parameters": parameters}
    assert chat_form == {"type": "function", "function": told | {"parameters": parameters}}


def test_models_dataclasses_structs_and_typed_dicts_are_described_with_what_they_hold() -> None:
    schema = offered(order)
    assert set(schema["$defs"]) == {"Box", "Item", "Person", "Place"}
    assert schema["properties"]["items"] == {
        "type": "array", "items": {"$ref": "#/$defs/Item"}, "description": "What, and where.",
    }  # fmt: skip
    # By field name, as it is stored; a field may be called title.
    assert set(schema["$defs"]["Person"]["properties"]) == {"first_name", "title", "born"}
    assert schema["$defs"]["Item"]["properties"] == {
        "sku": {"type": "string"},
        "count": {"type": "integer", "default": 1},
    }
    fitting = {
        "person": {"first_name": "Ada"}, "items": [{"sku": "x"}], "at": {"city": "Bonn"}, "box": {"width": 3},
        "when": "2026-11-15T02:00:00Z",
    }  # fmt: skip
    jsonschema.validate(fitting, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(fitting | {"items": [{"count": 1}]}, schema)


def test_a_tool_without_parameters_or_annotations_can_be_offered() -> None:
    @tool
    def ping() -> str:
        return "pong"

    @tool
    def echo(what, times=2):  # type: ignore[no-untyped-def]
        return what * times

    assert offered(ping) == {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
    assert offered(echo)["properties"] == {"what": {}, "times": {"default": 2}}


def test_two_types_of_one_name_are_told_apart_or_refused() -> None:
    struct = msgspec.defstruct("Place", [("x", int)])

    def go(a: Any, b: Any) -> None: ...

    go.__annotations__ = {"a": Place, "b": dataclass(type("Place", (), {"__annotations__": {"x": int}, "x": 0}))}
    assert len(offered(tool(go))["$defs"]) == 2
    go.__annotations__ = {"a": Place, "b": struct}
    with pytest.raises(DeclarationRefused, match="go: two types of its parameters are called Place"):
        Toolset(tool(go)).schemas()


GOOGLE = """Send it.

Args:
    to (str | None): Who gets it;
        may be empty.
    body: What it says: all of it.

        In two paragraphs.
    *rest: More.
    a line that is no entry

Returns:
    A number.

    Note: kept.
"""
NUMPY = """Send it.

Parameters
----------
to : str, optional
    Who gets it;
    may be empty.
body
    What it says: all of it.

    In two paragraphs.
rest : list

Returns
-------
int
    A number.
"""
SPHINX = """Send it.

:param str to: Who gets it;
    may be empty.
:type to: str
:param body: What it says: all of it.
    In two paragraphs.
:param rest:
:returns: A number.
"""


@pytest.mark.parametrize("doc", [GOOGLE, NUMPY, SPHINX], ids=["google", "numpy", "sphinx"])
def test_what_a_docstring_says_of_parameters_goes_to_them_and_the_rest_stays(doc: str) -> None:
    about, parameters = described(doc)
    assert parameters.pop("rest", "More.") == "More."
    assert parameters == {"to": "Who gets it; may be empty.", "body": "What it says: all of it. In two paragraphs."}
    assert about.startswith("Send it.\n\n")
    assert "A number." in about
    assert "empty" not in about
    assert "aragraph" not in about
    assert "\n\n\n" not in about


@pytest.mark.parametrize(
    "doc", ["", "One line.", "Args: are not a section here.", "Parameters", "Args:", ":param", "a\n---\nb"]
)
def test_a_docstring_of_another_kind_stays_whole(doc: str) -> None:
    about, parameters = described(doc)
    assert about == ("" if doc == "Args:" else doc)
    assert parameters == {}


# Binding -------------------------------------------------------------------------------------------


def bind(tool: AnyTool, arguments: Mapping[str, Any] | str) -> dict[str, Any]:
    return Parameters(tool).bind(arguments)


def test_arguments_become_the_types_that_the_tool_declares() -> None:
    bound = bind(
        order,
        {
            "person": {"first_name": "Ada", "born": "1815-12-10"}, "items": [{"sku": "x"}, {"sku": "y", "count": 2}],
            "at": {"city": "Bonn"}, "box": {"width": 3}, "when": "2026-11-15T02:00:00",
        },
    )  # fmt: skip
    assert bound == {
        "person": Person(firstName="Ada", born=date(1815, 12, 10)), "items": [Item("x"), Item("y", 2)],
        "at": Place("Bonn"), "box": {"width": 3}, "when": datetime(2026, 11, 15, 2),
    }  # fmt: skip
    assert bind(weather, '{"city": "Bonn", "unit": "fahrenheit"}') == {"city": "Bonn", "unit": Unit.F}


SLOPPY: list[tuple[Any, Any, Any]] = [
    (int, "3", 3),
    (int, 3.0, 3),
    (int, "3.0", 3),
    (float, "0.5", 0.5),
    (bool, "true", True),
    (str, 3, "3"),
    (str, {"a": 1}, '{"a": 1}'),
    (str, "3", "3"),
    (str | int, "3", "3"),
    (int | None, "null", None),
    (list[int], '["1", 2]', [1, 2]),
    (dict[str, int], '{"a": "1"}', {"a": 1}),
    (Place, '{"city": "Bonn"}', Place("Bonn")),
    (list[Item], '[{"sku": "x"}]', [Item("x")]),
    (Item, '{"sku": "x"}', Item("x")),
    (Person, '{"first_name": "Ada"}', Person(firstName="Ada")),
    (set[str], ["a", "b", "a"], {"a", "b"}),
    (tuple[int, str], ["1", "a"], (1, "a")),
    (Decimal, 0.5, Decimal("0.5")),
    (timedelta, "PT90S", timedelta(seconds=90)),
    (UUID, "12345678-1234-5678-1234-567812345678", UUID("12345678-1234-5678-1234-567812345678")),
    (Literal[1, 2], "2", 2),
    (Any, "3", "3"),
]


@pytest.mark.parametrize(("kind", "written", "meant"), SLOPPY)
def test_what_a_sloppy_model_means_is_understood(kind: Any, written: Any, meant: Any) -> None:
    def take(it: Any) -> None: ...

    take.__annotations__ = {"it": kind}
    [bound] = bind(tool(take), {"it": written}).values()
    assert bound == meant
    assert type(bound) is type(meant)


def test_null_for_what_may_be_left_out_leaves_it_out() -> None:
    assert bind(weather, {"city": "Bonn", "days": None, "detail": None}) == {"city": "Bonn", "detail": None}
    with pytest.raises(ValueRefused):
        bind(weather, {"city": None})


def test_all_that_does_not_fit_is_said_at_once_with_what_would() -> None:
    with pytest.raises(ValueRefused) as caught:
        bind(weather, {"unit": "kelvin", "days": 9, "detail": "high", "town": "Bonn"})
    first, *lines = str(caught.value).splitlines()
    assert first == "arguments: do not fit"
    city, unit, days, town = lines
    assert city == 'city: is missing; it takes {"type": "string"}'
    assert unit.startswith("unit: ")
    assert '"enum": ["celsius", "fahrenheit"]' in unit
    assert days.startswith("days: Input should be less than or equal to 7; it takes ")
    assert town == "town: is not an argument of this tool (city, unit, days, detail)"


def test_what_does_not_fit_inside_an_argument_is_named_by_its_path() -> None:
    fitting = {"items": [], "at": {"city": "Bonn"}, "box": {"width": 3}, "when": "2026-11-15T02:00:00"}
    with pytest.raises(ValueRefused, match=r"person: \.first_name .*Field required"):
        bind(order, fitting | {"person": {"title": "Dr"}})
    with pytest.raises(ValueRefused, match=r"items\[1\]\.count: Expected `int`, got `str`"):
        bind(order, fitting | {"person": {"first_name": "A"}, "items": [{"sku": "x"}, {"sku": "y", "count": "two"}]})


@pytest.mark.parametrize("written", ["{", "[1]", "3", "null", '"text"', "[" * 100_000])
def test_arguments_that_are_no_object_are_refused(written: str) -> None:
    with pytest.raises(ValueRefused, match="write one JSON object"):
        bind(weather, written)


def test_arguments_wrapped_in_text_twice_and_no_arguments_at_all_are_understood() -> None:
    assert bind(weather, json.dumps('{"city": "Bonn"}')) == {"city": "Bonn"}
    empty: list[Any] = ["", " ", "{}", {}]
    for nothing in empty:
        assert bind(made("ping", lambda: "pong"), nothing) == {}


# Dispatching ---------------------------------------------------------------------------------------


@tool
async def add(a: int, b: int = 1) -> int:
    return a + b


@tool
def fail(why: str) -> None:
    raise ConnectionError(why)


TOOLS = Toolset(add, fail, weather)


def answers_of(reply: Any, run: ListedRun | None = None) -> list[JSON]:
    return asyncio.run(dispatch(run or ListedRun(), TOOLS, reply))


def run_of(*calls: tuple[str, str, str]) -> tuple[list[str], list[str]]:
    """What happened when a reply made these calls, and the answers."""
    run = ListedRun()
    answers = answers_of(chat("I must.", *calls), run)
    assert [answer["tool_call_id"] for answer in answers] == [call[0] for call in calls]
    return run.told(), [answer["content"] for answer in answers]


def test_each_call_is_the_models_decision_then_a_step_then_an_answer() -> None:
    told, answers = run_of(("c1", "add", '{"a": 2}'), ("c2", "add", '{"a": "3", "b": 4}'))
    decided = "model decided add because 'I must.': Which tool? ['add', 'fail', 'weather']"
    assert told == [decided, "call add {'a': 2}", decided, "call add {'a': 3, 'b': 4}"]
    assert answers == ["3", "7"]


def test_what_a_model_gets_wrong_is_an_answer_and_no_step() -> None:
    calls = [("c1", "pay", "{}"), ("c2", "add", "{"), ("c3", "add", '{"b": 1}'), ("c4", "add", '{"a": 1}')]
    told, [unknown, broken, missing, fine] = run_of(*calls)
    assert [line for line in told if line.startswith("call")] == ["call add {'a': 1}"]
    assert unknown == "error: no tool is called pay; there are: add, fail, weather"
    assert broken.startswith("error: arguments: are not JSON")
    assert missing == 'error: arguments: do not fit\na: is missing; it takes {"type": "integer"}'
    assert fine == "2"


def test_a_step_that_failed_is_an_answer() -> None:
    told, answers = run_of(("c1", "fail", '{"why": "no route"}'), ("c2", "add", '{"a": 1}'))
    assert answers == ["error: no route", "2"]
    assert len(told) == 4


def test_answers_have_the_form_of_the_provider_that_asked() -> None:
    items = [response_text("I must."), response_call("c1", "add", '{"a": 1}'), response_call("c2", "pay", "{}")]
    unknown = "error: no tool is called pay; there are: add, fail, weather"
    assert answers_of(response(*items)) == [
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
        {"type": "function_call_output", "call_id": "c2", "output": unknown},
    ]
    blocks = [text_block("I must."), use_block("t1", "add", {"a": 1}), use_block("t2", "fail", {"why": "no route"})]
    results = [
        {"type": "tool_result", "tool_use_id": "t1", "content": "2"},
        {"type": "tool_result", "tool_use_id": "t2", "content": "error: no route", "is_error": True},
    ]
    assert answers_of(message(*blocks)) == [{"role": "user", "content": results}]
    for reply in (chat("Done."), response(response_text("Done.")), message(text_block("Done."))):
        assert answers_of(reply) == []


def test_the_reason_of_a_silent_model_is_what_it_thought() -> None:
    run = ListedRun()
    answers_of(message(thinking_block("Two, surely."), use_block("t1", "add", {"a": 1})), run)
    assert "because 'Two, surely.'" in run.told()[0]
    run = ListedRun()
    answers_of(chat(None, ("c1", "add", '{"a": 1}')), run)
    assert "because None" in run.told()[0]


RESULTS: list[tuple[Any, Any]] = [
    (None, None),
    ([1, "zwölf"], [1, "zwölf"]),
    (Place("Bonn"), {"city": "Bonn", "tags": []}),
    (Person(firstName="Ada"), {"first_name": "Ada", "title": "none", "born": None}),
    ([Item("x")], [{"sku": "x", "count": 1}]),
    ((1, (2,)), [1, [2]]),
    ({"b", "a"}, ["a", "b"]),
    ({"at": date(2026, 11, 15)}, {"at": "2026-11-15"}),
    ([Decimal("1.10"), UUID(int=1)], ["1.10", "00000000-0000-0000-0000-000000000001"]),
    (timedelta(seconds=90), "PT90.0S"),
    ({1: "one", (1, 2): "pair", "$x": "dollar"}, {"1": "one", "[1, 2]": "pair", "$x": "dollar"}),
    (b"\x00\xff", "AP8="),
    (2**70, 2**70),
    (float("inf"), "inf"),
    ("\ud800", "\ufffd"),
    ({"$ref": 1}, {"$ref": 1}),
    (Unit.F, "fahrenheit"),
]


@pytest.mark.parametrize(("result", "read"), RESULTS)
def test_a_result_is_told_as_json_without_tags(result: Any, read: Any) -> None:
    give = made("give", lambda: [result])
    [answer] = asyncio.run(dispatch(ListedRun(), [give], chat(None, ("c1", "give", "{}"))))
    assert json.loads(answer["content"]) == [read]


def test_a_text_is_told_as_it_is() -> None:
    give = made("give", lambda: 'She said "no".')
    [answer] = asyncio.run(dispatch(ListedRun(), [give], chat(None, ("c1", "give", "{}"))))
    assert answer["content"] == 'She said "no".'


def test_a_replay_goes_the_same_way_and_touches_nothing() -> None:
    reply = chat("I must.", ("c1", "add", '{"a": 2}'), ("c2", "fail", '{"why": "no route"}'), ("c3", "pay", ""))
    first = ListedRun()
    answers = answers_of(reply, first)
    touched: list[Any] = []
    tools: Iterable[AnyTool] = [made(name, lambda a=0, why=None: touched.append(a)) for name in TOOLS.names]
    again = ListedRun(first.record)
    assert asyncio.run(dispatch(again, tools, reply)) == answers
    assert again.told() == first.told()
    assert touched == []


def test_a_blocking_run_dispatches_the_same_way() -> None:
    reply = chat("I must.", ("c1", "add", '{"a": 2}'), ("c2", "fail", '{"why": "no route"}'))
    run = ListedSyncRun()
    assert dispatch_sync(run, TOOLS, reply) == answers_of(reply)
    assert len(run.run.told()) == 4


def test_the_blocking_form_refuses_a_run_that_is_awaited() -> None:
    class Waiting(ListedRun):
        async def decided(self, *_: Any, **__: Any) -> None:
            await asyncio.sleep(0)

    with pytest.raises(KillickError, match="takes a SyncRun"):
        dispatch_sync(Waiting(), TOOLS, chat(None, ("c1", "add", "{}")))
