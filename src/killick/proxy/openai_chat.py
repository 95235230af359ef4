"""OpenAI's Chat Completions API, which many providers implement: requests, replies and chunk streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from killick.engine.steps.model_reply import join_chunks
from killick.proxy.frames import DONE, Frame
from killick.proxy.wire import StreamedReply, Wire, is_map, maps
from killick.window.messages import Shape

_CHUNK: Final = "chat.completion.chunk"


class StreamedChat(StreamedReply):
    """The chunks of a reply. From the one with its finish on, they are held back."""

    def __init__(self) -> None:
        super().__init__()
        self._chunks: list[dict[str, Any]] = []
        self._is_finished = False

    def take(self, frame: Frame) -> bytes:
        if frame.data == DONE:
            return self._held(frame)
        chunk = frame.read()
        if chunk is None or chunk.get("error"):
            self.error = chunk and chunk["error"]
            return frame.raw
        self._chunks.append(chunk)
        choices = maps(chunk.get("choices"))
        self._is_finished = self._is_finished or any(choice.get("finish_reason") is not None for choice in choices)
        return self._held(frame) if self._is_finished else frame.raw

    def reply(self) -> dict[str, Any] | None:
        if not self._chunks or any(chunk.get("object", _CHUNK) != _CHUNK for chunk in self._chunks):
            return None
        whole = join_chunks([{**chunk, "object": _CHUNK} for chunk in self._chunks])[0]
        choices: list[dict[str, Any]] = []
        for choice in maps(whole.get("choices")):
            delta = choice.get("delta")
            message = {"role": "assistant", "content": None} | (dict(delta) if is_map(delta) else {})
            if calls := maps(message.get("tool_calls")):
                message["tool_calls"] = [
                    {"type": "function"} | {name: value for name, value in call.items() if name != "index"}
                    for call in sorted(calls, key=lambda call: call.get("index") or 0)
                ]
            rest = {name: value for name, value in choice.items() if name not in ("delta", "finish_reason")}
            choices.append({**rest, "message": message, "finish_reason": choice.get("finish_reason")})
        return {**whole, "object": "chat.completion", "choices": choices}

    @property
    def is_whole(self) -> bool:
        return self._is_finished


class Chat(Wire):
    """POST /v1/chat/completions."""

    shape: Shape = "openai"
    step = "chat.completions"
    streamed = StreamedChat

    def said(self, reply: Mapping[str, Any]) -> list[Any]:
        message: Any = next((choice.get("message") for choice in maps(reply.get("choices"))), None)
        found = dict(message) if is_map(message) else {}
        kept = {name: value for name, value in found.items() if value is not None and value != []}
        return [{"role": "assistant", "content": None} | kept]
