"""Two runs side by side: what they share, what a fork was given, and every step from where they part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

import killick
from families import Family
from killick.history.compare_runs import compare
from killick.log import Log
from killick.store import MemoryStore
from killick.web.app import asgi
from killick.web.auth.access import Identified
from killick.web.handlers.compare import PAGE
from killick.web.render import marked


@killick.tool(effect="reads")
async def compare_look(n: int) -> dict[str, Any]:
    return {"n": n, "sizes": (n, n + 1), "email": "ann@example.org"}


@killick.tool(effect="at_most_once")
async def compare_pay(to: str, amount: int) -> str:
    return f"paid {amount}"


@killick.agent
async def compare_agent(run: killick.Run, n: int) -> str:
    seen = await run.call(compare_look, n)
    await run.gather(*(run.call(compare_look, each) for each in (1, 2)))
    route = await run.decided("Who?", "manager", options=["auto", "manager"])
    await run.update(route=route)
    if route == "manager":
        await run.decided("Is it much?", "no", options=["yes", "no"])
    return await run.call(compare_pay, seen["email"], n if route == "auto" else n + 1)


@pytest.fixture
def kd() -> Iterator[killick.Client]:
    with killick.Client(MemoryStore(), clock=killick.clock.LeapingClock()) as made:
        made.run(compare_agent, 4, id="r")
        made.fork("r", "3:after", id="f", output={"3": "auto"}, effects="live", by="tom", because="what if?")
        made.run(compare_agent, 4, id="f")
        made.run(compare_agent, 5, id="other")
        yield made


@pytest.fixture
def web(kd: killick.Client) -> Iterator[TestClient]:
    with TestClient(asgi(kd, access=Identified(kd, lambda request: "ann"))) as made:
        yield made


def compared(web: TestClient, **asked: Any) -> Any:
    page = web.get("/compare", params=asked)
    assert page.status_code == 200, page.text
    answer = web.get("/api/v1/compare", params=asked)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_fork_and_its_parent_part_where_the_record_does(kd: killick.Client, web: TestClient) -> None:
    found = compared(web, a="r", b="f")
    wanted = compare(kd.runtime.log, "r", "f")
    assert wanted.shared is not None
    assert found["shared"] == {"steps": wanted.shared.steps, "place": wanted.shared.place}
    assert found["diverges_at"] == "3"
    assert [(pair["step"], pair["how"]) for pair in found["pairs"]] == [(pair.step, pair.how) for pair in wanted.pairs]
    assert [(given["what"], given["step"], given["value"]) for given in found["conditions"]] == [
        ("output", "3", "auto"),
        ("effects", None, "live"),
    ]
    assert [(change["path"], change["before"], change["after"]) for change in found["changes"]] == [
        ("route", "manager", "auto")
    ]
    assert (found["a"]["status"], found["b"]["forked_from"], found["b"]["result"]) == ("completed", "r", "paid 4")


def test_strangers_are_compared_step_by_step_and_what_is_other_is_marked(web: TestClient) -> None:
    found = compared(web, a="r", b="other")
    assert found["shared"] is None
    assert found["diverges_at"] == "1"
    assert [pair["step"] for pair in found["pairs"]] == ["1", "2", "2.1.1", "2.2.1", "3", "4", "5"]
    [same] = [pair for pair in found["pairs"] if pair["step"] == "2.1.1"]
    assert (same["how"], same["shared"]) == (None, False)
    first = found["pairs"][0]
    assert first["how"] == "arguments"
    page = web.get("/compare", params={"a": "r", "b": "other"}).text
    assert "<mark>4</mark>" in page
    assert "<mark>5</mark>" in page
    assert first["one"]["output"]["sizes"] == {"$tuple": [4, 5]}


def test_the_family_comes_first_among_those_to_compare_with(web: TestClient) -> None:
    related = compared(web, a="r")["related"]
    assert [(each["run"], each["how"]) for each in related] == [("f", "fork"), ("other", "same agent")]
    assert next((kin["run"], kin["how"]) for kin in compared(web, a="f")["related"]) == ("r", "parent")
    assert compared(web)["a"] is None


def test_a_run_is_compared_with_itself_then_and_now(web: TestClient) -> None:
    found = compared(web, a="r", b="r", at="3:after")
    assert {change["part"] for change in found["changes"]} >= {"outputs", "decisions", "context", "effects", "position"}
    assert compared(web, a="r", b="r", at="now")["changes"] == []
    refused = web.get("/api/v1/compare", params={"a": "r", "b": "r", "at": "77"})
    assert refused.status_code == 404


def test_a_run_is_compared_with_itself_at_two_places_the_earlier_first(web: TestClient) -> None:
    found = compared(web, a="r", b="r", at="1:after", to="3:before")
    assert {change["step"] for change in found["changes"] if change["part"] == "outputs"} == {"2.1.1", "2.2.1", "2"}
    assert not any(change["part"] == "decisions" for change in found["changes"])
    turned = compared(web, a="r", b="r", at="3:before", to="1:after")
    assert (turned["at"], turned["to"], turned["changes"]) == ("1:after", "3:before", found["changes"])
    assert [each["step"] for each in found["steps"]] == ["1", "2", "3", "4", "5"]


def test_without_a_run_the_latest_are_offered(web: TestClient) -> None:
    assert {each["run"] for each in compared(web)["related"]} == {"r", "f", "other"}


def test_a_fork_with_an_output_that_was_shown_redacted_has_what_is_on_record_there(kd: killick.Client) -> None:
    access = Identified(kd, lambda request: ("ann", "admin"))
    with TestClient(asgi(kd, access=access, redact=("email",))) as web:
        output = web.get("/api/v1/runs/r/steps/1").json()["output"]
        assert output["email"] != "ann@example.org"
        body = {"at": "1:after", "id": "shown", "output": {"1": output | {"n": 9}}}
        web.post("/api/v1/runs/r/fork", json=body, headers={"Authorization": "Bearer mine"}).raise_for_status()
    first = kd.state("shown").outputs["1"]
    assert (first["n"], first["email"]) == (9, "ann@example.org")


def test_a_run_that_is_not_there_is_said_to_be_unknown(web: TestClient) -> None:
    for address in ("/compare", "/api/v1/compare"):
        answer = web.get(address, params={"a": "r", "b": "nobody"})
        assert answer.status_code == 404
        assert "nobody" in answer.text


def test_the_page_says_what_differs_in_words_and_marks(web: TestClient) -> None:
    page = web.get("/compare", params={"a": "r", "b": "f"}).text
    assert "They share 2 steps, up to" in page
    assert "≠ another output" in page
    assert "<mark>manager</mark>" in page
    assert 'id="pair-3"' in page


def test_redacted_fields_are_nowhere_on_the_page(kd: killick.Client) -> None:
    with TestClient(asgi(kd, access=Identified(kd, lambda request: "ann"), redact=("email",))) as web:
        for asked in ({"a": "r", "b": "f"}, {"a": "r", "b": "other"}, {"a": "r", "b": "r", "at": "start"}):
            for address in ("/compare", "/api/v1/compare"):
                assert "@example.org" not in web.get(address, params=asked).text


def test_texts_are_told_apart_word_by_word_and_say_the_same_as_before() -> None:
    one, two = marked("Pay 1250 to Ann", "Pay 90 to Ann") or ([], [])
    assert ("".join(piece.text for piece in one), "".join(piece.text for piece in two)) == (
        "Pay 1250 to Ann",
        "Pay 90 to Ann",
    )
    assert [piece.text for piece in (*one, *two) if piece.other] == ["1250", "90"]
    assert marked({"n": 1}, {"n": 1}) is None
    assert marked("x" * 5_000, "y") is None


# long runs ----------------------------------------------------------------------------------------


class Counting(MemoryStore):
    """Counts the rows that are read."""

    rows = 0

    def read(self, run: str, **asked: Any) -> Any:
        found = super().read(run, **asked)
        self.rows += len(found)
        return found


def test_a_long_run_and_its_fork_are_read_from_where_they_part_a_page_at_a_time() -> None:
    store = Counting()
    told = Family(Log(store))
    told.start()
    for first in range(1, 4_000, 100):
        told.steps("r", first, first + 99)
    cut = told.log.state("r").fold.step("3900")
    assert cut is not None
    told.fork("f", "r", cut.ended)
    told.steps("f", 3_901, 3_910, "otherwise")
    with killick.Client(store) as kd, TestClient(asgi(kd, access=Identified(kd, lambda request: "ann"))) as web:
        store.rows = 0
        found = compared(web, a="r", b="f")
        assert found["shared"] == {"steps": 3_900, "place": "3900:after"}
        assert [pair["step"] for pair in found["pairs"]] == [str(3_901 + at) for at in range(PAGE)]
        assert {pair["how"] for pair in found["pairs"]} == {"call", "absent"}
        assert store.rows < 12_000 * 2
        further = compared(web, a="r", b="f", cursor=found["next"])
        assert further["pairs"][0]["step"] == str(3_901 + PAGE)
