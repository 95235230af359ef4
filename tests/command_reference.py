"""Writes docs/command-line.md from the commands themselves: `python tests/command_reference.py`. Knows none of them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path
from typing import Final

import click

from killick.cli.apps import SETTINGS
from killick.cli.exit_codes import Exit
from killick.cli.main import VARIABLES, killick

PAGE: Final = Path("docs/command-line.md")

_OPENING: Final = """\
# The command line

This page is written by `tests/command_reference.py` from the commands themselves.

`killick COMMAND --help` says what is here. Where a command prints data, `--json` prints it for programs. Remarks and
errors go to stderr, so that a pipe carries data alone. A mistake is told in one line that names the next move.

VALUES are written as JSON, or as text where they are no JSON. `@FILE` is what is in a file, `-` what comes on stdin,
and `@@` begins a text with @. TIMES are how long ago (`90s`, `2h`, `3d`), a day (`2026-11-14`) or a moment
(`2026-11-14T09:30`).
"""

_SETTINGS: Final = """\
## Settings

The nearest `pyproject.toml` that has a table `[tool.killick]`, from the current folder upwards, says where things are:

```toml
[tool.killick]
app = "claims.agents"
store = "killick.db"
```
"""


def page() -> str:
    """The whole page."""
    context = click.Context(killick, info_name="killick")
    parts = [_OPENING]
    for name in killick.list_commands(context):
        try:
            found = killick.get_command(context, name)
        except ImportError:
            continue
        if found is not None:
            parts += _command(found, click.Context(found, info_name=name, parent=context), "##")
    return "\n".join([*parts, *_ending()])


def _command(command: click.Command, context: click.Context, mark: str) -> Iterator[str]:
    prose, examples = told(command)
    yield f"{mark} {context.command_path}\n"
    yield from (f"{paragraph}\n" for paragraph in prose)
    if examples:
        yield _block("sh", examples)
    yield _block("text", [" ".join([context.command_path, *command.collect_usage_pieces(context)])])
    records = [option.get_help_record(context) for option in command.params if isinstance(option, click.Option)]
    rows = [f"| `{_cell(names)}` | {_cell(line)} |" for names, line in filter(None, records)]
    if rows:
        yield "\n".join(["| option | |", "|---|---|", *rows, ""])
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            if inner is not None:
                yield from _command(inner, click.Context(inner, info_name=name, parent=context), f"{mark}#")


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
    yield "## Environment\n"
    yield "\n".join(
        ["| variable | |", "|---|---|", *(f"| `{name}` | {line} |" for name, line in VARIABLES.items()), ""]
    )
    yield _SETTINGS
    yield "\n".join(["| entry | |", "|---|---|", *(f"| `{name}` | {line} |" for name, line in SETTINGS.items()), ""])


def _block(kind: str, lines: list[str]) -> str:
    return "\n".join([f"```{kind}", *lines, "```", ""])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main() -> int:
    """Write the page, in the repository whose folder is the current one."""
    if not PAGE.parent.is_dir():
        sys.stderr.write(f"killick: no {PAGE.parent} here; run this in the folder of the repository\n")
        return int(Exit.MISTYPED)
    PAGE.write_text(page(), encoding="utf-8")
    return int(Exit.DONE)


if __name__ == "__main__":
    raise SystemExit(main())
