"""A team of AutoGen that pays an order. Run it twice: the second time nothing is paid or asked.

python examples/neighbours/autogen_team.py
killick show order-A7
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import TextMentionTermination
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core import FunctionCall
from autogen_core.models import (
    AssistantMessage,
    ChatCompletionClient,
    CreateResult,
    LLMMessage,
    ModelFamily,
    ModelInfo,
    RequestUsage,
)

import killick
from killick.adapters.autogen import KillickModelClient, KillickWorkbench, run


class Scripted(ChatCompletionClient):
    """Stands for a model: first it pays, then it says so."""

    script = (
        [FunctionCall(id="call_1", name="pay", arguments='{"order": "A7", "amount": 5}')],
        "A7 is paid.",
    )

    async def create(self, messages: Sequence[LLMMessage], **_: Any) -> CreateResult:
        turn = sum(isinstance(message, AssistantMessage) for message in messages)
        print(f"the model is asked, turn {turn + 1}")
        used = RequestUsage(prompt_tokens=7, completion_tokens=3)
        return CreateResult(finish_reason="stop", content=self.script[turn], usage=used, cached=False)

    def create_stream(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    async def close(self) -> None: ...

    def count_tokens(self, *_: Any, **__: Any) -> int:
        return 0

    remaining_tokens = count_tokens

    def total_usage(self) -> RequestUsage:
        return RequestUsage(prompt_tokens=0, completion_tokens=0)

    actual_usage = total_usage

    @property
    def model_info(self) -> ModelInfo:
        can = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True}
        return ModelInfo(family=ModelFamily.UNKNOWN, **can)

    capabilities = model_info


async def pay(order: str, amount: int) -> str:
    """Pay for an order."""
    print(f"paying {amount} for {order}")
    return "paid"


async def main() -> None:
    clerk = AssistantAgent(
        "clerk", KillickModelClient(Scripted()), workbench=KillickWorkbench([pay]), max_tool_iterations=5
    )
    team = RoundRobinGroupChat([clerk], termination_condition=TextMentionTermination("paid."))
    with killick.open("killick.db") as kd:
        async with kd.host("order-A7", agent="clerk"):
            result = await run(team, task="Pay for order A7.")
    print(result.messages[-1].content)


if __name__ == "__main__":
    asyncio.run(main())
