"""The overview counts what is on record: runs over time, durations, failures, usage and the time of people."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import killick
from killick.presenting import needs
from killick.web.handlers import overview
from web.desk import Desk, asks, desk, fails, waits


@killick.tool(name="desk_model", effect="reads")
async def model(model: str, messages: list[dict[str, str]]) -> dict[str, object]:
    return {"role": "assistant", "content": "yes", "usage": {"input_tokens": 900, "output_tokens": 100}}


@killick.agent(name="desk_thinks")
async def thinks(run: killick.Run, calls: int) -> None:
    for _ in range(calls):
        await run.model(model, model="m", messages=[{"role": "user", "content": "?"}])


@pytest.fixture
def at(tmp_path: Path) -> Iterator[Desk]:
    with desk(tmp_path) as made:
        yield made


def test_runs_are_counted_in_the_slot_in_which_they_started_by_their_status_now(at: Desk) -> None:
    at.at(waits, run="old")
    at.clock.advance(25 * 3_600)
    at.at(fails, run="f")
    at.clock.advance(3_600)
    at.at(waits, run="w1")
    at.at(waits, run="w2")
    doc = at.get("/overview")
    assert [slot["runs"]["total"] for slot in doc["slots"]] == [*[0] * 22, 1, 2]
    assert (doc["slots"][-2]["runs"]["failed"], doc["slots"][-1]["runs"]["waiting"]) == (1, 2)
    assert (doc["total"]["runs"]["total"], doc["more"], doc["read"]) == (3, False, 3)
    assert at.get("/overview?period=7d")["total"]["runs"]["total"] == 4
    assert at.get("/overview?agent=desk_fails")["total"]["runs"]["total"] == 1


def test_one_count_of_questions_reads_a_bounded_number_of_logs_and_the_next_continues(
    at: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(needs, "NEW_MAX", 2)
    for number in range(5):
        at.at(asks, "when?", run=f"a{number}")
    counts = [at.get("/overview") for _ in range(3)]
    assert [(doc["open_questions"], doc["questions_more"]) for doc in counts] == [(2, True), (4, True), (5, False)]


def test_failures_are_grouped_by_agent_and_error_the_most_first(at: Desk) -> None:
    for number in range(3):
        at.at(fails, run=f"f{number}")
    [group] = at.get("/overview")["failures"]
    assert (group["agent"], group["error"], group["count"], group["run"]) == ("desk_fails", "RuntimeError", 3, "f2")


def test_the_time_of_people_is_from_the_question_to_its_answer_and_open_ones_are_told(at: Desk) -> None:
    at.at(asks, "when?", run="a")
    at.at(asks, "when?", run="b")
    at.clock.advance(120)
    at.kd.answer("a", "respond", value="now", by="mia")
    at.kd.advance("a")
    doc = at.get("/overview")
    assert doc["total"]["answers"] == {"count": 1, "p50_seconds": 120.0, "p95_seconds": 120.0}
    assert doc["total"]["durations"] == {"count": 1, "p50_seconds": 120.0, "p95_seconds": 120.0}
    assert (doc["open_questions"], doc["asked_at"]) == (1, "2026-11-16T09:00:00.000000Z")


def test_tokens_are_summed_by_agent_and_day_and_a_fork_counts_only_its_own(at: Desk) -> None:
    at.at(thinks, 2, run="t")
    at.kd.fork("t", at="2:after", id="t2")
    at.clock.advance(24 * 3_600)
    at.at(thinks, 1, run="u")
    used = [
        (each["day_at"][:10], each["model_calls"], each["tokens_in"]) for each in at.get("/overview?period=7d")["usage"]
    ]
    assert used == [("2026-11-16", 2, 1_800), ("2026-11-17", 1, 900)]


def test_one_request_reads_logs_for_a_bounded_time_and_the_next_continues(
    at: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        at.at(fails, run=f"f{number}")
    monkeypatch.setattr(overview, "READ_SECONDS", -1.0)
    doc = at.get("/overview")
    assert (doc["read"], doc["total"]["runs"]["failed"], doc["failures"]) == (0, 3, [])
    assert "reading continues" in at.page("/overview")
    monkeypatch.undo()
    assert at.get("/overview")["read"] == 3


def test_of_very_many_runs_the_newest_are_counted_and_that_is_told(at: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview, "RUNS_MAX", 2)
    monkeypatch.setattr(overview, "_PAGE", 2)
    for number in range(5):
        at.at(waits, run=f"w{number}")
    doc = at.get("/overview")
    assert (doc["total"]["runs"]["total"], doc["more"]) == (2, True)
    assert "there are more" in at.page("/overview")


def test_every_chart_of_the_page_has_its_numbers_in_a_table(at: Desk) -> None:
    at.at(fails, run="f")
    at.at(thinks, 2, run="t")
    at.at(asks, "when?", run="a")
    at.clock.advance(60)
    at.kd.answer("a", "respond", value="now", by="mia")
    at.kd.advance("a")
    text = at.page("/overview")
    assert text.count('role="img"') == 3
    assert text.count("As a table") == 4
    assert "1,800" in text
    assert "RuntimeError" in text


def test_system_logs_are_counted_for_admins_only(at: Desk) -> None:
    at.get("/overview?agent=killick.tokens", 403)
    at.be("ann", "admin").get("/overview?agent=killick.tokens")
