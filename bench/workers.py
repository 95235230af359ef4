"""Two workers beside one, in processes of their own, on tools that wait: on SQLite, and on PostgreSQL."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Final

import killick
from bench.measure import Measure, interleaved, ratio
from bench.postgres import server, store_url, version
from bench.serving import WAIT_SECONDS, computes, lingers, workers
from killick.definitions.agents import Agent
from killick.store.records import RunQuery

ROUNDS: Final = 5
CONCURRENCY: Final = 10
RUNS: Final = 60
STEPS: Final = 20
POLL_SECONDS: Final = 0.02

_ids: Final = count()


def measure(folder: Path) -> Iterator[Measure]:
    """On one file, then on one server."""
    yield _beside_one(f"sqlite:///{folder}/workers.db", "one SQLite file")
    yield _on_all_cores(f"sqlite:///{folder}/processes.db")
    with server(folder) as started:
        yield _beside_one(store_url(started.url), version(started.url))


def _beside_one(url: str, where: str) -> Measure:
    killick.open(url).close()
    two, one = interleaved(ROUNDS, partial(_rate, url, 2), partial(_rate, url, 1))
    least = RUNS * STEPS / (RUNS * STEPS * WAIT_SECONDS / CONCURRENCY)
    return Measure(
        name="workers",
        what=f"steps/s of two workers to one, {CONCURRENCY} runs at once each, tools that wait 20 ms, on {where}",
        figure=ratio(two, one),
        at_least=1.8,
        beside=f"{median(two):,.0f}/s to {median(one):,.0f}/s; one that only waited would do {least:,.0f}/s",
    )


def _on_all_cores(url: str) -> Measure:
    killick.open(url).close()
    two, one = interleaved(ROUNDS, partial(_computed, url, 2), partial(_computed, url, 1))
    return Measure(
        name="workers",
        what="steps/s of two workers to one, tools that compute, on one SQLite file",
        figure=ratio(two, one),
        at_least=1.9,
        beside=f"{median(two):,.0f}/s to {median(one):,.0f}/s on {os.cpu_count()} cores",
    )


def _computed(url: str, number: int) -> float:
    with workers(url, number, concurrency=CONCURRENCY):
        return asyncio.run(_played(url, computes))


def _rate(url: str, number: int) -> float:
    with workers(url, number, concurrency=CONCURRENCY):
        return asyncio.run(_played(url, lingers))


async def _played(url: str, agent: Agent[int, int]) -> float:
    """From the first start to the last end; the clock is looked at by whoever waits."""
    loop, name = asyncio.get_running_loop(), next(_ids)
    async with killick.open_async(url) as kd:
        began = loop.time()
        await asyncio.gather(*(kd.start(agent, STEPS, id=f"{name}-{number}") for number in range(RUNS)))
        while kd.runtime.store.runs(RunQuery(status=("queued", "running", "waiting")), limit=1):
            await asyncio.sleep(POLL_SECONDS)
        return RUNS * STEPS / (loop.time() - began)
