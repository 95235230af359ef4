"""Flows of CrewAI that pay and ship, in processes that are killed: see the crash tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from crewai.flow.flow import Flow, listen, start
from crewai.flow.persistence import SQLiteFlowPersistence, persist
from crewai.tools import tool
from pydantic import BaseModel

import killick
from killick.adapters.crewai import KillickFlowPersistence, gated
from neighbours.killed import World, die


def tools(world: World, dies: str) -> tuple[Any, Any]:
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

    return pay, ship


class OrderState(BaseModel):
    id: str = "A7"
    receipt: str = ""


def flow(persistence: Any, pay: Any, ship: Any, dies: str) -> Any:
    @persist(persistence)
    class Orders(Flow[OrderState]):
        @start()
        def paying(self) -> None:
            self.state.receipt = pay.run(order=self.state.id, amount=5)

        @listen(paying)
        def shipping(self) -> str:
            if dies == "before-shipping":
                die()
            return ship.run(order=self.state.id)

    return Orders(suppress_flow_events=True)


def alone(folder: Path, dies: str = "") -> str:
    pay, ship = tools(World(folder), dies)
    persistence = SQLiteFlowPersistence(str(folder / "flows.db"))
    return str(flow(persistence, pay, ship, dies).kickoff(inputs={"id": "A7"}))


def on_killick(folder: Path, dies: str = "") -> str:
    pay, ship = tools(World(folder), dies)
    with killick.open(folder / "killick.db") as kd, kd.host("order-A7", agent="orders"):
        orders = flow(KillickFlowPersistence(kd), gated(pay), gated(ship, effect="idempotent"), dies)
        return str(orders.kickoff(inputs={"id": "A7"}))


def answered(folder: Path) -> str:
    with killick.open(folder / "killick.db") as kd:
        kd.answer("order-A7", "happened", value="5 paid", by="ann")
    return "answered"
