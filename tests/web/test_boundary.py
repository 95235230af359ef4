"""The slider: every boundary of a run by its number, with the state there and what had changed, at the cost of that."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient
from stories import Story, started

import killick
from killick.history.diff import between, passed
from killick.log import Log, boundaries
from killick.model import events as e
from killick.store import MemoryStore
from killick.web.app import asgi
from killick.web.auth.access import Identified

tries = 0


@killick.tool(effect="reads")
async def moment_look(n: int) -> dict[str, Any]:
    return {"n": n, "pair": (n, n), "email": f"ann{n}@example.org"}


@killick.tool(effect="at_most_once", retry=3, nothing_happened=(ConnectionRefusedError,))
async def moment_pay(amount: int) -> str:
    global tries
    tries += 1
    if tries % 2:
        raise ConnectionRefusedError("the bank is closed")
    return f"paid {amount}"


@killick.agent
async def moment_child(run: killick.Run, n: int) -> int:
    return (await run.call(moment_look, n))["n"] * 2


@killick.agent
async def moment_agent(run: killick.Run, n: int) -> str:
    await run.plan(["look", "pay"])
    await run.at("look")
    seen = await run.call(moment_look, n)
    await run.gather(*(run.call(moment_look, each) for each in (1, 2, 3)))
    child = await run.spawn(moment_child, n)
    await child.result()
    route = await run.decided("Who?", "manager", options=["auto", "manager"], because="it is so")
    await run.update(route=route, email=seen["email"])
    await run.at("pay")
    paid = await run.call(moment_pay, n)
    await run.ask("Was it right?", to="managers", timeout="3d")
    return paid


@pytest.fixture
def kd() -> Iterator[killick.Client]:
    global tries
    tries = 0
    with killick.Client(MemoryStore(), clock=killick.clock.LeapingClock()) as made:
        with pytest.raises(killick.RunWaiting):
            made.run(moment_agent, 4, id="r/1")
        yield made


@pytest.fixture
def web(kd: killick.Client) -> Iterator[TestClient]:
    with TestClient(asgi(kd, access=Identified(kd, lambda request: "ann"))) as made:
        yield made


RUN = "/runs/r%2F1"


def moment(web: TestClient, n: int) -> Any:
    answer = web.get(f"/api/v1{RUN}/moments", params={"n": n})
    assert answer.status_code == 200, answer.text
    return answer.json()


def told(found: Any) -> list[tuple[str, str]]:
    return [(change["part"], change["sign"]) for change in found["changes"]]


def of_story(seed: int, count: int) -> Log:
    log = Log(MemoryStore(), snapshot_every=16)
    first = started()
    assert isinstance(first.event, e.RunStarted)
    run = log.create(first.event, first.values or {})
    for batch in Story(seed).entries(count):
        run.append(*batch)
    return log


# by number ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_every_boundary_has_a_number_and_the_state_there_is_that_of_its_place(seed: int) -> None:
    log = of_story(seed, 160)
    fold = log.state("run_1").fold
    found = [boundaries.nth(fold, n) for n in range(boundaries.count(fold))]
    assert [each.n for each in found] == list(range(len(found)))
    sides = [(step.id, side) for step in fold.steps for side in ("before", "after") if side == "before" or step.ended]
    assert sorted((each.step.id, each.side) for each in found if each.step is not None) == sorted(sides)
    assert found[0].side == "start"
    assert (found[-1].side, found[-1].place.seq) == ("now", log.head("run_1").seq)
    assert [each.place.seq for each in found] == sorted(each.place.seq for each in found)
    for each in found[1:-1]:
        assert each.step is not None
        assert each.side in ("before", "after")
        assert boundaries.at(log, "run_1", each.place.label) == each.place
        assert boundaries.number(fold, each.step.id, each.side) == each.n


@pytest.mark.gate(2)
@pytest.mark.parametrize("seed", range(6))
def test_what_passed_between_two_boundaries_is_what_a_diff_of_the_whole_states_tells(seed: int) -> None:
    log = of_story(seed, 120)
    fold = log.state("run_1").fold
    places = [boundaries.nth(fold, n).place for n in range(boundaries.count(fold))]
    for one, two in itertools.pairwise(places):
        whole = between(log, "run_1", f"@{one.seq}", f"@{two.seq}")
        found, state = passed(log, "run_1", one, two)
        assert found.lines() == whole.lines(), (one, two)
        assert state.fold.save([]) == log.state("run_1", two.seq).fold.save([])


def test_boundaries_of_a_gather_follow_upon_each_other_in_time(kd: killick.Client, web: TestClient) -> None:
    count = moment(web, 0)["count"]
    seen = [moment(web, n) for n in range(count)]
    assert [each["seq"] for each in seen] == sorted(each["seq"] for each in seen)
    labels = [each["place"] for each in seen]
    assert (
        labels.index("2:before") < labels.index("2.1.1:before") < labels.index("2.3.1:after") < labels.index("2:after")
    )
    assert labels[0] == "start"
    assert labels[-2:] == ["7:before", "now"]


def test_a_moment_has_the_state_of_its_place(kd: killick.Client, web: TestClient) -> None:
    for n in range(moment(web, 0)["count"]):
        seen = moment(web, n)
        state = json.loads(web.get(f"/api/v1{RUN}/state", params={"at": f"@{seen['seq']}"}).content)
        assert state == json.loads(kd.state("r/1", at=seen["seq"]).to_json())
        assert (seen["status"], seen["context"]["document"]) == (state["status"], state["context"]["document"])
        assert seen["position"]["committed"] == len(state["position"]["committed"])
        for part in seen["knows"]:
            assert part["count"] == len(state[part["part"]])
            assert part["latest"] == state[part["part"]][::-1][: len(part["latest"])]


def test_a_step_says_what_it_changed(web: TestClient) -> None:
    decided = web.get(f"/api/v1{RUN}/moments", params={"place": "5:after"}).json()
    assert (decided["step"], decided["side"], decided["since"]) == ("5", "after", "5:before")
    assert told(decided)[0] == ("decisions", "+")
    assert decided["changes"][0]["after"]["choice"] == "manager"
    paid = web.get(f"/api/v1{RUN}/moments", params={"place": "6:after"}).json()
    assert {part for part, _ in told(paid)} == {"outputs", "retries", "failures", "effects", "position"}
    before = web.get(f"/api/v1{RUN}/moments", params={"place": "6:before"}).json()
    assert [(c["path"], c["after"]) for c in before["changes"] if c["part"] == "context"] == [
        ("version", 1),
        ("document", {"route": "manager", "email": "ann4@example.org"}),
    ]


def test_a_place_that_is_no_boundary_stands_by_the_nearest(kd: killick.Client, web: TestClient) -> None:
    seen = web.get(f"/api/v1{RUN}/moments", params={"place": "@9"}).json()
    assert (seen["place"], seen["seq"], seen["side"]) == ("@9", 9, "event")
    assert moment(web, seen["n"])["seq"] <= 9 < moment(web, seen["n"] + 1)["seq"]
    refused = web.get(f"/api/v1{RUN}/moments", params={"place": "99:after"})
    assert refused.status_code == 404
    assert "there is no step 99" in refused.json()["detail"]
    assert moment(web, 10**9)["place"] == "now"


# on the page --------------------------------------------------------------------------------------


def test_the_fragment_says_with_sign_and_colour_what_was_and_what_is(web: TestClient) -> None:
    page = web.get(f"{RUN}/moments", params={"place": "5:after"})
    assert page.status_code == 200
    assert 'data-at="5:after"' in page.text
    assert re.search(r'class="plus"><span class="sg">\+', page.text)
    assert "What step 5 changed" in page.text
    assert "because it is so" in page.text
    assert "<html" not in page.text


def test_nothing_that_an_agent_wrote_gets_out_of_its_text(kd: killick.Client, web: TestClient) -> None:
    hostile: dict[str, Any] = {"<img src=x onerror=alert(1)>": "</pre><script>alert(1)</script>"}
    kd.edit.set("r/1", by="ann", **hostile)
    page = web.get(f"{RUN}/moments").text
    assert "<img" not in page
    assert "<script" not in page
    assert "&lt;script&gt;" in page


def test_redacted_fields_are_nowhere_in_a_moment(kd: killick.Client) -> None:
    with TestClient(asgi(kd, access=Identified(kd, lambda request: "ann"), redact=("email",))) as web:
        assert "ann4@example.org" not in web.get(f"/api/v1{RUN}/state").text
        for n in range(moment(web, 0)["count"]):
            for address in (f"/api/v1{RUN}/moments?n={n}", f"{RUN}/moments?n={n}"):
                assert "@example.org" not in web.get(address).text


# long runs ----------------------------------------------------------------------------------------


class Counting(MemoryStore):
    """Counts the rows that are read."""

    rows = 0

    def read(self, run: str, **asked: Any) -> Any:
        found = super().read(run, **asked)
        self.rows += len(found)
        return found

    def row(self, run: str, seq: int) -> Any:
        self.rows += 1
        return super().row(run, seq)


@pytest.mark.slow
def test_a_moment_of_a_long_run_reads_no_more_than_lies_between_snapshots() -> None:
    from families import Family

    store = Counting()
    told = Family(Log(store))
    told.start()
    for first in range(1, 4_000, 100):
        told.steps("r", first, first + 99)
    with killick.Client(store) as kd, TestClient(asgi(kd, access=Identified(kd, lambda request: "ann"))) as web:
        assert web.get("/api/v1/runs/r/moments").json()["count"] == 8_002
        for n in (1, 4_001, 7_999):
            store.rows = 0
            seen = web.get(f"/api/v1/runs/r/moments?n={n}").json()
            assert seen["n"] == n
            assert store.rows < 3_000, n
