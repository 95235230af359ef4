"""Webhooks that come in: signed, fresh, counted once; and events that people publish."""

from __future__ import annotations

import asyncio
import hmac
import logging
from base64 import b64encode
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import httpx
import msgspec
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

import killick
from killick.errors import DeclarationRefused
from killick.store import MemoryStore
from killick.triggers import TRIGGERS
from killick.web import asgi
from killick.web import webhooks as receiving
from killick.web.addresses import Paths
from killick.web.app_context import AppContext
from killick.web.endpoints import Endpoints
from killick.web.handlers import triggers
from killick.web.idempotency import IdempotencyKeys
from killick.web.routes import Person, routes_of

SECRET = "a-secret-of-the-shop"


@killick.agent(name="receiving.fulfil")
async def fulfil(run: killick.Run, order: dict[str, Any]) -> Any:
    return order


@killick.agent(name="receiving.asker")
async def asker(run: killick.Run) -> Any:
    return await run.wait("paid")


@killick.agent(name="receiving.renewer")
async def renewer(run: killick.Run, left: int) -> Any:
    await run.wait("paid")
    if left:
        await run.renew(left - 1)


class Anybody:
    login = None

    async def identify(self, request: Request) -> Person:
        return Person("ada", "operator")

    def refuse_forged(self, request: Request) -> None: ...

    def csrf(self, request: Request) -> str:
        return ""

    def set_cookies(self, request: Request, response: Response) -> None: ...


class Desk:
    """An app that takes webhooks, and a sender who has the secret."""

    def __init__(self, client: killick.Client, clock: killick.clock.ManualClock, **webhooks: Any) -> None:
        self.client = client
        self.clock = clock
        context = AppContext(client, access=Anybody(), webhooks=webhooks)
        routes = Endpoints(context, once=IdempotencyKeys(client)).table(routes_of(receiving, triggers))
        self._transport = httpx.ASGITransport(Paths(Starlette(routes=routes)))

    def post(self, path: str, body: bytes, headers: dict[str, str]) -> httpx.Response:
        async def asked() -> httpx.Response:
            async with httpx.AsyncClient(transport=self._transport, base_url="http://killick") as http:
                return await http.post(f"/api/v1{path}", content=body, headers=headers)

        return asyncio.run(asked())

    def send(
        self, path: str, body: Any, *, name: str = "m1", secret: str = SECRET, age: int = 0, **headers: str
    ) -> httpx.Response:
        raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
        at = str(self.clock.now_us() // 1_000_000 - age)
        signature = b64encode(hmac.new(secret.encode(), f"{name}.{at}.".encode() + raw, sha256).digest()).decode()
        signed = {"webhook-id": name, "webhook-timestamp": at, "webhook-signature": f"v1,{signature}"}
        return self.post(path, raw, signed | {each.replace("_", "-"): value for each, value in headers.items()})

    def orders(self) -> list[Any]:
        """What the runs that the trigger started were given, when all that is due was attended to."""
        self.client.runtime.blocking(self._attended())
        runs = self.client.list(agent="receiving.fulfil")
        return [self.client.runtime.log.data(each.id, 1)["input"] for each in reversed(runs)]

    async def _attended(self) -> None:
        async with self.client.worker(agents=["receiving.fulfil"]) as worker:
            await worker.until_idle()


@pytest.fixture
def clock() -> killick.clock.ManualClock:
    return killick.clock.ManualClock(1_763_000_000_000_000)


@pytest.fixture
def desk(clock: killick.clock.ManualClock) -> Iterator[Desk]:
    before = TRIGGERS.copy()
    TRIGGERS.clear()
    killick.triggers.on_event("orders", fulfil, name="receiving.orders")
    with killick.Client(MemoryStore(clock=clock), clock=clock) as client:
        yield Desk(client, clock, orders=SECRET, paid=("another-secret-of-the-shop", SECRET))
    TRIGGERS.clear()
    TRIGGERS.update(before)


def test_a_webhook_becomes_an_event_that_triggers_hear_once(desk: Desk) -> None:
    desk.orders()
    for _ in range(3):
        answer = desk.send("/hooks/orders", {"number": 17})
        assert (answer.status_code, answer.json()) == (202, {"name": "orders", "id": "m1", "receivers": 1})
    desk.send("/hooks/orders", {"number": 18}, name="m2")
    assert desk.orders() == [{"number": 17}, {"number": 18}]
    desk.clock.advance(30 * 24 * 3600)
    assert desk.send("/hooks/orders", {"number": 17}).status_code == 202
    assert len(desk.orders()) == 2


def test_a_webhook_that_no_trigger_hears_is_refused_and_logged_and_counts_when_it_is_sent_again(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    declared = TRIGGERS.copy()
    TRIGGERS.clear()
    answer = desk.send("/hooks/orders", {"number": 17})
    assert (answer.status_code, answer.json()["code"]) == (404, "trigger_unknown")
    assert "webhook orders (m1): refused, no trigger listens to this event" in caplog.text
    TRIGGERS.clear()
    TRIGGERS.update(declared)
    assert desk.send("/hooks/orders", {"number": 17}).status_code == 202
    assert desk.orders() == [{"number": 17}]


def test_a_webhook_for_a_cancelled_trigger_is_refused(desk: Desk) -> None:
    desk.orders()
    desk.client.cancel("trigger:receiving.orders")
    assert desk.send("/hooks/orders", {"number": 17}).status_code == 404


def test_one_signed_webhook_counts_for_one_address(desk: Desk) -> None:
    for run in ("a", "b"):
        desk.client.start(asker, id=run)
    assert desk.send("/hooks/paid/runs/a", {"amount": 3}).status_code == 200
    assert desk.send("/hooks/paid/runs/a", {"amount": 3}).status_code == 200
    for elsewhere in ("/hooks/paid/runs/b", "/hooks/paid"):
        answer = desk.send(elsewhere, {"amount": 3})
        assert (answer.status_code, answer.json()["code"]) == (409, "id_reused")
    assert desk.client.runtime.store.messages("b") == []


def test_a_secret_that_can_be_guessed_is_refused(desk: Desk) -> None:
    for secret in ("x", ("long-enough-to-keep", "short")):
        with pytest.raises(killick.errors.DeclarationRefused, match="fewer than 16"):
            asgi(desk.client, webhooks={"orders": secret})


def test_a_webhook_for_a_run_is_the_message_that_it_waits_for(desk: Desk) -> None:
    desk.client.start(asker, id="r/1")
    for _ in range(2):
        assert desk.send("/hooks/paid/runs/r%2F1", {"amount": 3}).status_code == 200
    assert [message.by for message in desk.client.runtime.store.messages("r/1")] == ["webhook:paid"]
    assert desk.client.run(asker, id="r/1") == {"amount": 3}
    assert desk.send("/hooks/paid/runs/r%2F1", {"amount": 3}).status_code == 200
    over = desk.send("/hooks/paid/runs/r%2F1", {"amount": 3}, name="m2")
    assert over.status_code == 409


def test_what_a_run_took_before_it_went_on_as_another_is_not_taken_again(desk: Desk) -> None:
    desk.client.start(renewer, 1, id="r")
    desk.send("/hooks/paid/runs/r", {"amount": 3})
    with pytest.raises(killick.RunWaiting):
        desk.client.run(renewer, 1, id="r")
    assert desk.client.info("r").status == "completed"
    assert desk.send("/hooks/paid/runs/r", {"amount": 3}).status_code == 200
    assert desk.client.info("r+2").status == "waiting"
    assert not desk.client.runtime.store.messages("r+2")
    assert desk.send("/hooks/paid/runs/r", {"amount": 4}, name="m2").status_code == 200
    assert len(desk.client.runtime.store.messages("r+2")) == 1


def test_both_of_two_secrets_are_good_while_one_replaces_the_other(desk: Desk) -> None:
    desk.client.start(asker, id="r")
    for secret in (SECRET, "another-secret-of-the-shop"):
        assert desk.send("/hooks/paid/runs/r", {}, secret=secret).status_code == 200


def test_whoever_has_no_secret_gets_nowhere_and_learns_nothing(
    desk: Desk, caplog: pytest.LogCaptureFixture, clock: killick.clock.ManualClock
) -> None:
    desk.client.start(asker, id="r")
    with caplog.at_level(logging.DEBUG):
        refused = [
            desk.send("/hooks/orders", {}, secret="guessed"),
            desk.send("/hooks/nothing", {}),
            desk.send("/hooks/nothing", {}, secret=""),
            desk.send("/hooks/paid/runs/r", {}, secret="guessed"),
            desk.send("/hooks/paid/runs/nobody", {}, secret="guessed"),
        ]
        assert {(answer.status_code, answer.content) for answer in refused} == {(401, refused[0].content)}
        old = [desk.send("/hooks/orders", {}, age=301), desk.send("/hooks/orders", {}, age=-301)]
        bare = [desk.post("/hooks/orders", b"{}", {}), desk.post("/hooks/nothing", b"{}", {})]
        assert {answer.status_code for answer in (*old, *bare)} == {401}
        assert bare[0].content == bare[1].content
    assert not desk.client.runtime.store.messages("r")
    assert all(SECRET not in answer.text for answer in (*refused, *old, *bare))
    assert SECRET not in caplog.text


def test_the_same_body_under_another_name_or_changed_on_its_way_is_refused(desk: Desk) -> None:
    at = str(desk.clock.now_us() // 1_000_000)
    right = hmac.new(SECRET.encode(), f"m.{at}.".encode() + b"{}", sha256).digest()
    headers = {"webhook-id": "m", "webhook-timestamp": at, "webhook-signature": f"v1,{b64encode(right).decode()}"}
    assert desk.post("/hooks/orders", b"{}", headers).status_code == 202
    for changed in ({"webhook-id": "n"}, {"webhook-timestamp": str(int(at) + 1)}, {"webhook-signature": "v1,"}):
        assert desk.post("/hooks/orders", b"{}", headers | changed).status_code == 401
    assert desk.post("/hooks/orders", b'{"a":1}', headers).status_code == 401


@pytest.mark.parametrize("body", [b"", b"text", b"[1]", b'"a"', b"\xff{}", b"{" * 100_000])
def test_a_body_that_is_no_object_is_refused(desk: Desk, body: bytes) -> None:
    assert desk.send("/hooks/orders", body).status_code == 401


def test_nobody_reaches_the_logs_that_killick_keeps_for_itself(desk: Desk) -> None:
    desk.orders()
    answer = desk.send("/hooks/paid/runs/trigger:receiving.orders", {})
    assert (answer.status_code, answer.json()["code"]) == (404, "run_unknown")


@pytest.mark.parametrize(
    "webhooks",
    [{"": "x"}, {"killick.fire": "x"}, {"orders": ""}, {"orders": "env:NOT_SET_HERE"}, {"orders": "whsec_!"}],
)
def test_a_webhook_that_cannot_work_is_refused_at_once(webhooks: dict[str, str]) -> None:
    with pytest.raises(DeclarationRefused):
        receiving.check(webhooks)


def test_webhooks_that_can_work_are_let_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_SECRET", SECRET)
    receiving.check({"a": SECRET, "b": (SECRET[::-1], "env:SHOP_SECRET"), "c": f"whsec_{'AAAA' * 6}"})


def test_an_event_is_published_by_whoever_may_and_counts_once_by_id_or_key(desk: Desk) -> None:
    desk.orders()

    def publish(body: Any, **headers: str) -> httpx.Response:
        given = {"content-type": "application/json"} | {
            name.replace("_", "-"): value for name, value in headers.items()
        }
        return desk.post("/events", msgspec.json.encode(body), given)

    assert publish({"name": "orders", "body": {"number": 1}, "id": "one"}).json() == {"name": "orders", "receivers": 1}
    publish({"name": "orders", "body": {"number": 1}, "id": "one"})
    publish({"name": "orders", "body": {"number": 2}}, Idempotency_Key="two")
    again = publish({"name": "orders", "body": {"number": 2}}, Idempotency_Key="two")
    assert again.headers["idempotency-replayed"] == "true"
    assert publish({"name": "nobody.listens"}).json() == {"name": "nobody.listens", "receivers": 0}
    assert publish({"name": "killick.fire"}).status_code == 409
    assert publish({"name": "orders", "more": 1}).status_code == 422
    assert desk.orders() == [{"number": 1}, {"number": 2}]
