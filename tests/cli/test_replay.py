"""`killick time replay`: what it says step by step, how it ends, and the debugger inside the agent's own code."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from claims import call, on_terminal, plain_environment, run_killick

APP = """
from pathlib import Path

import killick


@killick.tool(effect="reads")
async def fetch(claim: int) -> dict:
    return {"claim": claim, "amount": 1250 if not Path("other").exists() else 990}


@killick.tool(effect="reads")
def double(n: int) -> int:
    return n * 2


@killick.tool(effect="at_most_once")
async def pay(claim: int, amount: int) -> str:
    Path("bank").write_text(f"{amount}\\n")
    return f"payment {claim}/{amount}"


async def chat(messages: list) -> dict:
    return {"role": "assistant", "content": "auto"}


@killick.agent
async def review(run: killick.Run, claim: int) -> str:
    docs = await run.call(fetch, claim)
    reply = await run.model(chat, messages=["Who decides?"])
    route = await run.decided("Who decides?", reply["content"], options=["auto", "manager"])
    await run.update(route=route)
    both = await run.gather(run.call(double, 1), branch(run, 2))
    paid = await run.call(pay, claim, docs["amount"])
    total = sum(both)
    return f"{paid} {total}"


async def branch(run: killick.Run, number: int) -> int:
    doubled = await run.call(double, number)
    again = await run.call(double, doubled)
    return again


@killick.agent
def blocking(run: killick.SyncRun, claim: int) -> str:
    docs = run.call(fetch, claim)
    amount = docs["amount"]
    run.update(seen=amount)
    one, two = run.gather(lambda: run.call(double, 1), lambda: helper(run, amount))
    paid = run.call(pay, claim, amount)
    return paid + str(one + two)


@killick.tool
async def send(to: str) -> str:
    raise killick.NotDone("the mailbox is full")


@killick.agent
async def below(run: killick.Run, claim: int) -> int:
    return claim * 2


@killick.agent
async def mixed(run: killick.Run, claim: int) -> str:
    child = await run.spawn(below, claim)
    got = await child.result()
    try:
        await run.call(send, "ann")
    except killick.StepFailed:
        got += 1
    answer = await run.ask("Right?")
    await run.sleep(0)
    return f"{got} {answer.value}"


def helper(run: killick.SyncRun, number: int) -> int:
    inside = run.call(double, number)
    return inside
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """A folder with an app and two runs that have ended."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("COLUMNS", "110")
    monkeypatch.delenv("KILLICK_STORE", raising=False)
    write()
    for agent, run in (("review", "c17"), ("blocking", "b17")):
        assert call(capsys, "run", f"app.py:{agent}", "-q", "-i", "17", "--id", run).code == 0
    Path("bank").unlink()
    return tmp_path


def write(*changes: tuple[str, str]) -> None:
    text = APP
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    Path("app.py").write_text(text, encoding="utf-8")
    sys.modules.pop("app", None)


def line_of(text: str) -> int:
    """The line of the app that has a text."""
    return next(number for number, line in enumerate(Path("app.py").read_text().splitlines(), 1) if text in line)


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> list[str]:
    """What a command prints, in a process that meets the app as it is now."""
    found = call(capsys, "time", "replay", *words, "--agent", f"app.py:{'blocking' if 'b17' in words[0] else 'review'}")
    assert found.code == code, found
    return [*found.out.splitlines(), *found.err.splitlines()]


# what it says -------------------------------------------------------------------------------------


def test_code_that_agrees_is_told_step_by_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "c17") == [
        "c17  review, 8 steps on record, completed",
        '  ✓ 1     fetch                {"claim": 17, "amount": 1250}',
        '  ✓ 2     chat                 {"role": "assistant", "content": "auto"}',
        '  ✓ 3     decision             "auto"',
        "  ✓ 4.1.1 double               2",
        "  ✓ 4.2.1 double               4",
        "  ✓ 4.2.2 double               8",
        "  ✓ 4     gather               ",
        '  ✓ 5     pay                  "payment 17/1250"',
        "",
        "✓ agrees: the code took 8 steps again and came to the same result; nothing was called",
    ]
    assert said(capsys, "b17")[-1].startswith("✓ agrees: the code took 5 steps again")
    assert not Path("bank").exists()


def test_a_step_is_told_with_its_error_or_its_result(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "run", "app.py:mixed", "-q", "-i", "17", "--id", "m").code == 3
    assert call(capsys, "time", "replay", "m", "--agent", "app.py:mixed").out.splitlines()[-1] == (
        "✓ agrees: the code took 3 steps again and is waiting where the record ends; nothing was called"
    )
    assert call(capsys, "answer", "m", "respond", "--value", "yes").code == 0
    assert call(capsys, "run", "app.py:mixed", "-q", "--id", "m").code == 0
    assert call(capsys, "time", "replay", "m", "--agent", "app.py:mixed").out.splitlines()[1:6] == [
        "  ✓ 1     below                ",
        '  ✓ 2     m/1                  {"status": "completed", "result": 34, "failure": null}',
        "  ✗ 3     send                 killick.errors.NotDone: the mailbox is full",
        '  ✓ 4     ask                  {"kind": "respond", "value": "yes"}',
        "  ✓ 5     sleep                ",
    ]


def test_code_that_parts_is_told_where_and_why_and_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    write(('docs["amount"])\n    total', 'docs["amount"] + 1)\n    total'), ('Who decides?"])', 'Who decides now?"])'))
    lines = said(capsys, "c17", code=1)
    assert '          ~ drifts: messages[0]: "Who decides?" is now "Who decides now?"' in lines
    assert lines[-1] == (
        "✗ diverged at step 5: the log has tool pay(claim=17, amount=1250), the code has tool "
        "pay(claim=17, amount=1251); nothing was called"
    )
    write(('return f"{paid} {total}"', 'return f"{paid}, {total}"'))
    assert said(capsys, "c17", code=1)[-1] == (
        '✗ diverged: the record returned "payment 17/1250 10", the code gives "payment 17/1250, 10"; nothing was called'
    )


def test_stray_io_parts_with_file_and_line(capsys: pytest.CaptureFixture[str]) -> None:
    write(("    total = sum(both)\n", "    total = sum(both)\n    Path('bank').write_text('stray')\n"))
    line = said(capsys, "c17", code=1)[-1]
    assert line.startswith("✗ diverged: the code does unrecorded I/O: ")
    assert f"app.py:{line_of('stray')}: open('bank', 'w') outside of a step" in line
    assert not Path("bank").exists()


def test_an_unfinished_run_goes_on_beyond_its_record_by_name_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "time", "fork", "c17", "--at", "4:after", "--id", "f").code == 0
    assert said(capsys, "f")[-1] == (
        "→ continues beyond the record with step 5: tool pay(claim=17, amount=1250); nothing was called"
    )
    assert not Path("bank").exists()


def test_a_file_is_replayed_with_no_store(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "store", "export", "c17", "-o", "c17.killick").code == 0
    Path("killick.db").unlink()
    lines = said(capsys, "c17.killick")
    assert lines[0] == "c17  review, 8 steps on record, from c17.killick, completed"
    assert lines[-1].startswith("✓ agrees")


def test_it_stops_where_it_is_told_to(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "c17", "--to", "4.2.1")[-3:] == [
        "  ✓ 4.2.1 double               4", "",
        "■ stopped after step 4.2.1; the code was not run further, and nothing was called",
    ]  # fmt: skip
    assert said(capsys, "c17", "--to", "5:before")[-1].startswith("■ stopped before step 5;")
    assert "there is no step 9; it has step 1 to 5" in said(capsys, "c17", "--to", "9", code=2)[-1]


def test_the_same_for_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    found: dict[str, Any] = json.loads("\n".join(said(capsys, "c17", "--json")))
    assert (found["outcome"], found["status"], found["result"]) == ("agrees", "completed", "payment 17/1250 10")
    assert [step["step"] for step in found["played"]][:3] == ["1", "2", "3"]
    write(
        ('docs["amount"])\n    total', 'docs["amount"] + 1)\n    total'),
        ("    docs = await run.call", "    print(claim)\n    docs = await run.call"),
    )
    found = json.loads(call(capsys, "time", "replay", "c17", "--agent", "app.py:review", "--json").out)
    assert (found["outcome"], found["divergence"]["step"]) == ("diverged", "5")


@pytest.mark.slow
def test_the_agent_is_found_by_the_name_that_is_on_record_or_asked_for(here: Path) -> None:
    assert run_killick("time", "replay", "c17", cwd=here).returncode == 0
    Path("app.py").rename("elsewhere.txt")
    found = run_killick("time", "replay", "c17", cwd=here)
    assert found.returncode == 2
    assert found.stderr == "killick: c17: was a run of review; where is it? Name it: --agent app.py:review\n"
    assert "c71: no such run in killick.db; did you mean c17?" in run_killick("time", "replay", "c71", cwd=here).stderr


# the debugger -------------------------------------------------------------------------------------


def session(here: Path, run: str, step: str, types: dict[str, str], **more: str) -> str:
    """A replay with a debugger on a terminal: what is typed when something appears, and the whole screen."""
    command = ["killick", "time", "replay", run, "--break", step]
    code, screen = on_terminal(command, cwd=here, env=plain_environment(**more), types=types)
    assert code == 0, screen
    return screen


def test_the_debugger_stops_in_the_agents_own_frame_at_the_call(here: Path) -> None:
    screen = session(here, "c17", "5", {
        '-> paid = await run.call(pay, claim, docs["amount"])': "p docs, both\n",
        "({'claim': 17, 'amount': 1250}, (2, 8))": "n\n",
        "-> total = sum(both)": "p paid\n",
        "'payment 17/1250'": "c\n",
    })  # fmt: skip
    assert f"> {here}/app.py({line_of('paid = await')})review()" in screen
    assert "✓ agrees: the code took 8 steps again and came to the same result; nothing was called" in screen
    assert not Path("bank").exists()


@pytest.mark.slow
def test_in_a_branch_of_a_gather_it_stops_where_the_branch_is(here: Path) -> None:
    screen = session(here, "c17", "4.2.2", {
        "-> again = await run.call(double, doubled)": "p number, doubled\n",
        "(2, 4)": "n\n",
        "-> return again": "c\n",
    })  # fmt: skip
    assert f"({line_of('again = ')})branch()" in screen
    assert "✓ agrees" in screen


@pytest.mark.slow
def test_a_branch_that_is_a_bare_step_stops_where_it_is_gathered(here: Path) -> None:
    screen = session(here, "c17", "4.1.1", {
        "-> both = await run.gather": "p route, docs['amount']\n",
        "('auto', 1250)": "n\n",
        "-> paid = await": "p both\n",
        "(2, 8)": "c\n",
    })  # fmt: skip
    assert f"({line_of('both = ')})review()" in screen
    assert "✓ agrees" in screen


@pytest.mark.slow
def test_blocking_code_is_looked_at_in_its_own_thread(here: Path) -> None:
    screen = session(here, "b17", "3", {
        "-> paid = run.call(pay, claim, amount)": "p amount, one, two\n",
        "(1250, 2, 2500)": "n\n",
        "-> return paid + str(one + two)": "p paid\n",
        "'payment 17/1250'": "c\n",
    })  # fmt: skip
    assert "blocking()" in screen
    assert "✓ agrees" in screen


@pytest.mark.slow
def test_so_is_blocking_code_in_a_branch(here: Path) -> None:
    screen = session(here, "b17", "2.2.1", {
        "-> inside = run.call(double, number)": "p number\n",
        "\n1250": "n\n",
        "-> return inside": "p inside\n",
        "\n2500": "c\n",
    })  # fmt: skip
    assert "helper()" in screen
    assert "✓ agrees" in screen


@pytest.mark.gate(1)
@pytest.mark.parametrize(("run", "step", "line"), [("c17", "5", "-> paid = await"), ("b17", "3", "-> paid = run.call")])
@pytest.mark.parametrize("first", ["", "n\n"])
def test_whoever_leaves_the_debugger_leaves_the_replay(here: Path, run: str, step: str, line: str, first: str) -> None:
    after = "-> total" if run == "c17" else "-> return paid"
    screen = session(here, run, step, {line: first or "q\n", **({after: "q\n"} if first else {})})
    assert "■ stopped: the debugger was quit" in screen
    assert "nothing was called" in screen


@pytest.mark.slow
def test_another_debugger_is_called_at_the_same_place_with_the_same_variables(here: Path) -> None:
    (here / "watching.py").write_text(
        "import sys\n\ndef stop():\n    frame = sys._getframe(1)\n"
        "    print('LOOKING', frame.f_lineno, frame.f_code.co_filename, frame.f_locals['docs'])\n"
    )
    screen = session(here, "c17", "5", {}, PYTHONBREAKPOINT="watching.stop")
    assert f"LOOKING {line_of('paid = await')} {here}/app.py {{'claim': 17, 'amount': 1250}}" in screen
    assert "✓ agrees" in screen
    assert "LOOKING" not in session(here, "c17", "5", {}, PYTHONBREAKPOINT="0")


def test_a_step_that_the_code_never_comes_to_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, "c17", "--break", "6")
    assert lines[-1] == "the code never came to step 6, so the debugger had nowhere to stop"
