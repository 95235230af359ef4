"""An agent of Google ADK that pays an order. Run it twice: the second time nothing is paid or asked.

python examples/neighbours/google_adk_agent.py
killick show order-A7
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from google.adk.agents import LlmAgent
from google.adk.models import BaseLlm, LlmRequest, LlmResponse
from google.adk.runners import InMemoryRunner
from google.genai import types

import killick
from killick.adapters.google_adk import gated, run


class Scripted(BaseLlm):
    """Stands for a model: first it pays, then it says so."""

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        print("the model is asked")
        call = types.FunctionCall(name="pay", args={"order": "A7", "amount": 5})
        spoke = any(content.role == "model" for content in llm_request.contents)
        part = types.Part(text="A7 is paid.") if spoke else types.Part(function_call=call)
        yield LlmResponse(content=types.Content(role="model", parts=[part]))


async def pay(order: str, amount: int) -> str:
    """Pay for an order."""
    print(f"paying {amount} for {order}")
    return "paid"


async def main() -> None:
    clerk = gated(LlmAgent(name="clerk", model=Scripted(model="scripted"), tools=[pay]))
    runner = InMemoryRunner(clerk, app_name="orders")
    session = await runner.session_service.create_session(app_name="orders", user_id="ann")
    with killick.open("killick.db") as kd:
        async with kd.host("order-A7", agent="clerk"):
            turn = run(runner, user_id="ann", session_id=session.id, new_message=types.UserContent("Pay for order A7."))
            async for event in turn:
                if event.content and event.content.parts and event.content.parts[0].text:
                    print(event.content.parts[0].text)


if __name__ == "__main__":
    asyncio.run(main())
