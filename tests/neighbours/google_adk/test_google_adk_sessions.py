"""Sessions of Google ADK in a store: what the framework's own services do, and turns that are stored whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from google.adk.errors.already_exists_error import AlreadyExistsError
from google.adk.events.event import Event
from google.adk.events.event_actions import EventActions
from google.adk.sessions import BaseSessionService, InMemorySessionService
from google.adk.sessions.base_session_service import GetSessionConfig

import killick
from killick.adapters.google_adk import KillickSessions
from neighbours.google_adk.orders import said

pytestmark = pytest.mark.filterwarnings("ignore")  # of experiments and deprecations of its own

ANN = {"app_name": "orders/1", "user_id": "ann"}


def event(text: str, at: float = 1.0, **state: Any) -> Event:
    return Event(author="clerk", content=said(text), timestamp=at, actions=EventActions(state_delta=state))


async def told(service: BaseSessionService) -> list[Any]:
    """What a service answers to the same requests."""
    first = await service.create_session(**ANN, session_id="one", state={"a": 1, "app:b": 2, "user:c": 3, "temp:d": 4})
    for n, state in enumerate([{"a": 5, "app:b": 6}, {"user:c": [7], "temp:e": 8}, {}]):
        await service.append_event(first, event(f"{n}", float(n + 1), **state))
    await service.append_event(first, Event(author="clerk", content=said("half"), partial=True))
    second = await service.create_session(**ANN, session_id="two")
    bob = await service.create_session(app_name=ANN["app_name"], user_id="bob", session_id="one")
    found: list[Any] = [first.state, second.state, bob.state]
    for config in (
        None, GetSessionConfig(num_recent_events=2), GetSessionConfig(after_timestamp=2.0),
        GetSessionConfig(num_recent_events=0),
    ):  # fmt: skip
        read = await service.get_session(**ANN, session_id="one", config=config)
        assert read is not None
        found.append((read.state, [each.model_dump(mode="json") for each in read.events if each.content]))
        for each in found[-1][1]:
            del each["id"]
    listed = (await service.list_sessions(**ANN)).sessions
    found.append(sorted((each.id, str(sorted(each.state.items())), len(each.events)) for each in listed))
    found.append(len((await service.list_sessions(app_name=ANN["app_name"])).sessions))
    with pytest.raises(AlreadyExistsError):
        await service.create_session(**ANN, session_id="one")
    await service.delete_session(**ANN, session_id="one")
    found += [await service.get_session(**ANN, session_id=name) for name in ("one", "three")]
    return found


async def test_it_answers_as_the_frameworks_own_service_does(tmp_path: Path) -> None:
    sessions = KillickSessions(tmp_path / "killick.db")
    assert await told(sessions) == await told(InMemorySessionService())
    sessions.close()


async def test_a_session_is_there_in_another_process_with_all_that_was_said(tmp_path: Path) -> None:
    first = KillickSessions(tmp_path / "killick.db")
    session = await first.create_session(**ANN, session_id="one", state={"a": 1})
    await first.append_event(session, event("hello", a=2))
    first.close()
    second = KillickSessions(tmp_path / "killick.db")
    read = await second.get_session(**ANN, session_id="one")
    assert read is not None
    assert (read.state, [each.content for each in read.events]) == ({"a": 2}, [said("hello")])
    second.close()


async def test_a_turn_is_stored_whole_or_not_at_all(tmp_path: Path) -> None:
    with killick.open(tmp_path / "killick.db") as kd:
        sessions = KillickSessions(kd)
        session = await sessions.create_session(**ANN, session_id="one")

        async def turn(error: Exception | None) -> AsyncIterator[int]:
            with sessions.turn(session.app_name, session.user_id, session.id):
                await sessions.append_event(session, event("hello", a=1))
                seen = await sessions.get_session(**ANN, session_id="one")
                assert seen is not None
                yield len(seen.events)
                if error:
                    raise error

        with pytest.raises(OSError, match="no"):
            assert [each async for each in turn(OSError("no"))] == [1]
        kept = await KillickSessions(kd).get_session(**ANN, session_id="one")
        assert kept is not None
        assert (kept.events, kept.state) == ([], {})
        assert [each async for each in turn(None)] == [1]
        kept = await KillickSessions(kd).get_session(**ANN, session_id="one")
        assert kept is not None
        assert ([each.content for each in kept.events], kept.state) == ([said("hello")], {"a": 1})


async def test_sessions_written_at_once_lose_nothing(tmp_path: Path) -> None:
    with killick.open(tmp_path / "killick.db") as kd:
        first, second = KillickSessions(kd), KillickSessions(kd)
        session = await first.create_session(**ANN, session_id="one")
        same = await second.get_session(**ANN, session_id="one")
        assert same is not None
        writes = [a.append_event(b, event(f"{n}")) for n in range(10) for a, b in ((first, session), (second, same))]
        await asyncio.gather(*writes)
        read = await first.get_session(**ANN, session_id="one")
        assert read is not None
        assert len(read.events) == 20
