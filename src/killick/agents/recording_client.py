"""Clients of model providers that record their calls as steps inside a run; outside a run they work as usual.

It replaces only the transport of a client: streams, parsing, raw responses and errors stay the client's own. No
provider's package is imported here.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from typing import Any, Final, NamedTuple, TypeVar

from killick.agents.run import Run, SyncRun
from killick.definitions.current import HERE
from killick.definitions.markers import ToolStep
from killick.engine.execution import Branch
from killick.engine.steps.model_reply import join_chunks, wire
from killick.errors import DeclarationRefused, KillickError, Rejected, StepFailed
from killick.llm import external, sse
from killick.llm.external import Host
from killick.llm.sse import Events, encoded, ending, written
from killick.llm.toolset import driven, settled
from killick.model.failure import Failure

C = TypeVar("C")
T = TypeVar("T")

CALLS: Final = (
    "/chat/completions", "/completions", "/responses", "/embeddings", "/moderations", "/images/generations",
    "/messages", "/messages/count_tokens", "/complete", "/invoke", ":rawPredict", ":streamRawPredict",
)  # fmt: skip
"""The path endings of model endpoints. Other requests of a client are not steps."""

_SSE: Final = "text/event-stream"
_JSON: Final = "application/json"
_END: Final[Any] = object()
_KEPT: Final = {"_request_id": ("x-request-id", "request-id"), "_workspace_id": ("anthropic-workspace-id",)}
"""The response headers that clients read, by the name under which they are recorded."""

_PREVENTED: ContextVar[list[KillickError] | None] = ContextVar("killick_durable", default=None)
"""Errors of Killick that prevented a call. They pass through the client, which would otherwise wrap them."""


def durable(client: C) -> C:
    """Returns a client of `openai` or `anthropic`, blocking or async, whose calls inside a run are recorded.

    client  the client, which is not changed

    In agent code a call is a step, as with `run.model`: recorded verbatim, retried by the run's policy, and never
    repeated on replay. Inside a host it is a call of the host. Inside a tool, and outside a run, it works as usual.
    Raises DeclarationRefused for other clients.
    """
    http: Any = getattr(client, "_client", None)
    copy: Any = getattr(client, "copy", None)
    if not callable(copy) or not callable(getattr(http, "send", None)) or not hasattr(client, "request"):
        reason = "is not a client that sends requests; give one of openai's or anthropic's, such as AsyncOpenAI()"
        raise DeclarationRefused(type(client).__name__, reason)
    if getattr(http, "is_killick", False):
        return client
    made: Any = copy(http_client=_recording(http))
    made.__class__ = _durable(made.__class__)
    return made  # type: ignore[no-any-return]


@cache
def _durable(cls: Any) -> Any:
    """The same client; inside a run it leaves retries and errors to the run."""

    async def request(self: Any, cast_to: Any, options: Any, **more: Any) -> Any:
        if _place() is None:
            return await settled(cls.request(self, cast_to, options, **more))
        token = _PREVENTED.set([])
        try:
            once = options.model_copy(update={"max_retries": 0})
            return await settled(cls.request(self, cast_to, once, **more))
        except Exception:
            if errors := _PREVENTED.get():
                raise errors[0] from None
            raise
        finally:
            _PREVENTED.reset(token)

    parts = {"request": _of_kind(request, blocks=not inspect.iscoroutinefunction(cls.request))}
    return type(cls.__name__, (cls,), {**parts, "__module__": cls.__module__, "__doc__": cls.__doc__})


def _recording(http: Any) -> Any:
    """An HTTP client that shares all state with another, and checks before each request whether it is inside a run."""
    kind: Any = http.__class__
    blocks = not inspect.iscoroutinefunction(kind.send)

    async def send(self: Any, request: Any, **options: Any) -> Any:
        call, place = Call.of(request), _place()
        if call is None or place is None:
            return await settled(http.send(request, **options))
        return await _Exchange(http, call, options, blocks=blocks).through(place)

    # The original client closes the shared connections when it is collected, so this one keeps it alive.
    kept: dict[str, Any] = {"__del__": _kept_open, "is_killick": True, "killick_http": http}
    parts = {"send": _of_kind(send, blocks=blocks), **kept}
    made: Any = object.__new__(type(kind.__name__, (kind,), parts))
    made.__dict__ = http.__dict__
    return made


def _of_kind(body: Callable[..., Coroutine[Any, Any, Any]], *, blocks: bool) -> Callable[..., Any]:
    """Wraps a body for a client of one kind. The body of a blocking client never suspends (see `driven`)."""

    async def awaited(*args: Any, **kwargs: Any) -> Any:
        return await body(*args, **kwargs)

    def blocking(*args: Any, **kwargs: Any) -> Any:
        return driven(body(*args, **kwargs))

    return blocking if blocks else awaited


def _kept_open(self: Any) -> None:
    """Closes nothing: the owner closes the shared connections."""


def _place() -> Host | Branch | None:
    """The step that a call belongs to: a host's, an agent's, or none; inside a step it is part of that step."""
    here = HERE.get()
    if isinstance(here, ToolStep):
        return None
    host = external.here()
    return host if host is not None else here if isinstance(here, Branch) else None


# one call -----------------------------------------------------------------------------------------


class Call(NamedTuple):
    """A request to a model."""

    request: Any
    name: str
    body: dict[str, Any]

    @classmethod
    def of(cls, request: Any) -> Call | None:
        """Returns None for requests that are not model calls."""
        path = str(request.url.path)
        ending = next((ending for ending in CALLS if path.endswith(ending)), None)
        if ending is None or request.method != "POST":
            return None
        try:
            body: Any = json.loads(request.content)
        except (ValueError, RuntimeError):  # no JSON, or a body that is read as it is sent
            return None
        if not isinstance(body, dict):
            return None
        return cls(request, ending.strip("/:").replace("/", "."), _named(body))

    @property
    def streams(self) -> bool:
        return self.body.get("stream") is True or self.name == "streamRawPredict"

    @property
    def _model(self) -> str:
        return str(self.body.get("model", ""))

    def events(self, chunk: Any) -> bytes:
        """A chunk in its wire format; a text is the output of an override."""
        each = sse.events(self.name, chunk, self._model) if isinstance(chunk, str) else [wire(chunk)]
        return b"".join(map(written, each))

    @property
    def library(self) -> Any:
        """The HTTP library of the request: the response must be of the same library."""
        return import_module(type(self.request).__module__.partition(".")[0])

    def asking(self, body: Mapping[str, Any]) -> Any:
        """The request to send: unchanged, unless the run uses another model."""
        if body == self.body:
            return self.request
        headers = [(name, value) for name, value in self.request.headers.items() if name != "content-length"]
        content = json.dumps(body, separators=(",", ":")).encode()
        made = type(self.request)(self.request.method, self.request.url, headers=headers, content=content)
        made.extensions = self.request.extensions
        return made

    def called(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """A function with the step's name and provider."""
        fn.__qualname__ = fn.__name__ = self.name
        fn.maker = "anthropic" if "anthropic-version" in self.request.headers else "openai"  # type: ignore[attr-defined]
        return fn

    # answers ----------------------------------------------------------------------------------

    def answered(self, value: Any) -> Any:
        """The response of a recorded reply; a text is the output of an override."""
        headers = {"content-type": _JSON}
        value = sse.reply(self.name, value, self._model) if isinstance(value, str) else wire(value)
        if isinstance(value, dict):
            body = _named(value)
            for name, places in _KEPT.items():
                if isinstance(kept := body.get(name), str):
                    headers |= dict.fromkeys(places, kept)
            value = {name: part for name, part in body.items() if name not in _KEPT}
        return self.library.Response(200, headers=headers, content=encoded(value), request=self.request)

    def streamed(self, stream: Any) -> Any:
        """The response with a streamed body."""
        return self.library.Response(200, headers={"content-type": _SSE}, stream=stream, request=self.request)

    def failed(self, failed: StepFailed) -> Any:
        """The response of a recorded failure, from which the client makes its own error; or that error, raised."""
        failure: Failure = failed.failure
        status = failure.details.get("status")
        if isinstance(failed, Rejected):
            raise _noted(failed)
        if isinstance(status, int):
            recorded = _named(failure.details.get("headers") or {})
            headers = {name: str(value) for name, value in recorded.items() if name not in _LENGTHS}
            body = failure.details.get("body")
            content = body.encode() if isinstance(body, str) else encoded(body)
            kept = {"content-type": _JSON, **headers, "x-should-retry": "false"}
            return self.library.Response(status, headers=kept, content=content, request=self.request)
        if failure.kind == "timeout":
            raise self.library.ReadTimeout(failure.message, request=self.request) from failed
        if any(kind.startswith(("httpx.", "httpx2.")) for kind in failure.types):
            raise self.library.ConnectError(failure.message, request=self.request) from failed
        raise _noted(failed)


_LENGTHS: Final = frozenset({"content-length", "content-encoding", "transfer-encoding", "connection"})


def _noted(error: KillickError) -> KillickError:
    errors = _PREVENTED.get()
    if errors is not None:
        errors.append(error)
    return error


def _named(value: Any) -> dict[str, Any]:
    """A value that is known to be a JSON object."""
    return dict(value)


def _reply(response: Any) -> Any:
    """The reply as it is recorded: the JSON, and the headers that clients read. Errors are raised."""
    response.raise_for_status()
    try:
        reply: Any = response.json()
    except ValueError:
        return response.text
    if not isinstance(reply, dict):
        return reply
    headers = response.headers
    found = {name: headers[place] for name, places in _KEPT.items() for place in places[::-1] if place in headers}
    return {**_named(reply), **found}


# the call as a step -------------------------------------------------------------------------------


class _Exchange:
    """One call of a client, blocking or async: the code of a blocking client never suspends (see `driven`)."""

    def __init__(self, http: Any, call: Call, options: Mapping[str, Any], *, blocks: bool) -> None:
        self._http = http
        self._call = call
        self._options = {**options, "stream": call.streams}
        self._blocks = blocks

    async def through(self, place: Host | Branch) -> Any:
        call = self._call
        try:
            if isinstance(place, Host):
                fn = self._called(self._whole if call.streams else self._asked)
                value = await settled((place.model_sync if self._blocks else place.model)(fn, **call.body))
                return _in_one(call, value) if call.streams else call.answered(value)
            run = self._run(place)
            if not call.streams:
                return call.answered(await settled(run.model(self._called(self._asked), **call.body)))
            chunks = _both_kinds(run.stream(self._called(self._opened), **call.body))
            first = await anext(chunks, _END)
            if isinstance(first, str):
                first += "".join([str(chunk) async for chunk in chunks])
            return call.streamed(self._chunks(chunks, first))
        except StepFailed as failed:
            return call.failed(failed)
        except KillickError as error:
            _noted(error)
            raise

    def _run(self, place: Branch) -> Any:
        """The Run or SyncRun for this kind of client. Refuses an agent of the other kind."""
        if self._blocks and place.thread is None:
            reason = "a blocking client would block every run here; give an async agent the async client"
            raise KillickError(f"{place.execution.run_id}: {reason}")
        if not self._blocks and place.thread is not None:
            raise KillickError(f"{place.execution.run_id}: a def agent cannot await; give it the blocking client")
        return SyncRun(place.execution) if self._blocks else Run(place.execution)

    def _called(self, fn: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
        """The function that the step calls: of this client's kind, under the step's name."""
        return self._call.called(_of_kind(fn, blocks=self._blocks))

    async def _asked(self, **body: Any) -> Any:
        return _reply(await settled(self._http.send(self._call.asking(body), **self._options)))

    async def _opened(self, **body: Any) -> Any:
        response = await settled(self._http.send(self._call.asking(body), **self._options))
        if response.is_error:
            await settled(response.read() if self._blocks else response.aread())
            response.raise_for_status()
        return _without_waiting(self._events(response)) if self._blocks else self._events(response)

    async def _whole(self, **body: Any) -> Any:
        return join_chunks([chunk async for chunk in _both_kinds(await self._opened(**body))])

    async def _events(self, response: Any) -> AsyncGenerator[Any, None]:
        events = Events()
        try:
            async for line in _both_kinds(response.iter_lines() if self._blocks else response.aiter_lines()):
                for event in events.line(line):
                    yield event
            for event in events.rest():
                yield event
        finally:
            await settled(response.close() if self._blocks else response.aclose())

    def _chunks(self, chunks: AsyncGenerator[Any, None], first: Any) -> Any:
        """The body of a response, made of a step's chunks; closing it ends the step with the chunks so far."""
        call, library = self._call, self._call.library

        async def body() -> AsyncGenerator[bytes, None]:
            chunk = last = first
            try:
                while chunk is not _END:
                    last = chunk
                    yield call.events(chunk)
                    chunk = await anext(chunks, _END)
            except StepFailed as failed:
                call.failed(failed)
                raise
            yield ending(last)

        class Awaited(library.AsyncByteStream):  # type: ignore[misc,name-defined]
            def __aiter__(self) -> AsyncIterator[bytes]:
                return body()

            async def aclose(self) -> None:
                await chunks.aclose()

        class Blocking(library.SyncByteStream):  # type: ignore[misc,name-defined]
            def __iter__(self) -> Iterator[bytes]:
                return _without_waiting(body())

            def close(self) -> None:
                driven(chunks.aclose())

        return Blocking() if self._blocks else Awaited()


async def _both_kinds(items: Any) -> AsyncGenerator[Any, None]:
    """The items of an iterator of either kind; it is closed with this one."""
    awaits = hasattr(items, "__aiter__")
    try:
        if awaits:
            async for item in items:
                yield item
        else:
            for item in items:
                yield item
    finally:
        await settled(items.aclose() if awaits else items.close())


def _without_waiting(items: AsyncGenerator[T, None]) -> Iterator[T]:
    """The items of an async generator that never waits."""
    try:
        while (item := driven(settled(anext(items, _END)))) is not _END:
            yield item
    finally:
        driven(items.aclose())


def _in_one(call: Call, value: Any) -> Any:
    """A stream that is read to its end before the caller receives it."""
    chunks: list[Any] = [*value] if isinstance(value, list) else [value]
    body = b"".join(map(call.events, chunks)) + (ending(chunks[-1]) if chunks else b"")
    return call.library.Response(200, headers={"content-type": _SSE}, content=body, request=call.request)
