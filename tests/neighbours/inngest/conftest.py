"""What the tests of Inngest share: a store and a world for each, and processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    # The SDK declares its models in a way that pydantic deprecates.
    config.addinivalue_line("filterwarnings", "ignore:Support for class-based `config`:DeprecationWarning")


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
