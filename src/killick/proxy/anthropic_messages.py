"""Anthropic's Messages API: requests, replies and event streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from killick.proxy.frames import Frame
from killick.proxy.wire import StreamedReply, Wire, is_map
from killick.window.messages import Shape, arguments_of

_GROWS: Final = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
"""The field of a block that each delta extends."""


class StreamedMessage(StreamedReply):
    """The events of a message: its start, its blocks with their deltas, and its end."""

    def __init__(self) -> None:
        super().__init__()
        self._whole: dict[str, Any] | None = None
        self._blocks: dict[int, dict[str, Any]] = {}
        self._inputs: dict[int, list[str]] = {}
        self._grown: dict[tuple[int, str], list[str]] = {}
        self._stops = False

    def take(self, frame: Frame) -> bytes:
        event = frame.read() or {}
        match event.get("type"):
            case "message_start":
                message = event.get("message")
                self._whole = dict(message) if is_map(message) else None
            case "content_block_start" | "content_block_delta" if isinstance(event.get("index"), int):
                self._block(event["index"], event)
            case "message_delta":
                self._end(event)
                return self._held(frame)
            case "message_stop":
                self._stops = True
                return self._held(frame)
            case "error":
                self.error = event.get("error") or event
            case _:
                pass
        return frame.raw

    def _end(self, event: dict[str, Any]) -> None:
        if self._whole is not None:
            delta, usage, old = event.get("delta"), event.get("usage"), self._whole.get("usage")
            new = {name: value for name, value in usage.items() if value is not None} if is_map(usage) else {}
            self._whole |= {**(delta if is_map(delta) else {}), "usage": (old if is_map(old) else {}) | new}

    def _block(self, index: int, event: dict[str, Any]) -> None:
        if event["type"] == "content_block_start":
            block = event.get("content_block")
            self._blocks[index] = dict(block) if is_map(block) else {}
            return
        block, delta = self._blocks.get(index), event.get("delta")
        if block is None or not is_map(delta):
            return
        kind = str(delta.get("type"))
        if kind in _GROWS:
            field = _GROWS[kind]
            self._grown.setdefault((index, field), []).append(str(delta.get(field) or ""))
        elif kind == "input_json_delta":
            self._inputs.setdefault(index, []).append(str(delta.get("partial_json") or ""))
        elif kind == "citations_delta":
            block["citations"] = [*(block.get("citations") or []), delta.get("citation")]
        else:
            for name, value in delta.items():
                if name != "type":
                    old = block.get(name)
                    block[name] = old + value if isinstance(old, str) and isinstance(value, str) else value

    def reply(self) -> dict[str, Any] | None:
        if self._whole is None:
            return None
        blocks: list[dict[str, Any]] = []
        for index in sorted(self._blocks):
            grown = {field: pieces for (of, field), pieces in self._grown.items() if of == index}
            block = dict(self._blocks[index])
            block |= {field: str(block.get(field) or "") + "".join(pieces) for field, pieces in grown.items()}
            if text := "".join(self._inputs.get(index, ())):
                # Truncated JSON stays text.
                block = {**block, "input": arguments_of(text)}
            blocks.append(block)
        return {**self._whole, "content": blocks}

    @property
    def is_whole(self) -> bool:
        return self._stops


class Messages(Wire):
    """POST /v1/messages."""

    shape: Shape = "anthropic"
    step = "messages"
    streamed = StreamedMessage

    def said(self, reply: Mapping[str, Any]) -> list[Any]:
        content = reply.get("content")
        return [{"role": "assistant", "content": content}] if content else []

    def error(self, kind: str, message: str) -> dict[str, Any]:
        return {"type": "error", "error": {"type": kind, "message": message}}
