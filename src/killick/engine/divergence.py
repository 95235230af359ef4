"""The divergence check: code and record must agree on each step, else the run waits for corrected code."""

from __future__ import annotations

import asyncio
from typing import Any

from killick.engine.approval.verdicts import failed
from killick.engine.execution import Branch, Execution
from killick.engine.replay import RequestedStep, compare, short
from killick.engine.signals import Diverging, Stopped
from killick.errors import ValueErased
from killick.log.writer import Entry
from killick.model import events as e
from killick.model.facts import Step
from killick.model.failure import Failure
from killick.model.typed import convert


async def recorded_step(
    ex: Execution, branch: Branch, step: e.StepId, asked: RequestedStep, found: Any, label: str | None = None
) -> Step | None:
    """The step on record that the code asks for, after the divergence check; None for a new step.

    `label` names the requested step, where `asked` alone does not.
    """
    past = ex.record.steps.get(step)
    if past is None:
        # The record may not pass over the step, unless a sibling's end kept the code from it.
        await refuse_after_end(ex, branch)
        if branch.over_at or branch.replaying:
            diverge(ex, step, "nothing here, and continues after it", label or str(asked))
    else:
        _compare(ex, past, asked, found)
    return past


async def refuse_after_end(ex: Execution, branch: Branch) -> None:
    """Where the record of a branch ends and its gather is over, a sibling may have stopped it: wait for that."""
    if branch.over_at and not branch.replaying:
        await ex.await_turn(branch.over_at - 0.5, computed=True)
        ex.refuse(branch)


def _compare(ex: Execution, past: Step, asked: RequestedStep, found: Any) -> None:
    """Code and record must mean the same step; a drift is noted once."""
    intended = ex.record.event(past.intended)
    recorded = intended if isinstance(intended, e.StepIntended) else None
    verdict = compare(past, recorded, asked)
    if verdict == "same":
        return
    was = _recorded_arguments(ex, past)
    if verdict == "diverged":
        recorded_call = f"{past.sort} {past.name}({short(was)})"
        here = f"{asked.sort} {asked.name}({short(found)})"
        diverge(ex, past.id, recorded_call, here)
    note_drift(ex, past.id, asked.digest, was, found)


def note_drift(ex: Execution, step: e.StepId, digest: e.Digest | None, recorded: Any, found: Any) -> None:
    """Record that code asks for other values than those on record, once for each digest of them."""
    noted = ex.record.of(step, e.StepDrifted)
    if not noted or noted[-1][1].digest != digest:
        event = e.StepDrifted(at=ex.now_us(), step=step, digest=digest)
        ex.write_behind(Entry(event, {"recorded": recorded, "found": found}))


def _recorded_arguments(ex: Execution, past: Step) -> Any:
    try:
        opened = ex.record.of(past.id, e.WaitOpened) if past.sort == "wait" else ()
        data = ex.record.data(opened[0][0] if opened else past.intended)
    except ValueErased:
        return {}
    return data.get("arguments", data)


def diverge(ex: Execution, step: e.StepId, recorded: str, found: str) -> None:
    """Record a divergence, with both sides, and stop: the run waits for corrected code."""
    before = ex.log.fold.facts.build if ex.first_build is None else ex.first_build
    builds = [build_name(before), build_name(ex.engine.build(ex.agent))]
    ex.diverged = (step, recorded, found, (builds[0], builds[1]))
    event = e.RunDiverged(at=ex.now_us(), step=step)
    if ex.diverged_at != step:
        ex.write_behind(Entry(event, {"recorded": recorded, "found": found, "builds": builds, "code": ex.agent.code}))
    signal = Diverging(f"step {step}")
    ex.close(signal)
    raise signal


def build_name(build: e.Build) -> str:
    return " ".join(filter(None, [build.version, build.commit])) or "unknown"


async def until_cancelled(ex: Execution, branch: Branch, past: Step) -> None:
    """The agent's code cancelled this step, or a sibling stopped its branch: wait until that happens again."""
    ex.turns.pass_on()
    branch.dormant = asyncio.get_running_loop().create_future()
    try:
        await branch.dormant
    except (asyncio.CancelledError, Stopped):
        await ex.raise_if_closing()
        ex.mark_replayed(past.ended)
        raise


async def replay_outcome(ex: Execution, branch: Branch, past: Step) -> None:
    """Wait for the turn of a recorded outcome. Raises the recorded failure of a child or a message."""
    await ex.await_turn(past.ended)
    if past.status == "cancelled":
        if branch.stopped is not None:
            ex.mark_replayed(past.ended)
            raise branch.stopped
        await until_cancelled(ex, branch, past)
    ex.mark_replayed(past.ended)
    if past.status == "failed" and past.sort != "wait":
        raise failed(past.id, past.name, convert(ex.record.data(past.output)["failure"], Failure, at="failure"))


def refuse_stopped(ex: Execution, branch: Branch, step: e.StepId) -> None:
    """A branch that was stopped begins nothing: a step of it that is on record already ends with that."""
    if branch.stopped is not None and ex.signal is None and not branch.over_at:
        ex.write_behind(ex.step_ended(step, "cancelled"))
    ex.refuse(branch)
