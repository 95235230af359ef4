"""Kedge: the state layer for LLM agents. An agent's state is a projection of an immutable event log.

Each name is imported when it is first used (PEP 562), so that `import kedge` costs next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kedge.clock import Clock, LeapingClock, ManualClock, SystemClock
    from kedge.errors import (
        ChildFailed,
        ContextStale,
        KedgeError,
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
    from kedge.history.proof import verify_proof
    from kedge.log import Entry, Log, RunLog, repair, verify
    from kedge.model import rules
    from kedge.model.codec import Secret
    from kedge.model.contract import Approval, Contract
    from kedge.model.failure import Failure
    from kedge.model.retry import Retry
    from kedge.model.state import State
    from kedge.runtime.approving import Proposed, Told
    from kedge.runtime.client import Client, open  # noqa: A004
    from kedge.runtime.durable import durable
    from kedge.runtime.here import watch_io
    from kedge.runtime.hooks import HookEvent, on
    from kedge.runtime.hosting import Host
    from kedge.runtime.limits import Limit
    from kedge.runtime.loop import LoopResult, loop, loop_sync
    from kedge.runtime.machine import Done, Next, WaitFor, machine
    from kedge.runtime.open_tools import open_tool
    from kedge.runtime.registry import (
        KEY,
        STEP,
        TX,
        WORKSPACE,
        Agent,
        DidNotHappen,
        Effect,
        Happened,
        Key,
        Resource,
        Tool,
        ToolStep,
        Tx,
        Unknown,
        agent,
        read_contract,
        tool,
    )
    from kedge.runtime.run import Run, Step, SyncRun
    from kedge.runtime.scopes import First
    from kedge.runtime.standing import Advanced
    from kedge.runtime.starting import Handle
    from kedge.runtime.steps import Child
    from kedge.runtime.tokens import Person
    from kedge.runtime.toolset import Toolset
    from kedge.runtime.triggers import Firing, Previous, Trigger, TriggerInfo, cron, every, on_event, when
    from kedge.runtime.views import RunInfo, Wait
    from kedge.runtime.waits import Answer
    from kedge.runtime.webhooks import webhook, webhook_verify
    from kedge.store import open_store
    from kedge.window import Window
    from kedge.workspace import Workspace

__all__ = [
    "KEY",
    "STEP",
    "TX",
    "WORKSPACE",
    "Advanced",
    "Agent",
    "Answer",
    "Approval",
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
    "KedgeError",
    "Key",
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
    "Told",
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
        "errors": "ChildFailed ContextStale KedgeError NotDone RateLimited Rejected RunBusy RunCancelled RunDiverged"
        " RunFailed RunPaused RunWaiting Skipped StepFailed StillRunning WaitExpired WebhookRefused",
        "history.proof": "verify_proof",
        "log": "Entry Log RunLog repair verify",
        "model": "rules",
        "model.codec": "Secret",
        "model.contract": "Approval Contract",
        "model.failure": "Failure",
        "model.retry": "Retry",
        "model.state": "State",
        "runtime.approving": "Proposed Told",
        "runtime.client": "Client open",
        "runtime.durable": "durable",
        "runtime.here": "watch_io",
        "runtime.hooks": "HookEvent on",
        "runtime.hosting": "Host",
        "runtime.limits": "Limit",
        "runtime.loop": "LoopResult loop loop_sync",
        "runtime.machine": "Done Next WaitFor machine",
        "runtime.open_tools": "open_tool",
        "runtime.registry": "KEY STEP TX WORKSPACE Agent DidNotHappen Effect Happened Key Resource Tool ToolStep Tx"
        " Unknown agent read_contract tool",
        "runtime.run": "Run Step SyncRun",
        "runtime.scopes": "First",
        "runtime.standing": "Advanced",
        "runtime.starting": "Handle",
        "runtime.steps": "Child",
        "runtime.tokens": "Person",
        "runtime.toolset": "Toolset",
        "runtime.triggers": "Firing Previous Trigger TriggerInfo cron every on_event when",
        "runtime.views": "RunInfo Wait",
        "runtime.waits": "Answer",
        "runtime.webhooks": "webhook webhook_verify",
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
