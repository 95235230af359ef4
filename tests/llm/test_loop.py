"""The tool-calling loop, with the official clients against a provider that plays its part."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from killick.definitions.tools import tool
from killick.errors import KillickError, StepFailed
from killick.llm.loop import LoopResult, loop, loop_sync
from killick.llm.toolset import Toolset
from playing import (
    JSON,
    ListedRun,
    ListedSyncRun,
    Provider,
    chat,
    message,
    playing,
    response,
    response_call,
    response_reasoning,
    response_text,
    text_block,
    thinking_block,
    use_block,
)


@tool
def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: One number.
        b: Another.
    """
    return a + b


TOOLS = Toolset(add)
SUM = '{"a": 2, "b": 3}'

TURNS: dict[str, list[JSON]] = {
    "openai": [chat(None, ("c1", "add", SUM)), chat("Five.")],
    "openai-responses": [
        response(response_reasoning("Add them."), response_call("c1", "add", SUM)),
        response(response_text("Five.")),
    ],
    "anthropic": [
        message(thinking_block("Add them."), text_block("I add."), use_block("c1", "add", {"a": 2, "b": 3})),
        message(text_block("Five.")),
    ],
}


@pytest.fixture
def provider() -> Iterator[Provider]:
    with playing() as made:
        yield made


@pytest.fixture
def clients(provider: Provider) -> Iterator[dict[str, Any]]:
    """The method of a client that asks each provider."""
    with (
        openai.OpenAI(api_key="key", base_url=f"{provider.url}/v1") as gpt,
        anthropic.Anthropic(api_key="key", base_url=provider.url) as claude,
    ):
        yield {
            "openai": gpt.chat.completions.create,
            "openai-responses": gpt.responses.create,
            "anthropic": claude.messages.create,
        }


def looped(run: Any, model: Any, *, tools: Any = TOOLS, **options: Any) -> LoopResult:
    return asyncio.run(loop(run, model, tools, **{"messages": "2 and 3?", "model": "m"} | options))


@pytest.mark.parametrize("name", TURNS)
def test_the_model_is_asked_until_it_asks_for_nothing(name: str, clients: dict[str, Any], provider: Provider) -> None:
    provider.answers = list(TURNS[name])
    run = ListedRun()
    result = looped(run, clients[name])
    assert (result.text, result.turns) == ("Five.", 2)
    assert [line.split()[:3] for line in run.told()] == [
        ["model"], ["model", "decided", "add"], ["call", "add", "{'a':"], ["model"],
    ]  # fmt: skip
    first, second = provider.requests
    assert first["model"] == "m"
    assert first["tools"] == TOOLS.schemas(name)  # type: ignore[arg-type]
    asked: JSON = {"role": "user", "content": "2 and 3?"}
    place = "input" if name == "openai-responses" else "messages"
    assert first[place] == [asked]
    assert second[place] == [asked, *result.messages[1:-1]]
    assert type(result.reply).__module__.startswith(name.partition("-")[0])


def test_each_provider_is_sent_its_own_words_back_with_the_answer(clients: dict[str, Any], provider: Provider) -> None:
    sent: dict[str, list[JSON]] = {}
    for name, turns in TURNS.items():
        provider.answers = list(turns)
        looped(ListedRun(), clients[name])
        request = provider.requests[-1]
        sent[name] = request["input" if name == "openai-responses" else "messages"][1:]
    function = {"name": "add", "arguments": SUM}
    assert sent["openai"] == [
        {"role": "assistant", "content": None, "annotations": [],
         "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c1", "content": "5"},
    ]  # fmt: skip
    assert sent["openai-responses"] == [
        *TURNS["openai-responses"][0]["output"],
        {"type": "function_call_output", "call_id": "c1", "output": "5"},
    ]
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "5"}
    assert sent["anthropic"] == [
        {"role": "assistant", "content": TURNS["anthropic"][0]["content"]},
        {"role": "user", "content": [result]},
    ]


def test_the_system_prompt_and_limits_go_where_each_provider_wants_them(
    clients: dict[str, Any], provider: Provider
) -> None:
    provider.answers = [turns[-1] for turns in TURNS.values()]
    results = [looped(ListedRun(), clients[name], system="Be brief.", metadata={"user_id": "u1"}) for name in TURNS]
    spoken, instructed, claude = provider.requests
    assert spoken["messages"][0] == {"role": "system", "content": "Be brief."}
    assert instructed["instructions"] == claude["system"] == "Be brief."
    assert claude["max_tokens"] == 4096
    assert "max_tokens" not in spoken
    assert "max_tokens" not in instructed
    assert [request["metadata"] for request in provider.requests] == [{"user_id": "u1"}] * 3
    # It is no part of what was said, so that another loop can go on from there.
    assert all(result.messages[0]["role"] == "user" for result in results)


def test_a_loop_without_tools_offers_none_and_tools_of_the_provider_stand_beside_ours(
    clients: dict[str, Any], provider: Provider
) -> None:
    provider.answers = [chat("Five."), message(text_block("Five."))]
    looped(ListedRun(), clients["openai"], tools=())
    search = {"type": "web_search_20250305", "name": "web_search"}
    options: JSON = {"messages": "?", "model": "m", "max_tokens": 9, "tools": [search]}
    asyncio.run(loop(ListedRun(), clients["anthropic"], [add], **options))
    assert "tools" not in provider.requests[0]
    assert provider.requests[1]["tools"] == [*TOOLS.schemas("anthropic"), search]
    assert provider.requests[1]["max_tokens"] == 9


def test_a_replay_asks_nobody_and_ends_the_same(clients: dict[str, Any], provider: Provider) -> None:
    for name, turns in TURNS.items():
        provider.answers = list(turns)
        first = ListedRun()
        result = looped(first, clients[name])
        asked = len(provider.requests)
        again = ListedRun(first.record)
        assert looped(again, clients[name]) == result
        assert again.told() == first.told()
        assert len(provider.requests) == asked


def test_a_blocking_run_loops_the_same_way(clients: dict[str, Any], provider: Provider) -> None:
    for name, turns in TURNS.items():
        provider.answers = [*turns, *turns]
        result = loop_sync(ListedSyncRun(), clients[name], TOOLS, messages="2 and 3?", model="m")
        assert result == looped(ListedRun(), clients[name])


def test_an_asynchronous_client_is_awaited(provider: Provider) -> None:
    async def ask() -> LoopResult:
        async with anthropic.AsyncAnthropic(api_key="key", base_url=provider.url) as claude:
            return await loop(ListedRun(), claude.messages.create, TOOLS, messages="2 and 3?", model="m")

    provider.answers = list(TURNS["anthropic"])
    assert asyncio.run(ask()).text == "Five."


def test_a_failed_model_call_is_tried_once_and_raised(clients: dict[str, Any], provider: Provider) -> None:
    for method in clients.values():
        with pytest.raises(StepFailed, match="500"):
            looped(ListedRun(), method)
    assert len(provider.requests) == 3


def test_what_people_say_reaches_the_model_with_its_next_call_or_makes_one(
    clients: dict[str, Any], provider: Provider
) -> None:
    provider.answers = [*TURNS["openai"], chat("Six.")]
    heard: list[Any] = [["In Roman digits."], [{"role": "user", "content": "Quick!"}, {"limit": 9}], ["And 1 more?"]]
    result = looped(ListedRun(heard=heard), clients["openai"])
    assert (result.text, result.turns) == ("Six.", 3)
    said = [each["content"] for each in result.messages if each["role"] != "assistant"]
    assert said == ["2 and 3?", "In Roman digits.", "5", "Quick!", '{"limit": 9}', "And 1 more?"]
    assert [len(request["messages"]) for request in provider.requests] == [2, 6, 8]


def test_a_model_that_only_paused_goes_on(clients: dict[str, Any], provider: Provider) -> None:
    searching = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "2+3"}}
    provider.answers = [message(searching, stop="pause_turn"), message(text_block("Five."))]
    result = looped(ListedRun(), clients["anthropic"])
    assert (result.text, result.turns) == ("Five.", 2)
    assert provider.requests[1]["messages"][1] == {"role": "assistant", "content": [searching]}


def test_a_model_that_never_stops_is_stopped(clients: dict[str, Any], provider: Provider) -> None:
    provider.answers = [TURNS["openai"][0]] * 9
    with pytest.raises(KillickError, match="after 3 turns the model still calls tools"):
        looped(ListedRun(), clients["openai"], turns_max=3)
    assert len(provider.requests) == 3


def test_a_function_of_ones_own_is_a_model_too_in_the_form_it_names() -> None:
    turns = list(TURNS["anthropic"])
    asked: list[JSON] = []

    async def ask(**request: Any) -> JSON:
        asked.append(request)
        return turns.pop(0)

    history = [{"role": "user", "content": "2 and 3?"}]
    result = looped(ListedRun(), ask, messages=history, provider="anthropic")
    assert result.text == "Five."
    assert asked[0]["tools"] == TOOLS.schemas("anthropic")
    assert history == [{"role": "user", "content": "2 and 3?"}]
    assert [len(request["messages"]) for request in asked] == [1, 3]
    assert asyncio.run(loop(ListedRun(), lambda messages: "Hello.", messages="Hi.")).text == "Hello."
