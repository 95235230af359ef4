"""An agent on Restate: it sleeps on a timer of Restate's, asks a person, pays, and knows nothing of any of that.

Needs a server: `npx @restatedev/restate-server`. Where it is elsewhere, INGRESS and ADMIN say so.
"""

import asyncio
import os
import tempfile
from pathlib import Path

import httpx
from hypercorn.asyncio import serve
from hypercorn.config import Config

import killick
from killick.adapters.restate import Restate

INGRESS = os.environ.get("INGRESS", "http://localhost:8080")
ADMIN = os.environ.get("ADMIN", "http://localhost:9070")
PORT = int(os.environ.get("PORT", "9080"))


@killick.tool(effect="idempotent")
async def send_money(to: str, amount: int, key: killick.Key = killick.KEY) -> str:
    return f"{amount} to {to}"


@killick.agent
async def refund(run: killick.Run, customer: str) -> str:
    await run.sleep(1)  # a delayed invocation of Restate's: no process has to be there meanwhile
    answer = await run.ask(f"Refund {customer}?", to="managers")
    return await run.call(send_money, customer, 40) if answer.approved else "refused"


async def a_manager(kd: killick.AsyncClient) -> None:
    """Somebody elsewhere, who knows the store and nothing of Restate."""
    while not await kd.inbox():
        await asyncio.sleep(0.05)
    await kd.answer("refund-17", "approve", by="managers")


async def main() -> None:
    store, stop, config = Path(tempfile.mkdtemp()) / "killick.db", asyncio.Event(), Config()
    config.bind, config.errorlog = [f"127.0.0.1:{PORT}"], None
    async with killick.open_async(str(store)) as kd, Restate(kd, INGRESS) as engine, httpx.AsyncClient() as http:
        serving = asyncio.create_task(serve(engine.app, config, shutdown_trigger=stop.wait))
        await asyncio.sleep(0.5)
        await http.post(f"{ADMIN}/deployments", json={"uri": f"http://127.0.0.1:{PORT}", "force": True})
        handle = await engine.start(refund, "ann", id="refund-17")
        await a_manager(kd)
        print(await handle.result(30))
        await engine.drain()
        stop.set()
        await serving


if __name__ == "__main__":
    asyncio.run(main())
