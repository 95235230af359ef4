"""An agent of Google ADK that pays and ships an order, and may die on the way: see the crash tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

from google.adk.agents import LlmAgent
from google.adk.models import BaseLlm, LlmRequest, LlmResponse
from google.adk.runners import Runner
from google.adk.sessions import BaseSessionService
from google.adk.sessions.sqlite_session_service import SqliteSessionService
from google.genai import types

import killick
from killick.adapters.google_adk import KillickSessions, gated, run
from neighbours.killed import World, die

ANN: Any = {"user_id": "ann", "session_id": "A7"}


def call(name: str, **args: Any) -> types.Part:
    """A model's wish to call a tool, without an id, as Gemini says it."""
    return types.Part(function_call=types.FunctionCall(name=name, args=args))


def said(text: str) -> types.Content:
    return types.Content(role="user", parts=[types.Part(text=text)])


class ScriptedLlm(BaseLlm):
    """Answers with the nth reply of its script, where n is how often a model has spoken since the last user's text."""

    model: str = "scripted"
    script: list[Any] = []  # noqa: RUF012
    before: Callable[[int], None] = lambda turn: None

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        turn = 0
        for content in llm_request.contents:
            if content.role == "model":
                turn += 1
            elif any(part.text for part in content.parts or ()):
                turn = 0
        self.before(turn)
        parts = self.script[turn] if isinstance(self.script[turn], list) else [self.script[turn]]
        parts = [types.Part(text=part) if isinstance(part, str) else part.model_copy(deep=True) for part in parts]
        if stream and parts[0].text:
            for word in parts[0].text.split():
                heard = types.Content(role="model", parts=[types.Part(text=word)])
                yield LlmResponse(content=heard, partial=True)
        used = types.GenerateContentResponseUsageMetadata(prompt_token_count=7, candidates_token_count=3)
        yield LlmResponse(content=types.Content(role="model", parts=parts), usage_metadata=used)


def agent(world: World, dies: str) -> LlmAgent:
    async def pay(order: str, amount: int) -> dict[str, Any]:
        """Pay for an order."""
        world.do("paid")
        if dies == "after-paying":
            die()
        return {"paid": amount}

    def ship(order: str) -> str:
        """Ship an order."""
        world.do("shipped")
        return "on its way"

    def before(turn: int) -> None:
        if dies == "while-thinking" and turn == 1:
            die()

    script = [call("pay", order="A7", amount=5), call("ship", order="A7"), "all done"]
    return LlmAgent(name="clerk", model=ScriptedLlm(script=script, before=before), tools=[pay, ship])


async def turn(runs: Callable[..., Any], sessions: BaseSessionService) -> str:
    if await sessions.get_session(app_name="orders", **ANN) is None:
        await sessions.create_session(app_name="orders", **ANN)
    text = ""
    async for event in runs(**ANN, new_message=said("see to order A7")):
        if event.content and event.content.parts and event.content.parts[0].text:
            text = event.content.parts[0].text
    return text


def alone(folder: Path, dies: str = "") -> str:
    orders, sessions = agent(World(folder), dies), SqliteSessionService(str(folder / "sessions.db"))
    runner = Runner(app_name="orders", agent=orders, session_service=sessions)
    return asyncio.run(turn(runner.run_async, sessions))


def on_killick(folder: Path, dies: str = "") -> str:
    orders = gated(agent(World(folder), dies))

    async def hosted() -> str:
        with killick.open(folder / "killick.db") as kd:
            sessions = KillickSessions(kd)
            runner = Runner(app_name="orders", agent=orders, session_service=sessions)
            async with kd.host("order-A7", agent="orders"):
                return await turn(lambda **given: run(runner, **given), sessions)

    return asyncio.run(hosted())


def answered(folder: Path) -> str:
    with killick.open(folder / "killick.db") as kd:
        kd.answer("order-A7", "happened", value={"paid": 5}, by="ann")
    return "answered"
