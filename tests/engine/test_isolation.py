"""A tool in a process of its own dies with the agent that called it, and so does what it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
DEADLINE_SECONDS = 300.0
Begin = Callable[[str], subprocess.Popen[str]]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Makes agents that call a tool in a process of its own; whatever is left of them is killed in the end."""
    made: list[subprocess.Popen[str]] = []

    def begin(tool: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", "from engine.isolated_process import main; main()", tool]
        env = {**os.environ, "PYTHONPATH": str(TESTS)}
        made.append(subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True))
        return made[-1]

    yield begin
    for agent in made:
        agent.kill()
        agent.communicate()
    for told in (*tmp_path.glob("pid.*"), *tmp_path.glob("shell")):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(told.read_text()), signal.SIGKILL)


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def lives(process: int) -> bool:
    """Whether a process can still do anything: one that nobody reaped cannot."""
    try:
        return (Path("/proc") / str(process) / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]


def test_r15_a_payment_in_a_process_of_its_own_is_made_once_though_its_agent_was_killed(
    begin: Begin, tmp_path: Path
) -> None:
    agent = begin("pay")
    until((tmp_path / "pid.1").exists)
    agent.kill()
    agent.wait()
    orphan = int((tmp_path / "pid.1").read_text())
    resumed = begin("pay")
    until((tmp_path / "pid.2").exists)
    until(lambda: not lives(orphan))
    (tmp_path / "gate").touch()
    assert resumed.wait(DEADLINE_SECONDS) == 0
    assert (tmp_path / "book").read_text().split() == ["paid"]


def test_r15_what_such_a_tool_started_dies_with_it(begin: Begin, tmp_path: Path) -> None:
    agent = begin("pay_by_shell")
    until((tmp_path / "pid.1").exists)
    shell = int((tmp_path / "shell").read_text())
    assert lives(shell)
    agent.kill()
    agent.wait()
    until(lambda: not lives(shell) and not lives(int((tmp_path / "pid.1").read_text())))


def test_r15_what_a_tool_started_goes_too_when_only_the_tool_was_killed(begin: Begin, tmp_path: Path) -> None:
    begin("pay_by_shell")
    until((tmp_path / "pid.1").exists)
    os.kill(int((tmp_path / "pid.1").read_text()), signal.SIGKILL)
    until(lambda: not lives(int((tmp_path / "shell").read_text())))


def test_what_programs_of_an_isolated_tool_print_is_no_part_of_its_answer(begin: Begin) -> None:
    agent = begin("talk")
    assert agent.communicate(timeout=DEADLINE_SECONDS)[0].split() == ["answered"]
