"""Follows an agent's code through its record: says when it asks for a step, and when it is given an outcome.

Changes nothing of what happens; whoever watches may close the run.
"""

from __future__ import annotations

import sys
from collections.abc import Container
from math import inf
from types import FrameType
from typing import Any, Final, Protocol

from killick.definitions.registry import AnyAgent
from killick.engine.execution import Branch, Engine, Execution
from killick.engine.executor import Executor
from killick.engine.replay import Record
from killick.model.fold import Step

_BETWEEN: Final = frozenset({"plan", "at", "note", "update", "heard", "now", "uuid", "random", "patched", "replaying"})
"""Methods of a run that take no number."""

_COMPARES: Final = "killick.engine.divergence"
"""What compares the arguments of a step with those on record."""

_NOT_CODE: Final = (
    "killick.engine.completion",
    "killick.engine.effects.reconcile",
    "killick.engine.effects.compensation",
)
"""What looks at a record when the agent's code is over."""


class Tracer(Protocol):
    """Whoever wants to know."""

    def asked(self, ex: Execution, step: str) -> None:
        """The code asks for a step, on the loop."""
        ...

    def called(self, ex: Execution, step: str) -> None:
        """Blocking code is about to ask for its next step, in its own thread."""
        ...

    def given(self, ex: Execution, step: Step) -> None:
        """The code gets the recorded outcome of a step."""
        ...


class TracingExecutor(Executor):
    """Advances a run under somebody's eyes."""

    def __init__(self, engine: Engine, watch: Tracer, *, uncompared: Container[int] = ()) -> None:
        super().__init__(engine)
        self._watch = watch
        self._uncompared = uncompared

    def _execution(self, agent: AnyAgent, log: Any, point: Any, *, hosts: bool) -> Execution:
        made = super()._execution(agent, log, point, hosts=hosts)
        made.__class__, made.record.__class__ = _Followed, _Looked  # they are made, and only watched from now on
        ex, record = made, made.record
        assert isinstance(ex, _Followed)
        assert isinstance(record, _Looked)
        ex.watch = record.watch = self._watch
        record.execution, record.uncompared = ex, self._uncompared
        ex.ends = {step.ended: step for step in record.steps.values() if step.ended}
        return ex


class _Followed(Execution):
    watch: Tracer
    ends: dict[int, Step]

    def played(self, seq: int) -> None:
        super().played(seq)
        self._given(seq)

    async def turn(self, seq: float = inf, *, whatever: bool = False) -> None:
        await super().turn(seq, whatever=whatever)
        if isinstance(seq, int) and seq in self.ends and self.ends[seq].sort == "scope":
            self._given(seq)

    def _given(self, seq: int) -> None:
        if seq in self.ends:
            self.watch.given(self, self.ends.pop(seq))

    def branch_here(self) -> Branch:
        branch = super().branch_here()
        if branch.thread is not None and _method() not in _BETWEEN:
            self.watch.called(self, branch.position)
        return branch


class _Looked(Record):
    watch: Tracer
    execution: Execution
    uncompared: Container[int]

    def event(self, seq: int) -> Any:
        """An event; where arguments are not what they were, there are none to compare with."""
        return None if seq in self.uncompared and _caller() == _COMPARES else super().event(seq)

    def step(self, step: str) -> Step | None:
        found = super().step(step)
        if _caller() not in _NOT_CODE:
            self.watch.asked(self.execution, step)
        return found


def _caller() -> str:
    """The module that asked whoever asks here."""
    return str(sys._getframe(2).f_globals.get("__name__", ""))  # pyright: ignore[reportPrivateUsage]


def _method() -> str:
    """The method of a run that the code in this thread has called."""
    frame: FrameType | None = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    name = ""
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith("killick."):
        name = frame.f_code.co_name
        frame = frame.f_back
    return name
