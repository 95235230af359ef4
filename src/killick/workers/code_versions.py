"""Resumes diverged runs once for each version of the code, so that corrected code continues them after a deploy."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Final

from killick.definitions.agents import AGENTS
from killick.engine.control.commands import leased
from killick.engine.divergence import build_name
from killick.engine.engine import Engine
from killick.errors import LogError
from killick.log.writer import Entry
from killick.model import events as e
from killick.store.records import READ_LIMIT, RunQuery

_TAIL_EVENTS: Final = 100
"""How many of a run's last events are searched for versions that tried it."""

AGAIN_US: Final = 60_000_000
"""How long after a run was resumed for this version, and another took it, it is resumed again. Each time it doubles."""


def resume_diverged(engine: Engine, agents: Sequence[str], seen: dict[str, int]) -> None:
    """Resumes the diverged runs of these agents that this version of their code has not tried. `seen` has the heads
    that need not be looked at again."""
    versions = {name: [build_name(engine.build(agent := AGENTS.get(name))), agent.code] for name in agents}
    for row in engine.store.runs(RunQuery(status=("code_mismatch",)), limit=READ_LIMIT):
        version, head = versions.get(row.agent), engine.store.head(row.run)
        if version is None or head is None or seen.get(row.run) == head.seq:
            continue
        # One that is held is looked at again later.
        with contextlib.suppress(LogError), leased(engine.log, row.run, engine.ids.new("command")) as log:
            seen[row.run] = log.seq
            if log.fold.facts.status != "code_mismatch":
                continue
            diverged, resumed = _tried(engine, row.run, log.seq, version)
            if diverged:
                continue
            if engine.clock.now_us() < (resumed[-1] if resumed else 0) + AGAIN_US * (2 ** len(resumed) - 1):
                del seen[row.run]  # it was resumed for this version, and a worker with another one took it
            else:
                data = {"because": "another version of the code tries it", "builds": version[:1], "code": version[1]}
                log.append(Entry(e.RunResumed(at=engine.clock.now_us(), by=engine.holder), data))


def _tried(engine: Engine, run: str, last: int, version: list[Any]) -> tuple[bool, list[int]]:
    """Whether a version of the code diverged from a run lately, and when the run was resumed for it."""
    diverged, resumed = False, list[int]()
    for each in engine.log.read(run, after=max(last - _TAIL_EVENTS, 0), limit=_TAIL_EVENTS):
        if isinstance(each.event, e.RunDiverged | e.RunResumed):
            data = engine.log.data(run, each.seq)
            if data.get("builds") and [data["builds"][-1], data.get("code")] == version:
                diverged |= isinstance(each.event, e.RunDiverged)
                resumed += [each.event.at] if isinstance(each.event, e.RunResumed) else []
    return diverged, resumed
