"""Questions that come at once: equal ones share an answer, and no answer is older than its question."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any, cast

import pytest
from starlette.testclient import TestClient

import killick
from killick.web.app import ROUTES, asgi
from killick.web.app_context import AppContext
from killick.web.auth.access import Identified, access_for
from killick.web.coalescing import Coalescer, StatusReader
from killick.web.routes import Call, Nothing, Person, Route


@killick.tool(effect="reads")
def glance() -> int:
    """A step."""
    return 1


@killick.agent(name="glancing")
def glancing(run: killick.SyncRun) -> int:
    return run.call(glance)


class Asked:
    """Asks questions, whose answers are numbered as they are made, and made when the test says so."""

    def __init__(self) -> None:
        self.shares = Coalescer[int]()
        self.made = 0
        self.go = asyncio.Event()

    async def make(self) -> int:
        self.made += 1
        number = self.made
        await self.go.wait()
        return number

    async def fail(self) -> int:
        self.made += 1
        raise ZeroDivisionError

    def ask(self, what: str = "a") -> asyncio.Task[int]:
        return asyncio.create_task(self.shares.shared(what, self.fail if what == "broken" else self.make))


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_one_after_the_other_gets_an_answer_of_their_own() -> None:
    async def story() -> None:
        asked = Asked()
        asked.go.set()
        assert [await asked.ask() for _ in range(3)] == [1, 2, 3]

    asyncio.run(story())


def test_a_crowd_that_asks_for_the_same_costs_as_much_as_one() -> None:
    async def story() -> None:
        asked = Asked()
        crowd = [asked.ask() for _ in range(50)]
        other = asked.ask("b")
        await settled()
        asked.go.set()
        assert {await one for one in crowd} == {1}
        assert await other == 2

    asyncio.run(story())


def test_who_comes_too_late_for_one_in_the_making_shares_the_next() -> None:
    async def story() -> None:
        asked = Asked()
        first = asked.ask()
        await settled()
        late = [asked.ask() for _ in range(20)]
        await settled()
        assert asked.made == 1, "one is made at a time"
        asked.go.set()
        assert {await one for one in late} == {2}, "an answer that was begun before is older than they are"
        assert await first == 1

    asyncio.run(story())


def test_one_that_failed_is_made_again_for_the_next() -> None:
    async def story() -> None:
        asked = Asked()
        for number in (1, 2):
            with pytest.raises(ZeroDivisionError):
                await asked.ask("broken")
            assert asked.made == number

    asyncio.run(story())


def test_one_that_hangs_up_takes_nothing_from_the_others() -> None:
    async def story() -> None:
        asked = Asked()
        first, second = asked.ask(), asked.ask()
        await settled()
        first.cancel()
        asked.go.set()
        assert await second == 1

    asyncio.run(story())


def test_a_loop_that_was_closed_leaves_no_question_waiting() -> None:
    asked = Asked()

    async def closed() -> None:
        for _ in range(2):
            asked.ask()
            await settled()

    async def story() -> None:
        asked.go.set()
        assert await asked.ask() == 2

    asyncio.run(closed())
    asyncio.run(story())


# reads of the app ---------------------------------------------------------------------------------


def test_reads_are_shared_by_one_person_and_by_all_of_one_scope_where_the_answer_names_no_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared: list[Any] = []
    plainly = Coalescer.shared

    async def noted(self: Any, asked: Any, make: Any) -> Any:
        shared.append(asked)
        return await plainly(self, asked, make)

    monkeypatch.setattr(Coalescer, "shared", noted)
    scopes = {"ada": "viewer", "bo": "viewer", "cy": "admin"}

    def who(request: Any) -> tuple[str, str]:
        return request.headers["x-user"], scopes[request.headers["x-user"]]

    with killick.open(f"sqlite:///{tmp_path}/k.db") as kd:
        kd.run(glancing, id="r")
        with TestClient(asgi(kd, access=Identified(kd, who))) as web:
            for path in ("runs", "runs/r"):
                for user in scopes:
                    assert web.get(f"/api/v1/{path}", headers={"x-user": user}).status_code == 200
    mine, yours, theirs, ada, bo, cy = shared
    assert len({mine, yours, theirs}) == 3, "a list of runs says what each may answer"
    assert ada == bo != cy, "a run is the same for all of one scope"


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
