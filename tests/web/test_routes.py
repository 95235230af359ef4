"""Routes: what a request becomes on its way to a handler, and what a handler's document becomes on its way back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated, Any

import httpx
import msgspec
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.testclient import TestClient

import killick
from killick.errors import RunUnknown, StoreBusy
from killick.presenting.encoder import document
from killick.web.addresses import Paths, address
from killick.web.app_context import AppContext
from killick.web.auth.access import Identified
from killick.web.endpoints import Endpoints
from killick.web.problems import Problem, problem_of
from killick.web.routes import Call, get, post, routes_of
from killick.workers.tokens import Person


class Asked(msgspec.Struct, frozen=True):
    run: str = ""
    limit: Annotated[int, msgspec.Meta(ge=1, le=10)] = 5
    status: tuple[str, ...] = ()
    from_: str | None = msgspec.field(name="from", default=None)


class Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    note: str


class Told(msgspec.Struct, frozen=True, kw_only=True):
    run: str = ""
    limit: int = 0
    status: tuple[str, ...] = ()
    value: Any = None
    by: str = ""


@get("/runs/{run}")
def look(call: Call[Asked, Any]) -> Told:
    """Look at something."""
    asked = call.asked
    if asked.run == "gone":
        raise RunUnknown("gone")
    return Told(run=asked.run, limit=asked.limit, status=asked.status, value=asked.from_, by=call.person.name)


@get("/runs/known")
def known(call: Call[Any, Any]) -> Told:
    """Look at a fixed word."""
    return Told(run="a fixed word")


@post("/runs/{run}/notes")
async def write(call: Call[Asked, Body]) -> Told:
    """Write something."""
    if call.body.note == "fault":
        raise ZeroDivisionError("a secret of the server's")
    return Told(run=call.asked.run, value=call.body.note)


class Trusting(Identified):
    """Lets writes through that no page of ours sent: what that takes is told elsewhere."""

    def __init__(self, kd: killick.Client) -> None:
        super().__init__(kd, lambda request: Person("ann", "admin"))

    def refuse_forged(self, request: Request, given: str | None = None) -> None:
        pass


@pytest.fixture
def web() -> Iterator[TestClient]:
    with killick.open("memory:") as kd:
        context = AppContext(kd, access=Trusting(kd))
        app = Paths(Starlette(routes=Endpoints(context).table(routes_of(sys.modules[__name__]))))
        with TestClient(app, base_url="http://localhost", client=("127.0.0.1", 5000)) as client:
            yield client


def code_of(answer: httpx.Response) -> str:
    assert answer.headers["content-type"] == "application/problem+json"
    told = answer.json()
    assert told["status"] == answer.status_code
    return str(told["code"])


def test_path_and_query_arrive_as_one_struct_of_their_types(web: TestClient) -> None:
    told = web.get("/api/v1/runs/r1?limit=7&status=failed&status=paused&from=here").json()
    assert (told["run"], told["limit"], told["status"], told["value"]) == ("r1", 7, ["failed", "paused"], "here")


@pytest.mark.parametrize("run", ["a/b", "a b", "ä", "a%2Fb", "a?b#c", "..%", "x+2", "'\"<>&"])
def test_a_runs_id_may_be_made_of_anything(web: TestClient, run: str) -> None:
    request = Request({"type": "http", "root_path": "", "headers": []})
    assert web.get(address(request, "/api/v1/runs/{run}", run=run)).json()["run"] == run


def test_what_stands_for_a_slash_is_no_way_to_another_run(web: TestClient) -> None:
    assert web.get("/api/v1/runs/a%1Fb").json()["run"] not in ("a/b", "a\x1fb")


def test_a_client_that_has_a_document_is_told_that_it_did_not_change(web: TestClient) -> None:
    first = web.get("/api/v1/runs/r1?limit=7")
    version = {"If-None-Match": first.headers["etag"]}
    again, other = web.get("/api/v1/runs/r1?limit=7", headers=version), web.get("/api/v1/runs/r1", headers=version)
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", first.headers["etag"])
    assert (other.status_code, other.json()["limit"]) == (200, 5)


def test_a_fixed_word_wins_over_a_parameter_whatever_the_order(web: TestClient) -> None:
    assert web.get("/api/v1/runs/known").json()["run"] == "a fixed word"


@pytest.mark.parametrize(
    ("query", "code"),
    [("lmit=7", "parameter_unknown"), ("limit=99", "parameter_refused"), ("limit=x", "parameter_refused"),
     ("limit=1&limit=2", "parameter_refused")],
)  # fmt: skip
def test_a_parameter_that_does_not_fit_is_refused_by_its_name(web: TestClient, query: str, code: str) -> None:
    answer = web.get(f"/api/v1/runs/r1?{query}")
    assert (answer.status_code, code_of(answer)) == (400, code)
    assert "limit" in answer.json()["detail"] or "lmit" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("body", "sort", "status", "code"),
    [(b'{"note": "x", "by": "somebody"}', "application/json", 422, "body_refused"),
     (b'{"note": 5}', "application/json", 422, "body_refused"), (b"{", "application/json", 400, "not_json"),
     (b'{"note": "\xff"}', "application/json", 400, "not_json"), (b'{"note": "x"}', "text/plain", 415, "not_json"),
     (b'{"note": ' + b"[" * 100_000, "application/json", 422, "body_refused")],
)  # fmt: skip
def test_a_body_that_does_not_fit_is_refused_before_anything_is_done(
    web: TestClient, body: bytes, sort: str, status: int, code: str
) -> None:
    answer = web.post("/api/v1/runs/r1/notes", content=body, headers={"Content-Type": sort})
    assert (answer.status_code, code_of(answer)) == (status, code)


def test_what_killick_refuses_is_a_problem_with_a_code(web: TestClient) -> None:
    answer = web.get("/api/v1/runs/gone")
    assert (answer.status_code, code_of(answer)) == (404, "run_unknown")
    assert "gone" in answer.json()["detail"]


def test_a_fault_of_ours_tells_nothing_of_itself(web: TestClient) -> None:
    answer = web.post("/api/v1/runs/r1/notes", json={"note": "fault"})
    assert (answer.status_code, code_of(answer)) == (500, "internal")
    assert "secret" not in answer.text


def test_a_key_that_cannot_be_one_is_refused(web: TestClient) -> None:
    answer = web.post("/api/v1/runs/r/notes", json={"note": "x"}, headers={"Idempotency-Key": "k" * 201})
    assert (answer.status_code, code_of(answer)) == (400, "key_refused")


def test_every_error_of_killicks_own_has_a_status() -> None:
    assert problem_of(RunUnknown("r")).status == 404
    assert problem_of(StoreBusy("s.db", 5.0)).headers == {"Retry-After": "1"}
    assert problem_of(Problem(418, "no", code="teapot")).code == "teapot"


class Tagged(msgspec.Struct, frozen=True, tag="call", tag_field="kind"):
    step: str


def test_a_document_keeps_the_tags_of_values_and_the_kinds_of_parts() -> None:
    told = document({"value": Told(value={"at": b"x", "pair": (1, 2)}), "found": (Tagged("6"),)})
    assert told["value"]["value"] == {"at": {"$bytes": "eA=="}, "pair": {"$tuple": [1, 2]}}
    assert told["value"]["status"] == []
    assert told["found"] == [{"kind": "call", "step": "6"}]
