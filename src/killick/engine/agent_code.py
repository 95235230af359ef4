"""Calls an agent's function, on the loop or in a thread, and records its end."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from functools import partial
from typing import Any, TypeAlias

from killick.definitions.agents import AnyAgent
from killick.definitions.current import HERE
from killick.engine import completion, state_machine
from killick.engine.execution import Branch, Execution
from killick.engine.signals import Signal
from killick.engine.waits.open_wait import InnerWaits
from killick.errors import ValueRefused
from killick.model.chunks import through_codec
from killick.model.typed import convert

RunOf: TypeAlias = Callable[[Execution], object]
"""Makes the handle that the agent's code receives."""


def raise_own_error(main: asyncio.Future[Any] | None) -> None:
    """An error that is neither the agent's nor a signal is our own, and nothing is to hide it."""
    if main is not None and main.done() and not main.cancelled():
        error = main.exception()
        if error is not None and not isinstance(error, Signal):
            raise error


def begin(ex: Execution, branch: Branch, work: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
    """Start the main task of an execution, with its branch as the current one."""
    context = copy_context()
    context.run(HERE.set, branch)
    ex.branches.add(branch)
    ex.busy = 1
    task = asyncio.get_running_loop().create_task(_until_signal(work), context=context)
    ex.main = branch.task = task
    task.add_done_callback(partial(_wake, ex))
    return task


async def _until_signal(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run the code until a signal ends it. The execution holds the signal, so the task does not raise it."""
    try:
        await work()
    except Signal:
        return


def _wake(ex: Execution, main: asyncio.Future[Any]) -> None:
    if not main.cancelled():
        main.exception()  # retrieved here, because no task awaits the code of a parked run
    if ex.signal is not None:
        ex.signal.__traceback__ = None  # its frames refer to the execution
    if ex.parked:
        forget(ex)
    ex.stirred.set()


def forget(ex: Execution) -> None:
    """Drop what refers back to an execution that is over, so that it is freed without the cycle collector."""
    for branch in ex.branches:
        branch.task = None
    ex.branches.clear()
    ex.main, ex.inner_waits = None, InnerWaits(lambda: None, lambda: None)
    ex.log.listener = None


async def run_agent(ex: Execution, branch: Branch, point: state_machine.Resumed, run_of: RunOf) -> None:
    """Run the agent's code to its end, and put that on record."""
    error: BaseException | None = None
    result: Any = None
    if ex.signal is not None:
        raise ex.signal  # it is being cancelled: none of its code runs
    if ex.files is not None:
        await ex.files.opened()
    try:
        returned = await _code(ex, branch, point, run_of)
        result = _result(ex.agent, returned)
        ex.inert_steps.refuse_forgotten(at_end=True)
    except Signal:
        raise
    except BaseException as raised:
        error = ex.inert_steps.named_in(raised)
    finally:
        ex.inert_steps.close()
        ex.turns.computing -= 1
    if not _is_running(ex):
        return  # its coroutine is being collected, after its loop: the agent neither raised nor returned anything
    if isinstance(error, asyncio.CancelledError):
        await ex.raise_if_closing()
    if ex.signal is not None:
        raise ex.signal
    branch.thread = None
    if ex.files is not None:
        ex.files.ended()  # changes of other processes in the folder since the last tool are the run's too
        await ex.files.settle()
    await completion.finish(ex, branch, result, error)


def _result(agent: AnyAgent, returned: Any) -> Any:
    """The result for the record. ValueRefused if it cannot be stored, or is not of the declared type."""
    result = through_codec(returned, at=f"result of {agent.name}")
    if agent.returns is not Any and not agent.is_machine:
        try:
            convert(result, agent.returns, at=f"result of {agent.name}, a {type(returned).__name__}")
        except ValueRefused as misfit:
            move = "; return its .text" if agent.returns is str and hasattr(returned, "text") else ""
            declared = f"{agent.name} is declared to return {inspect.formatannotation(agent.returns)}"
            raise ValueRefused(misfit.path, f"{misfit.reason}; {declared}{move}") from None
    return result


def _is_running(ex: Execution) -> bool:
    try:
        return asyncio.current_task() is ex.main
    except RuntimeError:  # no loop runs here
        return False


async def _code(ex: Execution, branch: Branch, point: state_machine.Resumed, run_of: RunOf) -> Any:
    agent = ex.agent
    run = run_of(ex)
    if agent.is_machine:
        return await state_machine.transitions(
            ex, branch, agent, point, lambda state: _called(ex, branch, agent, run, state)
        )
    return await _called(ex, branch, agent, run, *((ex.input,) if agent.takes_input else ()))


async def _called(ex: Execution, branch: Branch, agent: AnyAgent, run: Any, *args: Any) -> Any:
    """The agent's function: on the loop, or in a thread of its own."""
    if agent.is_async:
        result = await agent.fn(run, *args)
        ex.context.refuse_changed()
        return result
    future = ex.in_thread(branch, partial(agent.fn, run, *args), copy_context())
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError:
            # A thread cannot be cancelled: it gets the signal at its next step.
            if ex.signal is None:
                raise
    result = future.result()
    ex.context.refuse_changed()
    return result
