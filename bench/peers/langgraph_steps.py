"""LangGraph with its SQLite checkpointer, each superstep on disk before the next: steps of one run, to die, to recover.

A graph that loops. Its state is two numbers, because every checkpoint holds all of the state; the functional API
is slower, since it reads a run's earlier tasks again.
"""

# The peers are a group of their own, so the types are checked with them and without.
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypedDict

from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import END, START, StateGraph

from bench.machine import Flushes
from bench.peers import Recovered, say, timed

WARM_STEPS: Final = 300
RUN: Final = "long"
DOOMED: Final = sys.argv[1:2] == ["die"]

noted: list[int] = []
past: list[float] = []


class Position(TypedDict):
    number: int
    count: int


def note(position: Position) -> dict[str, int]:
    noted.append(position["number"])
    return {"number": position["number"] + 1}


def edge(position: Position) -> dict[str, int]:
    """The first step that is not on record: one process dies in it, the next one has recovered when it gets here."""
    if DOOMED:
        os.kill(os.getpid(), signal.SIGKILL)
    past.append(time.perf_counter())
    return {}


def after_note(position: Position) -> str:
    return "note" if position["number"] < position["count"] else "edge"


def compiled(saver: SqliteSaver) -> Any:
    graph: Any = StateGraph(Position)
    graph.add_node("note", note)
    graph.add_node("edge", edge)
    graph.add_edge(START, "note")
    graph.add_conditional_edges("note", after_note, ["note", "edge"])
    graph.add_edge("edge", END)
    return graph.compile(checkpointer=saver)


def steps(graph: Any, run: str, position: Position | None, *, limit: int) -> None:
    config = {"configurable": {"thread_id": run}, "recursion_limit": limit + 10}
    graph.invoke(position, config, durability="sync")


def one(path: Path, count: int) -> None:
    with SqliteSaver.from_conn_string(str(path)) as saver:
        graph = compiled(saver)
        steps(graph, "warm", Position(number=0, count=WARM_STEPS), limit=WARM_STEPS)
        start = Position(number=0, count=count)
        say(timed(Flushes(path.parent), count, lambda: steps(graph, "timed", start, limit=count)))


def die(path: Path, count: int) -> None:
    with SqliteSaver.from_conn_string(str(path)) as saver:
        steps(compiled(saver), RUN, Position(number=0, count=count), limit=count)


def recover(path: Path) -> None:
    """Invoking without an input goes on from the last checkpoint."""
    began = time.perf_counter()
    with SqliteSaver.from_conn_string(str(path)) as saver:
        steps(compiled(saver), RUN, None, limit=10)
    say(Recovered(past[0] - began, past[0] - began, len(noted)))


if __name__ == "__main__":
    asked: dict[str, Callable[..., None]] = {"one": one, "die": die, "recover": recover}
    asked[sys.argv[1]](Path(sys.argv[2]), *map(int, sys.argv[3:]))
