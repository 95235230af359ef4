"""What tests of model calls play with: a provider that answers what it is told to, and a run that keeps a list."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from killick.engine.steps.model_reply import rebuild, reply_kind, wire, without_sdk_retries
from killick.errors import StepFailed
from killick.model.chunks import pack, unpack

JSON = dict[str, Any]


class Provider:
    """Answers each request with the next of its answers; with an error when there is none left."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.answers: list[JSON | str] = []
        self.requests: list[JSON] = []

    def answer(self, path: str, body: JSON) -> tuple[int, str, bytes]:
        self.requests.append(body | {"(path)": path})
        if not self.answers:
            return 500, "application/json", b'{"error": {"message": "out of order", "type": "api_error"}}'
        answer = self.answers.pop(0)
        if isinstance(answer, str):
            return 200, "text/event-stream", answer.encode()
        return 200, "application/json", json.dumps(answer).encode()


@contextmanager
def playing() -> Iterator[Provider]:
    """A provider behind a port of this machine."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            status, kind, answer = provider.answer(self.path, json.loads(body))
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(answer)))
            self.send_header("request-id", "req_1")
            self.send_header("x-request-id", "req_1")
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    provider = Provider(f"http://127.0.0.1:{server.server_port}")
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield provider
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def events(*chunks: JSON, done: bool = True) -> str:
    """A stream of server-sent events."""
    lines = [f"event: {chunk.get('type', 'chunk')}\ndata: {json.dumps(chunk)}\n\n" for chunk in chunks]
    return "".join(lines) + "data: [DONE]\n\n" * done


# Replies, as providers send them ------------------------------------------------------------------


def chat(content: str | None = None, *calls: tuple[str, str, str], **message: Any) -> JSON:
    """A chat completion that says something, or calls tools: (id, name, arguments)."""
    said: JSON = {"role": "assistant", "content": content, "refusal": None, "annotations": []} | message
    if calls:
        said["tool_calls"] = [
            {"id": known_as, "type": "function", "function": {"name": name, "arguments": arguments}}
            for known_as, name, arguments in calls
        ]
    return {
        "id": "chatcmpl-1", "object": "chat.completion", "created": 1_760_000_000, "model": "gpt-5-2026-01-01",
        "choices": [
            {"index": 0, "message": said, "logprobs": None, "finish_reason": "tool_calls" if calls else "stop"},
        ],
        "usage": {
            "prompt_tokens": 120, "completion_tokens": 30, "total_tokens": 150,
            "prompt_tokens_details": {"cached_tokens": 100, "audio_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 10},
        },
        "service_tier": "default", "system_fingerprint": None, "a_field_of_next_year": {"deep": [1, None, "x"]},
    }  # fmt: skip


def response(*output: JSON) -> JSON:
    """A reply of the Responses API."""
    return {
        "id": "resp_1", "object": "response", "created_at": 1_760_000_000, "status": "completed", "error": None,
        "incomplete_details": None, "instructions": None, "metadata": {}, "model": "gpt-5-2026-01-01",
        "output": list(output), "parallel_tool_calls": True, "temperature": 1.0, "tool_choice": "auto", "tools": [],
        "top_p": 1.0, "max_output_tokens": None, "previous_response_id": None,
        "text": {"format": {"type": "json_schema", "name": "City", "schema": {"type": "object"}, "strict": True}},
        "usage": {
            "input_tokens": 120, "input_tokens_details": {"cached_tokens": 100},
            "output_tokens": 30, "output_tokens_details": {"reasoning_tokens": 10}, "total_tokens": 150,
        },
    }  # fmt: skip


def response_text(text: str) -> JSON:
    return {
        "id": "msg_1", "type": "message", "role": "assistant", "status": "completed",
        "content": [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}],
    }  # fmt: skip


def response_call(call: str, name: str, arguments: str) -> JSON:
    return {
        "id": f"fc_{call}", "type": "function_call", "call_id": call, "name": name, "arguments": arguments,
        "status": "completed",
    }  # fmt: skip


def response_reasoning(*summary: str) -> JSON:
    return {
        "id": "rs_1", "type": "reasoning", "encrypted_content": "gAAA…",
        "summary": [{"type": "summary_text", "text": text} for text in summary],
    }  # fmt: skip


def message(*content: JSON, stop: str | None = None) -> JSON:
    """A message of Anthropic's."""
    calls = any(block["type"] == "tool_use" for block in content)
    return {
        "id": "msg_1", "type": "message", "role": "assistant", "model": "claude-opus-5", "content": list(content),
        "stop_reason": stop or ("tool_use" if calls else "end_turn"), "stop_sequence": None,
        "container": {"id": "container_1", "expires_at": "2026-11-15T02:00:00Z"},
        "usage": {
            "input_tokens": 20, "output_tokens": 30, "cache_read_input_tokens": 90, "cache_creation_input_tokens": 10,
            "cache_creation": {"ephemeral_5m_input_tokens": 10, "ephemeral_1h_input_tokens": 0},
            "service_tier": "standard",
        },
    }  # fmt: skip


def text_block(text: str) -> JSON:
    return {"type": "text", "text": text}


def thinking_block(text: str) -> JSON:
    return {"type": "thinking", "thinking": text, "signature": "EqQBCg…"}


def use_block(call: str, name: str, arguments: JSON) -> JSON:
    return {"type": "tool_use", "id": call, "name": name, "input": arguments}


# A run --------------------------------------------------------------------------------------------


def stored(value: Any, kind: Any = Any) -> Any:
    """What comes back of a value that was stored."""
    packed = pack(value)
    pieces = {blob.hash: blob for blob in packed.blobs}
    return unpack(packed.raw, lambda hashes: {each: pieces[each] for each in hashes}, kind)


class ListedRun:
    """A run whose record is a list. Given one, it replays it: what is on record happens no more."""

    def __init__(self, record: list[tuple[str, Any]] | None = None, heard: list[list[Any]] | None = None) -> None:
        self.record: list[tuple[str, Any]] = []
        self._past = list(record or [])
        self._heard = list(heard or [])

    async def _step(self, what: str, act: Callable[[], Any]) -> Any:
        if self._past:
            told, outcome = self._past.pop(0)
            assert told == what
        else:
            try:
                outcome = act()
                outcome = await outcome if inspect.isawaitable(outcome) else outcome
            except Exception as error:
                outcome = error
        self.record.append((what, outcome))
        if isinstance(outcome, Exception):
            raise StepFailed(str(len(self.record)), what, outcome)
        return outcome

    async def call(self, tool: Any, /, **arguments: Any) -> Any:
        tool.shape.signature.bind(**arguments)
        found = await self._step(f"call {tool.name} {arguments}", lambda: tool.fn(**arguments))
        return stored(found, tool.shape.returns)

    async def model(self, fn: Any, /, **arguments: Any) -> Any:
        reply = await self._step("model", lambda: without_sdk_retries(fn)(**arguments))
        kind, value = reply_kind(reply), stored(wire(reply))
        return rebuild(kind, value, arguments) if kind else value

    async def decided(
        self, question: str, choice: Any, *, options: Any = None, because: Any = None, by: str = "agent"
    ) -> Any:
        return await self._step(f"{by} decided {choice} because {because!r}: {question} {options}", lambda: choice)

    async def remarks(self) -> list[Any]:
        heard: list[Any] = await self._step("heard", lambda: self._heard.pop(0) if self._heard else [])
        return heard

    def told(self) -> list[str]:
        """What happened, without what it gave."""
        return [what for what, _ in self.record if what != "heard"]


class ListedSyncRun:
    """The same, blocking."""

    def __init__(self) -> None:
        self.run = ListedRun()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.run, name)

        def blocking(*args: Any, **kwargs: Any) -> Any:
            try:
                method(*args, **kwargs).send(None)
            except StopIteration as end:
                return end.value
            raise AssertionError("had to wait")

        return blocking
