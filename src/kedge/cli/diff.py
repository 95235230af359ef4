"""`kedge diff`: what changed between two places in time, at one step, or from one run to another."""

from __future__ import annotations

from itertools import groupby
from typing import Final

import click
from rich.text import Text

from kedge.cli.exits import Told
from kedge.cli.shell import Shell, command, run_argument
from kedge.history.boundaries import is_place
from kedge.history.diff import Diff, Line

STYLES: Final = {"+": "green", "-": "red", "~": "yellow"}


@command("diff")
@run_argument
@click.argument("places", nargs=-1, metavar="STEP | FROM [TO] | RUN_B")
@click.option("--at", metavar="PLACE", help="Where to compare two runs.  [default: now]")
def diff_command(shell: Shell, run: str, places: tuple[str, ...], at: str | None) -> None:
    """What changed between two places of a run, or what is different in another run.

    \b
      kedge diff RUN 6                   what step 6 changed
      kedge diff RUN 6:before 8:after    from one place to another
      kedge diff RUN 6:before            from there to now
      kedge diff RUN @17                 what one event changed
      kedge diff RUN_A RUN_B --at 6      two runs, at the same place

    Places: 6:before, 6:after, 6.1.2:after in a gather, 4~1:before in generation 1, @17, start, now.
    With --json it is a patch (RFC 6902) from the first state's JSON to the second's.
    """
    run = shell.run(run)
    found = _found(shell, run, places, at)
    if shell.json:
        shell.emit(found.patch())
    else:
        _print(shell, found)


def _found(shell: Shell, run: str, places: tuple[str, ...], at: str | None) -> Diff:
    kd = shell.client
    if not places or len(places) > 2:
        raise Told("name one step, two places, or another run: kedge diff RUN 6; see kedge diff --help")
    if len(places) == 1 and not is_place(places[0]):
        if kd.store.head(places[0]) is None:
            raise Told(f"{places[0]}: no run of that id, and no place in {run}; write 6, 6:before, @17, start or now")
        return kd.diff(run, at or "now", against=places[0])
    if at is not None:
        raise Told("--at is for two runs: kedge diff RUN_A RUN_B --at 6:after")
    return kd.diff(run, *places)


def _print(shell: Shell, found: Diff) -> None:
    one, two = found.before, found.after
    head = Text(f"{one.run}  ", style="bold")
    head.append(_place(one.label, one.seq), style="not bold")
    head.append(" → ", style="dim not bold")
    head.append(f"{two.run}  " if two.run != one.run else "")
    head.append(_place(two.label, two.seq), style="not bold")
    shell.out.print(head, soft_wrap=True)
    lines = found.lines(shell.out.width - 4)
    if not lines:
        shell.out.print("Nothing differs.")
    for part, group in groupby(lines, key=lambda line: line.part):
        shell.out.print()
        shell.out.print(Text(part, style="bold"))
        for line in group:
            shell.out.print(_line(line), soft_wrap=True)


def _place(label: str, seq: int) -> str:
    return label if label == f"@{seq}" else f"{label} @{seq}"


def _line(line: Line) -> Text:
    return Text.assemble("  ", (line.sign, f"bold {STYLES[line.sign]}"), " ", (line.text, STYLES[line.sign]))
