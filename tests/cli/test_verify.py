"""The commands that look after the record: they prove it, hand it on, and say what to do next."""

from __future__ import annotations

import json
import os
import pty
import re
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import killick
from families import fork_of
from killick.archive.export import read
from killick.cli.main import main
from killick.log import Log, verify
from killick.model import events as e
from killick.testing import replay

DAY = 86_400
Capture = pytest.CaptureFixture[str]


@killick.tool(effect="at_most_once")
async def keeping_pay(amount: int, note: str) -> str:
    return f"paid {amount}: {note}"


@killick.agent
async def keeping_agent(run: killick.Run, n: int) -> str:
    paid = await run.call(keeping_pay, n, f"{n} secret " * 200)
    if n % 2:
        await run.ask("Right?")
    return paid[:6]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a store: `even` ended 40 days ago, `late` today, `odd` waits."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    clock = killick.clock.ManualClock(killick.clock.SystemClock().now_us() - 40 * DAY * 1_000_000)
    with killick.open("killick.db", clock=clock) as kd:
        kd.run(keeping_agent, 4, id="even")
        with pytest.raises(killick.RunWaiting):
            kd.run(keeping_agent, 3, id="odd")
    with killick.open("killick.db") as kd:
        kd.run(keeping_agent, 6, id="late")
    return tmp_path


def did(capsys: Capture, *words: str, code: int = 0) -> tuple[str, str]:
    capsys.readouterr()
    assert main(list(words)) == code, capsys.readouterr()
    out, err = capsys.readouterr()
    return out, err


def data(capsys: Capture, *words: str, code: int = 0) -> Any:
    out, err = did(capsys, *words, "--json", code=code)
    assert err == ""
    return json.loads(out)


def tamper(run: str, seq: int) -> None:
    db = sqlite3.connect("killick.db")
    with db:
        where = f"id = (SELECT (number << 32) + {seq} FROM heads WHERE run = '{run}')"
        db.execute(
            f"UPDATE events SET body = CAST(replace(CAST(body AS TEXT), '\"at\"', '\"ta\"') AS BLOB) WHERE {where}"
        )
    db.close()


def holds(path: str = "killick.db") -> bool:
    with killick.open(path) as kd:
        return kd.store.verify().holds


# verify -------------------------------------------------------------------------------------------


def test_a_record_that_holds_is_said_to_hold(capsys: Capture) -> None:
    out, err = did(capsys, "store", "verify")
    assert out.startswith("✓ the record is intact: 3 runs, ")
    assert err == "", "nothing but the outcome goes into a pipe"
    out, _ = did(capsys, "store", "verify", "odd")
    assert out.startswith("✓ the record is intact: 1 run, ")
    assert data(capsys, "store", "verify")["holds"] is True


def test_every_broken_run_is_named_with_its_first_break_and_the_exit_code_says_so(capsys: Capture) -> None:
    tamper("even", 3)
    tamper("late", 4)
    found = data(capsys, "store", "verify", code=1)
    assert [(each["run"], each["seq"]) for each in found["broken"]] == [("even", 3), ("late", 4)]
    assert found["holds"] is False
    out, _ = did(capsys, "store", "verify", code=1)
    assert "✗ even  breaks at event 3: " in out
    assert "    killick store repair late" in out
    assert "2 runs of 3 fail verification" in out.splitlines()
    assert (found["whole"], found["exportable"], found["lost"]) == (1, [], ["even", "late"])
    assert out.splitlines()[-1] == "    killick store repair --from BACKUP"
    assert did(capsys, "store", "verify", "odd")[0].startswith("✓")
    assert "1 run of 1 fails verification" in did(capsys, "store", "verify", "even", code=1)[0].splitlines()


def test_derived_data_that_was_wrong_is_said_to_be_rebuilt(capsys: Capture) -> None:
    db = sqlite3.connect("killick.db")
    with db:
        db.execute("UPDATE runs SET status = 'failed' WHERE number = (SELECT number FROM heads WHERE run = 'even')")
    db.close()
    out, _ = did(capsys, "store", "verify")
    assert "~ even  runs differed from the log: rebuilt" in out
    assert "✓ the record is intact" in out


def test_a_run_that_is_not_there_is_a_mistake(capsys: Capture) -> None:
    assert (
        did(capsys, "store", "verify", "evn", code=2)[1]
        == "killick: evn: no such run in killick.db; did you mean even?\n"
    )


@pytest.mark.slow
def test_a_terminal_sees_progress_and_the_outcome_stays_clean(here: Path) -> None:
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    done = subprocess.run(
        [sys.executable, "-m", "killick", "store", "verify"],
        cwd=here,
        env=env,
        stdout=subprocess.PIPE,
        stderr=theirs,
        check=True,
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            more = os.read(ours, 65_536)
        except OSError:
            break
        if not more:
            break
        shown += more
    os.close(ours)
    assert b"verifying" in shown
    assert done.stdout.decode().startswith("✓ the record is intact")
    assert done.stdout.count(b"\n") == 1


def test_a_file_is_proved_without_a_store(capsys: Capture, here: Path) -> None:
    did(capsys, "store", "export", "even", "-o", "even.killick")
    did(capsys, "store", "prune", "--older", "30d", "--to", "old.gz", "--yes")
    here.joinpath("killick.db").rename(here / "other.db")
    assert did(capsys, "store", "verify", "even.killick")[0].startswith("✓ the file is intact: 1 run, ")
    assert data(capsys, "store", "verify", "old.gz")["runs"] == 1
    packed = here.joinpath("old.gz").read_bytes()
    here.joinpath("old.gz").write_bytes(packed[:-20])
    assert did(capsys, "store", "verify", "old.gz", code=1)[0].startswith("✗ old.gz  was truncated or changed")
    here.joinpath("even.killick").write_text("{}")
    found = data(capsys, "store", "verify", "even.killick", code=1)
    assert (found["holds"], found["broken"]) == (False, "is not an export of a run")


# export -------------------------------------------------------------------------------------------


def test_a_run_is_exported_to_a_file_that_loads_and_replays(capsys: Capture) -> None:
    out, err = did(capsys, "store", "export", "even", "-o", "even.killick")
    assert out == ""
    assert err.startswith("even.killick: ")
    assert read("even.killick").header.run == "even"
    assert replay("even.killick", keeping_agent).result == "paid 4"


def test_without_a_file_it_goes_to_stdout(capsys: Capture) -> None:
    out, err = did(capsys, "store", "export", "odd")
    assert err == ""
    assert read(out.encode()).header.run == "odd"


def test_a_file_that_cannot_be_written_is_one_line(capsys: Capture) -> None:
    _, err = did(capsys, "store", "export", "odd", "-o", "no/such/folder/x.killick", code=2)
    assert err.startswith(
        "killick: no/such/folder/x.killick: cannot be written (No such file or directory); name another"
    )


def test_a_broken_run_is_not_exported(capsys: Capture) -> None:
    tamper("even", 3)
    assert "even: broken at event 3" in did(capsys, "store", "export", "even", code=1)[1]


def test_commands_to_type_name_the_store_that_was_named(capsys: Capture) -> None:
    tamper("even", 3)
    os.rename("killick.db", "other.db")
    out, _ = did(capsys, "store", "verify", "--store", "other.db", code=1)
    assert "    killick store repair even --store other.db" in out


# repair -------------------------------------------------------------------------------------------


def test_a_repair_says_what_was_set_aside_and_that_the_run_waits(capsys: Capture) -> None:
    tamper("even", 3)
    out, _ = did(capsys, "store", "repair", "even", "--yes", "--reason", "disk fault")
    assert out.splitlines()[0].startswith("✓ even  kept events up to 2, set aside ")
    assert "? keeping_pay at step 1 may have happened" in out
    assert "It waits for a person now." in out
    assert holds()
    with killick.open("killick.db") as kd:
        assert kd.info("even").status == "waiting"
        repaired = kd.events("even")[-1]
        assert isinstance(repaired.event, e.RunRepaired)
        assert kd.runtime.log.data("even", repaired.seq)["because"] == "disk fault"


def test_a_repair_asks_first_and_only_looks_when_told_to(capsys: Capture) -> None:
    tamper("even", 4)
    before = Path("killick.db").read_bytes()
    _, err = did(capsys, "store", "repair", "even", code=2)
    assert "even is intact up to event 3; then: " in err
    assert "add --yes" in err
    assert "even is intact up to event 3; then: " in did(capsys, "store", "repair", "even", "--dry-run")[0]
    assert data(capsys, "store", "repair", "even", "--dry-run")["kept"] == 3
    assert Path("killick.db").read_bytes() == before


def test_a_run_that_holds_needs_no_repair(capsys: Capture) -> None:
    assert "even: its log is intact; there is nothing to repair" in did(capsys, "store", "repair", "even", code=2)[1]
    with killick.open("killick.db") as kd:
        kd.runtime.store.quarantine("even", "by mistake")
    assert "it left quarantine" in did(capsys, "store", "repair", "even")[0]


# erase --------------------------------------------------------------------------------------------


def test_what_a_step_was_given_and_returned_goes_and_the_record_holds(capsys: Capture) -> None:
    out, _ = did(capsys, "store", "erase", "even", "--step", "1", "--reason", "asked for", "--yes")
    assert out.startswith("✓ erased the values of 2 events: @")
    with killick.open("killick.db") as kd:
        assert kd.store.verify().holds
        assert b"4 secret" not in kd.store.export("even")
        erased = kd.events("even")[-1].event
        assert isinstance(erased, e.ValueErasedOnPurpose)
        assert erased.reason == "asked for"
    assert did(capsys, "store", "verify")[0].rstrip().endswith("erased on purpose")
    _, err = did(capsys, "store", "erase", "even", "--step", "1", "--reason", "again", "--yes", code=2)
    assert "erased already" in err


def test_one_event_can_be_erased(capsys: Capture) -> None:
    with killick.open("killick.db") as kd:
        seq = next(r.seq for r in kd.events("late") if isinstance(r.event, e.AttemptEnded))
    found = data(capsys, "store", "erase", "late", "--seq", str(seq), "--reason", "x", "--yes")
    assert found["seqs"] == [seq]
    assert verify(Log(load_after(capsys, "late"))).holds


def load_after(capsys: Capture, run: str) -> Any:
    return read(did(capsys, "store", "export", run)[0].encode()).loaded()


def test_erasing_asks_first_and_says_what_else_goes(capsys: Capture) -> None:
    with killick.open("killick.db") as kd:
        kd.run(keeping_agent, 4, id="twin")
    _, err = did(capsys, "store", "erase", "even", "--step", "1", "--reason", "x", code=2)
    assert "Erase the values of 2 events" in err
    assert "Parts of them are in twin too, and go from there." in err
    _, err = did(capsys, "store", "erase", "odd", "--step", "1", "--reason", "x", code=2)
    assert "The run has not ended, and cannot pass them." in err
    found = data(capsys, "store", "erase", "even", "--step", "1", "--reason", "x", "--dry-run")
    assert found["shared_with"] == ["twin"]
    assert holds()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["even", "--reason", "x"], "killick: name what to erase: --step N or --seq N"),
        (["even", "--reason", "x", "--step", "1", "--seq", "2"], "killick: name what to erase: --step N or --seq N"),
        (["even", "--reason", "x", "--step", "9"], "killick: even: has no step 9; killick show even lists them"),
        (["even", "--reason", "x", "--seq", "999"], "killick: even: has no event 999"),
        (["even", "--reason", "x", "--seq", "2"], "killick: even: there are no values to erase there"),
        (["even", "--step", "1"], "killick: store erase: needs WHY; see killick store erase --help"),
        (
            ["fork", "--reason", "x", "--seq", "1"],
            "killick: fork: event 1 is of the run that it was forked from",
        ),
    ],
)
def test_a_mistaken_erasing_is_one_line_and_changes_nothing(capsys: Capture, words: list[str], line: str) -> None:
    with killick.open("killick.db") as kd:
        fork_of(kd.runtime.log, e.RunForked(at=1, run="fork", parent="even", cut=3, generation=1))
    _, err = did(capsys, "store", "erase", *words, code=2)
    assert err.startswith(line)
    assert err.count("\n") == 1
    assert holds()


def test_the_group_lists_its_commands(capsys: Capture) -> None:
    out, _ = did(capsys, "store")
    assert all(name in out for name in ("doctor", "repair", "prune", "erase"))
    assert "no such command" in did(capsys, "store", "polish", code=2)[1]


def test_a_long_verification_says_on_stderr_how_far_it_is_where_that_is_no_terminal(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("killick.cli.progress.REMARK_SECONDS", 0.0)
    out, err = did(capsys, "store", "verify")
    assert out.startswith("✓ the record is intact: 3 runs, ")
    assert re.search(r"^verifying: \d+ of \d+$", err, re.MULTILINE)
