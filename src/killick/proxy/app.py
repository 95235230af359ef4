"""The proxy as an ASGI app: which calls are recorded; all others pass unrecorded.

Credentials go upstream in their headers, and are not stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import msgspec

from killick.browser_guard import LOCAL_NAMES, Refusal, refusal
from killick.errors import AccessRefused, KillickError, ValueRefused
from killick.logger import get_logger
from killick.proxy.anthropic_messages import Messages
from killick.proxy.conversation_match import Digests, digests_of
from killick.proxy.conversation_registry import Conversations
from killick.proxy.credentials import credentials_digest
from killick.proxy.exchange import Caller, ProxyRequest, Send, relay
from killick.proxy.openai_chat import Chat
from killick.proxy.openai_responses import Responses
from killick.proxy.upstream import RUN_HEADER, Headers, Upstream
from killick.proxy.wire import Wire, is_map

if TYPE_CHECKING:
    from killick.client.client import Client

logger: Final = get_logger("killick.proxy")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

AGENT: Final = "proxy"
BODY_BYTES_MAX: Final = 64 << 20
"""Larger requests pass unread."""

TIMEOUT_SECONDS: Final = 600.0

WIRES: Final[dict[str, Wire]] = {"/chat/completions": Chat(), "/responses": Responses(), "/v1/messages": Messages()}
"""The recorded calls, by path suffix: providers use many prefixes."""

_INFLATED: Final = {b"gzip": 31, b"deflate": 15}


class ClientGone(Exception):
    """The client disconnected."""


class Proxy:
    """One provider as an ASGI app."""

    def __init__(
        self,
        client: Client,
        upstream: str,
        *,
        agent: str = AGENT,
        body_bytes_max: int = BODY_BYTES_MAX,
        timeout_seconds: float = TIMEOUT_SECONDS,
        host_names: Iterable[str] = (),
    ) -> None:
        self._names = LOCAL_NAMES | {name.lower() for name in host_names}
        self.upstream = Upstream(upstream, timeout_seconds=timeout_seconds)
        self.conversations = Conversations(client, agent=agent)
        self._body_bytes_max = body_bytes_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._served(scope, receive, Caller(send))
        else:
            await send({"type": "websocket.close", "code": 1003})

    async def _live(self, receive: Receive, send: Send) -> None:
        resting: asyncio.Task[None] | None = None
        while True:
            kind = (await receive())["type"]
            if kind == "lifespan.startup":
                resting = asyncio.create_task(self.conversations.rest())
            else:
                if resting is not None:
                    resting.cancel()
                await self.close()
            await send({"type": f"{kind}.complete"})
            if kind == "lifespan.shutdown":
                return

    async def close(self) -> None:
        """Closes the conversations and the connections."""
        await self.conversations.close()
        await self.upstream.close()

    # one request --------------------------------------------------------------------------------

    async def _served(self, scope: Scope, receive: Receive, caller: Caller) -> None:
        if (refused := self._refused(scope)) is not None:
            await caller.refuse(_wire_like(scope), *refused)
            return
        wire = _wire(scope)
        body = _Body(receive)
        content: bytes | AsyncIterator[bytes]
        try:
            if wire is not None and scope["method"] == "POST":
                content = await body.whole(self._body_bytes_max)
            else:
                wire, content = None, body.none() if not _has_body(scope["headers"]) else body.rest()
        except ClientGone:
            return
        work = asyncio.create_task(self._answered(scope, wire, content, caller))
        leaving = asyncio.create_task(body.gone())
        try:
            await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, leaving):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError, ClientGone):
                await work

    def _refused(self, scope: Scope) -> tuple[int, str, str] | None:
        """Returns why a page of another site may have sent this, or why the path is none of the provider's."""
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get("host", "")
        found = refusal(headers, self._names | _addresses(host))
        origin: str = headers.get("origin", f"http://{host}")
        if found is None and origin.partition("://")[2] != host:
            found = Refusal(403, "cross_site", "another site's page asked for this; a program sends no Origin")
        if found is not None:
            return found.status, "permission_error", f"killick proxy: {found.text}"
        if {".", ".."} & set(re.split(r"[/\\]", unquote(scope["path"]))):
            return 400, "invalid_request_error", "killick proxy: the path has dot segments; write it without them"
        return None

    async def _answered(self, scope: Scope, wire: Wire | None, content: Any, caller: Caller) -> None:
        headers: Headers = scope["headers"]
        path = scope.get("raw_path") or scope["path"].encode()
        url = self.upstream.at(path.partition(b"?")[0], scope["query_string"])
        found = None if wire is None or not isinstance(content, bytes) else _read(wire, headers, content)
        if wire is None or found is None:
            content = content or None
            await relay(self.upstream, scope["method"], url, headers, content, caller, wire or _wire_like(scope))
            return
        name = next((value.decode("latin-1") for key, value in headers if key.lower() == RUN_HEADER), None)
        asked, hashes = found
        calling = ProxyRequest(
            self.upstream, wire, asked, hashes, url=url, headers=headers, content=content, caller=caller
        )  # fmt: skip
        origin = {"shape": wire.shape, "upstream": str(self.upstream.url), "model": asked.get("model")}
        try:
            async with self.conversations.conversation_for(wire, hashes, name=name, origin=origin) as conversation:
                await calling.go(conversation)
        except Exception as error:
            # If the proxy itself fails, the agent must continue as without it.
            expected = isinstance(error, KillickError)
            if caller.started:
                logger.warning("a reply is not on record: %s", error, exc_info=not expected)
            elif isinstance(error, AccessRefused | ValueRefused) and name is not None:
                await caller.refuse(wire, 400, "invalid_request_error", f"killick proxy: {error}")
            else:
                logger.warning("a call is not recorded: %s", error, exc_info=not expected)
                await relay(self.upstream, "POST", url, headers, content, caller, wire)


def _addresses(host: str) -> set[str]:
    """Returns the IP address that a Host is, if it is one: a page can point names here, and no addresses."""
    address = re.sub(r":\d*$", "", host)
    with contextlib.suppress(ValueError):
        ip_address(address.strip("[]"))
        return {address.lower()}
    return set()


def _wire(scope: Scope) -> Wire | None:
    path = scope["path"].rstrip("/")
    return next((wire for end, wire in WIRES.items() if path.endswith(end)), None)


def _wire_like(scope: Scope) -> Wire:
    """Returns the error format for a client of this path."""
    anthropic = any(name.lower() == b"anthropic-version" for name, _ in scope["headers"])
    return WIRES["/v1/messages" if anthropic else "/chat/completions"]


def _read(wire: Wire, headers: Headers, content: bytes) -> tuple[dict[str, Any], Digests] | None:
    """Parses a body; None if it is not understood or too deep, so that it passes unchanged."""
    coding = next((value.strip().lower() for key, value in headers if key.lower() == b"content-encoding"), b"identity")
    try:
        if coding != b"identity":
            unpacking = zlib.decompressobj(_INFLATED[coding])
            content = unpacking.decompress(content, BODY_BYTES_MAX)
            if unpacking.unconsumed_tail:
                return None
        body: Any = msgspec.json.decode(content)
        if not is_map(body):
            return None
        return body, digests_of(wire.messages(body), wire.shape, credentials_digest(headers))
    except (KeyError, zlib.error, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _has_body(headers: Headers) -> bool:
    return any(
        name.lower() == b"transfer-encoding" or (name.lower() == b"content-length" and value.strip() != b"0")
        for name, value in headers
    )


class _Body:
    """A client's body, and its connection state."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._over = asyncio.Event()

    def none(self) -> bytes:
        """An empty body."""
        self._over.set()
        return b""

    async def whole(self, bytes_max: int) -> bytes | AsyncIterator[bytes]:
        """Returns the whole body; if it is too large, passes it on as a stream."""
        parts: list[bytes] = []
        size = 0
        async for part in self.rest():
            parts.append(part)
            size += len(part)
            if size > bytes_max:
                return self._after(parts)
        return b"".join(parts)

    async def _after(self, parts: list[bytes]) -> AsyncIterator[bytes]:
        for part in parts:
            yield part
        async for part in self.rest():
            yield part

    async def rest(self) -> AsyncIterator[bytes]:
        """Yields the rest of the body."""
        while not self._over.is_set():
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            if not message.get("more_body", False):
                self._over.set()
            if part := message.get("body", b""):
                yield part

    async def gone(self) -> None:
        """Returns when the client disconnected after its request."""
        await self._over.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass
