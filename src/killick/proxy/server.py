"""Serves the proxy: binds the address, reports it, and stops on request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Final

import uvicorn

from killick.errors import AccessRefused
from killick.proxy.app import Proxy

if TYPE_CHECKING:
    from killick.client.client import Client

DRAIN_SECONDS: Final = 10
"""How long running calls may take to finish on stop."""


class _Server(uvicorn.Server):
    """Leaves signals to the caller."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    def stop(self) -> None:
        """Drains running calls; on a second request, aborts them."""
        self.force_exit = self.should_exit
        self.should_exit = True


async def serve(
    client: Client,
    upstream: str,
    *,
    host: str = "127.0.0.1",
    port: int = 8787,
    ready: Callable[[str], None] = lambda url: None,
    **options: Any,
) -> None:
    """Serves until SIGTERM or SIGINT; calls `ready` with the address once it accepts connections."""
    proxy = Proxy(client, upstream, **options)
    bound = _bound(host, port)
    # A reply truncated upstream stays unfinished, which the server would report as an error of the app.
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    config = uvicorn.Config(
        proxy,
        ws="none",
        loop="asyncio",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=DRAIN_SECONDS,
    )
    server = _Server(config)
    for each in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(ValueError, RuntimeError):  # only the main thread receives signals
            asyncio.get_running_loop().add_signal_handler(each, server.stop)
    announcing = asyncio.ensure_future(_call_when_started(server, bound, ready))
    try:
        await server.serve([bound])
    finally:
        announcing.cancel()
        bound.close()


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        bound = socket.create_server((host, port), family=family, backlog=2_048)
        # Connections inherit it; without it a small response waits for the client's acknowledgement of its head.
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return bound
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        message = f"cannot be served on ({reason}); name another --host or --port"
        raise AccessRefused(f"{host}:{port}", message) from None


async def _call_when_started(server: _Server, bound: socket.socket, ready: Callable[[str], None]) -> None:
    while not server.started:
        await asyncio.sleep(0.01)
    host, port = bound.getsockname()[:2]
    ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")
