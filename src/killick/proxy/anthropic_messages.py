"""Anthropic's Messages API: requests, replies and event streams."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from killick.proxy.frames import Frame, framed
from killick.proxy.wire import ParsedBody, Splice, Wire, is_list, is_map, listed, maps, summed
from killick.window.messages import Shape, arguments_of

_GROWS: Final = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
"""The field of a block that each delta extends."""


class Messages(Wire):
    """POST /v1/messages."""

    shape: Shape = "anthropic"
    step = "messages"

    def asked(self, body: dict[str, Any]) -> ParsedBody:
        messages, tools, why = listed(body)
        if messages and messages[-1].get("role") == "assistant":
            why = why or "it begins the reply itself"
        choice = body.get("tool_choice")
        may_call = not is_map(choice) or choice.get("type") in ("auto", "any")
        return ParsedBody(body, messages, tools, body.get("system"), why, may_call)

    def ends_early(self, reply: Mapping[str, Any]) -> bool:
        return reply.get("stop_reason") in ("max_tokens", "refusal", "model_context_window_exceeded")

    def said(self, reply: Mapping[str, Any]) -> list[Any]:
        content = reply.get("content")
        return [{"role": "assistant", "content": content}] if content else []

    def joined(self, held: Sequence[Any], following: Sequence[Any]) -> list[Any]:
        """Puts all results for one reply into one message, the first user message after it."""
        if not held or not following or not is_map(following[0]) or following[0].get("role") != "user":
            return [*held, *following]
        given = following[0].get("content")
        blocks = given if is_list(given) else [{"type": "text", "text": given}]
        answers = [block for message in held for block in message["content"]]
        return [{**following[0], "content": [*answers, *blocks]}, *following[1:]]

    def visible(self, replies: Sequence[dict[str, Any]], own: Collection[str]) -> dict[str, Any]:
        if len(replies) == 1 and not own:
            return replies[0]
        content = [
            block
            for reply in replies
            for block in maps(reply.get("content"))
            if block.get("type") != "tool_use" or block.get("id") not in own
        ]
        last = replies[-1]
        reason = _reason(last.get("stop_reason"), any(block.get("type") == "tool_use" for block in content))
        usage = summed([reply.get("usage") for reply in replies])
        return {**last, "id": replies[0].get("id"), "content": content, "stop_reason": reason, "usage": usage}

    def splice(self) -> MessageSplice:
        return MessageSplice()

    def error(self, kind: str, message: str) -> dict[str, Any]:
        return {"type": "error", "error": {"type": kind, "message": message}}

    def broken(self, error: Mapping[str, Any]) -> bytes:
        return framed(error, "error")


def _reason(given: Any, calls: bool) -> Any:
    return "end_turn" if given == "tool_use" and not calls else given


class MessageSplice(Splice):
    """Merges the events of several messages into one: one start, consecutive block numbers, one stop."""

    def begin(self, own: Collection[str] = ()) -> None:
        super().begin(own)
        self._whole: dict[str, Any] | None = None
        self._blocks: dict[int, dict[str, Any]] = {}
        self._inputs: dict[int, list[str]] = {}
        self._grown: dict[tuple[int, str], list[str]] = {}
        self._places: dict[int, int | None] = {}
        self._delta: dict[str, Any] | None = None
        self._stops = False

    def take(self, frame: Frame) -> bytes:
        event = frame.read() or {}
        match event.get("type"):
            case "message_start":
                message = event.get("message")
                self._whole = dict(message) if is_map(message) else None
                return frame.raw if self._rounds == 1 else b""
            case "content_block_start" | "content_block_delta" | "content_block_stop":
                return self._block(frame, event)
            case "message_delta":
                self._end(event)
                self._tail.append(frame.raw)
                return b""
            case "message_stop":
                self._stops = True
                self._tail.append(frame.raw)
                return b""
            case "error":
                self.error = event.get("error") or event
                return frame.raw
            case _:
                return frame.raw

    def _end(self, event: dict[str, Any]) -> None:
        self._delta = event
        if self._whole is not None:
            delta, usage = event.get("delta"), event.get("usage")
            self._whole |= delta if is_map(delta) else {}
            old = self._whole.get("usage")
            new = {name: value for name, value in usage.items() if value is not None} if is_map(usage) else {}
            self._whole["usage"] = (old if is_map(old) else {}) | new

    def _block(self, frame: Frame, event: dict[str, Any]) -> bytes:
        index = event.get("index")
        if not isinstance(index, int):
            return frame.raw
        self._join(index, event)
        if event["type"] == "content_block_start":
            block = self._blocks[index]
            is_call = block.get("type") == "tool_use"
            if is_call and block.get("name") in self._own:
                self._places[index], self._changed = None, True
            else:
                self._places[index] = self._out
                self._sent_calls |= is_call
                self._out += 1
        place = self._places.get(index, index)
        if place is None:
            return b""
        return frame.raw if place == index else framed({**event, "index": place}, str(event["type"]))

    def _join(self, index: int, event: dict[str, Any]) -> None:
        if event["type"] == "content_block_start":
            block = event.get("content_block")
            self._blocks[index] = dict(block) if is_map(block) else {}
            return
        block, delta = self._blocks.get(index), event.get("delta")
        if event["type"] != "content_block_delta" or block is None or not is_map(delta):
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

    def over(self) -> None:
        self._usages.append(self._whole.get("usage") if self._whole else None)

    def _merged_end(self) -> bytes:
        out = b""
        if self._delta is not None:
            usage = summed([*self._usages, self._whole.get("usage") if self._whole else None])
            delta = self._delta.get("delta")
            fields = dict(delta) if is_map(delta) else {}
            fields["stop_reason"] = _reason(fields.get("stop_reason"), self._sent_calls)
            out = framed({**self._delta, "delta": fields, "usage": usage}, "message_delta")
        return out + (framed({"type": "message_stop"}, "message_stop") if self._stops else b"")
