"""Asks a model twice and is killed in between, then does so again: with the client alone, and with it made durable.

What is imported here takes long, so both lives are forked from it; each is a process of its own.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

import anthropic

import killick

store, url = sys.argv[1:]
client = anthropic.AsyncAnthropic(base_url=url, api_key="sk")
durable = killick.durable(client)


async def asked(client: anthropic.AsyncAnthropic, how: str, times: int) -> str:
    ask: list[Any] = [{"role": "user", "content": "greet me"}] * times
    reply = await client.messages.create(model=how, max_tokens=9, messages=ask)
    return "".join(block.text for block in reply.content if block.type == "text")


@killick.tool(effect="idempotent")
async def mark() -> None: ...


@killick.agent
async def asks(run: killick.Run) -> str:
    said = await asked(durable, "killick", 1)
    await run.call(mark)  # what came before is on disk now
    if is_first:
        os.kill(os.getpid(), signal.SIGKILL)
    return said + await asked(durable, "killick", 2)


async def life() -> None:
    said = await asked(client, "alone", 1)
    print(said if is_first else said + await asked(client, "alone", 2))
    async with killick.open_async(store) as kd:
        print(await kd.run(asks, id="r"))


def lived() -> int:
    """A life, in a process of its own; how it ended."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    asyncio.run(life())
    sys.stdout.flush()
    os._exit(0)


is_first = True
assert os.WTERMSIG(lived()) == signal.SIGKILL
is_first = False
assert lived() == 0
