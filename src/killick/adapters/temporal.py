"""Runs on Temporal: it owns scheduling, timers, signals and failover. Killick's log owns the state.

Each run has one workflow, which knows only its id and its outcome: a turn of the run is an activity, a wait is a
Temporal timer, and an outside event is a signal without content. So a workflow's history grows with the number of
waits, not with the data.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Final

from temporalio import activity, workflow
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.workflowservice.v1 import SignalWorkflowExecutionRequest
from temporalio.client import Client as TemporalClient
from temporalio.client import WorkflowHandle
from temporalio.common import Priority, RetryPolicy, WorkflowIDConflictPolicy
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory
from temporalio.service import RPCError, RPCStatusCode
from temporalio.worker import Worker

from killick.adapters.engine_turns import SLICE_SECONDS, Turn, TurnOutcome, name_of
from killick.adapters.engine_wakeups import RunWaker
from killick.client.client import AnyClient
from killick.definitions.agents import AnyAgent
from killick.engine.leases import LEASE_SECONDS
from killick.errors import AnswerRefused, RunBusy, RunUnknown
from killick.store.records import RunRow

ADVANCE: Final = "killick.advance"
CANCEL: Final = "killick.cancel"
WAKE: Final = "wake"

_LONGEST: Final = timedelta(days=365)
"""The maximum length of a turn. A lost one is detected by its missing heartbeat, long before."""

_AGAIN: Final = RetryPolicy(initial_interval=timedelta(seconds=1), maximum_interval=timedelta(seconds=60))
_LEAVE_SECONDS: Final = 0.5
_BUSY_SECONDS: Final = (0.1, 2.0)
"""The first and the maximum retry interval of a turn whose run is held."""

_STICKY: Final = timedelta(seconds=1)
"""The sticky timeout: a workflow's history is short, and another worker reads it quickly."""


@dataclass(frozen=True)
class TurnSettings:
    """A workflow's settings for its turns."""

    heartbeat_seconds: float


# the workflow ---------------------------------------------------------------------------------------


# Ours, and deterministic: the sandbox would import all of Killick for each workflow.
@workflow.defn(name="killick.run", sandboxed=False)
class RunWorkflow:
    """A run as Temporal sees it."""

    def __init__(self) -> None:
        self._woken = 0
        self._outcome: TurnOutcome | None = None

    @workflow.run
    async def run(self, run: str, terms: TurnSettings) -> TurnOutcome:
        """Runs until the run has ended. Cancelling the workflow cancels its run, which then ends in its own way."""
        cancelled = False
        work = asyncio.create_task(self._until_ended(run, terms))
        while True:
            try:
                ended = await asyncio.shield(work)
                break
            except asyncio.CancelledError:
                cancelled = True
                await workflow.execute_activity(
                    CANCEL, run, start_to_close_timeout=timedelta(seconds=60), retry_policy=_AGAIN
                )
                self._woken += 1
        if ended.status == "cancelled" and cancelled:
            raise asyncio.CancelledError
        if ended.status != "completed":
            message = f"{ended.run}: {ended.failure or ended.status}"
            raise ApplicationError(message, type=f"Run{ended.status.capitalize()}", non_retryable=True)
        return ended

    @workflow.signal(name=WAKE)
    def wake(self) -> None:
        """Signals an outside event. The run finds it in its inbox."""
        self._woken += 1

    @workflow.query(name="outcome")
    def outcome(self) -> TurnOutcome | None:
        """Returns the run's outcome after its last turn."""
        return self._outcome

    def _is_woken(self, seen: int) -> bool:
        return self._woken != seen

    async def _until_ended(self, run: str, terms: TurnSettings) -> TurnOutcome:
        while True:
            seen = self._woken
            outcome: TurnOutcome = await workflow.execute_activity(
                ADVANCE,
                run,
                result_type=TurnOutcome,
                start_to_close_timeout=_LONGEST,
                heartbeat_timeout=timedelta(seconds=terms.heartbeat_seconds),
                retry_policy=_AGAIN,
            )
            self._outcome = outcome
            if outcome.has_ended:
                return outcome
            if outcome.wait_seconds != 0.0:
                workflow.set_current_details(f"{outcome.run} is {outcome.status}")
                seconds = outcome.wait_seconds
                with contextlib.suppress(TimeoutError):
                    await workflow.wait_condition(
                        partial(self._is_woken, seen), timeout=None if seconds is None else timedelta(seconds=seconds)
                    )
            if workflow.info().is_continue_as_new_suggested():
                workflow.continue_as_new(args=[run, terms])


# the engine -----------------------------------------------------------------------------------------


class Temporal:
    """Killick's runs on a Temporal server. In an `async with` block it serves them; without one it only starts them.

    task_queue          the queue of turns. Every worker of a queue must have the same agents
    agents              the agents whose runs are Temporal's, by name; default: all declared in this process
    concurrency         the maximum number of concurrent runs of a worker
    heartbeat_seconds   how long a worker may be silent before Temporal reassigns its turns
    lease_seconds       how long a frozen worker keeps a run before another may take it
    slice_seconds       how long a run continues before it returns to the queue at its next step
    duties              whether this process also runs triggers and hooks, as a Killick worker does
    options             other options of Temporal's `Worker`: `build_id`, `interceptors` …
    """

    workflows: Sequence[type] = (RunWorkflow,)

    def __init__(
        self, client: AnyClient, temporal: TemporalClient, *, task_queue: str = "killick",
        agents: Collection[str] | None = None, concurrency: int = 10, heartbeat_seconds: float = 10.0,
        lease_seconds: float = LEASE_SECONDS, slice_seconds: float = SLICE_SECONDS, duties: bool = True,
        **options: Any,
    ) -> None:  # fmt: skip
        self._client = client.as_async()
        self._temporal = temporal
        self._queue = task_queue
        self._agents = agents
        self._concurrency = concurrency
        self._terms = TurnSettings(heartbeat_seconds)
        self._lease_seconds = lease_seconds
        self._slice_seconds = slice_seconds
        self._duties = duties
        self._options = options
        self._serving = AsyncExitStack()

    @property
    def activities(self) -> Sequence[Callable[..., Any]]:
        """The activities of a custom worker, besides `workflows`; then use `waking()`."""
        return (self._advance, self._cancel)

    def waking(self) -> RunWaker:
        """Signals workflows about events for their runs, and starts those of new runs: an `async with` block."""
        return RunWaker(self._client, self.wake, agents=self._agents)

    async def __aenter__(self) -> Temporal:
        worker = Worker(
            self._temporal,
            task_queue=self._queue,
            workflows=self.workflows,
            activities=self.activities,
            max_concurrent_activities=self._concurrency,
            **{"sticky_queue_schedule_to_start_timeout": _STICKY, **self._options},
        )
        try:
            if self._duties:
                await self._serving.enter_async_context(self._client.worker(agents=()))
            await self._serving.enter_async_context(worker)
            await self._serving.enter_async_context(self.waking())
        except BaseException:
            await self._serving.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._serving.aclose()

    # starting ---------------------------------------------------------------------------------

    async def start(self, agent: AnyAgent, input: Any = None, *, id: str | None = None, **options: Any) -> Any:  # noqa: A002
        """Creates a run, as `kd.start` does, and its workflow; returns the workflow's handle.

        `kd.start` alone suffices, from anywhere: a serving process notices it.
        """
        handle = await self._client.start(agent, input, id=id, **options)
        return await self.workflow_of(handle.id)

    async def workflow_of(self, run: str) -> WorkflowHandle[Any, TurnOutcome]:
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
            workflow_execution=WorkflowExecution(workflow_id=workflow_id(row)),
            signal_name=WAKE,
            identity=self._temporal.identity,
            request_id=reason,
        )
        try:
            await self._temporal.workflow_service.signal_workflow_execution(signal)
        except RPCError as error:
            if error.status != RPCStatusCode.NOT_FOUND:
                raise
            await self._started(row)

    async def _started(self, row: RunRow) -> WorkflowHandle[Any, TurnOutcome]:
        return await self._temporal.start_workflow(
            RunWorkflow.run,
            args=[name_of(row), self._terms],
            id=workflow_id(row),
            task_queue=self._queue,
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
            priority=Priority(priority_key=min(max(3 - row.priority, 1), 5)),
            static_summary=row.agent,
            task_timeout=timedelta(seconds=self._terms.heartbeat_seconds),
        )

    # activities -------------------------------------------------------------------------------

    @activity.defn(name=ADVANCE)
    async def _advance(self, run: str) -> TurnOutcome:
        """One turn. A worker that stops, or lost its heartbeat, finishes the current step, and no more."""
        try:
            turn = Turn(self._client, run, lease_seconds=self._lease_seconds, slice_seconds=self._slice_seconds)
            return await self._alive(turn)
        except RunBusy as busy:
            # Its holder finishes a step, or is dead and will be detected.
            least, most = _BUSY_SECONDS
            seconds = min(least * 2 ** min(activity.info().attempt - 1, 10), most)
            again = timedelta(seconds=seconds)
            benign = ApplicationErrorCategory.BENIGN
            raise ApplicationError(str(busy), type="RunBusy", next_retry_delay=again, category=benign) from None
        except RunUnknown as unknown:
            raise ApplicationError(str(unknown), type="RunUnknown", non_retryable=True) from None

    async def _alive(self, turn: Turn) -> TurnOutcome:
        loop = asyncio.get_running_loop()
        work = loop.create_task(turn.take())
        stopping = loop.create_task(activity.wait_for_worker_shutdown())
        beat = self._terms.heartbeat_seconds / 3
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

    @activity.defn(name=CANCEL)
    async def _cancel(self, run: str) -> None:
        with contextlib.suppress(AnswerRefused):  # it is over
            await self._client.cancel(run, because="its workflow was cancelled")


def workflow_id(row: RunRow) -> str:
    """Returns a run's workflow id. A renewed run keeps its workflow."""
    return f"killick:{name_of(row)}"
