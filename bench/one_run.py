"""One appender, one event a commit, durable against power loss: beside one bare row a commit."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Final

from bench.machine import Flushes, sync_us
from bench.measure import Measure, interleaved, ratio, seconds
from bench.workload import Agent, BareTable
from killick.log import Log
from killick.store import SqliteStore

ROUNDS: Final = 9
EVENTS: Final = 2_000
WARM_EVENTS: Final = 4_500
"""Enough for both write-ahead logs to have gone round once: a file that still grows is slower to sync."""

FLUSH_ROUNDS: Final = 15
FLUSH_EVENTS: Final = 100


def measure(folder: Path) -> Iterator[Measure]:
    """Speed first, then how often the disk is flushed for it."""
    store = SqliteStore(folder / "one.db")
    log = Log(store)
    agent = Agent.started(log, "one")
    agent.append(WARM_EVENTS)
    bare = BareTable(folder / "one-bare.db", store, "one")
    bare.insert(WARM_EVENTS)

    ours, theirs, syncs = interleaved(
        ROUNDS,
        lambda: EVENTS / agent.append(EVENTS),
        lambda: EVENTS / seconds(lambda: bare.insert(EVENTS)),
        lambda: sync_us(folder),
    )
    yield Measure(
        name="one_run",
        what="events/s of one appender, one event a durable commit, to bare one-row commits/s",
        figure=ratio(ours, theirs),
        at_least=0.6,
        beside=f"{median(ours):,.0f}/s to {median(theirs):,.0f}/s; fdatasync {median(syncs):.0f} µs",
    )
    yield _flushes(folder, agent)
    log.close()
    store.close()


# flushes ------------------------------------------------------------------------------------------


def _flushes(folder: Path, agent: Agent) -> Measure:
    flushes = Flushes(folder)
    figure, how = _by_the_device(flushes, agent) if flushes.counted else _by_strace(folder)
    return Measure(
        name="one_run",
        what="device flushes an append, the least of several rounds",
        figure=figure,
        form="{:.2f}",
        at_most=1.05,
        beside=how,
    )


def _by_the_device(flushes: Flushes, agent: Agent) -> tuple[float, str]:
    """Others flush the same disk, so the round that they disturbed least counts."""
    rounds = []
    for _ in range(FLUSH_ROUNDS):
        before = flushes.count()
        agent.append(FLUSH_EVENTS)
        rounds.append((flushes.count() - before) / FLUSH_EVENTS)
    before = flushes.count()
    time.sleep(1)
    return min(rounds), f"median {median(rounds):.2f}; {flushes.count() - before} a second while idle"


def _by_strace(folder: Path) -> tuple[float | None, str]:
    """As the calls that a process makes, less those of one that appends hardly anything."""
    strace, counts = shutil.which("strace"), list[int]()
    if strace is None:
        return None, "the device counts no flushes, and there is no strace"
    for events in (1, 1 + FLUSH_EVENTS):
        trace, path = folder / f"strace-{events}", folder / f"strace-{events}.db"
        command = [strace, "-f", "-qq", "-e", "trace=fsync,fdatasync", "-o", str(trace)]
        command += [sys.executable, "-m", __spec__.name, str(path), str(events)]
        done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, check=False)
        if done.returncode:
            return None, "the device counts no flushes, and strace may not trace"
        counts.append(len(trace.read_text().splitlines()))
    return (counts[1] - counts[0]) / FLUSH_EVENTS, "fsync and fdatasync calls, counted by strace"


if __name__ == "__main__":
    Agent.started(Log(SqliteStore(sys.argv[1])), "one").append(int(sys.argv[2]))
