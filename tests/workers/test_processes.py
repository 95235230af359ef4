"""`killick worker --processes N`: several processes that one command starts, restarts and stops."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from killick.cli.commands import worker as worker_command
from killick.cli.main import main

APP = """
import os

import killick


@killick.tool(effect="reads")
def process() -> int:
    return os.getpid()


@killick.agent
async def where(run):
    return await run.call(process)


@killick.tool(effect="at_most_once", limit=killick.Limit("mail", "5/h"), patience="2h")
def send() -> None:
    with open("sent", "a") as file:
        file.write("x")


@killick.agent
async def mail(run):
    await run.call(send)
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "app.py").write_text(APP)
    return tmp_path


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Starts `killick worker --processes`; the processes of one that is killed end by themselves."""
    started: list[subprocess.Popen[str]] = []

    def start(*flags: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "killick", "worker", "app.py", "--store", "killick.db", "--json", *flags]
        started.append(subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True, bufsize=1))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def lines(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    return (json.loads(line) for line in process.stdout)


def started_in(said: Iterator[dict[str, Any]], number: int) -> set[int]:
    """The process ids of the next workers that say they started."""
    found = (line["worker"] for line in said if line["what"] == "started")
    return {int(worker.partition("-")[0]) for worker in itertools.islice(found, number)}


def start_runs(folder: Path, agent: str, number: int) -> None:
    each = f"[kd.start(app.{agent}) for _ in range({number})]"
    code = f"import app, killick\nwith killick.open('killick.db') as kd: {each}"
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True)


@pytest.mark.slow
def test_several_processes_serve_until_idle_and_the_command_ends_with_them(folder: Path, start: Start) -> None:
    start_runs(folder, "where", 6)
    worker = start("--processes", "2", "--until-idle")
    said = list(lines(worker))
    assert worker.wait() == 0
    assert len({line["worker"] for line in said if line["what"] == "stopped"}) == 2
    assert len({line["run"] for line in said if line["what"] == "completed"}) == 6


@pytest.mark.slow
def test_processes_share_a_rate_limit(folder: Path, start: Start) -> None:
    start_runs(folder, "mail", 12)
    assert start("--processes", "2", "--until-idle").wait() == 0
    assert (folder / "sent").read_text() == "x" * 5


@pytest.mark.slow
def test_a_process_that_died_is_started_again_and_one_signal_drains_all(start: Start) -> None:
    worker = start("--processes", "2")
    said = lines(worker)
    first = started_in(said, 2)
    os.kill(min(first), signal.SIGKILL)
    died = next(line for line in said if line["what"] == "died")
    assert (died["by"], died["again_in_seconds"]) == ("SIGKILL", 1.0)
    again = started_in(said, 1)
    assert not again & first
    worker.terminate()
    assert len([line for line in said if line["what"] == "stopped"]) == 2
    assert worker.wait() == 0


@pytest.mark.slow
def test_the_processes_of_a_killed_command_drain(start: Start) -> None:
    worker = start("--processes", "2")
    said = lines(worker)
    started_in(said, 2)
    worker.kill()
    # The pipe ends when the last process has closed it.
    assert [line["what"] for line in said if line["what"] in ("draining", "stopped")].count("stopped") == 2


def test_options_reach_every_process_and_each_has_a_metrics_port_of_its_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervised: list[Any] = []

    class Recorded:
        def __init__(self, *args: Any, **options: Any) -> None:
            supervised.append((*args, options))

        async def serve(self) -> None: ...

    monkeypatch.chdir(folder)
    monkeypatch.setattr(worker_command, "Supervisor", Recorded)
    options = ["--concurrency", "3", "--agent", "where", "--per-agent", "where=2", "--metrics", "9464", "--json"]
    assert main(["worker", "app.py", "--store", "other.db", "--processes", "2", *options]) == 0
    (commands, env, _), *_ = supervised
    assert env["KILLICK_STORE"] == "other.db"
    for number, (_, _, _, *arguments) in enumerate(commands):
        parsed = worker_command.worker_command.make_context("worker", arguments[1:]).params
        assert (parsed["target"], parsed["concurrency"], parsed["agents"]) == ("app.py", 3, ("where",))
        assert (parsed["per_agent"], parsed["json"], parsed["processes"]) == (("where=2",), True, 1)
        assert (parsed["metrics"], parsed["drain_on_eof"]) == (f"127.0.0.1:{9464 + number}", True)


def test_what_makes_no_sense_is_refused_before_a_process_is_started(folder: Path) -> None:
    command = [sys.executable, "-m", "killick", "worker", "app.py", "--processes", "2", "--agent", "missing"]
    refused = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert (refused.returncode, "missing" in refused.stderr) == (2, True)
