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
from importlib.util import find_spec
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

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
HEAD_BYTES_MAX: Final = 65_536
CONNECTIONS_MAX: Final = 800
"""The maximum number of connections; another one gets a 503."""
DRAIN_SECONDS: Final = 5
"""How long requests may take to finish when the server stops. Streams are ended at once."""

NICE: Final = 5
SWITCH_SECONDS: Final = 0.001

_FULL: Final = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\ncontent-length: 0\r\n\r\n"


# slow heads ---------------------------------------------------------------------------------------


class _HeadTimeout:
    """Closes a connection that sends no complete head in time, or too long a one.

    Wraps uvicorn's protocol, which waits for the head of a request without a limit.
    """

    head_seconds: float = HEAD_SECONDS
    connections_max: int = CONNECTIONS_MAX
    address_max: int = CONNECTIONS_MAX // 2
    """So that one machine with idle connections does not keep the others out."""
    _timer: asyncio.TimerHandle | None = None
    _head_bytes: int = 0

    def connection_made(self: Any, transport: asyncio.Transport) -> None:
        super().connection_made(transport)  # type: ignore[misc]
        same = sum(each.client is not None and each.client[:1] == self.client[:1] for each in self.connections)
        if len(self.connections) > self.connections_max or same > self.address_max:
            transport.write(_FULL)
            transport.close()
            return
        self._start_timer()

    def data_received(self: Any, data: bytes) -> None:
        super().data_received(data)  # type: ignore[misc]
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()
            return
        self._head_bytes += len(data)
        if self._head_bytes > HEAD_BYTES_MAX:
            self.transport.close()
        self._start_timer()

    def connection_lost(self: Any, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)  # type: ignore[misc]

    def _start_timer(self: Any) -> None:
        if self._timer is None and not self.transport.is_closing():
            # Not by `close`, which would wait for clients that do not read the rest of their response.
            self._timer = self.loop.call_later(self.head_seconds, self.transport.abort)

    def _stop_timer(self) -> None:
        self._head_bytes = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _protocol() -> type[asyncio.Protocol]:
    """The protocol that requests are read by: the fast one, where it is installed."""
    kind: Any = H11Protocol
    if find_spec("httptools") is not None:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

        kind = HttpToolsProtocol
    return type("Hurried", (_HeadTimeout, kind), {})


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
    worker: bool = False,
    ready: Callable[[str, str | None], None] = lambda url, link: None,
    renewed: Callable[[str], None] = lambda link: None,
) -> None:
    """Serve until SIGTERM or SIGINT; `ready` is called with the URL and the sign-in link once it accepts requests.

    renewed     is called with the next link when one was used: each signs in once
    host_names  further names that a server without tokens answers to
    redact      the names of fields whose values are not shown
    worker      also advance runs that are due, here
    """
    access = access_at(client, host, host_names=host_names)
    guard = asgi(client, access=access, redact=redact, webhooks=webhooks, limits=limits)
    bound = bind(host, port)
    server = _Server(guard, http=_protocol(), timeout_graceful_shutdown=DRAIN_SECONDS)
    server.guard = guard
    at_work = client.worker() if worker else None
    if not worker:
        _lower_priority()

    def request_stop() -> None:
        if server.should_exit and at_work is not None:
            at_work.stop()
        server.stop()

    stop_on_signals(request_stop)
    url = f"{url_of(bound)}/"

    if isinstance(access, OwnerAccess):
        access.on_link_used = lambda: renewed(access.link(url) or url)

    def announce() -> None:
        ready(url, access.link(url))
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
