"""A tool in a process of its own that writes for a while, and an agent that calls it: to be killed and run again."""

from __future__ import annotations

import time
from pathlib import Path

import kedge

LINES = 40


@kedge.tool(effect="workspace", isolate="process", retry=kedge.Retry(attempts=5))
def write_slowly(folder: Path = kedge.WORKSPACE) -> str:
    for number in range(LINES):
        with (folder / "log").open("a") as file:
            file.write(f"{number}\n")
        time.sleep(0.02)
    return (folder / "log").read_text()


@kedge.agent(workspace="work")
async def isolating(run: kedge.Run) -> str:
    return await run.call(write_slowly)


def main() -> None:
    with kedge.open("kedge.db") as kd:
        kd.run(isolating, id="r")
