"""Small real servers that speak SMTP and Slack's API, and workers that deliver to them."""

from __future__ import annotations

import asyncio
import hmac
import json
import socketserver
import ssl
import threading
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email import message_from_bytes, policy
from email.message import EmailMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import urlencode, urlsplit

import pytest
from starlette.testclient import TestClient

from killick.client.client import Client
from killick.workers.answer_links import asked_of, links
from killick.workers.hooks import HOOKS, HookEvent, attend, declare_hook, ensure

SECRET = "a-secret-of-the-links"
PUBLIC = "https://killick.example.org"
SIGNING = "slack-signing-secret"
TOKEN = "xoxb-token-of-the-bot"


@contextmanager
def configured() -> Iterator[pytest.MonkeyPatch]:
    """A process with links; the hooks that it declares are gone afterwards."""
    hooks = dict(HOOKS)
    HOOKS.clear()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("KILLICK_PUBLIC_URL", PUBLIC)
        environment.setenv("KILLICK_LINK_SECRET", SECRET)
        yield environment
    HOOKS.clear()
    HOOKS.update(hooks)


class Rests:
    """A worker that stops after so many rests."""

    def __init__(self, clock: Any, times: int) -> None:
        self.clock, self.times = clock, times

    @property
    def stopping(self) -> bool:
        return self.times <= 0

    async def rest(self, seconds: float) -> None:
        self.times -= 1
        self.clock.advance(seconds)


def attended(kd: Client, name: str, rests: int = 1) -> None:
    """A worker serves a hook until nothing is left to deliver, or so many retries were made."""
    engine = kd.runtime.engine
    head = kd.runtime.store.lease(f"hook:{name}", engine.holder, seconds=3600 * 24)
    asyncio.run(attend(engine, kd.runtime.log.open(f"hook:{name}"), Rests(kd.runtime.clock, rests)))
    kd.runtime.store.release(f"hook:{name}", epoch=head.epoch)


class Collected:
    """A hook that collects the links of every question, by run and person."""

    def __init__(self, kd: Client) -> None:
        self.kd = kd
        self.links: dict[str, dict[str, str]] = {}

        def collect(event: HookEvent) -> None:
            # Each person has a channel of their own.
            self.links[event.run] = {name: links(event, [name], to=name)[name] for name in asked_of(event)}

        declare_hook("collect", collect, ("wait.opened",), to="here", same="here")
        ensure(kd.runtime.engine)

    def link(self, run: str, name: str) -> str:
        """The signed part of a person's link to the newest question of a run."""
        attended(self.kd, "collect")
        return token_of(self.links[run][name])


def token_of(url: str) -> str:
    return urlsplit(url).fragment


# SMTP ---------------------------------------------------------------------------------------------


class Smtp:
    """An SMTP server that keeps what it gets. `refuses` has replies to recipients; with `tls` it offers STARTTLS."""

    def __init__(self, tls: ssl.SSLContext | None = None, *, immediately: bool = False) -> None:
        self.mail: list[EmailMessage] = []
        self.users: list[tuple[str, str]] = []
        self.refuses: dict[str, str] = {}
        self.is_encrypted: list[bool] = []
        far = self

        class Session(socketserver.StreamRequestHandler):
            def setup(self) -> None:
                if tls is not None and immediately:
                    self.request = tls.wrap_socket(self.request, server_side=True)
                super().setup()

            def finish(self) -> None:
                super().finish()
                self.request.close()

            def say(self, text: str) -> None:
                self.wfile.write(f"{text}\r\n".encode())

            def handle(self) -> None:
                encrypted, body = immediately, b""
                self.say("220 here")
                while line := self.rfile.readline().decode().strip():
                    verb = line.split()[0].upper()
                    if verb == "EHLO":
                        offers = ["AUTH PLAIN"] + ["STARTTLS"] * (tls is not None and not encrypted)
                        self.say("\r\n".join([*(f"250-{each}" for each in ("here", *offers)), "250 8BITMIME"]))
                    elif verb == "STARTTLS" and tls is not None:
                        self.say("220 go on")
                        self.request = tls.wrap_socket(self.request, server_side=True)
                        self.rfile, self.wfile = self.request.makefile("rb"), self.request.makefile("wb", 0)
                        encrypted = True
                    elif verb == "AUTH":
                        _, user, password = b64decode(line.split()[2]).decode().split("\0")
                        far.users.append((user, password))
                        self.say("235 in")
                    elif verb == "RCPT":
                        to = line.partition("<")[2].partition(">")[0]
                        self.say(far.refuses.get(to, "250 fine"))
                    elif verb == "DATA":
                        self.say("354 go on")
                        while (body_line := self.rfile.readline()) != b".\r\n":
                            body += body_line[1:] if body_line.startswith(b"..") else body_line
                        if "DATA" not in far.refuses:
                            far.mail.append(message_from_bytes(body, policy=policy.default))  # type: ignore[arg-type]
                            far.is_encrypted.append(encrypted)
                        body = b""
                        self.say(far.refuses.get("DATA", "250 kept"))
                    elif verb == "QUIT":
                        self.say("221 bye")
                        return
                    else:
                        self.say("250 fine")

        self.server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Session)
        self.port = self.server.server_address[1]

    def text(self, number: int = -1) -> str:
        part = self.mail[number].get_body(("plain",))
        assert part is not None
        return str(part.get_content())


@contextmanager
def smtp(tls: ssl.SSLContext | None = None, *, immediately: bool = False) -> Iterator[Smtp]:
    made = Smtp(tls, immediately=immediately)
    with _served(made.server):
        yield made


@contextmanager
def _served(server: socketserver.BaseServer) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


# Slack --------------------------------------------------------------------------------------------


class Request(NamedTuple):
    """A request as Slack sends it."""

    headers: dict[str, str]
    body: bytes


class Slack:
    """Slack, as far as we use it: messages by their time, and lines that one person alone sees."""

    def __init__(self) -> None:
        self.messages: dict[str, dict[str, Any]] = {}
        self.alone: list[str] = []
        self.calls: list[tuple[str, dict[str, str]]] = []
        self.fails: list[tuple[int, dict[str, Any], dict[str, str]]] = []
        self.loses = 0
        """How many replies are lost, of calls that are carried out."""
        self.on_respond: Callable[[], bool] = lambda: False
        """Called when a reply to an interaction comes; returns whether it is lost."""
        far = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                far.calls.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
                status, said, headers = far.fails.pop(0) if far.fails else (200, far.do(self.path, body), {})
                if far.loses:
                    far.loses, status = far.loses - 1, 500
                text = json.dumps(said).encode()
                self.send_response(status)
                for name, value in {"content-length": str(len(text)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.origin = f"http://127.0.0.1:{self.server.server_port}"
        self.api = f"{self.origin}/api/"

    def do(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/api/chat.postMessage":
            ts = f"17000.{len(self.messages) + 1:06}"
            self.messages[ts] = body
            return {"ok": True, "channel": body["channel"], "ts": ts}
        if path == "/api/chat.update":
            self.messages[body["ts"]] = body
            return {"ok": True}
        if self.on_respond():
            return {"ok": False}
        ts = path.removeprefix("/respond/")
        if body["replace_original"]:
            self.messages[ts] = body
        else:
            assert body["response_type"] == "ephemeral"
            self.alone.append(body["text"])
        return {"ok": True}

    def texts(self, ts: str) -> list[str]:
        """The texts of a message, and those of its buttons."""
        blocks = self.messages[ts]["blocks"]
        found = [block["text"]["text"] for block in blocks if block["type"] == "section"]
        last = [each["text"] for each in blocks[-1]["elements"]]
        return found + [each if blocks[-1]["type"] == "context" else each["text"] for each in last]

    def pressed(self, ts: str, button: str, *, user: str = "U1", at_us: int) -> Request:
        """What Slack sends when a person presses a button of a message."""
        [buttons] = [each for each in self.messages[ts]["blocks"] if each["type"] == "actions"]
        [found] = [each for each in buttons["elements"] if each["action_id"] == button]
        payload = {
            "type": "block_actions", "user": {"id": user, "username": "m"}, "trigger_id": f"{at_us}",
            "actions": [{"action_id": button, "value": found["value"], "type": "button"}],
            "response_url": f"{self.origin}/respond/{ts}",
        }  # fmt: skip
        return signed(urlencode({"payload": json.dumps(payload)}).encode(), at_us // 1_000_000)


def signed(body: bytes, sent: int, secret: str = SIGNING) -> Request:
    digest = hmac.digest(secret.encode(), f"v0:{sent}:".encode() + body, "sha256").hex()
    headers = {
        "X-Slack-Request-Timestamp": str(sent), "X-Slack-Signature": f"v0={digest}",
        "Content-Type": "application/x-www-form-urlencoded",
    }  # fmt: skip
    return Request(headers, body)


def send(web: TestClient, request: Request, status: int = 200, name: str = "slack") -> Any:
    answer = web.post(f"/slack/{name}", content=request.body, headers=request.headers)
    assert answer.status_code == status, answer.text
    return answer.json() if answer.content else None


@contextmanager
def slack() -> Iterator[Slack]:
    made = Slack()
    with _served(made.server):
        yield made
