"""A framework's calls at Killick's gate: which host they go through, what people said of each tool, and how a model is
asked until it has answered. Knows no framework."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeAlias, TypeVar

from killick.definitions.current import in_agent
from killick.definitions.open_tools import open_tool
from killick.definitions.tools import AnyTool, Tool
from killick.errors import DeclarationRefused, KillickError, RunWaiting, StepFailed
from killick.llm.external import Host, here

T = TypeVar("T")

ToolOptions: TypeAlias = Mapping[str, AnyTool | Mapping[str, Any]]
"""What people say of tools, by name: a `killick.Tool`, or the options of `killick.tool`, such as `{"effect":
"reads"}`."""


def hosted(given: Host | None, who: str) -> Host:
    """The host that was given, or the one in whose code we are. Without one nothing runs: it would not be on record."""
    host = given or here()
    if host is None:
        raise DeclarationRefused(
            who,
            "there is no host here; run the framework inside `async with kd.host(…)` or `run.hosting()`, or give one",
        )
    return host


class Declared:
    """The tools of a framework as Killick's, each declared when it is first called. What nobody named is at most
    once."""

    def __init__(self, options: ToolOptions | None = None) -> None:
        self._options = dict(options or {})
        self._tools: dict[str, AnyTool] = {}

    def of(self, name: str, *, schema: Mapping[str, Any] | None = None, doc: str = "") -> AnyTool:
        """The tool of that name; the schema says what its parameters are called."""
        if name not in self._tools:
            said = self._options.get(name, {})
            self._tools[name] = said if isinstance(said, Tool) else open_tool(name, schema=schema, doc=doc, **said)
        return self._tools[name]


class Stopped(BaseException):
    """A call could not pass the gate, which is not for a model to hear.

    Frameworks tell their models of every `Exception` of a tool, and go on. This is none, so it comes out of them.
    """


class Waiting(Stopped):
    """Only a person can let a call go on; `waits` says what for. Once they answered, run the same again."""

    def __init__(self, waiting: RunWaiting) -> None:
        super().__init__(str(waiting))
        self.run = waiting.run
        self.waits = waiting.waits


class ToolFailed(Exception):
    """A tool failed, which is on record. The text is fit to go to a model, the same now and from the record."""


def came_to_nothing(error: KillickError) -> BaseException:
    """What to raise in a framework's tool for an error of the gate, other than a rejection."""
    if isinstance(error, StepFailed):
        return ToolFailed(str(error.failure))
    return Waiting(error) if isinstance(error, RunWaiting) else Stopped(str(error))


async def asked(host: Host, who: str, fn: Callable[..., Awaitable[Any]], /, **request: Any) -> Any:
    """Ask a model, or have what it said. A failure on record is not its last word: the nth asking is another step.

    who   what the step is called, such as the client's own name for it
    """
    while True:
        was_asked = False

        async def asking(**given: Any) -> Any:
            nonlocal was_asked
            was_asked = True
            return await fn(**given)

        asking.__qualname__ = who
        try:
            return await host.model(asking, **request)
        except StepFailed as failed:
            _raise_if_new(failed, was_asked)


def asked_sync(host: Host, who: str, fn: Callable[..., Any], /, **request: Any) -> Any:
    """The same, for code that blocks."""
    while True:
        was_asked = False

        def asking(**given: Any) -> Any:
            nonlocal was_asked
            was_asked = True
            return fn(**given)

        asking.__qualname__ = who
        try:
            return host.model_sync(asking, **request)
        except StepFailed as failed:
            _raise_if_new(failed, was_asked)


class _BrokeOff(Exception):
    """A stream ended before its end. What was heard cannot be taken back, so it is not tried again behind it."""


async def streamed(
    host: Host,
    who: str,
    begin: Callable[[], Awaitable[AsyncIterable[T]]],
    /,
    *,
    write: Callable[[list[T]], Any],
    read: Callable[[Any], Iterable[T]],
    **request: Any,
) -> AsyncIterator[T]:
    """Ask a model whose reply comes in parts: as they are said, and on record once it is whole; or from the record.

    write   all parts as the value that goes on record; `read` makes parts of it
    """
    coming: asyncio.Queue[tuple[T] | None] = asyncio.Queue()

    async def listen(**_: Any) -> Any:
        parts: list[T] = []
        try:
            async for part in await begin():
                parts.append(part)
                coming.put_nowait((part,))
        except Exception as error:
            if parts:
                raise _BrokeOff from error
            raise
        return write(parts)

    asking = asyncio.ensure_future(asked(host, who, listen, **request))
    asking.add_done_callback(lambda _: coming.put_nowait(None))
    was_heard = False
    try:
        while (part := await coming.get()) is not None:
            was_heard = True
            yield part[0]
        reply = await asking
    except _BrokeOff as broke_off:
        raise broke_off.__cause__ or broke_off from None
    finally:
        asking.cancel()
    for again in () if was_heard else read(reply):
        yield again


def _raise_if_new(failed: StepFailed, was_asked: bool) -> None:
    if in_agent() or type(failed) is not StepFailed:
        # An agent's code runs again from the top, and has to see what it saw; a no of rules or people stays one.
        raise failed
    if was_asked:
        # Frameworks know the errors of their models' clients, and have their own ways with them.
        raise failed.__cause__ or failed
