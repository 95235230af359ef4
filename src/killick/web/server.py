"""Serves the app: binds the address, requires tokens off loopback, closes slow connections, and stops on a signal.

An address that other machines can reach needs tokens. Of a request only its writer and its path are logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from killick.errors import AccessRefused, StoreGone
from killick.http_server import HttpServer, bind, stop_on_signals, url_of
from killick.web.app import asgi
from killick.web.auth.access import OwnerAccess, TokenAccess
from killick.web.middleware import Guard, Limits
from killick.web.render import compile_templates
from killick.workers.tokens import Tokens

if TYPE_CHECKING:
    from killick.client.client import Client

HOST: Final = "127.0.0.1"
PORT: Final = 8300

HEAD_SECONDS: Final = 10.0
"""Within which the head of a request has to be there, from its first byte or from when the connection was made."""
FRAMING_BYTES_MAX: Final = 65_536
"""The maximum length of a head, and of what frames the content of a chunked body."""
SLICE_BYTES: Final = 4_096
"""How many bytes are parsed at once."""
PIPELINED_MAX: Final = 100
"""How many requests of a connection may wait for the response before theirs."""
CONNECTIONS_MAX: Final = 800
"""The maximum number of connections; another one gets a 503."""
DRAIN_SECONDS: Final = 5
"""How long requests may take to finish when the server stops. Streams are ended at once."""

NICE: Final = 5
SWITCH_SECONDS: Final = 0.001


# connections --------------------------------------------------------------------------------------


class Protocol(HttpToolsProtocol):
    """Bounds what a connection sends, before the app has read it: in connections, seconds, bytes and requests.

    Bytes are counted as they arrive, with their framing: of a head all of them, of a chunked body its chunk sizes,
    extensions and trailers. They are parsed in slices, so that no read of the socket occupies the loop.
    """

    head_seconds: float = HEAD_SECONDS
    connections_max: int = CONNECTIONS_MAX
    address_max: int = CONNECTIONS_MAX // 2
    """So that one machine with idle connections does not keep the others out."""
    _timer: asyncio.TimerHandle | None = None
    _framing_bytes: int = 0
    """Of the current head, or of the current body without its content."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        peers = [each.client[0] for each in self.connections if isinstance(each, Protocol) and each.client]
        same = self.client is not None and peers.count(self.client[0])
        if len(self.connections) > self.connections_max or same > self.address_max:
            transport.write(_refusal("503 Service Unavailable", "retry-after: 1"))
            transport.close()
            return
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), SLICE_BYTES):
            part = data[start : start + SLICE_BYTES]
            self._framing_bytes += len(part)
            if self._framing_bytes > FRAMING_BYTES_MAX or len(self.pipeline) > PIPELINED_MAX:
                self._refuse()
            else:
                super().data_received(part)
            if self.transport.is_closing():
                return
        if self._is_answering:
            self._stop_timer()
        else:
            self._start_timer()

    def on_message_begin(self) -> None:
        self._framing_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._framing_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._framing_bytes -= len(body)
        super().on_body(body)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    @property
    def _is_answering(self) -> bool:
        cycle = cast("RequestResponseCycle | None", self.cycle)  # None before the first request
        return cycle is not None and not cycle.response_complete

    def _refuse(self) -> None:
        """Close the connection; say why where nothing of a response was sent."""
        if not self._is_answering:
            self.transport.write(_refusal("431 Request Header Fields Too Large"))
        elif self.cycle.more_body and not self.cycle.response_started:
            self.cycle.disconnected = True
            self.transport.write(_refusal("413 Content Too Large"))
        self.transport.close()

    def _start_timer(self) -> None:
        if self._timer is None and not self.transport.is_closing():
            # Not by `close`, which would wait for clients that do not read the rest of their response.
            self._timer = self.loop.call_later(self.head_seconds, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _refusal(status: str, *headers: str) -> bytes:
    lines = (f"HTTP/1.1 {status}", "connection: close", "content-length: 0", *headers)
    return "\r\n".join((*lines, "", "")).encode()


# the address --------------------------------------------------------------------------------------


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address. Resolves its name."""
    try:
        found = {str(each[4][0]) for each in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return bool(found) and all(ip_address(each.partition("%")[0]).is_loopback for each in found)


def access_at(client: Client, host: str, *, host_names: Iterable[str] = ()) -> TokenAccess:
    """How people are known at an address; AccessRefused where that would be everybody."""
    if is_loopback(host):
        return OwnerAccess(client, host_names=host_names)
    now = client.runtime.clock.now_us()
    if not any(token.holds(now) for token in Tokens(client.runtime.engine).all().values()):
        why = "others can reach this address, and the store has no token; make one first: `killick token create NAME`"
        raise AccessRefused(host, why)
    return TokenAccess(client)


# serving ------------------------------------------------------------------------------------------


class _Server(HttpServer):
    """Ends streams when it stops."""

    guard: Guard

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.guard.close()
        await super().shutdown(sockets)


async def serve(
    client: Client,
    *,
    host: str = HOST,
    port: int = PORT,
    host_names: Iterable[str] = (),
    redact: Sequence[str] = (),
    webhooks: Mapping[str, Any] | None = None,
    limits: Limits | None = None,
    trusted_proxies: Iterable[str] = (),
    access_log: str | Path | None = None,
    worker: bool = False,
    ready: Callable[[str, str, str | None], None] = lambda url, pages, link: None,
    renewed: Callable[[str], None] = lambda link: None,
) -> None:
    """Serve until SIGTERM or SIGINT; `ready` is called once it accepts requests.

    ready       takes the URL, that for browsers, and the sign-in link, if there is one
    renewed     is called with the next link when one was used: each signs in once
    host_names  further names that a server without tokens answers to
    redact      the names of fields whose values are not shown
    trusted_proxies  the addresses of proxies whose forwarded headers name the client
    access_log  the file that gets a line for each request
    worker      also advance runs that are due, here
    """
    access = access_at(client, host, host_names=host_names)
    guard = asgi(client, access=access, redact=redact, webhooks=webhooks, limits=limits, access_log=access_log)
    bound = bind(host, port)
    server = _Server(
        guard, http=Protocol, timeout_graceful_shutdown=DRAIN_SECONDS, forwarded_allow_ips=list(trusted_proxies)
    )
    server.guard = guard
    at_work = client.worker() if worker else None
    if not worker:
        _lower_priority()

    def request_stop() -> None:
        if server.should_exit and at_work is not None:
            at_work.stop()
        server.stop()

    stop_on_signals(request_stop)
    url = pages = f"{url_of(bound)}/"
    if is_loopback(host):
        pages = f"http://{access.use_page_host()}:{bound.getsockname()[1]}/"

    if isinstance(access, OwnerAccess):
        access.on_link_used = lambda: renewed(access.link(pages) or pages)

    def announce() -> None:
        ready(url, pages, access.link(pages))
        asyncio.get_running_loop().run_in_executor(None, compile_templates)

    with bound, _stopping_without(client, server):
        async with at_work or contextlib.nullcontext():
            await server.run_on(bound, announce)


@contextlib.contextmanager
def _stopping_without(client: Client, server: HttpServer) -> Generator[None]:
    """Stops a server whose store is a file that was deleted or replaced, and raises that at the end."""
    store, loop, gone = client.runtime.store, asyncio.get_running_loop(), list[StoreGone]()

    def look(run: str) -> None:
        if not run and not gone and store.proves_life:
            try:
                store.outbox_end()
            except StoreGone as error:
                gone.append(error)
                loop.call_soon_threadsafe(server.stop)

    stop_watching = store.watch(look)
    try:
        yield
    finally:
        stop_watching()
    if gone:
        raise gone[0]


def _lower_priority() -> None:
    """Lowers the priority of the server below that of workers, on a machine with few cores."""
    with contextlib.suppress(OSError):
        os.nice(NICE)
    # Every question to SQLite lets other threads run, and is not to wait long for its turn after it.
    sys.setswitchinterval(SWITCH_SECONDS)
