"""`killick time diff`: what changed between two places in time or at one step; where two runs part, why, and what
differs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Final

import click
from rich.text import Text

from killick.cli import style as paint
from killick.cli.commands.files import print_diff
from killick.cli.context import Shell, command, run_argument
from killick.cli.exit_codes import CommandFailed
from killick.history.compare_runs import Condition, RunComparison, compare
from killick.history.diff import Diff, across, between, shown
from killick.history.phrasing import counted
from killick.log.boundaries import is_place
from killick.model.codec import plain

STYLES: Final = {"+": "green", "-": "red", "~": "yellow"}
STEPS_MAX: Final = 40
"""The maximum number of steps shown of two runs; the others are counted."""

LABEL: Final = 9


@command("diff")
@run_argument
@click.argument("places", nargs=-1, metavar="STEP | FROM [TO] | RUN_B")
@click.option("--at", metavar="PLACE", help="Where to compare two runs.  [default: now]")
@click.option("--files", is_flag=True, help="Only the files of the workspace, with every changed line.")
def diff_command(shell: Shell, run: str, places: tuple[str, ...], at: str | None, files: bool) -> None:
    """Show what changed between two places of a run, or how two runs differ.

    \b
      killick time diff RUN 6                   what step 6 changed
      killick time diff RUN 6:before 8:after    from one place to another
      killick time diff RUN 6:before            from there to now
      killick time diff RUN @17                 what one event changed
      killick time diff RUN_A RUN_B             where two runs diverge and why: a run and its fork
      killick time diff RUN_A RUN_B --at 6      the two at the same place
      killick time diff fix_17 6 --files        what step 6 did to files, line by line

    Places: 6:before, 6:after, 6.1.2:after in a gather, 4~1:before in generation 1, @17, start, now. With --json, one
    run gives a patch (RFC 6902) of its state; two runs give what they share, where they diverge, and the patch.
    """
    found = _found(shell, run, places, at)
    if files:
        _files(shell, found if isinstance(found, Diff) else found.diff)
    elif isinstance(found, RunComparison):
        shell.emit(found.document())
        _print_parting(shell, found)
    else:
        shell.emit(found.patch())
        _print_head(shell, found)
        _print_changes(shell, found)


def _found(shell: Shell, run: str, places: tuple[str, ...], at: str | None) -> Diff | RunComparison:
    if not places or len(places) > 2:
        raise CommandFailed("name one step, two places, or another run; see killick time diff --help")
    if len(places) == 1 and not is_place(places[0]):
        if shell.store.head(places[0]) is None:
            raise CommandFailed(
                f"{places[0]}: no run of that id, and no place in {run}; write 6, 6:before, @17, start or now"
            )
        return compare(shell.log, run, places[0]) if at is None else across(shell.log, run, places[0], at)
    if at is not None:
        raise CommandFailed("--at is for two runs: killick time diff RUN_A RUN_B --at 6:after")
    return between(shell.log, run, *places)


def _files(shell: Shell, found: Diff) -> None:
    if found.files is None:
        raise CommandFailed(found.no_files or f"{found.before.run}: has no workspace, so no files were recorded")
    shell.emit(found.files)
    _print_head(shell, found)
    shell.out.print()
    if found.files:
        print_diff(shell, found.files, whole=True)
    else:
        shell.out.print("No file differs.")


# two runs -----------------------------------------------------------------------------------------


def _print_parting(shell: Shell, found: RunComparison) -> None:
    out = shell.out
    _print_head(shell, found.diff)
    out.print()
    for label, lines in _why(found, out.width - LABEL):
        shell.print(*paint.labelled(f"{label:<{LABEL}}", lines, out.width))
    if found.pairs:
        shell.print("", Text("steps", style="bold"), *_steps(found, out.width))
    _print_changes(shell, found.diff)


def _why(found: RunComparison, room: int) -> Iterator[tuple[str, list[Text]]]:
    shared = found.shared
    if shared is None:
        yield "shared", [Text("nothing: neither is a fork of the other")]
    elif shared.steps:
        yield "shared", [Text(f"{counted(shared.steps, 'step')}, up to {shared.place} @{shared.seq} of {shared.run}")]
    else:
        yield "shared", [Text(f"no step, only the start of {shared.run}")]
    changed = [condition for condition in found.conditions if condition.value is not None or condition.unset]
    if changed:
        several = len({condition.run for condition in changed}) > 1
        yield "changed", [_condition(condition, room, named=several) for condition in changed]
    yield "diverge", [Text(found.why(), style="bold")]


def _condition(condition: Condition, room: int, *, named: bool) -> Text:
    text = Text(f"{condition.run}: " if named else "", style="dim").append(condition.line(room), style="not dim yellow")
    if condition.was not in (None, {}):
        text.append(f", was {shown(plain(condition.was), max(room // 2, 24))}", style="dim")
    return text


def _steps(found: RunComparison, width: int) -> Iterator[Text]:
    """The steps of both runs from where they diverge: an equal one once, of a different one what each run has."""
    for pair in found.pairs[:STEPS_MAX]:
        sides = ((" ", pair.one),) if pair.how is None else (("-", pair.one), ("+", pair.two))
        for sign, seen in sides:
            if seen is not None:
                text = f"{pair.step} {seen.line(width - len(pair.step) - 5)}"
                yield Text.assemble("  ", (f"{sign} {text}", STYLES.get(sign, "dim")))
    if len(found.pairs) > STEPS_MAX:
        yield Text(f"  and {counted(len(found.pairs) - STEPS_MAX, 'more step')}", style="dim")


# states -------------------------------------------------------------------------------------------


def _print_head(shell: Shell, found: Diff) -> None:
    one, two = found.before, found.after
    other = f"{two.run}  " if two.run != one.run else ""
    head = Text.assemble((f"{one.run}  ", "bold"), paint.place(one.label, one.seq), (" → ", "dim"), (other, "bold"))
    shell.print(head.append(paint.place(two.label, two.seq)))


def _print_changes(shell: Shell, found: Diff) -> None:
    lines = found.lines(shell.out.width - 4)
    if not found:
        shell.out.print("Nothing differs.")
    for part, group in groupby(lines, key=lambda line: line.part):
        shell.out.print()
        shell.out.print(Text(part, style="bold"))
        for line in group:
            style = STYLES[line.sign]
            shell.print(Text.assemble("  ", (line.sign, f"bold {style}"), " ", (line.text, style)))
    if found.files:
        shell.out.print()
        print_diff(shell, found.files)
    elif found.no_files is not None:
        shell.out.print()
        shell.print(Text(f"files are not compared: {found.no_files}", style="dim"))
