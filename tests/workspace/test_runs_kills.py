"""A process is killed while its agent patches and tests a folder by a shell: the next one leaves the very same folder.

Nobody is asked, and the shell that outlived its process does not get in between.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from seeds import draw_seed, repeats
from workspace.runs_process import OLD_NS, ROUNDS

TESTS = Path(__file__).parents[1]
KILLS = repeats(30, 100)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="what a tool left running is found by /proc"),
]


def test_killed_over_and_over_in_the_shell_the_folder_is_the_same_and_nobody_is_asked(tmp_path: Path) -> None:
    seed = draw_seed()
    told = [json.loads(output) for output in outputs(tmp_path, [seed, seed + 1])]
    whole, stories = told[0]["whole"], [story for each in told for story in each["stories"]]
    assert (whole["result"], whole["attempts"], whole["back"]) == (f"passed {ROUNDS}\n", ROUNDS, 0)
    assert [len(files) > 10 for files in whole["boundaries"]] == [True] * 2 * ROUNDS
    for story in stories:
        assert not otherwise(whole, story), f"seed {seed}, died at {story['died_at']}"
    # How many there are of these is a matter of speed; that there are some is not.
    assert sum(story["back"] for story in stories) >= KILLS * 0.2, "kills left the files to be brought back"
    assert sum(story["ended"] for story in stories) > 0, "a shell was still at it"


def outputs(place: Path, seeds: list[int]) -> Iterator[str]:
    """What the programs print that do the killing, side by side."""
    kills = -(-KILLS // len(seeds))
    commands = [
        [sys.executable, "-m", "workspace.runs_process", str(place / str(seed)), str(seed), str(kills)]
        for seed in seeds
    ]
    pipe = subprocess.PIPE
    programs = [subprocess.Popen(each, cwd=TESTS, stdout=pipe, stderr=pipe, text=True) for each in commands]
    for seed, program in zip(seeds, programs, strict=True):
        output, told = program.communicate()
        assert program.returncode == 0, f"seed {seed}: {told}"
        yield output


def otherwise(whole: dict[str, Any], story: dict[str, Any]) -> list[str]:
    """In what a run that was killed differs from one that was not."""
    found = [f"{what}: {story[what]}" for what in ("result", "models", "asked_people") if story[what] != whole[what]]
    before, after = _by_path(whole), _by_path(story)
    found += [
        f"{path}: {before.get(path)} and {after.get(path)}"
        for path in sorted(before.keys() | after.keys())
        if before.get(path) != after.get(path)
    ]
    for number, (files, others) in enumerate(zip(whole["boundaries"], story["boundaries"], strict=True)):
        paths = [path for path in files.keys() | others.keys() if files.get(path) != others.get(path)]
        found += [f"{path} at boundary {number}: {files.get(path)} and {others.get(path)}" for path in sorted(paths)]
    return found


def _by_path(story: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    """What stands where; the time only of what nobody wrote."""
    return {path: (kind, mode, holds, mtime == OLD_NS) for path, kind, mode, mtime, holds in story["tree"]}
