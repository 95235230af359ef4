"""What checkpoint storages, session stores and history providers owe the framework: the same of theirs and ours."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_framework import (
    Agent,
    AgentSession,
    Content,
    FileCheckpointStorage,
    InMemoryCheckpointStorage,
    Message,
    WorkflowCheckpoint,
    WorkflowCheckpointException,
)

import killick
from killick.adapters.agent_framework import KillickCheckpointStorage, KillickHistory, KillickSessions
from neighbours.agent_framework.scripted_chat import ScriptedChat

KINDS = ["in memory", "files", "killick", "killick over a client"]


@dataclasses.dataclass
class Order:
    number: int
    due: datetime.date


ORDER = f"{Order.__module__}:{Order.__qualname__}"


@pytest.fixture(params=KINDS)
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    match request.param:
        case "in memory":
            yield InMemoryCheckpointStorage()
        case "files":
            yield FileCheckpointStorage(tmp_path, allowed_checkpoint_types=[ORDER])
        case "killick":
            ours = KillickCheckpointStorage(tmp_path / "killick.db", allowed_checkpoint_types=[ORDER])
            yield ours
            ours.close()
        case _:
            with killick.open("memory:") as kd:
                yield KillickCheckpointStorage(kd, allowed_checkpoint_types=[ORDER])


def checkpoint(name: str = "orders", **fields: Any) -> WorkflowCheckpoint:
    return WorkflowCheckpoint(workflow_name=name, graph_signature_hash="graph", **fields)


async def test_a_checkpoint_comes_back_as_it_was_and_is_nobody_elses(storage: Any) -> None:
    state = {
        "order": Order(7, datetime.date(2031, 4, 1)),
        "said": [Message("user", ["hello"])],
        "n": {"deep": [1, None]},
    }
    saved = checkpoint(state=state, metadata={"by": "ann"}, iteration_count=3, previous_checkpoint_id="before")
    assert await storage.save(saved) == saved.checkpoint_id
    loaded = await storage.load(saved.checkpoint_id)
    assert loaded.state["order"] == state["order"]
    assert loaded.state["said"][0].text == "hello"
    assert (loaded.metadata, loaded.iteration_count, loaded.previous_checkpoint_id) == ({"by": "ann"}, 3, "before")
    loaded.state["n"]["deep"].append("changed")
    assert (await storage.load(saved.checkpoint_id)).state["n"] == {"deep": [1, None]}


async def test_one_that_is_not_there_is_the_frameworks_own_error(storage: Any) -> None:
    with pytest.raises(WorkflowCheckpointException):
        await storage.load("nowhere")
    assert await storage.get_latest(workflow_name="orders") is None
    assert await storage.list_checkpoints(workflow_name="orders") == []
    assert await storage.delete("nowhere") is False


async def test_workflows_keep_theirs_apart_and_the_newest_is_by_its_timestamp(storage: Any) -> None:
    at = [f"2031-04-0{day}T00:00:00+00:00" for day in (2, 3, 1)]
    saved = [await storage.save(checkpoint(timestamp=when)) for when in at]
    other = await storage.save(checkpoint("others"))
    assert set(await storage.list_checkpoint_ids(workflow_name="orders")) == set(saved)
    assert {one.checkpoint_id for one in await storage.list_checkpoints(workflow_name="orders")} == set(saved)
    latest = await storage.get_latest(workflow_name="orders")
    assert latest.checkpoint_id == saved[1]
    assert (await storage.load(other)).workflow_name == "others"


async def test_what_is_deleted_is_gone_and_what_is_saved_again_is_there_once(storage: Any) -> None:
    first, second = checkpoint(iteration_count=1), checkpoint(iteration_count=2)
    await storage.save(first)
    await storage.save(second)
    await storage.save(dataclasses.replace(first, iteration_count=9))
    assert sorted(await storage.list_checkpoint_ids(workflow_name="orders")) == sorted(
        [first.checkpoint_id, second.checkpoint_id]
    )
    assert (await storage.load(first.checkpoint_id)).iteration_count == 9
    assert await storage.delete(first.checkpoint_id) is True
    assert await storage.delete(first.checkpoint_id) is False
    assert await storage.list_checkpoint_ids(workflow_name="orders") == [second.checkpoint_id]


async def test_a_type_that_nobody_allowed_is_refused_before_it_is_kept(tmp_path: Path) -> None:
    storage = KillickCheckpointStorage(tmp_path / "killick.db")
    with pytest.raises(WorkflowCheckpointException, match="Order"):
        await storage.save(checkpoint(state={"order": Order(7, datetime.date(2031, 4, 1))}))
    assert await storage.list_checkpoint_ids(workflow_name="orders") == []
    storage.close()


def _save_some(place: str, who: int) -> None:
    async def saving() -> None:
        storage = KillickCheckpointStorage(place)
        for n in range(10):
            await storage.save(checkpoint(checkpoint_id=f"{who}.{n}"))
        storage.close()

    asyncio.run(saving())


def test_processes_that_save_at_once_lose_none(tmp_path: Path) -> None:
    place = str(tmp_path / "killick.db")
    killick.open(place).close()
    forked = multiprocessing.get_context("fork")
    workers = [forked.Process(target=_save_some, args=(place, who)) for who in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    storage = KillickCheckpointStorage(place)
    found = asyncio.run(storage.list_checkpoint_ids(workflow_name="orders"))
    assert sorted(found) == sorted(f"{who}.{n}" for who in range(3) for n in range(10))
    storage.close()


async def test_a_conversation_that_grows_costs_what_is_new(tmp_path: Path) -> None:
    files, ours = FileCheckpointStorage(tmp_path / "files"), KillickCheckpointStorage(tmp_path / "killick.db")
    said: list[Message] = []
    for turn in range(60):
        said.append(Message("user", [f"{turn}: " + f"{turn * 7919 % 1000:04d} " * 400]))
        one = checkpoint(state={"conversation": list(said)}, iteration_count=turn)
        await files.save(one)
        await ours.save(one)
    ours.close()
    theirs = sum(file.stat().st_size for file in (tmp_path / "files").iterdir())
    mine = (tmp_path / "killick.db").stat().st_size
    print(f"60 turns of 2 KB, each a checkpoint: files {theirs / 1e6:.1f} MB, Killick {mine / 1e6:.2f} MB")
    assert mine < theirs / 8


# sessions and histories -----------------------------------------------------------------------------


async def test_a_session_is_kept_with_its_state_and_forgotten_when_it_is_deleted(tmp_path: Path) -> None:
    sessions = KillickSessions(tmp_path / "killick.db")
    session = AgentSession()
    session.state["in_memory"] = {"messages": [Message("user", ["hello"])]}
    await sessions.set("ann", session)
    session.state["in_memory"]["messages"].append(Message("assistant", ["hi"]))
    found = await sessions.get("ann")
    assert found is not None
    assert [message.text for message in found.state["in_memory"]["messages"]] == ["hello"]
    assert found.session_id == session.session_id
    await sessions.delete("ann")
    assert await sessions.get("ann") is None
    assert await sessions.get("bob") is None
    with pytest.raises(ValueError, match="session_id"):
        await sessions.get("")
    sessions.close()


async def test_an_agent_goes_on_with_what_was_said_in_another_process(tmp_path: Path) -> None:
    for turn in range(2):
        history = KillickHistory(tmp_path / "killick.db")
        agent = Agent(client=ScriptedChat("one", "two"), context_providers=[history])
        reply = await agent.run(f"turn {turn}", session=AgentSession(session_id="ann"))
        assert reply.text == ["one", "two"][turn]
        history.close()
    history = KillickHistory(tmp_path / "killick.db")
    assert [message.text for message in await history.get_messages("ann")] == ["turn 0", "one", "turn 1", "two"]
    assert await history.get_messages("bob") == []
    history.close()


async def test_a_message_that_is_saved_twice_is_there_once_and_two_that_say_the_same_are_two(tmp_path: Path) -> None:
    history = KillickHistory(tmp_path / "killick.db")
    reply = Message("assistant", [Content.from_text("yes")], message_id="m1")
    await history.save_messages("ann", [Message("user", ["again"]), reply])
    await history.save_messages(
        "ann", [reply, Message("assistant", ["more"], message_id="m1"), Message("user", ["again"])]
    )
    said = [message.text for message in await history.get_messages("ann")]
    assert said == ["again", "yes", "more", "again"]
    history.close()
