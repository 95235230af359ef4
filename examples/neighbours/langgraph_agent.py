"""An agent of LangChain that looks at an order and pays for it, if somebody agrees. Its tools are called once.

python examples/neighbours/langgraph_agent.py
killick show langgraph:order-A7
"""

from __future__ import annotations

from typing import Any

from langchain.agents import create_agent
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from langgraph.types import Command

import killick
from killick.adapters.langgraph import KillickSaver
from killick.adapters.langgraph.middleware import KillickMiddleware


@tool
def look_up(order: str) -> str:
    """Look an order up."""
    return f"{order} costs 45"


@tool
def pay(order: str, amount: int) -> str:
    """Pay for an order."""
    print(f"paying {amount} for {order}")
    return f"paid {amount}"


class Scripted(GenericFakeChatModel):
    """Stands for a model: says the same whatever it is asked."""

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self


def wants(name: str, **args: Any) -> AIMessage:
    return AIMessage("", tool_calls=[{"name": name, "args": args, "id": f"call_{name}", "type": "tool_call"}])


def main() -> None:
    script = [wants("look_up", order="A7"), wants("pay", order="A7", amount=45), AIMessage("A7 is paid for.")]
    with killick.open("killick.db") as kd:
        tools = {"look_up": {"effect": "reads"}, "pay": {"approve": "ann", "identity": "order"}}
        agent = create_agent(
            Scripted(messages=iter(script)),
            [look_up, pay],
            middleware=[KillickMiddleware(kd, tools=tools, by="ann")],
            checkpointer=KillickSaver(kd),
        )
        thread: Any = {"configurable": {"thread_id": "order-A7"}}
        out = agent.invoke({"messages": [("user", "Pay for A7.")]}, thread)
        for asked in out["__interrupt__"]:
            print(asked.value["action_requests"][0]["description"])
        out = agent.invoke(Command(resume={"decisions": [{"type": "approve"}]}), thread)
        print(out["messages"][-1].content)


if __name__ == "__main__":
    main()
