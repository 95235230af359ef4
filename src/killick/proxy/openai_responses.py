"""OpenAI's Responses API: requests, replies and event streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from killick.proxy.frames import Frame
from killick.proxy.wire import StreamedReply, Wire, is_list, is_map, maps
from killick.window.messages import Shape

_ENDS: Final = ("response.completed", "response.incomplete", "response.failed")


class StreamedResponse(StreamedReply):
    """The events of one response; the last one contains it whole."""

    def __init__(self) -> None:
        super().__init__()
        self._whole: dict[str, Any] | None = None

    def take(self, frame: Frame) -> bytes:
        event = frame.read() or {}
        if is_map(event.get("response")):
            self._whole = event["response"]
        if event.get("type") == "error":
            self.error = event
        return self._held(frame) if event.get("type") in _ENDS else frame.raw

    def reply(self) -> dict[str, Any] | None:
        return self._whole

    @property
    def is_whole(self) -> bool:
        return bool(self._tail)


class Responses(Wire):
    """POST /v1/responses."""

    shape: Shape = "openai-responses"
    step = "responses"
    streamed = StreamedResponse

    def messages(self, body: Mapping[str, Any]) -> list[Any]:
        given = body.get("input")
        found = [{"role": "user", "content": given}] if isinstance(given, str) else given
        return found if is_list(found) else []

    def said(self, reply: Mapping[str, Any]) -> list[Any]:
        return maps(reply.get("output"))
