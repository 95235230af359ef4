"""An engine hears of every run that wants it, once for each reason, and of no other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import killick
from killick.adapters.engines.turns import Turn
from killick.adapters.engines.wakeups import RunWaker
from killick.store.records import RunRow


@killick.agent
async def asker(run: killick.Run) -> bool:
    return (await run.ask("Go on?", to="anybody")).approved


@killick.agent
async def sleeper(run: killick.Run, seconds: float) -> str:
    await run.sleep(seconds)
    return "rested"


class Told:
    """An engine that only listens, and may be away."""

    def __init__(self) -> None:
        self.reasons: list[tuple[str, str]] = []
        self.away = False

    async def wake(self, row: RunRow, reason: str) -> None:
        if self.away:
            raise ConnectionError("nobody there")
        self.reasons.append((row.run, reason))

    @property
    def runs(self) -> list[str]:
        return [run for run, _ in self.reasons]


@asynccontextmanager
async def listening(store: Path, **options: Any) -> AsyncIterator[tuple[killick.Client, Told]]:
    told = Told()
    async with killick.open_async(store) as kd, RunWaker(kd, told.wake, **options):
        yield kd.as_sync(), told


async def until(seen: Callable[[], Any]) -> None:
    async with asyncio.timeout(300):
        while not seen():
            await asyncio.sleep(0.01)


def test_a_start_and_an_answer_from_another_process_are_heard_of_once(tmp_path: Path) -> None:
    async def story() -> None:
        async with listening(tmp_path / "killick.db", poll_seconds=30) as (kd, told):
            with killick.open(tmp_path / "killick.db") as elsewhere:
                elsewhere.start(asker, id="asking")
                await until(lambda: told.runs == ["asking"])
                await Turn(kd, "asking").take()
                elsewhere.answer("asking", "approve", by="ann")
                await until(lambda: told.runs == ["asking", "asking"])
                await Turn(kd, "asking").take()
                assert kd.info("asking").status == "completed"
            assert len(set(told.reasons)) == 2

    asyncio.run(story())


def test_two_who_listen_give_the_same_reason(tmp_path: Path) -> None:
    async def story() -> None:
        async with listening(tmp_path / "killick.db") as (kd, one), listening(tmp_path / "killick.db") as (_, two):
            kd.start(asker, id="asking")
            await until(lambda: one.reasons and two.reasons)
            assert one.reasons == two.reasons

    asyncio.run(story())


def test_what_was_started_before_anybody_listened_is_found(tmp_path: Path) -> None:
    with killick.open(tmp_path / "killick.db") as kd:
        kd.start(asker, id="before")

    async def story() -> None:
        async with listening(tmp_path / "killick.db") as (_, told):
            await until(lambda: told.runs == ["before"])

    asyncio.run(story())


def test_a_timer_is_the_engines_own_until_it_is_late(tmp_path: Path) -> None:
    async def story() -> None:
        async with listening(tmp_path / "killick.db", poll_seconds=0.05, grace_seconds=0.5) as (kd, told):
            kd.start(sleeper, 0.8, id="resting")
            await until(lambda: told.runs)
            began = kd.runtime.clock.monotonic()
            await Turn(kd, "resting").take()
            heard = len(told.runs)
            await until(lambda: len(told.runs) > heard)
            assert kd.runtime.clock.monotonic() - began > 1.3

    asyncio.run(story())


def test_a_run_that_is_held_for_a_moment_is_looked_at_again(tmp_path: Path) -> None:
    async def story() -> None:
        async with listening(tmp_path / "killick.db", poll_seconds=30) as (kd, told):
            await asyncio.sleep(0)
            kd.start(asker, id="asking")
            await until(lambda: told.runs == ["asking"])
            await Turn(kd, "asking").take()
            held = kd.runtime.store.lease("asking", "somebody", seconds=30)
            kd.answer("asking", "approve", by="ann")
            await asyncio.sleep(0.1)
            assert told.runs == ["asking"]
            kd.runtime.store.release("asking", epoch=held.epoch, holder="somebody")
            await until(lambda: told.runs == ["asking", "asking"])

    asyncio.run(story())


def test_an_engine_that_is_away_is_told_when_it_is_back(tmp_path: Path) -> None:
    async def story() -> None:
        async with listening(tmp_path / "killick.db", poll_seconds=0.05) as (kd, told):
            told.away = True
            kd.start(asker, id="asking")
            await asyncio.sleep(0.2)
            told.away = False
            await until(lambda: told.runs == ["asking"])

    asyncio.run(story())


def test_runs_of_other_agents_and_runs_that_are_over_are_nobodys_business(tmp_path: Path) -> None:
    async def story() -> None:
        async with listening(tmp_path / "killick.db", agents=("asker",), poll_seconds=0.05) as (kd, told):
            kd.start(sleeper, 0.0, id="other")
            kd.start(asker, id="mine")
            await until(lambda: told.runs == ["mine"])
            kd.cancel("mine")
            await Turn(kd, "mine").take()
            told.reasons.clear()
            await asyncio.sleep(0.3)
            assert told.runs == []

    asyncio.run(story())
