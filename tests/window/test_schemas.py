"""Which tools are described in full and which by a stub, and how the rest is asked for."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.types import ToolUnionParam
from hypothesis import given
from hypothesis import strategies as st
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

LONG = "Where the words are, counted from the first. " * 30
ABOUT = {
    "read_file": ("Reads a file of the repository. Binary files are refused.", {"path": LONG, "offset": "first line"}),
    "writeFile": ("Writes a file, e.g. a test. Creates folders.", {"path": LONG, "content": "the new content"}),
    "search-code": ("Searches all files for a pattern.", {"pattern": LONG, "glob": "which files"}),
    "run_tests": ("Runs the test suite\nof the project\n\nSlow.", {"select": LONG}),
    "send_invoice": ("Mails an invoice to a customer.", {"customer": LONG, "cents": "the amount"}),
    "list_categories": ("Lists the categories of expenses.", {"year": LONG}),
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
    return [tool(shape, name, *about) for name, about in ABOUT.items()]


def count(text: str) -> int:
    return len(text) // 4


def named(schemas: Schemas, name: str) -> dict[str, Any]:
    [found] = [sent for sent in schemas.sent if (sent.get("function") or sent).get("name") == name]
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_large_tools_are_sent_as_stubs_that_the_provider_takes(shape: Shape) -> None:
    tools = toolbox(shape)
    schemas = Schemas(tools, shape, count)
    assert schemas.stubs == frozenset(ABOUT)
    PUBLISHED[shape].validate_python(schemas.sent)
    assert [(sent.get("function") or sent)["name"] for sent in schemas.sent] == [*ABOUT, "recall", "find_tools"]
    assert schemas.tokens_whole == sum(size_of(each, count) for each in tools)
    assert schemas.tokens_sent == sum(size_of(each, count) for each in schemas.sent)
    assert schemas.tokens_sent * 3 < schemas.tokens_whole
    assert all(schemas.stub_tokens(name) * 3 < schemas.whole_tokens(name) for name in ABOUT)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_tool_to_whose_schema_a_model_is_held_is_sent_whole(shape: Shape) -> None:
    tools = [tool(shape, name, *about) for name, about in ABOUT.items()]
    for each in tools:
        (each["function"] if shape == "openai" else each)["strict"] = True
    assert not Schemas(tools, shape, count).stubs


@pytest.mark.parametrize("shape", SHAPES)
def test_a_stub_takes_any_arguments(shape: Shape) -> None:
    stub = named(Schemas([tool(shape, name, *about) for name, about in ABOUT.items()], shape, count), "read_file")
    about = stub["function"] if shape == "openai" else stub
    assert (about.get("parameters") or about["input_schema"]) == {
        "type": "object", "properties": {}, "additionalProperties": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("description", "line"),
    [
        ("Reads a file. Binary files are refused.", "Reads a file."),
        ("Writes a file, e.g. a test. Creates folders.", "Writes a file, e.g. a test."),
        ("Runs the suite\n    of the project\n\nSlow.", "Runs the suite of the project"),
        ("Version 2.5 of it! More.", "Version 2.5 of it!"),
        ("word " * 40, "word " * 15 + "word…"),
        ("x" * 200, "x" * 80 + "…"),
        ("", ""),
    ],
    ids=["sentence", "abbreviation", "paragraph", "number", "long", "unbroken", "none"],
)
def test_a_stub_keeps_the_first_sentence_of_the_description(description: str, line: str) -> None:
    tools = [tool("anthropic", "it", description, {"much": LONG * 10})]
    schemas = Schemas(tools, "anthropic", count)
    assert named(schemas, "it")["description"] == f"{line} [stub: see find_tools]".strip()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_small_toolset_is_sent_whole_with_recall_alone(shape: Shape) -> None:
    tools = toolbox(shape)
    schemas = Schemas(tools, shape, count, spare=10_000)
    assert not schemas.stubs
    assert all(sent is given for sent, given in zip(schemas.sent[:-1], tools, strict=True))
    PUBLISHED[shape].validate_python(schemas.sent[-1:])
    assert (schemas.sent[-1].get("function") or schemas.sent[-1])["name"] == "recall"


def test_without_any_tools_recall_is_still_offered() -> None:
    schemas = Schemas([], "openai", count)
    assert len(schemas.sent) == 1
    assert schemas.tokens_whole == 0 < schemas.tokens_sent
    assert schemas.find("") == schemas.find("read") == []


def test_small_schemas_and_those_asked_for_whole_stay_whole_among_stubs() -> None:
    small = tool("openai", "now", "The time.", {})
    schemas = Schemas([*toolbox("openai"), small], "openai", count, whole=["read_file"])
    assert schemas.stubs == frozenset(ABOUT) - {"read_file"}
    assert named(schemas, "now") is small


@pytest.mark.slow
def test_what_were_stubs_before_are_stubs_again_and_nothing_else_is() -> None:
    tools = [*toolbox("openai"), tool("openai", "now", "The time.", {}), {"type": "custom", "custom": {"name": "odd"}}]
    schemas = Schemas(tools, "openai", count, stubs=["now", "run_tests", "gone", "odd"], spare=100_000)
    assert schemas.stubs == {"now", "run_tests"}
    assert [sent["function"]["name"] for sent in schemas.sent[-2:]] == ["recall", "find_tools"]
    assert not Schemas(tools, "openai", count, stubs=()).stubs


def test_a_stub_keeps_the_cache_breakpoint_of_its_tool() -> None:
    tools = toolbox("anthropic")
    tools[-1]["cache_control"] = {"type": "ephemeral", "ttl": "1h"}
    tools[0]["input_examples"] = [{"path": "a.py"}]
    schemas = Schemas(tools, "anthropic", count)
    assert named(schemas, "list_categories")["cache_control"] == {"type": "ephemeral", "ttl": "1h"}
    assert "input_examples" not in named(schemas, "read_file")
    assert '[{"path":"a.py"}]' in schemas.text("read_file")
    PUBLISHED["anthropic"].validate_python(schemas.sent)


@pytest.mark.parametrize(
    ("shape", "theirs"),
    [
        ("anthropic", {"type": "web_search_20250305", "name": "web_search", "blocked_domains": [LONG]}),
        ("anthropic", {"type": "bash_20250124", "name": "bash", "cache_control": {"type": "ephemeral"}}),
        ("anthropic", tool("anthropic", "later", "Loaded by the provider.", {"much": LONG}, defer_loading=True)),
        ("anthropic", tool("anthropic", "coded", "Called by code.", {"much": LONG},
                           allowed_callers=["code_execution_20250825"])),
        ("openai", {"type": "custom", "custom": {"name": "patch", "description": LONG}}),
        ("openai-responses", {"type": "web_search", "search_context_size": "low"}),
        ("openai-responses", {"type": "mcp", "server_label": "x", "authorization": LONG}),
        ("openai-responses", {"type": "custom", "name": "patch", "description": LONG}),
        ("openai-responses", tool("openai-responses", "later", "By the provider.", {"much": LONG}, defer_loading=True)),
    ],
    ids=["web_search", "bash", "later", "by-code", "custom", "search", "mcp", "custom-responses", "later-responses"],
)  # fmt: skip
def test_what_a_provider_runs_or_loads_itself_is_left_alone(shape: Shape, theirs: dict[str, Any]) -> None:
    schemas = Schemas([theirs, *toolbox(shape)], shape, count)
    assert schemas.sent[0] is theirs
    assert schemas.stubs == frozenset(ABOUT)


def test_what_is_no_tool_of_the_shape_is_passed_on() -> None:
    odd: list[Any] = [None, "read", {"type": "function"}, {"type": "function", "function": None}, {"name": 3}, object()]
    for shape in SHAPES:
        schemas = Schemas(odd, shape, count, spare=0)
        assert all(sent is given for sent, given in zip(schemas.sent, odd, strict=False))
        assert not schemas.stubs


def test_a_tool_that_describes_itself_is_stubbed_like_any_other() -> None:
    class Described:
        def to_dict(self) -> dict[str, Any]:
            return tool("anthropic", "described", "Says what it is.", {"much": LONG * 10})

    schemas = Schemas([Described()], "anthropic", count)
    assert schemas.stubs == {"described"}
    PUBLISHED["anthropic"].validate_python(schemas.sent)


def test_the_windows_tools_give_way_to_the_callers_of_the_same_name() -> None:
    mine = [tool("openai", name, "Mine.", {}) for name in ("recall", "killick_recall", "find_tools")]
    schemas = Schemas([*toolbox("openai"), *mine], "openai", count)
    assert (schemas.recall_name, schemas.find_name) == ("killick_killick_recall", "killick_find_tools")
    assert named(schemas, "recall") is mine[0]
    assert "[stub: see killick_find_tools]" in named(schemas, "read_file")["function"]["description"]
    assert Schemas([{"type": "bash_20250124", "name": "recall"}], "anthropic", count).recall_name == "killick_recall"


def test_the_same_tools_make_the_same_bytes_and_are_known_again() -> None:
    tools = toolbox("openai")
    schemas = Schemas(tools, "openai", count)
    assert json.dumps(schemas.sent) == json.dumps(Schemas(toolbox("openai"), "openai", count).sent)
    assert all(schemas.same(again) for again in (tools, toolbox("openai"), tuple(tools)))
    tools.append(tool("openai", "more", "One more.", {}))
    assert not any(schemas.same(others) for others in (tools, tools[1:], []))
    assert schemas.same(tools[:-1])


# Finding ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "best"),
    [
        ("read a file", "read_file"),
        ("READ_FILE", "read_file"),
        ("writing files", "writeFile"),
        ("write", "writeFile"),
        ("searches", "search-code"),
        ("grep a pattern in code", "search-code"),
        ("testing", "run_tests"),
        ("category", "list_categories"),
        ("invoices", "send_invoice"),
        ("customer", "send_invoice"),
        ("cent", "send_invoice"),
        ("glob", "search-code"),
    ],
)
def test_a_tool_is_found_by_its_name_its_purpose_and_its_parameters(query: str, best: str) -> None:
    assert Schemas(toolbox("openai"), "openai", count).find(query)[0] == best


def test_names_that_are_asked_for_come_first_whatever_the_limit() -> None:
    schemas = Schemas(toolbox("openai-responses"), "openai-responses", count)
    assert schemas.find("select:send_invoice, search-code and writefile", limit=1) == [
        "send_invoice", "search-code", "writeFile",
    ]  # fmt: skip
    assert schemas.find("read_file", limit=2)[0] == "read_file"
    assert len(schemas.find("file", limit=2)) == 2
    assert schemas.find("", limit=1) == schemas.find("  ") == list(ABOUT)


def test_what_fits_nothing_is_answered_with_the_names_of_all() -> None:
    schemas = Schemas(toolbox("openai"), "openai", count)
    assert schemas.find("zeppelin") == []
    assert all(name in schemas.found_text([]) for name in ABOUT)


def test_a_parameter_that_stands_deep_in_the_schema_is_found() -> None:
    deep = tool("openai", "ship", "Ships it.", {})
    deep["function"]["parameters"]["properties"]["to"] = {"$ref": "#/$defs/Address"}
    deep["function"]["parameters"]["$defs"] = {
        "Address": {"type": "object", "properties": {"zip": {"anyOf": [{"description": "or Postleitzahl"}]}}}
    }
    schemas = Schemas([*toolbox("openai"), deep], "openai", count)
    assert schemas.find("zip") == schemas.find("postleitzahl") == ["ship"]
    assert schemas.find("Address") == []


@pytest.mark.parametrize("shape", SHAPES)
def test_the_answers_give_the_whole_schema(shape: Shape) -> None:
    schemas = Schemas(toolbox(shape), shape, count)
    text = schemas.text("run_tests")
    name, *description, parameters = text.splitlines()
    assert [name, "\n".join(description)] == ["run_tests", ABOUT["run_tests"][0]]
    assert json.loads(parameters.removeprefix("parameters: "))["properties"]["select"]["description"] == LONG
    assert schemas.called_text("run_tests").startswith("Nothing was run: run_tests")
    assert schemas.called_text("run_tests").endswith(text)
    assert schemas.found_text(["run_tests", "read_file"]) == f"{text}\n\n{schemas.text('read_file')}"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["properties", "description", "$defs", "anyOf", "items", "x", "type"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@given(schema=JSON, description=st.none() | st.text(), query=st.text(), spare=st.sampled_from([0, 50, 2000]))
def test_whatever_a_tool_says_nothing_raises_and_what_is_sent_keeps_the_order(
    schema: Any, description: str | None, query: str, spare: int
) -> None:
    odd: dict[str, Any] = {"name": "odd", "parameters": schema}
    if description is not None:
        odd["description"] = description
    tools = [*toolbox("openai"), {"type": "function", "function": odd}]
    schemas = Schemas(tools, "openai", count, spare=spare)
    assert [sent["function"]["name"] for sent in schemas.sent[: len(tools)]] == [*ABOUT, "odd"]
    assert schemas.find(query) == schemas.find(query)
    assert schemas.text("odd").startswith("odd")
