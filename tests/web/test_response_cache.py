"""Answers that many ask for at once: shared while there is no time, and never otherwise."""

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
from killick.web.response_cache import BUSY, KEPT_SECONDS, ResponseCache
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
        self.clock = killick.clock.ManualClock()
        self.answers = ResponseCache(self.clock)
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
        call: Any = Call(cast("Any", None), request, Person(by, scope), Nothing(), Nothing(), None)
        return asyncio.create_task(self.answers.given(call, self.make, personal=personal))

    async def busy(self) -> list[asyncio.Task[Response]]:
        """So many others that answers are shared."""
        others = [self.ask(f"/other-{number}") for number in range(BUSY)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return others


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_while_there_is_time_everybody_gets_an_answer_of_their_own() -> None:
    async def story() -> None:
        asked = Asked()
        asked.go.set()
        assert [(await asked.ask()).body for _ in range(3)] == [b"1", b"2", b"3"]
        assert asked.answers.shared == 0

    asyncio.run(story())


def test_a_crowd_that_asks_for_the_same_costs_as_much_as_one() -> None:
    async def story() -> None:
        asked = Asked()
        others = await asked.busy()
        crowd = [asked.ask() for _ in range(50)]
        await settled()
        asked.go.set()
        assert len({(await one).body for one in crowd}) == 1
        await asyncio.gather(*others)
        assert asked.made == BUSY + 1

    asyncio.run(story())


def test_whoever_comes_too_late_for_one_in_the_making_shares_the_next() -> None:
    async def story() -> None:
        asked = Asked()
        others = await asked.busy()
        first = asked.ask()
        await settled()
        asked.clock.advance(KEPT_SECONDS * 2)
        late = [asked.ask() for _ in range(20)]
        await settled()
        assert asked.made == BUSY + 1
        asked.go.set()
        bodies = {(await one).body for one in late}
        assert len(bodies) == 1
        assert bodies != {(await first).body}
        await asyncio.gather(*others)
        assert asked.made == BUSY + 2

    asyncio.run(story())


def test_another_person_and_another_address_get_answers_of_their_own() -> None:
    async def story() -> None:
        asked = Asked()
        others = await asked.busy()
        tasks = [asked.ask(), asked.ask(by="bo"), asked.ask("/b")]
        await settled()
        asked.go.set()
        assert len({(await one).body for one in tasks}) == 3
        await asyncio.gather(*others)

    asyncio.run(story())


def test_an_answer_that_names_no_caller_is_shared_by_all_of_one_scope() -> None:
    async def story() -> None:
        asked = Asked()
        others = await asked.busy()
        tasks = [asked.ask(by=by, scope=scope, personal=False) for by, scope in
                 (("ada", "viewer"), ("bo", "viewer"), ("cy", "admin"))]  # fmt: skip
        await settled()
        asked.go.set()
        ada, bo, cy = [(await one).body for one in tasks]
        assert ada == bo != cy
        await asyncio.gather(*others)

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


def test_what_was_written_here_is_seen_by_whoever_asks_after_it() -> None:
    async def story() -> None:
        asked = Asked()
        others = await asked.busy()
        before = asked.ask()
        await settled()
        asked.answers.forget()
        after = asked.ask()
        await settled()
        asked.go.set()
        assert (await before).body != (await after).body
        await asyncio.gather(*others)

    asyncio.run(story())


def test_what_failed_is_kept_for_nobody() -> None:
    async def story() -> None:
        asked = Asked()
        others = await asked.busy()
        tasks = [asked.ask("/broken") for _ in range(3)]
        await settled()
        asked.go.set()
        for one in tasks:
            with pytest.raises(ZeroDivisionError):
                await one
        await asyncio.gather(*others)
        asked.go.clear()
        again = await asked.busy()
        fresh = asked.ask("/broken")
        await settled()
        assert asked.made == BUSY * 2 + 2
        asked.go.set()
        with pytest.raises(ZeroDivisionError):
            await fresh
        await asyncio.gather(*again)

    asyncio.run(story())


def test_one_who_hangs_up_takes_nothing_from_the_others() -> None:
    async def story() -> None:
        asked = Asked()
        others = await asked.busy()
        first, second = asked.ask(), asked.ask()
        await settled()
        first.cancel()
        asked.go.set()
        assert (await second).status_code == 200
        await asyncio.gather(*others)

    asyncio.run(story())


def test_a_shared_answer_is_made_anew_when_it_is_too_old() -> None:
    async def story() -> None:
        asked = Asked()
        asked.go.set()
        others = await asked.busy()
        first = await asked.ask()
        await asyncio.gather(*others)
        asked.go.clear()
        again = await asked.busy()
        asked.clock.advance(KEPT_SECONDS / 2)
        assert (await asked.ask()).body == first.body
        asked.clock.advance(KEPT_SECONDS)
        asked.go.set()
        assert (await asked.ask()).body != first.body
        await asyncio.gather(*again)

    asyncio.run(story())


def test_a_status_is_read_after_it_was_asked_for_and_once_for_all_who_ask_meanwhile() -> None:
    class Store:
        def __init__(self) -> None:
            self.reads: list[tuple[str, ...]] = []
            self.go = threading.Event()

        def statuses(self, runs: tuple[str, ...]) -> dict[str, Any]:
            self.reads.append(runs)
            number = len(self.reads)
            assert self.go.wait(300)
            return dict.fromkeys(runs, number)

    async def story() -> None:
        store = Store()
        reader = StatusReader(cast("Any", store), "a")
        first = [asyncio.create_task(reader.read()) for _ in range(2)]
        while not store.reads:
            await asyncio.sleep(0.001)
        later = [asyncio.create_task(reader.read()) for _ in range(3)]
        await settled()
        later[0].cancel()
        store.go.set()
        assert [await one for one in first] == [1, 1]
        assert [await one for one in later[1:]] == [2, 2]
        assert store.reads == [("a",), ("a",)]

    asyncio.run(story())
