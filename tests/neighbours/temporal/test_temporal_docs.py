"""The page and the example run as they stand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from neighbours.temporal.dev_server import CLI, DevServer
from neighbours.trying import try_page
from pages import ROOT


def test_what_the_page_shows_is_so(server: DevServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEMPORAL_ADDRESS", server.address)
    try_page("temporal", tmp_path)


def test_the_example_runs() -> None:
    env = {**os.environ, "PATH": f"{CLI.parent}:{os.environ['PATH']}"}
    command = [sys.executable, str(ROOT / "examples/neighbours/temporal.py")]
    # A thread of temporalio's may crash the interpreter as it ends, after all is done (1 of 25, on a busy machine).
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout.endswith(" in the record\n"), done.stderr
    assert "40 to ann\n" in done.stdout
