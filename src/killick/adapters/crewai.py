"""CrewAI: the states of flows in a store, tools and models as recorded steps.

CrewAI calls tools and models from its own threads and loops, and gives a tool call no id. So a call is matched by its
name, its arguments, and its ordinal among equal ones.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final, TypeVar, cast

from crewai.flow.async_feedback.types import PendingFeedbackContext
from crewai.flow.persistence import FlowPersistence
from crewai.llms.base_llm import BaseLLM
from crewai.tools import BaseTool
from crewai.tools.tool_failure import ToolFailure
from crewai.utilities.agent_utils import extract_tool_call_info
from crewai.utilities.string_utils import sanitize_tool_name
from pydantic import BaseModel, PrivateAttr

from killick.adapters import tool_gate
from killick.adapters.framework_state import FrameworkState, Place, StateEntry, StateOwner
from killick.adapters.tool_gate import ErrorAnswer, Errors, Stopped, ToolFailed, Waiting
from killick.definitions.tools import AnyTool
from killick.errors import KillickError, Rejected, RunWaiting
from killick.llm.external import Host
from killick.llm.toolset import driven

__all__ = ["KillickFlowPersistence", "KillickTool", "ToolFailed", "Waiting", "gated", "recorded"]

SPACE: Final = "crewai"
"""The default name prefix of this adapter's logs in a store."""

_STATE: Final = "state"
_PENDING: Final = "pending"

L = TypeVar("L", bound=BaseLLM)


class KillickFlowPersistence(StateOwner, FlowPersistence):  # type: ignore[misc,unused-ignore]
    """The states of flows, one log for each flow's id, with its history.

    A flow that waits for feedback is stored with its question. A value that cannot be stored is refused with its path,
    which fails the flow.
    """

    persistence_type: str = "KillickFlowPersistence"
    store: str = ""
    """The store's location, for a flow that is rebuilt from its definition."""

    _shelf: FrameworkState = PrivateAttr()

    def __init__(self, store: Place | None = None, /, *, space: str = SPACE, **fields: Any) -> None:
        place = store if store is not None else fields.get("store") or "killick.db"
        shelf = FrameworkState(place, space)
        super().__init__(**{**fields, "store": shelf.client.runtime.store.place})
        self._shelf = shelf

    def init_db(self) -> None:
        """Does nothing: the first state creates the log."""

    def save_state(self, flow_uuid: str, method_name: str, state_data: dict[str, Any] | BaseModel) -> None:
        """Saves the state after a method atomically."""
        self._shelf.put(flow_uuid, _kept(method_name, state_data))

    def load_state(self, flow_uuid: str) -> dict[str, Any] | None:
        """Returns the last saved state."""
        kept = self._shelf.get(flow_uuid, _STATE)
        return None if kept is None else cast("dict[str, Any]", kept.value)

    def save_pending_feedback(
        self, flow_uuid: str, context: PendingFeedbackContext, state_data: dict[str, Any] | BaseModel
    ) -> None:
        """Saves the state together with a question for a person."""
        asked_for = StateEntry(_PENDING, context.to_dict(), {"method": context.method_name})
        self._shelf.put(flow_uuid, _kept(context.method_name, state_data), asked_for)

    def load_pending_feedback(self, flow_uuid: str) -> tuple[dict[str, Any], PendingFeedbackContext] | None:
        """Returns the state and its question, if any."""
        pending, state = self._shelf.get(flow_uuid, _PENDING), self.load_state(flow_uuid)
        if pending is None or state is None:
            return None
        return state, PendingFeedbackContext.from_dict(pending.value)

    def clear_pending_feedback(self, flow_uuid: str) -> None:
        """Removes an answered question."""
        self._shelf.drop(flow_uuid, _PENDING)


def _kept(method: str, state: dict[str, Any] | BaseModel) -> StateEntry:
    value = state.model_dump(mode="json") if isinstance(state, BaseModel) else state
    return StateEntry(_STATE, value, {"method": method})


# At the gate ---------------------------------------------------------------------------------------


class KillickTool(BaseTool):  # type: ignore[misc,unused-ignore]
    """A CrewAI tool whose calls are steps of a host's run; `gated` makes it from another.

    Arguments are validated before the gate: the model corrects invalid ones, and they are not recorded.
    """

    inner: BaseTool
    _host: Host | None = PrivateAttr(default=None)
    _tool: AnyTool = PrivateAttr()
    _errors: Errors = PrivateAttr(default="answer")

    def _run(self, **arguments: Any) -> Any:
        return driven(self._called(arguments, blocking=True))

    async def _arun(self, **arguments: Any) -> Any:
        return await self._called(arguments, blocking=False)

    async def _called(self, arguments: dict[str, Any], *, blocking: bool) -> Any:
        try:
            host = tool_gate.hosted(self._host, "gated")
            return self._read(
                await tool_gate.called(host, self._tool, arguments, self._apply, errors=self._errors, blocking=blocking)
            )
        except (Rejected, ErrorAnswer) as failed:  # returned: CrewAI may repeat a call that raises
            return ToolFailure(message=str(failed), code=getattr(failed, "code", None))
        except KillickError as error:
            raise (Waiting(error) if isinstance(error, RunWaiting) else Stopped(str(error))) from error

    def _apply(self, **judged: Any) -> Any:
        # In the host's thread for any caller: an async tool may have its loop there.
        result = self.inner._run(**self._validate_kwargs(judged))
        result = asyncio.run(result) if asyncio.iscoroutine(result) else result
        return tool_gate.in_own_form(result.model_dump(mode="json")) if isinstance(result, ToolFailure) else result

    def _read(self, written: Any) -> Any:
        """Returns a result as the agent sees it: the tool's reported failure, or its declared form."""
        if (failure := tool_gate.own_form(written)) is not None:
            return ToolFailure.model_validate(failure)
        if self.result_schema is None or not isinstance(written, dict):
            return written
        return self.result_schema.model_validate(written)


def gated(tool: BaseTool, host: Host | None = None, *, errors: Errors = "answer", **options: Any) -> KillickTool:
    """Returns a tool that goes through the gate: give this one to agents, or call its `run` in a flow.

    host      the host to use; default: the current one
    errors    what an error of a tool that runs at most once becomes: its answer, a `ToolFailure`, or a question to a
              person
    options   the options of `killick.tool`: effect, identity, approve, retry, …
    """
    shared = ("name", "description", "args_schema", "result_schema", "cache_function", "env_vars", "result_as_answer")
    limits = ("max_usage_count", "current_usage_count", "tool_failure_policy")
    through = KillickTool(inner=tool, **{name: getattr(tool, name) for name in (*shared, *limits)})
    name, schema = sanitize_tool_name(tool.name), tool.args_schema.model_json_schema()
    through._host, through._errors = host, errors
    through._tool = tool_gate.declared(name, options, schema=schema, doc=tool.description)
    return through


def recorded(llm: L, host: Host | None = None) -> L:
    """Returns the same model with its calls as steps of a host's run: a recorded reply is not requested again.

    Without it, a crew that runs again calls its models again, and their tool calls may differ from the recorded ones.
    """
    kind: Any = type(llm)

    async def answer(of: BaseLLM, ask: Any, messages: Any, args: Any, kwargs: Any, *, blocking: bool) -> Any:
        given = dict(zip(_GIVEN, args, strict=False)) | kwargs
        gate, request = tool_gate.hosted(host, "recorded"), _request(of, messages, given)
        return _said(of, await tool_gate.asked(gate, f"{kind.__name__}.call", ask, blocking=blocking, **request), given)

    class Recorded(kind):  # type: ignore[misc,unused-ignore]
        def call(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
            def ask() -> Any:
                before = self.get_token_usage_summary()
                return _reply(self, super(Recorded, self).call(messages, *args, **kwargs), before)

            return driven(answer(self, ask, messages, args, kwargs, blocking=True))

        async def acall(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
            async def ask() -> Any:
                before = self.get_token_usage_summary()
                return _reply(self, await super(Recorded, self).acall(messages, *args, **kwargs), before)

            return await answer(self, ask, messages, args, kwargs, blocking=False)

    Recorded.__name__, Recorded.__qualname__ = kind.__name__, kind.__qualname__
    same = llm.model_copy()
    object.__setattr__(same, "__class__", Recorded)
    return same


_GIVEN: Final = ("tools", "callbacks", "available_functions", "from_task", "from_agent", "response_model")
"""The positional parameters of `BaseLLM.call` after the messages."""


def _request(llm: BaseLLM, messages: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Returns a model request for matching."""
    tools = [tool.get("function", tool).get("name") for tool in given.get("tools") or () if isinstance(tool, dict)]
    sent = messages if isinstance(messages, str) else [dict(message) for message in messages]
    return {"model": llm.model, "messages": sent, "tools": tools}


def _reply(llm: BaseLLM, reply: Any, before: Any) -> dict[str, Any]:
    """Returns a reply as a value: text, tool calls in one form for all providers, or a declared form."""
    after = llm.get_token_usage_summary()
    counts = {name: getattr(after, name) - getattr(before, name) for name in ("prompt_tokens", "completion_tokens")}
    written = {"model": llm.model, "usage": counts if any(counts.values()) else {}}
    if isinstance(reply, BaseModel):
        return written | {"form": reply.model_dump(mode="json")}
    calls = [extract_tool_call_info(call) for call in reply] if isinstance(reply, list) else []
    if calls and all(calls):
        functions = [(id_, {"name": name, "arguments": given}) for id_, name, given in filter(None, calls)]
        return written | {"calls": [{"id": id_, "type": "function", "function": fn} for id_, fn in functions]}
    return written | {"reply": reply}


def _said(llm: BaseLLM, written: dict[str, Any], given: dict[str, Any]) -> Any:
    if "form" in written:
        form = given.get("response_model") or getattr(llm, "response_format", None)
        return form.model_validate(written["form"]) if form is not None else written["form"]
    return written.get("calls") or written.get("reply")
