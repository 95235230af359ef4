"""The same work as workflows of Temporal's alone, to be seen beside it: `python plain.py ADDRESS QUEUE` serves them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.worker import Worker


@activity.defn
async def plain_pay(whom: str) -> str:
    world = Path(os.environ["PLAIN_WORLD"])
    with world.open("a") as ledger:
        ledger.write(f"paid {whom}\n")
    dying = world.with_suffix(".die")
    if dying.exists():
        dying.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return "paid"


@activity.defn
async def plain_model(turn: int, messages: list[str]) -> str:
    return f"{turn}: {'y' * 700}"


@workflow.defn
class PlainPayer:
    @workflow.run
    async def run(self, whom: str) -> str:
        return await workflow.execute_activity(plain_pay, whom, start_to_close_timeout=timedelta(seconds=2))


@workflow.defn
class PlainTalker:
    @workflow.run
    async def run(self, calls: int) -> int:
        messages = [f"{number}: {'x' * 990}" for number in range(200)]
        for turn in range(calls):
            messages.append(
                await workflow.execute_activity(
                    plain_model, args=[turn, messages], start_to_close_timeout=timedelta(seconds=20)
                )
            )
        return len(messages)


@workflow.defn
class Caller:
    """A workflow that calls an activity by name."""

    @workflow.run
    async def run(self, name: str, whom: str, seconds: float) -> Any:
        return await workflow.execute_activity(
            name, whom, start_to_close_timeout=timedelta(seconds=seconds), result_type=None
        )


def worker(client: Client, queue: str) -> Worker:
    return Worker(
        client,
        task_queue=queue,
        workflows=[PlainPayer, PlainTalker],
        activities=[plain_pay, plain_model],
        build_id="tests",
        sticky_queue_schedule_to_start_timeout=timedelta(seconds=1),
    )


async def serve(address: str, queue: str) -> None:
    async with worker(await Client.connect(address), queue):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))
