"""The same work as services of Restate's alone, to be seen beside it: `python plain.py PORT` serves them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import restate

from neighbours.restate.serve import served

plainly = restate.Service("plain")
models = restate.Service("models")


def pay(whom: str) -> str:
    world = Path(os.environ["PLAIN_WORLD"])
    with world.open("a") as ledger:
        ledger.write(f"paid {whom}\n")
    dying = world.with_suffix(".die")
    if dying.exists():
        dying.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return "paid"


@plainly.handler("pay")
async def payer(ctx: restate.Context, whom: str) -> str:
    return await ctx.run_typed("pay", pay, whom=whom)


@plainly.handler("talk")
async def talker(ctx: restate.Context, calls: int) -> int:
    messages = [f"{number}: {'x' * 990}" for number in range(200)]
    for turn in range(calls):
        messages.append(await ctx.service_call(model, arg={"turn": turn, "messages": messages}))
    return len(messages)


@models.handler("model")
async def model(ctx: restate.Context, request: dict[str, Any]) -> str:
    return f"{request['turn']}: {'y' * 700}"


app = restate.app([plainly, models])


async def main(port: str) -> None:
    async with served(app, int(port)):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
