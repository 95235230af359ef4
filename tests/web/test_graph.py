"""The drawing of a run: lanes as data and as a picture, with links and where it is; of a long one what is shown."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree

import pytest
from starlette.testclient import TestClient

import killick
from families import Family, claim
from killick.log import Entry, Log
from killick.model import events as e
from killick.presenting.graph.graph import Lane, run_graph
from killick.presenting.graph.svg import svg
from killick.presenting.graph.truncation import HEAD, LONG, TAIL
from killick.store import MemoryStore
from killick.web.app import asgi
from killick.web.auth.access import Identified

SVG = "{http://www.w3.org/2000/svg}"


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


@pytest.fixture
def told() -> Family:
    return claim()


@pytest.fixture
def web(told: Family) -> Iterator[TestClient]:
    with (
        killick.Client(told.log.store) as kd,
        TestClient(asgi(kd, access=Identified(kd, lambda request: "ann"))) as made,
    ):
        yield made


def picture(web: TestClient, run: str, **asked: Any) -> ElementTree.Element:
    answer = web.get(f"/api/v1/runs/{run}/graph.svg", params=asked)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "image/svg+xml"
    return ElementTree.fromstring(answer.text)


def test_the_graph_is_that_of_the_record(told: Family, web: TestClient) -> None:
    found = web.get("/api/v1/runs/r/graph").json()
    assert found == run_graph(told.log, "r").document()
    assert {lane["sort"] for lane in found["lanes"]} == {"run", "fork", "child", "left"}


def test_a_picture_for_a_page_has_links_and_no_style_of_its_own(web: TestClient) -> None:
    root = picture(web, "r")
    assert not list(root.iter(f"{SVG}style"))
    assert not [each for each in root.iter() if each.get("style")]
    links = {(each.get("data-run"), each.get("data-step")): each.get("href") for each in root.iter(f"{SVG}a")}
    assert links["r", "3"] == "/runs/r?step=3#step-3"
    assert links["r/2", None] == "/runs/r%2F2"
    assert links["r-fork", None] == "/runs/r-fork"


def test_where_the_run_is_is_marked_once(told: Family, web: TestClient) -> None:
    [here] = [each for each in picture(web, "r-fork").iter(f"{SVG}circle") if "here" in each.get("class", "")]
    assert here.get("class") == "here waiting"
    lane, place = run_graph(told.log, "r-fork").here or (0, 0)
    assert run_graph(told.log, "r-fork").lanes[lane].nodes[place].number == "5"


def test_a_picture_by_itself_is_saved_under_the_name_of_its_run(web: TestClient) -> None:
    assert web.get("/api/v1/runs/r%2F2/graph.svg").headers["content-disposition"].endswith("''r%2F2.svg")


def test_redacted_fields_are_nowhere_in_a_picture() -> None:
    told = Family()
    told.start()
    told.step("r", "1", "fetch", {"email": "ann@example.org"}, arguments={"email": "ann@example.org"})
    told.fork(
        "f", "r", 4, Entry(e.ContextChanged(at=told.now(), version=1, by="ann"), {"set": {"email": "bob@example.org"}})
    )
    with (
        killick.Client(told.log.store) as kd,
        TestClient(asgi(kd, access=Identified(kd, lambda request: "ann"), redact=("email",))) as web,
    ):
        for address in ("r/graph.svg", "r/graph", "f/graph.svg"):
            answer = web.get(f"/api/v1/runs/{address}")
            assert answer.status_code == 200
            assert "@example.org" not in answer.text


# long runs ----------------------------------------------------------------------------------------


def long(count: int = 6_000) -> tuple[Family, Counting]:
    store = Counting()
    made = Family(Log(store))
    made.start()
    for first in range(1, count, 100):
        made.steps("r", first, first + 99)
    return made, store


def shown(log: Log, run: str = "r") -> dict[str, list[str]]:
    """By lane, the numbers of its steps; what is folded as how many."""
    return {
        f"{lane.run} {lane.sort}": [f"({node.folded})" if node.folded else node.number for node in lane.nodes]
        for lane in run_graph(log, run).lanes
    }


def test_what_is_folded_is_a_link_to_its_first_step() -> None:
    told, _ = long(1_000)

    def link_to(lane: Lane, step: str | None) -> str:
        return f"{lane.run}/{step}"

    drawn = svg(run_graph(told.log, "r"), link_to)
    assert re.search(
        rf'<a href="r/{HEAD + 1}" [^>]*><text [^>]*><tspan class="quiet">… {1_000 - HEAD - TAIL} steps', drawn
    )
    short = Family()
    short.start()
    short.steps("r", 1, 40)
    assert re.search(
        r'<a href="r/3" [^>]*><text [^>]*><tspan class="quiet">… \d+ steps',
        svg(run_graph(short.log, "r"), link_to),
    )


@pytest.mark.slow
def test_of_a_long_run_the_ends_are_drawn_and_the_rest_is_counted_and_not_read() -> None:
    told, store = long()
    store.rows = 0
    [numbers] = shown(told.log).values()
    assert numbers == [
        *map(str, range(1, HEAD + 1)),
        f"({6_000 - HEAD - TAIL})",
        *map(str, range(6_000 - TAIL + 1, 6_001)),
    ]
    assert store.rows < 4_000
    assert f"{6_000 - HEAD - TAIL} steps" in svg(run_graph(told.log, "r"), lambda lane, step: "").replace(",", "")


def test_a_long_run_keeps_where_lanes_leave_it_and_what_failed() -> None:
    told, store = long(2_000)
    cut = told.log.state("r").fold.step("700")
    assert cut is not None
    told.fork("f", "r", cut.ended)
    told.step("f", "701", "otherwise")
    told.begin("r", "2001", "pay", effect="reads")
    failed = e.AttemptEnded(at=told.now(), step="2001", attempt=1, outcome="refused")
    told.append("r", Entry(failed, {"failure": {"type": "E", "message": "no"}}))
    told.steps("r", 2_002, 2_200)
    store.rows = 0
    found = shown(told.log)
    assert {"699", "700", "701", "2001"} <= set(found["r run"])
    assert found["f fork"] == ["701"]
    graph = run_graph(told.log, "f")
    fork = next(lane for lane in graph.lanes if lane.run == "f")
    assert fork.parent == 0
    assert graph.lanes[0].nodes[fork.after].number == "700"
    assert store.rows < 12_000


def test_what_the_latest_rewind_of_a_long_run_left_is_a_lane_of_its_own() -> None:
    told, _ = long(1_000)
    cut = told.log.state("r").fold.step("900")
    assert cut is not None
    told.rewind("r", cut.ended, by="ann")
    told.steps("r", 901, 903)
    found = shown(told.log)
    assert found["r left"][0] == "901"
    assert found["r left"][-1] == "1000"
    assert found["r run"][-3:] == ["901", "902", "903"]


def test_a_run_that_is_not_long_is_drawn_as_it_is() -> None:
    told = Family()
    told.start()
    told.steps("r", 1, LONG)
    [numbers] = shown(told.log).values()
    assert numbers == [str(number) for number in range(1, LONG + 1)]
