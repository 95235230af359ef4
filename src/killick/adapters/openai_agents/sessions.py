"""Stored SDK conversations: each item once, by its id. Runs nothing."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, Final

from agents.models.fake_id import FAKE_RESPONSES_ID

from agents import SessionSettings, TResponseInputItem
from killick.adapters.framework_state import FrameworkState, StateEntry, StateOwner, in_thread
from killick.client.client import AnyClient
from killick.ids import RandomIds
from killick.model.codec import digest

SPACE: Final = "openai-agents"
"""The name prefix of this adapter's logs in a store."""

TURNS: Final = f"{SPACE}-turns"


class KillickSession(StateOwner):
    """A `Session`: a conversation's items on any store, deduplicated by id.

    A repeated item, after a resume or a crash, is the stored one. An item without an id, such as a user message, can be
    deduplicated only within a turn: pass `turn`, the id of the message being answered. The session then shows the items
    before it, and stores the turn's items once, for any number of attempts. `KillickRunner` does that itself.
    """

    def __init__(
        self, session_id: str, store: AnyClient | str | os.PathLike[str], *, turn: str | None = None,
        session_settings: SessionSettings | dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Takes an open client, which stays open, or a store's location, which `close` closes."""
        self.session_id = session_id
        self.session_settings: SessionSettings | None = SessionSettings().resolve(session_settings)
        self.turn = turn
        self._shelf = FrameworkState.of(store, SPACE)
        self._said: Counter[str] = Counter()
        self._added: set[str] = set()

    def at(self, turn: str) -> KillickSession:
        """Returns the same conversation as seen by a turn that starts now, or again."""
        seen = copy(self)
        seen.turn, seen._said, seen._added = turn, Counter(), set()
        return seen

    def _seen(self, entries: Sequence[StateEntry]) -> Sequence[StateEntry]:
        """Returns all items; in a turn, those from before it, and those that it added."""
        if self.turn is None:
            return entries
        began = next((n for n, kept in enumerate(entries) if kept.labels["turn"] == self.turn), len(entries))
        return [*entries[:began], *(kept for kept in entries[began:] if kept.name in self._added)]

    @in_thread
    def get_items(self, limit: int | None = None) -> list[TResponseInputItem]:
        """Returns the items, oldest first; the last `limit`, if given here or in the settings (all, if negative)."""
        if limit is None and self.session_settings is not None:
            limit = self.session_settings.limit
        first = 0 if limit is None or limit < 0 else -limit if limit else None
        return self._shelf.values(self.session_id, lambda entries: () if first is None else self._seen(entries)[first:])

    @in_thread
    def add_items(self, items: list[TResponseInputItem]) -> None:
        """Adds items atomically; known ones stay in place."""
        there = {kept.name: kept.labels["digest"] for kept in self._shelf.entries(self.session_id)}
        fresh: dict[str, StateEntry] = {}
        for item in items:
            said = digest(item, secret_key=self._shelf.client.runtime.store.secret_key).hex()
            name = self._name(dict(item), said)
            self._added.add(name)
            if there.get(name) != said:
                fresh[name] = StateEntry(name, item, {"turn": self.turn or "", "digest": said})
        if fresh:
            self._shelf.put(self.session_id, *fresh.values())

    def _name(self, item: Mapping[str, Any], said: str) -> str:
        """Returns an item's name: its id, and within a turn its content and ordinal."""
        kind, call, own = item.get("type") or "message", item.get("call_id"), item.get("id")
        within = f"{self.turn}/" if self.turn is not None else ""
        if kind != "message" and call:
            return f"{within}{kind}:{call}"
        if own and own != FAKE_RESPONSES_ID:
            # Providers reuse message ids, so only equal content under one id is the same message.
            return f"{within}{kind}:{own}" + (f":{said[:16]}" if kind == "message" else "")
        if self.turn is None:
            return RandomIds().new("item")
        self._said[said] += 1
        return f"{within}{said[:16]}:{self._said[said]}"

    @in_thread
    def pop_item(self) -> TResponseInputItem | None:
        """Removes and returns the last item."""
        seen = self._seen(self._shelf.entries(self.session_id))
        if not seen:
            return None
        item: TResponseInputItem = seen[-1].value
        self._shelf.drop(self.session_id, seen[-1].name)
        self._added.discard(seen[-1].name)
        return item

    @in_thread
    def clear_session(self) -> None:
        """Removes the conversation from the store."""
        self._shelf.forget(self.session_id)
        self._added.clear()
        self._said.clear()


class Turns:
    """Counts a conversation's ended turns, by input. Equal inputs are the same turn until it has ended."""

    def __init__(self, session: KillickSession, said: Any) -> None:
        self._id = session.session_id
        self._shelf = FrameworkState.of(session._shelf.client, TURNS)  # pyright: ignore[reportPrivateUsage]
        self._said = digest(said, secret_key=self._shelf.client.runtime.store.secret_key).hex()[:16]
        self._ended = 0

    @in_thread
    def name(self) -> str:
        """Returns the name of the turn that starts now, or again."""
        kept = self._shelf.get(self._id, self._said)
        self._ended = 0 if kept is None else kept.value
        return f"{self._said}-{self._ended + 1}"

    @in_thread
    def end(self) -> None:
        """Ends the turn: the same input is another turn from now on."""
        self._shelf.put(self._id, StateEntry(self._said, self._ended + 1))
