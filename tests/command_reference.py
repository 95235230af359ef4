"""Writes docs/command-line.md from the commands: `python tests/command_reference.py`. Knows none of them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from inspect import cleandoc
from pathlib import Path
from typing import Final

import click

from killick.cli.exit_codes import Exit
from killick.cli.main import killick

PAGE: Final = Path("docs/command-line.md")

COMMON_MIN: Final = 3
"""An option that so many commands take, with the same text, is described once."""

_OPENING: Final = """\
# The command line

This page is written by `tests/command_reference.py` from the commands. `killick COMMAND --help` prints the same.

Data goes to stdout, remarks and errors to stderr. An error is one line that names the next move.

A VALUE is JSON, or else text. `@FILE` reads a file, `-` reads stdin, and `@@` begins text with `@`. A TIME or WHEN is
an age (`90s`, `2h`, `3d`), a day (`2026-11-14`) or a moment (`2026-11-14T09:30`).

Variables and `[tool.killick]` are in [settings](reference/settings.md).
"""

Row = tuple[str, str]


def page() -> str:
    """The whole page."""
    context = click.Context(killick, info_name="killick")
    commands = list(_commands(killick, context))
    common = _common(commands)
    parts = [_OPENING, *_shared(common)]
    for command, below in commands:
        parts += _command(command, below, {*common})
    return "\n".join([*parts, *_ending()])


def _commands(group: click.Group, context: click.Context) -> Iterator[tuple[click.Command, click.Context]]:
    """Every command that is there, each group before its commands."""
    for name in group.list_commands(context):
        try:
            found = group.get_command(context, name)
        except ImportError:
            continue
        if found is not None:
            below = click.Context(found, info_name=name, parent=context)
            yield found, below
            if isinstance(found, click.Group):
                yield from _commands(found, below)


def _options(command: click.Command, context: click.Context) -> Iterator[Row]:
    records = [option.get_help_record(context) for option in command.params if isinstance(option, click.Option)]
    yield from ((_cell(names), _cell(line)) for names, line in filter(None, records))


def _common(commands: list[tuple[click.Command, click.Context]]) -> dict[Row, list[str]]:
    """The options that several commands share, with the commands."""
    taken: dict[Row, list[str]] = {}
    for command, context in commands:
        for row in _options(command, context):
            taken.setdefault(row, []).append(context.command_path.removeprefix("killick "))
    return {row: paths for row, paths in taken.items() if len(paths) >= COMMON_MIN}


def _shared(common: dict[Row, list[str]]) -> Iterator[str]:
    """The options of many commands, then those of each set of commands that shares some."""
    sets: dict[tuple[str, ...], list[Row]] = {}
    for row, paths in common.items():
        sets.setdefault(tuple(paths) if len(paths) <= EVERYWHERE_MIN else (), []).append(row)
    yield "## Common options\n"
    yield "Commands take these where they apply. They are not repeated below; `--help` lists all options.\n"
    for paths, rows in sorted(sets.items()):
        if paths:
            yield f"Options of {', '.join(f'`{path}`' for path in paths)}:\n"
        yield _listed(rows)


EVERYWHERE_MIN: Final = 8
"""An option of more commands is listed without their names."""


def _command(command: click.Command, context: click.Context, common: set[Row]) -> Iterator[str]:
    prose, examples = told(command)
    yield f"{'#' * (context.command_path.count(' ') + 1)} {context.command_path}\n"
    yield from (f"{paragraph}\n" for paragraph in prose)
    arguments = [piece for piece in command.collect_usage_pieces(context) if piece != "[OPTIONS]"]
    if examples:
        yield _block("sh", examples)
    rows = [row for row in _options(command, context) if row not in common]
    if arguments and not isinstance(command, click.Group):
        yield f"Usage: `{' '.join([context.command_path, *arguments])}`\n"
    if rows:
        yield _listed(rows)


def told(command: click.Command) -> tuple[list[str], list[str]]:
    """What the help of a command says, in paragraphs, and its examples."""
    prose: list[str] = []
    examples: list[str] = []
    for paragraph in re.split(r"\n\s*\n", cleandoc(command.help or "")):
        lines = [line.strip() for line in paragraph.replace("\b", "").splitlines() if line.strip()]
        if lines and "\b" in paragraph and all(line.startswith("killick ") for line in lines):
            examples += lines
        elif lines:
            prose.append("  \n".join(lines) if "\b" in paragraph else " ".join(lines))
    return prose, examples


def _ending() -> Iterator[str]:
    yield "## Exit codes\n"
    yield "\n".join(["| code | |", "|---|---|", *(f"| {code.value} | {code.means} |" for code in Exit), ""])


def _listed(rows: Iterable[Row]) -> str:
    return "\n".join([*(f"- `{names}`: {line}" for names, line in rows), ""])


def _block(kind: str, lines: list[str]) -> str:
    return "\n".join([f"```{kind}", *lines, "```", ""])


def _cell(text: str) -> str:
    return re.sub(r"(?:; )?x>=?\d(?=\])", "", " ".join(text.split())).replace(" []", "")


def main() -> int:
    """Write the page, in the repository whose folder is the current one."""
    if not PAGE.parent.is_dir():
        sys.stderr.write(f"killick: no {PAGE.parent} here; run this in the folder of the repository\n")
        return int(Exit.MISTYPED)
    PAGE.write_text(page(), encoding="utf-8")
    return int(Exit.DONE)


if __name__ == "__main__":
    raise SystemExit(main())
