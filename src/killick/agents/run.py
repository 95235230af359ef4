"""The run as agent code sees it. The methods of `Run` are awaited; those of `SyncRun` block.

A method returns an inert Step, which gets its number when it is awaited; before that, nothing happens.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, Final, Generic, Literal, NoReturn, ParamSpec, TypeAlias, cast, overload
from uuid import UUID

from typing_extensions import TypeVar

from killick.definitions.agents import Agent, AnyAgent
from killick.definitions.policy import Duration
from killick.definitions.tools import AnyTool, Tool
from killick.engine import completion, parallel
from killick.engine.approval.call_answer import CallAnswer, Proposed, declined, proposed
from killick.engine.execution import Branch, Execution
from killick.engine.parallel import First
from killick.engine.steps import children, decisions
from killick.engine.steps.children import Child
from killick.engine.steps.fast_path import call_tool, intent_of
from killick.engine.steps.intention import Intent, model_intent
from killick.engine.steps.pipeline import END, execute_step, run_step, stream
from killick.engine.waits import questions
from killick.engine.waits.questions import MISSING
from killick.engine.waits.waits import Answer
from killick.errors import OutsideBranch, Rejected, WorkspaceRefused
from killick.llm import context_window
from killick.llm.external import ExternalSteps
from killick.llm.toolset import Toolset, dispatch, dispatch_sync
from killick.model.retry import seconds
from killick.window import Sent, Window

P = ParamSpec("P")
T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")
D = TypeVar("D")
I = TypeVar("I")  # noqa: E741
O = TypeVar("O")  # noqa: E741
C = TypeVar("C", default=Any)

Step: TypeAlias = Coroutine[Any, Any, T]
"""A step that was requested but not executed yet. Await it, or pass it to `run.gather`."""

OnParentEnd = Literal["cancel", "abandon", "wait"]
Escalate: TypeAlias = Sequence[tuple[str | Sequence[str], Duration | None]]
_UNNUMBERED: Final = frozenset({decisions.plan, decisions.at, decisions.note, decisions.update, questions.remarks})
"""Operations between two steps, without a step number."""


class _Common(Generic[C]):
    """The properties of both kinds of Run."""

    def __init__(self, execution: Execution) -> None:
        self._execution = execution

    @property
    def id(self) -> str:
        """The run's id."""
        return self._execution.run_id

    def __repr__(self) -> str:
        return f"<killick.{type(self).__name__} {self.id} of agent {self._execution.agent.name}>"

    @property
    def input(self) -> Any:
        """The input of the run."""
        return self._execution.input

    @property
    def context(self) -> C:
        """The agent's own document, as of the last step that returned. Change it with `update`."""
        value: C = self._execution.context.value
        return value

    @property
    def parent(self) -> str | None:
        """The id of the run that spawned this one, or None."""
        return self._execution.log.fold.facts.parent

    @property
    def workspace(self) -> Path:
        """The folder of the run. Raises WorkspaceRefused if the agent declares no workspace."""
        folder = self._execution.folder
        if folder is None:
            reason = "has no folder to work in; declare one: @killick.agent(workspace=…)"
            raise WorkspaceRefused(self._execution.agent.name, reason)
        return folder

    @property
    def replaying(self) -> bool:
        """Whether the next step is already recorded."""
        return self._execution.branch_here().replaying

    @property
    def call_answer(self) -> CallAnswer | None:
        """The approver's answer to the last call, with their changes; None if no approver was asked."""
        return self._execution.branch_here().answer

    @property
    def received(self) -> Any:
        """In a state machine: the result of the wait before this transition."""
        return self._execution.received

    def hosting(self) -> ExternalSteps:
        """Opens a `Host` for a framework's own loop: `async with run.hosting() as host`, or `with`. Calls in the block
        go through the host."""
        return ExternalSteps(self._execution, self._paged)

    def now(self) -> datetime:
        """Returns the current time in UTC; on replay, the recorded time."""
        return self._drawn(decisions.now)

    def uuid(self) -> UUID:
        """Returns a new UUID, the same on replay."""
        return self._drawn(decisions.uuid)

    def random(self) -> float:
        """Returns a random number in [0, 1), the same on replay."""
        return self._drawn(decisions.random)

    def patched(self, name: str) -> bool:
        """Returns whether new code may run here: False for a run that passed this point before the code was added.

        name  the name of the change, unique in the agent
        """
        return self._drawn(partial(decisions.patched, name=name))

    def _paged(self, do: Callable[..., Coroutine[Any, Any, Any]], *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def _drawn(self, draw: Callable[[Execution, Branch], T]) -> T:
        raise NotImplementedError

    # the inert steps, for both ------------------------------------------------------------------

    def _call(self, tool: AnyTool, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Intent:
        return intent_of(tool, *self._bind(tool, args, kwargs))

    def _bind(
        self, tool: AnyTool, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        if not isinstance(tool, Tool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"run.call takes a tool; declare {getattr(tool, '__name__', tool)!r} with @killick.tool")
        return tool.shape.bind(args, kwargs)


async def _proposed(ex: Execution, branch: Branch, intent: Intent) -> Proposed[Any]:
    """A step that needs an approval, even if no rule requires it."""
    intent.proposed = True
    try:
        result = await execute_step(ex, branch, intent)
    except Rejected as rejected:
        return declined(rejected)
    return proposed(result, branch.answer)


class Run(_Common[C]):
    """The run of an `async def` agent. Its steps are recorded, and replayed when the run resumes."""

    def call(self, tool: Tool[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Step[T]:
        """Calls a tool as a step and returns its result. On replay, the recorded result is returned. Raises StepFailed
        if the tool failed, Rejected if a contract or an approver rejected the call.

            receipt = await run.call(charge, card, 1_200)
        """
        (ex := self._execution).context.refuse_changed()
        step = call_tool(ex, tool, *self._bind(tool, args, kwargs))
        ex.inert_steps.add(step, f"run.call({tool.name}, …)", sys._getframe(1))  # pyright: ignore[reportPrivateUsage]
        return step

    def propose(self, tool: Tool[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Step[Proposed[T]]:
        """Proposes a call to a person, who approves, edits or rejects it, or responds instead. Raises StepFailed."""
        return self._steps(_proposed, self._call(tool, args, kwargs))

    @overload
    def model(self, fn: Callable[..., Awaitable[T]], /, *args: Any, **kwargs: Any) -> Step[T]: ...
    @overload
    def model(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Step[T]: ...
    def model(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Step[Any]:
        """Calls a model as a step: recorded verbatim, with usage and reasoning, and never called again on replay.
        Raises StepFailed, Rejected if a budget of the contract is spent.

        fn  the function to call, such as `client.messages.create`
        """
        return self._steps(execute_step, model_intent(fn, args, kwargs))

    def stream(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """Calls a model and yields the chunks of its reply. The reply is recorded as a whole; a replay yields it as one
        chunk."""
        return stream(self._execution, model_intent(fn, args, kwargs))

    def fit(
        self, window: Window, messages: Sequence[Any], tools: Sequence[Any] = (), *, system: Any = None
    ) -> Step[Sent]:  # fmt: skip
        """Returns the part of a history that fits the window: decided once, recorded, and the same on replay.

        window    the Window
        messages  the full history, in the provider's form
        tools     the schemas of the tools
        system    the system prompt
        """
        return self._paged(context_window.fit, window, messages, tools, system)

    async def dispatch(self, tools: Toolset, reply: Any, *, window: Window | None = None) -> list[dict[str, Any]]:
        """Executes the tool calls of a model's reply and records each as a decision. Returns the answers as messages.

        tools   the tools that the model may call
        reply   the model's reply, of any provider
        window  a Window, which answers the calls that it can answer itself
        """
        return await dispatch(self, tools, reply, window=window)

    def decided(
        self, question: str, choice: T, *, options: Sequence[Any] | None = None, because: str | None = None,
        by: str = "agent",
    ) -> Step[T]:  # fmt: skip
        """Records a decision with its reason. Returns the choice; on replay, the recorded one.

        question  what was decided
        choice    the chosen option
        options   the options that were available
        by        the decider: "agent", or the name of a model or a rule

            route = await run.decided("Which queue?", "fraud", because="two claims in a week")
        """
        return self._steps(decisions.decided, question, choice, options, because, by)

    def plan(self, stages: Sequence[str]) -> Step[None]:
        """Records the stages of the agent, in order."""
        return self._steps(decisions.plan, tuple(stages))

    def at(self, stage: str) -> Step[None]:
        """Records the agent's current stage."""
        return self._steps(decisions.at, stage)

    def note(self, note: Any) -> Step[None]:
        """Records a note, any value, for readers of the history."""
        return self._steps(decisions.note, note)

    def update(self, /, **changes: Any) -> Step[None]:
        """Changes entries of the context. Raises Rejected if the contract rejects the change."""
        return self._steps(decisions.update, changes)

    def ask(
        self, prompt: str, *, to: str | Sequence[str] = (), timeout: Duration | None = None, default: Any = MISSING,
        options: Sequence[Any] | None = None, returns: Any = Any, need: int = 1, escalate: Escalate = (),
        separate: bool = False,
    ) -> Step[Answer]:  # fmt: skip
        """Asks a person and waits for the answer: approve, reject, edit or respond. Raises WaitExpired at the deadline
        if there is no default.

        prompt    the question
        to        names or roles; by default anyone may answer
        timeout   the deadline
        default   the value of the answer at the deadline
        options   the values to choose from
        returns   the type of a response
        need      the number of people who must approve
        escalate  who is asked after a timeout, and for how long: pairs of names and durations
        separate  whether the people who started the run cannot answer, but by rejecting

            answer = await run.ask("Pay 1,200?", to="finance", timeout="3d")
        """
        return self._steps(questions.ask, prompt, to, timeout, default, options, returns, need, escalate, separate)

    @overload
    def wait(self, name: str, *, timeout: Duration | None = None) -> Step[Any]: ...
    @overload
    def wait(self, name: str, *, timeout: Duration | None = None, default: Any) -> Step[Any]: ...
    @overload
    def wait(self, name: str, *, timeout: Duration | None = None, returns: type[T]) -> Step[T]: ...
    @overload
    def wait(self, name: str, *, timeout: Duration | None = None, default: D, returns: type[T]) -> Step[T | D]: ...
    def wait(
        self, name: str, *, timeout: Duration | None = None, default: Any = MISSING, returns: Any = Any
    ) -> Step[Any]:
        """Waits for a message and returns its body, first in first out. Raises WaitExpired at the timeout if there is
        no default.

        name     the name of the message
        default  the result at the timeout
        returns  the type of the body
        """
        return self._steps(questions.wait, name, timeout, default, returns)

    def remarks(self) -> Step[list[Any]]:
        """Returns the messages from people since the last call; does not wait."""
        return self._steps(questions.remarks)

    def sleep(self, duration: Duration) -> Step[None]:
        """Sleeps for a duration of any length; the run leaves memory meanwhile."""
        return self._steps(questions.sleep, seconds(duration), None)

    def sleep_until(self, moment: datetime) -> Step[None]:
        """Sleeps until a datetime, which must have a time zone."""
        return self._steps(questions.sleep, None, moment)

    @overload
    def spawn(
        self, agent: Agent[None, O], *, id: str | None = None, on_parent_end: OnParentEnd = "cancel",
        priority: int | None = None,
    ) -> Step[Child[O]]: ...  # fmt: skip
    @overload
    def spawn(
        self, agent: Agent[I, O], input: I, *, id: str | None = None, on_parent_end: OnParentEnd = "cancel",
        priority: int | None = None,
    ) -> Step[Child[O]]: ...  # fmt: skip
    def spawn(
        self, agent: AnyAgent, input: Any = None, *, id: str | None = None,  # noqa: A002
        on_parent_end: OnParentEnd = "cancel", priority: int | None = None,
    ) -> Step[Child[Any]]:  # fmt: skip
        """Starts a child run. `await child.result()` waits for its result.

        on_parent_end  when this run ends: "cancel" the child, "abandon" it, or "wait" for it
        """
        return self._steps(children.spawn, self, agent, input, id, on_parent_end, priority)

    def send(self, run: str, name: str, body: Any = None) -> Step[None]:
        """Sends a message to another run, which receives it by `wait`."""
        return self._steps(children.send, run, name, body)

    @overload
    def gather(self, one: Awaitable[A], two: Awaitable[B], /) -> Step[tuple[A, B]]: ...
    @overload
    def gather(self, one: Awaitable[A], two: Awaitable[B], three: Awaitable[D], /) -> Step[tuple[A, B, D]]: ...
    @overload
    def gather(self, *branches: Awaitable[T]) -> Step[tuple[T, ...]]: ...
    @overload
    def gather(self, branches: Iterable[Awaitable[T]], /) -> Step[tuple[T, ...]]: ...
    def gather(self, *branches: Any) -> Step[Any]:
        """Runs branches concurrently and returns their results. A branch that fails stops the others at their next
        step.

        branches  steps or coroutines
        """
        return self._steps(parallel.gather, parallel.spread(branches))

    def first(self, *branches: Awaitable[T]) -> Step[First[T]]:
        """Runs branches concurrently until one is done; the others stop at their next step.

        branches  steps or coroutines
        """
        return self._steps(parallel.first, parallel.spread(branches))

    def renew(self, input: Any = None) -> Step[NoReturn]:  # noqa: A002
        """Closes this log and continues in a new one, from the top. Never returns. For long-lived agents, so that no
        log grows without limit. Context, tags, priority and unread messages carry over."""
        return self._steps(completion.renew, input)

    def _paged(self, do: Callable[..., Coroutine[Any, Any, T]], *args: Any, **kwargs: Any) -> Step[T]:
        return run_step(self._execution, do, *args, **kwargs)

    def _steps(self, do: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> Step[T]:
        """Requests a step, and remembers the line that has to await it."""
        method = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        self._execution.context.refuse_changed()
        step = run_step(self._execution, do, *args)
        self._execution.inert_steps.add(step, f"run.{method.f_code.co_name}(…)", method.f_back or method)
        return step

    def _drawn(self, draw: Callable[[Execution, Branch], T]) -> T:
        return draw(self._execution, self._here())

    def _here(self) -> Branch:
        branch = self._execution.branch_here()
        if asyncio.current_task() is not branch.task:
            raise OutsideBranch(self.id, "a Run was used in a task that Killick did not start")
        self._execution.refuse(branch)
        return branch


def _blocks(method: Callable[Concatenate[Any, P], Step[T]]) -> Callable[Concatenate[Any, P], T]:
    """The same method for a SyncRun, whose `_steps` blocks and returns the result of the step."""
    return cast("Callable[Concatenate[Any, P], T]", method)


class SyncRun(_Common[C]):
    """The run of a plain `def` agent: every method blocks until its step has ended."""

    propose = _blocks(Run.propose)
    model = _blocks(Run.model)
    decided = _blocks(Run.decided)
    plan = _blocks(Run.plan)
    at = _blocks(Run.at)
    note = _blocks(Run.note)
    update = _blocks(Run.update)
    ask = _blocks(Run.ask)
    wait = _blocks(Run.wait)
    remarks = _blocks(Run.remarks)
    sleep = _blocks(Run.sleep)
    sleep_until = _blocks(Run.sleep_until)
    spawn = _blocks(Run.spawn)
    send = _blocks(Run.send)
    fit = _blocks(Run.fit)
    renew = _blocks(Run.renew)

    def call(self, tool: Tool[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls a tool as a step and returns its result. Raises StepFailed, Rejected."""
        arguments, given = self._bind(tool, args, kwargs)
        (ex := self._execution).context.refuse_changed()
        result: T = self._on_loop(call_tool(ex, tool, arguments, given, thread=self._asking()))
        return result

    def stream(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Calls a model and yields the chunks of its reply. The reply is recorded as a whole; a replay yields it as one
        chunk."""
        chunks = stream(self._execution, model_intent(fn, args, kwargs), branch=self._asking())
        try:
            while (chunk := self._on_loop(anext(chunks, END))) is not END:
                yield chunk
        finally:
            # Closed at once if the caller leaves early, so that the next step need not wait for garbage collection.
            if not self._execution.loop.is_closed():
                self._on_loop(chunks.aclose())

    def dispatch(self, tools: Toolset, reply: Any, *, window: Window | None = None) -> list[dict[str, Any]]:
        """Executes the tool calls of a model's reply and records each as a decision. Returns the answers."""
        return dispatch_sync(self, tools, reply, window=window)

    def result(self, child: Child[O]) -> O:
        """Waits for a child's result."""
        result: O = self._steps(children.child_result, child)
        return result

    def gather(self, *branches: Callable[[], T]) -> tuple[T, ...]:
        """Runs branches concurrently, each a function without arguments."""
        return self._steps(parallel.gather, parallel.spread(branches))

    def first(self, *branches: Callable[[], T]) -> First[T]:
        """Runs branches concurrently until one is done; the others stop at their next step."""
        return self._steps(parallel.first, parallel.spread(branches))

    # inside -----------------------------------------------------------------------------------

    def _here(self) -> Branch:
        branch = self._execution.branch_here()
        if threading.get_ident() != branch.thread:
            raise OutsideBranch(self.id, "a Run was used in a thread that Killick did not start")
        return branch

    def _asking(self) -> Branch:
        """The branch whose code is about to request its next step."""
        branch = self._here()
        if (tracer := self._execution.engine.tracer) is not None:
            tracer.called(self._execution, branch.position)
        return branch

    def _steps(self, do: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
        self._execution.context.refuse_changed()
        branch = self._here() if do in _UNNUMBERED else self._asking()
        return self._on_loop(run_step(self._execution, do, *args, branch=branch))

    _paged = _steps

    def _on_loop(self, work: Awaitable[T]) -> T:
        async def settled() -> T:
            return await work

        waiting = settled()
        try:
            return asyncio.run_coroutine_threadsafe(waiting, self._execution.loop).result()
        except BaseException:
            # A closed or closing loop never runs it, so no caller needs to be notified.
            unbegun: tuple[Any, ...] = waiting, work
            for each in unbegun:
                if inspect.iscoroutine(each) and inspect.getcoroutinestate(each) == inspect.CORO_CREATED:
                    each.close()
            raise

    def _drawn(self, draw: Callable[[Execution, Branch], T]) -> T:
        branch = self._here()

        async def drawn() -> T:
            self._execution.refuse(branch)
            return draw(self._execution, branch)

        return self._on_loop(drawn())


def run_of(ex: Execution) -> Run[Any] | SyncRun[Any]:
    """The handle of a run for its agent's code: async agents await its methods, plain ones block in them."""
    return Run(ex) if ex.agent.is_async else SyncRun(ex)
