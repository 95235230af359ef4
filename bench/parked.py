"""Many runs that wait for something outside: what they add to a process, and what it takes to wake some of them."""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Final

import msgspec

import killick
from bench.measure import Measure, seconds
from bench.peers import ask, say
from bench.steps import note
from killick.errors import RunWaiting

RUNS: Final = 10_000
WOKEN: Final = 1_000
WARM_RUNS: Final = 200
AT_ONCE: Final = 100
"""Runs that are on their way to their wait together."""

LOOKS: Final = 101
SEED: Final = 20_250_617


class Parked(msgspec.Struct, frozen=True):
    """What a process that parked and woke its runs saw; memory in megabytes, None where the kernel does not tell."""

    parking_seconds: float
    added_mb: float | None
    one_due_seconds: float
    many_due_seconds: float
    waking_seconds: float
    peak_mb: float | None


@killick.agent
async def parks(run: killick.Run, number: int) -> int:
    """A step, a wait, and an end."""
    await run.call(note, number)
    await run.wait("go")
    return number


def measure(folder: Path) -> Iterator[Measure]:
    """In a process of their own, so that its memory is theirs alone."""
    parked = ask(__spec__.name, folder / "parked.db", answer=Parked)
    yield Measure(
        name="parked",
        what=f"memory that {RUNS:,} parked runs add to the process that ran them",
        figure=parked.added_mb,
        form="{:.1f} MB",
        at_most=20,
        beside=f"each took a step and parked in {parked.parking_seconds / RUNS * 1e6:,.0f} µs",
    )
    for due, took in ((1, parked.one_due_seconds), (WOKEN, parked.many_due_seconds)):
        yield Measure(
            name="parked",
            what=f"time to find the next due run, {due:,} due among {RUNS:,} parked, median of {LOOKS} looks",
            figure=took * 1e3,
            form="{:.2f} ms",
            at_most=1,
        )
    yield Measure(
        name="parked",
        what=f"time to wake {WOKEN:,} of {RUNS:,} parked runs: each is sent to, resumed and ended",
        figure=parked.waking_seconds,
        form="{:.2f} s",
        at_most=1,
    )
    yield Measure(
        name="parked",
        what=f"memory at its peak, over what the process had before it parked {RUNS:,} and woke {WOKEN:,}",
        figure=parked.peak_mb,
        form="{:.1f} MB",
        at_most=200,
    )


# the process --------------------------------------------------------------------------------------


async def play(kd: killick.Client) -> Parked:
    """Park them all, then wake some, picked by chance."""
    await _park(kd, range(RUNS, RUNS + WARM_RUNS))
    before_mb, began = _memory_mb("VmRSS"), time.perf_counter()
    await _park(kd, range(RUNS))
    parking_seconds, after_mb = time.perf_counter() - began, _memory_mb("VmRSS")

    first, *others = random.Random(SEED).sample(range(RUNS), WOKEN + 1)
    await _send(kd, [first])
    one_due_seconds = _looking(kd)
    began = time.perf_counter()
    await _send(kd, others)
    sending_seconds = time.perf_counter() - began
    many_due_seconds = _looking(kd)
    began = time.perf_counter()
    ended = await asyncio.gather(*(kd.as_async().run(parks, number, id=_id(number)) for number in others))
    waking_seconds = sending_seconds + time.perf_counter() - began
    assert ended == others, "a run that was woken did not end"

    return Parked(
        parking_seconds=parking_seconds,
        added_mb=_grown(before_mb, after_mb),
        one_due_seconds=one_due_seconds,
        many_due_seconds=many_due_seconds,
        waking_seconds=waking_seconds,
        peak_mb=_grown(before_mb, _memory_mb("VmHWM")),
    )


async def _park(kd: killick.Client, numbers: range) -> None:
    for first in range(0, len(numbers), AT_ONCE):
        batch = numbers[first : first + AT_ONCE]
        runs = (kd.as_async().run(parks, number, id=_id(number)) for number in batch)
        for outcome in await asyncio.gather(*runs, return_exceptions=True):
            if not isinstance(outcome, RunWaiting):
                sys.exit(f"a run was to park, and there was {outcome!r}")


async def _send(kd: killick.Client, numbers: list[int]) -> None:
    await asyncio.gather(*(kd.as_async().send(_id(number), "go", {"by": "bench"}) for number in numbers))


def _looking(kd: killick.Client) -> float:
    """The seconds of what a worker asks between two runs: who is next, and when."""

    def look() -> None:
        assert kd.runtime.store.due(time.time_ns() // 1_000, limit=1)
        assert kd.runtime.store.soonest_us()

    return median(seconds(look) for _ in range(LOOKS))


def _id(number: int) -> str:
    return f"parked-{number}"


def _memory_mb(field: str) -> float | None:
    gc.collect()
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:")), None)


def _grown(before_mb: float | None, after_mb: float | None) -> float | None:
    return None if before_mb is None or after_mb is None else after_mb - before_mb


if __name__ == "__main__":
    with killick.open(sys.argv[1]) as client:
        say(asyncio.run(play(client)))
