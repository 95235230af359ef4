"""OpenAI's Responses API: requests, replies and event streams. Recorded and sent unchanged: never paged."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from killick.proxy.frames import Frame, framed
from killick.proxy.wire import ParsedBody, Splice, Wire, is_list, is_map, maps
from killick.window.messages import Shape


class Responses(Wire):
    """POST /v1/responses."""

    shape: Shape = "openai-responses"
    step = "responses"

    def asked(self, body: dict[str, Any]) -> ParsedBody:
        given, tools = body.get("input"), body.get("tools")
        messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
        return ParsedBody(
            body, messages if is_list(messages) else [], tools if is_list(tools) else [], body.get("instructions"),
            "the proxy does not page the Responses API",
        )  # fmt: skip

    def said(self, reply: Mapping[str, Any]) -> list[Any]:
        return maps(reply.get("output"))

    def splice(self) -> ResponseSplice:
        return ResponseSplice()

    def broken(self, error: Mapping[str, Any]) -> bytes:
        return framed({"type": "error", **error}, "error")


class ResponseSplice(Splice):
    """The events of one response; the last one contains it whole. There is only one round."""

    def begin(self, own: Collection[str] = ()) -> None:
        super().begin(own)
        self._whole: dict[str, Any] | None = None

    def take(self, frame: Frame) -> bytes:
        event = frame.read() or {}
        if is_map(event.get("response")):
            self._whole = event["response"]
        if event.get("type") == "error":
            self.error = event
        if event.get("type") in ("response.completed", "response.incomplete", "response.failed"):
            self._tail.append(frame.raw)
            return b""
        return frame.raw

    def reply(self) -> dict[str, Any] | None:
        return self._whole

    @property
    def is_whole(self) -> bool:
        return bool(self._tail)
