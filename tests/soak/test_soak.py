"""The short form of the soak: workers that are killed and frozen, a server that restarts, a far side that fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from seeds import draw_seed

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]

RUNS = 100
BLOWS = 8


def soak(store: str, *, seed: int | None = None, every_seconds: float = 0.4) -> dict[str, Any]:
    """In a process that holds no thread, because it forks."""
    seed = draw_seed() if seed is None else seed
    asked = [store, "--runs", RUNS, "--workers", 3, "--blows", BLOWS, "--every-seconds", every_seconds]
    asked += ["--restarts", 1, "--limit-seconds", 1_200]
    done = subprocess.run(
        [sys.executable, "-m", "soak", *map(str, asked), "--seed", str(seed), "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        check=False,
    )
    assert done.stdout, f"seed {seed}: {done.stderr[-6_000:]}"
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["wrong"] == [], f"seed {seed}: {'; '.join(found['wrong'][:10])}"
    assert found["steps"] >= 8 * RUNS, seed
    return found


def test_on_sqlite_every_run_ends_and_every_effect_happens_once_whoever_is_killed_or_frozen() -> None:
    found = soak("sqlite")
    assert min(found["kills"], found["freezes"]) >= 1, found


def test_on_postgresql_the_same_holds_while_its_server_is_restarted() -> None:
    found = soak("postgres")
    assert min(found["kills"], found["freezes"]) >= 1, found
    assert found["restarts"] == 1, found


def test_on_postgresql_the_same_holds_when_a_synchronous_replica_takes_over_from_a_primary_that_died() -> None:
    """Every other worker is behind PgBouncer, which pools transactions."""
    found = soak("failover")
    assert min(found["kills"], found["freezes"]) >= 1, found
    assert found["restarts"] == 1, found


def test_a_rolling_upgrade_repeats_nothing_and_strands_no_run() -> None:
    """Workers with the old code are killed and frozen, and replaced one by one by workers with the new code."""
    found = soak("upgrade", seed=7, every_seconds=1.5)
    assert min(found["kills"], found["freezes"]) >= 1, found
    assert 1 <= found["on the new code"] < RUNS, found
    assert found["diverged"] >= 1, "an old worker took a run that a new one had in hand"


def test_random_stories_over_the_whole_surface_agree_with_the_books_of_the_far_side() -> None:
    """Seeds that once found a child whose end woke nobody, a hang after a compensation, and a hot loop."""
    seeds = [draw_seed() + number for number in range(3)]
    for seed in [1001, 1003, 1009, 1012, 1015, *seeds]:
        told = subprocess.run(
            [sys.executable, "-m", "soak.stories", "--seed", str(seed), "--stories", "1", "--story-seconds", "4"],
            capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(TESTS)}, check=False,
        )  # fmt: skip
        assert told.returncode == 0, f"seed {seed}: {told.stdout[-6_000:]}{told.stderr[-2_000:]}"
