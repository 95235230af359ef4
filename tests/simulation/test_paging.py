"""A loop with a window that dies anywhere sends its model the same bytes, and does nothing twice."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

import killick
from killick.check.crashes import Saved, Story, current_process, simulate
from llm.paged_session import BUDGET, SCRIPT, THERE, TOOLS, Far, answer, as_bytes
from simulation.crash_stories import Scenario, World, differences, world

SEED = 7


class Sea(World):
    """A world that remembers what its model was sent, by turn."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[int, bytes] = {}
        self.otherwise: list[int] = []
        """Turns in which the model was sent something else the second time."""

    def ask(self, request: dict[str, Any], turn: int) -> None:
        told = as_bytes(request)
        if self.sent.setdefault(turn, told) != told:
            self.otherwise.append(turn)


class Simulated(Far):
    """The far side, in a simulated world."""

    def look(self, what: str) -> None:
        world().visit(what)

    def do(self, what: str, key: str) -> None:
        world().do(what, key=key)

    def written(self, path: str) -> int:
        return world().effects[f"write {path}"]


async def model(**request: Any) -> Any:
    sea = world()
    assert isinstance(sea, Sea)
    reply = answer(request, "anthropic")
    turn = int(reply["content"][0]["text"].removeprefix("Turn ").rstrip("."))
    current_process().write(f"model {turn}", lambda: sea.ask(request, turn))
    return reply


@killick.agent(name="paged_sailor")
async def sailor(run: killick.Run) -> str:
    told = await killick.loop(
        run, model, TOOLS, messages="Go.", provider="anthropic", budget=BUDGET, system="You sail."
    )
    return told.text


SAILING = Scenario(agent=sailor, world=Sea)


@pytest.fixture(autouse=True)
def _there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(THERE, "far", Simulated())


def wrong(expected: Story, story: Story, deaths: int) -> list[str]:
    """In what a story ends otherwise than it would have without a death."""
    found = differences(expected, story, exact=False)
    before, after = expected.world, story.world
    assert isinstance(before, Sea)
    assert isinstance(after, Sea)
    found += [f"turn {turn} was asked otherwise the second time" for turn in after.otherwise]
    found += [f"turn {turn} was asked otherwise" for turn in before.sent if before.sent[turn] != after.sent.get(turn)]
    if story.marks != expected.marks:
        found.append("its state is another")
    more = after.visits - before.visits
    if more.total() > deaths:
        found.append(f"read more often than a death accounts for: {dict(more)}")
    return [f"{story}: {each[:200]}" for each in found]


@pytest.mark.slow
def test_killed_at_any_point_it_sends_the_same_bytes_and_does_nothing_twice() -> None:
    saving: list[Saved] = []
    expected = simulate(SAILING, seed=SEED, saving=saving)
    assert (expected.status, expected.troubles) == ("completed", [])
    assert isinstance(expected.world, Sea)
    assert len(expected.world.sent) == len(SCRIPT) + 1
    decided = [saved for saved in saving if saved.place.startswith("after append page.")]
    assert len(decided) > 12
    scenario, told = replace(SAILING, verified=False), list[str]()
    for saved in saving:
        told += wrong(expected, simulate(scenario, seed=SEED, saved=saved), 1)
        assert len(told) < 4, "\n".join(told)
    assert not told, "\n".join(told)


@pytest.mark.slow
@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("number", range(4))
def test_killed_over_and_over_it_still_sends_the_same_bytes(number: int, behind: bool) -> None:
    scenario = replace(SAILING, behind=behind)
    expected = simulate(scenario, seed=SEED)
    chance = random.Random(f"{SEED} {number}")
    kills = [chance.randint(1, expected.points[0]) for _ in range(4)]
    assert not wrong(expected, simulate(scenario, *kills, seed=SEED), len(kills))
