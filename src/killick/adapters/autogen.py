"""AutoGen (agentchat 0.7): the states of agents and teams in a store, tools and models as recorded steps.

Tools go through our workbench, by the id of the model's call; models through our client, by their request. States are
those of AutoGen's own `save_state`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter, methodcaller
from typing import Any, Final, Protocol, TypeAlias

from autogen_agentchat.base import TaskResult
from autogen_core import CancellationToken
from autogen_core.models import ChatCompletionClient, CreateResult, LLMMessage
from autogen_core.tools import (
    BaseTool,
    FunctionTool,
    StaticWorkbench,
    TextResultContent,
    ToolResult,
    Workbench,
)
from pydantic import ValidationError

from killick.adapters import tool_gate
from killick.adapters.framework_state import FrameworkState, Place, StateEntry, StateOwner
from killick.adapters.tool_gate import Errors, ToolGate, ToolOptions
from killick.llm.external import Host, here

SPACE: Final = "autogen"
"""The default name prefix of this adapter's logs in a store."""

_STATE: Final = "state"


class Stateful(Protocol):
    """An object with a state: an agent, a team, a model context, a workbench."""

    async def save_state(self) -> Mapping[str, Any]: ...

    async def load_state(self, state: Mapping[str, Any]) -> None: ...


class Runnable(Protocol):
    """Runs a task: an agent or a team."""

    async def run(self, **given: Any) -> TaskResult: ...


class KillickStates(StateOwner):
    """The states of agents and teams, one log for each id, with its history."""

    def __init__(self, store: Place, *, space: str = SPACE) -> None:
        self._shelf = FrameworkState(store, space)

    async def save(self, id: str, of: Stateful) -> None:  # noqa: A002
        """Saves the state of an idle agent or team atomically. While its tools wait for a person it is not saved: the
        run continues from the previous state."""
        if (host := here()) is not None:
            tool_gate.unstopped(host, "KillickStates")
        kept = StateEntry(_STATE, dict(await of.save_state()))
        await asyncio.to_thread(self._shelf.put, id, kept)

    async def load(self, id: str, into: Stateful) -> bool:  # noqa: A002
        """Loads the last saved state into an agent or a team; returns whether there was one."""
        kept = await asyncio.to_thread(self._shelf.get, id, _STATE)
        if kept is not None:
            await into.load_state(kept.value)
        return kept is not None

    async def forget(self, id: str) -> None:  # noqa: A002
        """Removes an id's states with their history."""
        await asyncio.to_thread(self._shelf.forget, id)


# At the gate ---------------------------------------------------------------------------------------


async def run(of: Runnable, *, host: Host | None = None, **given: Any) -> TaskResult:
    """Runs an agent or a team, and raises its tools' errors: killick.RunWaiting if only a person can let a call
    continue. After the answer, run the same again, from the previous state. `given` are the arguments of AutoGen's
    `run`."""
    with tool_gate.raising_stop(tool_gate.hosted(host, "run")):
        return await of.run(**given)


AnyTool: TypeAlias = BaseTool[Any, Any] | Callable[..., Any]


def _inner(name: str) -> Any:
    """Returns a method that is the inner object's."""
    return lambda self, *args, **given: getattr(self._inner, name)(*args, **given)


class KillickWorkbench(Workbench):  # type: ignore[misc,unused-ignore]
    """A workbench whose calls are steps of a host's run, under the id of the model's call. All else is the inner
    workbench's.

    tools     functions and tools, or another workbench, such as one of an MCP server
    host      the host to use; default: the current one
    options   options by tool name, such as `{"look_up": {"effect": "reads"}}`; other tools run at most once
    errors    what an error of a tool that runs at most once becomes: its answer, or a question to a person
    """

    def __init__(
        self, tools: Sequence[AnyTool] | Workbench, host: Host | None = None, *, options: ToolOptions | None = None,
        errors: Errors = "answer",
    ) -> None:  # fmt: skip
        given = () if isinstance(tools, Workbench) else tools
        made = [each if isinstance(each, BaseTool) else FunctionTool(each, each.__doc__ or "") for each in given]
        self._tools: dict[str, BaseTool[Any, Any]] = {each.name: each for each in made}
        self._inner = tools if isinstance(tools, Workbench) else StaticWorkbench(made)
        self._gate = ToolGate(host, options, errors, "KillickWorkbench")

    list_tools, start, stop, reset = map(_inner, ("list_tools", "start", "stop", "reset"))
    save_state, load_state = _inner("save_state"), _inner("load_state")

    async def call_tool(
        self, name: str, arguments: Mapping[str, Any] | None = None,
        cancellation_token: CancellationToken | None = None, call_id: str | None = None,
    ) -> ToolResult:  # fmt: skip
        """Calls a tool through the gate, or returns its recorded result."""
        given, token = dict(arguments or {}), cancellation_token or CancellationToken()
        schema = next((shown for shown in await self.list_tools() if shown["name"] == name), None)
        if schema is None:
            return _answer(name, f"Tool {name} not found.", is_error=True)
        tool = self._tools.get(name)
        try:
            if tool is not None:
                tool.args_type().model_validate(given)
        except ValidationError as misfit:  # the model corrects it, and it is not recorded
            return _answer(name, str(misfit), is_error=True)

        async def apply(**judged: Any) -> Any:
            if tool is None:
                return _written(await self._inner.call_tool(name, judged, token, call_id))
            # The workbench would make a result of its error.
            running = asyncio.ensure_future(tool.run_json(judged, token, call_id=call_id))
            token.link_future(running)
            return tool.return_value_as_string(await running)

        parameters, doc = schema.get("parameters"), schema.get("description", "")
        outcome, error = await self._gate.call(name, given, apply, schema=parameters, doc=doc, key=call_id or None)
        if error is not None:
            return _answer(name, error, is_error=True)
        if (whole := tool_gate.own_form(outcome)) is not None:
            return ToolResult.model_validate(whole)
        return _answer(name, str(outcome))


def _answer(name: str, text: str, *, is_error: bool = False) -> ToolResult:
    return ToolResult(name=name, result=[TextResultContent(content=text)], is_error=is_error)


def _written(result: ToolResult) -> Any:
    """Returns a result for recording: text as text, so that people can read and supply it."""
    if not result.is_error and all(isinstance(part, TextResultContent) for part in result.result):
        return result.to_text()
    return tool_gate.in_own_form(result.model_dump(mode="json"))


class KillickModelClient(ChatCompletionClient):  # type: ignore[misc,unused-ignore]
    """A model client whose calls are steps of a host's run: a recorded reply is not requested again. All else is the
    inner client's.

    Without it, an agent that runs again calls its model again, which gives its tool calls new ids, so that earlier
    calls cannot be matched. Streamed replies pass through, and are recorded once complete.
    """

    def __init__(self, inner: ChatCompletionClient, host: Host | None = None) -> None:
        self._inner = inner
        self._host = host

    async def create(self, messages: Sequence[LLMMessage], **given: Any) -> CreateResult:
        """Calls the model, or returns its recorded reply."""
        reply = await tool_gate.asked(
            tool_gate.unstopped(self._host, "KillickModelClient"), f"{type(self._inner).__name__}.create",
            partial(self._inner.create, messages, **given), write=methodcaller("model_dump", mode="json"),
            **_request(messages, given),
        )  # fmt: skip
        return CreateResult.model_validate(reply)

    def create_stream(self, messages: Sequence[LLMMessage], **given: Any) -> AsyncGenerator[str | CreateResult, None]:
        """Streams the model's reply in parts and finally whole; or returns the recorded one."""
        return tool_gate.streamed(
            tool_gate.unstopped(self._host, "KillickModelClient"), f"{type(self._inner).__name__}.create_stream",
            partial(self._inner.create_stream, messages, **given), write=_parts, read=_parts_read,
            **_request(messages, given),
        )  # fmt: skip

    close, actual_usage, total_usage = map(_inner, ("close", "actual_usage", "total_usage"))
    count_tokens, remaining_tokens = _inner("count_tokens"), _inner("remaining_tokens")
    capabilities = property(attrgetter("_inner.capabilities"))
    model_info = property(attrgetter("_inner.model_info"))


def _request(messages: Sequence[LLMMessage], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a model request for matching."""
    tools = [tool["name"] if isinstance(tool, dict) else tool.name for tool in given.get("tools") or ()]
    form = given.get("json_output")
    options = {"tools": tools, "json_output": form.__name__ if isinstance(form, type) else form}
    return {"messages": [message.model_dump(mode="json") for message in messages], "options": options}


def _parts(parts: list[str | CreateResult]) -> dict[str, Any]:
    whole = next((part for part in parts if isinstance(part, CreateResult)), None)
    said = [part for part in parts if isinstance(part, str)]
    return {**(whole.model_dump(mode="json") if whole is not None else {}), "said": said}


def _parts_read(reply: Any) -> Iterator[str | CreateResult]:
    yield from reply["said"]
    yield CreateResult.model_validate({name: part for name, part in reply.items() if name != "said"})
