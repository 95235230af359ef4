"""Google ADK: the tools and models of agents as recorded steps, and sessions in any store.

A tool call is matched by the id of the model's call, a model call by its request. ADK gives its own ids to calls that
have none; here they get them before the reply is recorded, so that they are the same when it comes from the record.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, nullcontext
from functools import partial
from typing import Any, Final, TypeVar, cast
from urllib.parse import quote, unquote

from google.adk.agents import BaseAgent, LlmAgent
from google.adk.errors.already_exists_error import AlreadyExistsError
from google.adk.events.event import Event
from google.adk.events.event_actions import EventActions
from google.adk.models import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.runners import Runner
from google.adk.sessions import BaseSessionService, Session, State
from google.adk.sessions.base_session_service import GetSessionConfig, ListSessionsResponse
from google.adk.tools.agent_tool import AgentTool
from google.adk.tools.base_tool import BaseTool
from google.adk.tools.base_toolset import BaseToolset
from google.adk.tools.function_tool import FunctionTool
from google.adk.tools.tool_context import ToolContext
from pydantic import BaseModel

from killick.adapters import tool_gate
from killick.adapters.framework_state import FrameworkState, Place, StateEntry, StateOwner, in_thread
from killick.adapters.tool_gate import Errors, ToolOptions
from killick.errors import DeclarationRefused, HeadMoved
from killick.ids import RandomIds
from killick.llm.external import Host

SPACE: Final = "google-adk"
"""The default name prefix of this adapter's logs in a store."""

A = TypeVar("A", bound=BaseAgent)


def gated(agent: A, host: Host | None = None, *, tools: ToolOptions | None = None, errors: Errors = "answer") -> A:
    """Puts the tools and models of an agent, its sub-agents and the agents of its tools through the gate; returns it.

    host     the host to use; default: the current one
    tools    options by tool name, such as `{"look_up": {"effect": "reads"}}`; other tools run at most once
    errors   what an error of a tool that runs at most once becomes: its answer, or a question to a person
    """
    _Gate(host, tools, errors, "gated").enter(agent)
    return agent


class _Gate(tool_gate.ToolGate):
    """The wrappers of one tree of agents."""

    def enter(self, agent: Any) -> None:
        if not isinstance(agent, BaseAgent) or not (isinstance(agent, LlmAgent) or agent.sub_agents):
            advice = "has calls that cannot be gated; give the LlmAgents inside of it, one by one"
            raise DeclarationRefused(type(agent).__name__, advice)
        if isinstance(agent, LlmAgent):
            agent.model = tool_gate.rerouted(agent.canonical_model, generate_content_async=self._asked)
            agent.tools = [self.tool(each) for each in agent.tools]
        for each in agent.sub_agents:
            self.enter(each)

    def tool(self, given: Any) -> Any:
        if isinstance(given, AgentTool):  # no step of its own: its models and tools have theirs
            self.enter(given.agent)
            return given
        tool = given if isinstance(given, BaseTool | BaseToolset) else FunctionTool(given)
        if isinstance(tool, BaseToolset):
            return tool_gate.rerouted(tool, get_tools=self._listed)
        return tool_gate.rerouted(tool, run_async=self._called)

    async def _listed(self, toolset: BaseToolset, *given: Any, **named: Any) -> list[BaseTool]:
        return [self.tool(each) for each in await toolset.get_tools(*given, **named)]

    async def _called(self, tool: BaseTool, *, args: dict[str, Any], tool_context: ToolContext) -> Any:
        called: list[bool] = []

        async def apply(**judged: Any) -> Any:
            called.append(True)
            result = await tool.run_async(args=judged, tool_context=tool_context)
            actions = tool_context.actions.model_dump(mode="json", exclude_defaults=True)
            return tool_gate.in_own_form({"result": result, "actions": actions}) if actions else result

        # Once confirmed, a call is another step: before, its result was that it needs a confirmation.
        key, is_confirmed = tool_context.function_call_id, tool_context.tool_confirmation is not None
        key = f"{key}/confirmed" if key and is_confirmed else key
        outcome, error = await self.call(tool.name, args, apply, schema=_schema(tool), doc=tool.description, key=key)
        if error is not None:
            return {"error": error}
        if (whole := tool_gate.own_form(outcome)) is None:
            return outcome
        if not called:
            _act(tool_context, EventActions.model_validate(whole["actions"]))
        return whole["result"]

    def _asked(self, llm: BaseLlm, request: LlmRequest, stream: bool = False) -> AsyncGenerator[LlmResponse]:
        return tool_gate.streamed(
            self.unstopped(), f"{type(llm).__name__}.generate_content",
            partial(llm.generate_content_async, request, stream), write=partial(_reply, llm.model),
            read=lambda reply: map(LlmResponse.model_validate, reply["replies"]),
            is_early=lambda part: bool(part.partial), **_request(llm, request),
        )  # fmt: skip


def _schema(tool: BaseTool) -> Mapping[str, Any] | None:
    declaration = tool._get_declaration()
    shown = declaration and (declaration.parameters_json_schema or declaration.parameters)
    return shown.model_dump(mode="json", exclude_none=True) if isinstance(shown, BaseModel) else shown


def _act(context: ToolContext, actions: EventActions) -> None:
    """Repeats the actions of a recorded call: changes of state, a transfer, an escalation."""
    context.state.update(actions.state_delta)
    for name in actions.model_fields_set - {"state_delta"}:
        setattr(context.actions, name, getattr(actions, name))


def _request(llm: BaseLlm, request: LlmRequest) -> dict[str, Any]:
    """Returns a model request for matching: tools by their names, settings that are plain."""
    config = request.config.model_dump(mode="json", exclude_none=True, include={"system_instruction", "temperature"})
    return {
        "model": request.model or llm.model,
        "messages": [content.model_dump(mode="json", exclude_none=True) for content in request.contents],
        "options": {**config, "tools": sorted(request.tools_dict)},
    }


def _reply(model: str, parts: list[LlmResponse]) -> dict[str, Any]:
    whole = [part for part in parts if not part.partial]
    for part in whole:
        for call in part.get_function_calls() if part.content else ():
            call.id = call.id or f"adk-{RandomIds().new('call')}"  # ADK sends no id of this form to a model
    used = next((part.usage_metadata for part in reversed(whole) if part.usage_metadata), None)
    usage = {
        "input_tokens": used.prompt_token_count or 0,
        "output_tokens": (used.candidates_token_count or 0) + (used.thoughts_token_count or 0),
        "input_tokens_details": {"cached_tokens": used.cached_content_token_count or 0},
    } if used else {}  # fmt: skip
    named = next((part.model_version for part in whole if part.model_version), model)
    dumped = [part.model_dump(mode="json", exclude_none=True) for part in whole]
    return {"model": named, "usage": usage, "replies": dumped}


async def run(
    runner: Runner, *, user_id: str, session_id: str, host: Host | None = None, **given: Any
) -> AsyncGenerator[Event]:
    """Runs a turn as `runner.run_async` does, and raises its tools' errors: killick.RunWaiting if only a person can let
    a call continue. After the answer or a crash, run the same again: `KillickSessions` stores the events of a turn
    together once it has ended, so that the turn starts again from the same session."""
    sessions, key = runner.session_service, (runner.app_name, user_id, session_id)
    turn = sessions.turn(*key) if isinstance(sessions, KillickSessions) else nullcontext()
    with turn, tool_gate.raising_stop(tool_gate.hosted(host, "run")):
        async with aclosing(runner.run_async(user_id=user_id, session_id=session_id, **given)) as events:
            async for event in events:
                yield event


class KillickSessions(StateOwner, BaseSessionService):  # type: ignore[misc,unused-ignore]
    """A `SessionService`: sessions with their events and state, and the states of users and apps."""

    def __init__(self, store: Place, *, space: str = SPACE) -> None:
        self._shelf = FrameworkState(store, space)
        self._turns: dict[str, dict[str, StateEntry]] = {}

    @contextmanager
    def turn(self, app_name: str, user_id: str, session_id: str) -> Iterator[None]:
        """Stores a session's events together, at the end of the block; none if it raises."""
        key = _id(app_name, user_id, session_id)
        held = self._turns[key] = {}
        try:
            yield
            self._store(key, held.values())
        finally:
            del self._turns[key]

    @in_thread
    def create_session(
        self, *, app_name: str, user_id: str, state: dict[str, Any] | None = None, session_id: str | None = None
    ) -> Session:
        """Creates a session. AlreadyExistsError if there is one of that id."""
        name = (session_id or "").strip() or RandomIds().new("session")
        key = _id(app_name, user_id, name)
        try:
            self._shelf.put(key, StateEntry("created"), expect=0)
        except HeadMoved:
            raise AlreadyExistsError(f"Session with id {name} already exists.") from None
        self._put(key, _changes(state or {}))
        return cast("Session", self._session(key, GetSessionConfig()))

    @in_thread
    def get_session(
        self, *, app_name: str, user_id: str, session_id: str, config: GetSessionConfig | None = None
    ) -> Session | None:
        """Returns a session with its state and events."""
        return self._session(_id(app_name, user_id, session_id.strip()), config or GetSessionConfig())

    @in_thread
    def list_sessions(self, *, app_name: str, user_id: str | None = None) -> ListSessionsResponse:
        """Returns the sessions of an app, or of one of its users, without events. The last active one comes last."""
        of = f"{_id(app_name)}/" if user_id is None else f"{_id(app_name, user_id)}/"
        without = GetSessionConfig(num_recent_events=0)
        keys = [key for key in self._shelf.ids() if key.startswith(of) and key.count("/") == 2]
        sessions = [session for key in keys if (session := self._session(key, without)) is not None]
        return ListSessionsResponse(sessions=sorted(sessions, key=lambda session: session.last_update_time))

    @in_thread
    def delete_session(self, *, app_name: str, user_id: str, session_id: str) -> None:
        """Removes a session with its history."""
        self._shelf.forget(_id(app_name, user_id, session_id.strip()))

    async def append_event(self, session: Session, event: Event) -> Event:
        """Stores an event with its changes of state atomically; in a turn, once the turn has ended."""
        if event.partial:
            return event
        event = await super().append_event(session, event)
        session.last_update_time, at = event.timestamp, {"at": repr(event.timestamp)}
        kept = StateEntry(f"{_EVENT}{event.id}", event.model_dump(mode="json", exclude_none=True), at)
        key = _id(session.app_name, session.user_id, session.id)
        await asyncio.to_thread(self._put, key, [kept, *_changes(event.actions.state_delta)])
        return event

    def _put(self, key: str, entries: Iterable[StateEntry]) -> None:
        if (held := self._turns.get(key)) is None:
            self._store(key, entries)
        else:
            held |= {each.name: each for each in entries}

    def _store(self, key: str, entries: Iterable[StateEntry]) -> None:
        by_place: defaultdict[str, list[StateEntry]] = defaultdict(list)
        for each in entries:
            by_place[_place(key, each.name)].append(each)
        for place in sorted(by_place, key=len, reverse=True):
            self._shelf.put(place, *by_place[place])

    def _session(self, key: str, config: GetSessionConfig) -> Session | None:
        if not (standing := self._standing(key)):
            return None
        entries, (app, user, name) = standing.values(), map(unquote, key.split("/"))
        events = [each for each in entries if each.name.startswith(_EVENT)]
        updated = max(float(each.labels.get("at", 0)) or each.at_us / 1e6 for each in entries)
        if config.after_timestamp is not None:
            events = [each for each in events if float(each.labels["at"]) >= config.after_timestamp]
        if (last := config.num_recent_events) is not None:
            events = events[-last:] if last else []
        return Session(
            id=name, app_name=app, user_id=user, last_update_time=updated,
            state=self._state(_id(app)) | self._state(_id(app, user)) | self._state(key),
            events=[Event.model_validate(each) for each in self._values(key, events)],
        )  # fmt: skip

    def _standing(self, key: str) -> dict[str, StateEntry]:
        return {each.name: each for each in self._shelf.entries(key)} | self._turns.get(key, {})

    def _values(self, key: str, entries: Sequence[StateEntry]) -> list[Any]:
        stored = iter(self._shelf.values(key, lambda _: [each for each in entries if each.seq]))
        return [next(stored) if each.seq else each.value for each in entries]

    def _state(self, place: str) -> dict[str, Any]:
        kept = [each for each in self._standing(place).values() if each.name.startswith(_STATE)]
        names = [each.name.removeprefix(_STATE) for each in kept]
        return dict(zip(names, self._values(place, kept), strict=True))


_EVENT: Final = "event:"
_STATE: Final = "state:"


def _changes(delta: Mapping[str, Any]) -> list[StateEntry]:
    named = {name: value for name, value in delta.items() if not name.startswith(State.TEMP_PREFIX)}
    return [StateEntry(f"{_STATE}{name}", value) for name, value in named.items()]


def _place(key: str, name: str) -> str:
    """Returns the log of an entry of a session: its own, its user's or its app's."""
    app, user, _ = key.split("/")
    if name.startswith(_STATE + State.APP_PREFIX):
        return app
    return f"{app}/{user}" if name.startswith(_STATE + State.USER_PREFIX) else key


def _id(*names: str) -> str:
    return "/".join(quote(name, safe="") for name in names)
