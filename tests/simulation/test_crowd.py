"""Runs and their forks that owe equal payments, live at once in several processes: each timeline pays what it owes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from random import Random

import pytest

from seeds import repeats
from simulation.crowd import Crowd
from simulation.random_agents import Program, another_world
from simulation.travelling import Leap

SEEDS = 25
"""How many stories the gate tells. A story is its seed and the order of its turns: nothing else is drawn."""
REFUSED = 110
"""A story in which payments are refused, and the run is taken back twice."""
STALLED_EVERY = 80


def leap_of(chance: Random) -> Leap:
    do = chance.choice(("fork", "fork", "rewind"))
    return Leap(do, chance.randrange(3), chance.choice((0, chance.randrange(99))), effects="live")


def story(seed: int, order: int = 0, stall: Callable[[], object] = lambda: None) -> list[tuple[str, str]]:
    """Tell a story in some order of its turns; returns those."""
    chance = Random(seed)
    tools = ["mail"] if chance.random() < 0.5 else chance.choices(("mail", "rent", "order", "shaky"), k=2)
    program: Program = [{"do": chance.choice(tools), "what": "ale"} for _ in range(chance.randint(2, 4))]
    if chance.random() < 0.3:
        program = [*program, {"do": "gather", "branches": [[op] for op in program[:2]]}]
    before = [Leap("fork", 0, 0, effects="live")] * chance.choice((0, 1, 1, 2))
    leaps = [(chance.randrange(60), leap_of(chance)) for _ in range(chance.randint(0, 2))]
    kills = [[chance.randrange(5, 120)] if chance.random() < 0.4 else [] for _ in range(3)]
    with another_world() as world:
        crowd = Crowd(seed + 1_000_003 * order, world, program, workers=3)
        crowd.turns.stall = stall
        try:
            happened = [*map(crowd.travel, before), *crowd.go(kills, leaps)]
            wrong = list(crowd.wrong())
            assert not wrong, "\n".join([f"seed {seed}: {program}, {leaps}, {kills}", *wrong, "after:", *happened])
        finally:
            crowd.close()
    return crowd.turns.taken


@pytest.mark.gate(6)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_whoever_moves_first_every_timeline_has_as_many_payments_as_it_owes(seed: int) -> None:
    story(seed)


@pytest.mark.gate(1)
@pytest.mark.parametrize("order", [14, 21, 31])
def test_payments_that_were_refused_and_taken_back_twice_are_made_by_each_step(order: int) -> None:
    story(REFUSED, order)


def test_a_seed_tells_the_same_story_however_slow_the_machine_is() -> None:
    turns = count()
    slow = partial(_stalled, turns)
    assert story(REFUSED, 14) == story(REFUSED, 14, slow)
    assert next(turns) > STALLED_EVERY


def _stalled(turns: Iterator[int]) -> None:
    """Longer than any timer lasts that a run has while it works, now and then."""
    if next(turns) % STALLED_EVERY == 0:
        time.sleep(0.3)


@pytest.mark.slow
def test_it_is_so_in_many_more_stories() -> None:
    for seed in range(SEEDS, int(os.environ.get("KILLICK_CROWDS", repeats(50, 400)))):
        story(seed)
