"""Existing activities go through Killick's gate, while the workflows that call them stay as they are."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import Client, WorkflowFailureError
from temporalio.exceptions import ApplicationError

import killick
from killick import Contract, rules
from neighbours.temporal import gated, plain
from neighbours.temporal.dev_server import DevServer
from neighbours.temporal.test_temporal_engine import until

Process = Callable[..., "subprocess.Popen[bytes]"]


@asynccontextmanager
async def serving(
    server: DevServer, store: str, queue: str, **options: Any
) -> AsyncIterator[tuple[killick.Client, Client]]:
    client = await server.client()
    async with killick.open_async(store) as kd, gated.worker(client, kd, queue, **options):
        yield kd.as_sync(), client


def paid(world: Path) -> list[str]:
    plain_world = world.with_name("plain.txt")
    return plain_world.read_text().splitlines() if plain_world.exists() else []


def test_an_activity_whose_worker_dies_pays_twice_alone_and_once_behind_the_gate(
    server: DevServer, store: str, world: Path, process: Process
) -> None:
    async def paying(queue: str, program: str, *args: str) -> int:
        paid_before = len(paid(world))
        world.with_name("plain.die").write_text("")  # whoever pays dies of it, the first time
        client = await server.client()
        workflow = await client.start_workflow(plain.PlainPayer.run, queue, id=queue, task_queue=queue)
        first = process(program, *args, server.address, queue)
        assert await asyncio.to_thread(first.wait, 300) == -signal.SIGKILL
        process(program, *args, server.address, queue)
        assert await workflow.result() == "paid"
        return len(paid(world)) - paid_before

    alone = asyncio.run(paying("gate-alone", "plain.py"))
    behind = asyncio.run(paying("gate-dies", "gated.py", store))
    print(f"a worker dies after an activity paid: alone it pays {alone} times, behind the gate {behind}")
    assert (alone, behind) == (2, 1)


def test_a_contract_asks_about_an_activity_and_its_workflow_waits_for_the_approver(
    server: DevServer, store: str, world: Path
) -> None:
    contract = Contract("pay", [rules.deny("plain_pay", ask="managers")])

    async def story() -> None:
        async with serving(server, store, "gate-asks", contract=contract) as (kd, client):
            workflow = await client.start_workflow(
                plain.PlainPayer.run, "ann", id="gate-asks-1", task_queue="gate-asks"
            )
            await until(lambda: kd.inbox())
            assert paid(world) == []
            [wait] = kd.inbox()
            await kd.as_async().answer(wait, "edit", value={"whom": "bob"}, by="managers")
            assert await workflow.result() == "paid"
            # More attempts may have looked for the answer; the call was made once, as the approver edited it.
            assert paid(world) == ["paid bob"]

    asyncio.run(story())


def test_a_rejected_activity_fails_for_good(server: DevServer, store: str, world: Path) -> None:
    contract = Contract("pay", [rules.deny("plain_pay")])

    async def story() -> None:
        async with serving(server, store, "gate-rejects", contract=contract) as (_, client):
            with pytest.raises(WorkflowFailureError) as raised:
                await client.execute_workflow(
                    plain.PlainPayer.run, "ann", id="gate-rejects-1", task_queue="gate-rejects"
                )
            failed = getattr(raised.value.cause, "cause", None)
            assert isinstance(failed, ApplicationError)
            assert (failed.type, failed.non_retryable) == ("Rejected", True)

    asyncio.run(story())
    assert paid(world) == []


def test_every_attempt_of_a_blocking_activity_has_the_same_key(server: DevServer, store: str, world: Path) -> None:
    async def story() -> list[str]:
        async with serving(server, store, "gate-keys") as (_, client):
            workflow = await client.start_workflow(
                plain.Caller.run, args=["key_of", "ann", 30], id="gate-keys-1", task_queue="gate-keys"
            )
            found: list[str] = await workflow.result()
            return found

    keys = asyncio.run(story())
    assert len(keys) == 3
    assert len(set(keys)) == 1
    assert keys[0].startswith("gate-keys-1:step_")
    assert keys[0].endswith(" key_of")


def test_the_error_of_an_activity_reaches_its_workflow_by_name(server: DevServer, store: str, world: Path) -> None:
    async def story() -> None:
        async with serving(server, store, "gate-fails") as (_, client):
            workflow = await client.start_workflow(
                plain.Caller.run, args=["refused", "ann", 30], id="gate-fails-1", task_queue="gate-fails"
            )
            with pytest.raises(WorkflowFailureError) as raised:
                await workflow.result()
            failed = getattr(raised.value.cause, "cause", None)
            assert isinstance(failed, ApplicationError)
            assert "ann has no account" in failed.message
            assert failed.non_retryable

    asyncio.run(story())
