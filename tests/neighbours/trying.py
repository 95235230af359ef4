"""What every neighbour has: a page, whose blocks are done as a reader would, and an example that runs by itself."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pages import ROOT, run, run_page


def try_page(name: str, tmp_path: Path) -> None:
    """Do what docs/neighbours/NAME.md shows."""
    page = ROOT / "docs" / "neighbours" / f"{name}.md"
    wrong = [f"{page.name}:{each.number}: {each.what}" for each in run_page(page.read_text(encoding="utf-8"), tmp_path)]
    if wrong:
        pytest.fail("\n\n".join(wrong), pytrace=False)


def try_example(name: str, tmp_path: Path) -> str:
    """Run examples/neighbours/NAME.py; returns what it printed."""
    (here := tmp_path / "here").mkdir()
    done = run([sys.executable, ROOT / "examples" / "neighbours" / f"{name}.py"], here)
    if done.returncode:
        pytest.fail(f"{name}.py exited with {done.returncode}:\n{done.stdout}", pytrace=False)
    return done.stdout
