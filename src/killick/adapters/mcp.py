"""The tools of an MCP server as Killick tools: evaluated, recorded, and reconciled if the server dies during a call.

Decides the fate of a call; the tool's behaviour is the server's.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from contextvars import Context
from typing import Any, Final, Literal, TypeAlias, TypeVar

import anyio
import httpx2
from anyio.abc import ObjectReceiveStream
from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.server.mcpserver import MCPServer
from mcp.types import CONNECTION_CLOSED, INVALID_PARAMS, METHOD_NOT_FOUND, REQUEST_TIMEOUT, CallToolResult, TextContent
from mcp.types import Tool as Offered

from killick.adapters.tool_gate import hinted
from killick.definitions.open_tools import open_tool
from killick.definitions.tools import AnyTool, tool
from killick.errors import DeclarationRefused, KillickError, NotDone
from killick.llm.external import attempt
from killick.llm.toolset import AnyRun, driven, settled

T = TypeVar("T")

Transport: TypeAlias = AbstractAsyncContextManager[Any]
Where: TypeAlias = str | Sequence[str] | StdioServerParameters | MCPServer | Callable[[], Transport]
"""A URL, a command, a command with its environment, a server of this process, or a factory of transports."""

Errors: TypeAlias = Literal["answer", "refused"]

CONNECT_SECONDS: Final = 30.0
CLOSE_SECONDS: Final = 10.0
PAGES_MAX: Final = 100
KEY_META: Final = "killick/key"
"""The `_meta` name under which every call carries its idempotency key, for servers that read it."""
_FORGOTTEN: Final = ("session not found", "session terminated")
"""How Python and TypeScript servers, and the client for silent ones, report a lost session."""
_OUTSIDE: Final = re.compile(r"[^a-zA-Z0-9_-]")
"""Characters that a server allows in a tool name, and a model provider does not."""


class Server:
    """An MCP server and its tools.

        files = Server(["npx", "-y", "@modelcontextprotocol/server-filesystem", "/srv"], prefix="files_")
        bank = Server("https://bank.example/mcp", tools={"pay": {"identity": ["invoice"], "approve": "treasurer"}})

        where     a URL (streamable HTTP), a command (stdio), `StdioServerParameters`, a factory of transports, or an
                  `MCPServer` of this process, as in tests
        prefix    before every name, to distinguish the tools of two servers
        tools     options by the server's tool name, as for `killick.tool`; and `key`, the argument for the idempotency
                  key: it is filled in, and no model sees it
        only      the names of the offered tools; default: all
        hints     whether to trust the server's hints: read-only, idempotent. Without hints, a tool is `at_most_once`
        errors    the meaning of a tool's error. "answer": it is the tool's answer, recorded and sent to the model.
                  "refused": nothing happened; the step fails, or is retried
        client    for `mcp.Client`: `read_timeout_seconds`, `elicitation_callback`, `mode` …

    It connects on first use, in its own thread, and again after the connection is lost.
    """

    def __init__(
        self, where: Where, *, prefix: str = "", tools: Mapping[str, Mapping[str, Any]] | None = None,
        only: Sequence[str] | None = None, hints: bool = True, errors: Errors = "answer",
        connect_seconds: float = CONNECT_SECONDS, **client: Any,
    ) -> None:  # fmt: skip
        self._where = where
        self._prefix = prefix
        self._options = tools or {}
        self._only = only
        self._hints = hints
        self._errors = errors
        self._connect_seconds = connect_seconds
        self._client = client
        self._mutex = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._connecting = asyncio.Lock()
        self._link: _Connection | None = None
        self.name = _display_name(where)

    def __repr__(self) -> str:
        return f"<MCP server {self.name}>"

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection; a started server ends with it."""
        with self._mutex:
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is None or thread is None:
            return
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._drop(self._link), loop).result(CLOSE_SECONDS)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(CLOSE_SECONDS)

    # the tools --------------------------------------------------------------------------------

    def tools(self) -> list[AnyTool]:
        """Returns the server's current tools; waits for the server."""
        return self._declared(self._submit(self._listing()).result())

    async def offered(self, run: AnyRun) -> list[AnyTool]:
        """Returns the server's tools as of the run's first call: the offered tools are recorded with the run, and a
        replay needs no server. For a SyncRun there is `offered_sync`."""

        async def list_tools() -> list[dict[str, Any]]:
            return await asyncio.wrap_future(self._submit(self._listing()))

        listing = tool(effect="reads", name=f"{self._prefix}list_tools")(list_tools)
        return self._declared(await settled(run.call(listing)))

    def offered_sync(self, run: AnyRun) -> list[AnyTool]:
        """The same for a SyncRun."""
        return driven(self.offered(run))

    def _declared(self, listing: Sequence[Mapping[str, Any]]) -> list[AnyTool]:
        offered = [Offered.model_validate(each) for each in listing]
        names = {each.name for each in offered}
        for name in (*self._options, *(self._only or ())):
            if name not in names:
                raise DeclarationRefused(name, f"{self.name} offers no such tool; it has: {', '.join(sorted(names))}")
        return [self._tool(each) for each in offered if self._only is None or each.name in self._only]

    def _tool(self, offered: Offered) -> AnyTool:
        hints = hinted(offered.annotations) if self._hints else {}
        options = {"effect": "at_most_once", **hints, **self._options.get(offered.name, {})}
        key = options.pop("key", None)

        async def call(**arguments: Any) -> Any:
            place, meta = attempt(), dict[str, Any]()
            if place is not None:
                meta[KEY_META] = str(place.key)
                if key is not None:
                    arguments[key] = str(place.key)
            return await asyncio.wrap_future(self._submit(self._called(offered.name, arguments, meta)))

        return open_tool(
            self._prefix + _OUTSIDE.sub("_", offered.name),
            call,
            schema=_without(offered.input_schema, key),
            doc=offered.description or offered.title or "",
            **options,
        )

    # the connection: all of this runs in the thread ----------------------------------------------

    def _submit(self, what: Coroutine[Any, Any, T]) -> Future[T]:
        with self._mutex:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._connecting, self._link = asyncio.Lock(), None
                self._thread = threading.Thread(target=_turn, args=(self._loop,), name=f"mcp {self.name}", daemon=True)
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(what, self._loop)

    async def _listing(self) -> list[dict[str, Any]]:
        link = await self._linked()
        try:
            listed = await link.listed()
        except MCPError as error:
            await self._drop(link)
            raise ConnectionError(f"{self.name} does not say which tools it has: {error}") from error
        return [each.model_dump(mode="json", by_alias=True, exclude_none=True) for each in listed]

    async def _called(self, name: str, arguments: dict[str, Any], meta: dict[str, Any]) -> Any:
        link = await self._linked()
        try:
            result = await link.call(name, arguments, meta)
        except MCPError as error:
            if error.code in (INVALID_PARAMS, METHOD_NOT_FOUND):
                return self._wrong(str(error))
            raise await self._no_answer(link, name, error) from error
        return self._wrong(_text(result)) if result.is_error else _value(result)

    def _wrong(self, text: str) -> str:
        """The server answered with an error."""
        if self._errors == "refused":
            raise NotDone(text)
        return f"error: {text}"

    async def _no_answer(self, link: _Connection, name: str, error: MCPError) -> Exception:
        """Returns the outcome of a call without an answer."""
        if error.message.casefold() in _FORGOTTEN:
            await self._drop(link)
            return NotDone(f"{self.name} has dropped this session; the next call opens a new one")
        if error.code == REQUEST_TIMEOUT:
            return TimeoutError(f"{self.name}: {name} gave no answer in time")
        if error.code != CONNECTION_CLOSED:
            return ConnectionError(f"{self.name}: {name} ended with error {error.code}: {error}")
        cause = await self._drop(link)
        if not link.was_shared and _is_unreached(cause):
            return NotDone(f"{self.name} cannot be reached")
        return ConnectionError(f"{self.name} was lost while it was at {name}")

    async def _linked(self) -> _Connection:
        """Returns the connection; a new one if there is none, or if it was lost."""
        async with self._connecting:
            if self._link is not None and self._link.is_up:
                return self._link
            await self._drop(self._link)
            link = self._link = _Connection(self._where, self._client)
            try:
                await link.up(self._connect_seconds)
            except Exception as error:
                await self._drop(link)
                raise NotDone(f"{self.name} cannot be reached: {_reason(error)}") from error
            return link

    async def _drop(self, link: _Connection | None) -> BaseException | None:
        """Closes a connection; returns the error that had ended it, if any."""
        if link is None:
            return None
        if self._link is link:
            self._link = None
        return await link.down()


def _turn(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


class _Connection:
    """One connection. One task opens, keeps and closes it, because a cancel scope must be left where it was entered."""

    def __init__(self, where: Where, options: Mapping[str, Any]) -> None:
        self.is_up = False
        self.was_shared = False
        """Whether another call ran concurrently with the last one: then it is unknown whose request failed."""
        self._calls = 0
        self._where = where
        self._options = options
        self._over = asyncio.Event()
        self._ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        # Its own context: it outlives the step that first needs it.
        self._task = asyncio.get_running_loop().create_task(self._kept(), context=Context())

    async def up(self, timeout: float) -> None:
        async with asyncio.timeout(timeout):
            await asyncio.shield(self._ready)

    async def down(self) -> BaseException | None:
        """Closes it; returns the error that had ended it, if any."""
        self.is_up = False
        self._over.set()
        if not self._ready.done():
            self._task.cancel()
        done, _ = await asyncio.wait({self._task}, timeout=CLOSE_SECONDS)
        return self._task.exception() if done and not self._task.cancelled() else None

    async def listed(self) -> list[Offered]:
        return await _listed(self._ready.result(), fresh=True)

    async def call(self, name: str, arguments: dict[str, Any], meta: dict[str, Any]) -> CallToolResult:
        self._calls += 1
        self.was_shared = self._calls > 1
        try:
            return await self._ready.result().call_tool(name, arguments, meta=meta)  # type: ignore[arg-type]
        finally:
            self._calls -= 1

    async def _kept(self) -> None:
        try:
            where = self._where
            there = where if isinstance(where, MCPServer) else self._watched(_transport(where))
            async with Client(there, **self._options) as client:
                # The client validates results against the listing. It would list after a call; so list now.
                await _listed(client)
                self.is_up = True
                self._ready.set_result(client)
                await self._over.wait()
        except BaseException as error:
            if not self._ready.done():
                self._ready.set_exception(error)
                self._ready.exception()  # retrieved here: the caller that waited may have given up
            raise
        finally:
            self.is_up = False

    @asynccontextmanager
    async def _watched(self, transport: Transport) -> AsyncIterator[tuple[Any, Any]]:
        async with transport as (read, write):
            yield _WatchedStream(read, self), write


class _WatchedStream(ObjectReceiveStream[Any]):
    """A server's output. Notes that it stopped: a server that died between two calls gets no request."""

    def __init__(self, stream: Any, of: _Connection) -> None:
        self._stream = stream
        self._of = of

    async def receive(self) -> Any:
        try:
            return await self._stream.receive()
        except (anyio.EndOfStream, anyio.ClosedResourceError, anyio.BrokenResourceError):
            self._of.is_up = False
            raise

    async def aclose(self) -> None:
        await self._stream.aclose()

    @property
    def last_context(self) -> Any:
        return getattr(self._stream, "last_context", None)


def _transport(where: str | Sequence[str] | StdioServerParameters | Callable[[], Transport]) -> Transport:
    if isinstance(where, str):
        return streamable_http_client(where)
    if isinstance(where, StdioServerParameters):
        return stdio_client(where)
    if callable(where):
        return where()
    command, *args = where
    return stdio_client(StdioServerParameters(command=command, args=args))


async def _listed(client: Client, *, fresh: bool = False) -> list[Offered]:
    """Returns all pages of the server's tools."""
    found, cursor = list[Offered](), None
    for _ in range(PAGES_MAX):
        page = await client.list_tools(cursor=cursor, cache_mode="refresh" if fresh else "use")
        found += page.tools
        cursor = page.next_cursor
        if cursor is None:
            return found
    raise KillickError(f"the server lists more than {PAGES_MAX} pages of tools; check whether it repeats pages")


# Results ---------------------------------------------------------------------------------------------


def _value(result: CallToolResult) -> Any:
    """Returns an answer for code and models: its data, else its text, else its blocks."""
    data = result.structured_content
    if data is not None:
        # Servers must return an object, so those with a plain value wrap it under this name.
        return data["result"] if isinstance(data, dict) and data.keys() == {"result"} else data
    if all(isinstance(block, TextContent) for block in result.content):
        return _text(result)
    return [block.model_dump(mode="json", by_alias=True, exclude_none=True) for block in result.content]


def _text(result: CallToolResult) -> str:
    return "\n".join(block.text for block in result.content if isinstance(block, TextContent))


def _without(schema: Mapping[str, Any], name: str | None) -> dict[str, Any]:
    """Returns a schema without a parameter that is hidden from models."""
    if name is None:
        return dict(schema)
    properties: Mapping[str, Any] = schema.get("properties", {})
    if name not in properties:
        raise DeclarationRefused(name, f"cannot take the idempotency key; choose one of {', '.join(properties)}")
    kept = {each: part for each, part in properties.items() if each != name}
    return {**schema, "properties": kept, "required": [each for each in schema.get("required", ()) if each != name]}


def _is_unreached(error: BaseException | None) -> bool:
    """Returns whether a connection could not be made: then nothing was sent."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(_is_unreached, error.exceptions))
    return isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout)


def _reason(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__


def _display_name(where: Where) -> str:
    if isinstance(where, str):
        return re.sub(r"//[^/@]*@", "//", where).partition("?")[0]
    if isinstance(where, StdioServerParameters):
        return " ".join([where.command, *where.args])
    if isinstance(where, MCPServer) or callable(where):
        return str(getattr(where, "name", None) or getattr(where, "__name__", "MCP server"))
    return " ".join(where)
