"""The gate for LangGraph's tools: each call is a recorded step that happens once, across re-executions of its node.

LangGraph re-executes a node from its start after an interrupt, after an error, and after a crash for unsaved work. A
tool call is matched by its requesting message and its own id, both in the graph's state; a call from a node's code by
its position: the step, the node, and its arguments.
"""

from __future__ import annotations

import asyncio
import functools
import os
import re
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager, nullcontext, suppress
from functools import partial
from hashlib import sha256
from inspect import Parameter, iscoroutinefunction, signature
from threading import Lock
from typing import Any, Final, Literal, ParamSpec, TypeVar, cast

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.utils.function_calling import convert_to_openai_tool
from langgraph.config import get_config
from langgraph.errors import GraphBubbleUp, GraphInterrupt
from langgraph.prebuilt.tool_node import ToolCallRequest
from langgraph.runtime import get_runtime
from langgraph.types import Interrupt

from killick.adapters import langchain_approvals
from killick.adapters.langgraph.serialization import SERDE
from killick.adapters.tool_gate import (
    CallGroup,
    CallTracker,
    Declared,
    Errors,
    Stopped,
    ToolFailed,
    ToolOptions,
    Waiting,
    answering,
    edit_note,
    hosted,
)
from killick.client.client import AnyClient
from killick.client.external_runs import ExternalSession
from killick.contracts.contract import Contract
from killick.definitions.current import in_agent
from killick.definitions.open_tools import open_tool
from killick.definitions.tools import AnyTool
from killick.engine.control import inbox
from killick.engine.steps.intention import ERROR, is_error
from killick.engine.views import Wait
from killick.errors import AnswerRefused, DeclarationRefused, KillickError, Rejected, RunWaiting, Skipped, StepFailed
from killick.history.run_info import waits_of
from killick.llm.external import Host, attempt, here
from killick.llm.toolset import driven, settled
from killick.lru import Lru
from killick.model.facts import Step
from killick.model.state import State

P = ParamSpec("P")
R = TypeVar("R")

TASKS_MAX: Final = 1_024
"""The number of recent tasks whose calls are remembered."""

_TASK: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_GATE: Final = "langgraph"
"""The author of skips in a conversation that continued. After time travel, such a call is a new one."""
_RESUME_MAP: Final = "__pregel_resume_map"
_SCRATCHPAD: Final = "__pregel_scratchpad"
_BUBBLES: Final = (GraphBubbleUp,)
_BY_NAME: Final = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


class Gate:
    """Routes LangGraph tools through Killick's gate: `ToolNode(tools, wrap_tool_call=gate.wrap_tool_call,
    awrap_tool_call=gate.awrap_tool_call)`. For `create_agent` use the middleware `KillickMiddleware`.

        client      records the calls of a thread, as the run `langgraph:THREAD`; not needed inside `kd.host(…)` or
                    `run.hosting()`, which record them
        tools       options by tool name, as for `killick.tool`, e.g. `{"effect": "reads"}`, or a `killick.Tool`. Other
                    tools run at most once
        contract    evaluates the calls, if a client is given
        approvals   what happens to a call that waits for a person. "interrupt" asks in the graph, in the format of
                    LangChain's HumanInTheLoopMiddleware; an answer there or in Killick counts. "raise" raises `Waiting`
        by          the author of answers given by resuming a graph
        errors      what an error of a tool that runs at most once becomes. "ask": a question to a person, because
                    LangGraph would repeat the call with its node. "answer": its answer, which the model reads
    """

    def __init__(
        self, client: AnyClient | None = None, *, tools: ToolOptions | None = None,
        contract: Contract | str | os.PathLike[str] | None = None,
        approvals: Literal["interrupt", "raise"] = "interrupt", by: str | None = None, errors: Errors = "ask",
    ) -> None:  # fmt: skip
        self._client = client
        self._tools = Declared(tools)
        self._contract = contract
        self._interrupts = approvals == "interrupt" and client is not None
        self._by = by
        self._errors: Errors = errors
        self._tasks: Lru[int, tuple[Any, Counter[str]]] = Lru(TASKS_MAX)
        self._at_work: defaultdict[int, CallGroup] = defaultdict(partial(CallGroup, GraphInterrupt))
        self._mutex = Lock()

    # tools of a ToolNode ----------------------------------------------------------------------

    def wrap_tool_call(self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Any]) -> Any:
        """Wraps each tool of a `ToolNode`."""
        if request.tool is None:
            return handler(request)  # it says to the model that there is no such tool

        def fn(**arguments: Any) -> Any:
            return _recorded(handler(_with(request, arguments)), edit_note(request.tool_call["args"], arguments))

        try:
            call = self._called(request)
            return _restored(self.call(call, self._answering(call, fn)), request)
        except Rejected as no:
            return _refused(no, request)

    async def awrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Awaitable[Any]]
    ) -> Any:
        """The same for an async graph."""
        if request.tool is None:
            return await handler(request)

        async def fn(**arguments: Any) -> Any:
            return _recorded(await handler(_with(request, arguments)), edit_note(request.tool_call["args"], arguments))

        task = id(request.runtime.execution_info)
        try:
            async with self._at_work[task]:
                call = await asyncio.to_thread(self._called, request)
                return _restored(await self.call_soon(call, self._answering(call, fn)), request)
        except Rejected as no:
            return _refused(no, request)
        finally:
            self._at_work.pop(task, None)

    def retire(self, messages: Sequence[Any], config: RunnableConfig) -> None:
        """Skips calls of earlier messages that wait for an approval, where a person's message came in their place."""
        thread = (config.get("configurable") or {}).get("thread_id")
        if self._client is None or thread is None or here() is not None or not _is_turn(messages):
            return
        run = f"langgraph:{thread}"
        if self._client.runtime.store.index(run) is None:
            return
        asked = tuple(f"{message.id}:" for message in messages if isinstance(message, AIMessage))
        for key, wait in _waits(self._client, run).items():
            if wait.waits_for == "answer" and key.startswith(asked):
                with suppress(AnswerRefused):  # it was ended since
                    reason = "the conversation continued without it"
                    self._client.as_sync().edit.skip(run, wait.step, by=_GATE, because=reason)

    def _answering(self, call: Call, fn: Callable[..., Any]) -> Callable[..., Any]:
        return answering(cast("AnyTool", call.tool), fn, self._errors, _BUBBLES)

    def _called(self, request: ToolCallRequest) -> Call:
        tool, call = request.tool, request.tool_call
        assert tool is not None
        schema = convert_to_openai_tool(tool)["function"].get("parameters")
        declared = self._tools.of(call["name"], schema=schema, doc=tool.description)
        message, config = _asked_by(request), request.runtime.config
        if message in (said := _messages(request.state)):
            self.retire(said[: said.index(message)], config)
        key = call["id"] or call["name"]
        with _or_stopped():
            host = self.host_of(config)
        made = Call(declared, dict(call["args"]), f"{message.id}:{key}" if message and message.id else key, host)
        if message is not None and not _is_sent(config):
            made.together = [f"{message.id}:{each['id'] or each['name']}" for each in message.tool_calls]
        return made

    # functions of nodes -----------------------------------------------------------------------

    def step(self, fn: Callable[P, R] | None = None, **options: Any) -> Any:
        """A function for nodes to call: `@gate.step`, or `@gate.step(effect="idempotent", …)` with the options of
        `killick.tool`. A re-executed node gets its recorded result; a graph that moves on calls it anew."""
        if fn is None:
            return partial(self.step, **options)
        name = options.pop("name", None) or getattr(fn, "__name__", "step")
        tool, takes = open_tool(name, fn, **options), signature(fn)
        if any(each.kind not in _BY_NAME for each in takes.parameters.values()):
            raise DeclarationRefused(name, "a step takes each argument by its name; remove * and / from its parameters")

        def called(args: Any, kwargs: Any) -> Call:
            bound = takes.bind(*args, **kwargs)
            bound.apply_defaults()
            arguments = dict(bound.arguments)
            try:
                config, info = get_config(), get_runtime().execution_info
            except RuntimeError:
                raise DeclarationRefused(name, "is a step of a graph; call it from a node") from None
            key = f"{place_of(config)}:{self._nth(info, name, arguments)}"
            return Call(tool, arguments, key, self.host_of(config))

        @functools.wraps(fn)
        def blocking(*args: P.args, **kwargs: P.kwargs) -> Any:
            return self.call(called(args, kwargs), fn)

        @functools.wraps(fn)
        async def awaited(*args: P.args, **kwargs: P.kwargs) -> Any:
            return await self.call_soon(called(args, kwargs), cast("Callable[..., Awaitable[Any]]", fn))

        return awaited if iscoroutinefunction(fn) else blocking

    def _nth(self, info: Any, name: str, arguments: Mapping[str, Any]) -> str:
        """Returns the key of a call from a node's code: name, arguments, and ordinal in this task."""
        named = f"{name}{sorted(arguments.items())!r}"
        with self._mutex:
            _, counted = task = self._tasks.get(id(info)) or (info, Counter())
            self._tasks.put(id(info), task)
            counted[named] += 1
            return f"{name}:{short(named)}#{counted[named]}"

    # calling ----------------------------------------------------------------------------------

    def host_of(self, config: RunnableConfig) -> ExternalSession | nullcontext[Host]:
        """Returns the recording host: the current one, or the thread's run."""
        if self._client is None or here() is not None:
            return nullcontext(hosted(None, "the gate for LangGraph's tools"))
        thread = (config.get("configurable") or {}).get("thread_id")
        if thread is None:
            reason = "there is no thread; compile the graph with a checkpointer and give a thread_id"
            raise DeclarationRefused("the gate for LangGraph's tools", reason)
        return self._client.host(f"langgraph:{thread}", agent="langgraph", contract=self._contract)

    def call(self, call: Call, fn: Callable[..., Any]) -> Any:
        """Makes a call, or returns its recorded result."""
        return driven(self._made(call, fn, blocking=True))

    async def call_soon(self, call: Call, fn: Callable[..., Awaitable[Any]]) -> Any:
        """The same, awaited."""
        return await self._made(call, fn, blocking=False)

    async def _made(self, call: Call, fn: Callable[..., Any], *, blocking: bool) -> Any:
        async with AsyncExitStack() as stack:
            with _or_stopped():
                host = stack.enter_context(call.host) if blocking else await stack.enter_async_context(call.host)
            model, tool = (host.model_sync, host.call_sync) if blocking else (host.model, host.call)
            while True:
                ran = CallTracker(call.who, fn)
                try:
                    if call.tool is None:
                        return await settled(model(ran.fn, key=call.key, **call.arguments))
                    return await settled(tool(call.tool, call.arguments, key=call.key, fn=ran.fn, bubbles=_BUBBLES))
                except RunWaiting as waiting:
                    self._answered(waiting, call)  # the same attempt continues
                except KillickError as error:
                    _raise_if_final(error, ran)
                    call.retry()

    def _answered(self, waiting: RunWaiting, call: Call) -> None:
        """Passes on the answer that the graph was resumed with; interrupts the graph if there is none."""
        if not self._interrupts or self._client is None:
            raise Waiting(waiting) from waiting
        wait = _waits(self._client, waiting.run).get(call.key)
        if wait is None or not wait.verbs:
            raise Waiting(waiting) from waiting
        response, via = self._resumed_with(wait, call)
        if response is None:
            raise _Asked(partial(self._questions, wait, call))
        with _or_stopped():
            langchain_approvals.answer(self._client, [wait], response, by=self._by, via=via)
        call.answered.add(_question_id(wait))

    def _resumed_with(self, wait: Wait, call: Call) -> tuple[Any, str | None]:
        """Returns the answer to a wait, and an id for an answer that names no question.

        LangGraph delivers such an answer again with `invoke(None)`, and to any interrupt. So it is used once in a task,
        and only if no unfinished call of the task could have asked for it.
        """
        conf, asked = get_config()["configurable"], _question_id(wait)
        if asked in call.answered:  # it needs another approver
            return None, None
        named, pad = (conf.get(_RESUME_MAP) or {}).get(asked), conf.get(_SCRATCHPAD)
        if named is not None or pad is None or (given := pad.get_null_resume(False)) is None:
            return named, None
        assert self._client is not None
        log = self._client.runtime.log
        task = str((get_config().get("metadata") or {}).get("langgraph_checkpoint_ns", "")).partition("|")[0]
        via = f"{task}:{short(repr(given))}"
        answers = [each for each in log.store.messages(wait.run) if each.name in (inbox.ANSWER, inbox.VOTE)]
        if via in {inbox.body_of(log, each).get("via") for each in answers}:
            return None, None
        if len(call.together) > 1:
            state = log.state(wait.run)
            ended = {_key_of(state, step) for step in state.fold.steps if step.ended}
            if any(key != call.first_key and key not in ended for key in call.together):
                return None, None
        return pad.get_null_resume(True), via

    def _questions(self, wait: Wait, call: Call) -> tuple[Interrupt, ...]:
        """Returns the open questions of a call's task, in the order of its calls."""
        assert self._client is not None
        waits = _waits(self._client, wait.run)
        found = [waits[key] for first in call.together for key in waits if key.partition("#")[0] == first]
        return tuple(
            Interrupt(value=langchain_approvals.hitl_request([each]), id=_question_id(each))
            for each in found or [wait]
            if each.verbs
        )


class _Asked(GraphInterrupt):
    """Interrupts a graph with questions. They are read when LangGraph saves them: after all calls of the task."""

    def __init__(self, read: Callable[[], tuple[Interrupt, ...]]) -> None:
        super().__init__(())
        self._read = read

    @property
    def args(self) -> tuple[Any, ...]:  # type: ignore[override]
        """The questions, as LangGraph reads them."""
        return (self._read(),)


class Call:
    """One call: its tool or model, its arguments, its key and its host."""

    def __init__(
        self, tool: AnyTool | None, arguments: dict[str, Any], key: str, host: ExternalSession | nullcontext[Host],
        who: str = "model",
    ) -> None:  # fmt: skip
        self.tool = tool
        self.who = who if tool is None else tool.name
        self.arguments = arguments
        self.host = host
        self.first_key = self.key = key
        """The key of the first attempt, and of the current one."""
        self.together = [key]
        """The first keys of the calls that its task makes at the same time."""
        self.answered: set[str] = set()
        """The ids of its answered questions."""
        self._nth = 1

    def retry(self) -> None:
        """Begins another attempt: a recorded failure is not final, because re-running the graph is a retry."""
        self._nth += 1
        self.key = f"{self.first_key}#{self._nth}"


@contextmanager
def _or_stopped() -> Generator[None]:
    """Errors here are not for a model to read."""
    try:
        yield
    except KillickError as error:
        raise Stopped(str(error)) from error


def _raise_if_final(error: KillickError, ran: CallTracker) -> None:
    """Raises an error of the gate, unless it is the recorded failure of an earlier attempt."""
    if isinstance(error, Rejected):
        raise error
    if not isinstance(error, StepFailed):
        raise Stopped(str(error)) from error
    if ran.was_called and isinstance(error.__cause__, Exception):
        raise error.__cause__
    if ran.was_called or in_agent() or (isinstance(error, Skipped) and error.by != _GATE):
        raise ToolFailed(str(error.failure)) from error


def _key_of(state: State, step: Step | None) -> str:
    return "" if step is None else getattr(state.event(step.intended), "guest", None) or ""


def _waits(client: AnyClient, run: str) -> dict[str, Wait]:
    """Returns a run's open waits by the keys of their calls."""
    state = client.runtime.log.state(run)
    return {_key_of(state, state.fold.step(wait.step)): wait for wait in waits_of(client.runtime.store, state)}


def _question_id(wait: Wait) -> str:
    """Returns the id of a wait's interrupt, which names this question alone. It has the format of LangGraph's ids."""
    return sha256(f"{wait.id}@{wait.opened}:{wait.digest}".encode()).hexdigest()[:32]


# requests and responses -----------------------------------------------------------------------------


def _asked_by(request: ToolCallRequest) -> AIMessage | None:
    """Returns the message that requested a call: some models reuse call ids across messages."""
    for message in reversed(_messages(request.state)):
        if isinstance(message, AIMessage) and any(each["id"] == request.tool_call["id"] for each in message.tool_calls):
            return message
    return None


def _is_sent(config: RunnableConfig) -> bool:
    """Returns whether a call has its own task, as in `create_agent`."""
    path = (config.get("metadata") or {}).get("langgraph_path") or ("",)
    return str(path[0]) == "__pregel_push"


def _is_turn(messages: Sequence[Any]) -> bool:
    """Returns whether a person said the last message, and a model an earlier one."""
    return bool(messages) and isinstance(messages[-1], HumanMessage) and any(isinstance(m, AIMessage) for m in messages)


def _messages(state: Any) -> list[Any]:
    if isinstance(state, list):
        return state
    return list((state.get("messages") if isinstance(state, Mapping) else getattr(state, "messages", None)) or ())


def _with(request: ToolCallRequest, arguments: Mapping[str, Any]) -> ToolCallRequest:
    return request.override(tool_call={**request.tool_call, "args": dict(arguments)})


def _recorded(result: Any, note: str) -> Any:
    """Returns a call's result for recording: a message as readable data, anything else as bytes."""
    if note and isinstance(result, ToolMessage):
        content = result.content
        noted = f"{content}\n{note}" if isinstance(content, str) else [*content, {"type": "text", "text": note}]
        result = result.model_copy(update={"content": noted})
    if type(result) is ToolMessage and result.artifact is None:
        fields = result.model_dump(mode="json", exclude={"tool_call_id", "artifact", "type"}, exclude_defaults=True)
        return {"content": result.content, **fields}
    return {"typed": list(SERDE.dumps_typed(result))}


def _restored(recorded: Any, request: ToolCallRequest) -> Any:
    if is_error(recorded):
        return _message(recorded[ERROR], request, status="error")
    if isinstance(recorded, Mapping) and "typed" in recorded:
        name, data = recorded["typed"]
        return SERDE.loads_typed((name, data))
    if isinstance(recorded, Mapping) and "content" in recorded:
        return ToolMessage(**{**recorded, "tool_call_id": request.tool_call["id"]})
    # A person supplied the result.
    return _message(recorded if isinstance(recorded, str) else repr(recorded), request)


def _refused(no: Rejected, request: ToolCallRequest) -> ToolMessage:
    """Returns a rejection for the model; or a person's answer in place of the tool."""
    if no.response is not None:
        return _message(str(no.response), request)
    return _message(str(no), request, status="error")


def _message(content: str, request: ToolCallRequest, status: Literal["success", "error"] = "success") -> ToolMessage:
    call = request.tool_call
    return ToolMessage(content, name=call["name"], tool_call_id=call["id"] or "", status=status)


def place_of(config: RunnableConfig) -> str:
    """Returns the code's position in its graph, stable across re-executions, even if nothing was saved.

    A task's id is more specific, but depends on the last checkpoint. So a graph in a recorded tool is named after the
    tool's step; in another nested graph there is nothing else.
    """
    metadata = config.get("metadata") or {}
    outer, _, node = str(metadata.get("langgraph_checkpoint_ns", "")).rpartition("|")
    if (step := attempt()) is not None:
        outer = f"{step.key}{_TASK.sub('', outer)}"
    path = _TASK.sub("", str(metadata.get("langgraph_path", "")))
    return f"{outer}|{node.partition(':')[0]}:{metadata.get('langgraph_step')}:{short(path)}"


def short(text: str) -> str:
    """Returns a short digest of a text."""
    return sha256(text.encode()).hexdigest()[:12]
