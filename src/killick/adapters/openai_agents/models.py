"""Recorded SDK models: each request is sent once, and answered from the log afterwards."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, Final

from agents.items import TResponseStreamEvent
from agents.usage import Usage, deserialize_usage
from openai.types.responses import Response, ResponseCompletedEvent
from pydantic import TypeAdapter

from agents import (
    FunctionTool,
    Handoff,
    Model,
    ModelBehaviorError,
    ModelProvider,
    ModelResponse,
    ModelSettings,
    RunConfig,
    Tool,
    TResponseInputItem,
)
from killick.adapters.openai_agents.turns import turn_here
from killick.adapters.tool_gate import asked, streamed
from killick.definitions.policy import ONCE, Policy

_REPLY: Final = TypeAdapter(ModelResponse)
_LAST: Final = ("response.completed", "response.incomplete", "response.failed")
_POLICY: Final = Policy(effect="reads", retry=ONCE)
"""The SDK and its client define a model's retries."""


def recorded(config: RunConfig | Mapping[str, Any] | None) -> RunConfig:
    """Returns a run configuration with recorded models, including those found by name."""
    kept = config if isinstance(config, RunConfig) else RunConfig(**(config or {}))
    model = RecordedModel.of(kept.model) if isinstance(kept.model, Model) else kept.model
    return replace(kept, model=model, model_provider=RecordedProvider(kept.model_provider))


class RecordedProvider(ModelProvider):
    """Returns another provider's models, recorded."""

    def __init__(self, inner: ModelProvider) -> None:
        self.inner = inner

    def get_model(self, model_name: str | None) -> Model:
        return RecordedModel.of(self.inner.get_model(model_name), model_name)

    async def aclose(self) -> None:
        await self.inner.aclose()


class RecordedModel(Model):
    """A model whose replies are recorded verbatim, with their usage."""

    def __init__(self, inner: Model, name: str | None = None) -> None:
        self.inner = inner
        own = getattr(inner, "model", None)
        self.name = name or (own if isinstance(own, str) else type(inner).__name__)

    def __getattr__(self, name: str) -> Any:
        """Other attributes are the model's own."""
        if name == "inner":  # not there yet
            raise AttributeError(name)
        return getattr(self.inner, name)

    @classmethod
    def of(cls, model: Model, name: str | None = None) -> RecordedModel:
        return model if isinstance(model, RecordedModel) else cls(model, name)

    async def get_response(self, *args: Any, **given: Any) -> ModelResponse:
        turn = turn_here(self.name)
        reply = await asked(
            turn.host, self.name, partial(self.inner.get_response, *args, **given), write=self._written,
            key=turn.model_key, policy=_POLICY, **self._request(*args, **given),
        )  # fmt: skip
        return _REPLY.validate_python(reply)

    async def stream_response(self, *args: Any, **given: Any) -> AsyncIterator[TResponseStreamEvent]:
        """Yields events as they arrive; the last one once the reply is recorded. A recorded reply yields only the last
        one."""
        turn, count = turn_here(self.name), 0
        events = streamed(
            turn.host, self.name, partial(self.inner.stream_response, *args, **given), write=self._streamed_reply,
            read=lambda reply: [_completed(reply, count)], is_early=lambda event: event.type not in _LAST,
            key=turn.model_key, policy=_POLICY, **self._request(*args, **given),
        )  # fmt: skip
        async with aclosing(events):
            async for event in events:
                count += 1
                yield event

    def _request(
        self, system_instructions: str | None, input: str | list[TResponseInputItem],  # noqa: A002
        model_settings: ModelSettings, tools: Sequence[Tool], output_schema: Any, handoffs: Sequence[Handoff[Any, Any]],
        tracing: Any, **more: Any,
    ) -> dict[str, Any]:  # fmt: skip
        """Returns a request for recording, in the form of the Responses API."""
        shown: list[dict[str, Any]] = [_shown(tool) for tool in tools]
        shown += [
            {"type": "function", "name": each.tool_name, "parameters": each.input_json_schema} for each in handoffs
        ]
        options = {**model_settings.to_traceable_dict(), **more}
        return {
            "model": self.name, "instructions": system_instructions, "input": input, "tools": shown,
            **{name: value for name, value in options.items() if value is not None},
        }  # fmt: skip

    def _written(self, reply: ModelResponse) -> dict[str, Any]:
        written = _REPLY.dump_python(reply, mode="json", exclude_unset=True)
        return {"object": "response", "id": reply.response_id, "model": self.name, **written}

    def _streamed_reply(self, events: Sequence[Any]) -> dict[str, Any]:
        last = events[-1] if events and events[-1].type in _LAST else None
        if last is None or last.type != "response.completed":
            how = "before the reply did" if last is None else f"with {last.type}"
            raise ModelBehaviorError(f"{self.name}: the stream ended {how}")
        whole: Response = last.response
        # Some providers omit the items from the last event.
        items = whole.output or [event.item for event in events if event.type == "response.output_item.done"]
        used = Usage() if whole.usage is None else deserialize_usage({"requests": 1, **whole.usage.model_dump()})
        return self._written(ModelResponse(items, used, whole.id, getattr(whole, "_request_id", None)))

    def get_retry_advice(self, request: Any) -> Any:
        return self.inner.get_retry_advice(request)

    async def close(self) -> None:
        await self.inner.close()

    async def _cleanup_on_run_end(self, owner: object) -> None:
        await self.inner._cleanup_on_run_end(owner)  # pyright: ignore[reportPrivateUsage]


def _shown(tool: Tool) -> dict[str, Any]:
    if isinstance(tool, FunctionTool):
        shown = {"type": "function", "name": tool.name, "description": tool.description}
        return {**shown, "parameters": tool.params_json_schema}
    return {"type": tool.name}


def _completed(data: dict[str, Any], number: int) -> ResponseCompletedEvent:
    """Returns a stream's last event from the recorded reply."""
    shown = {**data, "id": data["id"] or "", "created_at": 0, "status": "completed"}
    shown |= {"parallel_tool_calls": False, "tool_choice": "auto", "tools": []}
    return ResponseCompletedEvent.model_validate(
        {"type": "response.completed", "sequence_number": number, "response": shown}
    )
