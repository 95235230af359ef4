"""Serves the proxy: binds the address, reports it, and stops on request."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from killick.http_server import HttpServer, bind, stop_on_signals, url_of
from killick.proxy.app import Proxy

if TYPE_CHECKING:
    from killick.client.client import Client

DRAIN_SECONDS: Final = 10
"""How long running calls may take to finish on stop."""


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
    bound = bind(host, port)
    # A reply truncated upstream stays unfinished, which the server would report as an error of the app.
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    server = HttpServer(proxy, date_header=False, timeout_keep_alive=75, timeout_graceful_shutdown=DRAIN_SECONDS)
    stop_on_signals(server.stop)
    with bound:
        await server.run_on(bound, lambda: ready(url_of(bound)))
