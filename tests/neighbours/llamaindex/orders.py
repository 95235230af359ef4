"""An agent and a workflow of LlamaIndex that pay and ship an order, and may die on the way: see the crash tests."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ToolCallBlock
from llama_index.core.llms import ChatMessage, ChatResponse, CompletionResponse, CustomLLM, LLMMetadata
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection

import killick
from killick.adapters.llamaindex import KillickRuntime, gated
from neighbours.killed import World, die


def call(call_id: str, name: str, **arguments: Any) -> ToolCallBlock:
    """A model's wish to call a tool."""
    return ToolCallBlock(tool_call_id=call_id, tool_name=name, tool_kwargs=arguments)


class ScriptedModel(CustomLLM, FunctionCallingLLM):
    """Answers with the nth reply of its script, where n is how often it has spoken since the last user's text."""

    script: list[Any]
    before: Callable[[int], None] = lambda turn: None

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(model_name="gpt-4o", is_function_calling_model=True, is_chat_model=True)

    def _turn(self, messages: Sequence[ChatMessage]) -> list[Any]:
        turn = 0
        for message in messages:
            turn = 0 if message.role == "user" else turn + (message.role == "assistant")
        self.before(turn)
        said = self.script[turn]
        return said if isinstance(said, list) else [said]

    def _response(self, blocks: list[Any], **given: Any) -> ChatResponse:
        raw = {"model": "gpt-4o", "usage": {"prompt_tokens": 7, "completion_tokens": 3}}
        return ChatResponse(message=ChatMessage(role="assistant", blocks=blocks), raw=raw, **given)

    def chat(self, messages: Sequence[ChatMessage], **_: Any) -> ChatResponse:
        said = self._turn(messages)
        if isinstance(said[0], str):
            return self._response(ChatMessage(content=said[0]).blocks)
        return self._response(said)

    def stream_chat(self, messages: Sequence[ChatMessage], **given: Any) -> Any:
        whole = self.chat(messages, **given)
        words = re.findall(r"\S+\s*", whole.message.content or "")
        for number, word in enumerate(words, 1):
            yield self._response(ChatMessage(content="".join(words[:number])).blocks, delta=word)
        if not words:
            yield whole

    async def achat(self, messages: Sequence[ChatMessage], **given: Any) -> ChatResponse:
        return self.chat(messages, **given)

    async def astream_chat(self, messages: Sequence[ChatMessage], **given: Any) -> Any:
        async def parts() -> AsyncGenerator[ChatResponse]:
            for part in self.stream_chat(messages, **given):
                yield part

        return parts()

    def complete(self, prompt: str, formatted: bool = False, **given: Any) -> CompletionResponse:
        return CompletionResponse(text=self.chat([ChatMessage(role="user", content=prompt)]).message.content or "")

    def stream_complete(self, prompt: str, formatted: bool = False, **given: Any) -> Any:
        yield self.complete(prompt)

    def _prepare_chat_with_tools(self, tools: Any, **given: Any) -> dict[str, Any]:
        asked = given.get("user_msg")
        asked = [ChatMessage(role="user", content=asked)] if isinstance(asked, str) else []
        return {
            "messages": [*(given.get("chat_history") or []), *asked],
            "tools": [t.metadata.to_openai_tool() for t in tools],
        }

    def get_tool_calls_from_response(self, response: ChatResponse, error_on_no_tool_call: bool = True, **_: Any) -> Any:
        calls = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
        return [
            ToolSelection(
                tool_id=each.tool_call_id or each.tool_name, tool_name=each.tool_name, tool_kwargs=_read(each)
            )
            for each in calls
        ]


def _read(wish: ToolCallBlock) -> Any:
    return json.loads(wish.tool_kwargs) if isinstance(wish.tool_kwargs, str) else wish.tool_kwargs


def agent(world: World, dies: str) -> FunctionAgent:
    async def pay(order: str, amount: int) -> str:
        """Pay for an order."""
        world.do("paid")
        if dies == "after-paying":
            die()
        return f"{amount} paid"

    def ship(order: str) -> str:
        """Ship an order."""
        world.do("shipped")
        return "on its way"

    def before(turn: int) -> None:
        world.do("asked")
        if dies == "while-thinking" and turn == 1:
            die()

    script = [call("call_1", "pay", order="A7", amount=5), call("call_2", "ship", order="A7"), "all done"]
    return FunctionAgent(name="clerk", tools=[pay, ship], llm=ScriptedModel(script=script, before=before))


def alone(folder: Path, dies: str = "") -> str:
    return str(asyncio.run(_alone(agent(World(folder), dies))))


async def _alone(clerk: FunctionAgent) -> Any:
    return await clerk.run("see to order A7")


def on_killick(folder: Path, dies: str = "") -> str:
    async def turn() -> str:
        world = World(folder)
        with killick.open(folder / "killick.db") as kd, KillickRuntime(kd).registering():
            return str(await gated(agent(world, dies)).run("see to order A7", run_id="order-A7"))

    return asyncio.run(turn())


def answered(folder: Path) -> str:
    with killick.open(folder / "killick.db") as kd:
        kd.answer("order-A7", "happened", value="5 paid", by="ann")
    return "answered"
