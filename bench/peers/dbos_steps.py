"""DBOS on SQLite, as its documentation has it. Asked for steps of one workflow or of many, to die, or to recover."""

# The peers are a group of their own, so the types are checked with them and without.
# mypy: disable-error-code="import-not-found"
# mypy: allow-untyped-decorators

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from dbos import DBOS, SetWorkflowID

from bench.machine import Flushes
from bench.peers import Recovered, say, timed

WARM_STEPS: Final = 300
RUN: Final = "long"
PATIENCE_SECONDS: Final = 60
DOOMED: Final = sys.argv[1:2] == ["die"]

noted: list[int] = []
again: list[float] = []
past: list[float] = []
is_past: Final = threading.Event()


@DBOS.step()
def note(number: int) -> int:
    noted.append(number)
    return number


@DBOS.step()
def edge() -> None:
    """The first step that is not on record: one process dies in it, the next one has recovered when it gets here."""
    if DOOMED:
        os.kill(os.getpid(), signal.SIGKILL)
    past.append(time.perf_counter())
    is_past.set()


@DBOS.workflow()
def steps(count: int) -> int:
    for number in range(count):
        note(number)
    return count


@DBOS.workflow()
def long(count: int) -> int:
    again.append(time.perf_counter())
    for number in range(count):
        note(number)
    edge()
    return count


def launch(path: Path) -> None:
    DBOS(config={"name": "bench", "system_database_url": f"sqlite:///{path}"})
    DBOS.launch()


def one(path: Path, count: int) -> None:
    launch(path)
    steps(WARM_STEPS)
    say(timed(Flushes(path.parent), count, lambda: steps(count)))


def many(path: Path, runs: int, count: int) -> None:
    """In threads: as tasks of a loop DBOS is a little slower."""

    def work() -> None:
        for handle in [DBOS.start_workflow(steps, count) for _ in range(runs)]:
            handle.get_result()

    launch(path)
    work()
    say(timed(Flushes(path.parent), runs * count, work))


def die(path: Path, count: int) -> None:
    launch(path)
    with SetWorkflowID(RUN):
        long(count)


def recover(path: Path) -> None:
    """Launching recovers what was pending, by itself."""
    began = time.perf_counter()
    launch(path)
    if not is_past.wait(PATIENCE_SECONDS):
        sys.exit("DBOS recovered nothing")
    repeated = len(noted)
    DBOS.retrieve_workflow(RUN).get_result()
    say(Recovered(again[0] - began, past[0] - began, repeated))


if __name__ == "__main__":
    asked: dict[str, Callable[..., None]] = {"one": one, "many": many, "die": die, "recover": recover}
    asked[sys.argv[1]](Path(sys.argv[2]), *map(int, sys.argv[3:]))
    DBOS.destroy()
