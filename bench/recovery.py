"""A long run whose process was killed: how soon another process has it past the last recorded step, beside peers.

Processes start and import before the clock does. The first step that is not on record only reads, so that
whoever finds it open may simply take it again.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Final
from unittest.mock import patch

import killick
from bench.measure import Measure, interleaved, ratio
from bench.peers import DBOS, LANGGRAPH, ROUNDS, Recovered, ask, fresh, let_die, release, say
from bench.steps import note, noted
from killick.store import SqliteStore

STEPS: Final = 1_000
RESUMED: Final = 15
RUN: Final = "long"
DOOMED: Final = sys.argv[1:2] == ["die"]

again: list[float] = []
past: list[float] = []


@killick.tool(effect="reads")
async def edge() -> None:
    """The first step that is not on record: one process dies in it, the next one has recovered when it gets here."""
    if DOOMED:
        # What the last step returned is on its way to the disk, and belongs to what is recovered.
        await asyncio.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)
    past.append(time.perf_counter())


@killick.agent
async def long(run: killick.Run, count: int) -> int:
    """Many effectful steps, and the one that is not on record."""
    again.append(time.perf_counter())
    for number in range(count):
        await run.call(note, number)
    await run.call(edge)
    return count


@killick.agent
async def waiting(run: killick.Run, count: int) -> None:
    """Many effectful steps, then a message that never comes."""
    for number in range(count):
        await run.call(note, number)
    await run.wait("never")


def measure(folder: Path) -> Iterator[Measure]:
    """Each dies and recovers once a round."""
    recovered: dict[str, list[Recovered]] = {module: [] for module in (__spec__.name, DBOS, LANGGRAPH)}

    def once(module: str) -> float:
        path = fresh(folder / f"recovery-{module}.db")
        let_die(module, path, STEPS)
        recovered[module].append(ask(module, "recover", path, answer=Recovered))
        assert not recovered[module][-1].repeated, f"{module} repeated a recorded step"
        return recovered[module][-1].past_seconds

    ours, dbos, langgraph = interleaved(
        ROUNDS, lambda: once(__spec__.name), lambda: once(DBOS), lambda: once(LANGGRAPH)
    )
    yield from _compared(folder / "recovery-compared.db")
    queued = min(one.again_seconds for one in recovered[DBOS])
    for peer, theirs, bar, why in (
        (release("dbos"), dbos, 20, f", of which {queued:.2f} s until its queue hands the workflow out"),
        (release("langgraph"), langgraph, None, ": it loads its last checkpoint and replays nothing"),
    ):
        yield Measure(
            name="recovery",
            what=f"speed of recovering a run of {STEPS:,} steps after a kill, to {peer}, best of {ROUNDS} rounds",
            figure=min(theirs) / min(ours),
            form="{:.1f} ×",
            at_least=bar,
            beside=f"{min(ours) * 1e3:,.0f} ms to {min(theirs) * 1e3:,.0f} ms{why}",
        )


def _compared(path: Path) -> Iterator[Measure]:
    """What it costs that each event and value is compared with the hash chain before code gets it."""
    with killick.open(str(fresh(path))) as kd:
        kd.start(waiting, STEPS, id=RUN)
        assert kd.advance(RUN).status == "waiting"

    def resume(*, compares: bool) -> float:
        with patch.object(SqliteStore, "is_checked", not compares, create=True), killick.open(str(path)) as kd:
            began = time.process_time()
            assert kd.advance(RUN).status == "waiting"
            return time.process_time() - began

    ours, without = interleaved(RESUMED, lambda: resume(compares=True), lambda: resume(compares=False))
    yield Measure(
        name="recovery",
        what=f"processor time of resuming a parked run of {STEPS:,} steps, to the same without comparing what is read",
        figure=ratio(ours, without),
        at_most=1.25,
        beside=f"{median(ours) * 1e3:,.1f} ms to {median(without) * 1e3:,.1f} ms",
    )


# the processes ------------------------------------------------------------------------------------


def die(path: Path, count: int) -> None:
    """Take the steps, and be killed in the one after them."""
    with killick.open(str(path)) as kd:
        kd.run(long, count, id=RUN)


def recover(path: Path) -> None:
    """Open the store, and go on with what is found there."""
    opens = killick.open  # the first look at it imports the client, which is no part of recovery
    began = time.perf_counter()
    with opens(str(path)) as kd:
        kd.run(long, STEPS, id=RUN)
    say(Recovered(again[0] - began, past[0] - began, len(noted)))


if __name__ == "__main__":
    asked: dict[str, Callable[..., None]] = {"die": die, "recover": recover}
    asked[sys.argv[1]](Path(sys.argv[2]), *map(int, sys.argv[3:]))
