"""A model without a fake calls the tools that it is offered: each one, then in pairs; then it says a text."""

from __future__ import annotations

from typing import Any

import anthropic
import openai
import pytest
from openai.types.chat import ChatCompletion

import killick
from killick.check.checker import check
from killick.check.default_replies import TEXT, Calls, sample_reply
from killick.definitions.policy import Policy
from killick.engine.steps.intention import Intent
from killick.engine.steps.model_reply import assistant_messages, provider_of, text_of, tool_calls_of
from killick.llm.toolset import Toolset

openai_client = openai.AsyncOpenAI(api_key="none")
anthropic_client = anthropic.AsyncAnthropic(api_key="none")


@killick.tool(effect="idempotent", name="sampled_refund")
async def refund(order: str, amount: int) -> str:
    return order


@killick.tool(effect="reads", name="sampled_find")
async def find(order: str) -> str:
    return order


@killick.tool(effect="reads", name="sampled_count")
async def count(what: list[str], limit: int = 3) -> int:
    return limit


async def in_chat_form(**request: Any) -> dict[str, Any]:
    return {}


async def typed(**request: Any) -> ChatCompletion:
    raise AssertionError


MODELS = [
    openai_client.chat.completions.create, openai_client.responses.create, anthropic_client.messages.create,
    in_chat_form, typed,
]  # fmt: skip


def said(model: Any, tools: Toolset, calls: Calls = "each") -> list[list[str]]:
    """The tools that each reply of a conversation calls."""
    turns: list[list[str]] = []
    name = "input" if "Responses" in model.__qualname__ else "messages"
    history: list[Any] = [{"role": "user", "content": "begin"}]
    while not turns or turns[-1]:
        request = {name: history, "tools": tools.schemas(provider_of(model))}
        reply = sample_reply(Intent("model", "m", model, None, request, Policy()), calls)
        for made in tool_calls_of(reply):
            tools.bind(made.name, made.arguments)
        turns.append([made.name.removeprefix("sampled_") for made in tool_calls_of(reply)])
        history = [*history, *assistant_messages(reply)]
    assert text_of(reply) == TEXT
    return turns


@pytest.mark.parametrize("model", MODELS)
def test_it_calls_each_tool_once_then_in_pairs_in_every_providers_form(model: Any) -> None:
    assert said(model, Toolset(refund, find, count)) == [
        ["refund"], ["find"], ["count"], ["refund", "find"], ["count", "refund"], [],
    ]  # fmt: skip
    assert said(model, Toolset(refund)) == [["refund"], ["refund", "refund"], []]


def test_it_calls_all_at_once_or_none_where_that_is_what_completes() -> None:
    assert said(in_chat_form, Toolset(refund, find), "all") == [["refund", "find"], []]
    assert said(openai_client.chat.completions.create, Toolset(refund, find), "none") == [[]]
    assert said(openai_client.chat.completions.create, Toolset()) == [[]]


@pytest.mark.gate(1)
@pytest.mark.parametrize("model", [openai_client.chat.completions.create, anthropic_client.messages.create])
def test_a_loop_whose_only_tool_is_idempotent_without_a_key_is_found(model: Any) -> None:
    @killick.agent(name="sampled_loop")
    async def loops(run: killick.Run, question: str) -> str:
        return (await killick.loop(run, model, [refund], messages=question, model="m")).text

    report = check(loops, stories_max=60)
    assert [each.title for each in report.faults] == [
        "sampled_refund is done twice: sampled_refund(order='order', amount=1)"
    ]


def test_a_loop_with_few_turns_completes_and_its_tools_are_called() -> None:
    @killick.agent(name="sampled_short")
    async def short(run: killick.Run, question: str) -> str:
        return (await killick.loop(run, in_chat_form, [find, count], messages=question, turns_max=2)).text

    report = check(short, stories_max=30)
    assert report.left_alone == "completed"
    assert not report.faults, str(report)
    assert {"sampled_find", "sampled_count"} <= set(report.tools)
