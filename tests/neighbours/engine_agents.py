"""Agents as people write them: nothing in them knows of an engine. What they do to the world is a line in a file."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import killick


def world() -> Path:
    return Path(os.environ["WORLD"])


def look(effect: killick.Effect) -> killick.Happened | killick.DidNotHappen:
    done = world().exists() and f"{effect.key}\n" in world().read_text()
    return killick.Happened("paid") if done else killick.DidNotHappen()


@killick.tool(effect="at_most_once", reconcile=look)
async def pay(whom: str, key: killick.Key = killick.KEY) -> str:
    with world().open("a") as ledger:
        ledger.write(f"paid {whom} {key}\n")
    dying = world().with_suffix(".die")
    if dying.exists() and dying.read_text() == whom:
        dying.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return "paid"


@killick.agent
async def payer(run: killick.Run, whom: str) -> str:
    return f"{whom} is {await run.call(pay, whom)}"


@killick.agent
async def patient(run: killick.Run, whom: str) -> str:
    """Pays before a timer and after it."""
    await run.call(pay, f"{whom}-before")
    await run.sleep(1.5)
    return await run.call(pay, f"{whom}-after")


@killick.agent
async def asker(run: killick.Run, whom: str) -> str:
    answer = await run.ask(f"Pay {whom}?", to="managers")
    if not answer.approved:
        return "no"
    word = await run.wait("word")
    await run.call(pay, whom)
    return f"{whom}: {word}"


@killick.agent
async def parent(run: killick.Run, whom: str) -> list[str]:
    one, two = await run.spawn(patient, f"{whom}-1"), await run.spawn(payer, f"{whom}-2")
    return [await one.result(), await two.result()]


@killick.agent
async def renewing(run: killick.Run, left: int) -> str:
    await run.call(pay, f"round-{left}")
    if left:
        await run.renew(left - 1)
    return "done"


@killick.agent
async def failing(run: killick.Run) -> None:
    raise ValueError("no such account")


@killick.tool(effect="reads")
async def model(turn: int, messages: list[str]) -> str:
    await asyncio.sleep(0.001)
    return f"{turn}: {'y' * 700}"


@killick.agent
async def talker(run: killick.Run, calls: int) -> int:
    """Calls a model again and again over a conversation of 200 KB that grows."""
    messages = [f"{number}: {'x' * 990}" for number in range(200)]
    for turn in range(calls):
        messages.append(await run.call(model, turn, messages))
    return len(messages)


@killick.agent
async def walker(run: killick.Run, steps: int) -> int:
    """Takes many steps of which none changes anything."""
    for number in range(steps):
        await run.call(model, number, [])
    return steps


@killick.agent
async def waiter(run: killick.Run, times: int) -> int:
    """Waits for a message, again and again."""
    return sum([await run.wait("number") for _ in range(times)])


@killick.tool(effect="reads")
async def dig(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "dug"


@killick.agent
async def digger(run: killick.Run) -> str:
    return await run.call(dig, 60)


@killick.agent
async def listener(run: killick.Run, times: int) -> list[int]:
    """Keeps the order of its messages."""
    return [await run.wait("number") for _ in range(times)]
