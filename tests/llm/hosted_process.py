"""A framework's loop in processes that die, for tests: outside of any agent, or inside one. Run as a program.

They are forked from a process that has opened nothing, so that many deaths take seconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import killick
from killick.definitions.open_tools import open_tool
from killick.llm import external
from killick.llm.external import Host
from warm import load_client

BOOK = open_tool("book", effect="idempotent", retry=killick.Retry(attempts=100, first=0.001))
DELEGATE = open_tool("delegate", effect="reads", retry=killick.Retry(attempts=100, first=0.001))
STEPS = 2


class World:
    """The far side, in a file; and the moment at which this process is killed."""

    def __init__(self, place: Path, dies_at: int) -> None:
        self.place = place
        self.left = dies_at

    def moment(self) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    async def book(self, n: int) -> int:
        self.moment()
        attempt = external.attempt()
        assert attempt is not None
        with self.place.open("a") as file:
            file.write(json.dumps({"n": n, "key": attempt.key}) + "\n")
        self.moment()
        await asyncio.sleep(0)
        return n * 10

    async def think(self, messages: list[Any]) -> dict[str, Any]:
        with self.place.open("a") as file:
            file.write(json.dumps({"asked": len(messages)}) + "\n")
        self.moment()
        return {"calls": [len(messages) * 10 + each for each in range(3)]}


async def loop(host: Host, world: World, *, nested: bool = False) -> list[Any]:
    """Asks a model what to do, does that side by side in tasks of its own, and again."""
    messages: list[Any] = []
    for _ in range(STEPS):
        reply = await host.model(world.think, messages=list(messages))
        world.moment()

        async def one(n: int) -> Any:
            here = external.here()
            assert here is not None
            if not nested:
                return await here.call(BOOK, {"n": n}, key=f"call_{n}", fn=world.book)

            async def delegate(n: int) -> Any:
                world.moment()
                inner = external.here()
                assert inner is not None
                return await inner.call(BOOK, {"n": n}, fn=world.book)

            return await here.call(DELEGATE, {"n": n}, key=f"call_{n}", fn=delegate)

        done = await asyncio.gather(*(asyncio.create_task(one(n)) for n in reply["calls"]))
        world.moment()
        messages += [reply, done]
    return messages


def live(folder: Path, where: str, dies_at: int) -> None:
    """One process. It prints the result, unless it is killed before."""
    world = World(folder / "world", dies_at)

    @killick.agent
    async def inside(run: killick.Run) -> list[Any]:
        async with run.hosting() as host:
            return await loop(host, world, nested="nested" in where)

    async def outside(kd: killick.Client) -> list[Any]:
        async with kd.host("thread", agent="framework") as host:
            return await loop(host, world, nested="nested" in where)

    with killick.open(folder / "killick.db") as kd:
        result = kd.run(inside, id="thread") if "inside" in where else asyncio.run(outside(kd))
    print(json.dumps(result), flush=True)  # noqa: T201


def main(folder: Path, where: str, each: int) -> int:
    """Each process lives a little longer than those before: sooner or later all moments are died at. Their deaths."""
    load_client()
    deaths = 0
    while not (child := os.fork()) or (code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])):
        if not child:
            live(folder, where, 2 + deaths // each)
            os._exit(0)
        assert code == -signal.SIGKILL
        deaths += 1
        assert deaths < 60
    return deaths


if __name__ == "__main__":
    print(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))  # noqa: T201
