"""KillickSessionStore: the SDK's fourteen contracts, and what they leave out."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import claude_agent_sdk
import pytest
from claude_agent_sdk import SessionStore, ToolAnnotations, tool
from claude_agent_sdk.testing import run_session_store_conformance

import killick
from killick.adapters.claude_agent import KillickSessionStore, attempt, gated
from killick.errors import DeclarationRefused

KEY: Any = {"project_key": "-home-kim-claims", "session_id": "6f9c1f3e-2d9f-4c60-8a5e-2a5c3f6f3b11"}
SUB: Any = {**KEY, "subpath": "subagents/agent-1"}


@pytest.fixture
def kd(tmp_path: Path) -> Iterator[killick.Client]:
    with killick.open(tmp_path / "killick.db") as client:
        yield client


def entry(uuid: str | None, text: str = "hi") -> Any:
    said = {"type": "user", "timestamp": "2026-01-01T00:00:00.000Z", "message": {"role": "user", "content": text}}
    return said if uuid is None else {**said, "uuid": uuid}


def loaded(store: KillickSessionStore, key: Any = KEY) -> Any:
    return asyncio.run(store.load(key))


@pytest.mark.parametrize("kind", ["sqlite", "memory"])
def test_all_fourteen_contracts_hold_and_none_is_skipped(kind: str, tmp_path: Path) -> None:
    clients: list[killick.Client] = []

    def make() -> KillickSessionStore:
        place = tmp_path / f"{len(clients)}.db" if kind == "sqlite" else "memory:"
        clients.append(killick.open(place))
        return KillickSessionStore(clients[-1])

    optional = ("list_sessions", "list_session_summaries", "delete", "list_subkeys")
    assert all(getattr(KillickSessionStore, name) is not getattr(SessionStore, name) for name in optional)
    asyncio.run(run_session_store_conformance(make))
    for client in clients:
        client.close()
    # One store to look whether there is something to skip, and one for each contract.
    assert len(clients) == 1 + 14


def test_a_batch_that_is_sent_again_is_kept_once_and_in_its_place(kd: killick.Client) -> None:
    store = KillickSessionStore(kd)
    asyncio.run(store.append(KEY, [entry("a"), entry("b"), entry(None, "title")]))
    asyncio.run(KillickSessionStore(kd).append(KEY, [entry("a"), entry("b"), entry("c"), entry("c")]))
    assert loaded(store) == [entry("a"), entry("b"), entry(None, "title"), entry("c")]


def test_a_batch_with_nothing_new_changes_no_time(kd: killick.Client) -> None:
    store = KillickSessionStore(kd)
    asyncio.run(store.append(KEY, [entry("a")]))
    before = asyncio.run(store.list_sessions(KEY["project_key"]))
    asyncio.run(store.append(KEY, [entry("a")]))
    assert asyncio.run(store.list_sessions(KEY["project_key"])) == before


def test_what_subagents_do_leaves_the_session_s_time_and_summary_alone(kd: killick.Client) -> None:
    store = KillickSessionStore(kd)
    asyncio.run(store.append(KEY, [entry("a")]))
    before = asyncio.run(store.list_session_summaries(KEY["project_key"]))
    asyncio.run(store.append(SUB, [entry("a", "of the subagent")]))
    assert asyncio.run(store.list_session_summaries(KEY["project_key"])) == before
    [listed] = asyncio.run(store.list_sessions(KEY["project_key"]))
    assert listed["mtime"] == before[0]["mtime"]


def test_names_with_slashes_and_other_signs_do_not_run_into_each_other(kd: killick.Client) -> None:
    store = KillickSessionStore(kd)
    keys: list[Any] = [
        {"project_key": "a", "session_id": "b/c"},
        {"project_key": "a", "session_id": "b", "subpath": "c"},
        {"project_key": "a/b", "session_id": "c"},
        {"project_key": "a", "session_id": "ü ~1:%2F"},
    ]
    for number, key in enumerate(keys):
        asyncio.run(store.append(key, [entry(f"{number}")]))
    for number, key in enumerate(keys):
        assert loaded(store, key) == [entry(f"{number}")]
    assert sorted(each["session_id"] for each in asyncio.run(store.list_sessions("a"))) == ["b/c", "ü ~1:%2F"]
    assert asyncio.run(store.list_subkeys({"project_key": "a", "session_id": "b"})) == ["c"]


def test_a_deleted_session_can_be_written_anew(kd: killick.Client) -> None:
    store = KillickSessionStore(kd)
    asyncio.run(store.append(KEY, [entry("a", "old")]))
    asyncio.run(store.append(SUB, [entry("s")]))
    asyncio.run(store.delete(KEY))
    asyncio.run(store.append(KEY, [entry("a", "new")]))
    assert loaded(KillickSessionStore(kd)) == [entry("a", "new")]
    assert loaded(store, SUB) is None


def test_many_writers_lose_nothing_double_nothing_and_keep_the_summary_whole(kd: killick.Client) -> None:
    def work(n: int) -> None:
        store = KillickSessionStore(kd)
        for m in range(5):
            title: Any = {**entry(f"{n}-{m}"), "customTitle": f"{n}-{m}"}
            asyncio.run(store.append(KEY, [title, entry(f"shared-{m}")]))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    entries = loaded(KillickSessionStore(kd))
    uuids = [each["uuid"] for each in entries]
    assert sorted(uuids) == sorted(
        {*(f"{n}-{m}" for n in range(4) for m in range(5)), *(f"shared-{m}" for m in range(5))}
    )
    titled = [each["customTitle"] for each in entries if "customTitle" in each]
    [summary] = asyncio.run(KillickSessionStore(kd).list_session_summaries(KEY["project_key"]))
    assert summary["data"]["custom_title"] == titled[-1]


def test_the_sdk_s_own_readers_find_what_is_kept(kd: killick.Client) -> None:
    store = KillickSessionStore(kd)
    key: Any = {**KEY, "project_key": claude_agent_sdk.project_key_for_directory("/srv/claims")}
    said = {**entry("00000000-0000-4000-8000-000000000001", "Review claim 17"), "sessionId": KEY["session_id"]}
    asyncio.run(store.append(key, [said]))

    async def read() -> list[Any]:
        listed = await claude_agent_sdk.list_sessions_from_store(store, directory="/srv/claims")
        await claude_agent_sdk.rename_session_via_store(store, KEY["session_id"], "Claim 17", directory="/srv/claims")
        named = await claude_agent_sdk.list_sessions_from_store(store, directory="/srv/claims")
        await claude_agent_sdk.delete_session_via_store(store, KEY["session_id"], directory="/srv/claims")
        return [listed[0].first_prompt, named[0].custom_title, await store.load(key)]

    assert asyncio.run(read()) == ["Review claim 17", "Claim 17", None]


def test_its_logs_are_not_listed_among_people_s_runs(kd: killick.Client) -> None:
    asyncio.run(KillickSessionStore(kd).append(KEY, [entry("a")]))
    assert not list(kd.list())


def test_tools_at_the_gate_run_once_for_one_message_and_tell_claude_what_came_of_them(kd: killick.Client) -> None:
    paid: list[Any] = []

    @tool("pay", "Pay somebody.", {"to": str, "amount": int})
    async def pay(arguments: Any) -> dict[str, Any]:
        assert attempt() is not None
        paid.append(arguments)
        return {"content": [{"type": "text", "text": "paid"}]}

    @tool("look_up", "Look somebody up.", {"type": "object", "properties": {"name": {"type": "string"}}})
    async def look_up(arguments: Any) -> dict[str, Any]:
        raise killick.NotDone("the register is closed")

    @tool("balance", "What is left.", {}, annotations=ToolAnnotations(read_only_hint=True))
    async def balance(arguments: Any) -> dict[str, Any]:
        return {"content": [{"type": "text", "text": "95"}]}

    async def message(name: str, **options: Any) -> list[dict[str, Any]]:
        known = gated(
            [pay, look_up, balance], tools={"look_up": {"effect": "reads", "retry": killick.Retry(attempts=1)}}
        )
        async with kd.host(name, **options):
            given: list[Any] = [{"to": "ann", "amount": 5}, {"name": "ann"}, {}]
            return [await each.handler(arguments) for each, arguments in zip(known, given, strict=True)]

    first = asyncio.run(message("m1"))
    assert first == asyncio.run(message("m1"))
    assert [each["content"][0]["text"] for each in first] == [
        "paid",
        "killick.errors.NotDone: the register is closed",
        "95",
    ]
    assert [each.get("is_error", False) for each in first] == [False, True, False]
    assert len(paid) == 1
    asyncio.run(message("m2"))
    assert len(paid) == 2
    small = killick.Contract("small", [killick.rules.arguments("pay", amount={"max": 3})])
    refused, *_ = asyncio.run(message("m3", contract=small))
    assert refused["is_error"]
    assert "at most 3 is allowed" in refused["content"][0]["text"]
    assert len(paid) == 2


def test_claude_is_told_that_a_call_waits_for_a_person_and_it_is_done_when_they_agreed(kd: killick.Client) -> None:
    paid: list[Any] = []

    @tool("pay", "Pay somebody.", {"amount": int})
    async def pay(arguments: Any) -> dict[str, Any]:
        paid.append(arguments)
        return {"content": [{"type": "text", "text": f"paid {arguments['amount']}"}]}

    async def message() -> dict[str, Any]:
        [known] = gated([pay], tools={"pay": {"approve": "managers"}})
        async with kd.host("m1"):
            return await known.handler({"amount": 500})

    waiting = asyncio.run(message())
    assert waiting["is_error"]
    assert waiting["content"][0]["text"].startswith("It is not done yet: m1: waits for answer")
    kd.answer("m1", "edit", value={"amount": 50}, by="mia")
    assert asyncio.run(message())["content"][0]["text"] == "paid 50"
    assert paid == [{"amount": 50}]


def test_a_killick_tool_can_be_said_for_a_tool_and_what_it_returns_is_told_as_text(kd: killick.Client) -> None:
    @killick.tool(effect="idempotent")
    async def pay(amount: int, key: killick.Key = killick.KEY) -> int:
        return amount

    @tool("pay", "Pay somebody.", {"amount": int})
    async def own(arguments: Any) -> dict[str, Any]:
        raise AssertionError

    async def message() -> dict[str, Any]:
        [known] = gated([own], tools={"pay": pay})
        async with kd.host("m1"):
            return await known.handler({"amount": 5})

    assert asyncio.run(message()) == {"content": [{"type": "text", "text": "5"}]}


def test_a_tool_at_the_gate_does_not_run_where_there_is_no_host() -> None:
    @tool("pay", "Pay somebody.", {"amount": int})
    async def pay(arguments: Any) -> dict[str, Any]:
        raise AssertionError

    with pytest.raises(DeclarationRefused, match="no host"):
        asyncio.run(gated([pay])[0].handler({"amount": 5}))


@pytest.mark.parametrize("errors", ["answer", "ask"])
def test_an_error_of_a_tool_of_which_nothing_is_said_is_its_answer_and_not_repeated(
    kd: killick.Client, errors: Any
) -> None:
    ran: list[Any] = []

    @tool("pay", "Pay somebody.", {"amount": int})
    async def pay(arguments: Any) -> dict[str, Any]:
        ran.append(arguments)
        raise ValueError("no such account")

    async def message() -> dict[str, Any]:
        [known] = gated([pay], errors=errors)
        async with kd.host("m1"):
            return await known.handler({"amount": 500})

    first = asyncio.run(message())
    assert first == asyncio.run(message())
    assert first["is_error"]
    assert ("Did it happen" in first["content"][0]["text"]) is (errors == "ask")
    assert "no such account" in first["content"][0]["text"]
    assert len(ran) == 1
