"""`killick store prune` says what can go and what stays, asks, and leaves a file that proves itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import killick
from families import fork_of
from killick.archive import bundle
from killick.cli.main import main
from killick.model import events as e

DAY = 86_400
Capture = pytest.CaptureFixture[str]


@killick.tool(effect="at_most_once")
async def prune_pay(amount: int, note: str) -> str:
    return f"paid {amount}: {note}"


@killick.agent
async def prune_agent(run: killick.Run, n: int) -> str:
    paid = await run.call(prune_pay, n, f"{n} is what is to be paid " * 200)
    if n % 2:
        await run.ask("Right?")
    return paid[:6]


@killick.agent
async def prune_parent(run: killick.Run, n: int) -> str:
    child = await run.spawn(prune_agent, 2, id="child")
    await child.result()
    await run.ask("Go on?")
    return "done"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a store: `even` ended 100 days ago, `late` today, `odd` waits."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    clock = killick.clock.ManualClock(killick.clock.SystemClock().now_us() - 100 * DAY * 1_000_000)
    with killick.open("killick.db", clock=clock) as kd:
        kd.run(prune_agent, 4, id="even")
        with pytest.raises(killick.RunWaiting):
            kd.run(prune_agent, 3, id="odd")
    with killick.open("killick.db") as kd:
        kd.run(prune_agent, 6, id="late")
    return tmp_path


def did(capsys: Capture, *words: str, code: int = 0) -> tuple[str, str]:
    capsys.readouterr()
    assert main(list(words)) == code, capsys.readouterr()
    out, err = capsys.readouterr()
    return out, err


def data(capsys: Capture, *words: str, code: int = 0) -> Any:
    out, err = did(capsys, "store", "prune", *words, "--json", code=code)
    assert err == ""
    return json.loads(out)


def holds() -> bool:
    with killick.open("killick.db") as kd:
        return kd.store.verify().holds


def test_old_runs_go_into_a_file_with_their_values_and_others_stay(capsys: Capture, here: Path) -> None:
    found = data(capsys, "--yes")
    assert found["runs"] == ["even"]
    assert found["values"] > 0
    [file] = here.glob("killick-pruned-*Z.jsonl.gz")
    assert (found["file"], found["size_bytes"]) == (file.name, file.stat().st_size)
    assert bundle.verify(file).events == found["events"]
    assert holds()
    with killick.open("killick.db") as kd:
        assert {listed.id for listed in kd.list()} == {"odd", "late"}
    found = data(capsys, "--yes")
    assert (found["runs"], found["file"]) == ([], None)


def test_what_went_and_how_to_prove_it_is_said(capsys: Capture) -> None:
    out, _ = did(capsys, "store", "prune", "--older", "0s", "--to", "all.gz", "--yes")
    lines = out.splitlines()
    assert lines[0].startswith("2 runs, with 10 events, ended before ")
    assert lines[1].startswith("  late  prune_agent, completed ")
    assert lines[2] == "  even  prune_agent, completed 100d ago"
    assert lines[3].startswith("✓ 2 runs, 10 events moved into all.gz (")
    assert lines[3].endswith(" values that nothing needed went too")
    assert lines[4] == "    killick store verify all.gz"
    assert "✓ nothing was moved" in did(capsys, "store", "prune", "--older", "0s", "--yes")[0]


def test_a_dry_run_says_the_same_and_changes_nothing(capsys: Capture, here: Path) -> None:
    assert data(capsys, "--dry-run")["runs"] == ["even"]
    out, _ = did(capsys, "store", "prune", "--dry-run")
    assert out.splitlines()[0].startswith("1 run, with 5 events, ended before ")
    assert "moved" not in out
    _, err = did(capsys, "store", "prune", "--to", "x.gz", code=2)
    assert "Move 1 run into x.gz, and out of the store? There is no terminal to confirm at" in err
    with killick.open("killick.db") as kd:
        assert len(kd.list()) == 3
    assert not list(here.glob("*.gz*"))


def test_a_run_that_others_stand_on_or_look_at_stays_and_says_why(capsys: Capture) -> None:
    with killick.open("killick.db") as kd:
        fork_of(kd.runtime.log, e.RunForked(at=1, run="fork", parent="even", cut=3, generation=1))
        with pytest.raises(killick.RunWaiting):
            kd.run(prune_parent, 1, id="parent")
    out, _ = did(capsys, "store", "prune", "--older", "0s", "--dry-run")
    assert "  stays: even  fork is a fork of it\n" in out
    found = data(capsys, "--older", "0s", "--yes")
    assert found["kept"] == {"even": "fork is a fork of it", "child": "its parent parent has not ended"}
    assert found["runs"] == ["late"]
    assert holds()


def test_runs_are_chosen_by_status_agent_and_day(capsys: Capture) -> None:
    assert data(capsys, "--status", "failed,cancelled", "--yes")["runs"] == []
    assert data(capsys, "--agent", "prune_parent", "--yes")["runs"] == []
    assert data(capsys, "--older", "2026-01-01", "--dry-run")["runs"] == []
    assert data(capsys, "--status", "completed", "--agent", "prune_agent", "--dry-run")["runs"] == ["even"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--older", "soon"], "'soon' is not a duration"),
        (
            ["--status", "running"],
            "running: is not the status of an ended run; give one of completed, failed, cancelled",
        ),
        (["--to", "killick.db"], "killick.db: exists, and is never overwritten; name another file"),
        (["--to", "no/such/x.gz"], "no/such/x.gz: cannot be written (No such file or directory); name another file"),
    ],
)
def test_a_mistake_is_one_line_and_changes_nothing(capsys: Capture, words: list[str], line: str) -> None:
    _, err = did(capsys, "store", "prune", *words, "--yes", code=2)
    assert line in err
    assert err.count("\n") == 1
    with killick.open("killick.db") as kd:
        assert len(kd.list()) == 3
