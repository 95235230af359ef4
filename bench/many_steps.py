"""Many runs at once, each taking effectful steps one by one, on one loop: beside DBOS."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Final

import killick
from bench.machine import Flushes
from bench.measure import Measure
from bench.peers import DBOS, ROUNDS, Took, ask, fresh, in_turn, release, set_to_wal, timed
from bench.steps import steps

RUNS: Final = 50
STEPS: Final = 10
WARM_ROUNDS: Final = 5


def measure(folder: Path) -> Iterator[Measure]:
    """Fifty and fifty, in turn."""
    flushes, ids = Flushes(folder), count()
    with killick.open(str(folder / "many-steps.db")) as kd, asyncio.Runner() as runner:

        async def all_at_once() -> None:
            await asyncio.gather(*(kd.as_async().run(steps, STEPS, id=f"run-{next(ids)}") for _ in range(RUNS)))

        def ours() -> Took:
            return timed(flushes, RUNS * STEPS, lambda: runner.run(all_at_once()))

        for _ in range(WARM_ROUNDS):
            ours()
        killick_took, as_it_comes, in_wal = in_turn(
            ours,
            lambda: _dbos(fresh(folder / "many-dbos.db")),
            lambda: _dbos(set_to_wal(fresh(folder / "many-dbos-wal.db"))),
        )
    dbos = f"{release('dbos')} on SQLite"
    for peer, took, bar in ((f"{dbos}, as it comes", as_it_comes, 40), (f"{dbos}, set to WAL first", in_wal, None)):
        yield Measure(
            name="many_steps",
            what=f"effectful steps/s of {RUNS} runs at once, {STEPS} steps each, to {peer}, best of {ROUNDS} rounds",
            figure=killick_took.rate / took.rate,
            form="{:.1f} ×",
            at_least=bar,
            beside=f"{killick_took.rate:,.0f}/s to {took.rate:,.0f}/s",
        )


def _dbos(path: Path) -> Took:
    return ask(DBOS, "many", path, RUNS, STEPS, answer=Took)
