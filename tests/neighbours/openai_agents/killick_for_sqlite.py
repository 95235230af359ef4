"""A pytest plugin for the SDK's own tests: for a SQLiteSession they get a KillickSession, and are marked by it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import agents.memory
import agents.memory.sqlite_session
import pytest
from agents.memory import SQLiteSession

import agents
import killick
from killick.adapters.openai_agents import KillickSession

_MEMORY = TemporaryDirectory()
_made: list[KillickSession] = []


class Session(KillickSession):
    """Takes the arguments of a SQLiteSession."""

    def __init__(
        self, session_id: str, db_path: str | Path = ":memory:", *tables: str, session_settings: Any = None
    ) -> None:
        place = Path(_MEMORY.name) / str(len(_made)) if str(db_path) == ":memory:" else Path(db_path)
        client = killick.open(str(place.with_suffix(".killick")), durability="process")
        super().__init__(session_id, client, session_settings=session_settings)
        _made.append(self)

    def close(self) -> None:
        self._shelf.client.close()


for module in (agents, agents.memory, agents.memory.sqlite_session):
    assert module.SQLiteSession is SQLiteSession  # type: ignore[attr-defined]
    module.SQLiteSession = Session  # type: ignore[attr-defined]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A test that made one has the property `session`."""
    before = len(_made)
    try:
        return (yield)
    finally:
        if len(_made) > before:
            item.user_properties.append(("session", "killick"))
