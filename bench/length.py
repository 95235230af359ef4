"""Appending to a long log, beside appending to a short one in the same file."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Final

from bench.measure import Measure, interleaved, ratio
from bench.workload import LONG, Agent, long_run
from killick.log import Log
from killick.log.writer import SNAPSHOT_EVERY
from killick.store import SqliteStore

SHORT: Final = 1_000
BLOCK: Final = 30
ROUNDS: Final = SNAPSHOT_EVERY // BLOCK + 1
"""Together they are as many events as lie between two snapshots, so that each log has one among them."""


def measure(folder: Path) -> Iterator[Measure]:
    """One block to each in turn."""
    path = folder / "length.db"
    shutil.copy(long_run(folder, snapshots=True).path, path)
    store = SqliteStore(path)
    log = Log(store)
    Agent.started(log, "short").grow(SHORT)
    # Neither is the file's newest run: inserting at the very end of a table is a little easier.
    Agent.started(log, "newest")
    long, short = (Agent(log.open(run)) for run in ("long", "short"))
    at_long, at_short = interleaved(ROUNDS, lambda: long.append(BLOCK), lambda: short.append(BLOCK))
    log.close()
    store.close()

    def beside(figures: list[float]) -> str:
        return f"{median(figures) / BLOCK * 1e6:.0f} µs"

    yield Measure(
        name="length",
        what=f"time of an append at event {LONG:,} to one at event {SHORT:,}",
        figure=ratio(at_long, at_short),
        at_most=1.1,
        beside=f"{beside(at_long)} to {beside(at_short)}, medians of blocks of {BLOCK}",
    )
    yield Measure(
        name="length",
        what=f"the same over {ROUNDS * BLOCK:,} appends with the one snapshot among them",
        figure=sum(at_long) / sum(at_short),
        beside=f"slowest block {max(at_long) * 1e3:.1f} ms to {max(at_short) * 1e3:.1f} ms",
    )
