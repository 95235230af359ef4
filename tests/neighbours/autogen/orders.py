"""A team of AutoGen that pays and ships an order, and may die on the way: see the crash tests."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import TextMentionTermination
from autogen_agentchat.teams import RoundRobinGroupChat

import killick
from killick.adapters.autogen import KillickModelClient, KillickStates, KillickWorkbench, run
from neighbours.autogen.scripted_client import ScriptedClient, call
from neighbours.killed import World, die


def tools(world: World, dies: str) -> list[Any]:
    async def pay(order: str, amount: int) -> str:
        """Pay for an order."""
        world.do("paid")
        if dies == "after-paying":
            die()
        return f"{amount} paid"

    async def ship(order: str) -> str:
        """Ship an order."""
        world.do("shipped")
        return "on its way"

    return [pay, ship]


def model(dies: str) -> ScriptedClient:
    return ScriptedClient(
        call("call_1", "pay", order="A7", amount=5),
        call("call_2", "ship", order="A7"),
        "all done",
        before=lambda turn: die() if dies == "while-thinking" and turn == 1 else None,
    )


def team(**clients: Any) -> RoundRobinGroupChat:
    clerk = AssistantAgent("clerk", max_tool_iterations=5, **clients)
    return RoundRobinGroupChat([clerk], termination_condition=TextMentionTermination("all done"))


def alone(folder: Path, dies: str = "") -> str:
    """State from and to a file, as the framework's documentation says."""

    async def turn() -> str:
        orders = team(model_client=model(dies), tools=tools(World(folder), dies))
        file = folder / "state.json"
        if file.exists():
            await orders.load_state(json.loads(file.read_text()))
        said = (await orders.run(task="see to order A7")).messages[-1].content
        file.write_text(json.dumps(await orders.save_state()))
        return said

    return asyncio.run(turn())


def on_killick(folder: Path, dies: str = "") -> str:
    async def turn() -> str:
        workbench = KillickWorkbench(tools(World(folder), dies))
        orders = team(model_client=KillickModelClient(model(dies)), workbench=workbench)
        with killick.open(folder / "killick.db") as kd:
            states = KillickStates(kd)
            async with kd.host("order-A7", agent="orders"):
                await states.load("order-A7", orders)
                said = (await run(orders, task="see to order A7")).messages[-1].content
                await states.save("order-A7", orders)
                return said

    return asyncio.run(turn())


def answered(folder: Path) -> str:
    with killick.open(folder / "killick.db") as kd:
        kd.answer("order-A7", "happened", value="5 paid", by="ann")
    return "answered"
