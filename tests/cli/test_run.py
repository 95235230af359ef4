"""`killick run` and `killick start`: from an input that somebody types to a result, a question, a failure or an id."""

from __future__ import annotations

import getpass
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import killick
from claims import call, move_in, on_terminal, open_office, plain_environment, run_killick
from killick.cli.main import main
from killick.model.events import RunPaused

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def office(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return move_in(tmp_path, monkeypatch)


# results ------------------------------------------------------------------------------------------


def test_a_result_goes_to_stdout_and_everything_else_to_stderr(office: Path, capsys: Capture) -> None:
    found = call(capsys, "run", "app.py:greet", "--input", "Ann", "--id", "g1")
    assert (found.code, found.out) == (0, "hello Ann\n")
    assert "made a new store: killick.db" in found.err
    assert "g1: completed" in found.err
    assert call(capsys, "run", "app.py:greet", "-i", "Bob", "--quiet").err == ""


def test_an_ended_run_gives_its_result_again_and_says_so(office: Path, capsys: Capture) -> None:
    main(["run", "app.py:greet", "-i", "Ann", "--id", "g1"])
    found = call(capsys, "run", "app.py:greet", "--id", "g1")
    assert (found.code, found.out) == (0, "hello Ann\n")
    assert found.err == "g1: ended earlier; this is its recorded outcome\n"


def test_json_is_one_document_whatever_came_of_it(office: Path, capsys: Capture) -> None:
    found = call(capsys, "run", "app.py:greet", "-i", "Ann", "--id", "g1", "--json")
    assert json.loads(found.out) == {"run": "g1", "status": "completed", "result": "hello Ann"}
    found = call(capsys, "run", "app.py:review", "-i", '{"id": 17}', "--id", "claim_17", "--json")
    waiting = json.loads(found.out)
    assert (found.code, waiting["status"], waiting["waits"][0]["id"]) == (3, "waiting", "claim_17:9")
    assert "killick answer claim_17:9 approve" in waiting["waits"][0]["commands"]
    Path("bank-closed").touch()
    found = call(capsys, "run", "app.py:pay_out", "-i", "13", "--id", "p1", "--json")
    failed = json.loads(found.out)
    assert (found.code, failed["status"], failed["run"]) == (1, "failed", "p1")
    assert failed["failure"]["errors"][0]["message"] == "step 1 (pay): killick.errors.NotDone: the bank is closed"


def test_a_result_that_is_no_text_is_readable_json(office: Path, capsys: Capture) -> None:
    main(["start", "app.py:listen", "--id", "l1"])
    main(["message", "send", "l1", "paid", '{"amount": 80}'])
    found = call(capsys, "run", "app.py:listen", "--id", "l1")
    assert (found.code, json.loads(found.out)) == (0, {"amount": 80})


# input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("agent", "text", "result"),
    [
        ("greet", "Ann", "hello Ann"),
        ("greet", '"Ann"', "hello Ann"),
        ("greet", "42", "hello 42"),
        ("greet", "NaN", "hello NaN"),
        ("greet", "@@ann", "hello @ann"),
        ("greet", "[urgent] Ann", "hello [urgent] Ann"),
        ("greet", "@name.txt", "hello from a file"),
        ("greet", "-", "hello from stdin"),
        ("pay_out", "13", "paid 13 to Ann"),
    ],
)
def test_an_input_is_json_or_text_or_a_file_or_stdin(
    office: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, agent: str, text: str, result: str
) -> None:
    (office / "name.txt").write_text("from a file\n", encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.StringIO("from stdin\n"))
    assert call(capsys, "run", f"app.py:{agent}", "-i", text).out == f"{result}\n"


def test_dates_are_written_as_text(office: Path) -> None:
    assert main(["run", "app.py:review", "-i", '{"id": 17, "on": "2026-11-14"}', "--id", "c1"]) == 3
    with killick.open("killick.db") as kd:
        assert str(kd.state("c1").input["on"]) == "2026-11-14"


# waiting, failing, going on -----------------------------------------------------------------------


def test_a_run_that_waits_ends_with_3_and_says_what_to_type(office: Path, capsys: Capture) -> None:
    found = call(capsys, "run", "app.py:review", "-i", "@claim.json", "--id", "claim_20")
    assert (found.code, found.out) == (3, "")
    assert "claim_20:9  Pay 400 to Cyd?" in found.err
    assert "asked of managers" in found.err
    assert "killick answer claim_20:9 approve  (or reject," in found.err
    assert "when that is done: killick run app.py:review --id claim_20" in found.err


@pytest.mark.slow
def test_what_it_says_to_type_works_as_it_stands(office: Path, capsys: Capture) -> None:
    command = ["run", "app.py:review", "-i", '{"id": 17}', "--id", "claim 17", "--store", "other.db"]
    found = call(capsys, *command)
    answer = next(line for line in found.err.splitlines() if "killick answer" in line).split("  (or")[0].strip()
    again = found.err.rpartition("when that is done: ")[2].strip()
    for line, result in ((answer, "claim 17:9  approve\n"), (again, "paid 80 to Ann\n")):
        done = subprocess.run(
            line.replace("killick", f"{sys.executable} -m killick", 1), shell=True, cwd=office, env=plain_environment(),
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (0, result), done.stderr


def test_a_message_that_is_waited_for_is_named_with_its_command(office: Path, capsys: Capture) -> None:
    found = call(capsys, "run", "app.py:listen", "--id", "l1")
    assert found.code == 3
    assert "l1:1  waits for a message 'paid'" in found.err
    assert "killick message send l1 paid BODY" in found.err


def test_a_failed_run_ends_with_1_and_one_line_and_goes_on_when_resumed(office: Path, capsys: Capture) -> None:
    (office / "bank-closed").touch()
    found = call(capsys, "run", "app.py:pay_out", "-q", "-i", "13", "--id", "p1")
    assert (found.code, found.out) == (1, "")
    assert found.err.splitlines()[-1] == (
        "killick: p1: failed at step 1 (pay): NotDone: the bank is closed; `killick show p1` says why, "
        "`killick resume p1` tries again"
    )
    (office / "bank-closed").unlink()
    resumed = call(capsys, "resume", "p1").out
    assert resumed == "p1  rewound to step 1, which failed; continues here\npaid 13 to Ann\n"


def test_a_run_goes_on_by_its_id_alone_where_the_app_is_known(office: Path, capsys: Capture) -> None:
    open_office()
    main(["answer", "claim_17", "approve"])
    (office / "pyproject.toml").write_text('[tool.killick]\napp = "app.py"\n', encoding="utf-8")
    (office / "deeper").mkdir()
    os.chdir(office / "deeper")
    assert call(capsys, "run", "--id", "claim_17", "--store", "../killick.db").out == "paid 80 to Ann\n"


@pytest.mark.slow
def test_a_run_finds_its_agent_in_the_one_file_here_that_declares_it(office: Path) -> None:
    assert run_killick("run", "app.py:listen", "--id", "l1", cwd=office).returncode == 3
    assert run_killick("run", "--id", "l1", cwd=office).returncode == 3
    (office / "other.py").write_text((office / "app.py").read_text(encoding="utf-8"), encoding="utf-8")
    done = run_killick("run", "--id", "l1", cwd=office)
    assert (done.returncode, done.stderr) == (
        2,
        "killick: l1: is a run of listen, whose code is not found here; name it: killick run app.py:listen --id l1\n",
    )


def test_a_paused_run_ends_with_3_and_names_resume(office: Path, capsys: Capture) -> None:
    open_office()
    found = call(capsys, "run", "app.py:review", "--id", "claim_19")
    assert (found.code, found.err) == (3, "killick: claim_19: is paused; `killick resume claim_19` continues it\n")


def test_a_run_is_new_unless_the_unfinished_one_is_asked_for(office: Path, capsys: Capture) -> None:
    main(["run", "app.py:listen"])
    found = call(capsys, "run", "app.py:listen", "--resume")
    assert "continues this run, which was not finished" in found.err
    with killick.open("killick.db") as kd:
        assert len(kd.list(agent="listen")) == 1
    assert call(capsys, "run", "app.py:listen").code == 3
    with killick.open("killick.db") as kd:
        assert len(kd.list(agent="listen")) == 2


def test_tags_and_priority_are_recorded(office: Path) -> None:
    main(["run", "app.py:listen", "--id", "l1", "--tag", "a", "--tag", "b", "--priority", "7"])
    with killick.open("killick.db") as kd:
        info = kd.info("l1")
    assert (info.tags, info.priority) == (("a", "b"), 7)


# start --------------------------------------------------------------------------------------------


def test_start_prints_the_id_and_runs_nothing(office: Path, capsys: Capture) -> None:
    found = call(capsys, "start", "app.py:review", "-i", "@claim.json", "--id", "claim_20")
    assert (found.code, found.out) == (0, "claim_20\n")
    assert "is queued for a worker; to run it here: killick run app.py:review --id claim_20" in found.err
    again = call(capsys, "start", "app.py:review", "-i", "@claim.json", "--id", "claim_20", "--json")
    assert json.loads(again.out) == {
        "run": "claim_20", "agent": "review", "status": "queued", "created": False,
    }  # fmt: skip
    made = call(capsys, "start", "app.py:greet", "-i", "Ann").out.strip()
    assert made.startswith("greet")
    assert call(capsys, "run", "app.py:greet", "--id", made).out == "hello Ann\n"


# on a terminal ------------------------------------------------------------------------------------

KILLICK = [sys.executable, "-m", "killick"]


def test_on_a_terminal_steps_are_shown_and_questions_are_asked_in_line(office: Path) -> None:
    command = [*KILLICK, "run", "app.py:review", "-i", '{"id": 17}', "--id", "claim_17"]
    code, seen = on_terminal(
        command,
        cwd=office,
        env=plain_environment(NO_COLOR="1"),
        types={"Enter: later": "what\n", "is none of": "app\n"},
    )
    assert code == 0, seen
    assert "✓ 1  note(" in seen
    assert "✓ 8  fetch_docs(" in seen
    assert "'what' is none of approve, reject, edit, respond" in seen
    assert "paid 80 to Ann" in seen
    order = [
        seen.index(part) for part in ("✓ 8", "Pay 80 to Ann?", "✓ 10  pay(", "paid 80 to Ann", "claim_17: completed")
    ]
    assert order == sorted(order)


@pytest.mark.slow
def test_on_a_terminal_nothing_is_an_answer_for_later(office: Path) -> None:
    command = [*KILLICK, "run", "app.py:doubt", "--id", "d1"]
    code, seen = on_terminal(command, cwd=office, env=plain_environment(NO_COLOR="1"), types={"Enter: later": "\n"})
    assert code == 3, seen
    assert "Did it happen?" in seen
    assert "killick answer d1:1 happened" in seen


# interrupted --------------------------------------------------------------------------------------

SLOW = """
import asyncio
from pathlib import Path

import killick


@killick.tool(effect="idempotent")
async def nap() -> None:
    Path("asleep").touch()
    while not Path("awake").exists():
        await asyncio.sleep(0.01)


@killick.agent
async def sleeper(run: killick.Run) -> str:
    await run.call(nap)
    await run.note("awake")
    return "rested"
"""


BLOCKING = SLOW.replace("async def nap", "def nap").replace("await asyncio", "time").replace("asyncio", "time")


@pytest.fixture
def sleeping(office: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """A run whose step has begun, and which has been interrupted once."""
    grace, source = getattr(request, "param", ("300s", SLOW))
    (office / "slow.py").write_text(source, encoding="utf-8")
    with subprocess.Popen(
        [*KILLICK, "run", "slow.py", "--id", "s1", "--grace", grace], cwd=office, env=plain_environment(), text=True,
        stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        while not (office / "asleep").exists() and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        for line in process.stderr:
            if "pauses when its open step has ended" in line:
                break
        yield process
        process.kill()


def until_paused(office: Path) -> None:
    with killick.open(str(office / "killick.db")) as kd:
        while not any(isinstance(each.event, RunPaused) for each in kd.events("s1")):
            time.sleep(0.01)


@pytest.mark.slow
def test_an_interrupt_lets_the_open_step_end_and_pauses_the_run(
    office: Path, sleeping: subprocess.Popen[str]
) -> None:  # fmt: skip
    until_paused(office)
    (office / "awake").touch()
    _, err = sleeping.communicate(timeout=300)
    assert sleeping.returncode == 130
    assert err.splitlines()[-1] == "killick: s1: paused between two steps; to continue: killick resume s1"
    assert [each["status"] for each in json.loads(run_killick("ps", "--json", cwd=office).stdout)] == ["paused"]
    with killick.open(str(office / "killick.db")) as kd:
        assert [step.status for step in kd.state("s1").fold.steps] == ["done"]
    done = run_killick("resume", "s1", cwd=office)
    assert (done.returncode, done.stdout) == (0, "s1  resumed; continues here\nrested\n")


@pytest.mark.slow
@pytest.mark.parametrize("sleeping", [("300s", SLOW), ("300s", BLOCKING)], indirect=True, ids=["async", "blocking"])
def test_a_second_interrupt_stops_inside_the_step(office: Path, sleeping: subprocess.Popen[str]) -> None:
    until_paused(office)
    sleeping.send_signal(signal.SIGINT)
    _, err = sleeping.communicate(timeout=300)
    assert sleeping.returncode == 130
    assert err.splitlines()[-1] == "killick: s1: stopped inside a step; to continue: killick resume s1"
    assert not (office / "awake").exists()
    assert " paused  step 1 nap  a person to resume it (interrupted by Ctrl-C)" in run_killick("ps", cwd=office).stdout
    (office / "awake").touch()
    assert run_killick("resume", "s1", cwd=office).stdout.splitlines()[-1] == "rested"


@pytest.mark.slow
@pytest.mark.parametrize("sleeping", [("1ms", SLOW)], indirect=True)
def test_the_end_of_the_grace_period_stops_inside_the_step(office: Path, sleeping: subprocess.Popen[str]) -> None:
    _, err = sleeping.communicate(timeout=300)
    assert (sleeping.returncode, (office / "awake").exists()) == (130, False)
    assert err.splitlines()[-1] == "killick: s1: stopped inside a step; to continue: killick resume s1"
    # The period may end before the run has recorded that it is paused.
    [line] = json.loads(run_killick("ps", "--json", cwd=office).stdout)
    assert line["status"] in ("paused", "abandoned")
    (office / "awake").touch()
    assert run_killick("resume", "s1", cwd=office).stdout.splitlines()[-1] == "rested"


@pytest.mark.slow
def test_the_end_of_the_grace_period_interrupts_the_open_steps_of_a_worker(office: Path) -> None:
    (office / "slow.py").write_text(SLOW, encoding="utf-8")
    run_killick("start", "slow.py", "--id", "s1", cwd=office)
    command = [*KILLICK, "worker", "slow.py", "--grace", "1ms"]
    with subprocess.Popen(command, cwd=office, env=plain_environment(), text=True, stdout=subprocess.PIPE) as worker:
        while not (office / "asleep").exists() and worker.poll() is None:
            time.sleep(0.01)
        worker.send_signal(signal.SIGTERM)
        out, _ = worker.communicate(timeout=300)
    assert (worker.returncode, out.splitlines()[-1].split()[1]) == (0, "stopped")
    assert not (office / "awake").exists()


@pytest.mark.parametrize("command", ["run", "start"])
def test_who_starts_a_run_is_on_record(office: Path, capsys: Capture, command: str) -> None:
    call(capsys, command, "app.py:greet", "-i", "Ann", "--id", "g1", "--by", "mia")
    call(capsys, command, "app.py:greet", "-i", "Ann", "--id", "g2")
    with killick.open("killick.db") as kd:
        assert kd.state("g1").fold.facts.starters == ("mia",)
        assert kd.state("g2").fold.facts.starters == (getpass.getuser(),)
