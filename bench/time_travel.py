"""Forks and rewinds of a long run: what one costs in time and bytes, and that what it leaves opens as fast as before.

Also how fast the record is proved again, beside bare reading and hashing, and what a seal and a proof cost.
"""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from hashlib import sha256
from itertools import count
from pathlib import Path
from statistics import median
from typing import Final

import killick
from bench.measure import Measure, interleaved, ratio, seconds
from bench.postgres import server, store_url, version
from bench.workload import LONG, PRELUDE, Agent, file_bytes, long_run
from killick.audit.checkpoint import new_key
from killick.audit.proof import verify_proof
from killick.client.client import Client
from killick.log import Entry, Log
from killick.model.events import NoteMade

FORKS: Final = 60
REWINDS: Final = 30
ROUNDS: Final = 31
LOOKS: Final = 5
"""How often a state is opened in a round, of which the best counts: what a neighbour takes is not the fold's."""

SEALED: Final = 1_000
SEALED_EVENTS: Final = 11
SEED: Final = 20_261_115

_numbers: Final = count(1)


def measure(folder: Path) -> Iterator[Measure]:
    """On SQLite with its bytes, then on PostgreSQL; then proof, on SQLite."""
    path, run, _ = long_run(folder, snapshots=True)
    copy = folder / "travel.db"
    shutil.copy(path, copy)
    with killick.open(f"sqlite:///{copy}") as kd:
        _end_step(kd, run)
        yield from _travels(kd, run, "SQLite", copy)
    yield from _verified(path)
    yield from _sealed(folder)
    with server(folder) as started:
        url = store_url(started.url)
        with killick.open(url) as kd:
            Agent.started(kd.runtime.log, run).grow(LONG)
            _end_step(kd, run)
            yield from _travels(kd, run, version(started.url), None)


def _end_step(kd: Client, run: str) -> None:
    """Bring a run to the end of the step that it is at, and let it go."""
    log = kd.runtime.log.open(run)
    Agent(log).grow(log.seq + (PRELUDE - log.seq) % 3)
    kd.runtime.store.release(run, epoch=log.epoch)


# forks and rewinds --------------------------------------------------------------------------------


def _travels(kd: Client, run: str, where: str, path: Path | None) -> Iterator[Measure]:
    chance = random.Random(SEED)
    last = (LONG - PRELUDE) // 3
    middle = [f"{chance.randrange(1, last)}:after" for _ in range(FORKS)]
    for at, places in (("now", ["now"] * FORKS), ("a step", middle)):
        before = file_bytes(path) if path is not None else 0
        took = [_fork(kd, run, place) for place in places]
        yield Measure(
            name="time_travel",
            what=f"time of a fork of {LONG:,} events at {at}, median of {FORKS}, on {where}",
            figure=median(took) * 1e3,
            form="{:.1f} ms",
            at_most=10,
            beside=f"the slowest {max(took) * 1e3:.1f} ms",
        )
        if path is not None:
            grown = (file_bytes(path) - before) / FORKS
            yield Measure(
                name="time_travel",
                what=f"bytes that a fork of {LONG:,} events at {at} adds to the file, mean of {FORKS}, on {where}",
                figure=grown / 1e3,
                form="{:.1f} KB",
                at_most=10,
            )
    yield from _opens(kd, run, where, middle[0])
    yield from _rewinds(kd, run, where, path)


def _fork(kd: Client, run: str, place: str) -> float:
    name = f"fork-{next(_numbers)}"
    return seconds(lambda: kd.fork(run, place, id=name))


def _opens(kd: Client, run: str, where: str, place: str) -> Iterator[Measure]:
    """The state of a fork beside its parent's at the same place."""
    step = kd.state(run).fold.step(place.partition(":")[0])
    assert step is not None
    for at, text, seq in (("now", "now", kd.runtime.log.head(run).seq), ("a step", place, step.ended)):
        fork = kd.fork(run, text, id=f"fork-{next(_numbers)}").id
        ours, theirs = interleaved(
            ROUNDS, partial(_opened, kd.runtime.log, fork), partial(_opened, kd.runtime.log, run, seq)
        )
        yield Measure(
            name="time_travel",
            what=f"time to open the state of a fork at {at}, to its parent's there, on {where}",
            figure=ratio(ours, theirs),
            at_most=1.1,
            beside=f"{median(ours) * 1e3:.2f} ms to {median(theirs) * 1e3:.2f} ms",
        )


def _opened(log: Log, run: str, at: int | None = None) -> float:
    return min(seconds(lambda: log.state(run, at)) for _ in range(LOOKS))


def _rewinds(kd: Client, run: str, where: str, path: Path | None) -> Iterator[Measure]:
    """Back by a few thousand events each time, so that every rewind leaves a timeline put together of parts."""
    before = file_bytes(path) if path is not None else 0
    head = min(_opened(kd.runtime.log, run) for _ in range(LOOKS))
    steps = len(kd.state(run).fold.tops)
    took = [seconds(partial(kd.rewind, run, f"{steps - 1_000 * number}:before")) for number in range(1, REWINDS + 1)]
    grown = file_bytes(path) - before if path is not None else 0
    yield Measure(
        name="time_travel",
        what=f"time of a rewind of a run of {LONG:,} events, median of {REWINDS}, on {where}",
        figure=median(took) * 1e3,
        form="{:.1f} ms",
        beside=f"the slowest {max(took) * 1e3:.1f} ms" + (f"; {grown / REWINDS / 1e3:.1f} KB each" if grown else ""),
    )
    chance = random.Random(SEED)
    places = [min(_opened(kd.runtime.log, run, chance.randrange(1, LONG)) for _ in range(LOOKS)) for _ in range(ROUNDS)]
    rewound = min(_opened(kd.runtime.log, run) for _ in range(LOOKS))
    for what, figure in (
        (f"the head after {REWINDS} rewinds", rewound),
        (f"a random event, median of {ROUNDS}", median(places)),
    ):
        yield Measure(
            name="time_travel",
            what=f"time to open the state at {what}, to the head of the run before, on {where}",
            figure=figure / head,
            beside=f"{figure * 1e3:.2f} ms to {head * 1e3:.2f} ms",
        )


# proof --------------------------------------------------------------------------------------------


def _verified(path: Path) -> Iterator[Measure]:
    """All that verification does, beside reading every row and hashing its body and its values."""
    with killick.open(f"sqlite:///{path}") as kd, closing(sqlite3.connect(path)) as db:

        def prove() -> None:
            report = kd.store.verify()
            assert not report.problems, report.problems[0]

        ours, theirs = interleaved(3, lambda: seconds(prove), lambda: seconds(lambda: _hash_bare(db)))
    yield Measure(
        name="time_travel",
        what=f"events/s of verify, {LONG:,} events, to bare reading and hashing",
        figure=ratio(theirs, ours),
        beside=f"{LONG / median(ours):,.0f}/s to {LONG / median(theirs):,.0f}/s",
    )


def _hash_bare(db: sqlite3.Connection) -> None:
    chained = b""
    for body, data in db.execute("SELECT body, data FROM events ORDER BY id"):
        sha256(data or b"").digest()
        chained = sha256(chained + sha256(body).digest()).digest()


def _sealed(folder: Path) -> Iterator[Measure]:
    """A seal over many runs, one after a single event, and one event's proof."""
    private, public = new_key()
    with killick.open(f"sqlite:///{folder}/sealed.db") as kd:
        for number in range(SEALED):
            Agent.started(kd.runtime.log, f"run-{number}").grow(SEALED_EVENTS)
        first = seconds(lambda: kd.store.seal(private))
        log = kd.runtime.log.open("run-17")
        log.append(Entry(NoteMade(at=kd.runtime.clock.now_us()), {"note": "one more"}))
        again = seconds(lambda: kd.store.seal(private))
        made = [seconds(lambda: kd.store.prove("run-17", 5)) for _ in range(ROUNDS)]
        proof = kd.store.prove("run-17", 5).file
        checked = [seconds(lambda: verify_proof(proof, public)) for _ in range(ROUNDS)]
    yield Measure(
        name="time_travel",
        what=f"time of a seal after one event, to the first over {SEALED:,} runs of {SEALED_EVENTS} events",
        figure=again / first,
        beside=f"{again * 1e3:.0f} ms to {first * 1e3:.0f} ms, {SEALED * SEALED_EVENTS / first:,.0f} events/s",
    )
    yield Measure(
        name="time_travel",
        what=f"one event's proof among {SEALED:,} runs",
        figure=len(proof) / 1e3,
        form="{:.1f} KB",
        beside=f"made in {median(made) * 1e3:.1f} ms, checked in {median(checked) * 1e3:.1f} ms",
    )
