"""Serves an ASGI app on one address until a signal. Knows no routes and no clients."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Generator
from typing import Any

import uvicorn

from killick.errors import AccessRefused


def bind(host: str, port: int) -> socket.socket:
    """The socket to serve on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        bound = socket.create_server((host, port), family=family, backlog=2_048)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        message = f"cannot be served on ({reason}); name another --host or --port"
        raise AccessRefused(f"{host}:{port}", message) from None
    # Connections inherit it. Without it a body waits for the client to acknowledge the head before it.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return bound


def url_of(bound: socket.socket) -> str:
    """The URL of a server, without a path."""
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class HttpServer(uvicorn.Server):
    """Serves an app. `options` are those of `uvicorn.Config`."""

    def __init__(self, app: Any, **options: Any) -> None:
        super().__init__(
            uvicorn.Config(
                app, ws="none", loop="asyncio", log_config=None, access_log=False, server_header=False, **options
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Leaves signals to `stop_on_signals`."""
        yield

    def stop(self) -> None:
        """Finishes the requests in progress; the second call does not wait for them."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def run_on(self, bound: socket.socket, ready: Callable[[], None]) -> None:
        """Serves on a socket until it is stopped. Calls `ready` once it accepts connections."""
        announcing = asyncio.ensure_future(self._call_when_started(ready))
        try:
            await self.serve([bound])
        finally:
            announcing.cancel()

    async def _call_when_started(self, ready: Callable[[], None]) -> None:
        while not self.started:
            await asyncio.sleep(0.01)
        ready()


def stop_on_signals(stop: Callable[[], None]) -> None:
    """Calls `stop` on every SIGTERM and SIGINT, if this is the main thread: only that one receives signals."""
    for each in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(ValueError, RuntimeError):
            asyncio.get_running_loop().add_signal_handler(each, stop)
