"""An agent of Pydantic AI on Killick: its model is asked once, and a payment waits for a person before it is made.

    python examples/neighbours/pydantic_ai_agent.py

The model is a function. In its place goes any that Pydantic AI knows, such as "openai:gpt-5".
"""

import tempfile
from pathlib import Path

from pydantic_ai import Agent
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import AgentInfo, FunctionModel

import killick
from killick.adapters.pydantic_ai import KillickDurability

asked, paid = [], []


def model(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
    asked.append(len(messages))
    if len(messages) == 1:
        return ModelResponse(parts=[ToolCallPart("find_invoice", {"of": "the ferry"})])
    if len(messages) == 3:
        return ModelResponse(parts=[ToolCallPart("pay", {"to": "Ferry Co", "euros": 170})])
    return ModelResponse(parts=[TextPart("The ferry is paid.")])


clerk = Agent(
    FunctionModel(model),
    name="clerk",
    capabilities=[KillickDurability(tools={"find_invoice": {"effect": "reads"}}, approvers="treasurer")],
)


@clerk.tool_plain
def find_invoice(of: str) -> dict[str, str | int]:
    """Find an invoice."""
    return {"to": "Ferry Co", "euros": 170}


@clerk.tool_plain(requires_approval=True)
def pay(to: str, euros: int) -> str:
    """Pay an invoice."""
    paid.append(f"{euros} to {to}")
    return "paid"


@killick.agent
async def paying(run: killick.Run, wish: str) -> str:
    async with run.hosting():  # Pydantic AI's own loop, whose steps are now the run's
        result = await clerk.run(wish)
    return result.output


def main(store: Path) -> None:
    with killick.open(store) as kd:
        try:
            kd.run(paying, "Pay for the ferry.", id="ferry")
        except killick.RunWaiting as waiting:
            print(waiting)
    with killick.open(store) as kd:  # another process, days later
        kd.answer("ferry", "approve", by="treasurer")
        print(kd.run(paying, "Pay for the ferry.", id="ferry"))
    print(f"paid: {paid}; model asked {len(asked)} times")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder) / "killick.db")
