"""The guard: what every response says, and what is too long, too large, too slow or too often."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import killick
from killick.web.middleware import CSP, PERSON, Buckets, Guard, Limits
from killick.workers.tokens import Person

App = Callable[[Any, Any, Any], Awaitable[None]]


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Says what body it got, as HTML."""
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/html")]})
    await send({"type": "http.response.body", "body": body})


class Asked:
    """One request to an app, as a server makes it."""

    def __init__(self, app: App, parts: list[bytes] | None = None, **scope: Any) -> None:
        self.app = app
        self.sent: list[Any] = []
        self.parts = parts if parts is not None else [b""]
        self.gone = asyncio.Event()
        self.scope: dict[str, Any] = {
            "type": "http", "method": "GET", "path": "/runs", "raw_path": b"/runs", "query_string": b"",
            "headers": [], "client": ("10.0.0.1", 5), "root_path": "",
        } | scope  # fmt: skip

    async def receive(self) -> Any:
        if not self.parts:
            await self.gone.wait()
            return {"type": "http.disconnect"}
        part = self.parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(self.parts) or part == b"..."}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    async def answered(self) -> Asked:
        await self.app(self.scope, self.receive, self.send)
        return self

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}

    @property
    def body(self) -> str:
        return b"".join(each.get("body", b"") for each in self.sent[1:]).decode()


def ask(app: App, parts: list[bytes] | None = None, **scope: Any) -> Asked:
    async def asked() -> Asked:
        return await Asked(app, parts, **scope).answered()

    return asyncio.run(asked())


def guarded(app: App = echo, **limits: Any) -> Guard:
    return Guard(app, killick.clock.ManualClock(), Limits(**limits))


def test_every_response_forbids_framing_foreign_code_sniffing_and_keeping() -> None:
    for asked in (ask(guarded()), ask(guarded(url_bytes=1))):
        assert asked.headers["content-security-policy"] == CSP
        assert asked.headers["x-frame-options"] == "DENY"
        assert asked.headers["x-content-type-options"] == "nosniff"
        assert asked.headers["referrer-policy"] == "no-referrer"
        assert asked.headers["cross-origin-opener-policy"] == "same-origin"
        assert asked.headers["cache-control"] == "no-store"


def test_no_handler_can_loosen_what_every_response_says() -> None:
    async def loose(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"Content-Security-Policy", b"default-src *"), (b"Cache-Control", b"max-age=9"), (b"server", b"x")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    asked = ask(guarded(loose))
    names = [name.lower() for name, _ in asked.sent[0]["headers"]]
    assert names.count(b"content-security-policy") == 1
    assert asked.headers["content-security-policy"] == CSP
    assert asked.headers["Cache-Control"] == "max-age=9"
    assert b"server" not in names


def test_a_body_reaches_the_app_whole() -> None:
    assert ask(guarded(), [b"one ", b"two ", b"three"], method="POST").body == "one two three"


@pytest.mark.parametrize(
    "asked",
    [
        {"headers": [(b"content-length", b"11")], "parts": [b"x" * 11]},
        {"headers": [(b"content-length", b"nonsense")], "parts": [b""]},
        {"headers": [(b"content-length", b"9" * 5_000)], "parts": [b""]},
        {"headers": [(b"content-length", b"3")], "parts": [b"x" * 6, b"x" * 5]},
        {"headers": [(b"transfer-encoding", b"chunked")], "parts": [b"x" * 4, b"x" * 4, b"x" * 4]},
    ],
)
def test_a_body_that_is_too_large_is_refused_whatever_its_length_says(asked: dict[str, Any]) -> None:
    found = ask(guarded(body_bytes=10), asked.pop("parts"), method="POST", **asked)
    assert found.status == 413
    assert found.headers["connection"] == "close", "what was not read would be taken for the next request"
    assert found.headers["content-type"] == "application/problem+json"


def test_a_body_that_dribbles_is_cut_off_before_any_handler_sees_it() -> None:
    seen: list[Any] = []

    async def never(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope)

    found = ask(guarded(never, body_seconds=0.05), [b"..."], method="POST")
    assert found.status == 408
    assert found.headers["connection"] == "close"
    assert seen == []


def test_whoever_goes_before_the_body_is_there_is_not_answered() -> None:
    async def asked() -> Asked:
        it = Asked(guarded(), [b"..."], method="POST")
        it.gone.set()
        return await it.answered()

    assert asyncio.run(asked()).sent == []


def test_an_address_that_is_too_long_is_refused() -> None:
    assert ask(guarded(url_bytes=100), query_string=b"q=" + b"x" * 100).status == 414
    assert ask(guarded(url_bytes=100), raw_path=b"/" + b"x" * 100).status == 414


def test_who_asks_too_often_is_told_when_to_come_again_and_others_are_served() -> None:
    clock = killick.clock.ManualClock()
    guard = Guard(echo, clock, Limits(rate=2, burst=3))
    assert [ask(guard).status for _ in range(4)] == [200, 200, 200, 429]
    refused = ask(guard)
    assert int(refused.headers["retry-after"]) >= 1
    assert ask(guard, client=("10.0.0.2", 5)).status == 200
    clock.advance(1)
    assert [ask(guard).status for _ in range(3)] == [200, 200, 429]


def test_people_who_are_known_count_each_for_themselves_also_from_one_address() -> None:
    async def known(scope: Any, receive: Any, send: Any) -> None:
        name = dict(scope["headers"])[b"authorization"].decode()
        scope["state"][PERSON] = None if name == "wrong" else Person(name)
        await send({"type": "http.response.start", "status": 401 if name == "wrong" else 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    guard = guarded(known, rate=1, burst=3)

    def asked(name: bytes) -> int:
        return ask(guard, headers=[(b"authorization", name)]).status

    assert [asked(b"ann"), asked(b"bob")] == [200, 200], "their first counts for the address"
    assert [asked(b"ann") for _ in range(4)] == [200, 200, 200, 429]
    assert asked(b"bob") == 200
    assert [asked(b"wrong"), asked(b"wrong2")] == [401, 429], "strangers share what is left for the address"


def test_one_network_of_ipv6_is_one_address() -> None:
    guard = guarded(rate=1, burst=2)
    found = [
        ask(guard, client=(host, 5)).status
        for host in ("2001:db8::1", "2001:db8::2", "2001:db8:0:0:1::", "2001:db8:0:1::")
    ]
    assert found == [200, 200, 429, 200]
    mapped = [ask(guard, client=(host, 5)).status for host in ("10.0.0.9", "::ffff:10.0.0.9", "::ffff:10.0.0.9")]
    assert mapped == [200, 200, 429]


def test_the_bytes_of_a_body_are_held_by_its_address_until_it_is_answered() -> None:
    guard = guarded(unread_bytes=10)
    assert ask(guard, [b"x" * 11], method="POST").status == 429
    assert ask(guard, [b"x" * 10], method="POST").status == 200
    assert not guard.held


def test_new_addresses_do_not_fill_the_memory() -> None:
    buckets = Buckets(killick.clock.ManualClock(), 1, 1)
    for number in range(30_000):
        buckets.wait_seconds(number)
    assert len(buckets._levels) <= 10_000


def test_a_stream_ends_when_the_server_stops() -> None:
    async def stream(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        assert await receive() == {"type": "http.disconnect"}

    async def asked() -> Asked:
        guard = guarded(stream)
        it = Asked(guard)
        running = asyncio.ensure_future(it.answered())
        while not guard.streams:
            await asyncio.sleep(0)
        guard.close()
        return await asyncio.wait_for(running, 300)

    found = asyncio.run(asked())
    assert found.body == "one"
    assert not found.sent[-1].get("more_body"), "it is ended as a whole response, not torn"


def test_an_error_of_the_apps_is_told_to_nobody_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("the secret is 42")

    found = ask(guarded(broken))
    assert found.status == 500
    assert "42" not in found.body
    assert "the secret is 42" in caplog.text


def test_a_write_is_one_line_without_its_query_or_body(caplog: pytest.LogCaptureFixture) -> None:
    async def known(scope: Any, receive: Any, send: Any) -> None:
        scope["state"][PERSON] = Person("ann", "operator")
        await echo(scope, receive, send)

    with caplog.at_level(logging.INFO, "killick"):
        ask(
            guarded(known),
            [b"secret body"],
            method="POST",
            raw_path=b"/api/v1/runs/r%2F1/pause",
            query_string=b"k=hidden",
        )
        ask(guarded(known), method="GET")
    assert [record.getMessage() for record in caplog.records] == [
        "what=wrote who=ann method=POST path=/api/v1/runs/r%2F1/pause status=200"
    ]


def test_web_sockets_are_not_spoken() -> None:
    async def asked() -> list[Any]:
        it = Asked(guarded(), type="websocket")
        await it.answered()
        return it.sent

    assert asyncio.run(asked()) == [{"type": "websocket.close", "code": 1008}]
