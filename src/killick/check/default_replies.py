"""Default replies of models and people without a fake: short, valid and constant."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final, cast

from killick.check.samples import sample
from killick.definitions.tools import resolved_hints
from killick.engine.steps.intention import Intent
from killick.engine.steps.model_reply import rebuild
from killick.errors import FakeRefused

TEXT: Final = "This is a sample reply."

_REPLIES: Final[Mapping[tuple[str, str], tuple[str, Mapping[str, Any]]]] = {
    ("openai", "Completions"): (
        "openai.chat",
        {
            "id": "chatcmpl-sample", "object": "chat.completion", "created": 0, "model": "sample",
            "choices": [
                {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": TEXT}},
            ],
        },
    ),
    ("openai", "Responses"): (
        "openai.response",
        {
            "id": "resp_sample", "object": "response", "created_at": 0, "model": "sample", "tools": [],
            "tool_choice": "auto", "parallel_tool_calls": True,
            "output": [
                {
                    "id": "msg_sample", "type": "message", "role": "assistant", "status": "completed",
                    "content": [{"type": "output_text", "text": TEXT, "annotations": []}],
                }
            ],
        },
    ),
    ("anthropic", "Messages"): (
        "anthropic.message",
        {
            "id": "msg_sample", "type": "message", "role": "assistant", "model": "sample", "stop_reason": "end_turn",
            "stop_sequence": None, "content": [{"type": "text", "text": TEXT}],
            "usage": {"input_tokens": 1, "output_tokens": 1},
        },
    ),
}  # fmt: skip
"""By the package and class of an official client's method, without its Async prefix."""


def sample_reply(intent: Intent) -> Any:
    """Returns a model's reply: of its declared type, or a text in its provider's form; else the text itself."""
    fn: Any = intent.fn
    while isinstance(fn, partial):
        fn = cast("Any", fn.func)
    owner: Any = getattr(fn, "__self__", None).__class__
    known = _REPLIES.get((owner.__module__.partition(".")[0], owner.__name__.removeprefix("Async")))
    if known is not None:
        return rebuild(known[0], dict(known[1]), intent.arguments)
    returns = resolved_hints(fn).get("return", Any)
    return TEXT if returns is Any else sample(returns)


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
