"""An agent of LlamaIndex that pays an order. Run it twice: the second time nothing is paid or asked.

python examples/neighbours/llamaindex_agent.py
killick show order-A7
"""

from __future__ import annotations

import asyncio
from typing import Any

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ToolCallBlock
from llama_index.core.llms import ChatMessage, MockFunctionCallingLLM

import killick
from killick.adapters.llamaindex import KillickRuntime, gated


def scripted(messages: Any, **_: Any) -> ChatMessage:
    """Stands for a model: first it pays, then it says so."""
    print("the model is asked")
    if any(message.role == "tool" for message in messages):
        return ChatMessage(role="assistant", content="A7 is paid.")
    call = ToolCallBlock(tool_call_id="call_1", tool_name="pay", tool_kwargs={"order": "A7", "amount": 5})
    return ChatMessage(role="assistant", blocks=[call])


async def pay(order: str, amount: int) -> str:
    """Pay for an order."""
    print(f"paying {amount} for {order}")
    return "paid"


async def main() -> None:
    with killick.open("killick.db") as kd, KillickRuntime(kd).registering():
        clerk = gated(FunctionAgent(tools=[pay], llm=MockFunctionCallingLLM(response_generator=scripted)))
        print(await clerk.run("Pay for order A7.", run_id="order-A7"))


if __name__ == "__main__":
    asyncio.run(main())
