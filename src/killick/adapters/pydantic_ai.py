"""A durability engine for Pydantic AI: its model requests and tool calls are steps of a run, by key.

The agent's loop is Pydantic AI's: it is re-executed from its start, and recorded steps are not repeated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Final, Literal, TypeAlias
from weakref import WeakKeyDictionary

from pydantic import TypeAdapter
from pydantic_ai.durable_exec import (
    JSON_CODEC,
    BaseDurabilityCapability,
    BoundDurableOperation,
    CapabilityOperationId,
    DurabilityEngineSpec,
    DurableOperation,
    DurableOperationId,
    DynamicToolsetCallToolParams,
    JournalCallableOperationBackend,
    ModelCancelSuspendedResponseId,
    ModelCompactMessagesId,
    ModelRequestId,
    ModelRequestParams,
    RoleBasedOperationConfig,
    ToolsetCallToolId,
    ToolsetCallToolParams,
    conversation_id_from_run_id,
)
from pydantic_ai.exceptions import ApprovalRequired, CallDeferred, ModelAPIError, ModelHTTPError, ModelRetry, ToolFailed
from pydantic_ai.messages import ModelMessagesTypeAdapter, ToolReturn
from pydantic_ai.models import Model
from pydantic_ai.tools import AgentDepsT, DeferredToolRequests, DeferredToolResults, RunContext, ToolApproved
from pydantic_ai.toolsets import AbstractToolset, ExternalToolset, ToolsetTool, WrapperToolset
from pydantic_core import to_jsonable_python

from killick.adapters.tool_gate import (
    ErrorAnswer,
    Errors,
    answered,
    answering,
    asked,
    hinted,
    hosted,
    in_own_form,
    own_form,
)
from killick.contracts.facts import Approval
from killick.definitions.current import in_agent
from killick.definitions.open_tools import open_tool
from killick.definitions.policy import Approve
from killick.errors import Rejected, StepFailed
from killick.llm.external import Host, attempt, here

Options: TypeAlias = Mapping[str, Any]
"""The options of `killick.tool`, for one tool."""
ToolOptions: TypeAlias = Mapping[str, Options | Literal[False]]
"""Options by tool name; False leaves a tool unrecorded, so that it runs again after a crash."""

ANYBODY: Final = Approval()
METADATA: Final = "killick"
"""The name for these options in a tool's metadata."""
_MOMENTARY: Final = frozenset({"timestamp", "run_id", "conversation_id"})
"""Parts of a message that are new on each execution, and that no model sees."""
_RETURNED: Final[TypeAdapter[ToolReturn[Any]]] = TypeAdapter(ToolReturn)

_PARAMS: Final[ContextVar[Any]] = ContextVar("killick_pydantic_ai_params", default=None)
"""The arguments of the current operation."""


class KillickDurability(BaseDurabilityCapability[AgentDepsT]):
    """Makes a Pydantic AI agent durable inside a Killick host; elsewhere it changes nothing.

        assistant = Agent("openai:gpt-5", name="assistant", capabilities=[KillickDurability()])

        @killick.agent
        async def helping(run: killick.Run, wish: str) -> str:
            async with run.hosting():
                return (await assistant.run(wish)).output

    tools       options by tool name, as for `killick.tool`. Others run at most once, unless an MCP server's hints say
                otherwise. `False`: no step, for a tool that only runs another durable agent. Also as a tool's
                metadata: `@assistant.tool_plain(metadata={"killick": {…}})`
    approvers   the approvers where Pydantic AI requires approval (`requires_approval`, `ApprovalRequired`): a name,
                names, or `killick.Approval(…)`; default: anyone. None: the agent ends with `DeferredToolRequests`
    errors      what an error of a tool that runs at most once becomes. "ask": a question to a person, where Pydantic AI
                alone ends the run. "answer": its answer, which the model reads as a failed call
    models, event_stream_handler, name    as with every durability engine of Pydantic AI
    """

    engine_spec = DurabilityEngineSpec(
        engine_name="Killick",
        durable_unit_noun="step",
        durable_container_noun="run",
        codec=JSON_CODEC,
        toolset_lifecycles={"function": "enter-always", "mcp": "enter-never", "dynamic": "enter-never"},
        # Toolsets added for one run are not wrapped: they would bypass the gate.
        unsupported_runtime_toolset_kinds=frozenset({"function", "mcp", "dynamic"}),
        tool_config_key=METADATA,
    )

    def __init__(
        self, *, tools: ToolOptions | None = None, approvers: Approve | None = ANYBODY, errors: Errors = "ask",
        models: Mapping[str, Model] | None = None, event_stream_handler: Any = None, name: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(models=models, event_stream_handler=event_stream_handler, name=name)
        self._tools = dict(tools or {})
        self._approvers = approvers
        self._errors: Errors = errors

    @property
    def in_durable_context(self) -> bool:
        # An agent that a tool runs is part of the tool's step.
        return here() is not None and attempt() is None

    def get_durable_operation_backend(self) -> Backend:
        return Backend(self.name, self.default_model_id, self._tools, self._errors)

    def get_default_run_id(self) -> str | None:
        # Outside an agent there is no counter: a repeated request has the same messages, which identify it.
        if not self.in_durable_context or not in_agent():
            return None
        host = hosted(None, self.name)
        return f"{host.run}:{_sequence_of(host).count('run')}"

    def get_default_conversation_id(self, run_id: str) -> str | None:
        return conversation_id_from_run_id(run_id) if self.in_durable_context and in_agent() else None

    async def handle_deferred_tool_calls(
        self, ctx: RunContext[AgentDepsT], *, requests: DeferredToolRequests
    ) -> DeferredToolResults | None:
        """Routes approvals to Killick: the gate asks people about this call."""
        if not self.in_durable_context or self._approvers is None or not requests.approvals:
            return None
        course = _sequence_of(hosted(None, self.name))
        for call in requests.approvals:
            course.approvers[_call_key(ctx, call.tool_call_id, approved=True)] = self._approvers
        return requests.build_results(approvals={call.tool_call_id: ToolApproved() for call in requests.approvals})

    def _wrap_other_leaf_toolset(self, ts: AbstractToolset[AgentDepsT]) -> WrapperToolset[AgentDepsT] | None:
        if isinstance(ts, ExternalToolset) or ts.id is None:
            return None
        return GatedToolset(ts, tools=self._tools, needs_host=False, errors=self._errors)


class Backend(JournalCallableOperationBackend[Options]):
    """Runs Pydantic AI's durable operations as steps of the current host."""

    def __init__(self, agent: str, default_model_id: str | None, tools: ToolOptions, errors: Errors) -> None:
        reads, again = {"effect": "reads"}, {"effect": "idempotent"}
        config = RoleBasedOperationConfig[Options](
            model={}, event=again, capability={}, tool=reads, resolve_tool=self._of_tool
        )
        super().__init__(agent_name=agent, default_model_id=default_model_id, config=config)
        self._tools = tools
        self._errors: Errors = errors

    def bind(self, operation: DurableOperation[Any, Any, Any]) -> BoundDurableOperation[Any, Any, Any]:
        """As the builder does; then an operation's arguments can be recorded with it."""
        return _Given(super().bind(operation))

    async def execute(
        self, *, operation_id: DurableOperationId, name: str, body: Callable[[], Awaitable[object]],
        cache_key: tuple[object, ...], config: Options,
    ) -> object:  # fmt: skip
        host, params = hosted(None, name), _PARAMS.get()
        if isinstance(operation_id, ModelRequestId):
            return await _requested(host, operation_id.model_name, params, body)
        if isinstance(operation_id, ToolsetCallToolId):
            outcome = await _tool_called(host, params, _plainly(body), config, self._errors)
            return own_form(outcome) or {"result": outcome, "kind": "tool_return"}
        if not in_agent() and not isinstance(operation_id, CapabilityOperationId):
            return await body()  # A read is not recorded: a later caller reads again.
        if isinstance(operation_id, ModelCompactMessagesId | ModelCancelSuspendedResponseId):
            return await host.model(_named(body, name), key=_nth_key(host, params, name), model=operation_id.model_name)
        if isinstance(operation_id, CapabilityOperationId):
            config = self._tools.get(f"{operation_id.capability_id}.{operation_id.operation}") or config
        return await host.call(open_tool(name, **config), {}, key=_nth_key(host, params, name), fn=body)

    def _of_tool(self, operation_id: DurableOperationId, tool: object | None, name: str) -> Options | Literal[False]:
        if not isinstance(operation_id, ToolsetCallToolId):
            return {"effect": "reads"}
        return _options(self._tools, name, tool) if isinstance(tool, ToolsetTool) else {}


class _Given(BoundDurableOperation[Any, Any, Any]):
    def __init__(self, bound: BoundDurableOperation[Any, Any, Any]) -> None:
        self._bound = bound

    @property
    def operation(self) -> DurableOperation[Any, Any, Any]:
        return self._bound.operation

    async def __call__(self, params: Any, *, config: object | None = None) -> Any:
        token = _PARAMS.set(params)
        try:
            return await self._bound(params, config=config)
        finally:
            _PARAMS.reset(token)


@dataclass
class GatedToolset(WrapperToolset[AgentDepsT]):
    """A toolset whose calls go through the gate, while model calls do not: `toolsets=[GatedToolset(mine)]`.

    `KillickDurability` wraps its agent's toolsets itself.
    """

    _: KW_ONLY
    tools: ToolOptions = field(default_factory=dict[str, Options | Literal[False]])
    """Options by tool name, as with `KillickDurability`."""
    needs_host: bool = True
    """Whether a call without a host is refused, or made unrecorded."""
    errors: Errors = "ask"
    """What an error becomes, as with `KillickDurability`."""

    async def call_tool(
        self, name: str, tool_args: dict[str, Any], ctx: RunContext[AgentDepsT], tool: ToolsetTool[AgentDepsT]
    ) -> Any:
        options = _options(self.tools, name, tool)
        if options is False or attempt() is not None or (here() is None and not self.needs_host):
            return await self.wrapped.call_tool(name, tool_args, ctx, tool)
        params = ToolsetCallToolParams(name, tool_args=dict(tool_args), ctx=ctx, tool=tool)

        async def body() -> object:
            try:
                result = await self.wrapped.call_tool(name, params.tool_args, ctx, tool)
            except (ModelRetry, ToolFailed) as failed:
                return in_own_form({"retry" if isinstance(failed, ModelRetry) else "failed": failed.message})
            if isinstance(result, ToolReturn):
                return in_own_form({"return": _RETURNED.dump_python(result, mode="json")})
            return to_jsonable_python(result, serialize_unknown=True)

        # A tool raises these before any effect: it is called again after the approval.
        leaves = (ApprovalRequired, CallDeferred)
        outcome: Any = await _tool_called(hosted(None, name), params, body, options, self.errors, bubbles=leaves)
        match own_form(outcome):
            case {"retry": message}:
                raise ModelRetry(message)
            case {"failed": message}:
                raise ToolFailed(message)
            case {"return": returned}:
                return _RETURNED.validate_python(returned)
            case _:
                return outcome


# One step ---------------------------------------------------------------------------------------------


async def _requested(
    host: Host, model: str, params: ModelRequestParams, body: Callable[[], Awaitable[object]]
) -> object:
    """Returns a model's reply, recorded with its request."""

    async def ask(**_: Any) -> object:
        # A connection belongs to the loop that opened it. Pydantic AI leaves it to durable engines to replace a client.
        if isinstance(asked_of := params.run_context.model, Model):
            asked_of._refresh_http_client()  # pyright: ignore[reportPrivateUsage]
        return await body()

    ask.__qualname__ = model
    request: dict[str, Any] = {
        "model": model,
        "messages": [_stable(each) for each in ModelMessagesTypeAdapter.dump_python(params.messages, mode="json")],
        "parameters": _lean(to_jsonable_python(params.model_request_parameters, serialize_unknown=True)),
    }
    if params.model_settings:
        request["settings"] = to_jsonable_python(params.model_settings, serialize_unknown=True)
    try:
        if in_agent():
            return await host.model(ask, key=_nth_key(host, params, "model"), **request)
        return await asked(host, model, ask, **request)
    except Rejected:
        raise
    except StepFailed as failed:
        # The same error live and from the log, and one that Pydantic AI handles: with another model, perhaps.
        status = failed.failure.details.get("status") if failed.failure is not None else None
        if isinstance(status, int):
            raise ModelHTTPError(status, model, failed.failure.details.get("body")) from failed
        raise ModelAPIError(model, str(failed)) from failed


async def _tool_called(
    host: Host, params: ToolsetCallToolParams | DynamicToolsetCallToolParams, body: Callable[[], Awaitable[object]],
    options: Options, errors: Errors, *, bubbles: tuple[type[BaseException], ...] = (),
) -> object:  # fmt: skip
    ctx, definition = params.ctx, _definition(params)
    key = _call_key(ctx, ctx.tool_call_id, approved=ctx.tool_call_approved) if ctx.tool_call_id else None
    course = _sequence_of(host)
    if key is not None and key in course.approvers:
        options = {"approve": course.approvers[key], **options}
    schema, doc = (definition.parameters_json_schema, definition.description or "") if definition else (None, "")
    given = to_jsonable_python(params.tool_args, serialize_unknown=True)

    async def run(**arguments: Any) -> object:
        if arguments != given:
            _edit(params, arguments)
        return await body()

    try:
        tool = open_tool(params.name, schema=schema, doc=doc, **options)
        fn = answering(tool, run, errors, (ModelRetry, ToolFailed, *bubbles))
        return answered(await host.call(tool, given, key=key, fn=fn, bubbles=bubbles))
    except ErrorAnswer as failed:
        raise ToolFailed(str(failed)) from failed
    except Rejected as rejected:
        if rejected.response is not None:
            raise ToolFailed(f"{rejected.message} (the tool was not called)") from rejected
        raise ToolFailed(str(rejected)) from rejected


def _plainly(body: Callable[[], Awaitable[object]]) -> Callable[[], Awaitable[object]]:
    """Records a tool's plain value as it is, for people to read, and to supply for an unknown outcome."""

    async def run() -> object:
        match payload := await body():
            case {"result": value, "kind": "tool_return", **more} if not any(more.values()) and own_form(value) is None:
                return value
            case _:
                return in_own_form(payload)

    return run


def _edit(params: ToolsetCallToolParams | DynamicToolsetCallToolParams, arguments: dict[str, Any]) -> None:
    """Returns a person's edit of the arguments, as the tool takes it."""
    tool = params.tool if isinstance(params, ToolsetCallToolParams) else None
    fitting = arguments if tool is None else tool.args_validator.validate_python(arguments)
    params.tool_args.clear()
    params.tool_args.update(fitting)


def _definition(params: ToolsetCallToolParams | DynamicToolsetCallToolParams) -> Any:
    if isinstance(params, DynamicToolsetCallToolParams):
        return params.tool_def
    return None if params.tool is None else params.tool.tool_def


def _options(tools: ToolOptions, name: str, tool: ToolsetTool[Any]) -> Options | Literal[False]:
    """Returns a tool's options: from the agent's capability, its own metadata, or an MCP server's hints."""
    metadata = tool.tool_def.metadata or {}
    said: Options | Literal[False] = tools.get(name, metadata.get(METADATA, {}))
    return said if said is False else {**hinted(metadata.get("annotations")), **said}


# Keys -------------------------------------------------------------------------------------------------


class _CallSequence:
    """The calls of one host block, since its loop started."""

    def __init__(self) -> None:
        self.approvers: dict[str, Approve] = {}
        self._seen: Counter[str] = Counter()

    def count(self, what: str) -> int:
        self._seen[what] += 1
        return self._seen[what]


_COURSES: Final[WeakKeyDictionary[Host, _CallSequence]] = WeakKeyDictionary()


def _sequence_of(host: Host) -> _CallSequence:
    return _COURSES.setdefault(host, _CallSequence())


def _call_key(ctx: RunContext[Any], call: str, *, approved: bool) -> str:
    """Returns a call's key: the model's call id. The same call, once approved, is another step."""
    return (f"{ctx.run_id}/" if in_agent() else "") + call + ("/approved" if approved else "")


def _nth_key(host: Host, params: Any, what: str) -> str:
    """Returns the key of the nth operation of its kind in a step of the agent's deterministic loop."""
    ctx: RunContext[Any] | None = getattr(params, "run_context", None) or getattr(params, "ctx", None)
    where = what if ctx is None else f"{ctx.run_id}/{ctx.run_step}/{what}"
    return f"{where}#{_sequence_of(host).count(where)}"


def _named(body: Callable[[], Awaitable[object]], name: str) -> Callable[..., Awaitable[object]]:
    async def ask(**_: Any) -> object:
        return await body()

    ask.__qualname__ = name
    return ask


def _stable(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message without its momentary parts, so that a request is equal after a crash."""
    parts = [_lean(part, _MOMENTARY) for part in message["parts"]]
    return {**_lean(message, _MOMENTARY), "parts": parts}


def _lean(fields: dict[str, Any], without: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Returns the non-empty fields, also of tools in lists."""
    return {
        name: [_lean(each) if isinstance(each, dict) else each for each in value] if isinstance(value, list) else value
        for name, value in fields.items()
        if name not in without and value is not None and value != []
    }
