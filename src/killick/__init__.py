"""Killick: the state layer for LLM agents. An agent's state is a projection of an immutable event log.

Each name is imported on first use (PEP 562), so that `import killick` is fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from killick.agents.recording_client import durable
    from killick.agents.run import Run, Step, SyncRun
    from killick.audit.proof import verify_proof
    from killick.client.client import AsyncClient, Client, open, open_async  # noqa: A004
    from killick.client.start import AsyncHandle, Handle
    from killick.clock import Clock, LeapingClock, ManualClock, SystemClock
    from killick.contracts import rules
    from killick.contracts.contract import Approval, Contract
    from killick.definitions.agents import Agent, agent, read_contract
    from killick.definitions.current import watch_io
    from killick.definitions.markers import KEY, STEP, TX, WORKSPACE, Key, Resource, ToolStep, Tx
    from killick.definitions.open_tools import open_tool
    from killick.definitions.policy import DidNotHappen, Effect, Happened, Unknown
    from killick.definitions.rate_limit import Limit
    from killick.definitions.tools import Tool, tool
    from killick.definitions.triggers import Firing, Previous, Trigger, TriggerInfo, cron, every, on_event, when
    from killick.engine.approval.call_answer import CallAnswer, Proposed
    from killick.engine.outcome import RunOutcome
    from killick.engine.parallel import First
    from killick.engine.state_machine import Done, Next, WaitFor, machine
    from killick.engine.steps.children import Child
    from killick.engine.steps.waits import Answer
    from killick.engine.views import RunInfo, Wait
    from killick.errors import (
        ChildFailed,
        ContextStale,
        KillickError,
        NotDone,
        RateLimited,
        Rejected,
        RunBusy,
        RunCancelled,
        RunDiverged,
        RunFailed,
        RunPaused,
        RunWaiting,
        Skipped,
        StepFailed,
        StillRunning,
        WaitExpired,
        WebhookRefused,
    )
    from killick.llm.external import Host
    from killick.llm.loop import LoopResult, loop, loop_sync
    from killick.llm.toolset import Toolset
    from killick.log import Entry, Log, RunLog, repair, verify
    from killick.model.codec import Secret
    from killick.model.failure import Failure
    from killick.model.retry import Retry
    from killick.model.state import State
    from killick.store import open_store
    from killick.window import Window
    from killick.workers.hooks import HookEvent, on
    from killick.workers.tokens import Person
    from killick.workers.webhooks import webhook, webhook_verify
    from killick.workspace import Workspace

__all__ = [
    "KEY",
    "STEP",
    "TX",
    "WORKSPACE",
    "Agent",
    "Answer",
    "Approval",
    "AsyncClient",
    "AsyncHandle",
    "CallAnswer",
    "Child",
    "ChildFailed",
    "Client",
    "Clock",
    "ContextStale",
    "Contract",
    "DidNotHappen",
    "Done",
    "Effect",
    "Entry",
    "Failure",
    "Firing",
    "First",
    "Handle",
    "Happened",
    "HookEvent",
    "Host",
    "Key",
    "KillickError",
    "LeapingClock",
    "Limit",
    "Log",
    "LoopResult",
    "ManualClock",
    "Next",
    "NotDone",
    "Person",
    "Previous",
    "Proposed",
    "RateLimited",
    "Rejected",
    "Resource",
    "Retry",
    "Run",
    "RunBusy",
    "RunCancelled",
    "RunDiverged",
    "RunFailed",
    "RunInfo",
    "RunLog",
    "RunOutcome",
    "RunPaused",
    "RunWaiting",
    "Secret",
    "Skipped",
    "State",
    "Step",
    "StepFailed",
    "StillRunning",
    "SyncRun",
    "SystemClock",
    "Tool",
    "ToolStep",
    "Toolset",
    "Trigger",
    "TriggerInfo",
    "Tx",
    "Unknown",
    "Wait",
    "WaitExpired",
    "WaitFor",
    "WebhookRefused",
    "Window",
    "Workspace",
    "agent",
    "cron",
    "durable",
    "every",
    "loop",
    "loop_sync",
    "machine",
    "on",
    "on_event",
    "open",
    "open_async",
    "open_store",
    "open_tool",
    "read_contract",
    "repair",
    "rules",
    "tool",
    "verify",
    "verify_proof",
    "watch_io",
    "webhook",
    "webhook_verify",
    "when",
]

_MODULES = {
    name: module
    for module, names in {
        "clock": "Clock LeapingClock ManualClock SystemClock",
        "errors": "ChildFailed ContextStale KillickError NotDone RateLimited Rejected RunBusy RunCancelled RunDiverged"
        " RunFailed RunPaused RunWaiting Skipped StepFailed StillRunning WaitExpired WebhookRefused",
        "audit.proof": "verify_proof",
        "log": "Entry Log RunLog repair verify",
        "contracts": "rules",
        "model.codec": "Secret",
        "contracts.contract": "Approval Contract",
        "model.failure": "Failure",
        "model.retry": "Retry",
        "model.state": "State",
        "engine.approval.call_answer": "CallAnswer Proposed",
        "client.client": "AsyncClient Client open open_async",
        "agents.recording_client": "durable",
        "definitions.current": "watch_io",
        "workers.hooks": "HookEvent on",
        "llm.external": "Host",
        "definitions.rate_limit": "Limit",
        "llm.loop": "LoopResult loop loop_sync",
        "engine.state_machine": "Done Next WaitFor machine",
        "definitions.open_tools": "open_tool",
        "definitions.agents": "Agent agent read_contract",
        "definitions.markers": "KEY STEP TX WORKSPACE Key Resource ToolStep Tx",
        "definitions.policy": "DidNotHappen Effect Happened Unknown",
        "definitions.tools": "Tool tool",
        "agents.run": "Run Step SyncRun",
        "engine.parallel": "First",
        "engine.outcome": "RunOutcome",
        "client.start": "AsyncHandle Handle",
        "engine.steps.children": "Child",
        "workers.tokens": "Person",
        "llm.toolset": "Toolset",
        "definitions.triggers": "Firing Previous Trigger TriggerInfo cron every on_event when",
        "engine.views": "RunInfo Wait",
        "engine.steps.waits": "Answer",
        "workers.webhooks": "webhook webhook_verify",
        "store": "open_store",
        "window": "Window",
        "workspace": "Workspace",
    }.items()
    for name in names.split()
}
"""The module that defines each public name."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # As `from module import name` does: `rules` is itself a module.
    value = globals()[name] = getattr(__import__(f"{__name__}.{_MODULES[name]}", fromlist=[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
