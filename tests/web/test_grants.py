"""Tokens bound to agents and tags: no route shows or touches a run that its token does not cover."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

import killick
from killick.client.client import Client
from killick.errors import AccessRefused, RunUnknown
from killick.store.grants import Grant, granted
from killick.store.records import RunQuery
from killick.web.app import ROUTES, asgi
from killick.web.middleware import Guard, Limits
from killick.web.routes import Route
from killick.workers.tokens import issue
from web.desk import asks, begun, checkout, fails, waits

TAG: Final = "tenant=acme"
GRANT: Final = Grant(("desk_asks", "desk_waits"), (TAG,))
HIDDEN: Final = "globex"
"""Part of every id, input and name of what the token does not cover."""

OPEN: Final = {
    "/answer": "the page asks for the signed link",
    "/answer/question": "the signed link is of one question",
    "/hooks/{name}": "the signature is the proof; it publishes an event",
    "/hooks/{name}/runs/{run}": "the signature is the proof",
    "/alive": "says nothing of any run",
}
"""Routes without a token, and what keeps their callers to what is theirs."""

BODIES: Final[dict[str, dict[str, Any]]] = {
    "/runs": {"agent": "desk_fails"},
    "/runs/act": {"command": "cancel", "runs": [f"{HIDDEN}_asks", f"{HIDDEN}_fails"]},
    "/runs/{run}/messages": {"name": "paid"},
    "/inbox/{wait}": {"verb": "respond", "value": "now"},
    "/runs/{run}/set": {"set": {"a": 1}},
    "/runs/{run}/prioritize": {"priority": 5},
    "/runs/{run}/note": {"note": "x"},
    "/runs/{run}/say": {"text": "x"},
    "/runs/{run}/override": {"step": "1", "output": 1},
    "/runs/{run}/skip": {"step": "1"},
    "/runs/{run}/rewind": {"to": "start"},
    "/runs/{run}/undo": {"step": "1"},
}
"""What is sent to a write that takes more than an empty object."""

COVERED: Final = [route for route in ROUTES if route.scope is not None and not route.whole]


def named(route: Route) -> str:
    return f"{route.method} {route.path}"


class Office:
    def __init__(self, kd: Client) -> None:
        self.kd = kd
        for agent, value, run, tags in (
            (asks, "acme wants to know", "acme_asks", [TAG]),
            (waits, None, "acme_waits", [TAG, "vip"]),
            (asks, f"{HIDDEN} wants to know", f"{HIDDEN}_asks", [HIDDEN]),
            (asks, f"{HIDDEN} has no tag", f"{HIDDEN}_bare", []),
            (fails, None, f"{HIDDEN}_fails", [TAG, HIDDEN]),
            (checkout, f"{HIDDEN}'s card", f"{HIDDEN}_checkout", [TAG]),
        ):
            kd.start(agent, value, id=run, tags=tags)
            kd.advance(run)
        self.token = issue(kd.runtime.engine, "mia", "operator", grant=GRANT)[1]
        self.app: Guard = asgi(kd, limits=Limits(rate=1e6, burst=1_000_000))

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
        headers = {"authorization": f"Bearer {self.token}"}
        given = json.dumps(body or {}).encode()
        status, _, found = asyncio.run(begun(self.app, method, path, headers, given))
        # Each page has a proof of its own.
        return status, re.sub(r'(csrf" (?:content|value)=)"[^"]+"', r"\1", found.decode())

    def hidden(self) -> dict[str, Any]:
        """Everything that a touch of the hidden runs would change, and their ids."""
        rows = self.kd.runtime.store.runs(RunQuery(contains=HIDDEN))
        return {row.run: (row, self.kd.runtime.store.messages(row.run)) for row in rows}


@pytest.fixture(params=[None, bytes(range(32))], ids=["plain", "encrypted"], scope="module")
def office(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Office]:
    place = tmp_path_factory.mktemp("office") / "killick.db"
    with killick.open(str(place), keys=request.param, clock=killick.clock.ManualClock(1_794_819_600_000_000)) as kd:
        yield Office(kd)


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Office]:
    """One that a test changes."""
    with killick.open(str(tmp_path / "killick.db")) as kd:
        yield Office(kd)


def filled(path: str, run: str) -> str:
    for name, value in {"run": run, "wait": f"{run}:1", "step": "1", "seq": "1", "name": "input"}.items():
        path = path.replace(f"{{{name}}}", value)
    return path


def test_a_route_takes_no_bound_token_or_shows_its_runs_alone_or_says_why_it_takes_none() -> None:
    assert {route.path for route in ROUTES if route.scope is None} == set(OPEN)
    assert all(not route.whole for route in ROUTES if "{run}" in route.path or "{wait}" in route.path)


@pytest.mark.parametrize("route", [route for route in ROUTES if route.whole], ids=named)
def test_what_is_of_the_whole_store_takes_a_token_for_it(office: Office, route: Route) -> None:
    for path in (f"/api/v1{route.path}", *route.also, *(route.pages if route.method == "GET" else ())):
        status, body = office.ask(route.method, filled(path, "x"))
        assert status == 403
        assert "whole store" in body
        assert HIDDEN not in body


@pytest.mark.parametrize("route", [route for route in COVERED if route.method == "GET"], ids=named)
def test_a_read_shows_what_its_token_covers_and_nothing_else(office: Office, route: Route) -> None:
    for path in (f"/api/v1{route.path}", *route.pages):
        for run in ("acme_asks", "acme_waits"):
            status, body = office.ask("GET", filled(path, run))
            assert status < 500, body
            assert status not in (401, 403), body
            assert HIDDEN not in body, path
        questions = [""]
        if {"a", "b"} <= set(route.asks.__struct_fields__):
            questions = [f"?a=acme_asks&b={HIDDEN}_asks", f"?a={HIDDEN}_bare&b={HIDDEN}_asks"]
        elif "run" in route.asks.__struct_fields__ and "{run}" not in route.path:
            questions = [f"?run={HIDDEN}_asks"]
        elif "against" in route.asks.__struct_fields__:
            questions = [f"?against={HIDDEN}_asks"]
        for question in questions:
            for known in (f"{HIDDEN}_asks", f"{HIDDEN}_bare", f"{HIDDEN}_fails", f"{HIDDEN}_checkout"):
                asked = filled(path, known) + question
                status, body = office.ask("GET", asked)
                assert (status, body.replace(HIDDEN, "nobody")) == office.ask("GET", asked.replace(HIDDEN, "nobody"))


@pytest.mark.parametrize("route", [route for route in COVERED if route.writes], ids=named)
def test_a_write_to_a_run_that_its_token_does_not_cover_is_one_to_no_run(office: Office, route: Route) -> None:
    before = office.hidden()
    body = BODIES.get(route.path, {})
    assert "{run}" in route.path or "{wait}" in route.path or body, "name what it could touch in BODIES"
    never = json.loads(json.dumps(body).replace(HIDDEN, "nobody"))
    for known in before:
        path = f"/api/v1{filled(route.path, known)}"
        status, said = office.ask(route.method, path, body)
        assert (status, said.replace(HIDDEN, "nobody")) == office.ask(
            route.method, path.replace(HIDDEN, "nobody"), never
        )
        assert status not in (400, 422), "the body has to reach the run"
    assert office.hidden() == before


def test_listings_counts_agents_questions_and_search_are_of_the_covered_runs(office: Office) -> None:
    def told(path: str) -> Any:
        status, body = office.ask("GET", f"/api/v1{path}")
        assert status == 200, body
        return json.loads(body)

    listed = told("/runs")
    assert {line["id"] for line in listed["runs"]} == {"acme_asks", "acme_waits"}
    assert listed["counts"]["total"] == 2
    assert set(listed["agents"]) == {"desk_asks", "desk_waits"}
    assert {line["id"] for line in told("/runs?tag=vip")["runs"]} == {"acme_waits"}
    assert told("/runs?tag=vip")["counts"]["total"] == 1
    assert told("/runs?agent=desk_fails")["counts"]["total"] == 0
    assert [line["id"] for line in told("/runs?limit=1")["runs"]] == ["acme_waits"]
    assert len(told(f"/runs?limit=1&cursor={told('/runs?limit=1')['next']}")["runs"]) == 1
    assert {item["run"] for item in told("/inbox")["questions"]} == {"acme_asks"}
    found = told("/find?what=calls")
    assert {hit["run"] for hit in found["found"]} == {"acme_waits"}
    assert {agent["name"] for agent in told("/agents")["agents"]} <= {"desk_asks", "desk_waits"}


def test_a_covered_run_is_started_answered_and_followed_and_its_like_without_the_tag_is_not(own: Office) -> None:
    start = {"agent": "desk_asks", "input": "again", "id": "acme_again"}
    for tags in ([], [HIDDEN]):
        assert own.ask("POST", "/api/v1/runs", {**start, "tags": tags})[0] == 403
    assert own.ask("POST", "/api/v1/runs", {"agent": "desk_fails", "tags": [TAG]})[0] == 403
    assert own.ask("POST", "/api/v1/runs", {**start, "tags": [TAG, "more"]})[0] == 201
    own.kd.advance("acme_again")
    status, body = own.ask("GET", "/api/v1/runs/acme_again/follow")
    assert status == 200
    assert body
    wait = "acme_again:1"
    assert own.ask("POST", f"/api/v1/inbox/{wait}", {"verb": "respond", "value": "now"})[0] == 200
    own.kd.advance("acme_again")
    assert own.kd.info("acme_again").status == "completed"
    assert own.ask("POST", "/api/v1/runs/acme_again/fork", {"id": "acme_fork"})[0] == 200
    assert own.ask("GET", "/api/v1/runs/acme_fork")[0] == 200


def test_an_admin_of_some_runs_is_refused(office: Office) -> None:
    with pytest.raises(AccessRefused, match="another scope"):
        issue(office.kd.runtime.engine, "max", "admin", grant=GRANT)


def test_a_store_of_a_grant_has_no_other_run_however_it_is_read_or_written(office: Office) -> None:
    whole = office.kd.runtime.store
    store, run = granted(whole, GRANT), f"{HIDDEN}_asks"
    assert store.head(run) is None
    assert store.read(run) == []
    assert store.inbox(run) == []
    assert store.index(run) is None
    assert not store.statuses([run, "acme_asks"]).keys() - {"acme_asks"}
    assert {row.run for row in store.asking(0, limit=100)} <= {"acme_asks", "acme_waits"}
    assert store.counts(RunQuery(contains=HIDDEN)) == {}
    with pytest.raises(RunUnknown):
        store.lease(run, "me", seconds=1)
    for name in ("heads", "remove", "transaction", "outbox", "claim", "inspect"):
        with pytest.raises(AccessRefused):
            getattr(store, name)
    assert not hasattr(store, "raw"), "nothing below it is reached through it"


def test_counts_are_exact_for_every_question_by_tag_and_agent(office: Office) -> None:
    whole = office.kd.runtime.store
    for grant in (Grant(("desk_asks",)), Grant((), (TAG,)), Grant((), (TAG, "vip")), GRANT, Grant(("desk_asks", "x"))):
        store = granted(whole, grant)
        rows = [row for row in whole.runs(RunQuery(), limit=1_000) if grant.covers(row.agent, row.tags)]
        for query in (RunQuery(), RunQuery(tag=TAG), RunQuery(tag=HIDDEN), RunQuery(agent="desk_asks", tag="vip")):
            found = [row.run for row in rows if query.agent in (None, row.agent) and query.tag in (None, *row.tags)]
            assert [row.run for row in store.runs(query, limit=1_000)] == found
            assert [row.run for row in store.runs(query, limit=1)] == found[:1]
            assert sum(store.counts(query).values()) == len(found)


@killick.agent(name="grants_parent")
async def parent(run: killick.Run) -> Any:
    child = await run.spawn(asks, f"{HIDDEN} is asked")
    return await child


def test_a_tree_with_a_child_that_is_not_covered_is_shown_without_its_values(tmp_path: Path) -> None:
    with killick.open(str(tmp_path / "killick.db")) as kd:
        kd.start(parent, id="p", tags=[TAG])
        kd.advance("p")
        [child] = kd.list(agent="desk_asks")
        office = Office.__new__(Office)
        office.kd, office.app = kd, asgi(kd)
        office.token = issue(kd.runtime.engine, "mia", "viewer", grant=Grant(("grants_parent",)))[1]
        for page in ("", "/graph", "/graph.svg", "/steps", "/trace", "/events", "/act"):
            status, body = office.ask("GET", f"/api/v1/runs/p{page}")
            assert status == 200, body
        assert office.ask("GET", f"/api/v1/runs/{child.id}")[0] == 404
        assert office.ask("GET", "/api/v1/inbox")[1].count("globex") == 0
