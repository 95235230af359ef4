"""An agent of Strands that pays an order. Run it twice: the second time nothing is paid or asked.

python examples/neighbours/strands_agent.py
killick show order-A7
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from strands import Agent, tool
from strands.models import Model

import killick
from killick.adapters.strands import gated, run


class Scripted(Model):
    """Stands for a model: first it pays, then it says so."""

    def get_config(self) -> Any:
        return {"model_id": "scripted"}

    update_config: Any = get_config
    structured_output: Any = get_config

    async def stream(self, messages: Any, *_: Any, **__: Any) -> AsyncGenerator[Any, None]:
        print("the model is asked")
        spoke = any(message["role"] == "assistant" for message in messages)
        call, arguments = {"toolUseId": "call_1", "name": "pay"}, '{"order": "A7", "amount": 5}'
        yield {"messageStart": {"role": "assistant"}}
        yield {"contentBlockStart": {"start": {} if spoke else {"toolUse": call}}}
        said = {"text": "A7 is paid."} if spoke else {"toolUse": {"input": arguments}}
        yield {"contentBlockDelta": {"delta": said}}
        yield {"contentBlockStop": {}}
        yield {"messageStop": {"stopReason": "end_turn" if spoke else "tool_use"}}


@tool
async def pay(order: str, amount: int) -> str:
    """Pay for an order."""
    print(f"paying {amount} for {order}")
    return "paid"


async def main() -> None:
    clerk = gated(Agent(model=Scripted(), tools=[pay], callback_handler=None))
    with killick.open("killick.db") as kd:
        async with kd.host("order-A7", agent="clerk"):
            print(await run(clerk, "Pay for order A7."))


if __name__ == "__main__":
    asyncio.run(main())
