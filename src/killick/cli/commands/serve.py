"""`killick serve`: the dashboard and the HTTP API over a store, from this process."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterable
from functools import partial
from typing import Any
from urllib.parse import quote

import click

from killick.cli.commands.worker import LogPrinter
from killick.cli.context import Shell, command
from killick.cli.exit_codes import CommandFailed, Exit
from killick.definitions.agents import AGENTS


@command("serve", app=True)
@click.argument("target", metavar="[APP]", required=False)
@click.option("--host", metavar="ADDRESS", default="127.0.0.1", show_default=True,
              help="The address to serve on. Any but loopback needs tokens.")  # fmt: skip
@click.option("--port", metavar="N", type=click.IntRange(0, 65_535), default=8300, show_default=True,
              help="The port; 0 takes a free one.")  # fmt: skip
@click.option("--worker/--no-worker", default=False, help="Also execute due runs.  [default: no]")
@click.option("--redact", metavar="FIELD", multiple=True,
              help="Redact the values of this field, wherever they occur. May be repeated.")  # fmt: skip
@click.option("--webhook", "webhooks", metavar="NAME=ENV", multiple=True,
              help="Accept webhooks as events of this name; the variable has the secret. May be repeated.")  # fmt: skip
@click.option("--host-name", "host_names", metavar="NAME", multiple=True,
              help="Another host name of this machine, for a server without tokens. May be repeated.")  # fmt: skip
@click.option("--trusted-proxy", "trusted_proxies", metavar="ADDRESS", multiple=True,
              help="Believe this proxy's X-Forwarded-For and X-Forwarded-Proto. May be repeated.")  # fmt: skip
@click.option("--access-log", metavar="FILE", type=click.Path(dir_okay=False),
              help="Append a line of JSON for each request: who, which route and run, when.")  # fmt: skip
def serve_command(
    shell: Shell, target: str | None, host: str, port: int, worker: bool, redact: tuple[str, ...],
    webhooks: tuple[str, ...], host_names: tuple[str, ...], trusted_proxies: tuple[str, ...],
    access_log: str | None,
) -> Exit:  # fmt: skip
    """Serve the dashboard and the HTTP API, until SIGTERM or Ctrl-C.

    APP is the file or module that declares the agents; by default the app of [tool.killick]. Until the store has a
    token, the server binds to loopback only, and its owner signs in by a printed one-time link.

    \b
      killick serve app.py --worker
      killick serve --host 0.0.0.0 --redact card_number
    """
    shell.refuse_without("the dashboard", "web", "httptools", "jinja2", "starlette", "uvicorn")
    shell.load_app(target)
    if worker and not AGENTS.names():
        raise CommandFailed("no agents are declared here for a worker; name the app: `killick serve app.py --worker`")
    client = shell.creating() if target or shell.app else shell.client
    hidden = redact or tuple(shell.settings.get("redact", ()))
    options: dict[str, Any] = {"host": host, "port": port, "worker": worker, "redact": hidden, "host_names": host_names}
    options |= {"trusted_proxies": trusted_proxies, "access_log": access_log}
    options["webhooks"] = dict(map(_secret, webhooks))
    from killick.web import server  # starlette and jinja2 are an extra

    options["ready"] = partial(_ready, shell, alone=server.is_loopback(host), named=options["webhooks"])
    options["renewed"] = partial(_renewed, shell)
    with LogPrinter(shell):
        asyncio.run(server.serve(client, **options))
    return Exit.DONE


def _secret(text: str) -> tuple[str, str]:
    name, _, variable = text.partition("=")
    if not name or not variable:
        raise CommandFailed(f"{text!r}: no name and variable; write it as --webhook order.created=ORDERS_SECRET")
    if not os.environ.get(variable):
        raise CommandFailed(f"{variable}: not in the environment; set it to the secret of the webhook {name}")
    return name, f"env:{variable}"


def _ready(shell: Shell, url: str, pages: str, link: str | None, *, alone: bool, named: Iterable[str]) -> None:
    hooks = {name: f"{url}api/v1/hooks/{quote(name)}" for name in named}
    shell.emit_line(
        {"what": "serving", "url": url, "pages": pages, "store": shell.place, "link": link, "webhooks": hooks}
    )
    shell.print(f"serving {shell.place} at {url}")
    for name, place in hooks.items():
        shell.print(f"webhooks of {name} at {place}")
    if link is not None:
        shell.print(f"sign in, once, by {link}")
    elif pages != url:
        shell.print(f"browsers sign in at {pages}")
    if not alone:
        shell.note("other machines can reach this address, without encryption; put a proxy with TLS in front of it")


def _renewed(shell: Shell, link: str) -> None:
    with contextlib.suppress(OSError):  # the browser is signed in even if stdout is closed
        shell.emit_line({"what": "link", "link": link})
        shell.print(f"signed in; the next browser signs in by {link}")
