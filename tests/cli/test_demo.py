"""`killick demo`, run as people run it: the story holds, the folder can be gone on with, and nothing is left
running."""

from __future__ import annotations

import http.client
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from killick.cli import demo
from killick.cli.demo import calendar_api
from killick.cli.exit_codes import CommandFailed
from killick.cli.main import main
from killick.client.client import open as open_client
from killick.model.events import AttemptSettled, RunTaken, Started

pytestmark = pytest.mark.slow

ADDRESS = re.compile(r"127\.0\.0\.1:\d+")
PROCESS = re.compile(r"Process (\d+)")
Shown = tuple[Path, subprocess.CompletedProcess[str]]


def env(**more: str) -> dict[str, str]:
    """A plain environment, in which `killick` is this interpreter's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KILLICK_", "COLUMNS"))}
    return kept | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"} | more


def lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def answers(address: str) -> bool:
    link = http.client.HTTPConnection(address, timeout=300)
    try:
        link.request("GET", "/calendar")
        return link.getresponse().status == 200
    except ConnectionError:
        return False
    finally:
        link.close()


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    """The demo, once, in a pipe of 80 columns; and the folder that it was called in."""
    here = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "killick", "demo"]
    done = subprocess.run(
        command, cwd=here, env=env(COLUMNS="80"), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return here, done


def test_the_run_died_at_step_6_and_was_finished_by_another_process(shown: Shown) -> None:
    here, done = shown
    with open_client(str(here / "killick-demo" / "killick.db"), create=False) as kd:
        events = [recorded.event for recorded in kd.events(demo.RUN)]
        state = kd.state(demo.RUN)
        taken = [event for event in events if isinstance(event, RunTaken)]
        pids = [event.holder.partition("-")[0] for event in taken]
        assert pids == PROCESS.findall(done.stdout)
        assert len(set(pids)) == 2
        second = events.index(taken[1])
        assert [event.step for event in events[second:] if isinstance(event, Started)] == ["7", "8", "9"]
        settled = [event for event in events[second:] if isinstance(event, AttemptSettled)]
        assert [(event.step, event.settlement, event.by) for event in settled] == [("6", "happened", "reconcile")]
        assert state.status == "completed"
        assert state.position.committed == tuple("123456789")
        assert [(retry.step, retry.attempts) for retry in state.retries][:1] == [("2", 3)]
        assert kd.store.verify().holds


def test_what_the_api_answered_is_shown_word_for_word(shown: Shown) -> None:
    assert '503 {"error": "overloaded", "queue": 40}' in shown[1].stdout
    assert "ann 1, bob 1, cyd 1: one each" in shown[1].stdout


def test_a_pipe_gets_plain_text_that_fits(shown: Shown) -> None:
    out = shown[1].stdout
    assert "\x1b" not in out
    assert [line for line in out.splitlines() if len(line) > 80 or line != line.rstrip()] == []
    assert shown[1].stderr == ""


def test_nothing_is_left_running(shown: Shown) -> None:
    out = shown[1].stdout
    assert not any(lives(int(pid)) for pid in PROCESS.findall(out))
    assert not answers(ADDRESS.findall(out)[0])


def test_every_command_to_try_next_works_as_it_is_printed(shown: Shown) -> None:
    here, done = shown
    lines = done.stdout.partition("Try next\n")[2].splitlines()
    commands = [line.strip() for line in lines if line.strip()]
    assert [command.split()[0] for command in commands] == ["cd", *["killick"] * 5]
    serve = ["sh", "-c", f"{commands[0]} && exec {commands.pop()} --port 0"]
    with subprocess.Popen(serve, cwd=here, env=env(), stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert "http://127.0.0.1:" in server.stdout.readline()
        server.terminate()
    assert server.returncode == 0
    for command in commands[1:]:
        script = f"set -e; {commands[0]}; {command}"
        tried = subprocess.run(
            ["sh", "-c", script], cwd=here, env=env(), capture_output=True, text=True, timeout=300, check=False
        )
        assert tried.returncode == 0, f"{command}\n{tried.stdout}{tried.stderr}"
        assert tried.stdout


def test_the_agent_can_be_run_again_by_hand(shown: Shown) -> None:
    folder = shown[0] / "killick-demo"
    with demo.serving(folder) as address:
        link = http.client.HTTPConnection(address, timeout=0.1)
        link.request("POST", "/invites", '{"to": "eve"}')
        with pytest.raises(TimeoutError):  # the first invite is never answered: let it be this one
            link.getresponse()
        link.close()
        while not demo.calendar(address)["invites"]:
            time.sleep(0.01)
        command = [sys.executable, "-m", "killick", "run", "arrange", "--input", "a party", "--id", "party", "--quiet"]
        again = subprocess.run(
            command, cwd=folder, env=env(CALENDAR_API=address), capture_output=True, text=True, timeout=300, check=False
        )
        assert (again.returncode, again.stderr) == (0, "")
        assert again.stdout == "Done: 3 people meet Wed 15:00 in room 4.\n"
        assert [invite["to"] for invite in demo.calendar(address)["invites"]] == ["eve", *calendar_api.PEOPLE]


# the folder ---------------------------------------------------------------------------------------


def test_a_folder_that_no_demo_made_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "killick-demo").mkdir()
    (tmp_path / "killick-demo" / "thesis.txt").write_text("years of work")
    assert main(["demo"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == ("killick: killick-demo: thesis.txt is not the demo's; name another: killick demo FOLDER\n")
    assert [file.name for file in (tmp_path / "killick-demo").iterdir()] == ["thesis.txt"]


def test_a_file_where_the_folder_should_be_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["demo", str(tmp_path / "file")]) == 2
    assert "cannot be made" in capsys.readouterr().err


def test_a_demos_own_folder_is_made_anew_unless_a_file_was_changed(tmp_path: Path) -> None:
    demo.prepare(tmp_path / "there")
    (tmp_path / "there" / "killick.db").write_text("old")
    demo.prepare(tmp_path / "there")
    assert not (tmp_path / "there" / "killick.db").exists()
    assert (tmp_path / "there" / "meeting.py").read_text().startswith('"""Arrange a meeting')
    (tmp_path / "there" / "meeting.py").write_text("# mine\n")
    with pytest.raises(CommandFailed, match=r"meeting\.py is not the demo's; name another"):
        demo.prepare(tmp_path / "there")
    assert (tmp_path / "there" / "meeting.py").read_text() == "# mine\n"


# when it does not hold ----------------------------------------------------------------------------


def test_a_second_invite_at_the_server_ends_the_demo_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    really = demo.calendar

    def doubled(address: str) -> Any:
        seen = really(address)
        return {**seen, "invites": seen["invites"] * 2 if len(seen["invites"]) == 3 else seen["invites"]}

    monkeypatch.setattr(demo, "calendar", doubled)
    assert main(["demo", str(tmp_path / "there")]) == 1
    told = capsys.readouterr()
    assert told.err == "killick: the demo failed: one invite for each was to be out\n"
    assert not answers(ADDRESS.findall(told.out)[0])


@contextmanager
def playing(here: Path) -> Iterator[tuple[subprocess.Popen[str], str, int]]:
    """A demo that has begun: its process, where its API listens, and the pid of its agent."""
    command = [sys.executable, "-u", "-m", "killick", "demo"]
    process = subprocess.Popen(command, cwd=here, env=env(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        told = ""
        while not PROCESS.search(told):
            told += process.stdout.readline()
        process.send_signal(signal.SIGSTOP)  # it must not be over before it is interrupted
        yield process, ADDRESS.findall(told)[0], int(PROCESS.findall(told)[0])
    finally:
        process.kill()
        process.communicate()


def test_an_interrupt_leaves_no_process_behind(tmp_path: Path) -> None:
    with playing(tmp_path) as (process, address, agent):
        assert answers(address)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGCONT)
        _, said = process.communicate(timeout=300)
        assert (process.returncode, said) == (130, "killick: interrupted\n")
        assert not lives(agent)
        assert not answers(address)


def test_a_killed_demo_takes_its_server_along(tmp_path: Path) -> None:
    with playing(tmp_path) as (process, address, _):
        process.kill()
        process.communicate(timeout=300)
        while answers(address):
            time.sleep(0.01)
