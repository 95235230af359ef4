"""A conversation of the OpenAI Agents SDK in our session and in its SQLiteSession: a late turn, and the first read.

Both keep the same items under the SDK's own `Runner`, with a scripted model. Measured in CPU time of one process.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench.measure import Measure, interleaved

TURNS: Final = 200
LATE: Final = 2
ROUNDS: Final = 3
OPENED: Final = 500
CALLS: Final = 3
"""Tool calls in a turn: with the question and the answer it has eight items."""

TEXT: Final = "The harbor has a free berth for a ship of this length, with water and power. " * 12


def measure(folder: Path) -> Iterator[Measure]:
    """A turn at the end of 200 turns, and the first read of 500 turns."""
    from agents.memory import SQLiteSession

    import agents
    import killick
    from killick.adapters.openai_agents import KillickSession

    agents.set_tracing_disabled(True)
    with killick.open(str(folder / "sessions.db")) as client:
        ours, theirs = KillickSession("1", client), SQLiteSession("1", str(folder / "theirs.db"))
        for session in (ours, theirs):
            asyncio.run(converse(session, 1))
            asyncio.run(_fill(session, TURNS - 1))
        tasks = [partial(cpu, partial(_late, session)) for session in (ours, theirs)]
        own, other = interleaved(ROUNDS, *tasks)
        ratio = median(one / two for one, two in zip(own, other, strict=True))
        yield Measure(
            name="sessions", what=f"turn {TURNS} of an OpenAI Agents session, to SQLiteSession's", figure=ratio,
            at_most=1.2, beside=f"{median(own) / LATE * 1_000:.1f} ms to {median(other) / LATE * 1_000:.1f} ms",
        )  # fmt: skip
        theirs.close()
        asyncio.run(_fill(ours, OPENED - TURNS))
    took: list[float] = []
    for _ in range(ROUNDS):
        with closing(KillickSession("1", str(folder / "sessions.db"))) as cold:
            took.append(cpu(partial(_read, cold)))
    yield Measure(
        name="sessions", what=f"the first read of {OPENED} turns, in ms", figure=median(took) * 1_000,
        form="{:.0f} ms", at_most=60,
    )  # fmt: skip


async def _fill(session: Any, turns: int) -> None:
    """Add the items of so many turns, each as its first turn was."""
    items = (await session.get_items())[: 2 * CALLS + 2]
    for turn in range(turns):
        fresh = [dict(item) for item in items]
        for item in fresh:
            item |= {"call_id": f"{turns}-{turn}-{item['call_id']}"} if "call_id" in item else {}
        await session.add_items(fresh)


def _late(session: Any) -> None:
    asyncio.run(converse(session, LATE))


def _read(session: Any) -> None:
    asyncio.run(session.get_items())


def cpu(work: Callable[[], object]) -> float:
    """The CPU seconds of a piece of work."""
    began = time.process_time()
    work()
    return time.process_time() - began


async def converse(session: Any, turns: int) -> None:
    """Talk for so many turns."""
    from agents.testing import ScriptedModel, assistant_message, function_call

    from agents import Agent, Runner, function_tool

    def look(berth: int) -> str:
        """Look at a berth."""
        return f"{berth}: {TEXT}"

    for _ in range(turns):
        at = time.monotonic_ns()
        script = [[function_call("look", {"berth": n}, call_id=f"c{at}-{n}")] for n in range(CALLS)]
        model = ScriptedModel([*script, [assistant_message(TEXT)]])
        agent = Agent(name="harbor", model=model, tools=[function_tool(look)])
        await Runner.run(agent, f"Is there a berth at {at}?", session=session)
