"""Agents of one framework inside tools of another: all wait for what waits inside, and nothing happens twice."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agents.testing import ScriptedModel, assistant_message, function_call
from autogen_agentchat.agents import AssistantAgent
from langchain.agents import create_agent
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool

import agents
import killick
from agents import Agent, function_tool
from killick.adapters.autogen import KillickModelClient, KillickWorkbench
from killick.adapters.autogen import run as run_autogen
from killick.adapters.langgraph.middleware import KillickMiddleware
from killick.adapters.openai_agents import KillickRunner
from neighbours.autogen.scripted_client import ScriptedClient, call

agents.set_tracing_disabled(True)
SECONDS = 60  # only against hanging


@pytest.fixture
def kd(tmp_path: Path) -> Iterator[killick.Client]:
    with killick.open(tmp_path / "killick.db") as client:
        yield client


class Scripted(GenericFakeChatModel):
    """A model that says what it is told to, whatever tools it is given."""

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self


class Office:
    """An OpenAI agent whose tool runs a LangGraph agent, whose tool runs an AutoGen agent, which pays."""

    def __init__(self, kd: killick.Client, effect: str) -> None:
        self.kd = kd
        self.effect = {"effect": effect}
        self.paid: list[int] = []
        self.is_broken = False

    async def pay(self, amount: int) -> str:
        """Pay somebody."""
        self.paid.append(amount)
        if self.is_broken:
            raise ValueError("no such account")
        return f"paid {amount}"

    def payer(self) -> AssistantAgent:
        workbench = KillickWorkbench([self.pay], options={"pay": {"approve": "managers"}})
        script = ScriptedClient(call("deep", "pay", amount=5), "5 are paid")
        return AssistantAgent("payer", KillickModelClient(script), workbench=workbench, max_tool_iterations=5)

    def clerk(self) -> Any:
        @tool
        async def have_paid(task: str) -> str:
            """Have another pay."""
            return str((await run_autogen(self.payer(), task=task)).messages[-1].content)

        wanted = {"name": "have_paid", "args": {"task": "pay 5"}, "id": "middle", "type": "tool_call"}
        model = Scripted(messages=iter([AIMessage("", tool_calls=[wanted], id="m1"), AIMessage("it is paid")]))
        gate = KillickMiddleware(self.kd, tools={"have_paid": self.effect}, models=True)
        return create_agent(model, [have_paid], middleware=[gate])

    async def turn(self) -> str:
        @function_tool(failure_error_function=None)
        async def delegate(task: str) -> str:
            """Have a clerk do it."""
            said = await self.clerk().ainvoke({"messages": [HumanMessage(task, id="h1")]})
            return str(said["messages"][-1].content)

        runner = KillickRunner(self.kd, tools={"delegate": self.effect})
        script = [[function_call("delegate", {"task": "pay 5"}, call_id="outer")], [assistant_message("all done")]]
        boss = Agent(name="boss", model=ScriptedModel(script), tools=[delegate])
        async with asyncio.timeout(SECONDS):
            return str((await runner.run(boss, "go", turn="t1")).final_output)


def test_three_frameworks_deep_a_wait_is_waited_for_by_all_and_done_once(kd: killick.Client) -> None:
    office = Office(kd, "reads")
    for _ in range(2):
        with pytest.raises(killick.RunWaiting, match="pay"):
            asyncio.run(office.turn())
    [asked] = kd.inbox()
    kd.answer(asked, "approve", by="ann")
    assert asyncio.run(office.turn()) == "all done"
    assert office.paid == [5]
    assert kd.inbox() == []


def test_three_frameworks_deep_what_is_done_at_most_once_is_entered_again_when_a_person_says_so(
    kd: killick.Client,
) -> None:
    office = Office(kd, "at_most_once")
    with pytest.raises(killick.RunWaiting, match="pay"):
        asyncio.run(office.turn())
    kd.answer(kd.inbox()[0], "approve", by="ann")
    for name in ("delegate", "have_paid", "delegate"):
        with pytest.raises(killick.RunWaiting, match=rf"{name}.*left while"):
            asyncio.run(office.turn())
        [asked] = kd.inbox()
        kd.answer(asked, "not", by="ann")
    assert asyncio.run(office.turn()) == "all done"
    assert office.paid == [5]


def test_three_frameworks_deep_an_error_hangs_nobody_and_is_not_repeated(kd: killick.Client) -> None:
    office = Office(kd, "reads")
    office.is_broken = True
    with pytest.raises(killick.RunWaiting, match="pay"):
        asyncio.run(office.turn())
    kd.answer(kd.inbox()[0], "approve", by="ann")
    assert asyncio.run(office.turn()) == "all done"
    assert asyncio.run(office.turn()) == "all done"
    assert office.paid == [5]
