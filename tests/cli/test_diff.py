"""`killick time diff`: what people see, what programs get, and one line for every mistake."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import killick
from families import fork_of
from killick.cli.main import main
from killick.log import Entry
from killick.model import events as e

LETTER = "Dear Madam or Sir, " * 60


@killick.tool(effect="reads")
async def cli_diff_fetch(claim: int) -> dict[str, Any]:
    return {"claim": claim, "letter": LETTER}


@killick.tool(effect="at_most_once")
async def cli_diff_pay(amount: int) -> str:
    return f"paid {amount}"


@killick.agent
async def cli_diff_agent(run: killick.Run, claim: int) -> str:
    await run.call(cli_diff_fetch, claim)
    await run.update(route="manager")
    paid = await run.call(cli_diff_pay, claim)
    await run.ask("Right?", to="managers")
    return paid


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a store: `one` waits at step 3, `two` with another claim, `fork` left `one` after step 1."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    with killick.open("killick.db") as kd:
        for run, claim in (("one", 5), ("two", 6)):
            with pytest.raises(killick.RunWaiting):
                kd.run(cli_diff_agent, claim, id=run)
        cut = kd.diff("one", "1").after.seq
        fork_of(kd.runtime.log, e.RunForked(at=1, run="fork", parent="one", cut=cut, generation=1))
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(["time", "diff", *words]) == code
    out, err = capsys.readouterr()
    assert bool(err) == (code != 0)
    return err if code else out


def test_a_step_is_shown_by_parts_with_signs(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, "one", "2").splitlines()
    assert lines[0].startswith("one  2:before @")
    assert " → 2:after @" in lines[0]
    assert lines[1:] == [
        "",
        "position",
        "  ~ step  1 → 2",
        "  + committed  2",
        "",
        "outputs",
        '  + 2 cli_diff_pay → "paid 5"',
        "",
        "trace",
        '  + 2 tool cli_diff_pay {"amount":5} → "paid 5"',
        "",
        "effects",
        "  + 2 cli_diff_pay (at_most_once): done, key one:step_2:cli_diff_pay:" + lines[-1].rpartition(":")[2],
    ]


def test_two_places_are_compared_from_the_first_to_the_second(capsys: pytest.CaptureFixture[str]) -> None:
    forth, back = said(capsys, "one", "1:before", "now"), said(capsys, "one", "now", "1:before")
    assert '+ 2 cli_diff_pay → "paid 5"' in forth
    assert '- 2 cli_diff_pay → "paid 5"' in back
    assert "  ~ document  null → " in forth


def test_a_step_that_has_not_ended_is_compared_up_to_now(capsys: pytest.CaptureFixture[str]) -> None:
    shown = said(capsys, "one", "3")
    assert "3:after (step 3 has not ended: now)" in shown
    assert "  + 3 answer from managers: Right?" in shown


def test_two_runs_are_compared_now_or_at_a_place(capsys: pytest.CaptureFixture[str]) -> None:
    shown = said(capsys, "one", "two")
    assert shown.startswith("one  now @")
    assert " → two  now @" in shown
    assert '~ 2 value  "paid 5" → "paid 6"' in shown
    assert "paid" not in said(capsys, "one", "two", "--at", "1")


def test_a_fork_is_compared_with_what_it_left(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Nothing differs." in said(capsys, "one", "fork", "--at", "1")
    assert "  ~ forked_from  none → one" in said(capsys, "one", "fork")


def test_a_fork_is_told_where_and_why_it_parts_before_what_differs(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with killick.open("killick.db") as kd:
        log = kd.runtime.log.open("fork")
        log.append(Entry(e.ContextChanged(at=2, version=1, by="ann"), {"set": {"route": "auto"}}))
        tool = e.StepIntended(at=3, step="2", sort="tool", name="cli_diff_pay", effect="at_most_once")
        log.append(Entry(tool, {"arguments": {"amount": 7}}))
    lines = said(capsys, "one", "fork").splitlines()
    assert lines[0].startswith("one  now @")
    assert re.fullmatch(r"shared   1 step, up to 1:after @\d+ of one", lines[2])
    assert lines[3:6] == [
        'changed  context route="auto"',
        "         effects recorded",
        "diverge  step 2: the same call with other arguments",
    ]
    assert lines[6:13] == [
        "", "steps", '  - 2 cli_diff_pay(amount=5) → "paid 5"', "  + 2 cli_diff_pay(amount=7) → intended",
        "  - 3 asks Right? → waiting", "", "run",
    ]  # fmt: skip


def test_two_runs_of_one_agent_are_told_where_they_first_differ(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, "one", "two").splitlines()
    assert lines[2:4] == [
        "shared   nothing: neither is a fork of the other",
        "diverge  step 1: the same call with other arguments",
    ]


def test_json_of_two_runs_says_what_they_share_where_they_part_and_the_patch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = json.loads(said(capsys, "one", "fork", "--json"))
    assert list(found) == ["shared", "conditions", "diverges_at", "steps", "patch"]
    assert (found["shared"]["run"], found["shared"]["place"], found["shared"]["steps"]) == ("one", "1:after", 1)
    assert [condition["what"] for condition in found["conditions"]] == ["effects"]
    assert (found["diverges_at"]["step"], found["diverges_at"]["how"], found["diverges_at"]["two"]) == (
        "2",
        "absent",
        None,
    )
    assert {"op": "replace", "path": "/forked_from", "value": "one"} in found["patch"]
    assert isinstance(json.loads(said(capsys, "one", "fork", "--at", "1", "--json")), list)


@pytest.mark.parametrize("columns", [60, 100, 180])
def test_the_steps_of_two_runs_fit_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = said(capsys, "one", "two").splitlines()
    assert max(map(len, lines[: lines.index("run") if "run" in lines else lines.index("outputs")])) <= columns


def test_nothing_that_differs_is_said_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "one", "now", "head").splitlines()[-1] == "Nothing differs."
    assert json.loads(said(capsys, "one", "now", "head", "--json")) == []


def test_json_is_a_patch(capsys: pytest.CaptureFixture[str]) -> None:
    patch = json.loads(said(capsys, "one", "2", "--json"))
    assert {op["op"] for op in patch} <= {"add", "remove", "replace"}
    assert {"op": "replace", "path": "/position/step", "value": "2"} in patch


@pytest.mark.parametrize("columns", [80, 200])
def test_lines_stay_within_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = said(capsys, "one", "1")
    assert max(map(len, shown.splitlines())) <= columns
    assert "characters)" in shown


@pytest.mark.slow
def test_a_pipe_gets_no_colours_and_a_terminal_does(here: Path) -> None:
    command = [sys.executable, "-m", "killick", "time", "diff", "one", "2"]
    plain = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    piped = subprocess.run(command, cwd=here, env=plain, capture_output=True, check=True).stdout
    forced = {**plain, "FORCE_COLOR": "1", "TERM": "xterm"}
    coloured = subprocess.run(command, cwd=here, env=forced, capture_output=True, check=True).stdout
    assert b"\x1b[" not in piped
    assert b"\x1b[32m" in coloured
    assert b"\x1b[33m" in coloured


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["one"],
            "killick: name one step, two places, or another run; see killick time diff --help",
        ),
        (["one", "1", "2", "3"], "killick: name one step, two places, or another run"),
        (["one", "9"], "killick: one: there is no step 9; it has step 1 to 3"),
        (["one", "1", "8:before"], "killick: one: there is no step 8; it has step 1 to 3"),
        (["one", "tow"], "killick: tow: no run of that id, and no place in one; write 6, 6:before, @17, start or now"),
        (["one", "1:befor"], "killick: 1:befor: no run of that id, and no place in one"),
        (["onne", "1"], "killick: onne: no such run in killick.db; did you mean one?"),
        (["one", "1", "--at", "2"], "killick: --at is for two runs: killick time diff RUN_A RUN_B --at 6:after"),
        (["one", "two", "--at", "4"], "killick: one: there is no step 4; it has step 1 to 3"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_to_do(
    capsys: pytest.CaptureFixture[str], words: list[str], line: str
) -> None:
    told = said(capsys, *words, code=2)
    assert told.startswith(line)
    assert told.count("\n") == 1
