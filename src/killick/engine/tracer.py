"""The tracer hook: how a replay follows an agent's code through its record. The engine calls it, where there is one."""

from __future__ import annotations

import asyncio
from typing import Protocol

from killick.definitions.agents import AnyAgent
from killick.engine.replay import Record
from killick.engine.signals import Signal
from killick.model import events as e


class TracedExecution(Protocol):
    """What a tracer sees of an execution. It may close it; the code then meets the signal at its next step."""

    agent: AnyAgent
    record: Record
    signal: Signal | None
    loop: asyncio.AbstractEventLoop

    def close(self, signal: Signal, *, cut: bool = False) -> None: ...


class Tracer(Protocol):
    """Follows the code of a run. It may raise the signal of an execution that it closed."""

    def asked(self, ex: TracedExecution, step: e.StepId) -> None:
        """The code asks for a step. Called on the loop."""
        ...

    def called(self, ex: TracedExecution, step: e.StepId) -> None:
        """Blocking code is about to ask for its next step. Called in the code's own thread."""
        ...

    def given(self, ex: TracedExecution, seq: int) -> None:
        """The code is given the outcome that was recorded at this event."""
        ...

    def compares(self, seq: int) -> bool:
        """Whether the arguments recorded at this event are those that the code has to repeat."""
        ...
