"""Restate owns scheduling, timers, messages and failover; agents are as they are; the log is the truth."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import killick
from killick.adapters.restate import Restate
from neighbours import engine_agents as agents
from neighbours.restate.restate_server import RestateServer
from neighbours.restate.serve import served


@asynccontextmanager
async def serving(
    server: RestateServer, store: str, port: int, **options: Any
) -> AsyncIterator[tuple[killick.Client, Restate]]:
    async with (
        killick.open_async(store) as kd,
        Restate(kd, server.ingress, **options) as engine,
        served(engine.app, port),
    ):
        await asyncio.to_thread(server.register, port)
        yield kd.as_sync(), engine
        await engine.drain()


async def until(seen: Callable[[], Any]) -> None:
    async with asyncio.timeout(300):
        while not await asyncio.to_thread(seen):
            await asyncio.sleep(0.02)


def turns(server: RestateServer, run: str) -> int:
    """How many turns of a run Restate knows of."""
    query = f"SELECT id FROM sys_invocation WHERE target_service_key = '{run}' AND target_handler_name = 'wake'"
    return len(server.query(query))


def test_a_run_that_anybody_starts_goes_to_its_end(server: RestateServer, store: str, port: int, world: Path) -> None:
    async def story() -> None:
        async with serving(server, store, port) as (_, engine):
            with killick.open(store) as elsewhere:  # knows nothing of Restate
                handle = await elsewhere.as_async().start(agents.payer, "ann", id="whole-1")
                assert await handle.result(300) == "ann is paid"
            again = await engine.start(agents.payer, "bob", id="whole-2")
            assert await again.result(300) == "bob is paid"
            await until(lambda: httpx.post(f"{server.ingress}/payer/whole-2/state").json()["result"] == "bob is paid")

    asyncio.run(story())
    assert len(world.read_text().splitlines()) == 2


def test_a_sleep_is_a_delayed_invocation_and_nothing_of_ours_waits_for_it(
    server: RestateServer, store: str, port: int, world: Path
) -> None:
    async def story() -> None:
        async with serving(server, store, port) as (kd, engine):
            handle = await engine.start(agents.patient, "ann", id="timers-1")
            assert await handle.result(300) == "paid"

    asyncio.run(story())
    assert turns(server, "timers-1") == 2


def test_an_answer_and_a_message_from_elsewhere_are_a_turn_each(
    server: RestateServer, store: str, port: int, world: Path
) -> None:
    async def story() -> None:
        # Two who hear the bell: Restate is told once.
        async with (
            serving(server, store, port) as (kd, _),
            killick.open_async(store) as other,
            Restate(other, server.ingress),
        ):
            kd.start(agents.asker, "ann", id="people-1")
            await until(lambda: kd.inbox())
            with killick.open(store) as elsewhere:
                elsewhere.answer("people-1", "approve", by="managers")
                await until(lambda: [wait.name for wait in kd.info("people-1").waits] == ["word"])
                elsewhere.send("people-1", "word", "thanks")
            await until(lambda: kd.info("people-1").status == "completed")
            assert kd.state("people-1").result == "ann: thanks"

    asyncio.run(story())
    assert turns(server, "people-1") == 3


def test_pause_and_resume_reach_a_run_that_sleeps(server: RestateServer, store: str, port: int, world: Path) -> None:
    async def story() -> None:
        async with serving(server, store, port) as (kd, engine):
            handle = await engine.start(agents.asker, "ann", id="pausing-1")
            await until(lambda: kd.inbox())
            await kd.as_async().pause("pausing-1", by="ops")
            await until(lambda: kd.info("pausing-1").status == "paused")
            await kd.as_async().resume("pausing-1", by="ops")
            await until(lambda: kd.info("pausing-1").status == "waiting")
            await kd.as_async().answer("pausing-1", "reject", by="managers")
            assert await handle.result(300) == "no"

    asyncio.run(story())


def test_children_are_objects_of_their_own_and_wake_their_parent(
    server: RestateServer, store: str, port: int, world: Path
) -> None:
    async def story() -> list[str]:
        async with serving(server, store, port) as (kd, engine):
            handle = await engine.start(agents.parent, "ann", id="families-1")
            assert await handle.result(300) == ["paid", "ann-2 is paid"]
            return [row.id for row in kd.list() if row.id != "families-1"]

    children = asyncio.run(story())
    assert len(children) == 2
    assert all(turns(server, child) for child in children)
    assert len(world.read_text().splitlines()) == 3


def test_a_run_that_is_renewed_keeps_its_object(server: RestateServer, store: str, port: int, world: Path) -> None:
    async def story() -> None:
        async with serving(server, store, port) as (_, engine):
            handle = await engine.start(agents.renewing, 2, id="renewing/1 ü")
            assert await handle.result(300) == "done"

    asyncio.run(story())
    assert turns(server, "renewing/1 ü") > 0
    assert turns(server, "renewing/1 ü+2") == 0
    assert len(world.read_text().splitlines()) == 3


def test_a_run_can_be_cancelled_through_restate(server: RestateServer, store: str, port: int) -> None:
    async def story() -> None:
        async with serving(server, store, port) as (kd, engine):
            handle = await engine.start(agents.asker, "ann", id="cancelling-1")
            await until(lambda: kd.inbox())
            told = await asyncio.to_thread(
                httpx.post, f"{server.ingress}/asker/cancelling-1/cancel", json={}, timeout=300
            )
            assert told.is_success
            with pytest.raises(killick.errors.RunCancelled):
                await handle.result(300)

    asyncio.run(story())
