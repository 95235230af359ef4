"""The gate as a middleware of LangChain's `create_agent`: for its tools, and for its model where that is wanted."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Any, Final, Literal

import msgspec
from langchain.agents.middleware import AgentMiddleware
from langchain.agents.middleware.types import ModelRequest, ModelResponse
from langchain_core.messages import AIMessage, BaseMessage, message_to_dict, messages_from_dict
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.config import get_config
from langgraph.prebuilt.tool_node import ToolCallRequest

from killick.adapters.langgraph.gate import Call, Gate, place_of, short
from killick.adapters.tool_gate import ToolOptions
from killick.client.client import Client
from killick.contracts.contract import Contract

_SERDE: Final = JsonPlusSerializer()


class KillickMiddleware(Gate, AgentMiddleware[Any, Any, Any]):
    """Puts every tool of an agent through Killick's gate: `create_agent(model, tools,
    middleware=[KillickMiddleware(kd)])`.

    It takes what `Gate` takes. Give it last, so that what other middlewares do to a call is done before.

    models   whether replies of the model are put on record too, and not asked for again in a node that runs again:
             also where the process died before LangGraph saved anything. A fork that asks the same in the same place
             then has the same reply
    """

    def __init__(
        self,
        client: Client | None = None,
        *,
        tools: ToolOptions | None = None,
        contract: Contract | str | os.PathLike[str] | None = None,
        approvals: Literal["interrupt", "raise"] = "interrupt",
        by: str | None = None,
        models: bool = False,
    ) -> None:
        super().__init__(client, tools=tools, contract=contract, approvals=approvals, by=by)
        self._models = models

    def wrap_tool_call(self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Any]) -> Any:
        """What the agent calls around each of its tools."""
        return Gate.wrap_tool_call(self, request, handler)

    async def awrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Awaitable[Any]]
    ) -> Any:
        """The same, where the agent is awaited."""
        return await Gate.awrap_tool_call(self, request, handler)

    def wrap_model_call(self, request: ModelRequest[Any], handler: Callable[..., ModelResponse[Any]]) -> Any:
        """What the agent calls around its model."""
        if not self._models:
            return handler(request)
        return _restored(self.call(self._asked(request), lambda **_: _recorded(handler(request))))

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[..., Awaitable[ModelResponse[Any]]]
    ) -> Any:
        """The same, where the agent is awaited."""
        if not self._models:
            return await handler(request)

        async def asked(**_: Any) -> Any:
            return _recorded(await handler(request))

        return _restored(await self.call_soon(self._asked(request), asked))

    def _asked(self, request: ModelRequest[Any]) -> Call:
        """A question to a model: by what it says and where, for the ids of what people say are new each time."""
        config, model = get_config(), request.model
        said = [*([request.system_message] if request.system_message is not None else []), *request.messages]
        named = getattr(model, "model_name", None) or getattr(model, "model", None)
        told = {
            "model": str(named or type(model).__name__),
            "messages": [_readable(message) for message in said],
            "tools": [_name(tool) for tool in request.tools],
        }
        key = f"{place_of(config)}:model:{short(msgspec.json.encode(told).decode())}"
        return Call(None, told, key, self.host_of(config), who=type(model).__name__)


def _readable(message: BaseMessage) -> dict[str, Any]:
    """A message as people read it on record; what only this process knows is left out."""
    told = message.model_dump(mode="json", exclude={"id", "response_metadata"}, exclude_defaults=True)
    return {"role": message.type, "content": message.content, **told}


def _name(tool: Any) -> str:
    return str(tool.get("name") or tool.get("function", {}).get("name") if isinstance(tool, dict) else tool.name)


def _recorded(reply: Any) -> dict[str, Any]:
    """A reply as it is put on record, with its usage where Killick looks for it."""
    if isinstance(reply, AIMessage):
        reply = ModelResponse(result=[reply])
    used = [message for message in reply.result if isinstance(message, AIMessage) and message.usage_metadata]
    usage = dict(used[-1].usage_metadata or {}) if used else {}
    told: dict[str, Any] = {"messages": [message_to_dict(message) for message in reply.result]}
    if reply.structured_response is not None:
        told["structured"] = list(_SERDE.dumps_typed(reply.structured_response))
    return {**told, "model": used[-1].response_metadata.get("model_name"), "usage": usage} if used else told


def _restored(recorded: dict[str, Any]) -> ModelResponse[Any]:
    structured = _SERDE.loads_typed(tuple(recorded["structured"])) if "structured" in recorded else None
    return ModelResponse(result=messages_from_dict(recorded["messages"]), structured_response=structured)
