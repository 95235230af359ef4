"""Killick: the state layer for LLM agents. An agent's state is a projection of an immutable event log.

Each name is imported when it is first used (PEP 562), so that `import killick` costs next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from killick.clock import Clock, LeapingClock, ManualClock, SystemClock
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
    from killick.history.proof import verify_proof
    from killick.log import Entry, Log, RunLog, repair, verify
    from killick.model import rules
    from killick.model.codec import Secret
    from killick.model.contract import Approval, Contract
    from killick.model.failure import Failure
    from killick.model.retry import Retry
    from killick.model.state import State
    from killick.runtime.approving import Proposed, Told
    from killick.runtime.client import Client, open  # noqa: A004
    from killick.runtime.durable import durable
    from killick.runtime.here import watch_io
    from killick.runtime.hooks import HookEvent, on
    from killick.runtime.hosting import Host
    from killick.runtime.limits import Limit
    from killick.runtime.loop import LoopResult, loop, loop_sync
    from killick.runtime.machine import Done, Next, WaitFor, machine
    from killick.runtime.open_tools import open_tool
    from killick.runtime.registry import (
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
    from killick.runtime.run import Run, Step, SyncRun
    from killick.runtime.scopes import First
    from killick.runtime.standing import Advanced
    from killick.runtime.starting import Handle
    from killick.runtime.steps import Child
    from killick.runtime.tokens import Person
    from killick.runtime.toolset import Toolset
    from killick.runtime.triggers import Firing, Previous, Trigger, TriggerInfo, cron, every, on_event, when
    from killick.runtime.views import RunInfo, Wait
    from killick.runtime.waits import Answer
    from killick.runtime.webhooks import webhook, webhook_verify
    from killick.store import open_store
    from killick.window import Window
    from killick.workspace import Workspace

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
        "errors": "ChildFailed ContextStale KillickError NotDone RateLimited Rejected RunBusy RunCancelled RunDiverged"
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
