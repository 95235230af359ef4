"""A deep agent whose subagent pays an order. Run it twice: the second time nothing is paid or asked.

python examples/neighbours/deep_agent.py
killick show langgraph:order-A7
"""

from __future__ import annotations

from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, ChatResult

import killick
from killick.adapters.langgraph import KillickSaver
from killick.adapters.langgraph.deepagents import create_deep_agent
from killick.adapters.langgraph.middleware import KillickMiddleware

TASK = "Pay 5 for order A7."


def wish(name: str, **args: Any) -> AIMessage:
    return AIMessage("", tool_calls=[{"name": name, "args": args, "id": name, "type": "tool_call"}])


class Scripted(BaseChatModel):
    """Stands for a model: it gives a subagent the task to pay, and that one pays."""

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Any, **_: Any) -> Any:
        return self

    def _generate(self, messages: list[Any], *_: Any, **__: Any) -> ChatResult:
        delegating = wish("task", description=TASK, subagent_type="general-purpose")
        boss, clerk = (delegating, AIMessage("A7 is paid.")), (wish("pay", order="A7", amount=5), AIMessage("Paid."))
        script = clerk if any(message.content == TASK for message in messages) else boss
        turn = sum(isinstance(message, AIMessage) for message in messages)
        print("the model is asked")
        return ChatResult(generations=[ChatGeneration(message=script[turn])])


def pay(order: str, amount: int) -> str:
    """Pay for an order."""
    print(f"paying {amount} for {order}")
    return "paid"


with killick.open("killick.db") as kd:
    agent = create_deep_agent(Scripted(), [pay], gate=KillickMiddleware(kd, models=True), checkpointer=KillickSaver(kd))
    thread: Any = {"configurable": {"thread_id": "order-A7"}}
    begun = agent.get_state(thread).values
    out = agent.invoke(None if begun else {"messages": [("user", "See to order A7.")]}, thread)
    print(out["messages"][-1].content)
