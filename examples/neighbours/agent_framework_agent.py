"""An agent of Microsoft Agent Framework that pays an order. Run it twice: the second time nothing is paid or asked.

python examples/neighbours/agent_framework_agent.py
killick show order-A7
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from agent_framework import (
    Agent,
    BaseChatClient,
    ChatMiddlewareLayer,
    ChatResponse,
    Content,
    FunctionInvocationLayer,
    Message,
    tool,
)

import killick
from killick.adapters.agent_framework import KillickChat, KillickTools


class Scripted(FunctionInvocationLayer, ChatMiddlewareLayer, BaseChatClient):
    """Stands for a model: first it looks, then it pays, then it says so."""

    script = (
        Content.from_function_call("call_1", "look_up", arguments={"order": "A7"}),
        Content.from_function_call("call_2", "pay", arguments={"order": "A7", "amount": 5}),
        Content.from_text("A7 is paid."),
    )

    def _inner_get_response(self, *, messages: Sequence[Message], **_: Any) -> Any:
        async def said() -> ChatResponse:
            turn = sum(message.role == "assistant" for message in messages)
            print(f"the model is asked, turn {turn + 1}")
            return ChatResponse(messages=[Message("assistant", [self.script[turn]])])

        return said()


@tool
def look_up(order: str) -> str:
    """What an order costs."""
    return f"{order} costs 5"


@tool
def pay(order: str, amount: int) -> str:
    """Pay for an order."""
    print(f"paying {amount} for {order}")
    return "paid"


async def main() -> None:
    gates = [KillickChat(), KillickTools(tools={"look_up": {"effect": "reads"}})]
    agent = Agent(client=Scripted(), tools=[look_up, pay], middleware=gates)
    with killick.open("killick.db") as kd:
        async with kd.host("order-A7", agent="clerk"):
            print(await agent.run("Pay for order A7."))


if __name__ == "__main__":
    asyncio.run(main())
