"""A conversation of a LangGraph graph, kept by our checkpointer and by theirs: bytes on disk, and what a turn takes."""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from bench.measure import Measure, seconds

SEED: Final = 20_261_116
TURNS: Final = 200
LATE: Final = 20
"""The last so many turns are timed."""

ASKED_CHARS: Final = 120
ANSWERED_CHARS: Final = 1_650
"""With what LangGraph says of a message, a turn is 2.2 KB."""

DOCS: Final = Path(__file__).resolve().parents[1] / "docs"


def measure(folder: Path) -> Iterator[Measure]:
    """200 turns of 2.2 KB."""
    from langgraph.checkpoint.sqlite import SqliteSaver

    import killick
    from killick.adapters.langgraph import KillickSaver

    text = " ".join(" ".join(page.read_text().split()) for page in sorted(DOCS.glob("*.md")))
    ours, theirs = folder / "checkpoints.db", folder / "theirs.db"
    with killick.open(str(ours)) as client:
        own = converse(KillickSaver(client), text)
    with closing(sqlite3.connect(theirs, check_same_thread=False)) as connection:
        other = converse(SqliteSaver(connection), text)
    size, beside = ours.stat().st_size, theirs.stat().st_size
    yield Measure(
        name="checkpoints", what=f"a LangGraph thread of {TURNS} turns of 2.2 KB, in MB", figure=size / 1_000_000,
        form="{:.2f} MB", at_most=1.0, beside=f"{size:,} bytes; SqliteSaver's file is {beside:,}",
    )  # fmt: skip
    yield Measure(
        name="checkpoints", what=f"a turn of it, the last {LATE} of them, to SqliteSaver's", figure=own / other,
        at_most=1.0,
        beside=f"{own * 1_000:.1f} ms to {other * 1_000:.1f} ms",
    )  # fmt: skip


def converse(saver: Any, text: str) -> float:
    """Talk for so many turns; returns how long one of the last took."""
    from langchain_core.messages import AIMessage, HumanMessage
    from langgraph.graph import START, MessagesState, StateGraph

    chance = random.Random(SEED)

    def part(length: int) -> str:
        at = chance.randrange(len(text) - length)
        return text[at : at + length]

    def answer(state: Any) -> dict[str, Any]:
        return {"messages": [AIMessage(part(ANSWERED_CHARS), id=f"lc_run--{chance.getrandbits(128):032x}")]}

    builder: Any = StateGraph(MessagesState)
    builder.add_node("answer", answer)
    builder.add_edge(START, "answer")
    graph = builder.compile(checkpointer=saver)

    def turns(count: int) -> None:
        for _ in range(count):
            graph.invoke({"messages": [HumanMessage(part(ASKED_CHARS))]}, {"configurable": {"thread_id": "1"}})

    turns(TURNS - LATE)
    return seconds(lambda: turns(LATE)) / LATE
