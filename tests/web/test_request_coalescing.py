"""Reads that come at once: equal ones share an answer, and no answer is older than its request."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.responses import Response

import killick
from killick.web.app import ROUTES
from killick.web.app_context import AppContext
from killick.web.auth.access import access_for
from killick.web.request_coalescing import RequestCoalescer
from killick.web.routes import Call, Nothing, Person, Route
from killick.web.status_reader import StatusReader


@killick.tool(effect="reads")
def glance() -> int:
    """A step."""
    return 1


@killick.agent(name="glancing")
def glancing(run: killick.SyncRun) -> int:
    return run.call(glance)


class Asked:
    """Asks for documents, which are numbered as they are made, and made when the test says so."""

    def __init__(self) -> None:
        self.reads = RequestCoalescer()
        self.made = 0
        self.go = asyncio.Event()

    async def make(self, call: Any) -> Response:
        self.made += 1
        number = self.made
        await self.go.wait()
        if call.request.scope["raw_path"] == b"/broken":
            raise ZeroDivisionError
        return Response(f"{number}")

    def ask(
        self, path: str = "/a", by: str = "ada", scope: Any = "viewer", personal: bool = True
    ) -> asyncio.Task[Response]:
        sent = {"method": "GET", "raw_path": path.encode(), "query_string": b""}
        request: Any = SimpleNamespace(scope=sent)
        call: Any = Call(cast("Any", None), request, Person(by, scope), cast("Any", None), Nothing(), None)
        return asyncio.create_task(self.reads.given(call, self.make, personal=personal))


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_one_after_the_other_gets_an_answer_of_their_own() -> None:
    async def story() -> None:
        asked = Asked()
        asked.go.set()
        assert [(await asked.ask()).body for _ in range(3)] == [b"1", b"2", b"3"]

    asyncio.run(story())


def test_a_crowd_that_asks_for_the_same_costs_as_much_as_one() -> None:
    async def story() -> None:
        asked = Asked()
        crowd = [asked.ask() for _ in range(50)]
        await settled()
        asked.go.set()
        assert {(await one).body for one in crowd} == {b"1"}

    asyncio.run(story())


def test_requests_that_come_too_late_for_one_in_the_making_share_the_next() -> None:
    async def story() -> None:
        asked = Asked()
        first = asked.ask()
        await settled()
        late = [asked.ask() for _ in range(20)]
        await settled()
        assert asked.made == 1, "one is made at a time"
        asked.go.set()
        assert {(await one).body for one in late} == {b"2"}, "an answer that was begun before is older than they are"
        assert (await first).body == b"1"

    asyncio.run(story())


def test_another_person_and_another_address_get_answers_of_their_own() -> None:
    async def story() -> None:
        asked = Asked()
        tasks = [asked.ask(), asked.ask(by="bo"), asked.ask("/b")]
        await settled()
        asked.go.set()
        assert len({(await one).body for one in tasks}) == 3

    asyncio.run(story())


def test_an_answer_that_names_no_caller_is_shared_by_all_of_one_scope() -> None:
    async def story() -> None:
        asked = Asked()
        tasks = [asked.ask(by=by, scope=scope, personal=False) for by, scope in
                 (("ada", "viewer"), ("bo", "viewer"), ("cy", "admin"))]  # fmt: skip
        await settled()
        asked.go.set()
        ada, bo, cy = [(await one).body for one in tasks]
        assert ada == bo != cy

    asyncio.run(story())


def test_one_that_failed_is_made_again_for_the_next_request() -> None:
    async def story() -> None:
        asked = Asked()
        asked.go.set()
        for number in (1, 2):
            with pytest.raises(ZeroDivisionError):
                await asked.ask("/broken")
            assert asked.made == number

    asyncio.run(story())


def test_one_client_that_hangs_up_takes_nothing_from_the_others() -> None:
    async def story() -> None:
        asked = Asked()
        first, second = asked.ask(), asked.ask()
        await settled()
        first.cancel()
        asked.go.set()
        assert (await second).status_code == 200

    asyncio.run(story())


def test_a_loop_that_was_closed_leaves_no_request_waiting() -> None:
    asked = Asked()

    async def closed() -> None:
        for _ in range(2):
            asked.ask()
            await settled()

    async def story() -> None:
        asked.go.set()
        assert (await asked.ask()).status_code == 200

    asyncio.run(closed())
    asyncio.run(story())


@pytest.mark.parametrize("route", [route for route in ROUTES if not route.personal], ids=lambda route: route.path)
def test_a_handler_whose_answer_is_shared_does_not_learn_who_asks(route: Route, tmp_path: Path) -> None:
    class Nameless(Person, frozen=True):
        def __getattribute__(self, name: str) -> Any:
            assert name != "name", "the answer may depend on the caller: make the route personal"
            return super().__getattribute__(name)

    with killick.open(f"sqlite:///{tmp_path}/k.db") as kd:
        kd.run(glancing, id="r")
        given = {name: {"run": "r", "step": "1"}[name] for name in ("run", "step") if f"{{{name}}}" in route.path}
        call: Any = Call(
            AppContext(kd, access=access_for(kd)),
            cast("Any", None),
            Nameless("ada"),
            route.asks(**given),
            Nothing(),
            None,
        )
        route.handler(call)


def test_a_status_is_read_after_it_was_asked_for_and_once_for_all_who_ask_meanwhile() -> None:
    class Store:
        def __init__(self) -> None:
            self.reads: list[set[str]] = []
            self.go = threading.Event()

        def statuses(self, runs: tuple[str, ...]) -> dict[str, Any]:
            self.reads.append(set(runs))
            number = len(self.reads)
            assert self.go.wait(300)
            return dict.fromkeys(runs, number)

    async def story() -> None:
        store = Store()
        reader = StatusReader(cast("Any", store))
        first = [asyncio.create_task(reader.read("a")), asyncio.create_task(reader.read("b"))]
        while not store.reads:
            await asyncio.sleep(0.001)
        later = [asyncio.create_task(reader.read(run)) for run in "aac"]
        await settled()
        later[0].cancel()
        store.go.set()
        assert [(await one)[run] for one, run in zip(first, "ab", strict=True)] == [1, 1]
        assert [(await one)[run] for one, run in zip(later[1:], "ac", strict=True)] == [2, 2]
        assert store.reads == [{"a", "b"}, {"a", "c"}]

    asyncio.run(story())
