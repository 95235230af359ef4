"""The window of a run on the dashboard: what its models were sent, from its record; and each call as it went out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any
from urllib.parse import quote

import pytest
from starlette.testclient import TestClient

import killick
from killick.history.window_report import windows
from killick.testing import call, scripted
from killick.web.app import asgi
from killick.web.handlers.window import LISTED_MAX, POINTS_MAX
from sessions import coder, without_models

XSS = "<img src=x onerror=alert(1)>\"'</script><script>alert(2)</script>{{7*7}}"
MAIL = "ada@example.org"


@killick.tool(effect="reads", name="window_look_up")
async def look_up(email: str, words: str) -> str:
    """Look somebody up."""
    return f"{words} {email} " + "is known and has an account with us since long " * 60


@killick.agent(name="window_desk")
async def desk(run: killick.Run, email: str) -> str:
    asks = [call("window_look_up", email=email, words=f"{XSS} {at}") for at in range(12)]
    model = scripted(*asks, call("recall", handle="m2"), "Done.", provider="openai")
    asked = f"Who is {email}? {XSS}"
    done = await killick.loop(run, model, [look_up], messages=asked, provider="openai", model="gpt-5.4", budget=2_500)
    return done.text


@pytest.fixture
def kd() -> Iterator[killick.Client]:
    with killick.open("memory:") as made:
        yield made


def web(kd: killick.Client, **options: Any) -> TestClient:
    return TestClient(asgi(kd, identify=lambda request: ("mia", "viewer"), **options), base_url="http://127.0.0.1")


def api(kd: killick.Client, path: str, **options: Any) -> Any:
    answer = web(kd, **options).get(f"/api/v1{path}")
    assert answer.status_code == 200, answer.text
    return answer.json()


class _Page(HTMLParser):
    """The attributes and links of a page, as a browser reads it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names |= {name for name, _ in attrs}
        self.links += [value for name, value in attrs if name == "href" and value]


def page(kd: killick.Client, path: str) -> str:
    answer = web(kd).get(path)
    assert answer.status_code == 200, answer.text
    return answer.text


def test_it_is_what_the_command_line_tells(kd: killick.Client) -> None:
    kd.run(coder, {"provider": "anthropic", "calls": 60, "budget": 4_000}, id="r")
    doc, found = api(kd, "/runs/r/window"), windows(kd.runtime.log, "r")
    assert found is not None
    for name in ("sent", "without", "counted", "cached", "budget", "messages", "left", "wanted"):
        assert doc["report"][name] == getattr(found, name), name
    assert (doc["calls"], doc["batches"], doc["faulted"]) == (60, len(found.evictions), len(found.faults))
    assert doc["report"]["at"]["step"] == found.at.step
    assert sum(point["evicted"] for point in doc["points"]) == doc["evicted"]
    assert [each["seq"] for each in doc["report"]["evictions"]] == [each.seq for each in reversed(found.evictions)]
    assert {each["kind"]: each["tokens"] for each in doc["report"]["fills"]} == {
        each.kind: each.tokens for each in found.fills
    }


def test_every_eviction_fault_and_call_leads_to_its_step(kd: killick.Client) -> None:
    kd.run(coder, {"provider": "openai", "calls": 40, "budget": 3_000}, id="r")
    doc = api(kd, "/runs/r/window")
    links = set(_Page(page(kd, "/runs/r/window")).links)
    assert doc["report"]["evictions"]
    for each in doc["report"]["evictions"] + doc["report"]["faults"] + doc["points"]:
        assert f"/runs/r?step={each['step']}#step-{each['step']}" in links


def test_the_drawing_has_a_bar_a_call_and_nothing_but_geometry(kd: killick.Client) -> None:
    kd.run(coder, {"provider": "openai", "calls": 40, "budget": 3_000}, id="r")
    text = page(kd, "/runs/r/window")
    drawn = text.partition('<svg class="calls"')[2].partition("</svg>")[0]
    assert len(re.findall(r'<rect class="sent"', drawn)) == 40
    assert '<rect class="evicted"' in drawn
    assert '<line class="budget"' in drawn
    assert not _Page(text).names & {"style", "onload", "onclick", "onerror"}


def test_it_is_a_tab_of_the_run(kd: killick.Client) -> None:
    kd.run(coder, {"provider": "openai", "calls": 3}, id="r")
    text = page(kd, "/runs/r?tab=window")
    assert 'data-load="/runs/r/window"' in text
    assert re.search(r'data-tab="window" aria-current="true"', text)
    assert "data-fragment" in page(kd, "/runs/r/window")


def test_a_run_without_a_window_says_how_to_hold_one_and_one_without_models_that(kd: killick.Client) -> None:
    kd.run(coder, {"provider": "openai", "calls": 3}, id="r")
    assert "no window was used;" in page(kd, "/runs/r/window")
    kd.run(without_models, id="n")
    assert "No model was called" in page(kd, "/runs/n/window")
    assert api(kd, "/runs/n/window")["calls"] == 0


def test_what_is_not_there_is_not_found(kd: killick.Client) -> None:
    kd.run(coder, {"provider": "openai", "calls": 3}, id="r")
    client = web(kd)
    assert client.get("/api/v1/runs/none/window").json()["code"] == "run_unknown"


def test_what_agents_and_models_wrote_is_text_and_nothing_else(kd: killick.Client) -> None:
    run = f"r {XSS}"
    kd.run(desk, MAIL, id=run)
    at = quote(run, safe="")
    text = page(kd, f"/runs/{at}/window")
    assert "<img src=x" not in text
    assert "<script>alert" not in text
    assert not _Page(text).names & {"style", "onerror", "onload", "onclick"}


def test_hidden_fields_are_hidden_here_too(kd: killick.Client) -> None:
    kd.run(desk, MAIL, id="r")
    shown = api(kd, "/runs/r/window")
    assert shown["report"]["evictions"]
    assert shown["report"]["faults"]
    client = web(kd, redact=["email"])
    for at in ("/runs/r/window", "/api/v1/runs/r/window"):
        answer = client.get(at)
        assert answer.status_code == 200
        assert MAIL not in answer.text, at
        assert "ada@" not in answer.text, at
    assert "window_look_up" in client.get("/runs/r/window").text


@pytest.mark.slow
def test_the_drawing_of_a_long_run_has_a_bounded_number_of_points(kd: killick.Client) -> None:
    model = scripted("Yes.", forever=True, provider="openai")

    @killick.agent(name="window_long")
    async def long(run: killick.Run, calls: int) -> None:
        said: list[Any] = []
        for number in range(calls):
            said += [{"role": "user", "content": f"{number} " + "a word " * 20}]
            await run.model(model, messages=said)
            said += [{"role": "assistant", "content": "Yes."}]

    kd.run(long, POINTS_MAX + 40, id="r")
    doc = api(kd, "/runs/r/window")
    assert doc["calls"] == POINTS_MAX + 40
    assert len(doc["points"]) <= POINTS_MAX
    assert (doc["points"][0]["first"], doc["points"][-1]["last"]) == (1, POINTS_MAX + 40)


@pytest.mark.slow
def test_lists_are_bounded_however_much_left(kd: killick.Client) -> None:
    model = scripted("Yes.", forever=True, provider="openai")

    @killick.agent(name="window_busy")
    async def busy(run: killick.Run) -> None:
        window, said = killick.Window(1_500), list[Any]()
        for number in range(LISTED_MAX + 30):
            said += [{"role": "user", "content": f"{number} " + f"word {number} " * 120}]
            sent = await run.fit(window, said, (), system=None)
            await run.model(model, messages=sent.messages, tools=sent.tools)
            said += [{"role": "assistant", "content": "Yes."}]

    kd.run(busy, id="r")
    doc = api(kd, "/runs/r/window")
    assert len(doc["report"]["evictions"]) <= LISTED_MAX
    assert doc["batches"] >= len(doc["report"]["evictions"])
    assert doc["evicted"] > 0
