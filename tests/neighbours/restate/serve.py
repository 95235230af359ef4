"""An endpoint in a process of its own: `python serve.py STORE INGRESS PORT`. Ends when it is killed, or told to."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from hypercorn.asyncio import serve
from hypercorn.config import Config

import killick
from killick.adapters.restate import Restate
from neighbours import engine_agents as engine_agents


async def listens(port: int) -> None:
    """Until somebody answers there."""
    async with asyncio.timeout(300):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.02)
            else:
                writer.close()
                return


@asynccontextmanager
async def served(app: Any, port: int) -> AsyncIterator[None]:
    """An ASGI app behind HTTP/2, for as long as the block lasts; then whoever still asks is taken to have hung up."""
    config = Config()
    config.bind = [f"127.0.0.1:{port}"]
    config.graceful_timeout = 0.1
    config.errorlog = None
    stop = asyncio.Event()

    async def mortal(scope: Any, receive: Any, send: Any) -> None:
        async def received() -> Any:
            tasks = [asyncio.create_task(receive()), asyncio.create_task(stop.wait())]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for each in tasks:
                each.cancel()
            return tasks[0].result() if tasks[0].done() else {"type": "http.disconnect"}

        await app(scope, received, send)

    serving = asyncio.create_task(serve(mortal, config, shutdown_trigger=stop.wait))
    try:
        await listens(port)
        yield
    finally:
        stop.set()
        await serving


async def main(store: str, ingress: str, port: str) -> None:
    stop = asyncio.Event()
    # Restate's SDK takes SIGTERM for itself, at the first request.
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
    async with killick.open_async(store) as kd, Restate(kd, ingress) as engine, served(engine.app, int(port)):
        await stop.wait()
        await engine.drain()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
