"""The gate as a LangChain `create_agent` middleware: for its tools, and optionally its model."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from langchain.agents.middleware import AgentMiddleware
from langchain.agents.middleware.types import ModelRequest, ModelResponse
from langchain_core.messages import AIMessage, BaseMessage, message_to_dict, messages_from_dict
from langgraph.config import get_config

from killick.adapters.langgraph.gate import Call, Gate, place_of, short
from killick.adapters.langgraph.serialization import SERDE
from killick.client.client import AnyClient


class KillickMiddleware(Gate, AgentMiddleware[Any, Any, Any]):
    """Routes every tool of an agent through Killick's gate: `create_agent(model, tools,
    middleware=[KillickMiddleware(kd)])`.

    It takes the options of `Gate`. Install it last, so that other middleware runs before it.

        models   whether model replies are recorded too, so that a re-executed node reuses them, even if the process
                 died before LangGraph saved anything. A fork with an equal request at the same position gets that reply
    """

    def __init__(self, client: AnyClient | None = None, *, models: bool = False, **options: Any) -> None:
        super().__init__(client, **options)
        self._models = models

    def wrap_model_call(self, request: ModelRequest[Any], handler: Callable[..., ModelResponse[Any]]) -> Any:
        """Wraps the agent's model."""
        self.retire(request.messages, get_config())
        if not self._models:
            return handler(request)
        return _restored(self.call(self._asked(request), lambda **_: _recorded(handler(request))))

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[..., Awaitable[ModelResponse[Any]]]
    ) -> Any:
        """The same for an async agent."""
        await asyncio.to_thread(self.retire, request.messages, get_config())
        if not self._models:
            return await handler(request)

        async def asked(**_: Any) -> Any:
            return _recorded(await handler(request))

        return _restored(await self.call_soon(self._asked(request), asked))

    def _asked(self, request: ModelRequest[Any]) -> Call:
        """Returns a model request's key: its content and position, because ids of human messages are new each time."""
        config, model = get_config(), request.model
        said = [*([request.system_message] if request.system_message is not None else []), *request.messages]
        named = getattr(model, "model_name", None) or getattr(model, "model", None)
        request_data = {
            "model": str(named or type(model).__name__),
            "messages": [_readable(message) for message in said],
            "tools": [_name(tool) for tool in request.tools],
        }
        key = f"{place_of(config)}:model:{short(msgspec.json.encode(request_data).decode())}"
        return Call(None, request_data, key, self.host_of(config), who=type(model).__name__)


def _readable(message: BaseMessage) -> dict[str, Any]:
    """Returns a message as readable data, without process-local parts."""
    fields = message.model_dump(mode="json", exclude={"id", "response_metadata"}, exclude_defaults=True)
    return {"role": message.type, "content": message.content, **fields}


def _name(tool: Any) -> str:
    return str(tool.get("name") or tool.get("function", {}).get("name") if isinstance(tool, dict) else tool.name)


def _recorded(reply: Any) -> dict[str, Any]:
    """Returns a reply for recording, with its usage where Killick reads it."""
    if isinstance(reply, AIMessage):
        reply = ModelResponse(result=[reply])
    used = [message for message in reply.result if isinstance(message, AIMessage) and message.usage_metadata]
    usage = dict(used[-1].usage_metadata or {}) if used else {}
    data: dict[str, Any] = {"messages": [message_to_dict(message) for message in reply.result]}
    if reply.structured_response is not None:
        data["structured"] = list(SERDE.dumps_typed(reply.structured_response))
    return {**data, "model": used[-1].response_metadata.get("model_name"), "usage": usage} if used else data


def _restored(recorded: dict[str, Any]) -> ModelResponse[Any]:
    structured = SERDE.loads_typed(tuple(recorded["structured"])) if "structured" in recorded else None
    return ModelResponse(result=messages_from_dict(recorded["messages"]), structured_response=structured)
