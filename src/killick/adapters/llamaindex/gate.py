"""The models and tools of LlamaIndex through the gate."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

from llama_index.core.agent.workflow import AgentWorkflow
from llama_index.core.agent.workflow.base_agent import BaseWorkflowAgent
from llama_index.core.callbacks.token_counting import get_tokens_from_response
from llama_index.core.llms import LLM, ChatMessage, ChatResponse, CompletionResponse
from llama_index.core.tools import AsyncBaseTool, BaseTool, ToolOutput, adapt_to_async_tool
from pydantic_core import to_jsonable_python
from workflows import Context
from workflows.errors import WorkflowRuntimeError
from workflows.runtime.types.results import WaitingForEvent

from killick.adapters import tool_gate
from killick.adapters.llamaindex.runtime import call_in_step
from killick.adapters.tool_gate import Errors, ToolOptions
from killick.errors import DeclarationRefused
from killick.llm.toolset import driven

G = TypeVar("G", bound=BaseWorkflowAgent | AgentWorkflow | LLM | BaseTool)


def gated(of: G, *, tools: ToolOptions | None = None, errors: Errors = "answer") -> G:
    """Puts the models and tools of an agent, or of the agents of an AgentWorkflow, through the gate; returns it. Of a
    model or a tool it returns a gated copy, for a workflow's own steps.

    tools    options by tool name, such as `{"look_up": {"effect": "reads"}}`; other tools run at most once
    errors   what an error of a tool that runs at most once becomes: its answer, or a question to a person
    """
    gate, given = _Gate(None, tools, errors, "gated"), cast("Any", of)
    match given:
        case LLM():
            return cast("G", gate.model(given))
        case BaseTool():
            return cast("G", gate.tool(given))
        case AgentWorkflow():
            for agent in given.agents.values():
                agent.llm = gate.model(agent.llm)
        case BaseWorkflowAgent():
            given.llm = gate.model(given.llm)
        case _:
            raise DeclarationRefused(type(of).__name__, "is no agent, model or tool; give those that its steps use")
    if "get_tools" not in vars(of):
        object.__setattr__(of, "get_tools", partial(gate.listed, given.get_tools))
    return of


class _Gate(tool_gate.ToolGate):
    """The wrappers of models and tools."""

    async def listed(self, listing: Callable[..., Any], *given: Any, **named: Any) -> Sequence[AsyncBaseTool]:
        return [self.tool(tool) for tool in await listing(*given, **named)]

    def tool(self, given: Any) -> Any:
        tool = adapt_to_async_tool(given)
        if tool.metadata.name == "handoff":  # it only changes the context
            return tool
        return tool_gate.rerouted(tool, acall=self._called, call=self._called_sync)

    async def _called(self, tool: AsyncBaseTool, *args: Any, **given: Any) -> ToolOutput:
        shown = tool.metadata.get_parameters_dict()
        named = getattr(tool, "ctx_param_name", None)
        context = {named: given.pop(named)} if named in given else {}
        arguments = {**dict(zip(shown.get("properties", ()), args, strict=False)), **given}

        async def apply(**judged: Any) -> Any:
            return _written(await tool.acall(**judged, **context))

        async with call_in_step():
            outcome, error = await self.call(
                tool.metadata.get_name(), arguments, apply, schema=shown, doc=tool.metadata.description,
                bubbles=(WaitingForEvent,),
            )  # fmt: skip
        if error is not None:
            self.unstopped()
            raise tool_gate.ToolFailed(error)
        return _output(tool, arguments, outcome)

    def _called_sync(self, tool: AsyncBaseTool, *args: Any, **given: Any) -> ToolOutput:
        return asyncio.run(self._called(tool, *args, **given))

    def model(self, given: Any) -> Any:
        if "achat" in vars(given):
            return given
        wrappers = {"": self._asked_sync, "stream_": self._streamed_sync, "a": self._asked, "astream_": self._streamed}
        same = given.model_copy()
        for name, kind in (("chat", ChatResponse), ("complete", CompletionResponse)):
            for prefix, wrapper in wrappers.items():
                method = getattr(given, f"{prefix}{name}")
                object.__setattr__(same, f"{prefix}{name}", partial(wrapper, _Model(given, name, kind), method))
        return same

    async def _asked(self, model: _Model, method: Any, *args: Any, blocking: bool = False, **given: Any) -> Any:
        reply = await tool_gate.asked(
            self.unstopped(), model.step, partial(method, *args, **given), write=model.reply, blocking=blocking,
            **model.request(*args, **given),
        )  # fmt: skip
        return model.read(reply)

    def _asked_sync(self, model: _Model, method: Any, *args: Any, **given: Any) -> Any:
        return driven(self._asked(model, method, *args, blocking=True, **given))

    def _streamed_sync(self, model: _Model, method: Any, *args: Any, **given: Any) -> Iterator[Any]:
        """Gives a reply whole: blocking code gets it once it is recorded."""
        whole = self._asked_sync(model, lambda *args, **given: list(method(*args, **given))[-1], *args, **given)
        yield whole.model_copy(update={"delta": _text(whole)})

    async def _streamed(self, model: _Model, method: Any, *args: Any, **given: Any) -> Any:
        begun: list[bool] = []

        async def begin() -> Any:
            begun.append(True)
            return await method(*args, **given)

        def read(reply: Any) -> Iterator[Any]:
            whole = model.read(reply)
            yield whole.model_copy(update={"delta": "" if begun else _text(whole)})

        return tool_gate.streamed(
            self.unstopped(), model.step, begin, write=lambda parts: model.reply(parts[-1]), read=read,
            is_early=lambda _: True, **model.request(*args, **given),
        )  # fmt: skip


class _Model(NamedTuple):
    """How a kind of call of a model is recorded."""

    llm: LLM
    name: str
    kind: type[ChatResponse | CompletionResponse]

    @property
    def step(self) -> str:
        return f"{type(self.llm).__name__}.{self.name}"

    def request(self, *args: Any, **given: Any) -> dict[str, Any]:
        """Returns a request for matching: tools by their names, settings that are plain. A step that failed asks again
        when it runs again: it may have failed because of the reply."""
        said = args[0] if args else given.pop("messages" if self.name == "chat" else "prompt")
        said = [ChatMessage(role="user", content=said)] if isinstance(said, str) else said
        plain = {name: value for name, value in given.items() if isinstance(value, str | int | float)}
        tools = [_tool_name(tool) for tool in given.get("tools") or ()]
        return {
            "model": self.llm.metadata.model_name,
            "messages": [message.model_dump(mode="json") for message in said],
            "options": {**plain, "tools": tools, **_retries()},
        }

    def reply(self, response: ChatResponse | CompletionResponse) -> dict[str, Any]:
        written = to_jsonable_python(response.model_copy(update={"delta": None}), fallback=str)
        raw = written["raw"] if isinstance(written["raw"], dict) else {}
        usage = raw.get("usage") or written["additional_kwargs"]
        if not {"prompt_tokens", "input_tokens"} & usage.keys():
            usage = dict(zip(("input_tokens", "output_tokens"), get_tokens_from_response(response), strict=True))
        named = raw.get("model") or self.llm.metadata.model_name
        return {"model": named, "usage": usage if any(usage.values()) else {}, "response": written}

    def read(self, reply: Any) -> Any:
        return self.kind.model_validate(reply["response"])


def _retries() -> dict[str, int]:
    try:
        retries = Context.get_step_context().retry_info().retry_number
    except WorkflowRuntimeError:  # outside a step
        retries = 0
    return {"retries": retries} if retries else {}


def _text(whole: ChatResponse | CompletionResponse) -> str:
    return (whole.message.content or "") if isinstance(whole, ChatResponse) else whole.text


def _tool_name(tool: Any) -> str:
    if isinstance(tool, Mapping):
        return str(tool.get("function", tool).get("name"))
    return str(tool.metadata.name if isinstance(tool, BaseTool) else type(tool).__name__)


def _written(output: ToolOutput) -> Any:
    """Returns a result for recording: text as text, so that people can read and supply it."""
    if not output.is_error and isinstance(output.raw_output, str) and output.content == output.raw_output:
        return output.raw_output
    shown = {"blocks": output.blocks, "raw_output": output.raw_output, "is_error": output.is_error}
    return tool_gate.in_own_form(to_jsonable_python(shown, fallback=str))


def _output(tool: AsyncBaseTool, arguments: Mapping[str, Any], outcome: Any) -> ToolOutput:
    shown = tool_gate.own_form(outcome) or {"content": str(outcome), "raw_output": outcome}
    return ToolOutput(tool_name=tool.metadata.get_name(), raw_input={"args": (), "kwargs": dict(arguments)}, **shown)
