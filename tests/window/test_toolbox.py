"""The tools of a request: the caller's as they are, and the window's own under a name that is free."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.types import ToolUnionParam
from openai.types.chat import ChatCompletionToolUnionParam
from openai.types.responses import ToolParam
from pydantic import ConfigDict, TypeAdapter

from killick.window.messages import Shape, size_of
from killick.window.toolbox import Toolbox

SHAPES: list[Shape] = ["openai", "openai-responses", "anthropic"]
PUBLISHED: dict[Shape, TypeAdapter[Any]] = {
    "openai": TypeAdapter(list[ChatCompletionToolUnionParam], config=ConfigDict(extra="forbid")),
    "openai-responses": TypeAdapter(list[ToolParam], config=ConfigDict(extra="forbid")),
    "anthropic": TypeAdapter(list[ToolUnionParam], config=ConfigDict(extra="forbid")),
}


def tool(shape: Shape, name: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
    if shape == "anthropic":
        return {"name": name, "description": f"Does {name}.", "input_schema": schema}
    about = {"name": name, "description": f"Does {name}.", "parameters": schema}
    if shape == "openai":
        return {"type": "function", "function": about}
    return {"type": "function", "strict": None} | about


def count(text: str) -> int:
    return len(text) // 4


@pytest.mark.parametrize("shape", SHAPES)
def test_recall_is_added_in_a_form_that_the_provider_takes(shape: Shape) -> None:
    tools = [tool(shape, "read_file"), tool(shape, "writeFile")]
    toolbox = Toolbox(tools, shape, count)
    PUBLISHED[shape].validate_python(toolbox.sent)
    assert toolbox.sent[:-1] == tools
    assert (toolbox.sent[-1].get("function") or toolbox.sent[-1])["name"] == toolbox.recall_name == "recall"
    assert toolbox.tokens_given == sum(size_of(each, count) for each in tools)
    assert toolbox.tokens_sent == sum(size_of(each, count) for each in toolbox.sent)


def test_without_any_tools_recall_is_still_offered() -> None:
    toolbox = Toolbox([], "openai", count)
    assert [each["function"]["name"] for each in toolbox.sent] == ["recall"]
    assert toolbox.tokens_given == 0


def test_what_is_no_tool_of_the_shape_is_passed_on() -> None:
    odd: list[Any] = [None, 7, "a tool", {"type": "web_search_20250305", "name": "web_search"}, {"function": {}}]
    assert Toolbox(odd, "anthropic", count).sent[:-1] == odd


def test_a_tool_that_describes_itself_counts_as_what_it_says() -> None:
    class Described:
        def to_dict(self) -> dict[str, Any]:
            return tool("anthropic", "recall")

    toolbox = Toolbox([Described()], "anthropic", count)
    assert toolbox.recall_name == "killick_recall"
    assert toolbox.tokens_given == size_of(tool("anthropic", "recall"), count)


def test_the_windows_tool_gives_way_to_the_callers_of_the_same_name() -> None:
    mine = [tool("openai", name) for name in ("recall", "killick_recall")]
    assert Toolbox(mine, "openai", count).recall_name == "killick_killick_recall"
    assert Toolbox([{"type": "bash_20250124", "name": "recall"}], "anthropic", count).recall_name == "killick_recall"


def test_the_same_tools_make_the_same_bytes_and_are_known_again() -> None:
    tools = [tool("openai", name) for name in ("one", "two")]
    toolbox = Toolbox(tools, "openai", count)
    again = [tool("openai", name) for name in ("one", "two")]
    assert json.dumps(toolbox.sent) == json.dumps(Toolbox(again, "openai", count).sent)
    assert all(toolbox.same(each) for each in (tools, again, tuple(tools)))
    tools.append(tool("openai", "more"))
    assert not any(toolbox.same(each) for each in (tools, tools[1:], []))
