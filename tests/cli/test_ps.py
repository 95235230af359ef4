"""`killick ps`: every run on a line with where it is, and filters that filter."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import killick
from killick.cli.commands import ps
from killick.cli.main import main
from killick.log.writer import Entry
from killick.model import events as e
from killick.store.sqlite.store import SqliteStore
from leasing import leased_by


@killick.agent(name="ps_ask")
async def ask(run: killick.Run, who: str) -> str:
    await run.plan(["look", "ask"])
    await run.at("ask")
    answer = await run.ask(f"Pay {who}?", to="managers")
    return str(answer.kind)


@killick.agent(name="ps_echo")
async def echo(run: killick.Run, text: str) -> str:
    return text


@killick.agent(name="ps_fail")
async def fail(run: killick.Run, text: str) -> str:
    raise LookupError(text)


@killick.tool(name="ps_nap", effect="idempotent", retry=killick.Retry(attempts=2, first=3600))
async def nap() -> None:
    raise ConnectionError("away")


@killick.agent(name="ps_nap")
async def napping(run: killick.Run, text: str) -> None:
    await run.call(nap)


DYING = """
import os, signal, sys, killick

@killick.tool(name="ps_dying")
async def dying() -> str:
    os.kill(os.getpid(), signal.SIGKILL)

@killick.agent(name="ps_dies")
async def dies(run: killick.Run, text: str) -> str:
    return await run.call(dying)

with killick.open(sys.argv[1]) as kd:
    kd.run(dies, "x", id="orphan_1")
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("ps") / "killick.db"
    with killick.open(str(path)) as kd:
        kd.run(echo, "hi", id="echo_1")
        with pytest.raises(killick.RunFailed):
            kd.run(fail, "no such account", id="fail_1")
        kd.start(echo, "x", id="queued_1", tags=["night"])
        kd.start(ask, "ann", id="ask_1")
        kd.advance("ask_1")
        kd.start(napping, "x", id="nap_1")
        kd.advance("nap_1")
        kd.start(echo, "x", id="paused_1")
        kd.pause("paused_1", by="ops")
    dead = subprocess.run([sys.executable, "-c", DYING, str(path)], check=False)
    assert dead.returncode == -signal.SIGKILL
    return path


@pytest.fixture(autouse=True)
def here(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(store.parent)
    monkeypatch.delenv("KILLICK_STORE", raising=False)
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture
def listed(capsys: pytest.CaptureFixture[str]) -> Any:
    def lines(*args: str) -> list[str]:
        assert main(["ps", *args]) == 0, capsys.readouterr().err
        return capsys.readouterr().out.splitlines()

    return lines


def runs(lines: list[str]) -> list[str]:
    return [line.split()[0] for line in lines[1:-1] if line[0] != " "]


ALL = ["orphan_1", "paused_1", "nap_1", "ask_1", "queued_1", "fail_1", "echo_1"]


def test_a_run_whose_code_diverged_is_a_code_mismatch_and_not_waiting(tmp_path: Path, listed: Any) -> None:
    url = str(tmp_path / "killick.db")
    with killick.open(url) as kd:
        kd.start(ask, "bob", id="ask_2")
        kd.advance("ask_2")
        log = leased_by("w", kd.runtime.log, "ask_2", seconds=30)
        differ = {"recorded": "wait answer", "found": "tool mail()", "builds": []}
        log.append(Entry(e.RunDiverged(at=kd.runtime.clock.now_us(), step="1"), differ))
        kd.runtime.store.release("ask_2", epoch=log.epoch)
    _, line, counts = listed("--store", url)
    assert line.startswith("ask_2  ps_ask  code mismatch  ask 2/2  fixed code: the log has wait answer")
    assert counts == "1 code mismatch"
    assert listed("--store", url, "--status", "waiting") == []
    assert runs(listed("--store", url, "-s", "code_mismatch")) == ["ask_2"]


def test_every_run_is_a_line_newest_first_and_the_last_line_counts_them(listed: Any) -> None:
    lines = listed()
    assert lines[0].split("  ")[0] == "RUN"
    assert runs(lines) == ALL
    counts = "1 queued · 2 waiting · 1 paused · 1 completed · 1 failed · 1 abandoned"
    assert lines[-1] == f"{counts}: its process died. Run `killick resume orphan_1`, or start a worker"


def test_a_line_says_where_a_run_is_and_what_it_waits_for(listed: Any) -> None:
    found = {line.split()[0]: " ".join(line.split()[1:]) for line in listed()}
    assert found["ask_1"].startswith("ps_ask waiting ask 2/2 managers: Pay ann? ")
    assert found["fail_1"].startswith("ps_fail failed LookupError: no such account ")
    assert found["orphan_1"].startswith("ps_dies abandoned step 1 ps_dying killick resume orphan_1 ")
    assert found["paused_1"].startswith("ps_echo paused a person to resume it ")
    assert found["nap_1"].startswith("ps_nap waiting step 1 ps_nap attempt 2 of ps_nap at ")


@pytest.mark.parametrize(
    ("args", "found"),
    [
        (["--failed"], ["fail_1"]),
        (["--status", "waiting"], ["nap_1", "ask_1"]),
        (["--status", "waiting", "--failed"], ["nap_1", "ask_1", "fail_1"]),
        (["-s", "queued,paused"], ["paused_1", "queued_1"]),
        (["-s", "queued", "-s", "completed"], ["queued_1", "echo_1"]),
        (["-s", "abandoned"], ["orphan_1"]),
        (["--agent", "ps_ask"], ["ask_1"]),
        (["--tag", "night"], ["queued_1"]),
        (["--since", "1h"], ALL),
        (["--limit", "2"], ALL[:2]),
        (["--limit", "2", "--all"], ALL),
    ],
)
def test_filters_filter(listed: Any, args: list[str], found: list[str]) -> None:
    assert runs(listed(*args)) == found


def test_what_is_left_out_is_counted(listed: Any) -> None:
    assert listed("--limit", "2")[-1].endswith("2 of 7 shown; --all shows the rest")


@pytest.mark.parametrize("columns", ["60", "80", "200"])
def test_the_table_fits_and_never_cuts_an_id_or_a_status(
    listed: Any, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    lines = listed()
    assert max(map(len, lines[:-1])) <= int(columns)
    assert runs(lines) == ALL
    assert all(any(status in line for status in ps.STATUSES) for line in lines[1:-1] if line[0] != " ")


def test_json_has_the_same_runs(listed: Any) -> None:
    found = json.loads("\n".join(listed("--json")))
    assert [each["id"] for each in found] == ALL
    [asked] = [each for each in found if each["id"] == "ask_1"]
    assert (asked["status"], asked["stage"], asked["stage_number"], asked["stages"]) == ("waiting", "ask", 2, 2)
    assert [each["text"] for each in asked["reasons"]] == ["managers: Pay ann?"]
    assert asked["since"] is not None
    assert found[0]["next"] == "killick resume orphan_1"


def test_nothing_found_says_what_there_is_or_what_to_do(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["ps", "--agent", "nobody"]) == 0
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("no run matches; there are runs of ps_ask, ps_dies,")
    assert main(["ps", "-s", "cancelled"]) == 0
    assert "no run matches; there are 1 " in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    assert main(["ps"]) == 2
    assert "no store here" in capsys.readouterr().err
    killick.open("killick.db").close()
    assert main(["ps"]) == 0
    assert "killick.db: no runs yet; `killick run app.py:agent` starts one" in capsys.readouterr().err


def test_a_status_that_there_is_not_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ps", "-s", "orphaned"]) == 2
    assert capsys.readouterr().err.startswith("killick: orphaned: no such status; there are queued, running,")


def test_a_broken_run_is_a_status_of_its_own_and_not_counted_as_completed(tmp_path: Path, listed: Any) -> None:
    url = str(tmp_path / "killick.db")
    with killick.open(url) as kd:
        for name in ("echo_2", "echo_3"):
            kd.run(echo, "hi", id=name)
        kd.runtime.store.quarantine("echo_2", "event 2 was changed")
    _, whole, broken, counts = listed("--store", url)
    assert whole.startswith("echo_3  ps_echo  completed         hi (")
    about = "its event log fails verification; killick store verify echo_2"
    assert broken.startswith(f"echo_2  ps_echo  broken            {about}")
    assert counts == "1 completed · 1 broken"
    assert listed("--store", url, "--limit", "1")[-1].startswith("1 completed · 1 broken   1 of 2 shown")
    assert runs(listed("--store", url, "-s", "broken")) == ["echo_2"]
    assert listed("--store", url, "-s", "completed")[-1] == "1 completed · 1 broken", "and none is said to be hidden"
    assert runs(listed("--store", url, "-s", "completed")) == ["echo_3"]
    assert runs(listed("--store", url, "-s", "completed,broken")) == ["echo_3", "echo_2"]


def test_a_result_and_how_long_it_took_are_shown(listed: Any) -> None:
    found = {line.split()[0]: " ".join(line.split()[1:]) for line in listed()}
    assert found["echo_1"].startswith("ps_echo completed hi (")
    assert " no such account (" in found["fail_1"]


def test_where_there_is_no_room_what_a_run_waits_for_is_on_a_line_of_its_own(
    tmp_path: Path, listed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    url, name = str(tmp_path / "killick.db"), "ask_0198f3c2-7f60-7d55-b2a1-9a55cc1a8f6e"
    with killick.open(url) as kd:
        kd.start(ask, "ann for the second invoice of October", id=name)
        kd.advance(name)
    heads, line, about, counts = listed("--store", url)
    assert heads.split() == ["RUN", "AGENT", "STATUS", "WHERE", "CHANGED"]
    assert line.startswith(f"{name}  ps_ask  waiting  ask 2/2")
    assert (about, counts) == ("    managers: Pay ann for the second invoice of October?", "1 waiting")


def test_only_logs_of_runs_that_are_shown_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with killick.open(str(tmp_path / "k.db"), durability="process") as kd:
        for number in range(40):
            kd.start(ask, str(number), id=f"ask_{number}")
            kd.advance(f"ask_{number}")
    read: set[str] = set()
    plainly = SqliteStore.read

    def counted(self: Any, run: str, **options: Any) -> Any:
        read.add(run)
        return plainly(self, run, **options)

    monkeypatch.setattr(SqliteStore, "read", counted)
    assert main(["ps", "--limit", "3", "--store", str(tmp_path / "k.db")]) == 0
    assert "3 of 40 shown" in capsys.readouterr().out
    assert read == {"ask_39", "ask_38", "ask_37"}


# runs of other programs, crashes, forks -----------------------------------------------------------

HOSTING = """
import asyncio, os, signal, sys, killick
from killick.definitions.open_tools import open_tool

async def look() -> int:
    return 1

async def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)

async def main() -> None:
    async with killick.open_async(sys.argv[1]) as kd:
        async with kd.host("idle_1", agent="framework") as host:
            await host.call(open_tool("look", effect="reads"), {}, key="a", fn=look)
        async with kd.host("killed_1", agent="framework") as host:
            await host.call(open_tool("die", effect="reads"), {}, key="a", fn=die)

asyncio.run(main())
"""


def test_a_run_of_another_program_names_the_program_as_what_continues_it(tmp_path: Path, listed: Any) -> None:
    url = str(tmp_path / "killick.db")
    dead = subprocess.run([sys.executable, "-c", HOSTING, url], check=False)
    assert dead.returncode == -signal.SIGKILL
    _, killed, idle, last = listed("--store", url)
    assert "abandoned" in killed
    assert "  call the same conversation from your program  " in killed
    assert "  idle: waits for your program's next call  " in idle
    assert last.endswith("its process died. Call the same conversation from your program")
    assert [each["next"] for each in json.loads("\n".join(listed("--store", url, "--json")))] == [None, None]


def test_the_time_of_the_next_try_comes_before_the_crash() -> None:
    about = ps.RunReason(kind="crash", text="crashed: its process died once", at_us=1_000_000)
    assert re.fullmatch(r"again at \d\d:\d\d:\d\d; crashed: its process died once", ps.about_text(about))


def test_a_fork_leaves_its_parents_result_in_the_list(tmp_path: Path, listed: Any) -> None:
    url = str(tmp_path / "killick.db")
    with killick.open(url) as kd:
        kd.run(echo, "PA-2211", id="b1")
        kd.fork("b1", at="start", id="b2")
    assert listed("--store", url)[2].split()[3:4] == ["PA-2211"]
