"""The table of docs/neighbours.md that the tests make: what they count is what the page says."""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path

import pytest

from pages import ROOT

PAGE = ROOT / "docs" / "neighbours.md"
COLUMNS = ("own", "killed", "alone", "ours")
FIRST = "| tested |"


def result(neighbour: str, **cells: str) -> None:
    """Checks some cells of a neighbour's row (see COLUMNS); with KILLICK_DOCS=write in the environment, writes them."""
    with PAGE.open("r+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # neighbours are tested side by side
        lines = file.read().split("\n")
        first = next(n for n, line in enumerate(lines) if line.startswith(FIRST)) + 2
        end = next(n for n in range(first, len(lines)) if not lines[n])
        rows = {line.split("neighbours/")[1].split(".md")[0]: line for line in lines[first:end]}
        guide = neighbour.replace("_", "-")
        there = [part.strip() for part in rows.get(guide, "|" * 6).split("|")[2:6]]
        wanted = {**dict(zip(COLUMNS, there, strict=True)), **cells}
        rows[guide] = (
            f"| [{pinned(neighbour)}](neighbours/{guide}.md) | {' | '.join(wanted[name] for name in COLUMNS)} |"
        )
        made = [*lines[:first], *(" ".join(rows[name].split()) for name in sorted(rows)), *lines[end:]]
        if made == lines:
            return
        if os.environ.get("KILLICK_DOCS") != "write":
            pytest.fail(f"docs/neighbours.md should have this row; KILLICK_DOCS=write writes it:\n{rows[guide]}")
        file.seek(0)
        file.write("\n".join(made))
        file.truncate()


def pinned(neighbour: str) -> str:
    """The package that a neighbour's tests are about, with its version: the first one that is named like it."""
    requirements = (Path(__file__).parent / neighbour / "requirements.txt").read_text().splitlines()
    name = neighbour.replace("_", "")
    return next(re.sub(r"(\[.*\])?==", " ", line) for line in requirements if line.replace("-", "").startswith(name))
