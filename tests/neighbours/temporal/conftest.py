"""What the tests of Temporal share: one server, and a store and a world for each."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from neighbours.temporal.dev_server import DevServer

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevServer]:
    # What one workflow's history may hold is a tenth of what it is by default, so that it is soon reached; and it is
    # suggested far sooner that a workflow continues as new.
    limits = {"limit.historySize.error": 5 * 1024 * 1024, "limit.historyCount.suggestContinueAsNew": 60}
    made = DevServer(tmp_path_factory.mktemp("temporal"), **limits)
    made.start()
    yield made
    made.kill()


@pytest.fixture
def store(tmp_path: Path) -> str:
    return str(tmp_path / "killick.db")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The far side: a line for each payment."""
    path = tmp_path / "world.txt"
    monkeypatch.setenv("WORLD", str(path))
    monkeypatch.setenv("PLAIN_WORLD", str(path.with_name("plain.txt")))
    return path


@pytest.fixture
def process() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts programs beside this one; they are gone when the test is over."""
    made: list[subprocess.Popen[bytes]] = []

    def start(program: str, *args: str) -> subprocess.Popen[bytes]:
        env = {**os.environ, "PYTHONPATH": str(HERE.parent.parent)}
        made.append(subprocess.Popen([sys.executable, str(HERE / program), *args], env=env))
        return made[-1]

    yield start
    for each in made:
        each.kill()
        each.wait()
