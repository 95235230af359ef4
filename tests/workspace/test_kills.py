"""Killed at any moment of taking and bringing back: what was published holds, and what was begun is finished."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from seeds import draw_seed, repeats

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("killing.py")
KILLS = repeats(40, 200)


def test_kills_lose_no_snapshot_no_restore_and_nothing_done_by_hand(tmp_path: Path) -> None:
    seed = draw_seed()
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path), str(KILLS), str(seed)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(PROGRAM.parent.parent)},
        check=False,
    )
    assert done.returncode == 0, (seed, done.stderr[-3000:])
    found = json.loads(done.stdout)
    assert found["kills"] == KILLS, seed
    assert found["finished"] > 0, (seed, found)
    assert found["by_hand"] > KILLS // 4, (seed, found)
    assert found["snapshots"] > KILLS, (seed, found)
