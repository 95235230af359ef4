"""The command that hands a run on as a file: `export`, with its children, and redacted."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import click
import msgspec
from rich.filesize import decimal

from killick.cli.commands.store.maintenance import many
from killick.cli.context import Shell, command, run_argument
from killick.cli.exit_codes import CommandFailed
from killick.permissions import open_output

_ALL: Final = "*"


@command("export", json=False)
@run_argument
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="The file.  [default: stdout]")
@click.option("--with-children", is_flag=True, help="Include its child runs, and theirs.")
@click.option(
    "--redact",
    "fields",
    metavar="[FIELD,…]",
    is_flag=False,
    flag_value=_ALL,
    multiple=True,
    help="Replace values by pseudonyms: all, or the named fields.",
)
def export_command(shell: Shell, run: str, output: Path | None, with_children: bool, fields: tuple[str, ...]) -> None:
    """Write a run to one file of JSON lines: its events, their values, and the hash chain that proves them.

    `killick time replay run.killick` and killick.testing.replay("run.killick", agent) take it, with no store. The file
    has the data of the run: protect it as you protect that data, or redact it.

    \b
      killick store export claim_17 -o claim_17.killick
      killick store export claim_17 --redact name,amount -o for_them.killick
    """
    named = [name for field in fields for name in field.split(",") if name]
    if _ALL in named and len(named) > 1:
        raise CommandFailed("--redact: is for everything, or for the fields that it names; leave one of the two out")
    redact = named == [_ALL] or named
    data = shell.client.export(shell.run(run), children=with_children, redact=redact)
    if output is None:
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        return
    try:
        with open_output(output) as file:
            file.write(data)
    except OSError as error:
        raise CommandFailed(f"{output}: cannot be written ({error.strerror}); name another file") from None
    header = msgspec.json.decode(data.split(b"\n", 1)[0])
    below = len(header.get("children", ()))
    children = f", {many(below, 'child', 'children')}" if below else ""
    redacted = "" if not named else ", redacted" if redact is True else f", {', '.join(named)} redacted"
    shell.note(f"{output}: {many(header['events'], 'event')}{children}, {decimal(len(data))}{redacted}")
