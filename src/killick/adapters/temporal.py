"""Runs on Temporal: it owns scheduling, timers, signals and failover. Killick's log owns the state.

Each run has one workflow (`temporal_workflow`). Its activities are here: they create the run, take its turns and carry
out its commands.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any, Final

from temporalio import activity
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest, ListSearchAttributesRequest
from temporalio.api.workflowservice.v1 import SignalWorkflowExecutionRequest
from temporalio.client import Client as TemporalClient
from temporalio.client import WorkflowHandle
from temporalio.common import Priority, WorkflowIDConflictPolicy
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory
from temporalio.service import RPCError, RPCStatusCode
from temporalio.worker import Worker

from killick.adapters import temporal_workflow as flow
from killick.adapters.engines import commands
from killick.adapters.engines.serving import Engine
from killick.adapters.engines.turns import SLICE_SECONDS, ToolQueues, Turn, TurnOutcome, name_of
from killick.adapters.temporal_workflow import EngineSettings, RunWorkflow
from killick.client.client import AnyClient
from killick.definitions.agents import AnyAgent
from killick.engine.leases import LEASE_SECONDS
from killick.errors import RunBusy, RunUnknown
from killick.logger import get_logger
from killick.store.records import RunRow

logger: Final = get_logger("killick.adapters")

_LEAVE_SECONDS: Final = 0.5
_BUSY_SECONDS: Final = (0.1, 2.0)
"""The first and the maximum retry interval of a turn whose run is held."""

_STICKY: Final = timedelta(seconds=1)
"""The sticky timeout: a workflow's history is short, and another worker reads it quickly."""


class Temporal(Engine):
    """Killick's runs on a Temporal server. In an `async with` block it serves them; without one it only starts them.

    task_queue          the queue of turns. Every worker of a queue must have the same agents
    tool_queues         by tool, the queue of the workers that alone can run it; the same for all workers
    agents              the agents whose runs are Temporal's, by name; default: all declared in this process
    concurrency         the maximum number of concurrent runs of a worker
    heartbeat_seconds   how long a worker may be silent before Temporal reassigns its turns
    lease_seconds       how long a frozen worker keeps a run before another may take it
    slice_seconds       how long a run continues before it returns to the queue at its next step
    duties              whether this process also runs triggers and hooks, as a Killick worker does
    search_attributes   whether workflows have Killick's; default: if they can be added to the namespace
    options             other options of Temporal's `Worker`: `build_id`, `interceptors` …
    """

    workflows: Sequence[type] = (RunWorkflow,)

    def __init__(
        self, client: AnyClient, temporal: TemporalClient, *, task_queue: str = "killick",
        tool_queues: Mapping[str, str] | None = None, agents: Collection[str] | None = None, concurrency: int = 10,
        heartbeat_seconds: float = 10.0, lease_seconds: float = LEASE_SECONDS, slice_seconds: float = SLICE_SECONDS,
        duties: bool = True, search_attributes: bool | None = None, **options: Any,
    ) -> None:  # fmt: skip
        # A worker of a tool's queue starts no workflows: they would be on its queue.
        is_of_tool = agents is None and task_queue in (tool_queues or {}).values()
        super().__init__(client, () if is_of_tool else agents, duties=duties)
        self._temporal = temporal
        self._queue = task_queue
        self._queues = ToolQueues(task_queue, tool_queues) if tool_queues else None
        self._concurrency = concurrency
        self._heartbeat_seconds = heartbeat_seconds
        self._is_searchable = search_attributes
        self._lease_seconds = lease_seconds
        self._slice_seconds = slice_seconds
        self._options = options

    @property
    def activities(self) -> Sequence[Callable[..., Any]]:
        """The activities of a custom worker, besides `workflows`; then use `waking()`."""
        return (self._create_run, self._advance, self._command)

    async def _open(self, serving: AsyncExitStack) -> None:
        worker = Worker(
            self._temporal,
            task_queue=self._queue,
            workflows=self.workflows,
            activities=self.activities,
            max_concurrent_activities=self._concurrency,
            **{"sticky_queue_schedule_to_start_timeout": _STICKY, **self._options},
        )
        await serving.enter_async_context(worker)

    # starting ---------------------------------------------------------------------------------

    async def start(self, agent: AnyAgent, input: Any = None, *, id: str | None = None, **options: Any) -> Any:  # noqa: A002
        """Creates a run, as `kd.start` does, and its workflow; returns the workflow's handle.

        `kd.start` alone suffices, from any process with the store: a serving process notices it. So does starting a
        workflow, from any language: its type is the agent's name, its id becomes the run's, its argument is the input.
        """
        handle = await self._client.start(agent, input, id=id, **options)
        return await self.workflow_of(handle.id)

    async def workflow_of(self, run: str) -> WorkflowHandle[Any, Any]:
        """Returns a run's workflow, started if absent."""
        row = self._client.runtime.store.index(run)
        if row is None:
            raise RunUnknown(run)
        return await self._started(row)

    async def wake(self, row: RunRow, reason: str) -> None:
        """Signals a run's workflow. A repeated reason does nothing."""
        if row.status == "queued":
            await self._started(row)
            return
        signal = SignalWorkflowExecutionRequest(
            namespace=self._temporal.namespace,
            workflow_execution=WorkflowExecution(workflow_id=name_of(row)),
            signal_name=flow.WAKE,
            identity=self._temporal.identity,
            request_id=reason,
        )
        try:
            await self._temporal.workflow_service.signal_workflow_execution(signal)
        except RPCError as error:
            if error.status != RPCStatusCode.NOT_FOUND:
                raise
            await self._started(row)

    async def _started(self, row: RunRow) -> WorkflowHandle[Any, Any]:
        return await self._temporal.start_workflow(
            row.agent,
            id=name_of(row),
            task_queue=self._queue,
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
            priority=Priority(priority_key=min(max(3 - row.priority, 1), 5)),
            static_summary=f"{row.agent} {row.run}",
            task_timeout=timedelta(seconds=self._heartbeat_seconds),
        )

    async def _can_search(self) -> bool:
        """Whether the namespace has Killick's search attributes; adds those that it lacks."""
        if self._is_searchable is None:
            service, namespace = self._temporal.operator_service, self._temporal.namespace
            try:
                found = await service.list_search_attributes(ListSearchAttributesRequest(namespace=namespace))
                wanted: dict[str, Any] = {key.name: key.indexed_value_type for key in flow.SEARCH}
                if missing := {name: kind for name, kind in wanted.items() if name not in found.custom_attributes}:
                    made = AddSearchAttributesRequest(namespace=namespace, search_attributes=missing)
                    await service.add_search_attributes(made)
                self._is_searchable = True
            except RPCError as error:
                logger.warning("no search attributes: they could not be added namespace=%s error=%s", namespace, error)
                self._is_searchable = False
        return self._is_searchable

    # activities -------------------------------------------------------------------------------

    @activity.defn(name=flow.CREATE)
    async def _create_run(self, agent: str, run: str, input: Any) -> EngineSettings:  # noqa: A002
        """Creates the run of a workflow that was started elsewhere. Another worker may know an unknown agent."""
        await self._create(agent, run, input)
        return EngineSettings(self._heartbeat_seconds, await self._can_search())

    @activity.defn(name=flow.COMMAND)
    async def _command(self, run: str, command: str, given: dict[str, Any], request: str) -> None:
        """Carries out a command for a run."""
        await self._obey(run, command, given, request)

    @activity.defn(name=flow.ADVANCE)
    async def _advance(self, run: str) -> TurnOutcome:
        """One turn. A worker that stops, or lost its heartbeat, finishes the current step, and no more."""
        try:
            with commands.final(self._error):
                turn = Turn(
                    self._client, run, lease_seconds=self._lease_seconds, slice_seconds=self._slice_seconds,
                    queues=self._queues,
                )  # fmt: skip
                return await self._alive(turn)
        except RunBusy as busy:
            # Its holder finishes a step, or is dead and will be detected.
            least, most = _BUSY_SECONDS
            seconds = min(least * 2 ** min(activity.info().attempt - 1, 10), most)
            again = timedelta(seconds=seconds)
            benign = ApplicationErrorCategory.BENIGN
            raise ApplicationError(str(busy), type="RunBusy", next_retry_delay=again, category=benign) from None

    async def _alive(self, turn: Turn) -> TurnOutcome:
        loop = asyncio.get_running_loop()
        work = loop.create_task(turn.take())
        stopping = loop.create_task(activity.wait_for_worker_shutdown())
        beat = self._heartbeat_seconds / 3
        try:
            while not work.done():
                activity.heartbeat()
                if stopping.done():
                    turn.leave()
                    await asyncio.wait({work}, timeout=min(_LEAVE_SECONDS, beat))
                else:
                    await asyncio.wait({work, stopping}, timeout=beat, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            while not work.done():
                turn.leave()
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait({work}, timeout=_LEAVE_SECONDS)
        finally:
            stopping.cancel()
        return work.result()

    def _error(self, refused: Exception) -> Exception:
        return ApplicationError(str(refused), type=type(refused).__name__, non_retryable=True)
