"""`killick check`: how many rehearsals a second, for agents of ten steps."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import killick
from bench.measure import Measure, seconds
from killick.check.checker import check
from killick.check.findings import Report

STEPS: Final = 8
ROUNDS: Final = 3


@killick.tool(effect="reads")
async def look(at: int) -> int:
    return at


@killick.tool(effect="idempotent")
async def act(at: int, key: killick.Key = killick.KEY) -> int:
    return at


@killick.agent
async def plain(run: killick.Run, first: int) -> int:
    for number in range(STEPS // 2 + 1):
        await run.call(act, await run.call(look, first + number))
    return first


@killick.agent
async def asking(run: killick.Run, first: int) -> int:
    for number in range(STEPS // 2):
        await run.call(act, await run.call(look, first + number))
    answer = await run.ask("Once more?", timeout="72h", default="reject")
    return await run.call(act, 0) if answer.approved else first


@killick.agent
def blocking(run: killick.SyncRun, first: int) -> int:
    for number in range(STEPS // 2 + 1):
        run.call(act, run.call(look, first + number))
    return first


def measure(folder: Path) -> Iterator[Measure]:
    """Each agent's rehearsals, the best of some rounds."""
    logging.getLogger("killick").setLevel(logging.CRITICAL)
    agents: list[tuple[str, killick.Agent[Any, Any]]] = [
        ("ten calls", plain), ("nine calls and a question", asking), ("ten calls, blocking code", blocking),
    ]  # fmt: skip
    for told, agent in agents:
        reports: list[Report] = []
        checked = partial(check, agent, input=1)
        best = min(seconds(lambda r=reports, c=checked: r.append(c())) for _ in range(ROUNDS))  # type: ignore[misc]
        assert not reports[0].findings, str(reports[0])
        yield Measure(
            name="check",
            what=f"rehearsals/s of `killick check`, {told}",
            figure=reports[0].stories / best,
            form="{:,.0f}/s",
            at_least=200,
            beside=f"{reports[0].stories} in {best:.1f} s",
        )
