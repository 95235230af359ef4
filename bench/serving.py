"""Workers in processes of their own, and the agents that they serve. A worker ends when whoever started it does."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

import killick

ROOT: Final = Path(__file__).parents[1]
WAIT_SECONDS: Final = 0.02
COMPUTE_ROUNDS: Final = 100_000


@killick.tool(effect="idempotent")
async def linger(number: int) -> int:
    """What a far side takes."""
    await asyncio.sleep(WAIT_SECONDS)
    return number


@killick.tool(effect="idempotent")
async def clock() -> int:
    """The time by the clock that all processes of a machine share."""
    return time.monotonic_ns()


@killick.tool(effect="reads")
def compute(rounds: int) -> int:
    """Python code that uses one core."""
    return sum(number * number for number in range(rounds))


@killick.agent
async def computes(run: killick.Run, count: int) -> int:
    """One computing tool after the other."""
    for _ in range(count):
        await run.call(compute, COMPUTE_ROUNDS)
    return count


@killick.agent
async def lingers(run: killick.Run, count: int) -> int:
    """One waiting tool after the other."""
    for number in range(count):
        await run.call(linger, number)
    return count


@killick.agent
async def asks(run: killick.Run) -> int:
    """A question, and the time of the step after its answer."""
    await run.ask("Go on?")
    return await run.call(clock)


@killick.agent
async def hears(run: killick.Run) -> int:
    """The same with a message."""
    await run.wait("go")
    return await run.call(clock)


class Worker:
    """A process that serves a store."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def cpu_seconds(self) -> float:
        """Processor time that it has used so far, by the kernel."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def workers(url: str, count: int, *, concurrency: int) -> Iterator[list[Worker]]:
    """So many of them, ready, for as long as the block lasts."""
    command = [sys.executable, "-m", __spec__.name, url, str(concurrency)]
    started = [
        subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    try:
        for process in started:
            assert _end(process.stdout).readline() == "ready\n", "a worker did not begin"
        yield [Worker(process) for process in started]
    finally:
        for process in started:
            _end(process.stdin).close()
        for process in started:
            process.wait(30)
            _end(process.stdout).close()


def _end(of: IO[str] | None) -> IO[str]:
    assert of is not None
    return of


async def _serve(url: str, concurrency: int) -> None:
    async with killick.open_async(url) as kd, kd.worker(concurrency=concurrency) as worker:
        await worker.until_idle()
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], int(sys.argv[2])))
