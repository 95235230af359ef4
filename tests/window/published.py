"""Whether a request is one that a provider takes: its published schema, and the rules of order that stand beside it.

The schemas are those of the official clients, which generate their types from the providers' specifications; unknown
fields are refused. The rules of order are written out here, once for each provider. Nothing of Killick is imported, so
that what is judged has no part in the judging.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import anthropic.types
import openai.types.chat
import openai.types.responses
from jsonschema import Draft202012Validator, SchemaError
from pydantic import ConfigDict, TypeAdapter
from pydantic_core import SchemaValidator, ValidationError

SHAPES = ("openai", "openai-responses", "anthropic")
_NAME = {
    "openai": r"[a-zA-Z0-9_-]{1,64}",
    "openai-responses": r"[a-zA-Z0-9_-]{1,64}",
    "anthropic": r"[a-zA-Z0-9_-]{1,128}",
}
_BREAKPOINTS_MAX = 4


def faults(shape: str, messages: Sequence[Any], tools: Sequence[Any] = (), system: Any = None) -> list[str]:
    """Everything for which the provider would refuse the request; nothing when it would take it."""
    order = {"openai": _chat, "openai-responses": _responses, "anthropic": _anthropic}[shape]
    found = [*_by_schema(shape, messages, tools, system), *_tools(shape, tools)]
    # Rules of order are read off fields that the schema demands, so that they only mean something once it holds.
    return found or [*order(messages, tools, system)]


# The published schemas ----------------------------------------------------------------------------


def _strict(schema: Any, known: dict[str, Any]) -> Any:
    """A schema that reads every list at once, where the types say Iterable, and takes no answer for a parameter."""
    if isinstance(schema, list | tuple):
        return type(schema)(_strict(part, known) for part in schema)
    if not isinstance(schema, dict):
        return schema
    if schema.get("type") == "generator":
        schema = {"type": "list"} | {name: schema[name] for name in ("items_schema", "ref") if name in schema}
    if schema.get("type") == "union":
        choices = [part for part in schema["choices"] if not _is_answer(part, known)]
        schema = {**schema, "choices": choices or schema["choices"]}
    return {name: _strict(part, known) for name, part in schema.items()}


def _is_answer(schema: Any, known: dict[str, Any]) -> bool:
    """Whether it is of the classes that a client reads answers into, which take fields that they do not know."""
    schema = known.get(schema.get("schema_ref"), schema)
    if schema["type"] == "union":
        return all(_is_answer(part, known) for part in schema["choices"])
    return schema["type"] == "model"


@cache
def _published(shape: str, part: str) -> SchemaValidator:
    published: Any = {
        ("openai", "message"): openai.types.chat.ChatCompletionMessageParam,
        ("openai", "tool"): openai.types.chat.ChatCompletionToolUnionParam,
        ("openai-responses", "message"): openai.types.responses.ResponseInputItemParam,
        ("openai-responses", "tool"): openai.types.responses.ToolParam,
        ("openai-responses", "system"): str,
        ("anthropic", "message"): anthropic.types.MessageParam,
        ("anthropic", "tool"): anthropic.types.ToolUnionParam,
        ("anthropic", "system"): str | list[anthropic.types.TextBlockParam],
    }[shape, part]
    schema: Any = TypeAdapter(published, config=ConfigDict(extra="forbid", strict=True)).core_schema
    known = {part["ref"]: part for part in schema.get("definitions", ())}
    return SchemaValidator(_strict(schema, known))


@cache
def _refused(shape: str, part: str, text: str) -> str | None:
    """Why the schema refuses a piece of JSON. Histories grow, so that most pieces were asked about before."""
    try:
        _published(shape, part).validate_python(json.loads(text))
    except ValidationError as error:
        telling = [line for line in error.errors() if line["type"] in ("extra_forbidden", "missing")]
        named = sorted({f"{'.'.join(map(str, line['loc'][-2:]))}: {line['msg']}" for line in telling})
        return "; ".join(named[:4]) or error.errors()[-1]["msg"]
    return None


def _by_schema(shape: str, messages: Sequence[Any], tools: Sequence[Any], system: Any) -> Iterator[str]:
    parts = [(f"messages[{at}]", "message", one) for at, one in enumerate(messages)]
    parts += [(f"tools[{at}]", "tool", one) for at, one in enumerate(tools)]
    parts += [("system", "system", system)] if system is not None and shape != "openai" else []
    for where, part, one in parts:
        text = json.dumps(one, allow_nan=False)
        if because := _refused(shape, part, text):
            yield f"{where}: {because}: {text[:300]}"
    if not messages:
        yield "no messages"


# Tools --------------------------------------------------------------------------------------------


def _function(shape: str, tool: Any) -> tuple[str, Any, bool] | None:
    """Name, schema and strictness of a tool that the caller runs; None for one that the provider runs."""
    if shape == "openai" and tool.get("type") == "function":
        function = tool["function"]
        return function["name"], function.get("parameters"), bool(function.get("strict"))
    if shape == "openai-responses" and tool.get("type") == "function":
        # Where nothing is said, this provider is strict.
        return tool["name"], tool["parameters"], tool["strict"] is not False
    if shape == "anthropic" and tool.get("type", "custom") in ("custom", None):
        return tool["name"], tool.get("input_schema"), bool(tool.get("strict"))
    return None


def _tools(shape: str, tools: Sequence[Any]) -> Iterator[str]:
    names = list[str]()
    for tool in tools:
        try:
            read = _function(shape, tool)
        except (KeyError, AttributeError, TypeError):
            continue  # The schema has said it.
        if read is None:
            continue
        name, schema, strict = read
        names.append(name)
        for because in _schema_faults(shape, json.dumps(schema), strict):
            yield f"tool {name}: {because}"
        if not re.fullmatch(_NAME[shape], name):
            yield f"tool {name!r}: not a name"
    yield from (f"tool {name}: given twice" for name in set(names) if names.count(name) > 1)


@cache
def _schema_faults(shape: str, text: str, strict: bool) -> list[str]:
    schema = json.loads(text)
    if schema is None:
        return ["no schema"] if shape == "anthropic" else []
    if schema.get("type") != "object":
        return ["its schema is no object's"]
    found = list[str]()
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        return [f"not a JSON schema: {error.message}"]
    if shape == "anthropic" and {"oneOf", "anyOf", "allOf"} & set(schema):
        found.append("a choice at the top of its schema")
    for part in _schemas(schema):
        if part.get("type") == "array" and "items" not in part and shape != "anthropic":
            found.append("an array that does not say of what")
        if strict and part.get("type") == "object":
            if part.get("additionalProperties") is not False:
                found.append("strict, and takes more than it names")
            if shape != "anthropic" and set(part.get("required", ())) != set(part.get("properties", {})):
                found.append("strict, and does not require all that it names")
    return found


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        yield schema
        for name in ("properties", "$defs"):
            for part in schema.get(name, {}).values():
                yield from _schemas(part)
        for name in ("items", "additionalProperties"):
            yield from _schemas(schema.get(name))
        for name in ("anyOf", "oneOf", "allOf"):
            for part in schema.get(name, ()):
                yield from _schemas(part)


# OpenAI chat --------------------------------------------------------------------------------------


def _chat(messages: Sequence[Any], tools: Sequence[Any], system: Any) -> Iterator[str]:
    waiting, seen = list[str](), set[str]()
    for at, message in enumerate(messages):
        where, role, content = f"messages[{at}]", message["role"], message.get("content")
        if role == "tool":
            if message["tool_call_id"] not in waiting:
                yield f"{where}: a result without a call directly before it"
            else:
                waiting.remove(message["tool_call_id"])
        elif waiting:
            yield f"{where}: {role} before the results of {waiting}"
            waiting = []
        if content == []:
            yield f"{where}: an empty list of parts"
        if isinstance(name := message.get("name"), str) and not re.fullmatch(r"[^\s<|\\/>]{1,64}", name):
            yield f"{where}: {name!r} is no name"
        if role != "assistant":
            continue
        if "tool_calls" in message and not message["tool_calls"]:
            yield f"{where}: an empty list of calls"
        if content is None and not (message.get("tool_calls") or message.get("refusal") or message.get("audio")):
            yield f"{where}: a reply that says nothing"
        for call in message.get("tool_calls") or ():
            if call["id"] in seen:
                yield f"{where}: the id {call['id']} again"
            if not re.fullmatch(_NAME["openai"], call[call["type"]]["name"]):
                yield f"{where}: a call of {call[call['type']]['name']!r}, which is no name"
            seen.add(call["id"])
            waiting.append(call["id"])
    if waiting:
        yield f"no results of {waiting}"


# OpenAI Responses ---------------------------------------------------------------------------------

_ANSWERS = {"function_call_output": "function_call", "custom_tool_call_output": "custom_tool_call"}
_OUTPUTS = ("function_call", "custom_tool_call", "web_search_call", "reasoning")


def _by_model(item: Any) -> bool:
    return item.get("type") in _OUTPUTS or (
        item.get("type", "message") == "message" and item.get("role") == "assistant"
    )


def _responses(messages: Sequence[Any], tools: Sequence[Any], system: Any) -> Iterator[str]:
    calls, answered, ids = dict[str, str](), set[str](), set[str]()
    for at, item in enumerate(messages):
        where, kind = f"input[{at}]", item.get("type", "message")
        if identity := item.get("id"):
            if identity in ids:
                yield f"{where}: the id {identity} again"
            ids.add(identity)
        if kind in ("function_call", "custom_tool_call"):
            if item["call_id"] in calls:
                yield f"{where}: the call {item['call_id']} again"
            if not re.fullmatch(_NAME["openai-responses"], item["name"]):
                yield f"{where}: a call of {item['name']!r}, which is no name"
            calls[item["call_id"]] = kind
        if kind in _ANSWERS:
            if calls.get(item["call_id"]) != _ANSWERS[kind]:
                yield f"{where}: a result without a call before it"
            elif item["call_id"] in answered:
                yield f"{where}: a second result of {item['call_id']}"
            answered.add(item["call_id"])
            if item["output"] == []:
                yield f"{where}: an empty list of parts"
        if kind == "reasoning" and not (at + 1 < len(messages) and _by_model(messages[at + 1])):
            yield f"{where}: reasoning without what it led to"
        if kind == "message" and isinstance(item["content"], list):
            said = {part["type"] for part in item["content"]}
            if not said:
                yield f"{where}: an empty list of parts"
            if item["role"] == "assistant" and not said <= {"output_text", "refusal"}:
                yield f"{where}: a reply that holds {sorted(said)}"
    if missing := [call for call in calls if call not in answered]:
        yield f"no results of {missing}"


# Anthropic ----------------------------------------------------------------------------------------

_OF_MODEL = frozenset({"tool_use", "thinking", "redacted_thinking", "server_tool_use", "web_search_tool_result"})
_OF_USER = frozenset({"tool_result", "image", "document", "search_result"})


def _blocks(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _within(blocks: Sequence[Any]) -> Iterator[Any]:
    """Blocks, and those inside them."""
    for block in blocks:
        yield block
        inner = block.get("content") if block["type"] == "tool_result" else None
        yield from inner if isinstance(inner, list) else ()


def _anthropic(messages: Sequence[Any], tools: Sequence[Any], system: Any) -> Iterator[str]:
    waiting, seen = list[str](), set[str]()
    for at, message in enumerate(messages):
        where, blocks = f"messages[{at}]", _blocks(message["content"])
        kinds = [block["type"] for block in blocks]
        if message["role"] != ("assistant" if at % 2 else "user"):
            yield f"{where}: {message['role']} out of turn"
        if not blocks:
            yield f"{where}: no content"
        if stray := set(kinds) & (_OF_USER if message["role"] == "assistant" else _OF_MODEL):
            yield f"{where}: {sorted(stray)} from the {message['role']}"
        yield from (f"{where}: {because}" for block in _within(blocks) for because in _block(block))
        results = [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"]
        if kinds[: len(results)] != ["tool_result"] * len(results):
            yield f"{where}: something before the results"
        if sorted(results) != sorted(waiting):
            yield f"{where}: results of {results} to calls {waiting}"
        waiting = [block["id"] for block in blocks if block["type"] == "tool_use"]
        yield from (f"{where}: the id {call} again" for call in waiting if call in seen or waiting.count(call) > 1)
        seen |= set(waiting)
        if message["role"] == "assistant" and kinds[-1:] in (["thinking"], ["redacted_thinking"]):
            yield f"{where}: ends with thinking"
    if waiting:
        yield f"no results of {waiting}"
    if seen and not tools:
        yield "calls, and no tools"
    marked = [
        *tools,
        *(_blocks(system) if system else ()),
        *(b for m in messages for b in _within(_blocks(m["content"]))),
    ]
    if (count := sum(1 for block in marked if block.get("cache_control"))) > _BREAKPOINTS_MAX:
        yield f"{count} cache breakpoints"


def _block(block: Any) -> Iterator[str]:
    match block["type"]:
        case "text" if not block["text"].strip():
            yield "a text without text"
        case "tool_use" if not re.fullmatch(r"[a-zA-Z0-9_-]+", block["id"]):
            yield f"{block['id']!r} is no id"
        case "tool_use" if not re.fullmatch(_NAME["anthropic"], block["name"]):
            yield f"a call of {block['name']!r}, which is no name"
        case "thinking" if not block["signature"]:
            yield "thinking that nobody signed"
        case "tool_result" if block.get("is_error") and isinstance(block.get("content"), list):
            if any(part["type"] != "text" for part in block["content"]):
                yield "an error that is more than text"
        case "image" | "document" if block["source"]["type"] == "base64":
            try:
                base64.b64decode(block["source"]["data"], validate=True)
            except ValueError:
                yield "data that is no base64"
        case _:
            pass
