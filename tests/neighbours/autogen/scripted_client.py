"""A model client of AutoGen that says what it was told to, by how much was said before it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from autogen_core import FunctionCall
from autogen_core.models import (
    AssistantMessage,
    ChatCompletionClient,
    CreateResult,
    LLMMessage,
    ModelFamily,
    ModelInfo,
    RequestUsage,
)


def call(call_id: str, name: str, **arguments: Any) -> FunctionCall:
    """A model's wish to call a tool."""
    return FunctionCall(id=call_id, name=name, arguments=json.dumps(arguments))


class ScriptedClient(ChatCompletionClient):
    """Answers with the nth reply of its script, where n is how often it has spoken in the conversation."""

    def __init__(self, *script: str | FunctionCall, before: Callable[[int], None] = lambda turn: None) -> None:
        self.script = script
        self.before = before
        self.asked = 0

    async def create(self, messages: Sequence[LLMMessage], **given: Any) -> CreateResult:
        turn = sum(isinstance(message, AssistantMessage) for message in messages)
        self.before(turn)
        self.asked += 1
        said = self.script[turn]
        return CreateResult(
            finish_reason="stop" if isinstance(said, str) else "function_calls",
            content=said if isinstance(said, str) else [said],
            usage=RequestUsage(prompt_tokens=7, completion_tokens=3),
            cached=False,
        )

    async def create_stream(
        self, messages: Sequence[LLMMessage], **given: Any
    ) -> AsyncGenerator[str | CreateResult, None]:
        whole = await self.create(messages, **given)
        if isinstance(whole.content, str):
            for word in whole.content.split(" "):
                yield f"{word} "
        yield whole

    async def close(self) -> None: ...

    def actual_usage(self) -> RequestUsage:
        return RequestUsage(prompt_tokens=7 * self.asked, completion_tokens=3 * self.asked)

    total_usage = actual_usage

    def count_tokens(self, messages: Sequence[LLMMessage], **given: Any) -> int:
        return 10

    remaining_tokens = count_tokens

    @property
    def capabilities(self) -> Any:
        return self.model_info

    @property
    def model_info(self) -> ModelInfo:
        return ModelInfo(
            vision=False, function_calling=True, json_output=True, family=ModelFamily.UNKNOWN, structured_output=True
        )
