"""`killick mcp`: the store as an MCP server on stdin and stdout."""

from __future__ import annotations

from typing import get_args

import click

from killick.cli.context import Shell, command


@command("mcp", json=False)
@click.option("--allow", metavar="NAMES", default="", help="Let models answer, pause, resume or fork; with commas.")
@click.option("--name", metavar="NAME", default="mcp", show_default=True, help="Models act as model:NAME.")
def mcp_command(shell: Shell, allow: str, name: str) -> None:
    """Serve the store to models: an MCP server on stdin and stdout.

    Tools: list, show, why, diff, find and inbox, and those of answer, pause, resume and fork that --allow names. A
    model cannot approve for a person, and continues nothing that waits for one.

    \b
      claude mcp add killick -- killick mcp --store my.db --allow pause,answer
    """
    shell.refuse_without("the MCP server", "mcp", "mcp")
    from killick.adapters import mcp_server  # mcp is an extra

    writes: tuple[mcp_server.Write, ...] = get_args(mcp_server.Write)
    named = [each.strip() for each in allow.split(",") if each.strip()]
    if unknown := [each for each in named if each not in writes]:
        raise click.BadParameter(f"{unknown[0]!r} is not one of {', '.join(writes)}", param_hint="--allow")
    mcp_server.server(shell.client, allow=[each for each in writes if each in named], name=name).run()  # pyright: ignore
