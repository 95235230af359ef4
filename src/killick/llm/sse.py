"""Provider wire formats, written and read: stream events, and a text as a provider would have sent it. Pure."""

from __future__ import annotations

import json
from typing import Any, Final


def reply(name: str, text: str, model: str) -> dict[str, Any]:
    """The reply, in the format of the called method."""
    if name == "responses":
        part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": []}
        about = {"id": "msg_given", "type": "message", "role": "assistant", "status": "completed"}
        return {
            "id": "resp_given", "object": "response", "created_at": 0, "model": model, "status": "completed",
            "output": [{**about, "content": [part]}], "tools": [], "tool_choice": "auto", "parallel_tool_calls": True,
        }  # fmt: skip
    if name == "chat.completions":
        message = {"role": "assistant", "content": text}
        return _chat("chat.completion", model, {"message": message, "finish_reason": "stop"})
    return {
        "id": "msg_given", "type": "message", "role": "assistant", "model": model, "stop_reason": "end_turn",
        "stop_sequence": None, "content": [{"type": "text", "text": text}],
        "usage": {"input_tokens": 0, "output_tokens": 0},
    }  # fmt: skip


def events(name: str, text: str, model: str) -> list[dict[str, Any]]:
    """The same as stream events."""
    whole = reply(name, text, model)
    if name == "responses":
        return [
            {"type": "response.created", "sequence_number": 0, "response": {**whole, "output": []}},
            {"type": "response.completed", "sequence_number": 1, "response": whole},
        ]
    if name == "chat.completions":
        delta = {"role": "assistant", "content": text}
        return [_chat("chat.completion.chunk", model, {"delta": delta, "finish_reason": "stop"})]
    return [
        {"type": "message_start", "message": {**whole, "content": [], "stop_reason": None}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}},
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": {"output_tokens": 0},
        },
        {"type": "message_stop"},
    ]


def _chat(kind: str, model: str, choice: dict[str, Any]) -> dict[str, Any]:
    return {"id": "chat_given", "object": kind, "created": 0, "model": model, "choices": [{"index": 0, **choice}]}


# events of a stream -------------------------------------------------------------------------------


class Events:
    """Parses events from the lines of a stream. JSON is decoded; the end marker is skipped."""

    def __init__(self) -> None:
        self._data: list[str] = []

    def line(self, line: str) -> list[Any]:
        """The events that this line completes: one, or none."""
        if line.startswith("data:"):
            self._data.append(line[5:].removeprefix(" "))
            return []
        if line.strip():
            return []
        return self.rest()

    def rest(self) -> list[Any]:
        """The rest when the stream ends."""
        text, self._data = "\n".join(self._data), []
        if not text or text == "[DONE]":
            return []
        try:
            return [json.loads(text)]
        except ValueError:
            return [{"type": "text", "text": text}]


def written(chunk: Any) -> bytes:
    """A chunk as an event; a chunk with a type is named by it."""
    kind = dict[str, Any](chunk).get("type") if isinstance(chunk, dict) else None  # pyright: ignore[reportUnknownArgumentType]
    return (f"event: {kind}\n".encode() if isinstance(kind, str) else b"") + b"data: " + encoded(chunk) + b"\n\n"


_DONE: Final = b"data: [DONE]\n\n"


def ending(chunk: Any) -> bytes:
    """The end marker, which only the oldest format has."""
    return _DONE if isinstance(chunk, dict) and "choices" in chunk else b""


def encoded(value: Any) -> bytes:
    """Compact JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
