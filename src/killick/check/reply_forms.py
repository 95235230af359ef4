"""Replies of models in the providers' wire forms: texts and tool calls as data. Sends nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import msgspec

from killick.check.fakes import inmost
from killick.engine.steps.model_reply import Provider, rebuild

_KINDS: Final[Mapping[Provider, str]] = {
    "openai": "openai.chat", "openai-responses": "openai.response", "anthropic": "anthropic.message",
}  # fmt: skip


class Call(msgspec.Struct, frozen=True):
    """A tool call by the model."""

    name: str
    arguments: dict[str, Any]


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One reply: texts and calls in order, and its usage."""

    parts: tuple[str | Call, ...]
    reasoning: str | None = None
    usage: tuple[int, int] | None = None
    stop: str | None = None

    @property
    def calls(self) -> int:
        return sum(isinstance(part, Call) for part in self.parts)


@dataclass
class ReplyForm:
    """Writes one turn as the reply of a provider."""

    said: Turn
    number: int
    """The reply's number, for its id."""
    calls: int
    """The number of tool calls in earlier replies, for the ids of its own."""
    model: str
    """The model's name, if the request has none."""
    usage: tuple[int, int] = (1, 1)
    prefix: str = "call_"

    def reply(self, provider: Provider, request: Mapping[str, Any], *, objects: bool) -> Any:
        """Returns the reply as JSON, or as an object of the provider's client."""
        written = self._written(provider, str(request.get("model") or self.model))
        return rebuild(_KINDS[provider], written, request) if objects else written

    def _written(self, provider: Provider, model: str) -> dict[str, Any]:
        said, number = self.said, self.number
        read, wrote = said.usage or self.usage
        match provider:
            case "openai":
                finish = said.stop or ("tool_calls" if said.calls else "stop")
                message = self._chat_message()
                return {
                    "id": f"chatcmpl-{number}", "object": "chat.completion", "created": 0, "model": model,
                    "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": finish}],
                    "usage": {"prompt_tokens": read, "completion_tokens": wrote, "total_tokens": read + wrote},
                }  # fmt: skip
            case "openai-responses":
                return {
                    "id": f"resp_{number}", "object": "response", "created_at": 0, "status": said.stop or "completed",
                    "error": None, "incomplete_details": None, "instructions": None, "metadata": {}, "model": model,
                    "output": self._items(), "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
                    "usage": {
                        "input_tokens": read, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": wrote,
                        "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": read + wrote,
                    },
                }  # fmt: skip
            case "anthropic":
                stop = said.stop or ("tool_use" if said.calls else "end_turn")
                return {
                    "id": f"msg_{number}", "type": "message", "role": "assistant", "model": model,
                    "content": self._blocks(), "stop_reason": stop, "stop_sequence": None,
                    "usage": {"input_tokens": read, "output_tokens": wrote},
                }  # fmt: skip

    def _chat_message(self) -> dict[str, Any]:
        text = "".join(part for part in self.said.parts if isinstance(part, str))
        calls = [
            {
                "id": self._call_id(), "type": "function",
                "function": {"name": part.name, "arguments": json.dumps(part.arguments)},
            }
            for part in self.said.parts if isinstance(part, Call)
        ]  # fmt: skip
        message: dict[str, Any] = {"role": "assistant", "content": text or None}
        message |= {"tool_calls": calls} if calls else {}
        return message | ({"reasoning_content": self.said.reasoning} if self.said.reasoning else {})

    def _items(self) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = []
        if self.said.reasoning:
            summary = [{"type": "summary_text", "text": self.said.reasoning}]
            items.append({"id": f"rs_{self.number}", "type": "reasoning", "summary": summary})
        for part in self.said.parts:
            if isinstance(part, str):
                content: list[dict[str, Any]] = [{"type": "output_text", "text": part, "annotations": []}]
                items.append(
                    {"id": f"msg_{self.number}", "type": "message", "role": "assistant", "status": "completed",
                     "content": content}
                )  # fmt: skip
            else:
                known_as = self._call_id()
                items.append(
                    {"id": f"fc_{known_as}", "type": "function_call", "call_id": known_as, "name": part.name,
                     "arguments": json.dumps(part.arguments), "status": "completed"}
                )  # fmt: skip
        return items

    def _blocks(self) -> list[dict[str, Any]]:
        blocks: list[dict[str, Any]] = []
        if self.said.reasoning:
            blocks.append({"type": "thinking", "thinking": self.said.reasoning, "signature": self.model})
        for part in self.said.parts:
            if isinstance(part, str):
                blocks.append({"type": "text", "text": part})
            else:
                blocks.append(
                    {"type": "tool_use", "id": self._call_id(), "name": part.name, "input": dict(part.arguments)}
                )
        return blocks

    def _call_id(self) -> str:
        self.calls += 1
        return f"{self.prefix}{self.calls}"


def is_clients(fn: Any) -> bool:
    """Returns whether a function is a method of an official client."""
    owner: Any = getattr(inmost(fn), "__self__", None)
    return type(owner).__module__.partition(".")[0] in ("openai", "anthropic")


def asked_by(request: Mapping[str, Any]) -> Provider:
    """Returns a request's form; OpenAI's chat by default."""
    if "input" in request or "instructions" in request:
        return "openai-responses"
    tools = cast("Sequence[Any]", request.get("tools") or ())
    shaped = any(isinstance(tool, Mapping) and "input_schema" in tool for tool in tools)
    return "anthropic" if shaped or "system" in request else "openai"
