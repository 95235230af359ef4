"""Stored SDK run states, until they are resumed. Runs nothing."""

from __future__ import annotations

import asyncio
import os
from typing import Any, Final

from agents import Agent, RunResult, RunResultStreaming, RunState
from killick.adapters.framework_state import FrameworkState, StateEntry, StateOwner, in_thread
from killick.client.client import AnyClient

SPACE: Final = "openai-agents-states"
_STATE: Final = "state"


class KillickRunStates(StateOwner):
    """Interrupted runs until their approvals arrive, on any store: one state for each id.

    For callers that handle interruptions themselves. A state contains the conversation, the waiting calls and their
    approvals: use a trusted store.
    """

    def __init__(self, store: AnyClient | str | os.PathLike[str]) -> None:
        """Takes an open client, which stays open, or a store's location, which `close` closes."""
        self._shelf = FrameworkState(store, SPACE)

    async def save(self, id: str, state: RunState[Any] | RunResult | RunResultStreaming, **options: Any) -> None:  # noqa: A002
        """Saves a state, or that of a result. `options` are those of `RunState.to_json`."""
        kept = state if isinstance(state, RunState) else state.to_state()
        await asyncio.to_thread(self._shelf.put, id, StateEntry(_STATE, kept.to_json(**options)))

    async def load(self, id: str, agent: Agent[Any], **options: Any) -> RunState[Any] | None:  # noqa: A002
        """Loads a state for this agent. `options` are those of `RunState.from_json`."""
        found = await self._read(id)
        return None if found is None else await RunState.from_json(agent, found, **options)

    @in_thread
    def _read(self, id: str) -> Any:  # noqa: A002
        kept = self._shelf.get(id, _STATE)
        return None if kept is None else kept.value

    @in_thread
    def drop(self, id: str) -> None:  # noqa: A002
        """Removes a state from the store."""
        self._shelf.forget(id)

    @in_thread
    def ids(self) -> list[str]:
        """Returns the ids of saved states, the newest first."""
        return list(self._shelf.ids())
