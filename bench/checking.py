"""`kedge check`: how many rehearsals a second, for agents of ten steps."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import kedge
from bench.measure import Measure, seconds
from kedge.check.checker import check
from kedge.check.findings import Report

STEPS: Final = 8
ROUNDS: Final = 3


@kedge.tool(effect="reads")
async def look(at: int) -> int:
    return at


@kedge.tool(effect="idempotent")
async def act(at: int, key: kedge.Key = kedge.KEY) -> int:
    return at


@kedge.agent
async def plain(run: kedge.Run, first: int) -> int:
    for number in range(STEPS // 2 + 1):
        await run.call(act, await run.call(look, first + number))
    return first


@kedge.agent
async def asking(run: kedge.Run, first: int) -> int:
    for number in range(STEPS // 2):
        await run.call(act, await run.call(look, first + number))
    answer = await run.ask("Once more?", timeout="72h", default="reject")
    return await run.call(act, 0) if answer.approved else first


@kedge.agent
def blocking(run: kedge.SyncRun, first: int) -> int:
    for number in range(STEPS // 2 + 1):
        run.call(act, run.call(look, first + number))
    return first


def measure(folder: Path) -> Iterator[Measure]:
    """Each agent's rehearsals, the best of some rounds."""
    logging.getLogger("kedge").setLevel(logging.CRITICAL)
    agents: list[tuple[str, kedge.Agent[Any, Any]]] = [
        ("ten calls", plain), ("nine calls and a question", asking), ("ten calls, blocking code", blocking),
    ]  # fmt: skip
    for told, agent in agents:
        reports: list[Report] = []
        best = min(seconds(lambda a=agent, r=reports: r.append(check(a, input=1))) for _ in range(ROUNDS))  # type: ignore[misc]
        assert not reports[0].findings, str(reports[0])
        yield Measure(
            name="check",
            what=f"rehearsals/s of `kedge check`, {told}",
            figure=reports[0].stories / best,
            form="{:,.0f}/s",
            at_least=200,
            beside=f"{reports[0].stories} in {best:.1f} s",
        )
