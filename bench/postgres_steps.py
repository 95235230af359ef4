"""Runs that take effectful steps on PostgreSQL: beside bare commits on the same server, and DBOS on it."""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from statistics import median
from typing import Final

import psycopg

import killick
from bench.machine import sync_us
from bench.measure import Measure, interleaved, ratio, seconds
from bench.peers import ROUNDS, Took, ask, in_turn, release
from bench.postgres import Wire, flushes, server, store_url, version
from bench.steps import steps

STEPS: Final = 500
BARE_ROUNDS: Final = 9
WARM_STEPS: Final = 1_000
COUNTED_STEPS: Final = (100, 1_100)
"""Two runs: what the longer one has more of is what its steps cost."""

RUNS: Final = 50
STEPS_EACH: Final = 10
DBOS: Final = "bench.peers.dbos_postgres"


def measure(folder: Path) -> Iterator[Measure]:
    """Speed beside bare commits, what a step costs the server, and speed beside DBOS: one run, and many."""
    ids = count()
    with server(folder) as started:
        url, named = started.url, version(started.url)
        store = store_url(url)
        with killick.open(store) as kd, asyncio.Runner() as runner, Bare(url) as bare:

            def one() -> Took:
                run = f"steps-{next(ids)}"
                return _timed(STEPS, lambda: kd.run(steps, STEPS, id=run))

            async def all_at_once() -> None:
                await asyncio.gather(
                    *(kd.as_async().run(steps, STEPS_EACH, id=f"run-{next(ids)}") for _ in range(RUNS))
                )

            def many() -> Took:
                return _timed(RUNS * STEPS_EACH, lambda: runner.run(all_at_once()))

            kd.run(steps, WARM_STEPS, id="warm")
            bare.insert(WARM_STEPS)
            many()
            rates, theirs, syncs = interleaved(
                BARE_ROUNDS,
                lambda: one().rate,
                lambda: STEPS / seconds(lambda: bare.insert(STEPS)),
                lambda: sync_us(folder),
            )
            yield Measure(
                name="postgres_steps",
                what=f"effectful steps/s of one run on {named}, to bare one-row commits/s by psycopg",
                figure=ratio(rates, theirs),
                at_least=0.4,
                beside=f"{median(rates):,.0f}/s to {median(theirs):,.0f}/s; fdatasync {median(syncs):.0f} µs",
            )
            yield _flushes(url)
            yield _trips(url)
            ours, alone, ours_many, all_of_them = in_turn(
                one,
                lambda: ask(DBOS, "one", url, STEPS, answer=Took),
                many,
                lambda: ask(DBOS, "many", url, RUNS, STEPS_EACH, answer=Took),
            )
    peer = f"{release('dbos')} on the same server"
    yield _beside("one run", peer, ours, alone, 8)
    yield _beside(f"{RUNS} runs at once, {STEPS_EACH} steps each,", peer, ours_many, all_of_them, 40)


def _timed(count: int, work: object) -> Took:
    assert callable(work)
    cpu = time.process_time()
    took = seconds(work)
    return Took(took / count, (time.process_time() - cpu) / count, None)


def _beside(who: str, peer: str, ours: Took, theirs: Took, bar: float) -> Measure:
    return Measure(
        name="postgres_steps",
        what=f"effectful steps/s of {who} to {peer}, best of {ROUNDS} rounds",
        figure=ours.rate / theirs.rate,
        form="{:.1f} ×",
        at_least=bar,
        beside=f"{ours.rate:,.0f}/s to {theirs.rate:,.0f}/s",
    )


# what a step costs the server ---------------------------------------------------------------------


def _flushes(url: str) -> Measure:
    """Backends tell of their flushes when they end, so each count is of a client that came and went."""
    store, taken = store_url(url), list[int]()
    killick.open(store).close()
    for number in COUNTED_STEPS:
        before = flushes(url)
        with killick.open(store) as kd:
            kd.run(steps, number, id=f"flushed-{number}")
        taken.append(flushes(url) - before)
    return Measure(
        name="postgres_steps",
        what="flushes of the server's write-ahead log an effectful step",
        figure=_each(taken),
        form="{:.2f}",
        at_most=1.05,
        beside=" and ".join(f"{n:,} in a run of {s:,} steps" for n, s in zip(taken, COUNTED_STEPS, strict=True)),
    )


def _trips(url: str) -> Measure:
    """Through a wire that counts, which makes it slower: nothing else is measured there."""
    wire, taken = Wire(url), list[int]()
    store = store_url(wire.url)
    killick.open(store).close()
    for number in COUNTED_STEPS:
        before = wire.trips
        with killick.open(store) as kd:
            kd.run(steps, number, id=f"tripped-{number}")
        taken.append(wire.trips - before)
    wire.close()
    return Measure(
        name="postgres_steps",
        what="round trips to the server an effectful step",
        figure=_each(taken),
        form="{:.2f}",
        at_most=1.05,
        beside=" and ".join(f"{n:,} in a run of {s:,} steps" for n, s in zip(taken, COUNTED_STEPS, strict=True)),
    )


def _each(taken: list[int]) -> float:
    few, many = COUNTED_STEPS
    return (taken[1] - taken[0]) / (many - few)


class Bare:
    """One row a commit, through psycopg as it comes: a prepared INSERT of a body, its data and a hash."""

    def __init__(self, url: str) -> None:
        self._db = psycopg.connect(url, autocommit=True)
        self._db.execute("CREATE TABLE bare (id bigint PRIMARY KEY, body bytea, data bytea, hash bytea)")
        self._ids = count(1)

    def __enter__(self) -> Bare:
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()

    def insert(self, rows: int) -> None:
        body, data, digest = os.urandom(260), os.urandom(120), os.urandom(32)
        for _ in range(rows):
            self._db.execute(
                "INSERT INTO bare VALUES (%s, %s, %s, %s)", (next(self._ids), body, data, digest), prepare=True
            )
