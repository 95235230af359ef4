"""A flow of CrewAI that pays and ships an order. Run it twice: the second time nothing is paid or shipped.

python examples/neighbours/crewai_flow.py
killick show order-A7
"""

from __future__ import annotations

from crewai.flow.flow import Flow, listen, start
from crewai.flow.persistence import persist
from crewai.tools import tool
from pydantic import BaseModel

import killick
from killick.adapters.crewai import KillickFlowPersistence, gated


@tool
def pay(order: str, amount: int) -> str:
    """Pay for an order."""
    print(f"paying {amount} for {order}")
    return "paid"


@tool
def ship(order: str) -> str:
    """Ship an order."""
    print(f"shipping {order}")
    return "on its way"


class Order(BaseModel):
    id: str = ""
    receipt: str = ""


def main() -> None:
    with killick.open("killick.db") as kd, kd.host("order-A7", agent="orders"):

        @persist(KillickFlowPersistence(kd))
        class Orders(Flow[Order]):
            @start()
            def paying(self) -> None:
                self.state.receipt = gated(pay).run(order=self.state.id, amount=5)

            @listen(paying)
            def shipping(self) -> str:
                shipped = gated(ship, effect="idempotent").run(order=self.state.id)
                return f"{self.state.id} is {self.state.receipt} and {shipped}."

        print(Orders(suppress_flow_events=True).kickoff(inputs={"id": "A7"}))


if __name__ == "__main__":
    main()
