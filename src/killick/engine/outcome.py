"""The outcome of a run: ended, and how; or waiting, and until when."""

from __future__ import annotations

from typing import Any

import msgspec

from killick.engine.engine import Engine
from killick.engine.execution import Execution
from killick.engine.signals import Diverging, Paused
from killick.engine.waits.waits import in_doubt, next_deadline
from killick.errors import RunBroken
from killick.model.failure import Failure
from killick.model.typed import convert
from killick.store.records import ENDED


class RunOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of advancing a run: it ended, or waits.

    run, status      the run, and its status
    wake_at_us       when time wakes it, in microseconds since the epoch
    result, failure  the result or the failure
    step             the step that failed
    diverged         the step, the recorded and the found call, and the builds of a divergence
    not_undone       effects that could not be undone
    renewed_as       the run that continues it
    """

    run: str
    status: str
    wake_at_us: int | None = None
    result: Any = None
    failure: Any = None
    step: str | None = None
    diverged: tuple[str, str, str, tuple[str, str]] | None = None
    not_undone: tuple[str, ...] = ()
    renewed_as: str | None = None
    left_for: str | None = None
    """The step that this process does not take, if the run was left for that."""
    left: bool = False
    """Whether it was preempted, or interrupted by the end of the process; it is due at once."""
    crashed: bool = False
    """Whether it backs off until `wake_at_us`, because its process died."""
    doubt_seconds: float = 0.0
    """How long it is not believed that the time it waits for is past."""
    suspect: bool = False
    """Whether it is to be run alone, because its processes died; its lease is still held."""

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED


def ended(engine: Engine, run: str) -> RunOutcome:
    """How a run ended, from its record, with the id of its renewal; RunBroken for a damaged record."""
    if (reason := engine.log.store.quarantined(run)) is not None:
        raise RunBroken(run, seq=engine.log.head(run).seq, reason=reason)
    state = engine.log.state(run)
    facts = state.fold.facts
    data = state.data(facts.ended)
    failure = data.get("failure")
    event = engine.log.event(run, facts.ended)
    return RunOutcome(
        run=run, status=facts.status, result=data.get("result"),
        failure=None if failure is None else convert(failure, Failure, at="failure"), step=getattr(event, "step", None),
        not_undone=tuple(data.get("not_undone") or ()), renewed_as=facts.renewed_as,
    )  # fmt: skip


def outcome_of(ex: Execution, *, left: bool = False) -> RunOutcome:
    """The outcome of a run that is not over."""
    fold = ex.log.fold
    diverged = ex.diverged if isinstance(ex.signal, Diverging) else None
    status = "paused" if isinstance(ex.signal, Paused) else fold.facts.status
    wake, now = fold.wake_at, ex.now_us()
    doubt = 0.0
    if status == "waiting" and wake is not None and wake <= now and any(in_doubt(ex, w) for w in ex.waiters.values()):
        doubt = max((next_deadline(ex) or now) - now, 0) / 1_000_000
    return RunOutcome(
        run=ex.run_id, status=status, wake_at_us=wake, diverged=diverged, left=left, left_for=ex.left_for,
        doubt_seconds=doubt,
    )  # fmt: skip
