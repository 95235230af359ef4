"""Strands Agents: the tools and models of agents as recorded steps, and sessions in any store.

A tool call is matched by the id of the model's call, a model call by its request.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from functools import partial
from operator import itemgetter
from typing import Any, Final, TypeVar, cast

from strands import Agent
from strands.agent.agent_result import AgentResult
from strands.hooks import BeforeToolCallEvent
from strands.models import Model
from strands.types.tools import AgentTool

from killick.adapters import tool_gate
from killick.adapters.framework_state import FrameworkState, Place, StateEntry, StateOwner, in_thread
from killick.adapters.tool_gate import Errors, ToolOptions
from killick.llm.external import Host

SPACE: Final = "strands"
"""The default name prefix of this adapter's logs in a store."""

A = TypeVar("A", bound=Agent)


def gated(agent: A, host: Host | None = None, *, tools: ToolOptions | None = None, errors: Errors = "answer") -> A:
    """Puts the tools and the model of an agent, and of agents that are its tools, through the gate; returns the agent.

    host     the host to use; default: the current one
    tools    options by tool name, such as `{"look_up": {"effect": "reads"}}`; other tools run at most once
    errors   what an error of a tool that runs at most once becomes: its answer, or a question to a person
    """
    _Gate(host, tools, errors, "gated").enter(agent)
    return agent


async def run(agent: Agent, prompt: Any = None, *, host: Host | None = None, **given: Any) -> AgentResult:
    """Runs a turn as `agent.invoke_async` does, and raises its tools' errors: killick.RunWaiting if only a person can
    let a call continue. After the answer, run the same again: the agent has the messages from before the turn."""
    before = list(agent.messages)
    try:
        with tool_gate.raising_stop(tool_gate.hosted(host, "run")):
            return await agent.invoke_async(prompt, **given)
    except BaseException:
        agent.messages[:] = before
        raise


class _Interrupted(Exception):
    """A tool asked its caller something, before any effect, by the framework's own event."""


class _Gate(tool_gate.ToolGate):
    """The wrappers of one agent, and of agents that are its tools."""

    def enter(self, agent: Agent) -> None:
        agent.model = tool_gate.rerouted(agent.model, stream=self._asked)
        if "_killick_gate" not in vars(agent):
            vars(agent)["_killick_gate"] = self
            agent.hooks.add_callback(BeforeToolCallEvent, self._select)

    def _select(self, event: BeforeToolCallEvent) -> None:
        tool: Any = event.selected_tool
        if isinstance(agent := getattr(tool, "agent", None), Agent):  # no step of its own: its calls are steps
            self.enter(agent)
        elif tool is not None:
            # A direct call in code has a random id; its key is its ordinal.
            id_, asked = event.tool_use["toolUseId"], [each["content"] for each in event.agent.messages[-1:]]
            known = [part["toolUse"]["toolUseId"] for parts in asked for part in parts if "toolUse" in part]
            event.selected_tool = tool_gate.rerouted(tool, stream=partial(self._called, id_ if id_ in known else None))

    async def _called(
        self, key: str | None, tool: AgentTool, tool_use: Any, invocation_state: dict[str, Any], **given: Any
    ) -> AsyncGenerator[Any]:
        async def apply(**judged: Any) -> Any:
            last: Any = None
            async for event in tool.stream(cast("Any", {**tool_use, "input": judged}), invocation_state, **given):
                last = event
            if "tool_interrupt_event" in last:
                raise _Interrupted(last)
            if isinstance(error := getattr(last, "exception", None), Exception):
                raise error
            return _written(last.get("tool_result", last))

        name, spec = tool.tool_name, tool.tool_spec
        try:
            outcome, error = await self.call(
                name, tool_use["input"], apply, schema=spec["inputSchema"].get("json"),
                doc=spec.get("description", ""), key=key, bubbles=(_Interrupted,),
            )  # fmt: skip
        except _Interrupted as left:
            yield left.args[0]
            return
        text, status = (str(outcome), "success") if error is None else (error, "error")
        result = tool_gate.own_form(outcome) or {"status": status, "content": [{"text": text}]}
        yield {**result, "toolUseId": tool_use["toolUseId"]}

    def _asked(
        self, model: Model, messages: Any, tool_specs: Any = None, system_prompt: str | None = None, **given: Any
    ) -> AsyncGenerator[Any]:
        named = str((model.get_config() or {}).get("model_id") or type(model).__name__)
        request: dict[str, Any] = {
            "model": named,
            "messages": [{"role": each["role"], "content": each["content"]} for each in messages],
            "options": {"system": system_prompt, "tools": [spec["name"] for spec in tool_specs or ()]},
        }
        return tool_gate.streamed(
            self.unstopped(), f"{type(model).__name__}.stream",
            partial(model.stream, messages, tool_specs, system_prompt, **given),
            write=partial(_reply, named), read=itemgetter("events"), **request,
        )  # fmt: skip


def _written(result: Mapping[str, Any]) -> Any:
    """Returns a result for recording: text as text, so that people can read and supply it."""
    status, content = result.get("status", "success"), result["content"]
    is_text = status == "success" and [list(part) for part in content] == [["text"]]
    return content[0]["text"] if is_text else tool_gate.in_own_form({"status": status, "content": content})


def _reply(model: str, events: list[Any]) -> dict[str, Any]:
    used = next((each["metadata"].get("usage") or {} for each in events if "metadata" in each), {})
    usage = {
        "input_tokens": used.get("inputTokens", 0),
        "output_tokens": used.get("outputTokens", 0),
        "input_tokens_details": {"cached_tokens": used.get("cacheReadInputTokens", 0)},
    }
    return {"model": model, "usage": usage if used else {}, "events": [dict(event) for event in events]}


class KillickSessions(StateOwner):
    """The conversations of agents, one log for each id, with its history: messages, state, and that of the conversation
    manager."""

    def __init__(self, store: Place, *, space: str = SPACE) -> None:
        self._shelf = FrameworkState(store, space)

    @in_thread
    def save(self, id: str, agent: Agent) -> None:  # noqa: A002
        """Saves the conversation of an idle agent atomically."""
        value = {"messages": list(agent.messages), "state": agent.state.get()}
        self._shelf.put(id, StateEntry("agent", {**value, "manager": agent.conversation_manager.get_state()}))

    @in_thread
    def load(self, id: str, agent: Agent) -> bool:  # noqa: A002
        """Loads the last saved conversation into an agent; returns whether there was one."""
        if (kept := self._shelf.get(id, "agent")) is None:
            return False
        before = agent.conversation_manager.restore_from_session((value := kept.value)["manager"])
        agent.messages[:] = [*(before or ()), *value["messages"]]
        for name, each in value["state"].items():
            agent.state.set(name, each)
        return True

    @in_thread
    def forget(self, id: str) -> None:  # noqa: A002
        """Removes a conversation with its history."""
        self._shelf.forget(id)
