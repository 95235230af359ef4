"""`killick mcp`: the store as an MCP server on stdin and stdout."""

from __future__ import annotations

import click

from killick.cli.context import Shell, command


@command("mcp", json=False)
@click.option("--allow-writes", is_flag=True, help="Let models answer, pause, resume and fork.")
@click.option("--name", metavar="NAME", default="mcp", show_default=True, help="Models answer as model:NAME.")
def mcp_command(shell: Shell, allow_writes: bool, name: str) -> None:
    """Serve the store to models: an MCP server on stdin and stdout.

    Tools: list, show, why, diff, find and inbox; with --allow-writes also answer, pause, resume and fork. A model
    cannot approve for a person.

    \b
      claude mcp add killick -- killick mcp --store /srv/killick.db
    """
    shell.refuse_without("the MCP server", "mcp", "mcp")
    from killick.adapters import mcp_server  # mcp is an extra

    mcp_server.server(shell.client, allow_writes=allow_writes, name=name).run()  # pyright: ignore
