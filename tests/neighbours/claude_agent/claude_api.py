"""The Messages API as a script, for the real Claude Code program to talk to: it pays, and says so."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PAY = {"type": "tool_use", "name": "mcp__till__pay", "input": {"to": "ann", "amount": 5}}


class Api(ThreadingHTTPServer):
    """Answers on a port of this machine; `heard` is what it was sent."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answering)
        self.heard: list[list[Any]] = []

    def say(self, request: dict[str, Any]) -> dict[str, Any]:
        """Pays whenever somebody speaks, and is done when it hears what came of it."""
        self.heard.append(request["messages"])
        content = request["messages"][-1]["content"]
        if isinstance(content, list) and content[-1]["type"] == "tool_result":
            return {"type": "text", "text": "Done."}
        return {**PAY, "id": f"toolu_{len(self.heard)}"}


class _Answering(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Api

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        block = self.server.say(request)
        number, is_text = len(self.server.heard), block["type"] == "text"
        begun: dict[str, Any] = {"id": f"msg_{number}", "type": "message", "role": "assistant", "content": []}
        begun |= {"model": request["model"], "stop_reason": None, "stop_sequence": None}
        part = {"type": "text_delta", "text": block["text"]} if is_text else None
        part = part or {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        ended = {"stop_reason": "end_turn" if is_text else "tool_use", "stop_sequence": None}
        events: list[tuple[str, dict[str, Any]]] = [
            ("message_start", {"message": {**begun, "usage": {"input_tokens": 5, "output_tokens": 1}}}),
            (
                "content_block_start",
                {"index": 0, "content_block": {**block, **({"text": ""} if is_text else {"input": {}})}},
            ),
            ("content_block_delta", {"index": 0, "delta": part}),
            ("content_block_stop", {"index": 0}),
            ("message_delta", {"delta": ended, "usage": {"output_tokens": 3}}),
            ("message_stop", {}),
        ]
        sent = "".join(f"event: {name}\ndata: {json.dumps({'type': name, **data})}\n\n" for name, data in events)
        self._send(200, sent.encode(), "text/event-stream")

    def do_GET(self) -> None:
        self._send(404, b"{}", "application/json")

    do_HEAD = do_GET  # noqa: N815

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


@contextmanager
def serving() -> Iterator[Api]:
    api = Api()
    thread = threading.Thread(target=api.serve_forever, daemon=True)
    thread.start()
    yield api
    api.shutdown()
    api.server_close()
    thread.join()
