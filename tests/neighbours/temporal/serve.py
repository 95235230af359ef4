"""A worker in a process of its own: `python serve.py STORE ADDRESS QUEUE [TOOL_QUEUES]`. Ends by a kill or SIGTERM."""

from __future__ import annotations

import asyncio
import json
import signal
import sys

from temporalio.client import Client

import killick
from killick.adapters.temporal import Temporal
from neighbours import engine_agents as engine_agents


async def serve(store: str, address: str, queue: str, tool_queues: str = "{}") -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    client = await Client.connect(address)
    async with (
        killick.open_async(store) as kd,
        Temporal(
            kd, client, task_queue=queue, tool_queues=json.loads(tool_queues), heartbeat_seconds=2, build_id="tests"
        ),
    ):
        await stop.wait()


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))
