"""A deep agent whose subagent pays an order, and may die on the way: see the crash tests."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deepagents
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langgraph.checkpoint.sqlite import SqliteSaver

import killick
from killick.adapters.langgraph import KillickSaver
from killick.adapters.langgraph.deepagents import create_deep_agent
from killick.adapters.langgraph.middleware import KillickMiddleware
from neighbours.killed import World, die

THREAD: Any = {"configurable": {"thread_id": "A7"}}


def call(name: str, call_id: str = "", **args: Any) -> AIMessage:
    """A model's wish to call a tool."""
    return AIMessage("", tool_calls=[{"name": name, "args": args, "id": call_id or name, "type": "tool_call"}])


def delegate(to: str = "general-purpose", call_id: str = "task") -> AIMessage:
    """A model's wish that a subagent pays."""
    return call("task", call_id, description="Pay 5 for order A7.", subagent_type=to)


class Scripted(BaseChatModel):
    """Says the nth reply of a script, where n is how often it has spoken there. An agent with a task is the clerk."""

    boss: list[Any]
    clerk: list[Any]
    asked: int = 0

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Any, **given: Any) -> Any:
        return self

    def _generate(self, messages: Sequence[BaseMessage], *args: Any, **given: Any) -> ChatResult:
        script = self.clerk if any(message.content == "Pay 5 for order A7." for message in messages) else self.boss
        turn = sum(isinstance(message, AIMessage) for message in messages)
        self.asked += 1
        said = script[turn]
        message = AIMessage(said) if isinstance(said, str) else said.model_copy()
        message.usage_metadata = {"input_tokens": 7, "output_tokens": 3, "total_tokens": 10}
        return ChatResult(generations=[ChatGeneration(message=message)])


def model() -> Scripted:
    return Scripted(boss=[delegate(), "A7 is paid."], clerk=[call("pay", order="A7", amount=5), "5 paid"])


def _tools(world: World, dies: str) -> list[Any]:
    def pay(order: str, amount: int) -> str:
        """Pay for an order."""
        world.do("paid")
        if dies:
            die()
        return f"{amount} paid"

    return [pay]


def _said(agent: Any, saver: Any, durability: Any) -> str:
    wish = None if saver.get_tuple(THREAD) else {"messages": [("user", "See to order A7.")]}
    out = agent.invoke(wish, THREAD, durability=durability)
    asked = out.get("__interrupt__")
    return str(asked[0].value["action_requests"][0]["description"] if asked else out["messages"][-1].content)


def alone(folder: Path, durability: str, dies: str = "") -> str:
    saver = SqliteSaver(sqlite3.connect(folder / "graph.db", check_same_thread=False))
    agent = deepagents.create_deep_agent(model(), _tools(World(folder), dies), checkpointer=saver)
    return _said(agent, saver, durability)


def on_killick(folder: Path, durability: str, dies: str = "") -> str:
    with killick.open(folder / "killick.db") as kd:
        saver, gate = KillickSaver(kd), KillickMiddleware(kd, models=True)
        agent = create_deep_agent(model(), _tools(World(folder), dies), gate=gate, checkpointer=saver)
        return _said(agent, saver, durability)


def answered(folder: Path) -> str:
    with killick.open(folder / "killick.db") as kd:
        kd.answer("langgraph:A7", "happened", value="5 paid", by="ann")
    return "answered"
