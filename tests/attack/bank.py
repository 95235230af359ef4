"""A payment server that trusts request ids: a real one over HTTP, in a process of its own. It knows nothing of Killick.

An id that it has seen gets the receipt of the first time; any new id is a new payment, whoever is paid for whatever. A
token is written down and not checked. It takes one request at a time, in the order in which they came, so that whoever
asks after somebody died learns of everything that the dead had sent.

    POST /payments    {"request_id", "account", "to", "amount", "memo", "reference", "token"} -> {"receipt"}
    POST /refunds     {"receipt", "reference"}    takes one payment back
    POST /closed      {"to", "times"}             refuses the next payments to somebody: 409, nothing is done
    GET  /payments?account=…[&reference=…]        what was paid, in order, and whether it was taken back
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Callable
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, Final
from urllib.parse import parse_qsl, urlencode, urlsplit

ADDRESS: Final = {"port": 0}
"""Where the bank is, known before any process is forked that asks it."""


class Refused(Exception):
    """The bank says that it did nothing."""


# the server ---------------------------------------------------------------------------------------


class Books:
    """Every payment ever made."""

    def __init__(self) -> None:
        self.payments: list[dict[str, Any]] = []
        self._by_request: dict[str, int] = {}
        self._closed: Counter[str] = Counter()

    def pay(self, asked: dict[str, Any]) -> dict[str, Any]:
        if asked["request_id"] in self._by_request:
            return {"receipt": self._by_request[asked["request_id"]]}
        if self._closed[asked["to"]]:
            self._closed[asked["to"]] -= 1
            raise Refused(f"{asked['to']} takes no payments now")
        receipt = self._by_request[asked["request_id"]] = len(self.payments) + 1
        self.payments.append({**asked, "receipt": receipt, "refunded": False})
        return {"receipt": receipt}

    def refund(self, asked: dict[str, Any]) -> dict[str, Any]:
        self.payments[asked["receipt"] - 1]["refunded"] = True
        return {"refunded": asked["receipt"]}

    def close(self, asked: dict[str, Any]) -> dict[str, Any]:
        self._closed[asked["to"]] = asked["times"]
        return {}

    def found(self, **wanted: str) -> list[dict[str, Any]]:
        return [each for each in self.payments if all(each[name] == value for name, value in wanted.items())]


class _Till(BaseHTTPRequestHandler):
    books: Books

    def do_GET(self) -> None:
        self._reply(200, self.books.found(**dict(parse_qsl(urlsplit(self.path).query))))

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        act = {"/payments": self.books.pay, "/refunds": self.books.refund, "/closed": self.books.close}[self.path]
        try:
            self._reply(200, act(asked))
        except Refused as refused:
            self._reply(409, {"error": str(refused)})

    def _reply(self, status: int, body: Any) -> None:
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: Any) -> None:
        """It says nothing."""


class _Server(HTTPServer):
    request_queue_size = 512

    def handle_error(self, *_: Any) -> None:
        """Whoever asked is dead, and does not hear the answer."""


def serve_for_ever(told: int) -> None:
    """Be the bank, in this process, until it is killed; the port is written to a pipe."""
    server = _Server(("127.0.0.1", 0), type("Till", (_Till,), {"books": Books()}))
    os.write(told, f"{server.server_port}\n".encode())
    server.serve_forever()


# asking it ----------------------------------------------------------------------------------------


def ask(path: str, body: Any = None, *, sent: Callable[[], None] = lambda: None) -> Any:
    """Ask the bank and wait for its answer. `sent` is called when all of the request is on its way."""
    line = HTTPConnection("127.0.0.1", ADDRESS["port"], timeout=300)
    try:
        line.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body))
        sent()
        reply = line.getresponse()
        return _understood(reply.status, reply.read())
    finally:
        line.close()


async def ask_soon(path: str, body: Any = None, *, sent: Callable[[], None] = lambda: None) -> Any:
    """The same, on the caller's loop."""
    reader, writer = await asyncio.open_connection("127.0.0.1", ADDRESS["port"])
    try:
        raw = b"" if body is None else json.dumps(body).encode()
        method = "GET" if body is None else "POST"
        writer.write(f"{method} {path} HTTP/1.0\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw)
        await writer.drain()
        sent()
        head, _, rest = (await reader.read()).partition(b"\r\n\r\n")
        return _understood(int(head.split(b" ", 2)[1]), rest)
    finally:
        writer.close()


def _understood(status: int, raw: bytes) -> Any:
    body = json.loads(raw)
    if status == 409:
        raise Refused(body["error"])
    assert status == 200, (status, body)
    return body


def books(account: str, **wanted: str) -> list[dict[str, Any]]:
    """What the bank has paid from an account."""
    found: list[dict[str, Any]] = ask(f"/payments?{urlencode({'account': account, **wanted})}")
    return found
