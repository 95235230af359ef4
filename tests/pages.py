"""Pages of documentation, read and done as a reader would: files written, commands typed, output compared.

On a page, in its own folder and in order:

    ```python           with a first line such as `# app.py` is that file; all others are one program, run at the first
    ```toml             the same: a file, if its first line names one
    ```diff             with a first line `--- app.py` changes that file
    ```console          `$ command` (and `> more of it`), below it what that prints; `…` stands for anything
    ```sh               commands that have to succeed
    ```… no-run         is only there to be read

What differs from one time to the next (times, durations, processes, ids) is not compared, and neither is white space.
With KILLICK_DOCS=write in the environment, output that differs is written into the page, unless it has a line `…`.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[1]
RUN_SECONDS_MAX: Final = 600

FENCE: Final = re.compile(r"^( *)(`{3,}|~{3,})([^`]*)$")
FILE: Final = re.compile(r"(?:#|---) ([\w./-]+\.\w+)")


# Reading pages ------------------------------------------------------------------------------------


def pages(root: Path) -> list[Path]:
    return sorted([*root.glob("*.md"), *(root / "docs").rglob("*.md"), *(root / "examples").glob("*.md")])


class Block(NamedTuple):
    """A fenced block: the words after the fence, the number of its first line on the page, and its lines."""

    info: str
    number: int
    lines: list[str]

    @property
    def language(self) -> str:
        """What it is to be run as; nothing for a block that is only there to be read."""
        words = self.info.split()
        return words[0] if words and "no-run" not in words else ""

    @property
    def text(self) -> str:
        return textwrap.dedent("\n".join(self.lines))

    @property
    def file(self) -> str:
        """The file that it is, or that it changes."""
        named = FILE.fullmatch(self.lines[0].strip()) if self.lines else None
        return named[1] if named and self.language in ("python", "toml", "diff") else ""


def split(text: str) -> tuple[list[str], list[Block]]:
    """A page's own lines, with those of its blocks left empty; and its blocks."""
    prose: list[str] = []
    blocks: list[Block] = []
    closing = ""
    for number, line in enumerate(text.splitlines(), 1):
        fence = FENCE.match(line)
        if closing:
            if line.strip().startswith(closing) and not line.strip().strip(closing[0]):
                closing = ""
            else:
                blocks[-1].lines.append(line)
            prose.append("")
        elif fence:
            closing = fence[2]
            blocks.append(Block(fence[3].strip(), number + 1, []))
            prose.append("")
        else:
            prose.append(line)
    return prose, blocks


def script(blocks: Iterable[Block]) -> str:
    """A page's Python as one program, each line at the page's own number, so that tracebacks point there."""
    lines: list[str] = []
    for block in blocks:
        if block.language == "python" and not block.file:
            lines += [""] * (block.number - 1 - len(lines))
            lines += block.text.split("\n")
    return "\n".join(lines)


class Command(NamedTuple):
    """A command of a console block, the number of its line, and what the page says it prints."""

    text: str
    number: int
    printed: list[str]


def typed(block: Block) -> list[Command]:
    """The commands of a console block."""
    found: list[Command] = []
    for number, line in enumerate(block.text.split("\n"), block.number):
        if line.startswith("$ "):
            found.append(Command(line[2:], number, []))
        elif line.startswith("> ") and found and not found[-1].printed:
            found[-1] = found[-1]._replace(text=f"{found[-1].text}\n{line[2:]}")
        elif found:
            found[-1].printed.append(line)
    return found


# Running pages ------------------------------------------------------------------------------------


def run(command: list[str | Path], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run something as a reader would: with Killick installed, and nobody at the keyboard."""
    programs = cwd.parent / "bin"
    if not programs.exists():
        programs.mkdir()
        (programs / "killick").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m killick "$@"\n')
        (programs / "killick").chmod(0o755)
    paths = {
        "PATH": [str(programs), str(Path(sys.executable).parent), os.environ["PATH"]],
        "PYTHONPATH": [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])],
    }
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KILLICK_", "PYTEST_", "FORCE_"))}
    return subprocess.run(
        command,
        cwd=cwd,
        env={
            **kept,
            **{name: os.pathsep.join(parts) for name, parts in paths.items()},
            "COLUMNS": "100",
            "PYTEST_ADDOPTS": "-p no:asyncio",  # its remarks are not of the page
            "NO_COLOR": "1",
            "LOGNAME": "ada",
            "USER": "ada",
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_SECONDS_MAX,
        check=False,
    )


class Wrong(NamedTuple):
    """Something on a page that is not so; and for a command, what it prints."""

    number: int
    what: str
    command: Command | None = None
    printed: str = ""


def run_page(text: str, folder: Path) -> Iterator[Wrong]:
    """Do what a page says, in a folder of its own."""
    here = folder / "here"
    here.mkdir(parents=True)
    blocks = split(text)[1]
    program = script(blocks)
    for block in blocks:
        if block.language == "diff" and block.file:
            yield from _change(block, here / block.file)
        elif block.file:
            _write(here / block.file, block.text + "\n")
        elif block.language == "python" and program:
            file = here / "page.py"
            _write(file, program)
            program = ""
            done = run([sys.executable, file], here)
            if done.returncode:
                yield Wrong(block.number, f"the page's program fails (line numbers are the page's):\n{done.stdout}")
        elif block.language == "sh":
            done = run(["bash", "-e", "-c", block.text], here)
            if done.returncode:
                yield Wrong(block.number, f"exits with {done.returncode}:\n{done.stdout}")
        elif block.language == "console":
            yield from _type(block, here)


def _change(block: Block, file: Path) -> Iterator[Wrong]:
    """Replace lines of a file; `@@` stands between changes that are apart."""
    text = file.read_text(encoding="utf-8")
    for hunk in re.split(r"^@@.*\n", block.text.partition("\n")[2], flags=re.MULTILINE):
        lines = hunk.rstrip("\n").split("\n")
        before, after = ("\n".join(line[1:] for line in lines if line[:1] != other) for other in "+-")
        if text.count(before) != 1:
            yield Wrong(block.number, f"this is in {block.file} {text.count(before)} times:\n{before}")
        text = text.replace(before, after)
    _write(file, text)


def _write(file: Path, text: str) -> None:
    """Write a file. Python knows stale bytecode by whole seconds and sizes, and a page may change a file within one."""
    shutil.rmtree(file.parent / "__pycache__", ignore_errors=True)
    file.write_text(text, encoding="utf-8")


def _type(block: Block, here: Path) -> Iterator[Wrong]:
    """Type the commands of a block into one shell, and look at what comes."""
    asked = typed(block)
    parts = ['next() { local code=$?; printf "\\036"; return $code; }', *(f"next\n{each.text}" for each in asked)]
    done = run(["bash", "-c", "\n".join(parts)], here)
    for command, printed in zip(asked, done.stdout.split("\x1e")[1:], strict=True):
        expected = "\n".join(command.printed)
        if not matches(expected, printed):
            diff = "\n".join(differing(command.printed, printed.split("\n")))
            what = f"`{command.text}` prints something else (- is the page, + what it prints):\n{diff}"
            yield Wrong(command.number, what, command, printed)


_UNITS: Final = r"(?:µs|ms|s|m|h|d|(?:micro|milli)?seconds?|minutes?|hours?|days?)\b"
_WAYS: Final = r"deaths?|redeploys?|timeouts?|rate|pauses?|lost|failing|other|deadlines?|second"
"""How the words begin that `killick check` counts interruptions by."""
VARYING: Final = tuple(
    (re.compile(pattern), instead)
    for pattern, instead in (
        (r"\d{4}-\d\d-\d\d|\d{1,2} [A-Z][a-z]+ \d{4}", "DAY"),
        (r"\d\d:\d\d:\d\d(?:\.\d+)?", "TIME"),
        (r"(?<=_)[0-9a-z]{16}\b", "ID"),
        (rf"\d+(?:\.\d+)? ?{_UNITS}(?: \d+ ?{_UNITS})*|less than a millisecond", "SPAN"),
        (r"(?<=rocess )\d+|\d+(?= is dead)|(?<=127\.0\.0\.1:)\d+|\d+(?= a second)", "N"),
        (rf"\d+(?= (?:times|{_WAYS})\b)", "N"),
        (r"\d+(?:\.\d+)? (?:[kMG]B|bytes)", "SIZE"),
    )
)


def masked(text: str) -> str:
    """A text without what differs from one time to the next, and with single spaces."""
    text = " ".join(text.split())
    for pattern, instead in VARYING:
        text = pattern.sub(instead, text)
    return text


def matches(expected: str, printed: str) -> bool:
    """Whether that is what a page shows. Lines are one text, for where they are wrapped may go by what varies."""
    pattern = re.escape(masked(expected)).replace("…", ".*?")
    return re.fullmatch(pattern, masked(printed), re.DOTALL) is not None


def differing(expected: list[str], printed: list[str]) -> Iterator[str]:
    """Both, line by line; what only varies is the same."""
    while printed and not printed[-1].strip():
        printed = printed[:-1]
    same = difflib.SequenceMatcher(None, [*map(masked, expected)], [*map(masked, printed)], autojunk=False)
    for tag, a, b, c, d in same.get_opcodes():
        if tag == "equal":
            yield from (f"  {line}".rstrip() for line in printed[c:d])
        else:
            yield from (f"- {line}".rstrip() for line in expected[a:b])
            yield from (f"+ {line}".rstrip() for line in printed[c:d])


def write_page(page: Path, wrong: Iterable[Wrong]) -> None:
    """Put what commands print into the page, the last first; a shortened output is left to a person."""
    lines = page.read_text(encoding="utf-8").split("\n")
    for each in sorted(wrong, reverse=True):
        if each.command is not None and "…" not in [line.strip() for line in each.command.printed]:
            first = each.number + each.command.text.count("\n")
            printed = [line.rstrip() for line in each.printed.rstrip().split("\n")] if each.printed.strip() else []
            lines[first : first + len(each.command.printed)] = printed
    page.write_text("\n".join(lines), encoding="utf-8")
