"""The page of runs: the same lines as its twin, filters that filter, pages in a row, and nothing unescaped."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import killick
from killick.client.client import Client
from killick.clock import ManualClock
from killick.log import Entry
from killick.model import events as e
from killick.web.app import asgi
from killick.web.auth.access import Identified
from leasing import leased_by

NASTY = "<img src=x onerror=alert(1)>"


@killick.agent(name="runs.ask")
async def asks(run: killick.Run, who: str) -> str:
    await run.plan(["look", "ask", NASTY])
    await run.at("ask")
    await run.ask(f"Pay {who}? {NASTY}", to="managers")
    return who


@killick.agent(name="runs.fail")
async def fails(run: killick.Run, text: str) -> str:
    raise LookupError(text)


@killick.agent(name="runs.echo")
async def echo(run: killick.Run, text: str) -> str:
    return text


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def kd(tmp_path: Path, clock: ManualClock) -> Iterator[Client]:
    with killick.open(str(tmp_path / "killick.db"), clock=clock) as made:
        yield made


@pytest.fixture
def filled(kd: Client, clock: ManualClock) -> Client:
    for number in range(3):
        with contextlib.suppress(killick.RunWaiting):
            kd.run(asks, f"ada{number}", id=f"Claim-{number}/x", tags=("eu",) if number else ())
        clock.advance(60)
    with contextlib.suppress(killick.RunFailed):
        kd.run(fails, NASTY, id="broken-1")
    kd.run(echo, "x", id="done-1")
    kd.start(echo, "x", id="later-1", priority=7)
    return kd


def served(kd: Client, name: str = "ann", scope: str = "operator", **more: Any) -> TestClient:
    return TestClient(asgi(kd, access=Identified(kd, lambda request: (name, scope)), **more))


@pytest.fixture
def web(kd: Client) -> Iterator[TestClient]:
    with served(kd) as made:
        yield made


def runs_of(web: TestClient, **asked: Any) -> list[str]:
    """What the twin lists, after seeing that the page lists the same in the same order."""
    answer, page = web.get("/api/v1/runs", params=asked), web.get("/runs", params=asked)
    assert (answer.status_code, page.status_code) == (200, 200), answer.text
    found = [line["id"] for line in answer.json()["runs"]]
    assert re.findall(r'data-pick="([^"]*)"', page.text) == found
    return found


def test_an_empty_store_tells_how_to_begin(web: TestClient) -> None:
    page = web.get("/")
    assert page.status_code == 200
    assert "No runs yet" in page.text
    assert "killick demo" in page.text
    assert web.get("/api/v1/runs").json()["runs"] == []


def test_a_line_says_where_a_run_is_and_what_it_waits_for(filled: Client, web: TestClient) -> None:
    lines = {line["id"]: line for line in web.get("/api/v1/runs").json()["runs"]}
    line = lines["Claim-1/x"]
    assert (line["stage"], line["stage_number"], line["stages"], line["tags"]) == ("ask", 2, 3, ["eu"])
    assert line["reasons"] == [{"kind": "person", "text": f"managers: Pay ada1? {NASTY}", "at": None}]
    assert lines["broken-1"]["reasons"][0]["kind"] == "failure"
    assert (lines["later-1"]["status"], lines["later-1"]["priority"]) == ("queued", 7)


def test_runs_come_newest_first_at_either_address(filled: Client, web: TestClient) -> None:
    order = ["later-1", "done-1", "broken-1", "Claim-2/x", "Claim-1/x", "Claim-0/x"]
    assert runs_of(web) == order
    assert re.findall(r'data-pick="([^"]*)"', web.get("/").text) == order


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({"status": ["waiting"]}, ["Claim-2/x", "Claim-1/x", "Claim-0/x"]),
        ({"status": ["failed", "queued"]}, ["later-1", "broken-1"]),
        ({"agent": "runs.echo"}, ["later-1", "done-1"]),
        ({"agent": "runs.echo", "status": ["completed"]}, ["done-1"]),
        ({"tag": "eu"}, ["Claim-2/x", "Claim-1/x"]),
        ({"q": "cLAIM-1"}, ["Claim-1/x"]),
        ({"q": "%"}, []),
        ({"since": "90s", "status": ["waiting"]}, ["Claim-2/x"]),
        ({"agent": "", "tag": "", "q": "", "since": "", "status": ["completed"]}, ["done-1"]),
        ({"status": ["abandoned"]}, []),
    ],
)
def test_filters_filter(filled: Client, web: TestClient, asked: dict[str, Any], found: list[str]) -> None:
    assert runs_of(web, **asked) == found


def test_pages_follow_each_other_to_the_end(filled: Client, web: TestClient) -> None:
    seen: list[str] = []
    cursor: dict[str, Any] = {}
    for _ in range(10):
        page = web.get("/api/v1/runs", params={"limit": 2, **cursor}).json()
        seen += [line["id"] for line in page["runs"]]
        if page["next"] is None:
            break
        cursor = {"cursor": page["next"]}
    assert seen == runs_of(web)
    older = re.search(r'href="([^"]*)" rel="next"', web.get("/runs?limit=2&status=waiting").text)
    assert older is not None
    assert "Claim-0/x" in web.get(older[1].replace("&amp;", "&")).text


def test_counts_are_of_all_that_match_but_for_their_status(filled: Client, web: TestClient) -> None:
    everything = web.get("/api/v1/runs").json()["counts"]
    assert {name: count for name, count in everything.items() if count} == {
        "waiting": 3, "failed": 1, "completed": 1, "queued": 1, "total": 6,
    }  # fmt: skip
    assert web.get("/api/v1/runs?status=failed").json()["counts"] == everything
    assert web.get("/api/v1/runs?tag=eu").json()["counts"]["total"] == 2
    assert web.get("/api/v1/runs").json()["agents"] == ["runs.ask", "runs.echo", "runs.fail"]


def test_runs_whose_worker_is_gone_are_abandoned_and_not_running(
    kd: Client, clock: ManualClock, web: TestClient
) -> None:
    for run in ("held", "left"):
        kd.start(echo, "x", id=run)
        log = leased_by(f"w-{run}", kd.runtime.log, run, seconds=30)
        log.append(Entry(e.RunTaken(at=clock.now_us(), epoch=log.epoch, holder=f"w-{run}")))
    clock.advance(20)
    kd.runtime.store.renew("w-held", ["held"], seconds=300)
    clock.advance(20)
    assert runs_of(web, status=["abandoned"]) == ["left"]
    assert runs_of(web, status=["running", "abandoned"]) == ["left", "held"]
    counts = web.get("/api/v1/runs").json()["counts"]
    assert (counts["running"], counts["abandoned"], counts["total"]) == (1, 1, 2)
    [left] = [line for line in web.get("/api/v1/runs").json()["runs"] if line["id"] == "left"]
    assert (left["worker"], left["reasons"][0]["text"]) == ("w-left", "its process died")


def test_what_agents_and_people_wrote_is_escaped(filled: Client, web: TestClient) -> None:
    filled.run(echo, "x", id=NASTY, tags=(f'"{NASTY}',))
    for path in ("/runs", f"/runs?q={NASTY}", f"/runs?tag={NASTY}&agent={NASTY}"):
        text = web.get(path).text
        assert NASTY not in text
        assert "<img" not in text
    live = re.search(r"data-live-runs='([^']*)'", web.get("/runs").text)
    assert live is not None
    assert "<" not in live[1]


@pytest.mark.parametrize(
    "query",
    ["cursor=0", "cursor=x", "limit=0", "limit=201", "status=gone", "since=soon", "nothing=1", f"q={'x' * 201}"],
)
def test_what_makes_no_sense_is_refused_and_not_guessed(filled: Client, web: TestClient, query: str) -> None:
    answer = web.get(f"/api/v1/runs?{query}")
    assert (answer.status_code, answer.headers["content-type"]) == (400, "application/problem+json")
    assert web.get(f"/runs?{query}").status_code == 400


def test_only_who_may_act_is_offered_to(filled: Client) -> None:
    with served(filled, scope="viewer") as web:
        text = web.get("/runs").text
        assert "Claim-1/x" in text
        assert "data-pick" not in text
        assert "act-many" not in text


def test_a_line_hides_what_is_to_be_hidden_also_where_it_is_cut(kd: Client) -> None:
    secret = "4111-1111-1111-1111"

    @killick.agent(name="runs.card")
    async def card(run: killick.Run, given: dict[str, str]) -> str:
        await run.ask(f"{'x' * 385} {given['card_number']}")
        return ""

    with contextlib.suppress(killick.RunWaiting):
        kd.run(card, {"card_number": secret}, id="card")
    with served(kd, redact=("card_number",)) as web:
        [line] = [one for one in web.get("/api/v1/runs").json()["runs"] if one["id"] == "card"]
        assert "4111" not in line["reasons"][0]["text"]
        assert "4111" not in web.get("/runs?q=card").text


def test_a_page_says_which_runs_it_shows_so_that_only_those_are_watched(filled: Client, web: TestClient) -> None:
    text = web.get("/runs?status=failed").text
    assert "data-live-runs='[\"broken-1\"]'" in text
    assert "data-live-counts" in text
