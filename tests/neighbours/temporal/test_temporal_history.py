"""A workflow's history is as small as its waits are few, however large the conversation is."""

from __future__ import annotations

import asyncio

import pytest
from temporalio.client import WorkflowFailureError

import killick
from killick.adapters.temporal import Temporal
from neighbours import engine_agents as agents
from neighbours.temporal import plain
from neighbours.temporal.dev_server import DevServer

CALLS = 300


def test_three_hundred_calls_over_a_large_conversation_end_where_a_plain_workflow_dies(
    server: DevServer, store: str
) -> None:
    async def plainly() -> int:
        client = await server.client()
        async with plain.worker(client, "talk-alone"):
            workflow = await client.start_workflow(
                plain.PlainTalker.run, CALLS, id="talk-alone", task_queue="talk-alone"
            )
            with pytest.raises(WorkflowFailureError):
                await workflow.result()
            history = await workflow.fetch_history()
            return sum(event.HasField("activity_task_completed_event_attributes") for event in history.events)

    async def with_killick() -> tuple[int, int]:
        client = await server.client()
        async with killick.open_async(store) as kd, Temporal(kd, client, task_queue="talk", build_id="tests") as engine:
            workflow = await engine.start(agents.talker, CALLS, id="talk-1")
            assert await workflow.result() == 200 + CALLS
            history = await workflow.fetch_history()
            return len(history.events), sum(event.ByteSize() for event in history.events)

    died_at = asyncio.run(plainly())
    events, size = asyncio.run(with_killick())
    print(
        f"{CALLS} calls over 200 KB, 5 MB of history allowed: a plain workflow dies after {died_at}; "
        f"with Killick it ends, with {events} events of {size} bytes"
    )
    assert died_at < CALLS / 10
    assert size < 8_192
