"""Run states of the SDK, kept until somebody goes on with them. Runs nothing."""

from __future__ import annotations

import asyncio
import os
from typing import Any, Final

from agents import Agent, RunResult, RunResultStreaming, RunState
from killick.adapters.framework_state import FrameworkState, StateEntry
from killick.client.client import Client

SPACE: Final = "openai-agents-states"
_STATE: Final = "state"


class KillickRunStates:
    """Where interrupted runs stay until their approvals are there, on any store: one state for each id.

    For those who handle interruptions themselves. What is kept includes what was said, the calls that wait and their
    approvals: the store must be one that you trust.
    """

    def __init__(self, store: Client | str | os.PathLike[str]) -> None:
        """On a client that is open, and stays so; or where the store is: then `close` closes it."""
        self._shelf = FrameworkState(store, SPACE)

    async def save(self, id: str, state: RunState[Any] | RunResult | RunResultStreaming, **options: Any) -> None:  # noqa: A002
        """Keep a state, or that of a result. `options` are those of `RunState.to_json`."""
        kept = state if isinstance(state, RunState) else state.to_state()
        await asyncio.to_thread(self._shelf.put, id, StateEntry(_STATE, kept.to_json(**options)))

    async def load(self, id: str, agent: Agent[Any], **options: Any) -> RunState[Any] | None:  # noqa: A002
        """The state that was kept, for this agent. `options` are those of `RunState.from_json`."""
        kept = await asyncio.to_thread(self._shelf.get, id, _STATE)
        if kept is None:
            return None
        found = await asyncio.to_thread(lambda: kept.value)
        return await RunState.from_json(agent, found, **options)

    async def drop(self, id: str) -> None:  # noqa: A002
        """Forget a state, out of the store too."""
        await asyncio.to_thread(self._shelf.forget, id)

    async def ids(self) -> list[str]:
        """Whose states are kept, the newest first."""
        return await asyncio.to_thread(lambda: list(self._shelf.ids()))

    def close(self) -> None:
        """Let the store go, if it was opened here."""
        self._shelf.close()
