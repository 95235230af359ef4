"""A process that loops with a window is killed at every append, for real: the next one sends the same bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from llm.paged_process import TURNS

TESTS = Path(__file__).parents[1]


@pytest.mark.slow
def test_killed_at_every_append_the_next_process_sends_the_same_bytes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "llm.paged_process", str(tmp_path)]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    whole, *killed = json.loads(done.stdout)
    kinds = Counter(whole["kinds"])
    assert len(whole["asked"]) == TURNS + 1
    assert min(kinds["page.evicted"], kinds["page.faulted"], kinds["page.pinned"]) > 1
    assert len(killed) > 10
    for at, story in enumerate(killed, 1):
        assert not otherwise(whole, story), f"killed at {at}"


def otherwise(whole: dict[str, Any], story: dict[str, Any]) -> list[str]:
    """In what a run that was killed once differs: what was not on record yet is asked and read again, the same way."""
    found = [f"{what} otherwise" for what in ("asked", "looks") if not goes_on(whole[what], story[what])]
    return found + (["done otherwise"] if story["done"] != whole["done"] else [])


def goes_on(whole: list[str], told: list[str]) -> bool:
    """Whether something was told up to a point, and then from there, or from a bit before, to its end."""
    return any(told == whole[:at] + whole[at - (len(told) - len(whole)) :] for at in range(len(whole) + 1))
