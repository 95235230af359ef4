"""KillickSession: what is kept, once, and by whom it can be read."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agents.memory import SQLiteSession
from agents.testing import ScriptedModel, assistant_message, function_call

import agents
import killick
from agents import Agent, Runner, Session, SessionSettings, function_tool
from killick.adapters.openai_agents import KillickSession
from neighbours.trying import needs

agents.set_tracing_disabled(True)


@pytest.fixture
def kd(tmp_path: Path) -> Iterator[killick.Client]:
    with killick.open(tmp_path / "killick.db") as client:
        yield client


def said(text: str) -> Any:
    return {"role": "user", "content": text}


def call(id: str, arguments: str = "{}") -> Any:  # noqa: A002
    return {"type": "function_call", "call_id": id, "id": f"fc_{id}", "name": "pay", "arguments": arguments}


def output(id: str, text: str = "paid") -> Any:  # noqa: A002
    return {"type": "function_call_output", "call_id": id, "output": text}


def message(text: str, id: str = "msg_1") -> Any:  # noqa: A002
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    return {"type": "message", "role": "assistant", "id": id, "status": "completed", "content": content}


def test_it_is_a_session_of_the_sdk(kd: killick.Client) -> None:
    assert isinstance(KillickSession("t", kd), Session)


def test_items_come_back_as_they_were_added_in_another_session_object_too(kd: killick.Client) -> None:
    items = [said("pay ann"), call("c1"), output("c1"), message("done")]
    asyncio.run(KillickSession("t", kd).add_items(items))
    assert asyncio.run(KillickSession("t", kd).get_items()) == items
    assert asyncio.run(KillickSession("other", kd).get_items()) == []


def test_an_item_of_an_id_that_is_there_is_not_added_again(kd: killick.Client) -> None:
    items = [call("c1"), output("c1"), message("done", "msg_9")]
    asyncio.run(KillickSession("t", kd).add_items(items))
    asyncio.run(KillickSession("t", kd).add_items([*items, call("c2")]))
    assert asyncio.run(KillickSession("t", kd).get_items()) == [*items, call("c2")]


def test_a_call_that_changed_under_its_id_stands_once_as_it_is_now(kd: killick.Client) -> None:
    session = KillickSession("t", kd)
    asyncio.run(session.add_items([call("c1"), output("c1", "pending")]))
    asyncio.run(session.add_items([output("c1", "paid")]))
    assert asyncio.run(session.get_items()) == [call("c1"), output("c1", "paid")]


def test_different_messages_under_one_id_are_both_kept(kd: killick.Client) -> None:
    both = [message("one", "same"), message("two", "same")]
    asyncio.run(KillickSession("t", kd).add_items(both))
    assert asyncio.run(KillickSession("t", kd).get_items()) == both


def test_placeholder_ids_of_other_providers_are_no_ids(kd: killick.Client) -> None:
    twice = [message("yes", "__fake_id__"), said("again?"), message("yes", "__fake_id__")]
    asyncio.run(KillickSession("t", kd).add_items(twice))
    assert asyncio.run(KillickSession("t", kd).get_items()) == twice


def test_what_a_person_says_twice_is_kept_twice(kd: killick.Client) -> None:
    session = KillickSession("t", kd)
    asyncio.run(session.add_items([said("hello")]))
    asyncio.run(session.add_items([said("hello")]))
    assert asyncio.run(session.get_items()) == [said("hello"), said("hello")]


def test_a_turn_that_begins_again_sees_what_was_before_it_and_adds_nothing_twice(kd: killick.Client) -> None:
    asyncio.run(KillickSession("t", kd, turn="m1").add_items([said("hi"), message("hello", "__fake_id__")]))
    first = KillickSession("t", kd, turn="m2")
    asyncio.run(first.add_items([said("pay"), said("pay"), call("c1")]))
    again = KillickSession("t", kd, turn="m2")
    assert asyncio.run(again.get_items()) == [said("hi"), message("hello", "__fake_id__")]
    asyncio.run(again.add_items([said("pay"), said("pay"), call("c1")]))
    assert asyncio.run(again.get_items())[2:] == [said("pay"), said("pay"), call("c1")]
    asyncio.run(again.add_items([output("c1")]))
    whole = [said("hi"), message("hello", "__fake_id__"), said("pay"), said("pay"), call("c1"), output("c1")]
    assert asyncio.run(KillickSession("t", kd).get_items()) == whole


def test_an_old_turn_that_is_looked_at_again_does_not_see_what_was_said_since(kd: killick.Client) -> None:
    for turn in ("m1", "m2", "m3"):
        asyncio.run(KillickSession("t", kd, turn=turn).add_items([said(turn)]))
    assert asyncio.run(KillickSession("t", kd, turn="m2").get_items()) == [said("m1")]


def test_the_same_call_id_in_another_turn_is_another_call(kd: killick.Client) -> None:
    asyncio.run(KillickSession("t", kd, turn="m1").add_items([call("call_0", '{"a":1}')]))
    asyncio.run(KillickSession("t", kd, turn="m2").add_items([call("call_0", '{"a":2}')]))
    assert len(asyncio.run(KillickSession("t", kd).get_items())) == 2


@pytest.mark.parametrize(
    ("limit", "expected"), [(None, [0, 1, 2, 3]), (2, [2, 3]), (9, [0, 1, 2, 3]), (0, []), (-1, [0, 1, 2, 3])]
)
def test_a_limit_gives_the_last_items(kd: killick.Client, limit: int | None, expected: list[int]) -> None:
    items = [said(f"{n}") for n in range(4)]
    asyncio.run(KillickSession("t", kd).add_items(items))
    assert asyncio.run(KillickSession("t", kd).get_items(limit)) == [items[n] for n in expected]
    for settings in (SessionSettings(limit=limit), {"limit": limit}):
        by_settings = KillickSession("t", kd, session_settings=settings)
        assert by_settings.session_settings == SessionSettings(limit=limit)
        assert asyncio.run(by_settings.get_items()) == [items[n] for n in expected]


@needs("openai-agents", 0, 24)
def test_settings_that_the_sdk_does_not_know_are_refused(kd: killick.Client) -> None:
    with pytest.raises(TypeError, match="limitt"):
        KillickSession("t", kd, session_settings={"limitt": 1})


def test_the_last_item_can_be_taken_back_and_added_again(kd: killick.Client) -> None:
    session = KillickSession("t", kd)
    asyncio.run(session.add_items([said("one"), call("c1")]))
    assert asyncio.run(session.pop_item()) == call("c1")
    assert asyncio.run(session.get_items()) == [said("one")]
    asyncio.run(session.add_items([call("c1")]))
    assert asyncio.run(session.get_items()) == [said("one"), call("c1")]
    assert asyncio.run(KillickSession("empty", kd).pop_item()) is None


def test_a_cleared_session_is_empty_and_can_be_used_again(kd: killick.Client) -> None:
    session = KillickSession("t", kd)
    asyncio.run(session.add_items([said("my secret is swordfish")]))
    asyncio.run(session.clear_session())
    assert asyncio.run(session.get_items()) == []
    asyncio.run(session.add_items([said("new")]))
    assert asyncio.run(KillickSession("t", kd).get_items()) == [said("new")]


def test_what_is_got_can_be_changed_without_changing_what_is_kept(kd: killick.Client) -> None:
    session = KillickSession("t", kd)
    asyncio.run(session.add_items([said("one")]))
    got: Any = asyncio.run(session.get_items())
    got[0]["content"] = "changed"
    assert asyncio.run(session.get_items()) == [said("one")]


def test_a_long_conversation_is_read_at_once(kd: killick.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    session, store, reads = KillickSession("t", kd), kd.runtime.store, list[str]()
    asyncio.run(session.add_items([said(str(n)) for n in range(200)]))
    own = store.read
    monkeypatch.setattr(store, "read", lambda run, **given: reads.append(run) or own(run, **given))
    assert asyncio.run(session.get_items()) == [said(str(n)) for n in range(200)]
    assert len(reads) == 1


def test_many_at_once_lose_nothing_and_double_nothing(kd: killick.Client) -> None:
    def work(n: int) -> None:
        session = KillickSession("t", kd)
        for m in range(5):
            asyncio.run(session.add_items([call(f"{n}-{m}"), call(f"shared-{m}")]))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found: Any = asyncio.run(KillickSession("t", kd).get_items())
    ids = [item["call_id"] for item in found]
    assert sorted(ids) == sorted([f"{n}-{m}" for n in range(4) for m in range(5)] + [f"shared-{m}" for m in range(5)])


def test_the_sdk_s_own_runner_converses_as_with_its_own_session(kd: killick.Client, tmp_path: Path) -> None:
    @function_tool
    def pay(to: str) -> str:
        return f"paid {to}"

    async def converse(session: Any) -> list[Any]:
        script = [[function_call("pay", {"to": "ann"}, call_id="c1")], [assistant_message("one", item_id="m1")]]
        model = ScriptedModel([*script, [assistant_message("two", item_id="m2")]])
        agent = Agent(name="clerk", tools=[pay], model=model)
        await Runner.run(agent, "pay ann", session=session)
        await Runner.run(agent, "and now?", session=session)
        last = model.last_call
        assert last is not None
        return [await session.get_items(), last.input]

    ours = asyncio.run(converse(KillickSession("t", kd)))
    assert ours == asyncio.run(converse(SQLiteSession("t", tmp_path / "theirs.db")))
    assert len(ours[0]) == 6


def test_its_logs_are_not_listed_among_people_s_runs(kd: killick.Client) -> None:
    asyncio.run(KillickSession("t", kd).add_items([said("one")]))
    assert not list(kd.list())
