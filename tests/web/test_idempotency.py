"""Writes that count once by their key: in one process, in several, and when one dies anywhere in between."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import msgspec
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

import killick
from killick.errors import RunUnknown, StoreUnavailable
from killick.store import MemoryStore, SqliteStore, Store
from killick.store.records import RunQuery
from killick.web.app_context import AppContext
from killick.web.endpoints import Endpoints
from killick.web.idempotency import AGENT, DAY, IdempotencyKeys, derived
from killick.web.routes import Call, Nothing, Person, Route


@killick.agent(name="once.counting")
async def counting(run: killick.Run, number: int) -> int:
    return number


class Number(msgspec.Struct, frozen=True):
    number: int = 0


class Started(msgspec.Struct, frozen=True):
    run: str


class NamedAccess:
    """Everybody is who they say they are."""

    login = None

    async def identify(self, request: Request) -> Person:
        return Person(request.headers.get("x-name", "ada"), "admin")

    def refuse_forged(self, request: Request) -> None: ...

    def csrf(self, request: Request) -> str:
        return ""

    def set_cookies(self, request: Request, response: Response) -> None: ...


class Dying:
    """A store as a process sees it that dies at its nth write: before that reaches the store, or right after."""

    def __init__(self, store: Store, *, at: int, after: bool) -> None:
        self._store = store
        self._left = at
        self._after = after

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if name not in ("append", "deliver"):
            return found

        def write(*args: Any) -> Any:
            self._left -= 1
            if self._left < 0 or (self._left == 0 and not self._after):
                raise StoreUnavailable("the store", "the process is dead")
            done = found(*args)
            if self._left == 0:
                raise StoreUnavailable("the store", "the process is dead")
            return done

        return write

    def close(self) -> None: ...


class App:
    """One process: an app whose writes start runs, and count how often they were carried out."""

    def __init__(self, store: Store, clock: killick.clock.ManualClock) -> None:
        self.client = killick.Client(store, clock=clock, behind=False)
        self.carried_out = 0
        self.fails_with: Exception | None = None
        self.gate: asyncio.Event | None = None
        context = AppContext(self.client, access=NamedAccess())
        routes = (
            Route("POST", "/start", self.start, scope="operator", takes=Number, gives=Started, natural=True),
            Route("POST", "/send", self.send, scope="operator", takes=Number, gives=Started, natural=True),
            Route("POST", "/count", self.count, scope="operator", takes=Number, gives=Started),
        )
        app = Starlette(routes=Endpoints(context, once=IdempotencyKeys(self.client)).table(routes))
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://killick")

    def start(self, call: Call[Nothing, Number]) -> Started:
        self.carried_out += 1
        handle = self.client.start(counting, call.body.number, id=derived(call, "run"))
        return Started(handle.id)

    def send(self, call: Call[Nothing, Number]) -> Started:
        self.carried_out += 1
        self.client.send("hears", "number", call.body.number, id=derived(call, "msg"), by=call.person.name)
        return Started("hears")

    async def count(self, call: Call[Nothing, Number]) -> Started:
        self.carried_out += 1
        if self.gate is not None:
            await self.gate.wait()
        if self.fails_with is not None:
            raise self.fails_with
        handle = await self.client.as_async().start(counting, call.body.number)
        return Started(handle.id)

    async def post(self, path: str, number: int, key: str | None, *, by: str = "ada") -> httpx.Response:
        headers = {"x-name": by} | ({} if key is None else {"Idempotency-Key": key})
        return await self.http.post(f"/api/v1{path}", json={"number": number}, headers=headers)


@pytest.fixture
def clock() -> killick.clock.ManualClock:
    return killick.clock.ManualClock(1_763_000_000_000_000)


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, clock: killick.clock.ManualClock, tmp_path: Path) -> Iterator[Store]:
    made = MemoryStore(clock=clock) if request.param == "memory" else SqliteStore(tmp_path / "killick.db", clock=clock)
    store = cast("Store", made)
    yield store
    store.close()


def started(store: Store) -> int:
    return len(store.runs(RunQuery(agent="once.counting")))


def test_the_same_key_again_gives_the_recorded_answer_and_does_nothing(store: Store, clock: Any) -> None:
    async def story() -> None:
        app = App(store, clock)
        first = await app.post("/count", 1, "k")
        again = await app.post("/count", 1, "k")
        assert (first.status_code, first.content) == (again.status_code, again.content) == (200, first.content)
        assert "idempotency-replayed" not in first.headers
        assert again.headers["idempotency-replayed"] == "true"
        assert again.headers["content-type"] == "application/json"
        assert app.carried_out == started(store) == 1

    asyncio.run(story())


def test_another_process_on_the_store_knows_the_key(store: Store, clock: Any) -> None:
    async def story() -> None:
        first, other = App(store, clock), App(store, clock)
        done = await first.post("/count", 1, "k")
        again = await other.post("/count", 1, "k")
        assert again.content == done.content
        assert other.carried_out == 0

    asyncio.run(story())


def test_a_key_is_for_one_request_of_one_person(store: Store, clock: Any) -> None:
    async def story() -> None:
        app = App(store, clock)
        await app.post("/count", 1, "k")
        for path, number in (("/count", 2), ("/start", 1)):
            other = await app.post(path, number, "k")
            assert (other.status_code, other.json()["code"]) == (422, "key_reused")
        theirs = await app.post("/count", 2, "k", by="bo")
        assert theirs.status_code == 200
        assert started(store) == 2

    asyncio.run(story())


def test_without_a_key_every_request_counts(store: Store, clock: Any) -> None:
    async def story() -> None:
        app = App(store, clock)
        await app.post("/count", 1, None)
        await app.post("/count", 1, None)
        assert started(store) == 2

    asyncio.run(story())


def test_requests_with_the_same_key_at_the_same_time_wait_for_the_first(store: Store, clock: Any) -> None:
    async def story() -> None:
        app = App(store, clock)
        app.gate = asyncio.Event()
        asked = [asyncio.create_task(app.post("/count", 1, "k")) for _ in range(5)]
        while not app.carried_out:
            await asyncio.sleep(0.001)
        app.gate.set()
        answers = await asyncio.gather(*asked)
        assert len({answer.content for answer in answers}) == 1
        assert {answer.status_code for answer in answers} == {200}
        assert app.carried_out == started(store) == 1

    asyncio.run(story())


def test_a_client_that_hangs_up_leaves_nothing_half_done(store: Store, clock: Any) -> None:
    async def story() -> None:
        app = App(store, clock)
        app.gate = asyncio.Event()
        asked = asyncio.create_task(app.post("/count", 1, "k"))
        while not app.carried_out:
            await asyncio.sleep(0.001)
        asked.cancel()
        await asyncio.wait([asked])
        app.gate.set()
        again = await app.post("/count", 1, "k")
        assert again.status_code == 200
        assert app.carried_out == started(store) == 1

    asyncio.run(story())


def test_a_refusal_is_an_answer_and_a_fault_is_none(store: Store, clock: Any) -> None:
    async def story() -> None:
        app = App(store, clock)
        app.fails_with = RunUnknown("r")
        assert (await app.post("/count", 1, "refused")).status_code == 404
        app.fails_with = None
        assert (await app.post("/count", 1, "refused")).status_code == 404
        app.fails_with = ZeroDivisionError()
        assert (await app.post("/count", 1, "broken")).status_code == 500
        app.fails_with = None
        doubt = await app.post("/count", 1, "broken")
        assert (doubt.status_code, doubt.json()["code"]) == (409, "in_doubt")
        assert started(store) == 0

    asyncio.run(story())


def test_a_request_that_does_not_fit_uses_up_no_key(store: Store, clock: Any) -> None:
    async def story() -> None:
        app = App(store, clock)
        misfit = await app.http.post("/api/v1/count", json={"number": "x"}, headers={"Idempotency-Key": "k"})
        assert misfit.status_code == 422
        assert (await app.post("/count", 1, "k")).status_code == 200

    asyncio.run(story())


@pytest.mark.parametrize("key", ["", "x" * 201, "two\tparts", "é"])
def test_what_is_no_key_is_refused(store: Store, clock: Any, key: str) -> None:
    async def story() -> None:
        app = App(store, clock)
        given = {"Idempotency-Key": key.encode("latin-1")}
        answer = await app.http.post("/api/v1/count", json={"number": 1}, headers=cast("Any", given))
        assert answer.status_code == 400
        assert started(store) == 0

    asyncio.run(story())


@pytest.mark.gate(6)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("at", [1, 2, 3, 4, 5])
def test_wherever_a_process_dies_a_client_that_asks_again_starts_one_run(
    store: Store, clock: Any, at: int, after: bool
) -> None:
    async def story() -> None:
        dying = App(cast("Store", Dying(store, at=at, after=after)), clock)
        lost = await dying.post("/start", 1, "k")
        living = App(store, clock)
        answers = [await living.post("/start", 1, "k") for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 200]
        assert len({answer.content for answer in answers}) == 1
        assert started(store) == 1
        if lost.status_code == 200:
            assert lost.content == answers[0].content

    asyncio.run(story())


@pytest.mark.gate(6)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("at", [1, 2, 3, 4, 5])
def test_wherever_a_process_dies_a_client_that_asks_again_sends_one_message(
    store: Store, clock: Any, at: int, after: bool
) -> None:
    async def story() -> None:
        living = App(store, clock)
        living.client.start(counting, 1, id="hears")
        dying = App(cast("Store", Dying(store, at=at, after=after)), clock)
        await dying.post("/send", 1, "k")
        answers = [await living.post("/send", 1, "k") for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 200]
        assert len(store.messages("hears")) == 1

    asyncio.run(story())


@pytest.mark.gate(6)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("at", [1, 2, 3, 4, 5])
def test_what_cannot_be_done_again_is_in_doubt_when_a_process_died(
    store: Store, clock: Any, at: int, after: bool
) -> None:
    async def story() -> None:
        dying = App(cast("Store", Dying(store, at=at, after=after)), clock)
        await dying.post("/count", 1, "k")
        before = started(store)
        living = App(store, clock)
        again = await living.post("/count", 1, "k")
        assert started(store) == 1 if again.status_code == 200 else (again.status_code, started(store)) == (409, before)

    asyncio.run(story())


def test_a_key_lives_for_a_day_at_the_least_and_two_at_the_most(store: Store, clock: killick.clock.ManualClock) -> None:
    async def story() -> None:
        app = App(store, clock)
        await app.post("/count", 1, "k")
        clock.advance(24 * 3600 - 1)
        await app.post("/count", 1, "k")
        assert started(store) == 1
        clock.advance(24 * 3600 + 1)
        await app.post("/count", 1, "k")
        assert started(store) == 2

    asyncio.run(story())


def test_the_logs_of_keys_verify_are_no_runs_and_never_due(store: Store, clock: killick.clock.ManualClock) -> None:
    async def story() -> None:
        app = App(store, clock)
        await app.post("/count", 1, "k")
        clock.advance(24 * 3600)
        await app.post("/count", 2, "m")
        logs = [row.run for row in store.runs(RunQuery(agent=AGENT))]
        assert len(logs) == 2
        assert all(log.startswith(DAY) for log in logs)
        assert not {row.run for row in store.due(clock.now_us() + 10**12)} & set(logs)
        assert all(not listed.id.startswith(DAY) for listed in app.client.list())
        assert not [problem for problem in app.client.store.verify().problems if not problem.healed]

    asyncio.run(story())


def test_an_id_is_derived_from_key_and_person() -> None:
    def call(name: str, key: str | None) -> Any:
        made = Call(cast("Any", None), cast("Any", None), Person(name), Nothing(), Nothing(), key)
        return derived(made, "run")

    assert call("ada", None) is None
    assert call("ada", "k") == call("ada", "k") != call("bo", "k")
    assert call("ada", "k") != call("ada", "l")
