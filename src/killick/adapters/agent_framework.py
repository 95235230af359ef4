"""Microsoft Agent Framework: its checkpoints, sessions and histories in a store, its tools and models as recorded
steps.

State is stored in the framework's own serialization, and read back under its own rules. Calls go through an external
session: tools by the id of the model's call, models by their request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, ClassVar, Final

from agent_framework import (
    AgentSession,
    ChatContext,
    ChatMiddleware,
    ChatResponse,
    ChatResponseUpdate,
    Content,
    FunctionInvocationContext,
    FunctionMiddleware,
    HistoryProvider,
    Message,
    MiddlewareFailure,
    MiddlewareTermination,
    ResponseStream,
    WorkflowCheckpoint,
)
from agent_framework._tools import _FunctionArgumentValidationError  # pyright: ignore[reportPrivateUsage]
from agent_framework._workflows._checkpoint_encoding import decode_checkpoint_value, encode_checkpoint_value
from agent_framework.exceptions import ToolException, UserInputRequiredException, WorkflowCheckpointException

from killick.adapters import tool_gate
from killick.adapters.framework_state import FrameworkState, Place, StateEntry, StateOwner, in_thread
from killick.adapters.tool_gate import Declared, Errors, ToolFailed, ToolOptions, in_own_form, own_form
from killick.errors import KillickError, Rejected, RunWaiting
from killick.ids import RandomIds
from killick.llm.external import Host
from killick.model.codec import digest

SPACE: Final = "agent-framework"
"""The default name prefix of this adapter's logs in a store."""


class KillickCheckpointStorage(StateOwner):
    """A `CheckpointStorage` for workflow checkpoints. Each stores only its new parts.

    Values that are not JSON use the framework's own checkpoint encoding, which pickles them. They are read under its
    own rules: its types, those registered with it, and `allowed_checkpoint_types` ("module:QualName").
    """

    def __init__(self, store: Place, *, space: str = SPACE, allowed_checkpoint_types: Iterable[str] = ()) -> None:
        self._shelf = FrameworkState(store, space)
        self._allowed = frozenset(allowed_checkpoint_types)

    @in_thread
    def save(self, checkpoint: WorkflowCheckpoint) -> str:
        """Saves a checkpoint atomically."""
        # Decoded once before it counts: a checkpoint that cannot be restored is worthless.
        written = encode_checkpoint_value(checkpoint.to_dict())
        self._read(written)
        kept = StateEntry(checkpoint.checkpoint_id, written, {"timestamp": checkpoint.timestamp})
        self._shelf.put(checkpoint.workflow_name, kept)
        return checkpoint.checkpoint_id

    @in_thread
    def load(self, checkpoint_id: str) -> WorkflowCheckpoint:
        """Loads a checkpoint by id, of any workflow."""
        _, kept = self._find(checkpoint_id)
        if kept is None:
            raise WorkflowCheckpointException(f"{checkpoint_id}: no such checkpoint; list those of the workflow")
        return self._read(kept.value)

    @in_thread
    def list_checkpoints(self, *, workflow_name: str) -> list[WorkflowCheckpoint]:
        """Returns all checkpoints of a workflow, in save order."""
        return [self._read(each) for each in self._shelf.values(workflow_name)]

    @in_thread
    def list_checkpoint_ids(self, *, workflow_name: str) -> list[str]:
        """Returns their ids alone, without reading state."""
        return [kept.name for kept in self._shelf.entries(workflow_name)]

    @in_thread
    def get_latest(self, *, workflow_name: str) -> WorkflowCheckpoint | None:
        """Returns the newest by its own timestamp; of two equal ones, the one saved last."""
        entries = self._shelf.entries(workflow_name)
        by_time = max(
            entries, key=lambda kept: (datetime.fromisoformat(kept.labels["timestamp"]), kept.seq), default=None
        )
        return None if by_time is None else self._read(by_time.value)

    @in_thread
    def delete(self, checkpoint_id: str) -> bool:
        """Deletes a checkpoint; returns whether it existed."""
        workflow, kept = self._find(checkpoint_id)
        if kept is not None:
            self._shelf.drop(workflow, checkpoint_id)
        return kept is not None

    def _find(self, checkpoint_id: str) -> tuple[str, StateEntry | None]:
        # The framework asks by checkpoint id alone, and there are few workflows: each is a name in the code.
        for workflow in self._shelf.ids():
            if (kept := self._shelf.get(workflow, checkpoint_id)) is not None:
                return workflow, kept
        return "", None

    def _read(self, written: Any) -> WorkflowCheckpoint:
        return WorkflowCheckpoint.from_dict(decode_checkpoint_value(written, allowed_types=self._allowed))


class KillickSessions(StateOwner):
    """A `SessionStore`: agent sessions under ids that callers choose, as `AgentSession.to_dict` writes them."""

    def __init__(self, store: Place, *, space: str = f"{SPACE}-sessions") -> None:
        self._shelf = FrameworkState(store, space)

    @in_thread
    def get(self, session_id: str) -> AgentSession | None:
        """Returns a copy of the stored session."""
        kept = self._shelf.get(_session(session_id), "session")
        return AgentSession.from_dict(kept.value) if kept is not None else None

    @in_thread
    def set(self, session_id: str, session: AgentSession) -> None:
        """Stores the session, replacing the previous one."""
        self._shelf.put(_session(session_id), StateEntry("session", session.to_dict()))

    @in_thread
    def delete(self, session_id: str) -> None:
        """Removes the session with its history."""
        self._shelf.forget(_session(session_id))


class KillickHistory(StateOwner, HistoryProvider):  # type: ignore[misc,unused-ignore]
    """A `HistoryProvider`: the messages of each session, one entry each, in order."""

    DEFAULT_SOURCE_ID: ClassVar[str] = "killick"

    def __init__(
        self, store: Place, *, source_id: str = DEFAULT_SOURCE_ID, space: str = f"{SPACE}-history", **flags: Any
    ) -> None:
        """`flags` are those of `HistoryProvider`: which messages are loaded and stored."""
        super().__init__(source_id, **flags)
        self._shelf = FrameworkState(store, space)

    @in_thread
    def get_messages(self, /, session_id: str | None, **given: Any) -> list[Message]:
        """Returns the messages so far."""
        return [Message.from_dict(each) for each in self._shelf.values(_session(session_id))]

    @in_thread
    def save_messages(self, /, session_id: str | None, messages: Sequence[Message], **given: Any) -> None:
        """Adds messages atomically. A message with a known id and equal content is not added again."""
        session = _session(session_id)
        there = {kept.name for kept in self._shelf.entries(session)}
        named = {self._name(written): written for written in (message.to_dict() for message in messages)}
        fresh = [StateEntry(name, written) for name, written in named.items() if name not in there]
        if fresh:
            self._shelf.put(session, *fresh)

    def _name(self, message: Mapping[str, Any]) -> str:
        # Providers give one id to several messages of a reply, so the id alone is not unique.
        id_ = message.get("message_id")
        key = self._shelf.client.runtime.store.secret_key
        return f"{id_}:{digest(message, secret_key=key).hex()[:16]}" if id_ else RandomIds().new("message")


def _session(session_id: str | None) -> str:
    if session_id == "":
        raise ValueError("session_id must be a non-empty string")
    return session_id or "default"


# At the gate ---------------------------------------------------------------------------------------


class Waiting(RunWaiting, MiddlewareFailure):  # type: ignore[misc,unused-ignore]
    """Only a person can let a tool call continue. As a `MiddlewareFailure` it ends the agent's run instead of reaching
    the model; as a `killick.RunWaiting` it names the waits. Once answered, the same run continues from there."""

    def __init__(self, waiting: RunWaiting) -> None:
        MiddlewareFailure.__init__(self, str(waiting))
        self.run = waiting.run
        self.waits = waiting.waits


class KillickTools(FunctionMiddleware):  # type: ignore[misc,unused-ignore]
    """Function middleware: every tool call is a step of the host's run, under the id of the model's call.

    Install it last, so that the contract evaluates the arguments after other middleware. `tools` gives options by tool
    name, such as `{"look_up": {"effect": "reads"}}`; other tools run at most once. `errors` says whether an error of a
    tool that runs at most once is its answer to the model, or a question to a person.
    """

    def __init__(
        self, host: Host | None = None, *, tools: ToolOptions | None = None, errors: Errors = "answer"
    ) -> None:
        self._host = host
        self._declared = Declared(tools)
        self._errors: Errors = errors

    async def process(self, context: FunctionInvocationContext, call_next: Callable[[], Awaitable[None]]) -> None:
        """Calls the tool through the gate, or returns its recorded result."""
        try:
            outcome = await self._outcome(context, call_next)
        except Rejected as rejected:
            context.result = str(rejected)
            return
        except ToolFailed as failed:
            # The same text live and from the log.
            raise ToolException(str(failed)) from failed
        except RunWaiting as waiting:
            raise Waiting(waiting) from waiting
        except KillickError as error:
            # The framework would report any other exception to the model as a tool failure.
            raise MiddlewareFailure(str(error)) from error
        if isinstance(outcome, Mapping) and _ENDED in outcome:
            context.result = _read(outcome["result"])
            raise MiddlewareTermination(outcome[_ENDED], result=context.result)
        context.result = _read(outcome)

    async def _outcome(self, context: FunctionInvocationContext, call_next: Callable[[], Awaitable[None]]) -> Any:
        host, function, given = tool_gate.hosted(self._host, "KillickTools"), context.function, _arguments(context)
        tool = self._declared.of(function.name, schema=function.parameters(), doc=function.description)

        async def apply(**judged: Any) -> Any:
            if judged != given:
                context.arguments = judged
            try:
                await call_next()
            except MiddlewareTermination as ended:
                # The tool ran, and ends the agent's loop.
                return {_ENDED: str(ended), "result": _written(ended.result or context.result)}
            return _written(context.result)

        key = context.metadata.get("call_id")
        return await tool_gate.called(host, tool, given, apply, errors=self._errors, key=key, bubbles=_BEFORE_ANYTHING)


_BEFORE_ANYTHING: Final = (UserInputRequiredException, _FunctionArgumentValidationError)
"""Errors of a call whose body did not start. Invalid arguments are the model's to correct."""


def _arguments(context: FunctionInvocationContext) -> dict[str, Any]:
    given = context.arguments
    return dict(given) if isinstance(given, Mapping) else given.model_dump(exclude_unset=True)


_ENDED: Final = "agent-framework:ended"


def _written(result: Any) -> Any:
    """Returns a tool's result for recording: text as text, so that people can read and supply it when they resolve an
    unknown outcome; other contents in the framework's form."""
    if isinstance(result, Content):
        return in_own_form(result.to_dict())
    if isinstance(result, list) and result and all(isinstance(part, Content) for part in result):
        only = result[0]
        if len(result) == 1 and only.type == "text" and only == Content.from_text(only.text or ""):
            return only.text
        return in_own_form([part.to_dict() for part in result])
    return result


def _read(written: Any) -> Any:
    if (contents := own_form(written)) is None:
        return written
    return list(map(Content.from_dict, contents)) if isinstance(contents, list) else Content.from_dict(contents)


class KillickChat(ChatMiddleware):  # type: ignore[misc,unused-ignore]
    """Chat middleware: every model call is a step of the host's run; a recorded reply is not requested again.

    Without it, an agent that runs again calls the model again, which gives its tool calls new ids, so that earlier
    calls cannot be matched. Streamed replies pass through, and are recorded once complete.
    """

    def __init__(self, host: Host | None = None) -> None:
        self._host = host

    async def process(self, context: ChatContext, call_next: Callable[[], Awaitable[None]]) -> None:
        """Calls the model, or returns its recorded reply."""
        host, request = tool_gate.hosted(self._host, "KillickChat"), _request(context)
        who = f"{type(context.client).__name__}.get_response"
        form = (context.options or {}).get("response_format")
        if context.stream:

            async def begin() -> Any:
                await call_next()
                return context.result

            parts = tool_gate.streamed(host, who, begin, write=_updates, read=_updates_read, **request)
            context.result = ResponseStream(
                parts, finalizer=lambda updates: ChatResponse.from_updates(updates, output_format_type=form)
            )
            return

        reply = await tool_gate.asked(host, who, call_next, write=lambda _: _reply(context.result), **request)
        context.result = ChatResponse.from_dict({**reply["response"], "response_format": form})


def _updates(updates: list[ChatResponseUpdate]) -> dict[str, Any]:
    return _reply(ChatResponse.from_updates(updates)) | {"updates": [update.to_dict() for update in updates]}


def _updates_read(reply: Any) -> Iterator[ChatResponseUpdate]:
    return (ChatResponseUpdate.from_dict(written) for written in reply["updates"])


def _request(context: ChatContext) -> dict[str, Any]:
    """Returns a model request for matching, without ids that the framework generates each time. Tools are by name;
    provider-hosted ones as written."""
    options = dict(context.options or {})
    tools = [
        tool if isinstance(tool, dict) else getattr(tool, "name", None) or type(tool).__name__
        for tool in options.pop("tools", None) or ()
    ]
    messages = [
        {"role": str(message.role), "contents": [_content(content.to_dict()) for content in message.contents]}
        for message in context.messages
    ]
    plain = {name: value for name, value in options.items() if isinstance(value, str | int | float | bool)}
    return {"messages": messages, "options": plain | {"tools": tools}}


def _content(written: Mapping[str, Any]) -> dict[str, Any]:
    known = {name: part for name, part in written.items() if name not in ("id", "additional_properties")}
    if isinstance(asked_for := known.get("function_call"), dict):
        known["function_call"] = _content(asked_for)
    return known


def _reply(response: Any) -> dict[str, Any]:
    used = response.usage_details or {}
    usage = {"input_tokens": used.get("input_token_count"), "output_tokens": used.get("output_token_count")}
    return {
        "model": response.model,
        "usage": {name: count for name, count in usage.items() if count is not None},
        "response": response.to_dict(),
    }
