"""Puts existing Temporal activities through Killick's gate: recorded once, with keys, contracts and approvals.

The workflow and the activity stay as they are. The run of a workflow has its id, and its activities are the steps.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

from temporalio import activity
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory
from temporalio.worker import ActivityInboundInterceptor, ExecuteActivityInput, Interceptor

from killick.adapters.tool_gate import Declared, ToolOptions
from killick.client.client import AnyClient
from killick.contracts.contract import Contract
from killick.definitions.agents import read_contract
from killick.errors import Rejected, RunBusy, RunWaiting, StepFailed

_LOOK_SECONDS: Final = 0.2
_AGAIN: Final = timedelta(seconds=1)
_PATIENCE: Final = 0.8
"""The part of its timeout that an activity waits for its approver, before it leaves its slot to another attempt."""


class ActivityGate(Interceptor):
    """Records the activities named in `tools` as steps of Killick's: `Worker(…, interceptors=[ActivityGate(…)])`.

    tools     the activities by type, each with the options of `killick.tool`, or as a `killick.Tool`; others pass
    contract  the contract that evaluates the calls: a Contract, or the path of its TOML file
    run       names the run of an activity; by default the workflow's id

    After a crash, `effect` decides whether an activity is executed again; Killick's `retry` replaces the activity's own
    retry policy. An activity that needs an approval waits for it, and is tried again when its timeout is near.
    """

    def __init__(
        self, client: AnyClient, tools: ToolOptions, *, contract: Contract | str | os.PathLike[str] | None = None,
        run: Callable[[activity.Info], str] | None = None,
    ) -> None:  # fmt: skip
        self._client = client.as_async()
        self._tools = Declared(tools)
        self._names = frozenset(tools)
        self._contract = read_contract(contract) if isinstance(contract, str | os.PathLike) else contract
        self._run = run or (lambda info: info.workflow_id or info.activity_id)

    def intercept_activity(self, next: ActivityInboundInterceptor) -> ActivityInboundInterceptor:  # noqa: A002
        """Returns the interceptor of an activity; called by Temporal's worker."""
        return _Gated(self, next)

    async def perform(self, given: ExecuteActivityInput, next: ActivityInboundInterceptor) -> Any:  # noqa: A002
        """Executes an activity as a step, or returns its recorded result."""
        info = activity.info()
        if info.activity_type not in self._names:
            return await next.execute_activity(given)
        signature = inspect.signature(given.fn)

        async def execute(**arguments: Any) -> Any:
            given.args = [arguments[name] for name in signature.parameters if name in arguments]
            return await next.execute_activity(given)

        tool = self._tools.of(info.activity_type, doc=inspect.getdoc(given.fn) or "")
        arguments = dict(signature.bind(*given.args).arguments)
        key, run = f"{info.workflow_run_id}:{info.activity_id}", self._run(info)
        timeout = info.start_to_close_timeout or info.schedule_to_close_timeout or timedelta.max
        until = self._client.runtime.clock.monotonic() + timeout.total_seconds() * _PATIENCE
        while True:
            try:
                session = self._client.host(run, agent=f"temporal.{info.workflow_type}", contract=self._contract)
                async with session as host:
                    return await host.call(tool, arguments, key=key, fn=execute)
            except Rejected as rejected:
                raise ApplicationError(str(rejected), type="Rejected", non_retryable=True) from None
            except StepFailed as failed:
                kind, message = failed.failure.type.rpartition(".")[2], str(failed.failure)
                raise ApplicationError(message, type=kind, non_retryable=True) from None
            except (RunBusy, RunWaiting) as blocked:
                await self._wait(blocked, run, until)

    async def _wait(self, blocked: RunBusy | RunWaiting, run: str, until: float) -> None:
        """Waits until a blocked call may continue; leaves it to another attempt when its timeout is near."""
        store, clock = self._client.runtime.store, self._client.runtime.clock
        while clock.monotonic() < until:
            activity.heartbeat(str(blocked))
            await asyncio.sleep(_LOOK_SECONDS)
            row = store.index(run)
            wake_at_us = None if row is None else row.wake_at_us
            if isinstance(blocked, RunBusy) or (wake_at_us is not None and wake_at_us <= clock.now_us()):
                return
        benign = ApplicationErrorCategory.BENIGN
        kind = type(blocked).__name__
        raise ApplicationError(str(blocked), type=kind, next_retry_delay=_AGAIN, category=benign) from None


class _Gated(ActivityInboundInterceptor):
    """An activity behind the gate."""

    def __init__(self, gate: ActivityGate, next: ActivityInboundInterceptor) -> None:  # noqa: A002
        super().__init__(next)
        self._gate = gate

    async def execute_activity(self, input: ExecuteActivityInput) -> Any:  # noqa: A002
        return await self._gate.perform(input, self.next)
