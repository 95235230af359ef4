"""Acting: every command says what it will do and changes nothing for it; then it does it, in the caller's name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from killick.model import events as e
from processes import told
from web import desk as at
from web.desk import Desk, desk


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Desk]:
    with desk(tmp_path) as made:
        yield made


def last(office: Desk, kind: type[e.Event], run: str = "r") -> Any:
    return told(office.kd, run, kind)[-1]


def test_a_run_is_paused_and_resumed_with_who_and_why(office: Desk) -> None:
    office.at(at.waits)
    will, did = office.does("/runs/r/pause", because="the bank is closed")
    assert "stops at its next step" in will
    assert did == "paused"
    _, event, data = last(office, e.RunPaused)
    assert (event.by, data["because"]) == ("mia", "the bank is closed")
    assert office.post("/runs/r/pause", 409)["detail"].endswith("it is paused already")
    will, did = office.does("/runs/r/resume")
    assert "continues where it was paused" in will
    assert did == "resumed"


def test_a_failed_run_is_resumed_at_what_failed(office: Desk) -> None:
    office.at(at.fails)
    will, _ = office.does("/runs/r/resume")
    assert "where its code failed" in will
    assert "none is made twice" in will


def test_cancelling_says_what_stays_done_and_what_is_undone(office: Desk) -> None:
    office.at(at.waits)
    assert "Its effects stay" in office.post("/runs/r/cancel", dry_run=True)["will"]
    will, _ = office.does("/runs/r/cancel", compensate=True)
    assert "undone, the last first" in will
    office.kd.advance("r")
    assert office.kd.info("r").status == "cancelled"
    assert office.post("/runs/r/cancel", 409)["detail"].endswith("it is over (cancelled)")


def test_the_context_is_changed_on_what_was_seen(office: Desk) -> None:
    office.at(at.claim, at.Claim(name="bob", amount=5))
    version = office.get("/runs/r/act")["context_version"]
    will, did = office.does("/runs/r/set", set={"limit": 900}, saw=version)
    assert "limit: 500 → 900" in will
    assert did == "changed"
    assert office.post("/runs/r/set", 409, set={"limit": 1}, saw=version)["code"] == "context_stale"
    assert office.post("/runs/r/set", 409)["detail"].endswith("Give `set` or `unset`")


def test_priority_note_and_word_are_given(office: Desk) -> None:
    office.at(at.waits)
    assert "priority 7 instead of 0" in office.does("/runs/r/prioritize", priority=7)[0]
    assert office.kd.info("r").priority == 7
    assert "Its code never sees it" in office.does("/runs/r/note", note="called them")[0]
    assert last(office, e.NoteMade)[2]["note"] == "called them"
    assert "reads it before" in office.does("/runs/r/say", text="hurry")[0]


def test_a_message_is_sent_once_by_its_id(office: Desk) -> None:
    office.at(at.waits)
    assert "waits for it" in office.post("/runs/r/messages", name="paid", dry_run=True)["more"][0]
    office.post("/runs/r/messages", name="paid", body={"sum": 5}, id="m1")
    office.post("/runs/r/messages", name="paid", body={"sum": 6}, id="m1")
    office.kd.advance("r")
    assert office.kd.state("r").result == {"sum": 5}
    assert office.post("/runs/r/messages", 409, name="paid")["code"] == "answer_refused"


def test_a_step_is_overridden_skipped_or_tried_now(office: Desk) -> None:
    office.at(at.waits, run="o")
    will, did = office.does("/runs/o/override", step="2", output={"sum": 9})
    assert "instead of being executed" in will
    assert did == "step 2 is given this result"
    office.at(at.waits, run="s")
    assert "killick.errors.Skipped" in office.does("/runs/s/skip", step="2")[0]
    assert "is over" in office.post("/runs/s/skip", 409, step="1", dry_run=True)["detail"]
    office.at(at.polls, run="p")
    assert "1 attempt made so far" in office.does("/runs/p/retry")[0]


def test_a_rewind_says_what_stays_done(office: Desk) -> None:
    office.at(at.waits)
    will, did = office.does("/runs/r/rewind", to="1:before", because="wrong room")
    assert "rewinds: steps 1 to 2, which stay on record" in will
    assert 'stays done: step 1, desk_book(room="attic")' in will
    assert did == "rewound to 1:before"
    assert office.post("/runs/r/rewind", 404, to="99:before")["code"] == "boundary_unknown"


def test_a_fork_goes_on_under_other_conditions(office: Desk) -> None:
    office.at(at.claim, at.Claim(name="bob", amount=5))
    will = office.post("/runs/r/fork", at="start", input={"name": "cyd", "amount": 7}, dry_run=True)
    assert "A new run, r-fork, has the history of r up to start" in will["will"]
    assert any("other input" in line for line in will["more"])
    assert office.kd.runtime.store.head("r-fork") is None
    made = office.post("/runs/r/fork", at="start", id="f", input={"name": "cyd", "amount": 7}, effects="none")
    assert made["made"] == "f"
    assert office.kd.state("f").input == {"name": "cyd", "amount": 7}
    again = office.post("/runs/r/fork", 409, at="start", id="f")
    assert again["code"] == "run_exists"
    assert office.post("/runs/r/fork", 422, effects="some")["code"] == "body_refused"


def test_undoing_says_who_used_it_and_undoes_only_that(office: Desk) -> None:
    office.at(at.waits)
    will, did = office.does("/runs/r/undo", step="1", because="not needed")
    assert "is undone by refund" in will
    assert "The same call again is executed" in will
    assert did == "undid step 1, desk_book"
    assert "undone already" in office.post("/runs/r/undo", 409, step="1", dry_run=True)["detail"]


def test_only_what_makes_sense_is_offered_and_the_rest_says_why(office: Desk) -> None:
    office.at(at.waits)
    offers = {each["command"]: each["why_not"] for each in office.get("/runs/r/act")["offers"]}
    assert offers["pause"] is offers["cancel"] is offers["fork"] is offers["undo"] is None
    assert offers["resume"].startswith("it is waiting, and not held back")
    assert offers["retry"] == "no step sits out a delay"
    page = office.page("/runs/r/act")
    assert 'id="do-pause"' in page
    assert 'id="do-resume"' not in page
    assert "no step sits out a delay" in page
    assert 'data-do="pause"' not in office.be("eve", "viewer").page("/runs/r/act")


def test_several_runs_are_acted_on_each_by_itself(office: Desk) -> None:
    office.at(at.waits, run="a")
    office.at(at.waits, run="b")
    office.kd.pause("b", by="max")
    told_ = office.post("/runs/act", command="pause", runs=["a", "b", "nobody"], dry_run=True)
    assert [each["refused"] is None for each in told_["results"]] == [True, False, False]
    assert office.kd.info("a").status == "waiting"
    done = office.post("/runs/act", command="pause", runs=["a", "b", "nobody"], because="audit")
    assert (done["done"], done["refused"]) == (1, 2)
    assert done["results"][0] == {"run": "a", "done": "paused", "refused": None}
    assert done["results"][1]["refused"] == "it is paused already"
    assert office.kd.info("a").status == "paused"
    assert office.post("/runs/act", 422, command="rewind", runs=["a"])["code"] == "body_refused"


def test_a_run_with_any_name_is_acted_on(office: Desk) -> None:
    office.at(at.waits, run="a/b c?#")
    assert office.post("/runs/a%2Fb%20c%3F%23/pause")["did"] == "paused"
    assert office.page("/runs/a%2Fb%20c%3F%23/act")


def test_nothing_of_a_run_that_is_not_there(office: Desk) -> None:
    assert office.get("/runs/nobody/act", 404)["code"] == "run_unknown"
    for command, body in {"pause": {}, "fork": {}, "undo": {"step": "1"}, "rewind": {"to": "start"}}.items():
        assert office.post(f"/runs/nobody/{command}", 404, **body)["code"] == "run_unknown"
