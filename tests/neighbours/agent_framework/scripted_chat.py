"""A chat client of Agent Framework that says what it was told to, by how much was said before it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from agent_framework import (
    BaseChatClient,
    ChatMiddlewareLayer,
    ChatResponse,
    ChatResponseUpdate,
    Content,
    FunctionInvocationLayer,
    Message,
    ResponseStream,
)

Said = str | Content | Sequence[Content]


def call(call_id: str, name: str, **arguments: Any) -> Content:
    """A model's wish to call a tool."""
    return Content.from_function_call(call_id, name, arguments=arguments)


class ScriptedChat(FunctionInvocationLayer, ChatMiddlewareLayer, BaseChatClient):
    """Answers with the nth reply of its script, where n is how often it has spoken in the conversation."""

    def __init__(self, *script: Said, before: Callable[[int], None] = lambda n: None) -> None:
        super().__init__()
        self.script = [[said] if isinstance(said, str | Content) else list(said) for said in script]
        self.before = before
        self.asked = 0

    def _inner_get_response(self, *, messages: Sequence[Message], stream: bool, options: Any, **kwargs: Any) -> Any:
        async def whole() -> ChatResponse:
            return ChatResponse(
                messages=[Message("assistant", self._say(messages))],
                model="scripted",
                usage_details={"input_token_count": 7, "output_token_count": 3},
            )

        async def parts() -> AsyncIterator[ChatResponseUpdate]:
            for said in self._say(messages):
                words = said.split(" ") if isinstance(said, str) else [said]
                for word in words:
                    content = Content.from_text(f"{word} ") if isinstance(word, str) else word
                    yield ChatResponseUpdate(role="assistant", contents=[content], model="scripted")

        return ResponseStream(parts(), finalizer=ChatResponse.from_updates) if stream else whole()

    def _say(self, messages: Sequence[Message]) -> list[Any]:
        turn = sum(message.role == "assistant" for message in messages)
        self.before(turn)
        self.asked += 1
        return self.script[turn]
