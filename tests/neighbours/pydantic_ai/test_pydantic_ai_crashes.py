"""Real processes that die around a payment: Pydantic AI alone pays again, with Killick it does not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Literal

from pydantic_ai import Agent
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import AgentInfo, FunctionModel

import killick
from killick.adapters.pydantic_ai import KillickDurability
from neighbours.killed import KILLED, World, die, ended
from neighbours.results import result


def pays(how: Literal["alone", "killick"], folder: Path, dies: str) -> str:
    """What one process does, and says in the end. It may die once it has "paid", or when the model is "asked" next."""
    world = World(folder)

    def model(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        world.do("asked")
        if len(messages) == 1:
            return ModelResponse(parts=[ToolCallPart("pay", {"to": "ann"})])
        if dies == "asked":
            die()
        return ModelResponse(parts=[TextPart("Paid ann.")])

    capabilities: list[Any] = [KillickDurability()] if how == "killick" else []
    assistant = Agent(FunctionModel(model), name="assistant", capabilities=capabilities)

    @assistant.tool_plain
    def pay(to: str) -> str:
        world.do("paid")
        if dies == "paid":
            die()
        return f"paid {to}"

    @killick.agent
    async def paying(run: killick.Run) -> str:
        async with run.hosting():
            return (await assistant.run("Pay ann.")).output

    if how == "alone":
        return asyncio.run(assistant.run("Pay ann.")).output
    with killick.open(folder / "killick.db") as kd:
        said: str = kd.run(paying, id="r")
        return said


def test_killed_after_a_payment_pydantic_ai_alone_pays_twice_and_with_killick_once(tmp_path: Path) -> None:
    counts = {}
    for how in ("alone", "killick"):
        assert ended(pays, how, tmp_path / how, "asked") == KILLED
        assert ended(pays, how, tmp_path / how, "") == "Paid ann."
        done = World(tmp_path / how).done
        counts[how] = done.count("paid"), done.count("asked")
    # Whoever dies while a model is asked asks that once more: of 3 requests one got no answer.
    assert counts == {"alone": (2, 4), "killick": (1, 3)}
    alone, ours = (f"{paid} payment{'s' * (paid > 1)}, {asked} requests" for paid, asked in counts.values())
    result("pydantic_ai", killed="after a payment", alone=alone, ours=ours)


def test_killed_in_a_payment_a_person_is_asked_and_it_is_not_paid_again(tmp_path: Path) -> None:
    assert ended(pays, "killick", tmp_path, "paid") == KILLED
    assert "Did it happen?" in ended(pays, "killick", tmp_path, "")
    with killick.open(tmp_path / "killick.db") as kd:
        kd.answer("r", "happened", value="paid ann", by="eve")
    assert ended(pays, "killick", tmp_path, "") == "Paid ann."
    assert World(tmp_path).done == ["asked", "paid", "asked"]
