"""A clerk of the OpenAI Agents SDK that pays once, though its process would have died, and asks before it pays much.

python examples/neighbours/openai_agents.py
killick show thread-1
"""

from __future__ import annotations

import asyncio

from agents.testing import ScriptedModel, assistant_message, function_call

import killick
from agents import Agent, function_tool, set_tracing_disabled
from killick.adapters.openai_agents import KillickRunner, attempt

set_tracing_disabled(True)


@function_tool
async def look_up(name: str) -> str:
    """Where somebody's account is."""
    return f"{name} has account 17"


@function_tool(needs_approval=True)
async def pay(account: int, amount: int) -> str:
    """Pay into an account."""
    step = attempt()
    print(f"paying {amount} into {account}, key {step.key if step else 'none'}")
    return f"paid {amount}"


def clerk(*said: object) -> Agent:
    """The clerk, with a script for a model; yours says model="gpt-…" here."""
    return Agent(name="clerk", tools=[look_up, pay], model=ScriptedModel(said))


async def main() -> None:
    with killick.open("killick.db") as kd:
        runner = KillickRunner(kd, tools={"look_up": "reads"}, to="managers")
        first = clerk(
            [function_call("look_up", {"name": "ann"}, call_id="call_1")],
            [function_call("pay", {"account": 17, "amount": 500}, call_id="call_2")],
        )
        try:
            await runner.run(first, "Pay ann 500.", session="thread-1")
        except killick.RunWaiting as waiting:
            print(waiting)
        kd.answer("thread-1", "approve", by="mia")
        # From here on it could be another process, days later: what the first one did is on record.
        second = clerk([assistant_message("Ann has her 500.")])
        result = await runner.run(second, "Pay ann 500.", session="thread-1")
        print(result.final_output)


if __name__ == "__main__":
    asyncio.run(main())
