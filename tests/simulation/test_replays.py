"""The record of every agent is followed by its code again: to the same state, with nothing called."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from killick.archive.export import export, read
from killick.check.crashes import Story, simulate
from killick.definitions.agents import AGENTS
from killick.log import Log
from killick.model.state import State
from killick.replay.replay import Replay
from killick.store.records import RunQuery
from simulation.agents import SCENARIOS

pytestmark = pytest.mark.slow

SEED = 11
SAMPLE = 3

every_agent = pytest.mark.parametrize("name", SCENARIOS)


def timeless(state: State) -> Any:
    """A state less its times, and less the lines of Python's own library in tracebacks."""

    def less(node: Any) -> Any:
        if isinstance(node, dict):
            return {name: less(part) for name, part in node.items() if name not in ("seq", "at", "ended_at", "frames")}
        return [less(part) for part in node] if isinstance(node, list) else node

    return less(msgspec.json.decode(state.to_json()))


def stories(name: str) -> Iterator[Story]:
    """Left alone, and killed twice at random points."""
    scenario, chance = SCENARIOS[name], random.Random(f"{SEED} {name}")
    alone = simulate(scenario, seed=SEED)
    yield alone
    for _ in range(SAMPLE):
        yield simulate(scenario, *(chance.randint(1, alone.points[0]) for _ in range(2)), seed=SEED)


@every_agent
def test_replay_comes_to_the_same_state_and_touches_nothing(name: str) -> None:
    # Outside of a simulation the world of these tools raises when it is touched.
    for story in stories(name):
        log = Log(story.store)
        for row in story.store.runs(RunQuery(), limit=100):
            replayed = Replay(read(export(log, row.run)), AGENTS.get(row.agent)).outcome()
            assert replayed.outcome == "agrees", (str(story), row.run, replayed.divergence, replayed.beyond)
            assert replayed.state is not None
            assert timeless(replayed.state) == timeless(log.state(row.run)), (str(story), row.run)
