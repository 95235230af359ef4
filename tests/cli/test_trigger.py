"""`killick trigger`: what there is, what it did, and what people do to it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import killick
from claims import call, move_in, on_terminal, plain_environment
from killick.definitions.agents import AGENTS
from killick.triggers import TRIGGERS
from killick.workers import trigger_runner

Capture = pytest.CaptureFixture[str]

APP = """
import killick


@killick.agent
async def report(run: killick.Run, day: str) -> str:
    return f"report of {day}"


@killick.agent
async def fulfil(run: killick.Run, order: dict[str, int]) -> int:
    return order["number"]


killick.triggers.cron("0 9 * * mon-fri", report, tz="Europe/Berlin", input="today")
killick.triggers.on_event("order.created", fulfil)
"""


@pytest.fixture
def office(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with an app and a store; a worker was there, and has gone."""
    before, agents = TRIGGERS.copy(), dict(AGENTS.declared)
    TRIGGERS.clear()
    move_in(tmp_path, monkeypatch)
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "pyproject.toml").write_text('[tool.killick]\napp = "app.py"\nstore = "killick.db"\n')
    with killick.open("killick.db"):
        pass
    yield tmp_path
    TRIGGERS.clear()
    TRIGGERS.update(before)
    AGENTS.declared.clear()
    AGENTS.declared.update(agents)


def take_up() -> None:
    """What a worker does when it starts."""
    with killick.open("killick.db") as kd:
        trigger_runner.ensure(kd.runtime.engine)


def test_triggers_are_listed_with_what_sets_them_off_and_when(office: Path, capsys: Capture) -> None:
    found = call(capsys, "trigger").out.splitlines()
    assert found == [
        "fulfil  on order.created",
        "        no worker has taken it up yet",
        "report  cron 0 9 * * mon-fri Europe/Berlin",
        "        no worker has taken it up yet",
    ]
    take_up()
    call(capsys, "trigger", "pause", "fulfil")
    found = call(capsys, "trigger").out.splitlines()
    assert found[1] == "        paused; has not fired yet"
    assert found[3].startswith("        next in ")
    assert max(map(len, found)) <= 80
    listed = json.loads(call(capsys, "trigger", "--json").out)
    assert [(each["name"], each["paused"], each["declared"]) for each in listed] == [
        ("fulfil", True, True),
        ("report", False, True),
    ]


def test_a_trigger_is_fired_by_hand_without_a_worker(office: Path, capsys: Capture) -> None:
    found = call(capsys, "trigger", "fire", "report", "--by", "ada")
    assert found.out.startswith("report  started report@hand_")
    run = found.out.split()[-1]
    fired = json.loads(call(capsys, "trigger", "fire", "report", "--input", "monday", "--json").out)
    assert fired["started"]
    with killick.open("killick.db") as kd:
        assert kd.state(run).input == "today"
        assert kd.state(fired["run"]).input == "monday"
    assert f"fired     {run} by ada" in call(capsys, "trigger", "history", "report").out


def test_who_mistypes_a_name_is_told_the_nearest(office: Path, capsys: Capture) -> None:
    found = call(capsys, "trigger", "fire", "reprot")
    assert (found.code, found.out) == (2, "")
    assert "reprot: no such trigger in" in found.err
    assert "did you mean report?" in found.err
    found = call(capsys, "trigger", "pause", "report")
    assert (found.code, found.err) == (
        2,
        "killick: report: no worker has taken it up yet; start one with `killick worker`\n",
    )


def test_an_event_is_published_to_whoever_listens(office: Path, capsys: Capture) -> None:
    call(capsys, "trigger")
    take_up()
    found = call(capsys, "trigger", "publish", "order.created", '{"number": 17}', "--id", "o17")
    assert (found.code, found.out) == (0, "order.created  received by 1 trigger\n")
    found = call(capsys, "trigger", "publish", "order.craeted", "--json")
    assert (found.code, json.loads(found.out)) == (1, {"event": "order.craeted", "receivers": 0})
    assert "no trigger listens to order.craeted" in found.err


def test_a_history_tells_what_was_fired_and_what_was_passed_and_why(office: Path, capsys: Capture) -> None:
    call(capsys, "trigger")
    take_up()
    call(capsys, "trigger", "pause", "report", "--because", "holidays", "--by", "ada")
    call(capsys, "trigger", "resume", "report", "--by", "ada")
    found = call(capsys, "trigger", "history", "report").out.splitlines()
    assert [line[21:] for line in found] == [
        "set       cron 0 9 * * mon-fri Europe/Berlin, starts report",
        "paused    by ada: holidays",
        "resumed   by ada",
    ]
    [last] = json.loads(call(capsys, "trigger", "history", "report", "--limit", "1", "--json").out)
    assert (last["did"], last["by"]) == ("resumed", "ada")
    call(capsys, "trigger", "fire", "fulfil")
    found = call(capsys, "trigger", "history", "fulfil").out.splitlines()
    assert "no input could be made: killick.errors.ValueRefused" in found[-1]


@pytest.mark.slow
def test_on_a_narrow_terminal_nothing_is_cut_off(office: Path, capsys: Capture) -> None:
    call(capsys, "trigger")
    take_up()
    code, seen = on_terminal(["killick", "trigger"], cwd=office, env=plain_environment(), columns=60)
    assert code == 0
    assert max(map(len, seen.splitlines())) <= 60
    assert "cron 0 9 * * mon-fri Europe/Berlin" in seen
