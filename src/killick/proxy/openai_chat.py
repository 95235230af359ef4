"""OpenAI's Chat Completions API, which many providers implement: requests, replies and chunk streams."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from killick.engine.steps.model_reply import join_chunks
from killick.proxy.frames import DONE, Frame, framed
from killick.proxy.wire import ParsedBody, Splice, Wire, is_map, listed, maps, summed, text_in
from killick.window.messages import Shape

_CHUNK: Final = "chat.completion.chunk"


class Chat(Wire):
    """POST /v1/chat/completions."""

    shape: Shape = "openai"
    step = "chat.completions"

    def asked(self, body: dict[str, Any]) -> ParsedBody:
        messages, tools, why = listed(body)
        if (body.get("n") or 1) != 1:
            why = why or "it wants several replies at once"
        may_call = body.get("tool_choice") in (None, "auto", "required")
        return ParsedBody(body, messages, tools, None, why, may_call)

    def ends_early(self, reply: Mapping[str, Any]) -> bool:
        return any(choice.get("finish_reason") in ("length", "content_filter") for choice in maps(reply.get("choices")))

    def said(self, reply: Mapping[str, Any]) -> list[Any]:
        kept = {name: value for name, value in _message(reply).items() if value is not None and value != []}
        return [{"role": "assistant", "content": None} | kept]

    def visible(self, replies: Sequence[dict[str, Any]], own: Collection[str]) -> dict[str, Any]:
        if len(replies) == 1 and not own:
            return replies[0]
        last = maps(replies[-1].get("choices"))[0]
        message = {name: value for name, value in _message(replies[-1]).items() if name != "tool_calls"}
        calls = [call for call in maps(_message(replies[-1]).get("tool_calls")) if call.get("id") not in own]
        words = "".join(text_in(_message(reply).get("content")) for reply in replies)
        message["content"] = words or None
        if calls:
            message["tool_calls"] = calls
        reason = last.get("finish_reason")
        if not calls and reason == "tool_calls":
            reason, message["content"] = "stop", words
        usage = summed([reply.get("usage") for reply in replies])
        choice = {**last, "message": message, "finish_reason": reason}
        first: dict[str, Any] = {name: replies[0][name] for name in ("id", "created") if name in replies[0]}
        more: dict[str, Any] = {"usage": usage} if usage else {}
        return {**replies[-1], **first, "choices": [choice], **more}

    def splice(self) -> ChatSplice:
        return ChatSplice()

    def broken(self, error: Mapping[str, Any]) -> bytes:
        return framed(error)


def _message(reply: Mapping[str, Any]) -> dict[str, Any]:
    for choice in maps(reply.get("choices"))[:1]:
        message = choice.get("message")
        return message if is_map(message) else {}
    return {}


class ChatSplice(Splice):
    """Merges the chunks of several replies into one: one id, consecutive call numbers, one finish."""

    def __init__(self) -> None:
        super().__init__()
        self._first: dict[str, Any] = {}

    def begin(self, own: Collection[str] = ()) -> None:
        super().begin(own)
        self._chunks: list[dict[str, Any]] = []
        self._places: dict[int, int | None] = {}
        self._finish: dict[str, Any] | None = None
        self._usage: Any = None
        self._is_done = False

    def take(self, frame: Frame) -> bytes:
        if frame.data == DONE:
            self._is_done = True
            self._tail.append(frame.raw)
            return b""
        chunk = frame.read()
        if chunk is None or chunk.get("error"):
            self.error = chunk and chunk["error"]
            return frame.raw
        self._chunks.append(chunk)
        if self._rounds == 1 and not self._first:
            self._first = {name: chunk[name] for name in ("id", "created") if name in chunk}
        if is_map(chunk.get("usage")):
            self._usage = chunk["usage"]
        choices = maps(chunk.get("choices"))
        if not choices and self._usage is None and self._finish is None:
            return frame.raw if self._rounds == 1 else b""  # some begin with what they think of the prompt
        if not choices or any(choice.get("finish_reason") is not None for choice in choices):
            return self._ending(frame, chunk, choices)
        return self._shown(frame, chunk, choices)

    def _ending(self, frame: Frame, chunk: dict[str, Any], choices: list[dict[str, Any]]) -> bytes:
        """Holds the finish and later chunks back; other parts of such a chunk pass."""
        said = b""
        for choice in choices:
            delta = choice.get("delta")
            if is_map(delta) and any(delta.get(name) for name in delta if name != "role"):
                open_end = {**chunk, "choices": [{**choice, "finish_reason": None}]}
                open_end.pop("usage", None)
                said = self._shown(Frame(b"", ""), open_end, open_end["choices"])
                self._changed = True
            self._finish = {**chunk, "choices": [{**choice, "delta": {}}]}
        if not said:
            self._tail.append(frame.raw)
        return said

    def _shown(self, frame: Frame, chunk: dict[str, Any], choices: list[dict[str, Any]]) -> bytes:
        delta = choices[0].get("delta")
        if not is_map(delta):
            return frame.raw
        shown = dict(delta)
        calls = maps(delta.get("tool_calls"))
        if calls:
            kept = [place for call in calls if (place := self._placed(call)) is not None]
            shown["tool_calls"] = kept
            if not kept:
                del shown["tool_calls"]
        if self._rounds > 1:
            shown.pop("role", None)
        if shown == delta and self._rounds == 1 and frame.raw:
            return frame.raw
        self._changed = True
        if not any(value not in (None, "", []) for value in shown.values()):
            return b""
        return framed({**chunk, **self._first, "choices": [{**choices[0], "delta": shown}]})

    def _placed(self, call: dict[str, Any]) -> dict[str, Any] | None:
        """Renumbers a part of a call for the client; None: it is not for the client."""
        index = call.get("index")
        index = index if isinstance(index, int) else len(self._places)
        if index not in self._places:
            function = call.get("function")
            name = function.get("name") if is_map(function) else None
            if name in self._own:
                self._places[index] = None
            else:
                self._places[index] = self._out
                self._out += 1
                self._sent_calls = True
        place = self._places[index]
        if place is None:
            self._changed = True
            return None
        return {**call, "index": place} if call.get("index") != place else call

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

    def _merged_end(self) -> bytes:
        usage = summed([*self._usages, self._usage])
        end = dict(self._finish or {"choices": []}) | self._first
        for choice in maps(end.get("choices")):
            if choice.get("finish_reason") == "tool_calls" and not self._sent_calls:
                choice["finish_reason"] = "stop"
        apart = usage and not is_map(end.get("usage"))
        if is_map(end.get("usage")):
            end["usage"] = usage
        out = framed(end) if self._finish else b""
        if apart:
            start = {**(self._chunks[0] if self._chunks else {}), **self._first}
            out += framed({**start, "choices": [], "usage": usage})
        return out + (framed(DONE) if self._is_done else b"")

    @property
    def is_whole(self) -> bool:
        return self._finish is not None

    def over(self) -> None:
        self._usages.append(self._usage)
