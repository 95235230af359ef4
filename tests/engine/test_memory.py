"""The memory of executions: without the cycle collector, whose full passes cost more than short runs do."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Generator

import pytest

import killick
from killick.engine import observers
from killick.engine.execution import Execution
from killick.engine.executor import WARM_MAX
from killick.store import MemoryStore


@killick.tool
async def count(number: int) -> int:
    return number + 1


@killick.agent
async def ends(run: killick.Run, number: int) -> int:
    return await run.call(count, number)


@killick.agent
async def waits(run: killick.Run, number: int) -> int:
    await run.call(count, number)
    await run.wait("go")
    return number


@pytest.fixture(autouse=True)
def collector() -> Generator[None]:
    gc.collect()
    gc.disable()
    _before[:] = [each for each in gc.get_objects() if isinstance(each, Execution)]
    yield
    _before.clear()
    gc.enable()


_before: list[Execution] = []


def executions() -> int:
    return sum(isinstance(each, Execution) for each in gc.get_objects()) - len(_before)


async def park(kd: killick.AsyncClient, runs: int) -> None:
    for number in range(runs):
        with pytest.raises(killick.RunWaiting):
            await kd.run(waits, number, id=f"waits-{number}")


def test_a_run_that_ended_is_freed_at_once() -> None:
    async def go() -> None:
        async with killick.AsyncClient(MemoryStore()) as kd:
            assert await kd.run(ends, 1) == 2
            await asyncio.sleep(0)
            assert executions() == 0

    asyncio.run(go())


def test_an_observed_run_that_ended_is_freed_at_once() -> None:
    stop = observers.observe(observers.Observer())
    try:
        test_a_run_that_ended_is_freed_at_once()
    finally:
        stop()


def test_a_parked_run_that_leaves_memory_is_freed_at_once() -> None:
    async def go() -> None:
        async with killick.AsyncClient(MemoryStore()) as kd:
            await park(kd, WARM_MAX + 3)
            assert executions() <= WARM_MAX + 1  # the last one may still unwind

    asyncio.run(go())


def test_a_parked_run_that_was_woken_is_freed_at_its_end() -> None:
    async def go() -> None:
        async with killick.AsyncClient(MemoryStore()) as kd:
            await park(kd, 1)
            await kd.send("waits-0", "go")
            assert await kd.run(waits, id="waits-0") == 0
            await asyncio.sleep(0)
            assert executions() == 0

    asyncio.run(go())
