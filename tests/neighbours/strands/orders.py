"""An agent of Strands that pays and ships an order, and may die on the way: see the crash tests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

from strands import Agent, tool
from strands.models import Model
from strands.session.file_session_manager import FileSessionManager

import killick
from killick.adapters.strands import KillickSessions, gated, run
from neighbours.killed import World, die


def call(call_id: str, name: str, **arguments: Any) -> dict[str, Any]:
    """A model's wish to call a tool."""
    return {"toolUseId": call_id, "name": name, "input": arguments}


class ScriptedModel(Model):
    """Answers with the nth reply of its script, where n is how often it has spoken since the last user's text."""

    def __init__(self, *script: Any, before: Callable[[int], None] = lambda turn: None) -> None:
        self.script = script
        self.before = before
        self.asked = [0]

    def update_config(self, **given: Any) -> None: ...

    def get_config(self) -> Any:
        return {"model_id": "scripted"}

    async def structured_output(self, *given: Any, **named: Any) -> AsyncGenerator[Any, None]:
        raise NotImplementedError
        yield

    async def stream(self, messages: Any, *given: Any, **named: Any) -> AsyncGenerator[Any, None]:
        turn = 0
        for message in messages:
            if message["role"] == "assistant":
                turn += 1
            elif any("text" in part for part in message["content"]):
                turn = 0
        self.before(turn)
        self.asked[0] += 1
        said = self.script[turn] if isinstance(self.script[turn], list) else [self.script[turn]]
        yield {"messageStart": {"role": "assistant"}}
        for part in said:
            if isinstance(part, str):
                yield {"contentBlockStart": {"start": {}}}
                for word in part.split():
                    yield {"contentBlockDelta": {"delta": {"text": f"{word} "}}}
            else:
                start = {"toolUse": {"toolUseId": part["toolUseId"], "name": part["name"]}}
                yield {"contentBlockStart": {"start": start}}
                yield {"contentBlockDelta": {"delta": {"toolUse": {"input": json.dumps(part["input"])}}}}
            yield {"contentBlockStop": {}}
        yield {"messageStop": {"stopReason": "end_turn" if isinstance(said[0], str) else "tool_use"}}
        yield {
            "metadata": {
                "usage": {"inputTokens": 7, "outputTokens": 3, "totalTokens": 10},
                "metrics": {"latencyMs": 1},
            }
        }


def agent(world: World, dies: str, **given: Any) -> Agent:
    @tool
    async def pay(order: str, amount: int) -> str:
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

    model = ScriptedModel(
        call("call_1", "pay", order="A7", amount=5),
        call("call_2", "ship", order="A7"),
        "all done",
        before=lambda turn: die() if dies == "while-thinking" and turn == 1 else None,
    )
    return Agent(model=model, tools=[pay, ship], callback_handler=None, agent_id="clerk", **given)


def said(result: Any) -> str:
    return str(result).strip()


def alone(folder: Path, dies: str = "") -> str:
    world = World(folder)
    clerk = agent(world, dies, session_manager=FileSessionManager("A7", storage_dir=str(folder / "sessions")))
    return said(asyncio.run(clerk.invoke_async("see to order A7")))


def on_killick(folder: Path, dies: str = "") -> str:
    async def turn() -> str:
        world = World(folder)
        with killick.open(folder / "killick.db") as kd:
            sessions, clerk = KillickSessions(kd), gated(agent(world, dies))
            async with kd.host("order-A7", agent="orders"):
                await sessions.load("A7", clerk)
                result = await run(clerk, "see to order A7")
                await sessions.save("A7", clerk)
                return said(result)

    return asyncio.run(turn())


def answered(folder: Path) -> str:
    with killick.open(folder / "killick.db") as kd:
        kd.answer("order-A7", "happened", value="5 paid", by="ann")
    return "answered"
