"""Agents of the second style: state machines. A transition is a scope, and only the current one is ever replayed."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Generic, Protocol, TypeVar, overload

import msgspec

from killick.definitions.agents import Agent, AnyAgent, agent, declared
from killick.definitions.policy import Duration, signed
from killick.engine.divergence import diverge, recorded_step
from killick.engine.execution import Branch, Execution
from killick.engine.replay import RequestedStep
from killick.engine.waits import questions
from killick.errors import DeclarationRefused
from killick.log.log import Log
from killick.log.writer import Entry
from killick.model import events as e
from killick.model.chunks import through_codec
from killick.model.fold import Fold
from killick.model.typed import convert

S = TypeVar("S")


class Next(msgspec.Struct, Generic[S], frozen=True):
    """Returned by a transition: continue with this state."""

    state: S


class WaitFor(msgspec.Struct, Generic[S], frozen=True):
    """Returned by a transition: continue with this state after a message or at the timeout; `run.received` is the
    result.

    name     the name of the message
    state    the next state
    timeout  how long to wait; by default without limit
    default  the result at the timeout
    """

    name: str
    state: S
    timeout: Duration | None = None
    default: Any = None


class Done(msgspec.Struct, frozen=True):
    """Returned by a transition: the run ends with this result."""

    result: Any = None


class _MachineDecorator(Protocol):
    def __call__(self, fn: Callable[[Any, S], Any], /) -> Agent[S, Any]: ...


@overload
def machine(fn: Callable[[Any, S], Any], /) -> Agent[S, Any]: ...
@overload
def machine(*, name: str | None = None, **options: Any) -> _MachineDecorator: ...


@signed(agent)
def machine(fn: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Declares a state machine: a function of a run and a state that returns Next, WaitFor or Done. The input of a run
    is its first state. The options are those of `killick.agent`. Raises DeclarationRefused."""
    return declared(fn, options, is_machine=True)


class Resumed(msgspec.Struct, frozen=True, kw_only=True):
    """Where a machine resumes: after the last transition that ended."""

    after: int = 0
    """The seq at which that transition ended; 0 before the first one."""
    count: int = 0
    output: dict[str, Any] = {}
    """Its outcome as it is on record: `done`, the result; or the next `state`, and what it `waits` for before."""


def resume_point(log: Log, run: str, fold: Fold) -> Resumed:
    """The last transition that ended, found from the end of the record."""
    for top in range(len(fold.tops) - 1, -1, -1):
        step = fold.steps[fold.tops[top]]
        if step.sort == "scope" and step.name == "transition" and step.status == "done":
            return Resumed(after=step.ended, count=int(step.id), output=log.data(run, step.output)["output"])
    return Resumed()


async def transitions(
    ex: Execution, branch: Branch, agent: AnyAgent, resumed: Resumed, step: Callable[[Any], Coroutine[Any, Any, Any]]
) -> Any:
    """One transition after the other, until one is the last."""
    branch.count = resumed.count
    state, output = ex.input, resumed.output
    while "done" not in output:
        if output:
            state = convert(output["state"], agent.input_type, at="state")
        if output and (waits := output["waits"]) is not None:
            ex.received = await questions.wait(ex, branch, waits["name"], waits["timeout"], waits["default"], Any)
        output = await _transition(ex, branch, agent, step, state)
        ex.received = None
    return output["done"]


def _output(agent: AnyAgent, outcome: Any) -> dict[str, Any]:
    """A transition's outcome for the record."""
    if not isinstance(outcome, Next | WaitFor | Done):
        returned = type(outcome).__name__
        raise DeclarationRefused(agent.name, f"a transition returned {returned}; return Next, WaitFor or Done")
    fields: dict[str, Any] = msgspec.structs.asdict(outcome)  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(outcome, Done):
        return {"done": fields["result"]}
    state = fields.pop("state")
    return {"state": state, "waits": fields or None}  # the other fields of a WaitFor


async def _transition(
    ex: Execution, branch: Branch, agent: AnyAgent, step: Callable[[Any], Coroutine[Any, Any, Any]], state: Any
) -> dict[str, Any]:
    number = branch.number()
    past = await recorded_step(ex, branch, number, RequestedStep("scope", "transition"), {})
    if past is None:
        ex.write_behind(
            Entry(e.StepIntended(at=ex.now_us(), step=number, sort="scope", name="transition"), {"state": state})
        )
    outside = branch.path, branch.count
    branch.path, branch.count = number, 0
    try:
        outcome: Any = await step(state)
    finally:
        inside = branch.count
        branch.path, branch.count = outside
    if ex.record.has_more(number, inside):
        diverge(ex, f"{number}.{inside + 1}", "more steps in this transition", "its end")
    output: dict[str, Any] = through_codec(_output(agent, outcome))
    ex.write_behind(ex.step_ended(number, "returned", output=output))
    return output
