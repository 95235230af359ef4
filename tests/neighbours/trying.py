"""What every neighbour has: a page, whose blocks are done as a reader would, and an example that runs by itself."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import pytest

from pages import ROOT, run, run_page


def needs(package: str, *version: int) -> pytest.MarkDecorator:
    """Skips a test with an older version: it claims what the framework itself could not do before."""
    found = tuple(int(part) for part in metadata.version(package).split(".")[: len(version)])
    return pytest.mark.skipif(found < version, reason=f"needs {package} {'.'.join(map(str, version))}")


def try_page(name: str, tmp_path: Path, ports: Mapping[int, int] | None = None) -> None:
    """Do what docs/neighbours/NAME.md shows, with other ports in place of those on the page."""
    page = ROOT / "docs" / "neighbours" / f"{name}.md"
    used = {str(shown): str(port) for shown, port in (ports or {}).items()}
    text = re.sub(r"(?<=:)\d+\b", lambda found: used.get(found[0], found[0]), page.read_text(encoding="utf-8"))
    wrong = [f"{page.name}:{each.number}: {each.what}" for each in run_page(text, tmp_path)]
    if wrong:
        pytest.fail("\n\n".join(wrong), pytrace=False)


def try_example(name: str, tmp_path: Path) -> str:
    """Run examples/neighbours/NAME.py; returns what it printed."""
    (here := tmp_path / "here").mkdir(exist_ok=True)
    done = run([sys.executable, ROOT / "examples" / "neighbours" / f"{name}.py"], here)
    if done.returncode:
        pytest.fail(f"{name}.py exited with {done.returncode}:\n{done.stdout}", pytrace=False)
    return done.stdout
