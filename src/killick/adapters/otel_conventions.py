"""Maps attempts to OpenTelemetry's conventions for generative AI. Pure; imports no SDK.

The conventions are in development: these names are those of the registry of 2026.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final

import msgspec

from killick.engine.observers import Attempt
from killick.engine.steps.model_reply import ToolCall, reasoning_of, text_of, tool_calls_of
from killick.window.messages import Call, Message, Part, read, shape_of
from killick.window.messages import text_of as text_in

_MAKERS: Final = ("anthropic", "openai")

_SETTINGS: Final = {
    "max_tokens": "max_tokens", "max_completion_tokens": "max_tokens", "max_output_tokens": "max_tokens",
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "seed": "seed",
    "frequency_penalty": "frequency_penalty", "presence_penalty": "presence_penalty", "stream": "stream",
}  # fmt: skip
"""Request settings and their conventional names."""

_STOPS: Final = ("stop", "stop_sequences")

USAGE: Final = "gen_ai.usage."
"""How the names of tokens' attributes begin."""


# requests and replies ------------------------------------------------------------------------------


def maker_of(fn: Callable[..., Any] | None) -> str | None:
    """Returns the provider of an official client's method."""
    while isinstance(fn, partial):
        fn = fn.func
    if isinstance(declared := getattr(fn, "maker", None), str):
        return declared  # of a recording client, which passes on its send method alone
    owner: Any = getattr(fn, "__self__", None)
    homes = {cls.__module__.partition(".")[0] for cls in owner.__class__.__mro__}
    return next((maker for maker in _MAKERS if maker in homes), None)


def asked_by(attempt: Attempt) -> dict[str, Any]:
    """Returns a model request's attributes: operation, model and settings."""
    arguments = attempt.arguments
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "embeddings" if "Embeddings." in attempt.name else "chat",
        "gen_ai.provider.name": maker_of(attempt.fn) or "unknown",
    }
    model = arguments.get("model")
    if isinstance(model, str):
        attributes["gen_ai.request.model"] = model
    for name, ours in _SETTINGS.items():
        if isinstance(value := arguments.get(name), int | float):
            attributes[f"gen_ai.request.{ours}"] = value
    for name in _STOPS:
        if (found := arguments.get(name)) is not None:
            attributes["gen_ai.request.stop_sequences"] = [found] if isinstance(found, str) else [*map(str, found)]
    return attributes


def replied(attempt: Attempt) -> dict[str, Any]:
    """Returns a model reply's attributes: model, finish reason and usage."""
    attributes: dict[str, Any] = {}
    maker = (attempt.reply or "").partition(".")[0] or maker_of(attempt.fn)
    if maker:
        attributes["gen_ai.provider.name"] = maker
    reply = _last(attempt.output)
    if isinstance(found := reply.get("id"), str):
        attributes["gen_ai.response.id"] = found
    if reasons := list(_reasons(reply)):
        attributes["gen_ai.response.finish_reasons"] = reasons
    usage = attempt.usage
    if usage is not None:
        attributes |= {
            "gen_ai.response.model": usage.model,
            "gen_ai.usage.input_tokens": usage.tokens_in,
            "gen_ai.usage.output_tokens": usage.tokens_out,
            "gen_ai.usage.cache_read.input_tokens": usage.tokens_cached or None,
            "killick.cost.usd": usage.cost_micros / 1e6 if usage.cost_micros else None,
        }
    return attributes


def _last(output: Any) -> Mapping[str, Any]:
    """Returns a reply as sent; a joined stream as a whole."""
    if isinstance(output, Mapping):
        chunks: Any = output.get("chunks")
        if isinstance(chunks, list) and len(chunks) == 1:
            return _last(chunks[0].get("chunk"))
        return output
    return {}


def _reasons(reply: Mapping[str, Any]) -> Iterable[str]:
    for choice in reply.get("choices") or ():
        if isinstance(choice, Mapping) and isinstance(choice.get("finish_reason"), str):
            yield choice["finish_reason"]
    for name in ("stop_reason", "status"):
        if isinstance(found := reply.get(name), str):
            yield found


# content: only where it is wanted ------------------------------------------------------------------


def called_with(attempt: Attempt) -> dict[str, Any]:
    """Returns a tool call's arguments."""
    return {"gen_ai.tool.call.arguments": _text(attempt.arguments)}


def asked_with(attempt: Attempt) -> dict[str, Any]:
    """Returns a model's request."""
    arguments = attempt.arguments
    tools: Any = arguments.get("tools") or ()
    sent = next((arguments[name] for name in ("messages", "input", "args") if arguments.get(name) is not None), None)
    sent = [sent] if isinstance(sent, str) else sent
    attributes: dict[str, Any] = {}
    if isinstance(sent, list):
        asked = [each if isinstance(each, Mapping) else {"role": "user", "content": text_in(each)} for each in sent]
        shape = shape_of(asked, tools) or "openai"
        attributes["gen_ai.input.messages"] = _text([_message(read(each, shape)) for each in asked])
    if system := arguments.get("system", arguments.get("instructions")):
        attributes["gen_ai.system_instructions"] = _text([{"type": "text", "content": text_in(system)}])
    if tools:
        attributes["gen_ai.tool.definitions"] = _text(tools)
    return attributes


def said_by(attempt: Attempt) -> dict[str, Any]:
    """Returns a tool's result, or a model's reply."""
    if attempt.outcome != "returned":
        return {}
    if attempt.sort != "model":
        return {"gen_ai.tool.call.result": _text(attempt.output)}
    reply: Any = attempt.output if isinstance(attempt.output, str) else _last(attempt.output)
    parts: list[dict[str, Any]] = []
    if thought := reasoning_of(reply):
        parts.append({"type": "reasoning", "content": thought})
    if said := text_of(reply):
        parts.append({"type": "text", "content": said})
    parts += map(_call, tool_calls_of(reply))
    ended = next(iter(_reasons(reply)), "") if isinstance(reply, Mapping) else ""
    return {"gen_ai.output.messages": _text([{"role": "assistant", "parts": parts, "finish_reason": ended}])}


def _message(message: Message) -> dict[str, Any]:
    role = {"result": "tool", "other": "user"}.get(message.role, message.role)
    return {"role": role, "parts": [*map(_part, message.parts), *map(_call, message.calls)]}


def _part(part: Part) -> dict[str, Any]:
    if part.is_result:
        return {"type": "tool_call_response", "id": part.call, "result": part.text}
    return {"type": "other" if part.media else "text", "content": part.text}


def _call(call: Call | ToolCall) -> dict[str, Any]:
    return {"type": "tool_call", "id": call.id, "name": call.name, "arguments": call.arguments}


def _text(value: Any) -> str:
    """Returns JSON. A `killick.Secret` stays hidden."""
    return msgspec.json.encode(value, enc_hook=repr).decode()
