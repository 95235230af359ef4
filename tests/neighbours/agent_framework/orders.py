"""A workflow of Agent Framework that pays and ships an order, and may die on the way: see the crash tests."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from agent_framework import Agent, Executor, FileCheckpointStorage, WorkflowBuilder, WorkflowContext, handler, tool

import killick
from killick.adapters.agent_framework import KillickChat, KillickCheckpointStorage, KillickTools
from neighbours.agent_framework.scripted_chat import ScriptedChat, call
from neighbours.killed import World, die


class Intake(Executor):
    """Where orders come in."""

    @handler
    async def take(self, order: str, ctx: WorkflowContext[str]) -> None:
        """Hand the order on."""
        await ctx.send_message(f"see to {order}")


def workflow(world: World, dies: str, middleware: list[Any]) -> Any:
    @tool
    def pay(order: str, amount: int) -> str:
        """Pay for an order."""
        world.do("paid")
        if dies == "after-paying":
            die()
        return f"{amount} paid"

    @tool
    def ship(order: str) -> str:
        """Ship an order."""
        world.do("shipped")
        return "on its way"

    chat = ScriptedChat(
        call("call_1", "pay", order="A7", amount=5),
        call("call_2", "ship", order="A7"),
        "all done",
        before=lambda turn: die() if dies == "while-thinking" and turn == 1 else None,
    )
    clerk = Agent(client=chat, name="clerk", tools=[pay, ship], middleware=middleware)
    intake = Intake(id="intake")
    return WorkflowBuilder(name="orders", start_executor=intake).add_edge(intake, clerk).build()


async def go_on(orders: Any, storage: Any) -> str:
    """Start, or go on from the newest checkpoint, as the framework's documentation says."""
    latest = await storage.get_latest(workflow_name="orders")
    if latest is None:
        result = await orders.run("order A7", checkpoint_storage=storage)
    else:
        result = await orders.run(checkpoint_id=latest.checkpoint_id, checkpoint_storage=storage)
    return result.get_outputs()[0].text


def alone(folder: Path, dies: str = "") -> str:
    world = World(folder)
    return asyncio.run(go_on(workflow(world, dies, []), FileCheckpointStorage(folder / "checkpoints")))


def on_killick(folder: Path, dies: str = "") -> str:
    async def going_on() -> str:
        orders = workflow(World(folder), dies, [KillickChat(), KillickTools()])
        with killick.open(folder / "killick.db") as kd:
            async with kd.host("order-A7", agent="orders"):
                return await go_on(orders, KillickCheckpointStorage(kd))

    return asyncio.run(going_on())


def answered(folder: Path) -> str:
    with killick.open(folder / "killick.db") as kd:
        kd.answer("order-A7", "happened", value="5 paid", by="ann")
    return "answered"
