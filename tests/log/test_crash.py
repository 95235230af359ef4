"""Killed at any moment: what was acknowledged is there, nothing is half there, and the next process goes on at once."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from seeds import draw_seed, repeats

PROGRAM = Path(__file__).with_name("killing.py")


def run(mode: str, folder: Path, *arguments: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), mode, str(folder), *map(str, arguments)],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(PROGRAM.parent.parent), "PATH": ""},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    "kills", [20, pytest.param(repeats(30, 200), marks=pytest.mark.slow), pytest.param(2_000, marks=pytest.mark.far)]
)
def test_kills_at_random_moments_lose_no_acknowledged_event(tmp_path: Path, kills: int) -> None:
    seed = draw_seed()
    found = run("moments", tmp_path, kills, seed)
    assert found["kills"] == kills, seed
    assert found["events"] >= found["acknowledged"] > kills // 4, seed


@pytest.mark.slow
def test_dying_before_any_statement_leaves_a_whole_store_that_goes_on(tmp_path: Path) -> None:
    assert run("statements", tmp_path)["statements"] > 40


@pytest.mark.slow
def test_a_power_cut_anywhere_in_the_write_ahead_log_leaves_a_prefix_of_commits(tmp_path: Path) -> None:
    found = run("torn", tmp_path)
    assert found["prefixes"] > 20
