"""The tools of a request: the caller's as they are, and recall, under a name that none of them has."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.types import ToolUnionParam
from openai.types.chat import ChatCompletionToolUnionParam
from openai.types.responses import ToolParam
from pydantic import ConfigDict, TypeAdapter

from killick.window.messages import Shape, size_of
from killick.window.schemas import Schemas

SHAPES: list[Shape] = ["openai", "openai-responses", "anthropic"]
PUBLISHED: dict[Shape, TypeAdapter[Any]] = {
    "openai": TypeAdapter(list[ChatCompletionToolUnionParam], config=ConfigDict(extra="forbid")),
    "openai-responses": TypeAdapter(list[ToolParam], config=ConfigDict(extra="forbid")),
    "anthropic": TypeAdapter(list[ToolUnionParam], config=ConfigDict(extra="forbid")),
}


def tool(shape: Shape, name: str, description: str, parameters: dict[str, str], **more: Any) -> dict[str, Any]:
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    if shape == "anthropic":
        return {"name": name, "description": description, "input_schema": schema, **more}
    about = {"name": name, "description": description, "parameters": schema}
    if shape == "openai":
        return {"type": "function", "function": about | more}
    return {"type": "function"} | about | {"strict": None} | more


def toolbox(shape: Shape) -> list[dict[str, Any]]:
    return [tool(shape, name, f"Does {name}.", {"path": "which file"}) for name in ("read_file", "write_file")]


def count(text: str) -> int:
    return len(text) // 4


@pytest.mark.parametrize("shape", SHAPES)
def test_recall_is_offered_after_the_callers_tools_as_the_provider_takes_it(shape: Shape) -> None:
    tools = toolbox(shape)
    schemas = Schemas(tools, shape, count)
    PUBLISHED[shape].validate_python(schemas.sent)
    assert all(sent is given for sent, given in zip(schemas.sent[:-1], tools, strict=True))
    assert (schemas.sent[-1].get("function") or schemas.sent[-1])["name"] == "recall"
    assert schemas.tokens_given == sum(size_of(each, count) for each in tools)
    assert schemas.tokens_sent == sum(size_of(each, count) for each in schemas.sent)


def test_without_any_tools_recall_is_still_offered() -> None:
    schemas = Schemas([], "openai", count)
    assert len(schemas.sent) == 1
    assert schemas.tokens_given == 0 < schemas.tokens_sent


def test_what_is_no_tool_of_the_shape_is_passed_on() -> None:
    odd: list[Any] = [None, "read", {"type": "function"}, {"type": "function", "function": None}, {"name": 3}, object()]
    for shape in SHAPES:
        schemas = Schemas(odd, shape, count)
        assert all(sent is given for sent, given in zip(schemas.sent, odd, strict=False))


def test_a_tool_that_describes_itself_is_counted_as_it_is_sent() -> None:
    said = tool("anthropic", "described", "Says what it is.", {"much": "of it"})

    class Described:
        def to_dict(self) -> dict[str, Any]:
            return said

    assert Schemas([Described()], "anthropic", count).tokens_given == size_of(said, count)


def test_recall_gives_way_to_the_callers_of_the_same_name() -> None:
    mine = [tool("openai", name, "Mine.", {}) for name in ("recall", "killick_recall")]
    schemas = Schemas([*toolbox("openai"), *mine], "openai", count)
    assert schemas.recall_name == "killick_killick_recall"
    assert schemas.sent[2] is mine[0]
    assert Schemas([{"type": "bash_20250124", "name": "recall"}], "anthropic", count).recall_name == "killick_recall"


def test_the_same_tools_make_the_same_bytes_and_are_known_again() -> None:
    tools = toolbox("openai")
    schemas = Schemas(tools, "openai", count)
    assert json.dumps(schemas.sent) == json.dumps(Schemas(toolbox("openai"), "openai", count).sent)
    assert all(schemas.same(again) for again in (tools, toolbox("openai"), tuple(tools)))
    tools.append(tool("openai", "more", "One more.", {}))
    assert not any(schemas.same(others) for others in (tools, tools[1:], []))
    assert schemas.same(tools[:-1])
