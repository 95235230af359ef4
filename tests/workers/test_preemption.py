"""A run of high priority gets a slot within one step of those that hold them all; what gave way loses nothing."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from pathlib import Path

import pytest

import killick
from killick.client.client import Client
from killick.model import events as e

SLOTS = 3
STEPS = 6

WORLD: Counter[str] = Counter()
"""How often each step of each run was done."""

ORDER: list[str] = []
"""In which order steps began."""

HELD: list[bool] = []
"""While there is anything in it, no step ends."""


@killick.tool
async def toil(what: str) -> str:
    """An effect that nobody may repeat."""
    ORDER.append(what)
    WORLD[what] += 1
    await asyncio.sleep(0.03)
    while HELD:
        await asyncio.sleep(0.001)
    return what


@killick.agent
async def toiler(run: killick.Run, name: str) -> list[str]:
    return [await run.call(toil, f"{name}/{number}") for number in range(STEPS)]


@pytest.fixture(autouse=True)
def _nothing_done(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="killick.worker")
    WORLD.clear()
    ORDER.clear()
    HELD.clear()


async def until(*, begun: int) -> None:
    """Until so many steps have begun."""
    while len(ORDER) < begun:
        await asyncio.sleep(0.001)


async def until_preempted(caplog: pytest.LogCaptureFixture, number: int) -> None:
    """Until so many runs were told to give way; then steps may end."""
    while sum(text.startswith("preempted") for text in caplog.messages) < number:
        await asyncio.sleep(0.001)
    HELD.clear()


async def ended(kd: Client, *runs: str) -> None:
    async with asyncio.timeout(300):
        while any(kd.info(run).status != "completed" for run in runs):
            await asyncio.sleep(0.01)


def taken(kd: Client, run: str) -> int:
    """How often somebody took a run."""
    return sum(isinstance(recorded.event, e.RunTaken) for recorded in kd.events(run))


async def low_ones(kd: Client) -> list[str]:
    """Runs that hold every slot, each within its first step or a later one."""
    names = [f"low_{number}" for number in range(SLOTS)]
    for name in names:
        await kd.as_async().start(toiler, name, id=name)
    await until(begun=SLOTS)
    return names


def steps_before_the_first_of(name: str, *, since: int) -> Counter[str]:
    """How many steps each of the others began before the first of this one."""
    first = ORDER.index(f"{name}/0")
    return Counter(what.partition("/")[0] for what in ORDER[since:first])


@pytest.fixture(params=["memory", "sqlite"])
def kd(request: pytest.FixtureRequest, tmp_path: Path) -> Client:
    return killick.open("memory:" if request.param == "memory" else str(tmp_path / "killick.db"))


def test_an_urgent_run_begins_within_one_step_of_those_that_hold_all_slots(
    kd: Client, caplog: pytest.LogCaptureFixture
) -> None:
    async def play() -> None:
        async with kd.as_async(), kd.worker(concurrency=SLOTS, slice_seconds=0):
            HELD.append(True)
            names = await low_ones(kd)
            at = len(ORDER)
            await kd.as_async().start(toiler, "high", id="high", priority=5)
            await until_preempted(caplog, 1)
            await ended(kd, "high", *names)
            # One of them gives way after the step it is in; the others go on meanwhile.
            waited = steps_before_the_first_of("high", since=at)
            assert min(waited[name] for name in names) <= 1, ORDER
            assert set(WORLD.values()) == {1}, WORLD
            assert len(WORLD) == STEPS * (SLOTS + 1)
            gave_way = [name for name in names if taken(kd, name) > 1]
            assert len(gave_way) == 1, gave_way
            # What gave way ends after what it gave way to.
            assert ORDER.index("high/5") < ORDER.index(f"{gave_way[0]}/5")

    asyncio.run(play())


def test_as_many_give_way_as_there_are_urgent_ones_and_nothing_is_repeated(
    kd: Client, caplog: pytest.LogCaptureFixture
) -> None:
    async def play() -> None:
        async with kd.as_async(), kd.worker(concurrency=SLOTS, slice_seconds=0):
            HELD.append(True)
            names = await low_ones(kd)
            urgent = [f"high_{number}" for number in range(SLOTS + 1)]
            for name in urgent:
                await kd.as_async().start(toiler, name, id=name, priority=5)
            await until_preempted(caplog, SLOTS)
            await ended(kd, *urgent, *names)
            assert set(WORLD.values()) == {1}, WORLD
            assert sum(taken(kd, name) > 1 for name in names) == SLOTS
            last = max(ORDER.index(f"{name}/5") for name in urgent[:SLOTS])
            assert all(ORDER.index(f"{name}/5") > last for name in names), ORDER

    asyncio.run(play())


def test_a_run_of_the_same_priority_waits_its_turn(kd: Client) -> None:
    async def play() -> None:
        async with kd.as_async(), kd.worker(concurrency=SLOTS, slice_seconds=0):
            names = await low_ones(kd)
            await kd.as_async().start(toiler, "same", id="same")
            await ended(kd, "same", *names)
            assert all(taken(kd, name) == 1 for name in [*names, "same"])
            assert any(ORDER.index(f"{name}/5") < ORDER.index("same/0") for name in names)

    asyncio.run(play())


def test_a_run_keeps_its_slot_for_its_slice_however_urgent_another_is(kd: Client) -> None:
    async def play() -> None:
        async with kd.as_async(), kd.worker(concurrency=SLOTS, slice_seconds=60):
            names = await low_ones(kd)
            await kd.as_async().start(toiler, "high", id="high", priority=5)
            await ended(kd, "high", *names)
            assert all(taken(kd, name) == 1 for name in names)

    asyncio.run(play())


def test_an_open_attempt_finishes_before_its_run_gives_way(kd: Client, caplog: pytest.LogCaptureFixture) -> None:
    async def play() -> None:
        async with kd.as_async(), kd.worker(concurrency=1, slice_seconds=0):
            HELD.append(True)
            await kd.as_async().start(toiler, "low", id="low")
            await until(begun=1)
            await kd.as_async().start(toiler, "high", id="high", priority=5)
            await until_preempted(caplog, 1)
            await ended(kd, "high", "low")
            kinds = [recorded.event for recorded in kd.events("low")]
            again = [n for n, event in enumerate(kinds) if isinstance(event, e.RunTaken)][1]
            assert isinstance(kinds[again - 1], e.AttemptEnded), kinds[again - 1]
            assert not any(isinstance(event, e.AttemptSettled) for event in kinds)

    asyncio.run(play())
    assert [text for text in caplog.messages if text.startswith("preempted run=low")]
    assert ORDER.index("high/5") < ORDER.index("low/2")
