"""Finding on a page: the same answers as `kd.find`, page by page, and never for longer than anybody waits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import killick
from killick.client.client import Client
from killick.clock import ManualClock
from killick.web.app import asgi
from killick.web.auth.access import Identified
from killick.web.handlers import search


@killick.tool(effect="idempotent")
def pay(to: str, amount: int) -> str:
    if amount > 100:
        raise ValueError(f"{amount} is too much")
    return f"paid {amount}"


@killick.agent
async def payer(run: killick.Run, amount: int) -> str:
    await run.decided("How much?", amount, options=[1, 2, 300], because="it was asked for")
    answer = await run.ask("Really?", to="managers") if amount == 2 else None
    assert answer is None or answer.approved
    return await run.call(pay, f"ann{amount}", amount)


@pytest.fixture
def kd(tmp_path: Path) -> Iterator[Client]:
    with killick.open(str(tmp_path / "killick.db"), clock=ManualClock()) as made:
        for amount in (1, 2, 300):
            with contextlib.suppress(killick.RunWaiting, killick.RunFailed):
                made.run(payer, amount, id=f"run-{amount}")
        made.answer("run-2", "approve", by="max", comment="fine")
        made.run(payer, 2, id="run-2")
        yield made


@pytest.fixture
def web(kd: Client) -> Iterator[TestClient]:
    with TestClient(asgi(kd, access=Identified(kd, lambda request: "ann"))) as made:
        yield made


def found(web: TestClient, **asked: Any) -> list[Any]:
    page = web.get("/find", params=asked)
    assert page.status_code == 200, page.text
    answer = web.get("/api/v1/find", params=asked)
    assert answer.status_code == 200, answer.text
    listed: list[Any] = answer.json()["found"]
    assert all(hit["run"] in page.text for hit in listed)
    return listed


def test_every_question_finds_what_the_client_finds(kd: Client, web: TestClient) -> None:
    assert [hit["run"] for hit in found(web, what="calls", tool="pay")] == [hit.run for hit in kd.find.calls("pay")]
    assert [hit["choice"] for hit in found(web, what="decisions", choice="300")] == [300]
    assert {hit["of"] for hit in found(web, what="failures", kind="ValueError")} >= {"attempt"}
    assert {hit["run"] for hit in found(web, what="effects", standing="stands")} == {"run-1", "run-2"}
    [answer] = found(web, what="answers", by="max")
    assert (answer["verb"], answer["comment"], answer["kind"]) == ("approve", "fine", "answer")


def test_filters_narrow_what_is_found(web: TestClient) -> None:
    assert [hit["run"] for hit in found(web, what="calls", where="to=ann1")] == ["run-1"]
    assert [hit["run"] for hit in found(web, what="calls", run="run-2")] == ["run-2"]
    assert found(web, what="calls", agent="nobody") == []
    assert found(web, what="calls", tool="") != []


def test_pages_follow_each_other_without_a_gap_or_a_repeat(kd: Client, web: TestClient) -> None:
    """The clock stands still, so that everything happened in the same microsecond: the hardest case."""
    whole = [(hit.run, hit.seq) for hit in kd.find.decisions(limit=None)]
    assert len(whole) > 2
    seen: list[tuple[str, int]] = []
    cursor: str | None = None
    while True:
        asked = {"what": "decisions", "limit": 1, **({"cursor": cursor} if cursor else {})}
        answer = web.get("/api/v1/find", params=asked).json()
        seen += [(hit["run"], hit["seq"]) for hit in answer["found"]]
        cursor = answer["next"]
        if cursor is None:
            break
    assert seen == whole


def test_without_a_question_nothing_is_looked_for(kd: Client, web: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kd.runtime.store, "unindexed", None)
    assert web.get("/api/v1/find").json()["found"] == []
    assert "Ask across all runs" in web.get("/find").text


def test_what_cannot_be_asked_is_refused_in_one_line(web: TestClient) -> None:
    for asked in ({"what": "boats"}, {"what": "calls", "since": "yesterday"}, {"what": "calls", "where": "to"}):
        answer = web.get("/api/v1/find", params=asked)
        assert (answer.status_code, answer.headers["content-type"]) == (400, "application/problem+json")


def test_where_much_is_new_a_question_says_how_far_it_is_and_the_next_goes_on(
    kd: Client, web: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "MARKING_SECONDS", -1.0)
    monkeypatch.setattr("killick.history.search.index._MARKS", 1)
    first = web.get("/api/v1/find", params={"what": "calls"}).json()
    assert first["found"] == []
    assert first["marked"] > 0
    assert "Continue" in web.get("/find", params={"what": "calls"}).text
    asked = 0
    while web.get("/api/v1/find", params={"what": "calls"}).json()["marked"] is not None:
        asked += 1
        assert asked < 100
    assert len(found(web, what="calls")) == 3


def test_names_of_tools_arguments_errors_and_agents_are_suggested(web: TestClient) -> None:
    names = web.get("/api/v1/find/names").json()
    assert (names["tools"], names["arguments"], names["agents"]) == (["pay"], ["amount", "to"], ["payer"])
    assert "ValueError" in names["errors"]


def test_a_question_that_is_refused_keeps_its_form(web: TestClient) -> None:
    page = web.get("/find", params={"what": "calls", "tool": "pay", "since": "yesterday", "where": "to"})
    assert page.status_code == 400
    assert 'role="alert"' in page.text
    assert all(f'value="{text}"' in page.text for text in ("pay", "yesterday", "to"))
    unknown = web.get("/find", params={"what": "calls", "tool": "pay", "run": "nobody"})
    assert (unknown.status_code, 'value="nobody"' in unknown.text) == (404, True)


@killick.tool(effect="reads")
def weigh(sizes: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return {"sizes": sizes}


@killick.agent
async def weigher(run: killick.Run) -> None:
    await run.call(weigh, (4, 5))


def test_tuples_are_shown_as_lists_and_no_tag_is_shown(kd: Client, web: TestClient) -> None:
    kd.run(weigher, id="w")
    [hit] = web.get("/api/v1/find", params={"what": "calls", "tool": "weigh"}).json()["found"]
    assert hit["output"] == {"sizes": {"$tuple": [4, 5]}}
    text = web.get("/find", params={"what": "calls", "tool": "weigh"}).text
    assert "[4,5]" in unescape(text)
    assert "$tuple" not in text


def test_what_cannot_be_asked_is_refused_before_anything_is_indexed(
    web: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "MARKING_SECONDS", -1.0)
    monkeypatch.setattr("killick.history.search.index._MARKS", 1)
    assert web.get("/find", params={"what": "calls", "since": "yesterday"}).status_code == 400
