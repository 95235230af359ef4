"""The commands that act on runs: on those that are named, on many that fit, and stepping into one of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import killick
from claims import call, move_in, on_terminal, open_office, plain_environment, run_killick
from killick.cli.main import main

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def office(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    move_in(tmp_path, monkeypatch)
    open_office()
    return tmp_path


def statuses() -> dict[str, str]:
    with killick.open("killick.db") as kd:
        return {listed.id: listed.status for listed in kd.list()}


# many ---------------------------------------------------------------------------------------------


def test_each_run_is_reported_on_its_own_line_and_one_refusal_makes_the_exit_code_1(
    office: Path, capsys: Capture
) -> None:
    found = call(capsys, "pause", "claim_17", "done_1", "claim_19", "claim_18")
    assert found.code == 1
    assert found.out.splitlines() == [
        "claim_17  paused",
        "done_1    refused: it is over (completed)",
        "claim_19  refused: it is paused already",
        "claim_18  paused",
    ]
    assert statuses()["claim_18"] == "paused"


def test_a_run_that_does_not_exist_stops_everything_before_it_begins(office: Path) -> None:
    assert main(["pause", "claim_17", "claim_99"]) == 2
    assert statuses()["claim_17"] == "waiting"


@pytest.mark.parametrize(
    ("options", "runs"),
    [
        (["--status", "waiting"], ["claim_17", "claim_18"]),
        (["--status", "paused"], ["claim_19"]),
        (["--status", "waiting", "--status", "paused"], ["claim_17", "claim_18", "claim_19"]),
        (["--agent", "review"], ["claim_17", "claim_18", "claim_19"]),
        (["--all"], ["claim_17", "claim_18", "claim_19"]),
        (["--all", "--since", "1h"], ["claim_17", "claim_18", "claim_19"]),
    ],
)
def test_a_selection_finds_what_fits_oldest_first(
    office: Path, capsys: Capture, options: list[str], runs: list[str]
) -> None:
    found = call(capsys, "cancel", *options, "--dry-run", "--json")
    assert found.code == 0
    assert [outcome["run"] for outcome in json.loads(found.out)] == runs


def test_a_dry_run_changes_nothing(office: Path, capsys: Capture) -> None:
    before = statuses()
    found = call(capsys, "pause", "--all", "--dry-run")
    assert (found.code, found.out) == (
        0,
        "".join(
            f"{run}  stops at its next step and stays there until it is resumed.\n" for run in ("claim_17", "claim_18")
        ),
    )
    assert "nothing done" in found.err
    assert statuses() == before


def test_a_pipe_needs_yes_for_a_selection_and_not_for_names(office: Path, capsys: Capture) -> None:
    assert call(capsys, "pause", "--all").code == 2
    assert statuses()["claim_17"] == "waiting"
    assert call(capsys, "pause", "--all", "--yes").code == 0
    assert statuses()["claim_17"] == "paused"


@pytest.mark.slow
def test_a_terminal_is_asked_before_many_are_touched(office: Path) -> None:
    command = [sys.executable, "-m", "killick", "pause", "--status", "waiting"]
    question = "pause 2 runs (claim_17, claim_18)? [y/N]:"
    code, seen = on_terminal(command, cwd=office, env=plain_environment(), types={question: "n\n"})
    assert (code, "killick: nothing done" in seen) == (1, True)
    assert statuses()["claim_17"] == "waiting"
    code, seen = on_terminal(command, cwd=office, env=plain_environment(), types={question: "y\n"})
    assert code == 0
    assert statuses()["claim_17"] == "paused"


def test_json_says_of_each_what_was_done_or_why_not(office: Path, capsys: Capture) -> None:
    found = json.loads(call(capsys, "pause", "claim_17", "done_1", "--json").out)
    assert found == [
        {"run": "claim_17", "done": "paused", "refused": None, "dry_run": False},
        {"run": "done_1", "done": None, "refused": "it is over (completed)", "dry_run": False},
    ]


def test_a_selection_goes_through_every_page(office: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr("killick.cli.selection.PAGE", 2)
    for number in range(5):
        main(["start", "app.py:greet", "-i", "Ann", "--id", f"g{number}", "--tag", "batch"])
    found = call(capsys, "cancel", "--tag", "batch", "--yes")
    assert [line.split()[0] for line in found.out.splitlines()] == [f"g{number}" for number in range(5)]


# resume -------------------------------------------------------------------------------------------


def test_resume_does_what_each_run_needs_and_says_which(office: Path, capsys: Capture) -> None:
    found = call(capsys, "resume", "claim_19", "claim_16", "claim_17", "done_1")
    assert found.code == 1
    assert found.out.splitlines() == [
        "claim_19  resumed; to continue: killick run app.py:review --id claim_19",
        "claim_16  rewound to step 1, which failed; to continue: killick run app.py:pay_out --id claim_16",
        "claim_17  refused: it is waiting, and not held back; `killick inbox` shows how to answer",
        "done_1    refused: it is over (completed); start another",
    ]
    assert call(capsys, "run", "app.py:pay_out", "--id", "claim_16").out == "paid 13 to Ann\n"


def test_resume_of_a_due_run_says_which_code_takes_it(office: Path, capsys: Capture) -> None:
    call(capsys, "answer", "claim_17", "approve", "--by", "mia")
    found = call(capsys, "resume", "claim_17")
    assert "refused: it is due, and continues when a worker that declares review runs" in found.out
    assert 'declare it again, or give aliases=["review"] to its new name' in found.out


def test_resume_all_leaves_alone_what_needs_nothing(office: Path, capsys: Capture) -> None:
    found = call(capsys, "resume", "--all", "--dry-run")
    assert found.out.splitlines() == [
        "claim_19  continues where it was paused.",
        "claim_16  is rewound to before step 1 (pay), which failed, and makes a new attempt.",
    ]


def test_why_is_on_record(office: Path) -> None:
    main(["resume", "claim_19", "--because", "the bank is open", "--by", "mia"])
    with killick.open("killick.db") as kd:
        resumed = next(each for each in kd.events("claim_19") if type(each.event).__name__ == "RunResumed")
        assert kd.runtime.log.data("claim_19", resumed.seq) == {"because": "the bank is open"}
        assert resumed.event.by == "mia"  # type: ignore[attr-defined]


def test_a_run_whose_process_was_killed_is_resumed_and_a_live_one_is_not(office: Path, capsys: Capture) -> None:
    (office / "slow.py").write_text(
        "import asyncio\nfrom pathlib import Path\nimport killick\n"
        "@killick.tool(effect='idempotent')\nasync def nap_until_awake() -> None:\n    Path('asleep').touch()\n"
        "    while not Path('awake').exists():\n        await asyncio.sleep(0.01)\n"
        "@killick.agent\nasync def heavy_sleeper(run: killick.Run) -> str:\n"
        "    await run.call(nap_until_awake)\n    return 'rested'\n",
        encoding="utf-8",
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "killick", "run", "slow.py", "--id", "s1"], cwd=office, env=plain_environment(),
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    until = time.monotonic() + 300
    while not (office / "asleep").exists() and time.monotonic() < until:
        time.sleep(0.01)
    found = call(capsys, "resume", "s1")
    assert (found.code, found.out) == (1, "s1  refused: it is running, and not held back\n")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert "s1        is abandoned: its process died." in call(capsys, "resume", "--all", "--dry-run").out
    (office / "awake").touch()
    found = call(capsys, "resume", "s1")
    assert (found.code, found.out) == (0, "s1  taken over from a dead process; continues here\nrested\n")
    assert statuses()["s1"] == "completed"


def test_one_named_run_continues_here_and_ends_as_if_it_were_run(office: Path, capsys: Capture) -> None:
    found = call(capsys, "resume", "claim_16")
    assert (found.code, found.out) == (
        0,
        "claim_16  rewound to step 1, which failed; continues here\npaid 13 to Ann\n",
    )
    assert found.err.startswith("claim_16: completed, 1 step in ")
    found = call(capsys, "resume", "claim_19")
    assert (found.code, found.out) == (3, "claim_19  resumed; continues here\n")
    assert "killick answer claim_19:9 approve" in found.err


@pytest.mark.slow
def test_a_resumed_run_whose_code_is_not_here_is_queued_with_the_worker_to_start(office: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    found = run_killick("resume", "claim_16", "--store", "../killick.db", cwd=elsewhere)
    assert (found.returncode, found.stdout) == (
        0,
        "claim_16  rewound to step 1, which failed; queued: no live worker takes it; start one with the code of "
        "pay_out: killick worker APP.py --store ../killick.db\n",
    )
    assert statuses()["claim_16"] == "queued"
    (elsewhere / "app.py").write_text("import nosuch_library\n@agent\ndef review(run): ...\n", encoding="utf-8")
    found = run_killick("resume", "claim_19", "--store", "../killick.db", cwd=elsewhere)
    assert found.stdout.startswith(
        "claim_19  resumed; queued: no live worker takes it, and app.py: cannot be imported;"
    )


@pytest.mark.slow
def test_a_live_worker_continues_a_resumed_and_an_answered_run(
    office: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("killick.cli.live_worker.CLAIM_SECONDS", 300.0)
    (office / "slow.py").write_text(
        "import asyncio\nfrom pathlib import Path\nimport killick\n"
        "@killick.tool(effect='idempotent')\nasync def nap() -> None:\n"
        "    while not Path('awake').exists():\n        await asyncio.sleep(0.01)\n"
        "@killick.agent\nasync def waker(run: killick.Run) -> str:\n"
        "    if run.id == 'w3':\n        await run.ask('Ready?')\n    await run.call(nap)\n    return 'rested'\n",
        encoding="utf-8",
    )
    assert main(["run", "slow.py:waker", "--id", "w3", "-q"]) == 3
    for name in ("w1", "w2"):
        assert main(["start", "slow.py:waker", "--id", name]) == 0
    assert main(["pause", "w2"]) == 0
    command = [sys.executable, "-u", "-m", "killick", "worker", "slow.py"]
    with subprocess.Popen(command, cwd=office, env=plain_environment(), stdout=subprocess.PIPE, text=True) as worker:
        guard = threading.Timer(300, worker.kill)
        guard.start()
        assert worker.stdout is not None
        assert any("claimed" in line and "w1" in line for line in worker.stdout)
        found, answered = call(capsys, "resume", "w2"), call(capsys, "answer", "w3", "approve")
        (office / "awake").touch()
        worker.terminate()
        guard.cancel()
    assert (found.code, found.out) == (0, f"w2  resumed; process {worker.pid} continues it\n")
    assert (answered.code, answered.err) == (0, f"process {worker.pid} continues it\n")


def test_a_diverged_run_is_resumed_with_mended_code(office: Path, capsys: Capture) -> None:
    text = (office / "app.py").read_text(encoding="utf-8")
    changed = text.replace("await run.call(fetch_docs, claim.id)", "await run.call(pay, 1, 'Ann', 2)")
    (office / "app.py").write_text(changed, encoding="utf-8")
    sys.modules.pop("app", None)
    main(["answer", "claim_17", "approve"])
    found = call(capsys, "run", "app.py:review", "--id", "claim_17")
    assert found.code == 3
    assert "at step 8 the log has tool fetch_docs" in found.err
    assert found.err.count("\n") == 1
    assert "is tried again: its code and its record disagreed" in call(capsys, "resume", "claim_17", "--dry-run").out


# cancel -------------------------------------------------------------------------------------------


def test_a_cancelled_run_ends_when_it_is_run_next(office: Path, capsys: Capture) -> None:
    found = call(capsys, "cancel", "claim_17")
    assert found.out == "claim_17  cancelled when it is run next: killick run app.py:review --id claim_17\n"
    assert call(capsys, "cancel", "claim_17").out == "claim_17  refused: it is being cancelled already\n"
    assert call(capsys, "resume", "claim_17").out.startswith(
        "claim_17  refused: it is being cancelled, and ends when it is run next"
    )
    found = call(capsys, "run", "app.py:review", "--id", "claim_17")
    assert (found.code, found.err.count("\n")) == (1, 1)
    assert statuses()["claim_17"] == "cancelled"


# send, set ----------------------------------------------------------------------------------------


def test_a_message_with_an_id_counts_once(office: Path, capsys: Capture) -> None:
    main(["start", "app.py:listen", "--id", "l1"])
    for body in ("1", "2"):
        assert main(["message", "send", "l1", "paid", body, "--id", "m1"]) == 0
    assert call(capsys, "run", "app.py:listen", "--id", "l1").out == "1\n"


def test_set_changes_and_takes_out_entries_of_the_context(office: Path) -> None:
    assert main(["edit", "set", "claim_17", "route=manager", "limit=500", 'who={"name": "mia"}']) == 0
    assert main(["edit", "set", "claim_17", "limit=600", "--unset", "route"]) == 0
    with killick.open("killick.db") as kd:
        assert kd.state("claim_17").context.document == {"limit": 600, "who": {"name": "mia"}}


# stepping into one run ----------------------------------------------------------------------------


def test_set_with_a_version_that_is_not_there_any_more_shows_what_changed(office: Path, capsys: Capture) -> None:
    found = call(capsys, "edit", "set", "claim_17", "limit=500", "--because", "as agreed", "--by", "mia", "--json")
    told = json.loads(found.out)
    assert (told["names"], told["version"], told["done"]) == (["limit"], 1, "changed")
    found = call(capsys, "edit", "set", "claim_17", "limit=600", "--saw", "0")
    assert found.code == 2
    assert "the context changed since version 0 (limit by mia)" in found.err
    assert call(capsys, "edit", "set", "claim_17", "limit=600", "--saw", "1").code == 0
    assert call(capsys, "edit", "set", "claim_17", "saw=600").code == 2
    with killick.open("killick.db") as kd:
        assert kd.state("claim_17").context.document == {"limit": 600}


def test_override_answers_a_question_and_names_the_way_back_for_what_is_over(office: Path, capsys: Capture) -> None:
    found = call(capsys, "edit", "override", "claim_17", "9", "no", "--because", "too much", "--by", "mia")
    assert (found.code, found.err.strip()) == (
        0,
        "claim_17: step 9 is given this result; to continue: killick run app.py:review --id claim_17",
    )
    found = call(capsys, "edit", "override", "claim_18", "8", "{}")
    assert found.code == 2
    assert "is over (done); to change it, rewind the run (to 8:before)" in found.err
    assert call(capsys, "run", "app.py:review", "-q", "--id", "claim_17").out == "not paid: None\n"


def test_skip_takes_the_default_of_a_question(office: Path, capsys: Capture) -> None:
    found = call(capsys, "edit", "skip", "claim_18", "9", "--json")
    assert (found.code, json.loads(found.out)) == (
        0,
        {"run": "claim_18", "step": "9", "done": "step 9 is skipped"},
    )
    assert call(capsys, "run", "app.py:review", "-q", "--id", "claim_18").out == "not paid: None\n"


def test_retry_says_what_waits_instead(office: Path, capsys: Capture) -> None:
    found = call(capsys, "edit", "retry", "claim_17")
    assert (found.code, found.err) == (2, "killick: claim_17: no step waits for a backoff; the run is waiting\n")
    found = call(capsys, "edit", "retry", "claim_17", "9")
    assert "step 9 (ask) waits for no backoff; it is waiting for answer ask" in found.err


def test_notes_and_priorities_are_on_record_with_who(office: Path, capsys: Capture) -> None:
    assert call(capsys, "edit", "note", "claim_17", "called them", "--by", "mia").err.startswith("claim_17: noted")
    found = call(capsys, "edit", "priority", "claim_17", "7", "--because", "they wait", "--json")
    assert json.loads(found.out) == {"run": "claim_17", "priority": 7, "done": "prioritized"}
    shown = call(capsys, "show", "claim_17").out
    assert "called them" in shown
    with killick.open("killick.db") as kd:
        assert kd.info("claim_17").priority == 7


@pytest.mark.parametrize(
    "words",
    [["set", "done_1", "x=1"], ["override", "done_1", "1", "x"], ["skip", "done_1", "1"], ["retry", "done_1"],
     ["note", "done_1", "x"], ["priority", "done_1", "1"]],
    ids=lambda words: words[0],
)  # fmt: skip
def test_a_run_that_is_over_is_told_so_in_one_line(office: Path, capsys: Capture, words: list[str]) -> None:
    found, did = call(capsys, "edit", *words), "prioritize" if words[0] == "priority" else words[0]
    told = f"killick: done_1: the run is over (completed); {did} does nothing to it\n"
    assert (found.code, found.err) == (2, told)
