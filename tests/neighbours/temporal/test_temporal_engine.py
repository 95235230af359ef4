"""Temporal owns scheduling, timers, signals and failover; agents are as they are; the log is the truth."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowFailureError
from temporalio.exceptions import ApplicationError

import killick
from killick.adapters.temporal import Temporal
from neighbours import engine_agents as agents
from neighbours.temporal.dev_server import DevServer


@asynccontextmanager
async def serving(
    server: DevServer, store: str, queue: str, **options: Any
) -> AsyncIterator[tuple[killick.Client, Temporal, Client]]:
    client = await server.client()
    async with (
        killick.open_async(store) as kd,
        Temporal(kd, client, task_queue=queue, build_id="tests", **options) as engine,
    ):
        yield kd.as_sync(), engine, client


async def events(client: Client, run: str) -> Counter[str]:
    """What is in the history of a run's workflow."""
    history = await client.get_workflow_handle(run).fetch_history()
    return Counter(EventType.Name(event.event_type).removeprefix("EVENT_TYPE_") for event in history.events)


async def until(seen: Callable[[], Any]) -> None:
    async with asyncio.timeout(300):
        while not await asyncio.to_thread(seen):
            await asyncio.sleep(0.02)


def test_a_run_that_anybody_starts_goes_to_its_end_and_its_workflow_has_its_result(
    server: DevServer, store: str, world: Path
) -> None:
    async def story() -> None:
        async with serving(server, store, "whole") as (_, engine, client):
            with killick.open(store) as elsewhere:  # knows nothing of Temporal
                handle = await elsewhere.as_async().start(agents.payer, "ann", id="whole-1")
                assert await handle.result(300) == "ann is paid"
            workflow = client.get_workflow_handle("whole-1")
            assert await workflow.result() == "ann is paid"
            again = await engine.start(agents.payer, "bob", id="whole-2")
            assert await again.result() == "bob is paid"

    asyncio.run(story())
    assert len(world.read_text().splitlines()) == 2


def test_a_sleep_is_a_timer_of_temporals_and_nothing_of_ours_waits_for_it(
    server: DevServer, store: str, world: Path
) -> None:
    async def story() -> Counter[str]:
        async with serving(server, store, "timers") as (_, engine, client):
            workflow = await engine.start(agents.patient, "ann", id="timers-1")
            assert await workflow.result() == "paid"
            return await events(client, "timers-1")

    seen = asyncio.run(story())
    assert (seen["TIMER_STARTED"], seen["TIMER_FIRED"]) == (1, 1)
    assert seen["ACTIVITY_TASK_SCHEDULED"] == 3
    assert seen["WORKFLOW_EXECUTION_SIGNALED"] == 0


def test_an_answer_and_a_message_from_elsewhere_wake_the_workflow_once_each(
    server: DevServer, store: str, world: Path
) -> None:
    async def story() -> Counter[str]:
        # Two who serve: both hear the bell, and the workflow is told once.
        async with serving(server, store, "people") as (kd, _, client), serving(server, store, "people"):
            kd.start(agents.asker, "ann", id="people-1")
            await until(lambda: kd.inbox())
            with killick.open(store) as elsewhere:
                elsewhere.answer("people-1", "approve", by="managers")
                await until(lambda: [wait.name for wait in kd.info("people-1").waits] == ["word"])
                elsewhere.send("people-1", "word", "thanks")
            workflow = client.get_workflow_handle("people-1")
            assert await workflow.result() == "ann: thanks"
            return await events(client, "people-1")

    seen = asyncio.run(story())
    assert seen["WORKFLOW_EXECUTION_SIGNALED"] == 2
    assert seen["ACTIVITY_TASK_SCHEDULED"] == 4  # the first creates the run


def test_pause_and_resume_reach_a_run_that_sleeps(server: DevServer, store: str, world: Path) -> None:
    async def story() -> None:
        async with serving(server, store, "pausing") as (kd, engine, _):
            workflow = await engine.start(agents.asker, "ann", id="pausing-1")
            await until(lambda: kd.inbox())
            await kd.as_async().pause("pausing-1", by="ops")
            await until(lambda: kd.info("pausing-1").status == "paused")
            await kd.as_async().resume("pausing-1", by="ops")
            await until(lambda: kd.info("pausing-1").status == "waiting")
            await kd.as_async().answer("pausing-1", "reject", by="managers")
            assert await workflow.result() == "no"

    asyncio.run(story())


def test_children_are_workflows_of_their_own_and_wake_their_parent(server: DevServer, store: str, world: Path) -> None:
    async def story() -> None:
        async with serving(server, store, "families") as (kd, engine, client):
            workflow = await engine.start(agents.parent, "ann", id="families-1")
            assert await workflow.result() == ["paid", "ann-2 is paid"]
            children = [row.id for row in kd.list() if row.id != "families-1"]
            assert len(children) == 2
            for child in children:
                described = await client.get_workflow_handle(child).describe()
                assert described.status is WorkflowExecutionStatus.COMPLETED
        assert len(world.read_text().splitlines()) == 3

    asyncio.run(story())


def test_a_run_that_is_renewed_keeps_its_workflow(server: DevServer, store: str, world: Path) -> None:
    async def story() -> None:
        async with serving(server, store, "renewing") as (_, engine, client):
            workflow = await engine.start(agents.renewing, 2, id="renewing-1")
            assert await workflow.result() == "done"
            listed = [each.id async for each in client.list_workflows('TaskQueue="renewing"')]
            assert listed in ([], ["renewing-1"])  # what is listed comes a little later

    asyncio.run(story())
    assert len(world.read_text().splitlines()) == 3


def test_a_failed_run_fails_its_workflow_with_its_own_words(server: DevServer, store: str) -> None:
    async def story() -> None:
        async with serving(server, store, "failing") as (_, engine, _):
            workflow = await engine.start(agents.failing, id="failing-1")
            with pytest.raises(WorkflowFailureError) as raised:
                await workflow.result()
            cause = raised.value.cause
            assert isinstance(cause, ApplicationError)
            assert cause.type == "RunFailed"
            assert "no such account" in cause.message

    asyncio.run(story())


def test_cancelling_a_workflow_cancels_its_run(server: DevServer, store: str) -> None:
    async def story() -> None:
        async with serving(server, store, "cancelling") as (kd, engine, _):
            workflow = await engine.start(agents.asker, "ann", id="cancelling-1")
            await until(lambda: kd.inbox())
            await workflow.cancel()
            with pytest.raises(WorkflowFailureError):
                await workflow.result()
            assert (await workflow.describe()).status is WorkflowExecutionStatus.CANCELED
            assert kd.info("cancelling-1").status == "cancelled"

    asyncio.run(story())


def test_a_workflow_that_was_terminated_comes_back_when_something_comes_for_its_run(
    server: DevServer, store: str, world: Path
) -> None:
    async def story() -> None:
        async with serving(server, store, "terminating") as (kd, engine, client):
            workflow = await engine.start(agents.asker, "ann", id="terminating-1")
            await until(lambda: kd.inbox())
            await workflow.terminate()
            await kd.as_async().answer("terminating-1", "reject", by="managers")
            await until(lambda: kd.info("terminating-1").status == "completed")

    asyncio.run(story())


def test_a_run_that_is_rewound_after_its_end_gets_a_workflow_again_and_pays_no_second_time(
    server: DevServer, store: str, world: Path
) -> None:
    async def story() -> None:
        async with serving(server, store, "rewinding") as (kd, engine, _):
            workflow = await engine.start(agents.payer, "ann", id="rewinding-1")
            await workflow.result()
            await kd.as_async().rewind("rewinding-1", "1:before", by="ops")
            await until(lambda: kd.info("rewinding-1").status == "completed")

    asyncio.run(story())
    assert len(world.read_text().splitlines()) == 1


def test_a_workflow_continues_as_new_and_its_run_hears_everything(server: DevServer, store: str) -> None:
    times = 12

    async def story() -> tuple[int, int]:
        async with serving(server, store, "long") as (kd, engine, client):
            workflow = await engine.start(agents.waiter, times, id="long-1")
            for number in range(times):
                await until(lambda: kd.info("long-1").status == "waiting")
                await kd.as_async().send("long-1", "number", number)
                await until(lambda: not kd.runtime.store.inbox("long-1"))
            assert await workflow.result() == sum(range(times))
            last = await client.get_workflow_handle("long-1").fetch_history()
            first = await client.get_workflow_handle("long-1", run_id=workflow.first_execution_run_id).fetch_history()
            return len(first.events), len(last.events)

    first, last = asyncio.run(story())
    assert 60 < first < 100
    assert last < 100


def test_cancelling_a_workflow_reaches_a_run_in_the_middle_of_a_step(server: DevServer, store: str) -> None:
    async def story() -> None:
        async with serving(server, store, "digging") as (kd, engine, _):
            workflow = await engine.start(agents.digger, id="digging-1")
            await until(lambda: kd.info("digging-1").status == "running" and kd.info("digging-1").step == "1")
            await workflow.cancel()
            with pytest.raises(WorkflowFailureError):
                await workflow.result()
            assert (await workflow.describe()).status is WorkflowExecutionStatus.CANCELED
            assert kd.info("digging-1").status == "cancelled"

    asyncio.run(story())
