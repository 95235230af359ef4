"""A recorded session: what the agent does, move by move, and what each move needs to have before its eyes.

The same moves are played under every strategy. What differs is only what has to be fetched again. Holds no behaviour.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec


def key_of(tool: str, arguments: Mapping[str, Any]) -> str:
    """The call as a name: two calls of one name ask for the same thing."""
    return f"{tool} {json.dumps(arguments, sort_keys=True, ensure_ascii=False)}"


class Need(msgspec.Struct, frozen=True):
    """What a call gave, which a later move has to have before its eyes. `now`: what it would give if it ran now."""

    tool: str
    arguments: dict[str, Any]
    now: str

    @property
    def key(self) -> str:
        """The call's name."""
        return key_of(self.tool, self.arguments)


class Move(msgspec.Struct, frozen=True):
    """One intended model call: the words, the tool call with its real outcome, or none when it answers the person."""

    words: str
    tool: str | None = None
    arguments: dict[str, Any] = {}
    result: str = ""
    needs: tuple[Need, ...] = ()
    said: str | None = None
    """What a person says just before."""

    @property
    def key(self) -> str:
        """The call's name."""
        return key_of(self.tool or "", self.arguments)

    @property
    def writes(self) -> str | None:
        """The file that it changes."""
        return self.arguments["path"] if self.tool == "edit_file" else None


class Session(msgspec.Struct, frozen=True):
    """All of it."""

    name: str
    seed: int
    system: str
    tools: list[dict[str, Any]]
    moves: list[Move]
