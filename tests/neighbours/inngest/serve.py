"""An app in a process of its own: `python serve.py STORE INNGEST PORT [alone]`. Ends when it is killed, or told to."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import fastapi
import inngest
import inngest.fast_api
import uvicorn

import killick
from killick.adapters.inngest import Inngest
from neighbours import engine_agents as engine_agents


def client(url: str) -> inngest.Inngest:
    return inngest.Inngest(app_id="shop", api_base_url=url, event_api_base_url=url, is_production=False)


@asynccontextmanager
async def served(app: inngest.Inngest, functions: list[inngest.Function[Any]], port: int) -> AsyncIterator[str]:
    """Functions behind HTTP, for as long as the block lasts."""
    api = fastapi.FastAPI()
    inngest.fast_api.serve(api, app, functions)
    server = uvicorn.Server(uvicorn.Config(api, port=port, log_level="error", timeout_graceful_shutdown=5))
    serving = asyncio.create_task(server.serve())
    try:
        yield f"http://127.0.0.1:{port}/api/inngest"
    finally:
        server.should_exit = True
        await serving


def plain_payer(app: inngest.Inngest) -> inngest.Function[Any]:
    """The same payment as a function of Inngest's alone."""

    async def pay(whom: str) -> str:
        world = Path(os.environ["PLAIN_WORLD"])
        with world.open("a") as ledger:
            ledger.write(f"paid {whom}\n")
        dying = world.with_suffix(".die")
        if dying.exists():
            dying.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return "paid"

    @app.create_function(fn_id="plain", trigger=inngest.TriggerEvent(event="plain"), retries=20)
    async def plain(ctx: inngest.Context) -> str:
        return await ctx.step.run("pay", pay, str(ctx.event.data["whom"]))

    return plain


async def main(store: str, url: str, port: str, alone: str = "") -> None:
    app = client(url)
    if alone:
        async with served(app, [plain_payer(app)], int(port)):
            await asyncio.Event().wait()
    async with killick.open_async(store) as kd, Inngest(kd, app) as engine, served(app, engine.functions, int(port)):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
