"""Many runs at once, each appending one event and waiting for it: beside one bare row a commit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Final

from bench.machine import sync_us
from bench.measure import Measure, interleaved, ratio, seconds
from bench.workload import Agent, BareTable
from killick.log import Entry, Log, RunLog
from killick.store import SqliteStore

RUNS: Final = 64
ROUNDS: Final = 9
EVENTS: Final = 60
"""Events that each run appends in a round."""

BARE_EVENTS: Final = 2_000
WARM_EVENTS: Final = 4_500


def measure(folder: Path) -> Iterator[Measure]:
    """As tasks of one loop, and as threads."""
    store = SqliteStore(folder / "many.db")
    log = Log(store)
    agents = [Agent.started(log, f"run-{number}") for number in range(RUNS)]
    with asyncio.Runner() as runner:
        runner.run(_as_tasks(agents))
        bare = BareTable(folder / "many-bare.db", store, "run-0")
        bare.insert(WARM_EVENTS)
        tasks, threads, theirs, syncs = interleaved(
            ROUNDS,
            lambda: runner.run(_as_tasks(agents)),
            lambda: _as_threads(agents),
            lambda: BARE_EVENTS / seconds(lambda: bare.insert(BARE_EVENTS)),
            lambda: sync_us(folder),
        )
    for name, ours in (("tasks", tasks), ("threads", threads)):
        yield Measure(
            name="many_runs",
            what=f"events/s of {RUNS} {name}, a run each, one event at a time, to bare one-row commits/s",
            figure=ratio(ours, theirs),
            at_least=1.8,
            beside=f"{median(ours):,.0f}/s to {median(theirs):,.0f}/s; fdatasync {median(syncs):.0f} µs",
        )
    log.close()
    store.close()


async def _as_tasks(agents: Sequence[Agent]) -> float:
    async def append(log: RunLog, entries: Sequence[Entry]) -> None:
        for entry in entries:
            await log.append_soon(entry)

    work = [append(agent.log, agent.next(EVENTS)) for agent in agents]
    loop = asyncio.get_running_loop()
    began = loop.time()
    await asyncio.gather(*work)
    return RUNS * EVENTS / (loop.time() - began)


def _as_threads(agents: Sequence[Agent]) -> float:
    gate = threading.Barrier(RUNS + 1)

    def append(log: RunLog, entries: Sequence[Entry]) -> None:
        gate.wait()
        for entry in entries:
            log.append(entry)

    threads = [threading.Thread(target=append, args=(agent.log, agent.next(EVENTS))) for agent in agents]
    for thread in threads:
        thread.start()

    def work() -> None:
        gate.wait()
        for thread in threads:
            thread.join()

    return RUNS * EVENTS / seconds(work)
