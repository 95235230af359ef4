"""Recorded SDK models: each request is sent once, and answered from the log afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from agents.items import TResponseOutputItem, TResponseStreamEvent
from agents.usage import Usage, deserialize_usage, serialize_usage
from openai.types.responses import Response, ResponseCompletedEvent, ResponseUsage
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
from killick.adapters.tool_gate import CallTracker
from killick.definitions.policy import ONCE, Policy
from killick.definitions.tools import AsyncTool
from killick.errors import StepFailed

_ITEM: Final[TypeAdapter[Any]] = TypeAdapter(TResponseOutputItem)
_LAST: Final = ("response.completed", "response.incomplete", "response.failed")
_POLICY: Final = Policy(effect="reads", retry=ONCE)
"""The SDK and its client define a model's retries."""
_OVER: Final[Any] = object()


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
        async def ask(**request: Any) -> dict[str, Any]:
            reply = await self.inner.get_response(*args, **given)
            return self._reply_data(reply.output, reply.usage, reply.response_id, reply.request_id, reply.raw_usage)

        return _response(await self._asked(ask, self._request(*args, **given)))

    async def stream_response(self, *args: Any, **given: Any) -> AsyncIterator[TResponseStreamEvent]:
        """Yields events as they arrive; the last one once the reply is recorded. A recorded reply yields only the last
        one."""
        events: asyncio.Queue[Any] = asyncio.Queue()

        async def ask(**request: Any) -> dict[str, Any]:
            whole, items = None, list[Any]()
            async for event in self.inner.stream_response(*args, **given):
                if event.type in _LAST:
                    whole = event
                    continue
                if event.type == "response.output_item.done":
                    items.append(event.item)
                events.put_nowait(event)
            return self._streamed_reply(whole, items)

        asked = asyncio.ensure_future(self._asked(ask, self._request(*args, **given)))
        asked.add_done_callback(lambda _: events.put_nowait(_OVER))
        count = 0
        try:
            while (event := await events.get()) is not _OVER:
                count += 1
                yield event
            yield _completed(await asked, count)
        finally:
            asked.cancel()

    async def _asked(self, ask: Callable[..., Awaitable[dict[str, Any]]], request: dict[str, Any]) -> dict[str, Any]:
        """Returns the recorded reply, or the model's. A recorded failure is not final: the SDK asked again."""
        turn, tracked = turn_here(self.name), CallTracker(self.name, ask)
        model = AsyncTool[..., Any](tracked.fn, self.name, _POLICY)
        while True:
            try:
                reply: dict[str, Any] = await turn.host.model(model, key=turn.model_key(), **request)
                return reply
            except StepFailed as failed:
                if tracked.was_called:
                    raise (failed.__cause__ or failed) from None

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

    def _reply_data(
        self,
        output: Sequence[Any],
        usage: Usage,
        id: str | None,  # noqa: A002
        request_id: str | None,
        raw: Any,
    ) -> dict[str, Any]:
        items = [item if isinstance(item, dict) else item.model_dump(exclude_unset=True) for item in output]
        # The SDK stores details as a list of one; Killick reads a plain object.
        used = {
            name: value[0] if name.endswith("_details") else value for name, value in serialize_usage(usage).items()
        }
        data = {"object": "response", "id": id, "model": self.name, "output": items, "usage": used}
        return {**data, "request_id": request_id, "raw_usage": raw}

    def _streamed_reply(self, last: Any, items: Sequence[Any]) -> dict[str, Any]:
        """Returns a streamed reply. Some providers omit its items from the last event."""
        if last is None or last.type != "response.completed":
            how = "before the reply did" if last is None else f"with {last.type}"
            raise ModelBehaviorError(f"{self.name}: the stream ended {how}")
        whole: Response = last.response
        used = Usage() if whole.usage is None else _usage_of(whole.usage)
        return self._reply_data(whole.output or items, used, whole.id, getattr(whole, "_request_id", None), None)

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


def _response(data: dict[str, Any]) -> ModelResponse:
    return ModelResponse(
        output=[_ITEM.validate_python(item) for item in data["output"]],
        usage=deserialize_usage(data["usage"]),
        response_id=data["id"],
        request_id=data["request_id"],
        raw_usage=data["raw_usage"],
    )


def _usage_of(used: ResponseUsage) -> Usage:
    return Usage(
        requests=1,
        input_tokens=used.input_tokens,
        output_tokens=used.output_tokens,
        total_tokens=used.total_tokens,
        input_tokens_details=used.input_tokens_details,
        output_tokens_details=used.output_tokens_details,
    )


def _completed(data: dict[str, Any], number: int) -> ResponseCompletedEvent:
    """Returns a stream's last event from the recorded reply."""
    said = _response(data)
    used = said.usage
    whole = Response(
        id=said.response_id or "",
        created_at=0,
        model=data["model"],
        object="response",
        output=said.output,  # type: ignore[arg-type,unused-ignore]
        parallel_tool_calls=False,
        tool_choice="auto",
        tools=[],
        status="completed",
        usage=ResponseUsage(
            input_tokens=used.input_tokens,
            input_tokens_details=used.input_tokens_details,
            output_tokens=used.output_tokens,
            output_tokens_details=used.output_tokens_details,
            total_tokens=used.total_tokens,
        ),
    )
    return ResponseCompletedEvent(response=whole, sequence_number=number, type="response.completed")
