"""Killick: the state layer for LLM agents. An agent's state is a projection of an immutable event log.

What people type daily is here, imported on first use (PEP 562) so that `import killick` is fast. The rest is where it
is defined: `killick.errors`, `killick.clock`, `killick.triggers`, `killick.testing`, `killick.store`, `killick.log`.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from killick import clock, errors, triggers
    from killick.agents.recording_client import durable
    from killick.agents.run import Run, SyncRun
    from killick.client.client import AsyncClient, Client, open, open_async  # noqa: A004
    from killick.client.start import AsyncHandle, Handle
    from killick.contracts import rules
    from killick.contracts.contract import Approval, Contract
    from killick.definitions.agents import Agent, agent, read_contract
    from killick.definitions.markers import KEY, STEP, TX, WORKSPACE, Key, Resource, ToolStep, Tx
    from killick.definitions.open_tools import open_tool
    from killick.definitions.policy import DidNotHappen, Effect, Happened, Unknown
    from killick.definitions.rate_limit import Limit
    from killick.definitions.tools import Tool, tool
    from killick.engine.state_machine import Done, Next, WaitFor, machine
    from killick.engine.steps.children import Child
    from killick.engine.views import RunInfo, Wait
    from killick.engine.waits.waits import Answer
    from killick.errors import KillickError, NotDone, RateLimited, Rejected, RunFailed, RunWaiting, StepFailed
    from killick.llm.loop import loop, loop_sync
    from killick.llm.toolset import Toolset
    from killick.model.codec import Secret
    from killick.model.retry import Retry
    from killick.model.state import State
    from killick.window import Window
    from killick.workers.hooks import on
    from killick.workers.mail import email
    from killick.workers.slack import slack
    from killick.workers.webhooks import webhook
    from killick.workspace import Workspace

__all__ = [
    "KEY", "STEP", "TX", "WORKSPACE", "Agent", "Answer", "Approval", "AsyncClient", "AsyncHandle", "Child",
    "Client", "Contract", "DidNotHappen", "Done", "Effect", "Handle", "Happened", "Key", "KillickError", "Limit",
    "Next", "NotDone", "RateLimited", "Rejected", "Resource", "Retry", "Run", "RunFailed", "RunInfo", "RunWaiting",
    "Secret", "State", "StepFailed", "SyncRun", "Tool", "ToolStep", "Toolset", "Tx", "Unknown", "Wait", "WaitFor",
    "Window", "Workspace", "agent", "clock", "durable", "email", "errors", "loop", "loop_sync", "machine", "on",
    "open", "open_async", "open_tool", "read_contract", "rules", "slack", "tool", "triggers", "webhook",
]  # fmt: skip

_MODULES = {
    name: module
    for module, names in {
        "agents.recording_client": "durable",
        "agents.run": "Run SyncRun",
        "client.client": "AsyncClient Client open open_async",
        "client.start": "AsyncHandle Handle",
        "contracts": "rules",
        "contracts.contract": "Approval Contract",
        "definitions.agents": "Agent agent read_contract",
        "definitions.markers": "KEY Key Resource STEP TX ToolStep Tx WORKSPACE",
        "definitions.open_tools": "open_tool",
        "definitions.policy": "DidNotHappen Effect Happened Unknown",
        "definitions.rate_limit": "Limit",
        "definitions.tools": "Tool tool",
        "engine.state_machine": "Done Next WaitFor machine",
        "engine.steps.children": "Child",
        "engine.waits.waits": "Answer",
        "engine.views": "RunInfo Wait",
        "errors": "KillickError NotDone RateLimited Rejected RunFailed RunWaiting StepFailed",
        "llm.loop": "loop loop_sync",
        "llm.toolset": "Toolset",
        "model.codec": "Secret",
        "model.retry": "Retry",
        "model.state": "State",
        "window": "Window",
        "workers.hooks": "on",
        "workers.mail": "email",
        "workers.slack": "slack",
        "workers.webhooks": "webhook",
        "workspace": "Workspace",
    }.items()
    for name in names.split()
}
"""The module that defines each public name."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _MODULES:
        # As `from module import name` does: `rules` is itself a module.
        globals()[name] = getattr(__import__(f"{__name__}.{_MODULES[name]}", fromlist=[name]), name)
    else:
        __import__(f"{__name__}.{name}")
    return globals()[name]


def __dir__() -> list[str]:
    return __all__
