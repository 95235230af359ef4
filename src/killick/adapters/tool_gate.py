"""Routes a framework's calls through Killick's gate: the host, the tools' options, and retried model calls. Knows no
framework."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from inspect import iscoroutinefunction
from typing import Any, Final, Literal, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

from killick.definitions.current import in_agent
from killick.definitions.open_tools import open_tool
from killick.definitions.policy import Policy
from killick.definitions.tools import AnyTool, AsyncTool, Tool
from killick.engine.approval.call_answer import CallAnswer
from killick.engine.failures import describe, is_transient
from killick.engine.steps.intention import ERROR, is_error
from killick.errors import DeclarationRefused, KillickError, Rejected, RunWaiting, StepFailed
from killick.llm.external import Host, attempt, here
from killick.llm.toolset import settled

T = TypeVar("T")

ToolOptions: TypeAlias = Mapping[str, AnyTool | Mapping[str, Any] | str]
"""Options by tool name: a `killick.Tool`, or the options of `killick.tool`, such as `{"effect": "reads"}`, or the
effect alone."""

Errors: TypeAlias = Literal["answer", "ask"]
"""The result of an error of a tool that runs at most once. "answer": the tool's recorded answer, which the model reads.
"ask": a person says whether the call happened. A timeout and a lost connection are asked about in both cases."""


def hosted(given: Host | None, who: str) -> Host:
    """Returns the given host, or the current one. Refuses without one, because the call would not be recorded."""
    host = given or here()
    if host is None:
        raise DeclarationRefused(
            who,
            "no host is active here; run the framework inside `async with kd.host(…)` or `run.hosting()`, or give one",
        )
    return host


_STOPPED: Final[WeakKeyDictionary[Host, KillickError]] = WeakKeyDictionary()
"""Why a host's tools were stopped, if that is not for a model to read."""


def unstopped(given: Host | None, who: str) -> Host:
    """Returns the host, unless a call through it was stopped: then no further call is made or recorded."""
    host = hosted(given, who)
    if (stopped := _STOPPED.get(host)) is not None:
        raise stopped
    return host


def stop(host: Host, error: KillickError) -> None:
    """Stops a host's further calls, for this reason."""
    _STOPPED[host] = error


@contextmanager
def raising_stop(host: Host) -> Iterator[None]:
    """Raises the error that stopped a host's calls, in place of the framework's own."""
    _STOPPED.pop(host, None)
    try:
        yield
    except Exception as error:
        raise _STOPPED.pop(host, None) or error from None
    if (stopped := _STOPPED.pop(host, None)) is not None:
        raise stopped


class Declared:
    """A framework's tools as Killick's, each declared on its first call. Tools without options run at most once."""

    def __init__(self, options: ToolOptions | None = None) -> None:
        self._options = dict(options or {})
        self._tools: dict[str, AnyTool] = {}

    def by_default(self, options: ToolOptions) -> None:
        """Sets the options of tools that have none."""
        self._options = {**options, **self._options}

    def of(self, name: str, *, schema: Mapping[str, Any] | None = None, doc: str = "", hints: Any = None) -> AnyTool:
        """Returns the tool of that name; the schema names its parameters. Without options it follows an MCP server's
        hints."""
        if name not in self._tools:
            said = self._options.get(name, hinted(hints))
            self._tools[name] = declared(name, said, schema=schema, doc=doc)
        return self._tools[name]


def declared(name: str, said: AnyTool | Mapping[str, Any] | str, **known: Any) -> AnyTool:
    """Returns a tool from its options, over those that the framework knows."""
    if isinstance(said, Tool):
        return said
    options = {"effect": said} if isinstance(said, str) else said
    return open_tool(name, **{**known, **options})


class CallGroup:
    """The concurrent calls of an agent's turn, each in an `async with` block. One that leaves with an error of this
    kind waits here until the others rest: the framework abandons or cancels calls that still run then."""

    def __init__(self, kind: type[BaseException]) -> None:
        self._kind = kind
        self._count = 0
        self._rest = asyncio.Event()

    async def __aenter__(self) -> None:
        self._count += 1
        self._rest.clear()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._count -= 1
        if not self._count:
            self._rest.set()
        if isinstance(error, self._kind):
            await self.rested()

    async def rested(self) -> None:
        """Waits until no call runs."""
        while self._count:
            await self._rest.wait()


def rerouted(of: T, **methods: Callable[..., Any]) -> T:
    """Returns a copy of a framework's object with other methods, which get the object first; a copy as it is."""
    if vars(of).keys() & methods.keys():
        return of
    same = copy.copy(of)
    for name, method in methods.items():
        object.__setattr__(same, name, partial(method, of))
    return same


class Stopped(BaseException):
    """A call could not pass the gate, for a reason that is not for a model to read.

    Frameworks report every `Exception` of a tool to their models, and continue. This is none, so it propagates.
    """


class Waiting(Stopped):
    """Only a person can let a call continue; `waits` says what for. After the answer, run the same again."""

    def __init__(self, waiting: RunWaiting) -> None:
        super().__init__(str(waiting))
        self.run = waiting.run
        self.waits = waiting.waits


class ToolFailed(Exception):
    """A recorded tool failure. Its text may go to a model, and is the same live and from the log."""


class ErrorAnswer(ToolFailed):
    """A tool's error that is its recorded answer. The call may have happened, so no caller may repeat it by itself."""


def hinted(hints: Any) -> dict[str, Any]:
    """Returns the options that an MCP server's annotations of a tool amount to."""
    said: Mapping[str, Any] = hints if isinstance(hints, Mapping) else getattr(hints, "__dict__", {})
    for kind, *by in (("reads", "read_only_hint", "readOnlyHint"), ("idempotent", "idempotent_hint", "idempotentHint")):
        if any(said.get(name) is True for name in by):
            return {"effect": kind}
    return {}


def is_answer(error: Exception, tool: AnyTool, bubbles: tuple[type[BaseException], ...] = ()) -> bool:
    """Returns whether an error in the current attempt can be its answer: there is no other evidence of its outcome."""
    place, policy = attempt(), tool.policy
    if place is None or place.inner is None or place.inner.effect != "at_most_once" or policy.reconcile is not None:
        return False
    return not isinstance(error, (KillickError, *bubbles, *policy.nothing_happened)) and not is_transient(error)


def answering(
    tool: AnyTool, fn: Callable[..., Any], errors: Errors, bubbles: tuple[type[BaseException], ...] = ()
) -> Callable[..., Any]:
    """Returns a framework's function whose errors are recorded as its answers."""
    if errors == "ask":
        return fn

    def answer(error: Exception) -> dict[str, str]:
        if is_answer(error, tool, bubbles):
            return {ERROR: str(describe(error))}
        raise error

    async def awaited(**given: Any) -> Any:
        try:
            return await fn(**given)
        except Exception as error:
            return answer(error)

    def blocking(**given: Any) -> Any:
        try:
            return fn(**given)
        except Exception as error:
            return answer(error)

    return awaited if iscoroutinefunction(fn) else blocking


def edit_note(asked: Mapping[str, Any], used: Mapping[str, Any]) -> str:
    """Returns the text for the model about an approver's edit, after the tool's result; empty if there was none."""
    changed = {name: (asked.get(name), value) for name, value in used.items() if asked.get(name) != value}
    return f"({CallAnswer(kind='edit', changed=changed)} before it was called)" if changed else ""


def answered(outcome: Any) -> Any:
    """Returns a tool's outcome. Raises ErrorAnswer where it is an error."""
    if is_error(outcome):
        raise ErrorAnswer(outcome[ERROR])
    return outcome


_OWN_FORM: Final = "framework:result"


def in_own_form(result: Any) -> dict[str, Any]:
    """Returns a result for recording that is not plain: in its framework's own form, which is JSON."""
    return {_OWN_FORM: result}


def own_form(outcome: Any) -> Any:
    """Returns the own form of a recorded result; None of a plain one, which people can read and supply."""
    return outcome.get(_OWN_FORM) if isinstance(outcome, Mapping) else None


class ToolGate:
    """The tools of a framework that hangs on a tool that raises, or loses what it raises, through a host's gate."""

    def __init__(self, host: Host | None, options: ToolOptions | None, errors: Errors, who: str) -> None:
        self._host = host
        self._declared = Declared(options)
        self._errors: Errors = errors
        self._who = who

    def unstopped(self) -> Host:
        """Returns the host, unless a call through it was stopped."""
        return unstopped(self._host, self._who)

    async def call(
        self, name: str, arguments: Mapping[str, Any], fn: Callable[..., Any], *, schema: Any, doc: str,
        key: str | None = None, bubbles: tuple[type[BaseException], ...] = (),
    ) -> tuple[Any, str | None]:  # fmt: skip
        """Returns a call's outcome, or the text of its error for the model. An error that is for no model stops the
        host's further calls."""
        host = None
        try:
            host, tool = hosted(self._host, self._who), self._declared.of(name, schema=schema, doc=doc)
            return await called(host, tool, arguments, fn, errors=self._errors, key=key, bubbles=bubbles), None
        except (Rejected, ToolFailed) as failed:
            return None, str(failed)
        except KillickError as error:
            if host is not None:
                stop(host, error)
            return None, str(error)


async def called(
    host: Host, tool: AnyTool, arguments: Mapping[str, Any], fn: Callable[..., Any] | None, *, errors: Errors,
    key: str | None = None, bubbles: tuple[type[BaseException], ...] = (), blocking: bool = False,
) -> Any:  # fmt: skip
    """Calls a framework's function, or else the tool's own, as a step. Raises ToolFailed, with the text for the model,
    where it failed. With `blocking` the coroutine never waits: `driven` runs it in code without a loop."""
    own = None if fn is None else answering(tool, fn, errors, bubbles)
    call = host.call_sync if blocking else host.call
    try:
        return answered(await settled(call(tool, arguments, key=key, fn=own, bubbles=bubbles)))
    except Rejected:
        raise
    except StepFailed as failed:
        raise ToolFailed(str(failed.failure)) from failed


class CallTracker:
    """A function under a step's name, and whether it was called: a recorded result comes without a call."""

    def __init__(self, name: str, fn: Callable[..., Any]) -> None:
        self.was_called = False

        async def awaited(**given: Any) -> Any:
            self.was_called = True
            return await fn(**given)

        def blocking(**given: Any) -> Any:
            self.was_called = True
            return fn(**given)

        self.fn: Callable[..., Any] = awaited if iscoroutinefunction(fn) else blocking
        self.fn.__qualname__ = self.fn.__name__ = name


async def asked(
    host: Host, who: str, fn: Callable[[], Any], /, *, write: Callable[[Any], Any] = lambda reply: reply,
    key: Callable[[], str] | None = None, policy: Policy | None = None, blocking: bool = False, **request: Any,
) -> Any:  # fmt: skip
    """Calls a model, or returns its recorded reply. A recorded failure is not final: the nth call is another step.

    who        the step's name, such as the client's own
    write      converts a reply to the recorded value
    key        returns the key of each try, if the framework numbers its calls
    policy     the step's, in place of that of models
    blocking   whether `fn` blocks. Then the coroutine never waits: `driven` runs it in code without a loop
    """

    async def awaited(**_: Any) -> Any:
        return write(await fn())

    def blocked(**_: Any) -> Any:
        return write(fn())

    call = host.model_sync if blocking else host.model
    while True:
        tracked = CallTracker(who, blocked if blocking else awaited)
        model = tracked.fn if policy is None else AsyncTool[..., Any](tracked.fn, who, policy)
        try:
            return await settled(call(model, key=None if key is None else key(), **request))
        except StepFailed as failed:
            if type(failed) is not StepFailed or (in_agent() and key is None):
                # A rejection by rules or people stays one. Re-executed agent code must see the same error.
                raise
            if tracked.was_called:
                # Frameworks handle the errors of their models' clients themselves.
                raise failed.__cause__ or failed  # noqa: B904 - its own cause stays


class _StreamInterrupted(Exception):
    """A stream broke off. Its parts were already passed on, so it is not retried."""


async def streamed(
    host: Host, who: str, begin: Callable[[], AsyncIterable[T] | Awaitable[AsyncIterable[T]]], /, *,
    write: Callable[[list[T]], Any], read: Callable[[Any], Iterable[T]], is_early: Callable[[T], bool] | None = None,
    **request: Any,
) -> AsyncGenerator[T, None]:  # fmt: skip
    """Streams a model's reply in parts, and records it once complete; or returns the recorded one. `request` is that of
    `asked`.

    write      converts all parts to the recorded value; `read` converts back
    is_early   which parts are passed on as they arrive; then `read` gives the others, once they are recorded
    """
    coming: asyncio.Queue[tuple[T] | None] = asyncio.Queue()

    async def listen() -> list[T]:
        parts: list[T] = []
        try:
            async for part in await settled(begin()):
                parts.append(part)
                if is_early is None or is_early(part):
                    coming.put_nowait((part,))
        except Exception as error:
            if parts:
                raise _StreamInterrupted from error
            raise
        return parts

    asking = asyncio.ensure_future(asked(host, who, listen, write=write, **request))
    asking.add_done_callback(lambda _: coming.put_nowait(None))
    was_heard = False
    try:
        while (part := await coming.get()) is not None:
            was_heard = True
            yield part[0]
        reply = await asking
    except _StreamInterrupted as broke_off:
        raise broke_off.__cause__ or broke_off from None
    finally:
        asking.cancel()
    for again in () if was_heard and is_early is None else read(reply):
        yield again
