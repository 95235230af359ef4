"""Deep Agents (`deepagents`): the gate in an agent and in all of its subagents.

Deep Agents gives an agent's middleware to none of its subagents, and adds a general-purpose one that has every tool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import deepagents
from deepagents.middleware.subagents import GENERAL_PURPOSE_SUBAGENT

from killick.adapters.langgraph.middleware import KillickMiddleware

_READS: Final = {name: {"effect": "reads"} for name in ("glob", "grep", "ls", "read_file", "task", "write_todos")}
"""Deep Agents' own tools that change nothing outside the graph. `task` only runs an agent, whose calls are steps."""


def create_deep_agent(
    *given: Any, gate: KillickMiddleware, middleware: Sequence[Any] = (),
    subagents: Sequence[Mapping[str, Any]] | None = None, **options: Any,
) -> Any:  # fmt: skip
    """Returns `deepagents.create_deep_agent(…)`, with the gate after its middleware and after that of each subagent.

    A compiled subagent needs the gate in its own graph. A remote one is started by a tool of this agent.
    """
    gate._tools.by_default(_READS)
    specs: list[Any] = [
        spec if spec.keys() & {"runnable", "graph_id"} else _gated(spec, gate) for spec in subagents or ()
    ]
    if not any(spec["name"] == GENERAL_PURPOSE_SUBAGENT["name"] for spec in specs):
        specs.insert(0, _gated(GENERAL_PURPOSE_SUBAGENT, gate))
    return deepagents.create_deep_agent(*given, middleware=[*middleware, gate], subagents=specs, **options)


def _gated(spec: Mapping[str, Any], gate: KillickMiddleware) -> dict[str, Any]:
    own = [each for each in spec.get("middleware", ()) if each is not gate]
    return {**spec, "middleware": [*own, gate]}
