"""Workflows of LlamaIndex that survive their process: the context of a run is stored before its steps start."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any, Final, TypeAlias, cast

from llama_index.core.llms import ChatMessage
from llama_index.core.memory import BaseMemory, ChatMemoryBuffer
from workflows import Context, Workflow
from workflows.context.context_types import SerializedContext
from workflows.context.serializers import BaseSerializer
from workflows.context.state_store import InMemoryStateStore, StateStore
from workflows.events import Event, HumanResponseEvent, InputRequiredEvent, StartEvent, StopEvent
from workflows.plugins.basic import AsyncioAdapterQueues, BasicRuntime, InternalAsyncioAdapter, get_current_run_id
from workflows.runtime.control_loop import rebuild_state_from_ticks
from workflows.runtime.types.internal_state import BrokerState
from workflows.runtime.types.plugin import InternalRunAdapter, RegisteredWorkflow, WaitForNextTaskResult
from workflows.runtime.types.results import StepWorkerState
from workflows.runtime.types.ticks import TickAddEvent, TickCancelRun, WorkflowTick

from killick.adapters import tool_gate
from killick.adapters.framework_state import FrameworkState, Place, StateEntry, StateOwner
from killick.errors import KillickError
from killick.llm.external import SCOPE, CallScope, attempt, here

SPACE: Final = "llamaindex"
"""The default name prefix of this adapter's logs in a store."""

CLOSE_SECONDS: Final = 5.0
"""How long a run that ends lets its calls end, before it cancels them."""

Respond: TypeAlias = Callable[[InputRequiredEvent, Any], HumanResponseEvent]
"""The response of a workflow's user to a question."""

_RUN: Final = "run"
_MEMORY: Final = "memory"


class KillickRuntime(StateOwner, BasicRuntime):  # type: ignore[misc,unused-ignore]
    """A runtime of workflows. `workflow.run(run_id=…)` continues that run where it was, in any process, and returns the
    recorded result of a run that has ended. Its calls are steps of the current host's run, or else of the run of that
    id.

    Give it to a workflow as `runtime=`, or make workflows and agents inside `with runtime.registering()`.

    respond   makes a workflow's response from a question and the value of a person's answer. With it, each
              `InputRequiredEvent` is a question in the inbox: the run raises killick.RunWaiting, and continues once
              it is answered. Without it, your code answers them from the stream of events
    """

    def __init__(self, store: Place, *, space: str = SPACE, respond: Respond | None = None) -> None:
        super().__init__()
        self.respond = respond
        self._shelf = FrameworkState(store, space)
        self._open: dict[str, _OpenRun] = {}

    async def context(self, workflow: Workflow, run_id: str) -> Context | None:
        """Returns the last stored context of a run, for another run of the workflow. It has no memory of an agent."""
        kept = await asyncio.to_thread(self._shelf.get, run_id, _RUN)
        return None if kept is None else Context.from_dict(workflow, kept.value["context"])

    async def messages(self, run_id: str) -> list[ChatMessage]:
        """Returns the messages in the memory of an agent after a run: the `chat_history` of the next one."""
        kept = await asyncio.to_thread(self._shelf.get, run_id, _RUN)
        return [] if kept is None else list(map(ChatMessage.model_validate, kept.value["messages"]))

    async def forget(self, run_id: str) -> None:
        """Removes the contexts of a run with their history. Its recorded calls stay."""
        await asyncio.to_thread(self._shelf.forget, run_id)

    def register(self, workflow: Workflow) -> RegisteredWorkflow:
        """Returns the functions of a workflow: each step in a scope of its own, and the run from its stored context."""
        known = super().register(workflow)
        steps: Any = {name: partial(_scoped, step) for name, step in known.steps.items()}
        return RegisteredWorkflow(workflow, partial(self._run, workflow, known.workflow_run_fn), steps)

    def get_internal_adapter(self, workflow: Workflow) -> InternalRunAdapter:
        """Returns the adapter of the current run."""
        return self._open.get(get_current_run_id() or "") or super().get_internal_adapter(workflow)

    async def _run(self, workflow: Workflow, begin: Any, init_state: BrokerState, *given: Any) -> StopEvent:
        run_id, within = get_current_run_id() or "", SCOPE.get()
        name = run_id if within is None else within.named(workflow.workflow_name)
        queues = self._queues[run_id]
        _OPEN.set(opened := _OpenRun(self, workflow, queues, name))
        if attempt() is not None:  # in a tool, whose step has the result and numbers the calls
            return cast("StopEvent", await begin(init_state, *given))
        self._open[run_id] = opened
        try:
            async with AsyncExitStack() as stack:
                agent = getattr(workflow, "name", type(workflow).__name__)
                if here() is None:
                    await stack.enter_async_context(self._shelf.client.host(name, agent=agent))
                if within is None:
                    stack.enter_context(tool_gate.raising_stop(tool_gate.hosted(None, "KillickRuntime")))
                return await opened.run(begin, init_state, *given)
        except Exception:
            queues.publish_queue.put_nowait(StopEvent())  # or a reader of the events would wait
            raise
        finally:
            del self._open[run_id]
            self._queues.pop(run_id, None)  # the same may run again


class _OpenRun(InternalAsyncioAdapter):
    """A run in this process. Stores its context when all events so far are processed, before the next steps start."""

    def __init__(self, runtime: KillickRuntime, workflow: Workflow, queues: AsyncioAdapterQueues, name: str) -> None:
        super().__init__(queues)
        self._workflow = workflow
        self._shelf = runtime._shelf
        self.name = name
        self.calls = tool_gate.CallGroup(Exception)
        self._serializer = _Serializer(queues.serializer or runtime.get_serializer(workflow))
        self._items = set[str | None]()
        self._changed = asyncio.Event()
        self._questions = _Questions(self, runtime.respond)

    async def run(self, begin: Any, init_state: BrokerState, start: StartEvent | None, *given: Any) -> StopEvent:
        """Runs the workflow from its stored context, or returns the stored result."""
        if (kept := await asyncio.to_thread(self._kept)) is not None:
            init_state, start = await self._restored(kept, start), None
            if kept["result"] is not None:
                value = self._serializer.deserialize(kept["result"])
                ended = value if isinstance(value, StopEvent) else StopEvent(result=value)
                self._queues.publish_queue.put_nowait(ended)
                return ended
        self._questions.open(kept["questions"] if kept is not None else None, self._serializer)
        ended = await begin(init_state, start, *given)
        await self._store(self._serializer.serialize(ended.result if type(ended) is StopEvent else ended))
        return cast("StopEvent", ended)

    async def _restored(self, kept: Any, start: StartEvent | None) -> BrokerState:
        context = SerializedContext.from_dict_auto(kept["context"], self._serializer)
        self._queues.init_state = BrokerState.from_serialized(context, self._workflow, self._serializer)
        self._queues.state_store = store = InMemoryStateStore[Any].from_dict(context.state, self._serializer)
        memory = start.get(_MEMORY, default=None) if start is not None else None
        if kept["messages"]:
            memory = memory or ChatMemoryBuffer.from_defaults(token_limit=kept["token_limit"])
            await memory.aset(list(map(ChatMessage.model_validate, kept["messages"])))
        if memory is not None:
            await store.set(_MEMORY, memory)
        return self._queues.init_state

    def _kept(self) -> Any:
        kept = self._shelf.get(self.name, _RUN)
        return None if kept is None else kept.value

    async def wait_for_next_task(self, *given: Any, **named: Any) -> WaitForNextTaskResult:
        """Stores the context first, if anything happened."""
        if self._queues.ticks:
            await self._store(None)
        return await super().wait_for_next_task(*given, **named)

    async def close(self) -> None:
        """Lets calls end, before the workflow cancels its steps: a call that was cancelled is in doubt."""
        self._questions.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(self.calls.rested(), CLOSE_SECONDS)

    async def write_to_event_stream(self, event: Event) -> None:
        """Passes an event on. A question is asked in the inbox too."""
        self._questions.ask(event, self._serializer)
        await super().write_to_event_stream(event)

    async def on_tick(self, tick: WorkflowTick) -> None:
        """Notes what was processed."""
        self._questions.note(tick)
        await super().on_tick(tick)

    async def stored(self, item: str | None) -> None:
        """Waits until the stored context has a step's work in progress, or a call was stopped."""
        while item not in self._items and not _is_stopped():
            await self._changed.wait()

    async def _store(self, result: str | None) -> None:
        state = rebuild_state_from_ticks(self.init_state, self.replay(), run_id=self.run_id)
        self._queues.init_state = state
        self._queues.ticks.clear()
        work = [each for worker in state.workers.values() for each in worker.in_progress]
        # A step that runs again sends its events again: what it sent before must not be stored yet.
        if not _is_stopped() and not any(each.received for each in work):
            context = state.to_serialized(self._serializer)
            store = cast("StateStore[Any]", self.get_state_store())
            context.state = store.to_dict(self._serializer)
            memory = await store.get(_MEMORY, default=None)
            has_memory = isinstance(memory, BaseMemory)
            messages = [each.model_dump(mode="json") for each in await memory.aget_all()] if has_memory else []
            kept = {"context": context.model_dump(mode="python"), "result": result, "messages": messages}
            kept |= {"token_limit": getattr(memory, "token_limit", None), "questions": self._questions.kept()}
            await asyncio.to_thread(self._shelf.put, self.name, StateEntry(_RUN, kept))
            self._items = {each.work_item_id for each in work}
        self._changed.set()
        self._changed = asyncio.Event()


def _is_stopped() -> bool:
    """Whether a call was stopped: then the run continues from before it."""
    try:
        tool_gate.unstopped(None, "KillickRuntime")
    except KillickError:
        return True
    return False


class _StepScope(CallScope):
    """The calls of a workflow's step. The nth of a name is the same call when the step runs again, in any process."""

    def __init__(self, opened: _OpenRun, item: str | None) -> None:
        super().__init__(f"{opened.name}/{item}/")
        self.opened = opened
        self.item = item


async def _scoped(step: Any, *, state: StepWorkerState, **given: Any) -> Any:
    token = SCOPE.set(_StepScope(_OPEN.get(), state.work_item_id))
    try:
        return await step(state=state, **given)
    finally:
        SCOPE.reset(token)


@asynccontextmanager
async def call_in_step() -> AsyncGenerator[None]:
    """Delays a call in a workflow's step until the step is stored: else its work may have another number next time."""
    scope = SCOPE.get()
    if not isinstance(scope, _StepScope) or attempt() is not None:
        yield
        return
    await scope.opened.stored(scope.item)
    tool_gate.unstopped(None, "KillickRuntime")
    async with scope.opened.calls:
        yield


_OPEN: Final[ContextVar[_OpenRun]] = ContextVar("killick_llamaindex_run")


class _Questions:
    """The questions of a run that wait for a person, by their keys in the host. They are stored with the run."""

    def __init__(self, opened: _OpenRun, respond: Respond | None) -> None:
        self._opened = opened
        self._respond = respond
        self._count = 0
        self._written: dict[str, str] = {}
        self._responses: dict[str, HumanResponseEvent] = {}
        self._asking = set[asyncio.Task[None]]()

    def kept(self) -> dict[str, Any]:
        return {"count": self._count, "open": dict(self._written)}

    def open(self, kept: Mapping[str, Any] | None, serializer: BaseSerializer) -> None:
        """Asks the open questions of a stored run again."""
        self._context = copy_context()
        if kept is not None and self._respond is not None:
            self._count, self._written = kept["count"], dict(kept["open"])
            for key, written in self._written.items():
                self._put(key, serializer.deserialize(written))

    def ask(self, event: Event, serializer: BaseSerializer) -> None:
        """Asks a question, unless the same is open: a step that runs again asks again."""
        if self._respond is None or not isinstance(event, InputRequiredEvent):
            return
        if (written := serializer.serialize(event)) not in self._written.values():
            self._count += 1
            self._written[key := f"{self._opened.name}/question#{self._count}"] = written
            self._put(key, event)

    def note(self, tick: WorkflowTick) -> None:
        """Closes a question whose response was processed."""
        for key, response in list(self._responses.items()):
            if isinstance(tick, TickAddEvent) and tick.event is response:
                del self._responses[key], self._written[key]

    def close(self) -> None:
        for task in self._asking:
            task.cancel()

    def _put(self, key: str, event: InputRequiredEvent) -> None:
        self._asking.add(asyncio.get_running_loop().create_task(self._answered(key, event), context=self._context))

    async def _answered(self, key: str, event: InputRequiredEvent) -> None:
        host, prompt = tool_gate.hosted(None, "KillickRuntime"), event.get("prefix", default=None)
        try:
            answer = await host.ask(str(prompt or event.model_dump_json()), key=key)
        except KillickError as error:
            tool_gate.stop(host, error)
            await self._opened.send_event(TickCancelRun())
            return
        self._responses[key] = response = cast("Respond", self._respond)(event, answer.value)
        await self._opened.send_event(TickAddEvent(event=response))


class _Serializer(BaseSerializer):
    """A workflow's serializer, for all but memories: their own form loses messages, or cannot be written."""

    def __init__(self, inner: BaseSerializer) -> None:
        self._inner = inner

    @contextmanager
    def validation_context(self) -> Iterator[None]:
        with self._inner.validation_context():
            yield

    def serialize(self, value: Any) -> str:
        return "null" if isinstance(value, BaseMemory) else self._inner.serialize(value)

    def deserialize(self, value: str) -> Any:
        return self._inner.deserialize(value)
