"""Webhooks are signed so that receivers can tell, and sent so that nothing is lost and nothing leaks."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

import killick
from killick.errors import DeclarationRefused, WebhookRefused
from killick.history.doctor import examine
from killick.history.run_info import blocked_by
from killick.model import events as e
from killick.model import system_events
from killick.permissions import create_private
from killick.store import MemoryStore, SqliteStore
from killick.store.records import OutboxItem
from killick.workers import answer_links
from killick.workers.hooks import HOOKS, HookEvent, attend, ensure
from killick.workers.webhooks import document, webhook_verify
from web.elsewhere import configured

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
KEY = b64decode(SECRET.removeprefix("whsec_"))
NEW, OLD, OTHER = "the-new-secret-of-ours", "the-old-secret-of-ours", "a-secret-of-another"
NOW_US = 1_750_000_000_000_000


class Taken(NamedTuple):
    """A request as the far side got it."""

    path: str
    headers: Mapping[str, str]
    body: bytes


class FarSide:
    """A service that answers as it is told, the last answer for ever, and keeps what it got."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, dict[str, str], bytes]] = [(204, {}, b"")]
        self.taken: list[Taken] = []
        self.hangs: threading.Event | None = None
        far = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                far.taken.append(Taken(self.path, {k.lower(): v for k, v in self.headers.items()}, body))
                if far.hangs is not None:
                    far.hangs.wait(300)
                status, headers, said = far.answers.pop(0) if len(far.answers) > 1 else far.answers[0]
                self.send_response(status)
                for name, value in {"content-length": str(len(said)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(said)

            do_GET = do_POST  # noqa: N815

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.origin = f"http://127.0.0.1:{self.server.server_port}"
        self.url = f"{self.origin}/in/s3cret-path?token=t0ken"
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        if self.hangs is not None:
            self.hangs.set()
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()


@pytest.fixture
def far() -> Iterator[FarSide]:
    made = FarSide()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def declared() -> Iterator[None]:
    before = dict(HOOKS)
    yield
    HOOKS.clear()
    HOOKS.update(before)


@pytest.fixture(params=["memory", "sqlite"])
def kd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[killick.Client]:
    clock = killick.clock.ManualClock(NOW_US)
    path = tmp_path / "killick.db"
    store = MemoryStore(clock=clock) if request.param == "memory" else SqliteStore(path, clock=clock)
    with killick.Client(store, clock=clock) as client:
        yield client


class Rests:
    """A worker that stops after so many rests; each moves the clock."""

    def __init__(self, clock: Any, times: int) -> None:
        self.clock, self.times = clock, times

    @property
    def stopping(self) -> bool:
        return self.times <= 0

    async def rest(self, seconds: float) -> None:
        self.times -= 1
        self.clock.advance(seconds)


def attended(kd: killick.Client, name: str = "ops", rests: int = 1) -> None:
    head = kd.runtime.store.lease(f"hook:{name}", kd.runtime.engine.holder, seconds=3600 * 24)
    asyncio.run(attend(kd.runtime.engine, kd.runtime.log.open(f"hook:{name}"), Rests(kd.runtime.clock, rests)))
    kd.runtime.store.release(f"hook:{name}", epoch=head.epoch)


def recorded(kd: killick.Client, name: str = "ops") -> list[tuple[str, dict[str, Any]]]:
    """What is on record of a hook after its declaration."""
    found = kd.events(f"hook:{name}", after=2)
    return [
        (str(each.event.__struct_config__.tag), kd.runtime.log.data(f"hook:{name}", each.seq).get("failure", {}))
        for each in found
    ]


@killick.agent(name="webhooked")
async def pays(run: killick.Run, claim: dict[str, Any]) -> Any:
    return (await run.ask(f"Pay {claim['amount']}?", to="managers")).kind


@killick.tool(name="webhooked_charge")
def charge(card: killick.Secret) -> str:
    return "charged"


@killick.agent(name="webhooked_charges")
async def charges(run: killick.Run) -> None:
    await run.call(charge, killick.Secret("4242 is secret"))


@killick.agent(name="webhooked_long")
async def long(run: killick.Run) -> dict[str, str]:
    return {"short": "x", "long": "y" * 100_000}


def open_wait(kd: killick.Client, run: str = "claim-1") -> None:
    with pytest.raises(killick.RunWaiting):
        kd.run(pays, {"amount": 1250}, id=run)


def hmac_by_hand(key: bytes, message: bytes) -> bytes:
    """RFC 2104, as it is written there, for keys of up to a block."""
    padded = key.ljust(64, b"\0")
    inner = sha256(bytes(byte ^ 0x36 for byte in padded) + message).digest()
    return sha256(bytes(byte ^ 0x5C for byte in padded) + inner).digest()


# what is sent -------------------------------------------------------------------------------------


def test_the_far_side_is_told_in_a_signed_document(kd: killick.Client, far: FarSide) -> None:
    killick.webhook(far.url, "wait.opened", secret=SECRET, name="ops")
    ensure(kd.runtime.engine)
    open_wait(kd)
    attended(kd)
    [taken] = far.taken
    assert taken.path == "/in/s3cret-path?token=t0ken"
    opened = kd.state("claim-1").fold.facts.waits["1"].opened
    document = json.loads(taken.body)
    assert document == {
        "version": 1,
        "id": f"claim-1:{opened}:ops",
        "agent": "webhooked",
        "run": "claim-1",
        "seq": opened,
        "at": "2025-06-15T15:06:40.000000Z",
        "kind": "wait.opened",
        "hash": document["hash"],
        "erased": False,
        "fields": document["fields"],
        "data": document["data"],
        "because": None,
        "left_out": [],
    }
    assert document["fields"].items() >= {"step": "1", "waits_for": "answer", "to": ["managers"]}.items()
    assert document["data"]["prompt"] == "Pay 1250?"
    headers = taken.headers
    assert (headers["content-type"], headers["webhook-id"]) == ("application/json", document["id"])
    assert headers["webhook-timestamp"] == "1750000000"
    signed = f"{document['id']}.1750000000.".encode() + taken.body
    by_hand = b64encode(hmac_by_hand(b64decode(SECRET.removeprefix("whsec_")), signed)).decode()
    assert headers["webhook-signature"] == f"v1,{by_hand}"
    assert webhook_verify(SECRET, headers, taken.body, clock=kd.runtime.clock) == document


@pytest.fixture
def linked() -> Iterator[None]:
    with configured():
        yield


def test_no_webhook_carries_a_link_that_was_not_declared(kd: killick.Client, far: FarSide, linked: None) -> None:
    killick.webhook(far.url, "wait.opened", secret=SECRET, name="ops")
    ensure(kd.runtime.engine)
    open_wait(kd)
    attended(kd)
    assert "answer#" not in far.taken[0].body.decode()
    assert "links" not in json.loads(far.taken[0].body)


def test_a_webhook_carries_the_link_of_the_one_person_whom_its_declaration_names(
    kd: killick.Client, far: FarSide, linked: None
) -> None:
    killick.webhook(far.url, "wait.opened", secret=SECRET, name="ops", links="managers")
    ensure(kd.runtime.engine)
    open_wait(kd)
    attended(kd)
    assert json.loads(far.taken[0].body)["links"].keys() == {"managers"}


@pytest.mark.parametrize("links", ["", " ", ["mia", "max"], True])
def test_links_are_for_one_person_of_one_webhook(far: FarSide, links: Any) -> None:
    with pytest.raises(DeclarationRefused, match="links are for one person of one webhook"):
        killick.webhook(far.url, "wait.opened", secret=SECRET, name="ops", links=links)


@killick.tool(name="webhooked_refund", approve="managers")
async def refund(amount: int) -> None: ...


@killick.agent(name="webhooked_refunds")
async def refunds(run: killick.Run) -> None:
    await run.decided("Refund?", "refund", options=["refund"], because="the parcel was lost", by="model")
    await run.call(refund, 20)


def test_an_approval_carries_the_models_reason_and_the_rule_that_asked(kd: killick.Client, far: FarSide) -> None:
    heard: list[object] = []
    killick.on("wait.opened", name="reasons")(lambda event: heard.append(event.because))
    killick.webhook(far.url, "wait.opened", secret=SECRET, name="ops")
    ensure(kd.runtime.engine)
    with pytest.raises(killick.RunWaiting):
        kd.run(refunds, id="r")
    attended(kd)
    attended(kd, "reasons")
    document = json.loads(far.taken[0].body)
    assert (document["because"], document["fields"]["rule"]) == ("the parcel was lost", "approve")
    assert heard == ["the parcel was lost"]


def test_a_run_of_any_name_has_an_id_that_a_header_can_hold(kd: killick.Client, far: FarSide) -> None:
    killick.webhook(far.url, "wait.opened", secret=SECRET, name="ops")
    ensure(kd.runtime.engine)
    open_wait(kd, "Zürich 1. 2")
    attended(kd)
    [taken] = far.taken
    document = webhook_verify(SECRET, taken.headers, taken.body, clock=kd.runtime.clock)
    assert (taken.headers["webhook-id"].isascii(), document["run"]) == (True, "Zürich 1. 2")


def test_large_values_are_left_out_and_named(kd: killick.Client, far: FarSide) -> None:
    killick.webhook(far.url, "run.completed", secret=SECRET, name="ops")
    ensure(kd.runtime.engine)
    kd.run(long, id="long")
    attended(kd)
    document = json.loads(far.taken[0].body)
    assert (document["data"], document["left_out"]) == ({}, ["result"])


def test_a_secret_goes_out_as_the_digest_that_is_on_record(kd: killick.Client) -> None:
    kd.run(charges, id="claim-1")
    seq = next(each.seq for each in kd.events("claim-1") if isinstance(each.event, e.StepIntended))
    told = OutboxItem(position=1, run="claim-1", seq=seq, kind="step.intended")
    event = HookEvent(kd.runtime.engine, told, agent="webhooked_charges", hook="ops", attempt=1, sent_at=NOW_US)
    sent = msgspec.json.encode(document(event))
    assert json.loads(sent)["data"]["arguments"]["card"].keys() == {"$secret"}
    assert b"is secret" not in sent


def test_what_was_erased_is_not_sent(kd: killick.Client, far: FarSide) -> None:
    killick.webhook(far.url, "run.completed", secret=SECRET, name="ops")
    ensure(kd.runtime.engine)
    kd.run(long, id="long")
    log = kd.runtime.log.open("long")
    kd.runtime.log.erase(log, at=NOW_US, reason="gdpr", seqs=[3])
    attended(kd)
    document = json.loads(far.taken[0].body)
    assert (document["kind"], document["data"], document["erased"]) == ("run.completed", None, True)


def test_neither_secret_nor_address_is_on_record(
    kd: killick.Client, far: FarSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK_SECRET", "0ne-secret-of-the-hook")
    killick.webhook(far.url, "wait.opened", secret=["env:HOOK_SECRET", "an0ther-secret-of-it"], name="ops")
    far.answers = [(500, {}, b"")]
    ensure(kd.runtime.engine)
    open_wait(kd)
    attended(kd)
    kinds = [kind for kind, _ in recorded(kd)]
    stored = b"".join(row.body + (row.data or b"") for row in kd.runtime.store.read("hook:ops"))
    stored += repr(kd.store.export("hook:ops")).encode()
    assert kinds == ["hook.failed"]
    assert far.origin.encode() in stored
    for secret in (b"0ne-secret", b"an0ther-", b"s3cret-path", b"t0ken"):
        assert secret not in stored
    assert not any(secret in repr(HOOKS["ops"]) for secret in ("0ne", "an0ther", "s3cret", "t0ken"))


def test_a_secret_of_the_environment_is_read_when_it_is_needed(
    kd: killick.Client, far: FarSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK_SECRET", SECRET)
    killick.webhook(far.url, "wait.opened", secret="env:HOOK_SECRET", name="ops", retry=killick.Retry(first=1))
    ensure(kd.runtime.engine)
    monkeypatch.delenv("HOOK_SECRET")
    open_wait(kd)
    attended(kd)
    [(kind, failure)] = recorded(kd)
    assert (kind, far.taken) == ("hook.failed", [])
    assert "the environment has no HOOK_SECRET" in failure["message"]
    monkeypatch.setenv("HOOK_SECRET", SECRET)
    attended(kd, rests=2)
    assert webhook_verify("env:HOOK_SECRET", far.taken[0].headers, far.taken[0].body, clock=kd.runtime.clock)


async def served(kd: killick.Client) -> None:
    async with kd.worker() as worker:
        await worker.until_idle()


def test_a_worker_without_the_secret_says_so_once_and_leaves_the_events_to_one_that_has_it(
    kd: killick.Client, far: FarSide, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("HOOK_SECRET", raising=False)
    killick.webhook(far.url, "wait.opened", secret="env:HOOK_SECRET", name="ops")
    for _ in range(2):
        asyncio.run(served(kd))
        open_wait(kd, f"claim-{len(kd.list())}")
    lack = "the environment has no HOOK_SECRET; set it to the secret"
    assert [record.getMessage() for record in caplog.records if "HOOK_SECRET" in record.getMessage()] == [
        f"hook ops: this worker delivers none of its events: {lack}"
    ] * 2, "once for each worker"
    assert [kind for kind, _ in recorded(kd)] == ["note.made"], "once for both"
    log = kd.runtime.log
    assert blocked_by(log, log.head("hook:ops")) == lack
    kd.runtime.clock.advance(3600)
    [finding] = [each for each in examine(log, clock=kd.runtime.clock).findings if each.reason == "hook"]
    assert [(named.run, named.about) for named in finding.runs] == [("hook:ops", lack)]
    monkeypatch.setenv("HOOK_SECRET", SECRET)
    asyncio.run(served(kd))
    assert len(far.taken) == 2
    assert blocked_by(log, log.head("hook:ops")) is None


def test_a_short_secret_of_the_environment_signs_nothing(
    kd: killick.Client, far: FarSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK_SECRET", "fifteen bytes..")
    killick.webhook(far.url, "wait.opened", secret="env:HOOK_SECRET", name="ops")
    assert ensure(kd.runtime.engine) == []
    assert "fewer than 16 bytes" in str(HOOKS["ops"].lacks())


def test_while_secrets_are_changed_it_is_signed_with_each(kd: killick.Client, far: FarSide) -> None:
    killick.webhook(far.url, "wait.opened", secret=[NEW, OLD], name="ops")
    ensure(kd.runtime.engine)
    open_wait(kd)
    attended(kd)
    [taken] = far.taken
    assert len(taken.headers["webhook-signature"].split()) == 2
    for secret in (NEW, OLD, [OTHER, OLD]):
        assert webhook_verify(secret, taken.headers, taken.body, clock=kd.runtime.clock)
    with pytest.raises(WebhookRefused, match="no signature fits"):
        webhook_verify(OTHER, taken.headers, taken.body, clock=kd.runtime.clock)


# what is answered ---------------------------------------------------------------------------------


def test_what_is_not_taken_is_sent_again_the_same_but_for_its_time(kd: killick.Client, far: FarSide) -> None:
    far.answers = [(500, {}, b"broken " * 200), (404, {}, b""), (200, {}, b"ok")]
    killick.webhook(far.url, "wait.opened", secret=SECRET, name="ops", retry=killick.Retry(first=20, jitter=0))
    ensure(kd.runtime.engine)
    open_wait(kd)
    attended(kd, rests=4)
    assert [kind for kind, _ in recorded(kd)] == ["hook.failed", "hook.failed", "hook.called"]
    failure = recorded(kd)[0][1]
    assert failure["message"] == f"{far.origin}: answered 500"
    assert (failure["details"]["status"], len(failure["details"]["body"])) == (500, 500)
    assert len({taken.body for taken in far.taken}) == 1
    assert len({taken.headers["webhook-id"] for taken in far.taken}) == 1
    assert [taken.headers["webhook-timestamp"] for taken in far.taken] == ["1750000000", "1750000020", "1750000060"]


def test_who_is_gone_is_told_no_more_of_it(kd: killick.Client, far: FarSide) -> None:
    far.answers = [(410, {}, b"moved out"), (204, {}, b"")]
    killick.webhook(far.url, "wait.opened", secret=SECRET, name="ops")
    ensure(kd.runtime.engine)
    open_wait(kd)
    open_wait(kd, "claim-2")
    attended(kd)
    (dropped, failure), (called, _) = recorded(kd)
    assert (dropped, called, len(far.taken)) == ("hook.dropped", "hook.called", 2)
    assert (failure["type"], failure["details"]["body"]) == ("killick.errors.WebhookGone", "moved out")


@pytest.mark.parametrize(
    ("status", "after", "waits"),
    [
        (429, "120", 120),
        (503, "120", 120),
        (429, "Sun, 15 Jun 2025 15:11:40 GMT", 300),
        (429, "soon", 10),
        (429, "3", 10),
        (503, None, 10),
        (500, "120", 10),
    ],
)
def test_the_far_side_may_ask_for_patience(
    kd: killick.Client, far: FarSide, status: int, after: str | None, waits: int
) -> None:
    far.answers = [(status, {} if after is None else {"retry-after": after}, b"")]
    killick.webhook(far.url, "wait.opened", secret=SECRET, name="ops", retry=killick.Retry(first=10, jitter=0))
    ensure(kd.runtime.engine)
    open_wait(kd)
    attended(kd)
    failed = kd.runtime.log.event("hook:ops", 3)
    assert isinstance(failed, system_events.HookFailed)
    assert failed.retry_at == NOW_US + waits * 1_000_000


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_nobody_is_told_whom_a_redirect_names(kd: killick.Client, far: FarSide, status: int) -> None:
    other = FarSide()
    try:
        far.answers = [(status, {"location": f"{other.origin}/elsewhere"}, b"")]
        killick.webhook(far.url, "wait.opened", secret=SECRET, name="ops")
        ensure(kd.runtime.engine)
        open_wait(kd)
        attended(kd)
    finally:
        other.close()
    assert (len(far.taken), other.taken) == (1, [])
    assert f"answered {status} and points elsewhere, which is not followed" in recorded(kd)[0][1]["message"]


def test_an_answer_that_does_not_come_in_time_is_none(kd: killick.Client, far: FarSide) -> None:
    far.hangs = threading.Event()
    killick.webhook(far.url, "wait.opened", secret=SECRET, name="ops", timeout=0.05)
    ensure(kd.runtime.engine)
    open_wait(kd)
    attended(kd)
    [(kind, failure)] = recorded(kd)
    assert (kind, failure["message"]) == ("hook.failed", f"{far.origin}: no answer within 0.05 s")


def test_who_cannot_be_reached_is_told_later(kd: killick.Client) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        origin = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        killick.webhook(origin, "wait.opened", secret=SECRET, name="ops")
        ensure(kd.runtime.engine)
        open_wait(kd)
        attended(kd)
    [(kind, failure)] = recorded(kd)
    assert kind == "hook.failed"
    assert failure["message"].startswith(f"{origin}: could not be reached: ")


def test_what_is_no_http_is_told_later(kd: killick.Client) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            peer, _ = server.accept()
            with peer:
                peer.recv(65_536)
                peer.sendall(b"SSH-2.0-nonsense\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        killick.webhook(f"http://127.0.0.1:{server.getsockname()[1]}", "wait.opened", secret=SECRET, name="ops")
        ensure(kd.runtime.engine)
        open_wait(kd)
        attended(kd)
        thread.join()
    assert recorded(kd)[0][0] == "hook.failed"


# declaring ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "options", "told"),
    [
        ("http://example.org/hook", {}, "http://example.org is not encrypted; use https://, or give insecure=True"),
        ("ftp://example.org", {}, "is not the address of a service"),
        ("example.org/hook", {}, "is not the address of a service"),
        ("https://[::1/hook", {}, "is not the address of a service"),
        ("https://example.org:port/", {}, "is not the address of a service"),
        ("https://ann:pw@example.org/", {}, "its address names a user"),
        ("https://example.org", {"secret": ""}, "is signed; give secret"),
        ("https://example.org", {"secret": []}, "is signed; give secret"),
        ("https://example.org", {"secret": "whsec_!"}, "its part after whsec_ is not base64"),
        ("https://example.org", {"secret": "a"}, "has a secret of fewer than 16 bytes"),
        ("https://example.org", {"secret": [SECRET, "fifteen bytes.."]}, "has a secret of fewer than 16 bytes"),
        ("https://example.org", {"secret": "whsec_YWJj"}, "has a secret of fewer than 16 bytes"),
        ("https://example.org", {"timeout": 0}, "timeout=0 leaves no time"),
    ],
)
def test_a_webhook_that_cannot_work_is_refused_in_one_line(url: str, options: dict[str, Any], told: str) -> None:
    options = {"secret": SECRET, "name": "ops", **options}
    with pytest.raises(DeclarationRefused) as refused:
        killick.webhook(url, "run.failed", **options)
    assert told in str(refused.value)
    assert ("\n" in str(refused.value), "pw" in str(refused.value), HOOKS) == (False, False, {})


def test_a_webhook_is_named_by_its_host_and_one_name_has_one_address() -> None:
    assert killick.webhook("https://example.org/hook", "run.failed", secret=SECRET).name == "example.org"
    killick.webhook("https://example.org/hook", "run.failed", "wait.opened", secret=SECRET)
    with pytest.raises(DeclarationRefused, match="give one of them another name="):
        killick.webhook("https://example.org/other", "run.failed", secret=SECRET)
    for fine in ("http://localhost:8000/x", "http://127.0.0.1/x", "http://[::1]:8000/x"):
        killick.webhook(fine, "run.failed", secret=SECRET, name=f"at-{len(HOOKS)}")
    killick.webhook("http://10.0.0.7/hook", "run.failed", secret=SECRET, name="inside", insecure=True)


# receiving ----------------------------------------------------------------------------------------

BODY = b'{"test": 2432232314}'
HEADERS = {
    "Webhook-Id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
    "Webhook-Timestamp": "1614265330",
    "Webhook-Signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
}
THEN = killick.clock.ManualClock(1_614_265_330_000_000)


def signed(key: bytes, body: bytes = BODY) -> dict[str, str]:
    message = f"{HEADERS['Webhook-Id']}.{HEADERS['Webhook-Timestamp']}.".encode() + body
    return {**HEADERS, "Webhook-Signature": f"v1,{b64encode(hmac_by_hand(key, message)).decode()}"}


def test_a_signature_is_what_it_is_by_hand() -> None:
    assert signed(b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")) == HEADERS
    assert webhook_verify(SECRET, HEADERS, BODY, clock=THEN) == {"test": 2432232314}
    assert webhook_verify("plain text of 24 bytes..", signed(b"plain text of 24 bytes.."), BODY, clock=THEN)


def test_one_of_several_signatures_of_several_versions_is_enough() -> None:
    headers = signed(KEY)
    headers["Webhook-Signature"] = f"v1a,x v1,AAAA {headers['Webhook-Signature']}"
    assert webhook_verify([OLD, SECRET], headers, BODY, clock=THEN)


@pytest.mark.parametrize(
    ("changed", "body", "late", "told"),
    [
        ({"Webhook-Id": ""}, BODY, 0, "it has no header webhook-id"),
        ({"Webhook-Timestamp": ""}, BODY, 0, "it has no header webhook-timestamp"),
        ({"Webhook-Signature": ""}, BODY, 0, "it has no header webhook-signature"),
        ({"Webhook-Timestamp": "1e9"}, BODY, 0, "its webhook-timestamp is not a number of seconds"),
        ({"Webhook-Timestamp": "٣"}, BODY, 0, "its header webhook-timestamp is not plain ASCII"),
        ({"Webhook-Timestamp": "9" * 5000}, BODY, 0, "its webhook-timestamp is not a number of seconds"),
        ({}, BODY, 301, "it was sent 301 s ago, more than 300 s"),
        ({}, BODY, -301, "it was sent 301 s in the future"),
        ({"Webhook-Signature": "v2,AAAA"}, BODY, 0, "it has no signature of version v1"),
        ({"Webhook-Signature": "v1,AAAA"}, BODY, 0, "no signature fits"),
        ({"Webhook-Signature": "v1,é"}, BODY, 0, "its header webhook-signature is not plain ASCII"),
        ({"Webhook-Id": "\udcff"}, BODY, 0, "its header webhook-id is not plain ASCII"),
        ({"Webhook-Id": "msg_another"}, BODY, 0, "no signature fits"),
        ({"Webhook-Timestamp": "1614265331"}, BODY, 0, "no signature fits"),
        ({}, BODY + b" ", 0, "no signature fits"),
    ],
)
def test_what_does_not_hold_is_refused_by_its_reason(
    changed: dict[str, str], body: bytes, late: int, told: str
) -> None:
    clock = killick.clock.ManualClock(THEN.now_us() + late * 1_000_000)
    with pytest.raises(WebhookRefused) as refused:
        webhook_verify(SECRET, {**signed(KEY), **changed}, body, clock=clock)
    assert told in str(refused.value)


def test_how_old_it_may_be_is_for_the_receiver_to_say() -> None:
    clock = killick.clock.ManualClock(THEN.now_us() + 3_600_000_000)
    assert webhook_verify(SECRET, signed(KEY), BODY, tolerance="1h", clock=clock)
    with pytest.raises(WebhookRefused, match="3600 s ago, more than 60 s"):
        webhook_verify(SECRET, signed(KEY), BODY, tolerance=60, clock=clock)


@pytest.mark.parametrize("body", [b"[1]", b"{", b"\xff"])
def test_what_is_no_document_is_refused(body: bytes) -> None:
    with pytest.raises(WebhookRefused, match="its body is not a JSON object"):
        webhook_verify(SECRET, signed(KEY, body), body, clock=THEN)


@pytest.mark.parametrize("secret", ["", "env:NOT_THERE_AT_ALL", ["", SECRET], "s", [SECRET, "fifteen bytes.."]])
def test_nobody_verifies_with_a_secret_that_everybody_knows(secret: Any) -> None:
    with pytest.raises(DeclarationRefused, match="secret: "):
        webhook_verify(secret, signed(b""), BODY, clock=THEN)


def test_a_link_secret_in_a_file_that_others_may_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with create_private(tmp_path / "link.secret") as file:
        file.write(b"0123456789abcdef\n")
    monkeypatch.setenv(answer_links.URL, "https://killick.example.org")
    monkeypatch.setenv(answer_links.SECRET, f"file:{tmp_path / 'link.secret'}")
    assert answer_links.settings()[1] == ("0123456789abcdef",)
    (tmp_path / "link.secret").chmod(0o640)
    assert "chmod 600" in str(answer_links.lacks())
    monkeypatch.setenv(answer_links.SECRET, f"file:{tmp_path / 'nowhere'}")
    assert "cannot be read" in str(answer_links.lacks())
