"""A tool in a process of its own that writes for a while, and an agent that calls it: to be killed and run again."""

from __future__ import annotations

import time
from pathlib import Path

import killick

LINES = 40


@killick.tool(effect="workspace", isolate="process", retry=killick.Retry(attempts=5))
def write_slowly(folder: Path = killick.WORKSPACE) -> str:
    for number in range(LINES):
        with (folder / "log").open("a") as file:
            file.write(f"{number}\n")
        time.sleep(0.02)
    return (folder / "log").read_text()


@killick.agent(workspace="work")
async def isolating(run: killick.Run) -> str:
    return await run.call(write_slowly)


def main() -> None:
    with killick.open("killick.db") as kd:
        kd.run(isolating, id="r")
