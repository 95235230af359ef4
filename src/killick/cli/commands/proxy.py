"""`killick proxy`: a proxy for model providers that records every call."""

from __future__ import annotations

import asyncio
import importlib
from functools import partial
from typing import Any

import click

from killick.cli.commands.worker import LogPrinter
from killick.cli.context import Shell, command
from killick.cli.exit_codes import CommandFailed, Exit


@command("proxy")
@click.option("--upstream", metavar="URL", required=True, help="The provider: https://api.openai.com.")
@click.option("--host", metavar="ADDRESS", default="127.0.0.1", show_default=True, help="The address to serve on.")
@click.option("--port", metavar="N", type=click.IntRange(0, 65_535), default=8787, show_default=True,
              help="The port; 0 takes a free one.")  # fmt: skip
@click.option("--agent", metavar="NAME", default="proxy", show_default=True,
              help="The agent name of the recorded runs.")  # fmt: skip
@click.option("--timeout", metavar="SECONDS", type=click.FloatRange(min=0, min_open=True), default=600.0,
              show_default=True, help="How long the provider may be silent.")  # fmt: skip
@click.option("--body-mb", metavar="N", type=click.IntRange(1), default=64, show_default=True,
              help="Larger requests are passed on unread.")  # fmt: skip
@click.option("--host-name", "host_names", metavar="NAME", multiple=True,
              help="Another host name of this machine that clients use. May be repeated.")  # fmt: skip
def proxy_command(
    shell: Shell, upstream: str, host: str, port: int, agent: str, timeout: float, body_mb: int,
    host_names: tuple[str, ...],
) -> Exit:  # fmt: skip
    """Proxy model calls to a provider, and record every call.

    Point a client's base URL at it. Calls of OpenAI's chat completions and responses and of Anthropic's messages are
    recorded, one run for each conversation. Other requests pass unchanged.

    \b
      killick proxy --upstream https://api.openai.com
      killick proxy --upstream https://api.anthropic.com --port 8788
      OPENAI_BASE_URL=http://127.0.0.1:8787/v1 python agent.py
    """
    shell.refuse_without("the proxy", "proxy", "httpx", "uvicorn")
    if not agent or agent.startswith("killick."):
        raise CommandFailed(f"{agent!r}: no name for these runs; --agent names another")
    client = shell.creating()
    options: dict[str, Any] = {
        "host": host, "port": port, "agent": agent, "timeout_seconds": timeout,
        "body_bytes_max": body_mb << 20, "host_names": host_names, "ready": partial(_ready, shell, upstream),
    }  # fmt: skip
    # The proxy is another surface: this one knows it by name only.
    server = importlib.import_module("killick.proxy.server")
    with LogPrinter(shell):
        asyncio.run(server.serve(client, upstream, **options))
    return Exit.DONE


def _ready(shell: Shell, upstream: str, url: str) -> None:
    shell.emit_line({"what": "proxying", "url": url, "upstream": upstream, "store": shell.store.place})
    shell.print(f"proxying {upstream} at {url}, recording to {shell.store.place}")
    shell.print(f"  OPENAI_BASE_URL={url}/v1", f"  ANTHROPIC_BASE_URL={url}")
