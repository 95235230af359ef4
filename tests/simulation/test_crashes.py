"""An agent that dies anywhere goes on with nothing lost and nothing done twice: by killing it everywhere."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from killick.check.crashes import Killed, Life, Story, simulate
from simulation.agents import SCENARIOS
from simulation.around import effect_of
from simulation.crash_stories import Scenario, World, differences, killed_everywhere, tick

SEED = 7
SAMPLE = 6
TOLD_MAX = 4
"""Stories that a failure tells in full; the rest would say the same."""

ENDINGS = {"at_last": "failed", "at_last_blocking": "failed", "undone": "failed", "undone_with_children": "failed"} | {
    "called_off": "cancelled"
}

every_agent = pytest.mark.parametrize("name", SCENARIOS)


@cache
def undisturbed(name: str, **how: Any) -> Story:
    return simulate(replace(SCENARIOS[name], **how), seed=SEED)


def untrue(story: Story) -> Iterator[str]:
    """Where the record and the world tell different stories."""
    for run, state in story.states.items():
        inputs = {traced["step"]: traced["input"] for traced in state["trace"]}
        for effect in (effect for effect in state["effects"] if effect["step"] in inputs):
            name = effect_of(effect["tool"], inputs[effect["step"]]["what"])
            times = story.world.effects[name]
            if (effect["status"] == "done") != bool(times):
                yield f"{run}: {name} is {effect['status']} on record; the world has it {times} times"
            if effect["undone"] != story.world.happened(effect_of("undo", effect["key"])):
                yield f"{run}: {name} is on record as undone: {effect['undone']}; the world says otherwise"


def check(scenario: Scenario, expected: Story, stories: Iterable[Story]) -> int:
    """How many stories there were, if all ended as they should."""
    assert expected.status, f"it does not even end when left alone: {expected.troubles}"
    told: list[str] = []
    count = 0
    for count, story in enumerate(stories, 1):  # noqa: B007
        wrong = [*differences(expected, story, exact=scenario.exact), *untrue(story)]
        if wrong:
            told.append("\n    ".join([f"{story}, seed {SEED}:", *wrong]))
        if len(told) == TOLD_MAX:
            break
    assert not told, "\n".join(told)
    return count


def sampled(name: str, deaths: int, **how: Any) -> None:
    """Kill so many processes one after the other, at random points; a few times over."""
    chance = random.Random(f"{SEED} {name} {how}")
    scenario, expected = replace(SCENARIOS[name], **how), undisturbed(name, **how)
    points = expected.points[0]
    kills = [[chance.randint(1, points) for _ in range(deaths)] for _ in range(SAMPLE)]
    check(scenario, expected, (simulate(scenario, *each, seed=SEED) for each in kills))


@pytest.mark.slow
@every_agent
@pytest.mark.parametrize("how", [{}, {"warm": False}, {"behind": True}, {"takeover": "expiry"}], ids=str)
def test_left_alone_it_comes_to_its_end(name: str, how: dict[str, Any]) -> None:
    story = undisturbed(name, **how)
    assert story.status == ENDINGS.get(name, "completed"), story.outcome
    assert not story.troubles
    assert not list(untrue(story))
    assert set(story.world.effects.values()) == {1}
    if how:
        assert not differences(undisturbed(name), story, exact=SCENARIOS[name].exact)


@pytest.mark.gate("repeating", "another_way", "using_up", "drawing", "one_after_the_other_blocking", "stalling")
@every_agent
def test_killed_at_any_point_it_goes_on_with_nothing_lost_and_nothing_done_twice(name: str) -> None:
    scenario = SCENARIOS[name]
    assert check(scenario, undisturbed(name), killed_everywhere(scenario, seed=SEED)) > 15


def test_two_threads_that_write_at_once_do_not_pass_over_the_point_of_death() -> None:
    life = Life(World(), kill_at=3)

    def die() -> None:
        with contextlib.suppress(Killed):
            life.write("append", lambda items: None, ())

    second = threading.Thread(target=die)

    def beside(items: object) -> None:
        second.start()
        second.join(0.2)  # it waits for this write; where it did not, both would count from the same point

    life.write("append", beside, ())
    second.join()
    assert (life.place, life.points) == ("before append", 3)


@pytest.mark.slow
@every_agent
def test_killed_again_while_it_recovers_it_still_goes_on(name: str) -> None:
    sampled(name, 2)


@pytest.mark.slow
@every_agent
def test_killed_over_and_over_it_still_goes_on(name: str) -> None:
    sampled(name, 5)


@pytest.mark.slow
@every_agent
def test_it_goes_on_in_another_process_whenever_somebody_answered(name: str) -> None:
    sampled(name, 1, warm=False)


@pytest.mark.slow
@every_agent
def test_what_was_written_behind_and_is_lost_was_not_needed(name: str) -> None:
    sampled(name, 1, behind=True)


@pytest.mark.slow
@every_agent
def test_it_goes_on_when_the_lease_of_the_dead_has_run_out(name: str) -> None:
    sampled(name, 1, takeover="expiry")


def test_an_effect_done_twice_is_told() -> None:
    expected, story = undisturbed("repeating"), simulate(SCENARIOS["repeating"], seed=SEED)
    story.world.effects["pay book"] += 1
    assert differences(expected, story) == ["pay book once too often"]


def test_a_step_that_was_lost_is_told() -> None:
    expected, story = undisturbed("repeating"), simulate(SCENARIOS["repeating"], seed=SEED)
    story.states["run"]["outputs"].pop()
    assert [told.partition(" ")[2].partition(" ")[0] for told in differences(expected, story)] == ["outputs"]


def test_outside_of_a_simulation_a_tick_does_nothing() -> None:
    tick()
    with pytest.raises(LookupError, match=r"killick\.check\.crashes"):
        World().do("anything")
