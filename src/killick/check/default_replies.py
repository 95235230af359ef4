"""Default replies of models and people without a fake: short, valid, and a function of the request alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, cast, get_origin

import msgspec

from killick.check.fakes import inmost
from killick.check.reply_forms import Call, ReplyForm, Turn, asked_by, is_clients
from killick.check.samples import sample
from killick.definitions.tools import TOOLS, resolved_hints
from killick.engine.steps.intention import Intent
from killick.engine.steps.model_reply import Provider, provider_of
from killick.errors import FakeRefused
from killick.model.codec import plain

TEXT: Final = "This is a sample reply."
PREFIX: Final = "call_sample_"
_MADE: Final = re.compile(rf"\b{PREFIX}(\d+)")
"""The ids of the sample model's tool calls: a request's history shows how many it made."""

Calls = Literal["each", "all", "none"]
"""The tools that the sample model calls: each one, then pairs in one reply; all in its first reply; or none."""


class Offered(NamedTuple):
    """A tool that a request offers to the model."""

    name: str
    schema: Any


def sample_reply(intent: Intent, calls: Calls) -> Any:
    """Returns a model's reply: tool calls in its provider's form while there are any left, then a text.

    A model function without tools returns a sample of its declared type, or the text itself.
    """
    fn, request = inmost(intent.fn), intent.arguments
    returns = None if is_clients(fn) else resolved_hints(fn).get("return", Any)
    provider = provider_of(fn) if returns is None else _provider_of(returns, request)
    if provider is None:
        return TEXT if returns is Any else sample(returns)
    made = max(map(int, _MADE.findall(repr(request.get("messages", request.get("input"))))), default=0)
    form = ReplyForm(_next(offered(request), calls, made), number=1 + made, calls=made, model="sample", prefix=PREFIX)
    return form.reply(provider, request, objects=returns is None or hasattr(returns, "model_fields"))


def _provider_of(returns: Any, request: Mapping[str, Any]) -> Provider | None:
    """Returns the form that a model function's replies have; None for a function that takes no tools."""
    home = str(getattr(returns, "__module__", ""))
    if home.startswith(("openai.types.", "anthropic.types.")):
        return "anthropic" if home[0] == "a" else "openai-responses" if ".responses" in home else "openai"
    is_open = returns is Any or (get_origin(returns) or returns) in (dict, Mapping)
    return asked_by(request) if is_open and any(offered(request)) else None


def offered(request: Mapping[str, Any]) -> Iterator[Offered]:
    """Returns the functions among a request's tools. A provider's own tools have no schema, and run elsewhere."""
    for each in cast("Sequence[Any]", request.get("tools") or ()):
        one: dict[str, Any] = dict(cast("Mapping[str, Any]", each)) if isinstance(each, Mapping) else {}
        function: dict[str, Any] = one.get("function", one)
        schema: Any = function.get("parameters", function.get("input_schema"))
        if schema is not None and "name" in function:
            yield Offered(function["name"], schema)


def _next(tools: Iterable[Offered], calls: Calls, made: int) -> Turn:
    """Returns the turn that follows so many tool calls."""
    each = [] if calls == "none" else [Call(tool.name, _arguments(tool)) for tool in tools]
    pairs = zip(each[::2], [*each[1::2], *each[:1]], strict=False)
    for turn in [tuple(each)] if calls == "all" else [*((call,) for call in each), *pairs]:
        if made <= 0 and turn:
            return Turn(parts=turn)
        made -= len(turn)
    return Turn(parts=(TEXT,))


def _arguments(tool: Offered) -> dict[str, Any]:
    """Returns samples of a tool's required parameters: by its declared types, or by its schema."""
    declared = TOOLS.get(tool.name)
    if declared is not None:
        required = [each for each in declared.shape.signature.parameters.values() if each.default is each.empty]
        try:
            values = {each.name: sample(declared.shape.hints.get(each.name, str), each.name) for each in required}
            read: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(plain(values)))
        except (FakeRefused, TypeError):
            pass
        else:
            return read
    found = sample_answer(tool.schema)
    return dict(cast("Mapping[str, Any]", found)) if isinstance(found, Mapping) else {}


def sample_answer(schema: Any) -> Any:
    """Returns a person's answer for a schema."""
    if not isinstance(schema, Mapping):
        return "a sample answer"
    described = cast("Mapping[str, Any]", schema)
    for name in ("const", "default"):
        if name in described:
            return described[name]
    if described.get("enum"):
        return described["enum"][0]
    for name in ("anyOf", "oneOf"):
        if described.get(name):
            return sample_answer(described[name][0])
    match described.get("type"):
        case "object":
            properties: Mapping[str, Any] = described.get("properties", {})
            return {name: sample_answer(properties.get(name)) for name in described.get("required", properties)}
        case "array":
            return [sample_answer(described.get("items"))]
        case "integer" | "number":
            return described.get("minimum", 1)
        case "boolean":
            return True
        case "null":
            return None
        case "string" | None:
            return "a sample answer"
        case other:
            raise FakeRefused("answer", f"no sample can be made for schema type {other!r}; give an answer")
