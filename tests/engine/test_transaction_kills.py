"""Killed at hundreds of points around tools that write in transactions: rows and record always agree."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import servers
from seeds import draw_seed, repeats

PROGRAM = Path(__file__).with_name("transacting_process.py")


def killed(url: str, *, points: int, moments: int, seed: int) -> dict[str, Any]:
    """Let the program kill, in a process that holds no thread."""
    told = subprocess.run(
        [sys.executable, str(PROGRAM), url, str(points), str(moments), str(seed)],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(PROGRAM.parent.parent), "PATH": ""},
        check=False,
    )
    assert told.returncode == 0, f"seed {seed}: {told.stderr[-6000:]}"
    found: dict[str, Any] = json.loads(told.stdout)
    return found


@pytest.mark.slow
def test_kills_around_transactions_on_a_file_leave_rows_and_record_agreeing(tmp_path: Path) -> None:
    seed, points = draw_seed(), repeats(24, 200)
    found = killed(str(tmp_path / "killick.db"), points=points, moments=max(points // 10, 6), seed=seed)
    assert found["points"] >= points - 10, (seed, found)


@pytest.mark.slow
def test_kills_around_transactions_on_a_server_leave_rows_and_record_agreeing() -> None:
    seed, points = draw_seed(), repeats(24, 40)
    found = killed(servers.postgres_store(), points=points, moments=6, seed=seed)
    assert found["points"] >= points - 5, (seed, found)
