"""Starting runs over HTTP: by the agent's name, with a form from its input, and once by its id or its key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from killick.model.events import RunStarted
from web.desk import Desk, desk


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Desk]:
    with desk(tmp_path) as made:
        yield made


def test_a_run_is_started_and_its_address_told(office: Desk) -> None:
    answer = office.web.post("/api/v1/runs", json={"agent": "desk_asks", "input": "When?", "id": "a/1", "tags": ["x"]})
    assert answer.status_code == 201
    assert answer.headers["location"] == "/api/v1/runs/a%2F1"
    assert office.kd.info("a/1").status == "queued"
    assert "x" in office.kd.info("a/1").tags


def test_the_same_id_is_the_same_run_and_with_another_input_a_conflict(office: Desk) -> None:
    office.post("/runs", 201, agent="desk_asks", input="When?", id="r")
    again = office.post("/runs", 201, agent="desk_asks", input="When?", id="r")
    assert "the same id is the same run" in again["did"]
    assert office.post("/runs", 409, agent="desk_asks", input="Why?", id="r")["code"] == "run_mismatch"


def test_the_same_key_starts_one_run(office: Desk) -> None:
    first = office.post("/runs", 201, key="k1", agent="desk_asks", input="When?")
    again = office.post("/runs", 201, key="k1", agent="desk_asks", input="When?")
    other = office.post("/runs", 201, key="k2", agent="desk_asks", input="When?")
    assert first["run"] == again["run"] != other["run"]
    assert len(office.kd.list(agent="desk_asks")) == 2


def test_an_input_that_does_not_fit_starts_nothing(office: Desk) -> None:
    refused = office.post("/runs", 422, agent="desk_claim", input={"name": "bob", "amount": "much"}, id="r")
    assert "amount" in refused["detail"]
    assert office.post("/runs", 404, agent="nobody", id="r")["code"] == "agent_unknown"
    assert office.kd.runtime.store.head("r") is None


def test_agents_are_told_with_what_they_take_and_have_a_form(office: Desk) -> None:
    found = {each["name"]: each for each in office.get("/agents")["agents"]}
    assert found["desk_claim"]["about"] == "Pay a claim."
    assert found["desk_claim"]["schema"]["properties"]["amount"]["minimum"] == 1
    assert found["desk_polls"]["takes_input"] is False
    page = office.page("/start?agent=desk_claim")
    assert 'data-field="amount"' in page
    assert "from 1" in page
    assert "It takes no input" in office.page("/start?agent=desk_polls")
    assert "an operator may start" in office.be("eve", "viewer").page("/start?agent=desk_claim")
    assert "nobody" in office.page("/start?agent=nobody", 404)


def test_who_started_a_run_is_on_record(office: Desk) -> None:
    office.post("/runs", 201, agent="desk_asks", input="When?", id="mine")
    first = office.kd.runtime.log.event("mine", 1)
    assert isinstance(first, RunStarted)
    assert first.by == "mia"
