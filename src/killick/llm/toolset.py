"""Tools as a model sees them: their schemas, and the evaluation, execution and answers of its tool calls.

Nothing that a model writes raises here: an unknown tool, invalid arguments and a failed step are answers. All effects
go through the run, so a replay repeats them.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from killick.definitions.parameters import Parameters, untag
from killick.definitions.tools import AnyTool, Tool
from killick.engine.approval.call_answer import CallAnswer
from killick.engine.steps.model_reply import Provider, ToolCall, provider_of, reasoning_of, text_of, tool_calls_of
from killick.errors import DeclarationRefused, KillickError, Rejected, StepFailed, ValueRefused
from killick.llm import context_window
from killick.model.codec import plain
from killick.window import Window

T = TypeVar("T")

AnyRun: TypeAlias = Any
"""A Run, whose methods are awaited, or a SyncRun, whose methods block."""

NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
"""The tool names that every provider accepts."""


class Toolset:
    """Tools that a model is offered together. Raises DeclarationRefused for names that providers do not accept."""

    def __init__(self, *tools: AnyTool) -> None:
        self._tools: dict[str, AnyTool] = {}
        self._parameters: dict[str, Parameters] = {}
        for tool in tools:
            if not isinstance(tool, Tool):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise DeclarationRefused(repr(tool), "is not a tool; declare it with @killick.tool")
            if not NAME.fullmatch(tool.name):
                raise DeclarationRefused(tool.name, "models take names of up to 64 letters, digits, _ and -; rename it")
            if tool.name in self._tools:
                raise DeclarationRefused(tool.name, "is in the toolset twice; give one of them another name")
            self._tools[tool.name] = tool

    def __iter__(self) -> Iterator[AnyTool]:
        return iter(self._tools.values())

    def __len__(self) -> int:
        return len(self._tools)

    @property
    def names(self) -> list[str]:
        return list(self._tools)

    def get(self, name: str) -> AnyTool | None:
        """Returns the tool with that name, or None."""
        return self._tools.get(name)

    def bind(self, name: str, arguments: Mapping[str, Any] | str) -> dict[str, Any]:
        """A model's arguments for the tool of that name, as its declared types."""
        return self._parameters_of(name).bind(arguments)

    def reads(self, name: str, arguments: Mapping[str, Any] | str) -> bool:
        """Whether this call of the tool of that name has no effect."""
        tool = self._tools.get(name)
        if tool is None or not callable(tool.policy.effect):
            return tool is not None and tool.policy.effect == "reads"
        try:
            return bool(tool.policy.effect(**tool.shape.bind((), self.bind(name, arguments))[0]) == "reads")
        except Exception:
            return False  # Arguments that do not fit are refused by the call.

    def schemas(self, provider: Provider = "openai") -> list[dict[str, Any]]:
        """The tools in the provider's schema format."""
        return [self._schema(tool, provider) for tool in self]

    def _schema(self, tool: AnyTool, provider: Provider) -> dict[str, Any]:
        parameters = self._parameters_of(tool.name)
        fields = {"name": tool.name, "description": parameters.description}
        if provider == "anthropic":
            return fields | {"input_schema": parameters.schema}
        function: dict[str, Any] = fields | {"parameters": parameters.schema}
        return {"type": "function"} | (function if provider == "openai-responses" else {"function": function})

    def _parameters_of(self, name: str) -> Parameters:
        # Lazily: pydantic is slow to import, and types may be declared later.
        if name not in self._parameters:
            self._parameters[name] = Parameters(self._tools[name])
        return self._parameters[name]


# Calling and answering ----------------------------------------------------------------------------


class ToolAnswer(NamedTuple):
    """The answer to a model's tool call."""

    id: str
    text: str
    failed: bool = False


async def dispatch(
    run: AnyRun, tools: Toolset | Iterable[AnyTool], reply: Any, *, window: Window | None = None
) -> list[dict[str, Any]]:
    """Executes the tool calls of a reply, one after the other, and returns the messages that answer it; none if there
    are no calls. Each call is recorded as the model's decision, with its text as the reason.

    Calls that a window answers itself are not executed.
    """
    toolset = tools if isinstance(tools, Toolset) else Toolset(*tools)
    why = text_of(reply) or reasoning_of(reply)
    answers = [await _answered(run, toolset, call, why, window) for call in tool_calls_of(reply)]
    return answer_messages(provider_of(reply), answers)


def dispatch_sync(
    run: AnyRun, tools: Toolset | Iterable[AnyTool], reply: Any, *, window: Window | None = None
) -> list[dict[str, Any]]:
    """The same for a SyncRun."""
    return driven(dispatch(run, tools, reply, window=window))


async def _answered(run: AnyRun, tools: Toolset, call: ToolCall, why: str | None, window: Window | None) -> ToolAnswer:
    names = tools.names if window is None else [*tools.names, *context_window.tools_of(run._execution, window)]
    await settled(run.decided("Which tool?", call.name, options=names, because=why, by="model"))
    if window is not None:
        found = await settled(run._paged(context_window.answer, window, call))
        if found is not None:
            return ToolAnswer(call.id, found.text, found.failed)
    tool = tools.get(call.name)
    if tool is None:
        return ToolAnswer(call.id, f"error: no tool is called {call.name}; there are: {', '.join(names)}", True)
    try:
        result = await settled(run.call(tool, **tools.bind(call.name, call.arguments)))
    except ValueRefused as refused:
        return ToolAnswer(call.id, f"error: {refused}", True)
    except Rejected as rejected:
        if rejected.response is not None:
            return ToolAnswer(call.id, f"{rejected.message} (the tool was not called)")
        return ToolAnswer(call.id, f"error: {rejected}", True)
    except StepFailed as failed:
        return ToolAnswer(call.id, f"error: {failed.failure}", True)
    text = result if isinstance(result, str) else json.dumps(untag(plain(result)), ensure_ascii=False)
    answer = getattr(run, "call_answer", None)
    if isinstance(answer, CallAnswer) and answer.changed:
        text += f"\n({answer} before it was called)"
    return ToolAnswer(call.id, text)


def answer_messages(provider: Provider, answers: Sequence[ToolAnswer]) -> list[dict[str, Any]]:
    """Returns the answers to a reply's tool calls, in the provider's form."""
    if provider == "openai":
        return [{"role": "tool", "tool_call_id": answer.id, "content": answer.text} for answer in answers]
    if provider == "openai-responses":
        return [{"type": "function_call_output", "call_id": answer.id, "output": answer.text} for answer in answers]
    blocks = [
        {"type": "tool_result", "tool_use_id": answer.id, "content": answer.text}
        | ({"is_error": True} if answer.failed else {})
        for answer in answers
    ]
    return [{"role": "user", "content": blocks}] if blocks else []


# One body for Run and SyncRun ---------------------------------------------------------------------


async def settled(outcome: Any) -> Any:
    """The result of a Run's method when awaited, and of a SyncRun's at once."""
    return await outcome if inspect.isawaitable(outcome) else outcome


def driven(body: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits, because a SyncRun's methods block."""
    try:
        body.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    body.close()
    raise KillickError("this form takes a SyncRun; with a Run, await the async form")
