"""One run that takes effectful steps, durable against power loss: beside bare commits, DBOS and LangGraph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from statistics import median
from typing import Final

import killick
from bench.machine import Flushes, sync_us
from bench.measure import Measure, interleaved, ratio, seconds
from bench.peers import DBOS, LANGGRAPH, ROUNDS, Took, ask, fresh, in_turn, release, set_to_wal, timed
from bench.workload import BareTable
from killick.store import SqliteStore
from killick.store.protocol import raw_store

STEPS: Final = 1_000
BARE_ROUNDS: Final = 9
WARM_STEPS: Final = 4_500
"""Enough for both write-ahead logs to have gone round once: a file that still grows is slower to sync."""

FLUSH_ROUNDS: Final = 10
FLUSH_STEPS: Final = 200
"""Of a whole run, so that its start and its end are among the flushes."""

noted: list[int] = []


@killick.tool
async def note(number: int) -> int:
    """An effect that nobody may repeat."""
    noted.append(number)
    return number


@killick.agent
async def steps(run: killick.Run, count: int) -> int:
    """One effectful step after the other."""
    for number in range(count):
        await run.call(note, number)
    return count


def measure(folder: Path) -> Iterator[Measure]:
    """Beside bare commits, then beside the peers."""
    flushes, ids = Flushes(folder), count()
    with killick.open(str(folder / "steps.db")) as kd:

        def ours(steps_taken: int = STEPS) -> Took:
            run = f"steps-{next(ids)}"
            return timed(flushes, steps_taken, lambda: kd.run(steps, steps_taken, id=run))

        store = raw_store(kd.runtime.store)
        assert isinstance(store, SqliteStore)
        ours(WARM_STEPS)
        bare = BareTable(folder / "steps-bare.db", store, "steps-0")
        bare.insert(WARM_STEPS)
        rates, theirs, syncs = interleaved(
            BARE_ROUNDS,
            lambda: ours().rate,
            lambda: STEPS / seconds(lambda: bare.insert(STEPS)),
            lambda: sync_us(folder),
        )
        yield Measure(
            name="steps",
            what="effectful steps/s of one run, to bare one-row commits/s",
            figure=ratio(rates, theirs),
            at_least=0.4,
            beside=f"{median(rates):,.0f}/s to {median(theirs):,.0f}/s; fdatasync {median(syncs):.0f} µs",
        )
        least = Took.best([ours(FLUSH_STEPS) for _ in range(FLUSH_ROUNDS)])
        yield from _beside_peers(folder, ours, least.flushes)


def _beside_peers(folder: Path, ours: Callable[[], Took], our_flushes: float | None) -> Iterator[Measure]:
    killick_took, as_it_comes, in_wal, langgraph = in_turn(
        ours,
        lambda: _dbos(fresh(folder / "steps-dbos.db")),
        lambda: _dbos(set_to_wal(fresh(folder / "steps-dbos-wal.db"))),
        lambda: ask(LANGGRAPH, "one", fresh(folder / "steps-langgraph.db"), STEPS, answer=Took),
    )
    dbos = release("dbos")
    peers = (
        (f"{dbos} on SQLite, as it comes", as_it_comes, 12),
        (f"{dbos} on SQLite, its file set to WAL first", in_wal, None),
        (f'{release("langgraph")} with SqliteSaver and durability="sync"', langgraph, 4),
    )
    yield Measure(
        name="steps",
        what="device flushes a step, its run's start and end among them, the least of several rounds",
        figure=our_flushes,
        form="{:.2f}",
        at_most=1.05,
        beside="; ".join(f"{peer} {took.flushes:.2f}" for peer, took, _ in peers if took.flushes is not None),
    )
    for peer, took, bar in peers:
        yield Measure(
            name="steps",
            what=f"effectful steps/s of one run, to {peer}, best of {ROUNDS} rounds",
            figure=killick_took.rate / took.rate,
            form="{:.1f} ×",
            at_least=bar,
            beside=f"{killick_took.rate:,.0f}/s to {took.rate:,.0f}/s",
        )
    for peer, took, _ in peers:
        yield Measure(
            name="steps",
            what=f"processor time of a step, to {peer}, best of {ROUNDS} rounds",
            figure=killick_took.cpu_seconds / took.cpu_seconds,
            form="{:.3f} ×",
            at_most=0.1 if took is as_it_comes else None,
            beside=f"{killick_took.cpu_seconds * 1e6:,.0f} µs to {took.cpu_seconds * 1e6:,.0f} µs",
        )


def _dbos(path: Path) -> Took:
    return ask(DBOS, "one", path, STEPS, answer=Took)
