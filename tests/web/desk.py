"""A desk: agents that ask, act, fail and wait; and people who come to them over HTTP. For tests of what they do."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field
from starlette.testclient import TestClient

import killick
from killick import rules
from killick.client.client import Client
from killick.clock import ManualClock
from killick.web.app import asgi
from killick.web.auth.access import Identified
from killick.web.middleware import Guard

PEOPLE = {"managers": ["mia", "max"], "leads": ["lea", "leo"]}

limits = killick.Contract(
    "limits",
    [
        rules.deny("desk_pay", name="large", message="large sums are put to people",
                   ask=killick.Approval("managers", timeout="3d")),
        rules.deny("desk_apply", name="two", message="servers change", ask=killick.Approval("leads", need=2)),
    ],
    people=PEOPLE,
)  # fmt: skip


@killick.tool(name="desk_pay", effect="idempotent")
def pay(to: str, amount: int, key: killick.Key = killick.KEY) -> str:
    """Pay somebody."""
    return f"paid {amount} to {to}"


@killick.tool(name="desk_apply", effect="idempotent")
def apply(hosts: int) -> str:
    return f"{hosts} hosts"


def refund(effect: killick.Effect) -> str:
    return f"cancelled {effect.result}"


@killick.tool(name="desk_book", effect="idempotent", compensate=refund)
def book(room: str) -> str:
    return f"booking of {room}"


@killick.tool(name="desk_charge", effect="at_most_once")
def charge(card: str, amount: int) -> str:
    raise TimeoutError("the bank did not answer")


@killick.tool(
    name="desk_flaky", effect="reads", retry=killick.Retry(attempts=5, first=3600, max=7200, on=(ConnectionError,))
)
def flaky() -> str:
    raise ConnectionError("503")


class Claim(BaseModel):
    name: str
    amount: int = Field(ge=1)


@killick.agent(name="desk_claim", contract=limits)
async def claim(run: killick.Run, claim: Claim) -> str:
    """Pay a claim."""
    await run.update(route="north", limit=500)
    try:
        return await run.call(pay.options(because="the storm is on record"), claim.name, claim.amount)
    except killick.Rejected as no:
        return f"not paid: {no.message}"


@killick.agent(name="desk_rollout", contract=limits)
async def rollout(run: killick.Run, hosts: int) -> str:
    return await run.call(apply, hosts)


@killick.agent(name="desk_asks")
async def asks(run: killick.Run, what: str) -> Any:
    answer = await run.ask(what, to="mia", options=["now", "later"])
    return [answer.kind, answer.value, answer.by]


class Offer(BaseModel):
    amount: float = Field(ge=0)
    reason: str


@killick.agent(name="desk_offers")
async def offers(run: killick.Run) -> Any:
    return (await run.ask("What do we offer?", returns=Offer)).value


@killick.agent(name="desk_checkout")
async def checkout(run: killick.Run, card: str) -> str:
    await run.call(book, "sea view")
    return await run.call(charge, card, 120)


@killick.agent(name="desk_polls")
async def polls(run: killick.Run) -> str:
    return await run.call(flaky)


@killick.agent(name="desk_waits")
async def waits(run: killick.Run) -> Any:
    await run.call(book, "attic")
    return await run.wait("paid")


@killick.agent(name="desk_fails")
async def fails(run: killick.Run) -> str:
    await run.call(book, "cellar")
    raise RuntimeError("no")


class Desk:
    """One store, and whoever sits at it."""

    def __init__(self, kd: Client, clock: ManualClock, **options: Any) -> None:
        self.kd = kd
        self.clock = clock
        self.person = ("mia", "operator")
        self.web = TestClient(
            asgi(kd, access=Identified(kd, lambda request: self.person), **options),
            headers={"Authorization": "Bearer mine"},
        )

    def be(self, name: str, scope: str = "operator") -> Desk:
        self.person = (name, scope)
        return self

    def at(self, agent: Any, value: Any = None, *, run: str = "r", **options: Any) -> str:
        """A run, as far as it goes."""
        self.kd.start(agent, value, id=run, **options)
        self.kd.advance(run)
        return run

    def get(self, path: str, status: int = 200) -> Any:
        answer = self.web.get(f"/api/v1{path}")
        assert answer.status_code == status, answer.text
        return answer.json()

    def page(self, path: str, status: int = 200) -> str:
        answer = self.web.get(path)
        assert answer.status_code == status, answer.text
        return answer.text

    def post(self, path: str, status: int = 200, *, key: str | None = None, **body: Any) -> Any:
        headers = {} if key is None else {"Idempotency-Key": key}
        answer = self.web.post(f"/api/v1{path}", json=body, headers=headers)
        assert answer.status_code == status, answer.text
        return answer.json()

    def does(self, path: str, **body: Any) -> tuple[str, str]:
        """What a command says that it will do, which changes nothing; and what it then did."""
        run = path.split("/")[2]
        before = self.kd.runtime.log.head(run).seq
        will = self.post(path, dry_run=True, **body)
        assert self.kd.runtime.log.head(run).seq == before
        assert will["did"] is None
        done = self.post(path, **body)
        assert done["will"] is None
        return " ".join([will["will"], *will["more"]]), done["did"]


@contextmanager
def desk(folder: Path, **options: Any) -> Iterator[Desk]:
    clock = ManualClock(1_794_819_600_000_000)
    with killick.open(str(folder / "killick.db"), clock=clock) as kd:
        made = Desk(kd, clock, **options)
        with made.web:
            yield made


async def begun(
    app: Guard, method: str, path: str, headers: dict[str, str], body: bytes = b"{}"
) -> tuple[int, dict[str, str], bytes]:
    """How a response begins. A stream is left as soon as it has: it has no end."""
    sent: list[Any] = []
    began = asyncio.Event()
    bodies = [{"type": "http.request", "body": body if method != "GET" else b"", "more_body": False}]
    path, _, query = path.partition("?")

    async def receive() -> Any:
        if not bodies:
            await asyncio.Event().wait()
        return bodies.pop()

    async def send(message: Any) -> None:
        sent.append(message)
        if message["type"] == "http.response.body":
            began.set()

    given = {"host": "localhost", "content-type": "application/json", "accept": "*/*", **headers}
    scope = {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": query.encode(),
        "headers": [(name.encode(), value.encode()) for name, value in given.items()], "client": ("127.0.0.1", 9),
        "server": ("localhost", 80), "scheme": "http", "root_path": "", "http_version": "1.1",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
    }  # fmt: skip
    running = asyncio.ensure_future(app(scope, receive, send))
    waiting = asyncio.ensure_future(began.wait())
    await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED, timeout=300)
    for each in (running, waiting):
        each.cancel()
    await asyncio.gather(running, waiting, return_exceptions=True)
    told = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], told, b"".join(each.get("body", b"") for each in sent[1:])


def ask(app: Guard, method: str, path: str, token: str | None, **names: str) -> tuple[int, dict[str, str], bytes]:
    """The answer to a request by a token. What the path leaves open is filled in."""
    filled = re.sub(r"\{([^}]+)\}", lambda found: names.get(found[1], "x1"), path)
    headers = {"authorization": f"Bearer {token}"} if token else {}
    return asyncio.run(begun(app, method, filled, headers))
