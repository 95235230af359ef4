"""Kedge: the state layer for LLM agents. An agent's state is a projection of an immutable event log."""

from kedge.clock import Clock, ManualClock, SystemClock
from kedge.errors import KedgeError
from kedge.log import Entry, Log, RunLog, repair, verify
from kedge.model.codec import Secret
from kedge.store import open_store

__all__ = [
    "Clock",
    "Entry",
    "KedgeError",
    "Log",
    "ManualClock",
    "RunLog",
    "Secret",
    "SystemClock",
    "open_store",
    "repair",
    "verify",
]
