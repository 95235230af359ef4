"""Several `killick worker` processes share the runs and the rate limits of one store."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

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
    """Starts `killick worker`."""
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


def start_runs(folder: Path, agent: str, number: int) -> None:
    each = f"[kd.start(app.{agent}) for _ in range({number})]"
    code = f"import app, killick\nwith killick.open('killick.db') as kd: {each}"
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True)


@pytest.mark.slow
def test_several_processes_serve_until_idle(folder: Path, start: Start) -> None:
    start_runs(folder, "where", 6)
    workers = [start("--until-idle") for _ in range(2)]
    said = [line for worker in workers for line in lines(worker)]
    assert [worker.wait() for worker in workers] == [0, 0]
    assert len({line["worker"] for line in said if line["what"] == "stopped"}) == 2
    assert len({line["run"] for line in said if line["what"] == "completed"}) == 6


@pytest.mark.slow
def test_processes_share_a_rate_limit(folder: Path, start: Start) -> None:
    start_runs(folder, "mail", 12)
    assert [worker.wait() for worker in [start("--until-idle") for _ in range(2)]] == [0, 0]
    assert (folder / "sent").read_text() == "x" * 5
