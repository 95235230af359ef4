"""Parallel branches: a gather is one step with a scope, and each of its branches numbers its own steps."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

from killick.engine.divergence import diverge, recorded_step
from killick.engine.execution import Branch, Execution, Scope
from killick.engine.replay import OVER, RequestedStep
from killick.engine.signals import Signal, Stopped
from killick.engine.steps.turns import end_with
from killick.engine.waits.open_wait import Closed
from killick.engine.waits.waits import end
from killick.errors import KillickError
from killick.log.writer import Entry
from killick.model import events as e

T = TypeVar("T")


class First(msgspec.Struct, Generic[T], frozen=True):
    """The branch that ended first, and its result."""

    index: int
    value: T


def spread(branches: Sequence[Any]) -> tuple[Any, ...]:
    """Branches given one by one, or as one iterable of them."""
    if len(branches) == 1 and not hasattr(branches[0], "__await__") and not callable(branches[0]):
        return tuple(branches[0])
    return tuple(branches)


def discard(args: Sequence[Any]) -> None:
    """Close branches that will not be started, so that Python does not warn of them.

    One that was started belongs to its task, which would wait forever for a closed coroutine.
    """
    for arg in args:
        for code in arg if isinstance(arg, tuple) else ():  # pyright: ignore[reportUnknownVariableType]
            if inspect.iscoroutine(code) and inspect.getcoroutinestate(code) == inspect.CORO_CREATED:  # pyright: ignore[reportUnknownArgumentType]
                code.close()


async def gather(ex: Execution, branch: Branch, branches: Sequence[Any]) -> tuple[Any, ...]:
    """All branches; the first error stops the others."""
    outcomes = await _raced(ex, branch, "gather", branches, len(branches))
    return tuple(outcomes[index] for index in range(len(branches)))


async def first(ex: Execution, branch: Branch, branches: Sequence[Any]) -> First[Any]:
    """The first branch that is done stops the others."""
    if not branches:
        raise KillickError(f"{ex.run_id}: run.first needs at least one branch")
    outcomes = await _raced(ex, branch, "first", branches, 1)
    return First(*next(iter(outcomes.items())))


@dataclass(slots=True, eq=False)
class _Race(Scope):
    """A running gather: how many of its branches have to end, and the outcomes in the order in which they ended."""

    wanted: int = 0
    winner: int | None = None
    """Which branch of a `first` was first, where that is on record."""
    outcomes: dict[int, Any] = field(default_factory=dict[int, Any])
    errors: list[BaseException] = field(default_factory=list[BaseException])

    @property
    def is_decided(self) -> bool:
        return bool(self.errors) or len(self.outcomes) >= self.wanted


async def _raced(ex: Execution, branch: Branch, name: str, branches: Sequence[Any], wanted: int) -> dict[int, Any]:
    try:
        return await _side_by_side(ex, branch, name, branches, wanted)
    finally:
        discard((branches,))  # those that something kept from starting


async def _side_by_side(
    ex: Execution, branch: Branch, name: str, branches: Sequence[Any], wanted: int
) -> dict[int, Any]:
    step = branch.number()
    claim = RequestedStep("scope", name)
    past = await recorded_step(ex, branch, step, claim, {"branches": len(branches)})
    if past is None:
        await ex.await_turn()
        intended = e.StepIntended(at=ex.now_us(), step=step, sort="scope", name=name)
        ex.write_behind(Entry(intended, {"arguments": {"branches": len(branches)}}))
    race = _Race(step, branch, branch.over_at, branch.scope is not None and branch.scope.has_stopped, wanted=wanted)
    if past is not None and past.status in OVER:
        race.over_at = past.ended
        race.has_stopped = race.has_stopped or past.status != "done" or name == "first"
        race.winner = ex.record.data(past.output).get("winner") if past.output else None
    if gone := ex.record.branches_beyond(step, len(branches)):
        diverge(ex, step, f"steps in branch {gone}", f"{name} of {len(branches)} branches")
    race.branches = [Branch(ex, f"{step}.{index + 1}", race, stopped=branch.stopped) for index in range(len(branches))]
    futures = await _start(ex, race, branches, past.intended if past is not None else ex.log.seq)
    try:
        await _all(ex, futures)
    except asyncio.CancelledError:
        if ex.signal is None and not race.over_at:
            ex.write_behind(ex.step_ended(step, "cancelled"))
        raise
    finally:
        ex.turns.computing -= not race.running
    if ex.signal is not None:
        raise ex.signal
    if branch.stopped is not None and not race.is_decided:
        if not race.over_at:
            ex.write_behind(ex.step_ended(step, "cancelled"))
        raise branch.stopped
    if race.over_at:
        await ex.await_turn(race.over_at)
        ex.see(race.over_at)
    else:
        won = {"winner": next(iter(race.outcomes))} if name == "first" and not race.errors else {}
        await ex.recorded(ex.write_behind(ex.step_ended(step, "failed" if race.errors else "returned", **won)))
    if race.errors:
        raise race.errors[0]
    return race.outcomes


async def _start(ex: Execution, race: _Race, branches: Sequence[Any], seq: int) -> list[asyncio.Future[Any]]:
    futures: list[asyncio.Future[Any]] = []
    race.running = len(branches) + 1
    for index, (child, code) in enumerate(zip(race.branches, branches, strict=True)):
        if not ex.agent.is_async:
            # Code in threads would run all at once: each begins when the one before reaches its first step.
            await ex.await_turn(seq)
        futures.append(ex.start(child, _guarded(ex, race, index, child, code)))
    race.running -= 1
    ex.busy -= bool(race.running)
    ex.turns.computing += not race.running
    return futures


def _guarded(ex: Execution, race: _Race, index: int, child: Branch, code: Any) -> Callable[[], Any]:
    """Run a branch's code, and stop its siblings in the same turn of the loop in which it ended."""

    def ended(error: BaseException | None, value: Any) -> None:
        over = child.stopped is not None or isinstance(error, asyncio.CancelledError)
        if ex.record.has_more(child.path, child.count) and not over:
            diverge(ex, child.position, "more steps in this branch", f"its end ({error or 'it returned'})")
        if race.winner not in (None, index):
            return  # on record another one was first
        if error is not None:
            race.errors.append(error)
        else:
            race.outcomes[index] = value
        if race.is_decided:
            _stop(ex, [other for other in race.branches if other is not child])

    async def guarded() -> None:
        try:
            value = await code
        except Signal:
            return  # one that concerns the whole run is raised when all branches are over
        except BaseException as error:
            ended(error, None)
        else:
            ended(None, value)

    def guarded_in_thread() -> None:
        error, value = None, None
        try:
            value = code()
        except BaseException as raised:
            error = raised
        if isinstance(error, Signal):
            return

        async def on_loop() -> None:
            ended(error, value)

        asyncio.run_coroutine_threadsafe(on_loop(), ex.loop).result()

    return guarded if ex.agent.is_async else guarded_in_thread


def _stop(ex: Execution, branches: Sequence[Branch]) -> None:
    """Branches begin nothing new: waits end now, open attempts settle first."""
    paths = tuple(f"{branch.path}." for branch in branches)
    for inner in (*branches, *(each for each in ex.branches if each.path.startswith(paths))):
        inner.stopped = inner.stopped or Stopped("a sibling ended")
        end_with(inner.dormant, inner.stopped)
    for waiter in list(ex.waiters.values()):
        if waiter.step.startswith(paths) and waiter.waits_for != "settlement" and not waiter.future.done():
            if waiter.waits_for == "delay":
                if ex.is_open(waiter.step):
                    continue  # its outcome is determined first
                ex.mark_busy()
                waiter.future.set_exception(Stopped("a sibling ended"))
            else:
                end(ex, waiter, Closed(0, "cancelled"))


async def _all(ex: Execution, futures: Sequence[asyncio.Future[Any]]) -> None:
    """Wait until every branch is over. If the agent's own code cancels, cancel the branches and wait for them."""
    waiting = set(futures)
    cancelled: asyncio.CancelledError | None = None
    while waiting:
        try:
            _, waiting = await asyncio.wait(waiting)
        except asyncio.CancelledError as error:
            if cancelled is None:
                await ex.raise_if_closing()
            cancelled = error
            for future in waiting:
                future.cancel()
    for future in futures:
        if not future.cancelled() and (failed := future.exception()) is not None and cancelled is None:
            raise failed
    if cancelled is not None:
        raise cancelled
