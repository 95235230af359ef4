"""The workflows of `plain.py`, with their activities behind the gate: `python gated.py STORE ADDRESS QUEUE`."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

from temporalio import activity
from temporalio.client import Client
from temporalio.exceptions import ApplicationError
from temporalio.worker import Worker

import killick
from killick.adapters.temporal_gate import ActivityGate
from neighbours.temporal import plain


def look(effect: killick.Effect) -> killick.Happened | killick.DidNotHappen:
    world = Path(os.environ["PLAIN_WORLD"])
    done = world.exists() and f"paid {effect.arguments['whom']}\n" in world.read_text()
    return killick.Happened("paid") if done else killick.DidNotHappen()


@activity.defn
def key_of(whom: str) -> list[str]:
    """A blocking activity: it notes the idempotency key of every attempt, and fails at first."""
    step = killick.ToolStep.here()
    assert step is not None
    world = Path(os.environ["PLAIN_WORLD"])
    with world.open("a") as file:
        file.write(f"{step.key} {activity.info().activity_type}\n")
    seen = world.read_text().splitlines()
    if len(seen) < 3:
        raise ConnectionError("try again")
    return seen


@activity.defn
async def refused(whom: str) -> None:
    raise ApplicationError(f"{whom} has no account", type="NoAccount")


GATED: dict[str, Any] = {
    "plain_pay": {"reconcile": look},
    "key_of": {"effect": "idempotent", "retry": killick.Retry(4, first="10ms")},
    "refused": {"nothing_happened": (ApplicationError,), "retry": killick.Retry(1)},
}


def worker(client: Client, kd: killick.AsyncClient, queue: str, **options: Any) -> Worker:
    workflows: Sequence[type] = [plain.PlainPayer, plain.Caller]
    return Worker(
        client,
        task_queue=queue,
        workflows=workflows,
        activities=[plain.plain_pay, plain.plain_model, key_of, refused],
        activity_executor=ThreadPoolExecutor(4),
        interceptors=[ActivityGate(kd, GATED, **options)],
        build_id="tests",
        sticky_queue_schedule_to_start_timeout=timedelta(seconds=1),
    )


async def serve(store: str, address: str, queue: str) -> None:
    async with killick.open_async(store) as kd, worker(await Client.connect(address), kd, queue):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))
