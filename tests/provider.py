"""A provider of models that says what a test wants, over real HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import http.client
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import uvicorn

PIECE = 7
"""Streams come in pieces of so many bytes, whatever they cut in two."""


@dataclass
class Says:
    """A reply: words, thoughts, calls of tools as (name, arguments), and how it goes wrong, if it does."""

    text: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    thinking: str = ""
    stop: str | None = None
    cut: int | None = None
    """Break off after so many bytes."""
    hangs: bool = False
    """Say nothing more after that, for as long as somebody listens."""


@dataclass
class Fails:
    status: int
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)


Reply = Says | Fails
Script = Callable[[dict[str, Any]], Reply]


@dataclass
class Request:
    method: str
    path: str
    query: str
    headers: dict[str, str]
    raw: bytes

    @property
    def body(self) -> Any:
        return json.loads(self.raw)


class Serving:
    """An ASGI app on a free port, in a thread of its own."""

    def __init__(self, app: Any) -> None:
        self._bound = socket.create_server(("127.0.0.1", 0))
        self._bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.url = f"http://127.0.0.1:{self._bound.getsockname()[1]}"
        config = uvicorn.Config(
            app, log_config=None, ws="none", server_header=False, date_header=False, timeout_graceful_shutdown=2
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._bound],), daemon=True)

    def __enter__(self) -> Serving:
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive()
            threading.Event().wait(0.005)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        self._thread.join(300)
        assert not self._thread.is_alive()
        self._bound.close()


class Provider:
    """Answers chat completions, messages and responses by a script: a list of replies, or a function of the request."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.script: Script = lambda body: Says("hello")
        self.asked = threading.Event()
        self.left = threading.Event()
        """Somebody hung up while they were being answered."""
        self.before: Callable[[], Awaitable[bool]] | None = None
        """Whether a request is answered at all, and when."""
        self.zipped = False
        self._replies = 0
        self._calls = 0

    def replies(self, *replies: Reply) -> None:
        waiting = list(replies)
        self.script = lambda body: waiting.pop(0)

    @property
    def bodies(self) -> list[Any]:
        return [request.body for request in self.requests]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            while True:
                told = (await receive())["type"]
                await send({"type": f"{told}.complete"})
                if told == "lifespan.shutdown":
                    return
        raw, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            raw, more = raw + message.get("body", b""), message.get("more_body", False)
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        asked = Request(scope["method"], scope["path"], scope["query_string"].decode(), headers, raw)
        self.requests.append(asked)
        self.asked.set()
        if self.before is not None and not await self.before():
            return
        await self._answer(asked, receive, send)

    async def _answer(self, asked: Request, receive: Any, send: Any) -> None:
        shapes = {"/v1/chat/completions": chat, "/v1/messages": anthropic, "/v1/responses": responses}
        if asked.path not in shapes or asked.method != "POST":
            echo = {"method": asked.method, "path": asked.path, "query": asked.query, "size": len(asked.raw)}
            await _send(
                send, 200, {"content-type": "application/json", "x-request-id": "r1"}, json.dumps(echo).encode()
            )
            return
        raw = gzip.decompress(asked.raw) if asked.headers.get("content-encoding") == "gzip" else asked.raw
        body = json.loads(raw)
        reply = self.script(body)
        if isinstance(reply, Fails):
            await _send(send, reply.status, {"content-type": "application/json", **reply.headers},
                        json.dumps(reply.body).encode())  # fmt: skip
            return
        self._replies += 1
        calls = [(f"call_{self._calls + n}", name, given) for n, (name, given) in enumerate(reply.calls)]
        self._calls += len(calls)
        whole, stream = shapes[asked.path](reply, f"reply_{self._replies}", calls, body)
        more = {"x-ratelimit-remaining-requests": "41", "connection": "keep-alive, x-hop", "x-hop": "1"}
        if not body.get("stream"):
            sent = json.dumps(whole, ensure_ascii=False).encode()
            head = {"content-type": "application/json", **more}
            if self.zipped:
                sent, head = gzip.compress(sent), {**head, "content-encoding": "gzip"}
            if reply.hangs:
                await self._hang(receive)
                return
            await _send(send, 200, head, sent)
            return
        await self._stream(stream, reply, {"content-type": "text/event-stream; charset=utf-8", **more}, receive, send)

    async def _stream(self, stream: bytes, reply: Says, headers: dict[str, str], receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _headers(headers)})
        end = len(stream) if reply.cut is None else reply.cut
        for start in range(0, end, PIECE):
            await send(
                {"type": "http.response.body", "body": stream[start : min(start + PIECE, end)], "more_body": True}
            )
            await asyncio.sleep(0)
        if reply.hangs:
            await self._hang(receive)
        elif reply.cut is None:
            await send({"type": "http.response.body", "body": b""})

    async def _hang(self, receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.left.set()


@contextlib.contextmanager
def hanging_up(url: str, path: str, body: Any, key: str = "sk-nobody") -> Iterator[http.client.HTTPConnection]:
    """A client that asks, and hangs up at the end of the block without having read the answer."""
    line = http.client.HTTPConnection(url.removeprefix("http://"), timeout=300)
    line.request("POST", path, json.dumps(body), {"content-type": "application/json", "authorization": f"Bearer {key}"})
    try:
        yield line
    finally:
        line.close()


def _headers(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in headers.items()]


async def _send(send: Any, status: int, headers: dict[str, str], body: bytes) -> None:
    head = _headers({**headers, "content-length": str(len(body))})
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})


def _size(body: Any) -> int:
    return len(json.dumps(body)) // 4


def _frames(events: list[Any], *, named: bool = False, end: str = "\n\n") -> bytes:
    lines = [
        (f"event: {event['type']}{end[: len(end) // 2]}" if named else "")
        + f"data: {event if isinstance(event, str) else json.dumps(event, ensure_ascii=False)}{end}"
        for event in events
    ]
    return "".join(lines).encode()


def chat(reply: Says, name: str, calls: list[Any], body: Any) -> tuple[Any, bytes]:
    made = [
        {"id": each, "type": "function", "function": {"name": tool, "arguments": json.dumps(given)}}
        for each, tool, given in calls
    ]
    message = {"role": "assistant", "content": reply.text or None, "refusal": None}
    message |= {"tool_calls": made} if made else {}
    stop = reply.stop or ("tool_calls" if made else "stop")
    usage = {"prompt_tokens": _size(body), "completion_tokens": 10, "total_tokens": _size(body) + 10,
             "prompt_tokens_details": {"cached_tokens": 5}}  # fmt: skip
    head = {"id": name, "created": 1_750_000_000, "model": body["model"]}
    whole = {**head, "object": "chat.completion", "usage": usage,
             "choices": [{"index": 0, "message": message, "finish_reason": stop, "logprobs": None}]}  # fmt: skip
    head |= {"object": "chat.completion.chunk"}

    def chunk(delta: Any, finish: str | None = None) -> Any:
        return {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}]}

    chunks: list[Any] = [chunk({"role": "assistant", "content": "", "refusal": None})]
    chunks += [chunk({"content": reply.text[at : at + 5]}) for at in range(0, len(reply.text), 5)]
    for index, call in enumerate(made):
        arguments = call["function"]["arguments"]
        start = {**call, "index": index, "function": {"name": call["function"]["name"], "arguments": ""}}
        chunks.append(chunk({"tool_calls": [start]}))
        chunks += [
            chunk({"tool_calls": [{"index": index, "function": {"arguments": arguments[at : at + 6]}}]})
            for at in range(0, len(arguments), 6)
        ]
    chunks.append(chunk({}, stop))
    if (body.get("stream_options") or {}).get("include_usage"):
        chunks.append({**head, "choices": [], "usage": usage})
    return whole, _frames([*chunks, "[DONE]"])


def anthropic(reply: Says, name: str, calls: list[Any], body: Any) -> tuple[Any, bytes]:
    content: list[Any] = []
    if reply.thinking:
        content.append({"type": "thinking", "thinking": reply.thinking, "signature": f"signed {name}"})
    if reply.text:
        content.append({"type": "text", "text": reply.text})
    content += [{"type": "tool_use", "id": each, "name": tool, "input": given} for each, tool, given in calls]
    stop = reply.stop or ("tool_use" if calls else "end_turn")
    usage = {"input_tokens": _size(body), "cache_creation_input_tokens": 3, "cache_read_input_tokens": 5,
             "output_tokens": 10}  # fmt: skip
    head = {"id": name, "type": "message", "role": "assistant", "model": body["model"], "stop_sequence": None}
    whole = {**head, "content": content, "stop_reason": stop, "usage": usage}
    start = {**head, "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 1}}
    events: list[Any] = [{"type": "message_start", "message": start}, {"type": "ping"}]
    for index, block in enumerate(content):
        empty: dict[str, Any] = {**block}
        deltas: list[Any] = []
        if block["type"] == "text":
            empty["text"] = ""
            deltas = [
                {"type": "text_delta", "text": block["text"][at : at + 5]} for at in range(0, len(block["text"]), 5)
            ]
        elif block["type"] == "thinking":
            empty |= {"thinking": "", "signature": ""}
            deltas = [{"type": "thinking_delta", "thinking": block["thinking"]},
                      {"type": "signature_delta", "signature": block["signature"]}]  # fmt: skip
        else:
            empty["input"] = {}
            given = json.dumps(block["input"])
            deltas = [{"type": "input_json_delta", "partial_json": ""}]
            deltas += [
                {"type": "input_json_delta", "partial_json": given[at : at + 6]} for at in range(0, len(given), 6)
            ]
        events.append({"type": "content_block_start", "index": index, "content_block": empty})
        events += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
        events.append({"type": "content_block_stop", "index": index})
    events.append({"type": "message_delta", "delta": {"stop_reason": stop, "stop_sequence": None},
                   "usage": {"output_tokens": 10}})  # fmt: skip
    return whole, _frames([*events, {"type": "message_stop"}], named=True, end="\r\n\r\n")


def responses(reply: Says, name: str, calls: list[Any], body: Any) -> tuple[Any, bytes]:
    output: list[Any] = []
    if reply.text:
        part = {"type": "output_text", "text": reply.text, "annotations": []}
        output.append({"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]})
    output += [
        {"type": "function_call", "id": f"fc_{each}", "call_id": each, "name": tool, "status": "completed",
         "arguments": json.dumps(given)}
        for each, tool, given in calls
    ]  # fmt: skip
    usage = {"input_tokens": _size(body), "output_tokens": 10, "total_tokens": _size(body) + 10,
             "input_tokens_details": {"cached_tokens": 5},
             "output_tokens_details": {"reasoning_tokens": 0}}  # fmt: skip
    whole = {"id": name, "object": "response", "created_at": 1_750_000_000, "model": body["model"], "output": output,
             "status": "completed", "usage": usage, "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
             "error": None, "incomplete_details": None, "instructions": None, "metadata": {}}  # fmt: skip
    begun = {**whole, "status": "in_progress", "output": [], "usage": None}
    events = [{"type": "response.created", "sequence_number": 0, "response": begun}]
    if reply.text:
        empty = {**output[0], "status": "in_progress", "content": []}
        events.append({"type": "response.output_item.added", "sequence_number": 1, "output_index": 0, "item": empty})
        events.append({"type": "response.content_part.added", "sequence_number": 2, "output_index": 0,
                       "content_index": 0, "item_id": "msg_1",
                       "part": {"type": "output_text", "text": "", "annotations": []}})  # fmt: skip
        events += [
            {"type": "response.output_text.delta", "sequence_number": 3, "output_index": 0, "content_index": 0,
             "item_id": "msg_1", "delta": reply.text[at : at + 5], "logprobs": []}
            for at in range(0, len(reply.text), 5)
        ]  # fmt: skip
    events.append({"type": "response.completed", "sequence_number": 9, "response": whole})
    return whole, _frames(events, named=True)
