"""Processes that are killed: what LangGraph does again alone, it does once with Killick; and no checkpoint is torn."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from killick.adapters.langgraph import KillickSaver
from neighbours.results import result

PROGRAM = Path(__file__).with_name("killed_langgraph.py")
KILLED = -9


class Seen(NamedTuple):
    """How the first process and the second ended, what both did, and how much of that was to be done."""

    first: int
    second: int
    done: int
    wanted: int


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[str]]]:
    """Every scenario, in processes that are killed and followed by others; where, and what was seen."""
    folder = tmp_path_factory.mktemp("killed")
    ran = subprocess.run([sys.executable, PROGRAM, folder], capture_output=True, text=True, timeout=1500, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return folder, [line.split() for line in ran.stdout.splitlines()]


def seen(lives: tuple[Path, list[list[str]]], scenario: str, mode: str) -> tuple[Seen, Seen]:
    """Alone, and with Killick."""
    alone, ours = ([*map(int, line[4:])] for line in lives[1] if line[:3] == ["seen", scenario, mode])
    return Seen(*alone), Seen(*ours)


@pytest.mark.parametrize("durability", ["exit", "async"])
def test_a_hard_kill_amid_fast_nodes_repeats_nothing_that_was_done(
    lives: tuple[Path, list[list[str]]], durability: str
) -> None:
    alone, ours = seen(lives, "fast_nodes", durability)
    assert alone[:2] == ours[:2] == (KILLED, 0), lives[1]
    assert ours == (KILLED, 0, 12, 12)
    if durability == "exit":
        assert alone.done == 18  # otherwise it hangs on how quick its thread was that saves
        result("langgraph", killed="amid 12 quick effects", alone=f"{alone.done} effects", ours=f"{ours.done} effects")


def test_a_payment_that_was_done_when_the_process_died_is_not_made_again(lives: tuple[Path, list[list[str]]]) -> None:
    alone, ours = seen(lives, "parallel_tools", "exit")
    assert alone[:2] == ours[:2] == (KILLED, 0), lives[1]
    assert (alone.done, ours.done) == (2, 1)


def test_no_checkpoint_and_no_writes_are_ever_torn(lives: tuple[Path, list[list[str]]]) -> None:
    folder, lines = lives
    assert [int(line[1]) for line in lines if line[0] == "torn"] == [*[KILLED] * 5, 0], lines
    with KillickSaver(folder / "torn.db") as saver:
        found = list(saver.list(None))
        assert {each.metadata["step"] for each in found} == set(range(6))
        for each in found:
            said = each.checkpoint["channel_values"]["said"]
            last = len(said) - 1
            assert last == each.metadata["step"]
            assert each.pending_writes in ([], [(f"task-{last}", "said", said), (f"task-{last}", "more", last)])
        assert saver._threads.client.store.verify().holds
