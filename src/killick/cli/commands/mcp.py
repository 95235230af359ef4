"""`killick mcp`: the store as an MCP server on stdin and stdout."""

from __future__ import annotations

import importlib
from importlib.util import find_spec

import click

from killick.cli.context import Shell, command
from killick.cli.exit_codes import CommandFailed


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
    if find_spec("mcp") is None:
        raise CommandFailed("the MCP server needs its extra; pip install 'killick[mcp]'")
    # Another surface, which this one knows by name only.
    made = importlib.import_module("killick.adapters.mcp_server")
    made.server(shell.client, allow_writes=allow_writes, name=name).run()
