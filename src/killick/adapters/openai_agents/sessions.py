"""Conversations of the SDK as they are kept: each item once, by its id. Runs nothing."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from typing import Any, Final

from agents.models.fake_id import FAKE_RESPONSES_ID

from agents import SessionSettings, TResponseInputItem
from killick.adapters.framework_state import FrameworkState, StateEntry
from killick.client.client import Client
from killick.ids import RandomIds
from killick.model.codec import digest

SPACE: Final = "openai-agents"
"""What the logs of this adapter are called by in a store."""

_TURNS: Final = f"{SPACE}-turns"


class KillickSession:
    """A `Session`: the items of a conversation on any store, each once by its id.

    An item that comes again, because a run was resumed or its process had died, is the one that is there. What has no
    id of its own, such as what a person said, can be told from a repetition only within a turn: give `turn`, the id
    of the message that is being answered, and the session shows what was said before it, and keeps what the turn
    says once, however often it is begun. `KillickRunner` does that by itself.
    """

    def __init__(
        self,
        session_id: str,
        store: Client | str | os.PathLike[str],
        *,
        turn: str | None = None,
        session_settings: SessionSettings | None = None,
    ) -> None:
        """On a client that is open, and stays so; or where the store is: then `close` closes it."""
        self.session_id = session_id
        self.session_settings: SessionSettings | None = session_settings
        self.turn = turn
        self._shelf = FrameworkState(store, SPACE)
        self._said: Counter[str] = Counter()
        self._added: set[str] = set()

    def at(self, turn: str) -> KillickSession:
        """The same conversation, as a turn of it sees it that begins now, or again."""
        seen = copy(self)
        seen.turn, seen._said, seen._added = turn, Counter(), set()
        return seen

    async def get_items(self, limit: int | None = None) -> list[TResponseInputItem]:
        """What was said, oldest first; the last `limit` items, if that is given here or in the settings."""
        if limit is None and self.session_settings is not None:
            limit = self.session_settings.limit
        return await asyncio.to_thread(self._items, limit)

    async def add_items(self, items: list[TResponseInputItem]) -> None:
        """Keep items, all of them or none; one that is there already stays where it is."""
        await asyncio.to_thread(self._add, items)

    async def pop_item(self) -> TResponseInputItem | None:
        """Take the last item back."""
        return await asyncio.to_thread(self._pop)

    async def clear_session(self) -> None:
        """Forget the conversation, out of the store too."""
        await asyncio.to_thread(self._clear)

    def close(self) -> None:
        """Let the store go, if it was opened here."""
        self._shelf.close()

    # the blocking side ------------------------------------------------------------------------

    def _seen(self) -> Sequence[StateEntry]:
        """All items; in a turn those from before it began, and those that it has added here."""
        entries = self._shelf.entries(self.session_id)
        if self.turn is None:
            return entries
        began = next((n for n, kept in enumerate(entries) if kept.labels["turn"] == self.turn), len(entries))
        return [*entries[:began], *(kept for kept in entries[began:] if kept.name in self._added)]

    def _items(self, limit: int | None) -> list[TResponseInputItem]:
        seen = self._seen()
        return [kept.value for kept in (seen if limit is None else seen[-limit:] if limit > 0 else ())]

    def _add(self, items: Iterable[TResponseInputItem]) -> None:
        there = {kept.name: kept.labels["digest"] for kept in self._shelf.entries(self.session_id)}
        fresh: dict[str, StateEntry] = {}
        for item in items:
            said = digest(item).hex()
            name = self._name(dict(item), said)
            self._added.add(name)
            if there.get(name) != said:
                fresh[name] = StateEntry(name, item, {"turn": self.turn or "", "digest": said})
        if fresh:
            self._shelf.put(self.session_id, *fresh.values())

    def _name(self, item: Mapping[str, Any], said: str) -> str:
        """By what an item is found again: its id, and within a turn what it says and the how manyth time."""
        kind, call, own = item.get("type") or "message", item.get("call_id"), item.get("id")
        within = f"{self.turn}/" if self.turn is not None else ""
        if kind != "message" and call:
            return f"{within}{kind}:{call}"
        if own and own != FAKE_RESPONSES_ID:
            # Providers reuse the ids of messages, so that only the same words under one id are the same message.
            return f"{within}{kind}:{own}" + (f":{said[:16]}" if kind == "message" else "")
        if self.turn is None:
            return RandomIds().new("item")
        self._said[said] += 1
        return f"{within}{said[:16]}:{self._said[said]}"

    def _pop(self) -> TResponseInputItem | None:
        seen = self._seen()
        if not seen:
            return None
        item: TResponseInputItem = seen[-1].value
        self._shelf.drop(self.session_id, seen[-1].name)
        self._added.discard(seen[-1].name)
        return item

    def _clear(self) -> None:
        self._shelf.forget(self.session_id)
        self._added.clear()
        self._said.clear()


class Turns:
    """How many turns of a conversation have ended, by their words. The same words are the same turn until that has
    ended, whatever else was said and answered meanwhile."""

    def __init__(self, session: KillickSession, said: Any) -> None:
        self._id = session.session_id
        self._shelf = FrameworkState(session._shelf.client, _TURNS)  # pyright: ignore[reportPrivateUsage]
        self._said = digest(said).hex()[:16]
        self._ended = 0

    async def name(self) -> str:
        """What the turn that begins now is called, or was when it began before."""
        kept = await asyncio.to_thread(self._shelf.get, self._id, self._said)
        self._ended = 0 if kept is None else kept.value
        return f"{self._said}-{self._ended + 1}"

    async def end(self) -> None:
        """The turn has its answer: the same words are another turn from now on."""
        await asyncio.to_thread(self._shelf.put, self._id, StateEntry(self._said, self._ended + 1))
