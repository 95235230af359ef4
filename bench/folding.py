"""Reading and folding a long run, beside bare reading and decoding; and opening its state anywhere in it."""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final

from bench.measure import Measure, interleaved, ratio, seconds
from bench.workload import LONG, long_run
from killick.log import Log
from killick.model.event_codec import decode
from killick.store import SqliteStore

ROUNDS: Final = 5
SEED: Final = 20_250_615
BOUNDARIES: Final = 100
TRIES: Final = 3
"""Each is opened so often, and the best counts: what a neighbour takes of the machine is not the fold's."""


def measure(folder: Path) -> Iterator[Measure]:
    """The fold without its snapshots, then what the snapshots save."""
    path, run, _ = long_run(folder, snapshots=True)
    forgetful = folder / "folding.db"
    shutil.copy(path, forgetful)
    with closing(SqliteStore(forgetful)) as store, closing(sqlite3.connect(forgetful)) as db:
        store.forget_snapshots(run)
        log = Log(store)
        ours, theirs = interleaved(
            ROUNDS, lambda: seconds(lambda: log.folds(run, LONG)), lambda: seconds(lambda: _read_bare(db))
        )
    yield Measure(
        name="folding",
        what=f"events/s read and folded, {LONG:,} events without a snapshot, best of {ROUNDS} rounds",
        figure=LONG / min(ours),
        form="{:,.0f}/s",
        at_least=100_000,
        beside=f"median {LONG / median(ours):,.0f}/s; bare read and decode {LONG / median(theirs):,.0f}/s, "
        f"ours to that {ratio(theirs, ours):.2f} ×",
    )

    with closing(SqliteStore(path)) as store:
        log = Log(store)
        farthest = store.snapshots(run)[-1].seq - 1
        seqs = [LONG, farthest, *random.Random(SEED).sample(range(1, LONG), BOUNDARIES)]
        opened = [min(seconds(partial(log.state, run, seq)) for _ in range(TRIES)) for seq in seqs]
    for which, took in (("median", median(opened)), ("slowest", max(opened))):
        yield Measure(
            name="folding",
            what=f"time to open the state at an event, to folding all: the {which} of {len(seqs)} events",
            figure=took / min(ours),
            form="{:.2%}",
            at_most=0.05,
            beside=f"{took * 1e3:.1f} ms to {min(ours) * 1e3:,.0f} ms; at the head {opened[0] * 1e3:.1f} ms",
        )


def _read_bare(db: sqlite3.Connection) -> None:
    for _, body, _ in db.execute("SELECT id, body, hash FROM events ORDER BY id"):
        decode(body)
