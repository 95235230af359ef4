"""Writes docs/images/demo.svg from what `killick demo` prints: `python tests/demo_picture.py`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path
from typing import Final

PICTURE: Final = Path(__file__).parents[1] / "docs" / "images" / "demo.svg"
LAST: Final = "rooms"
"""The line of the demo's output that the picture ends with."""

_COLUMN, _ROW, _MARGIN = 8.4, 20, 20
_STYLES: Final = {"1": "b", "2": "d", "31": "r", "32": "g", "33": "y"}
_CSS: Final = """\
rect{fill:#16181d}text{fill:#d8dade;font:14px ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace;\
white-space:pre}.b{font-weight:700;fill:#fff}.d{fill:#8b9099}.r{fill:#ff7b72}.g{fill:#7ee787}.y{fill:#e3b341}"""


def demo(folder: Path) -> list[str]:
    """What the demo prints on a terminal with colors, up to what the API counts."""
    env = os.environ | {"FORCE_COLOR": "1", "COLUMNS": "100", "TERM": "xterm-256color"}
    env.pop("NO_COLOR", None)
    done = subprocess.run(
        [sys.executable, "-m", "killick", "demo"], cwd=folder, env=env, capture_output=True, text=True, check=True
    )
    lines = done.stdout.strip("\n").splitlines()
    ends = next(number for number, line in enumerate(lines) if re.search(rf"\b{LAST} ", line))
    return ["\x1b[2m$\x1b[0m killick demo", "", *lines[: ends + 1]]


def svg(lines: list[str]) -> str:
    """A picture of these lines, as a terminal with a dark background shows them."""
    width = round(max(len(re.sub(r"\x1b\[\d+m", "", line)) for line in lines) * _COLUMN) + 2 * _MARGIN
    height = len(lines) * _ROW + 2 * _MARGIN
    rows = (
        f'<text x="{_MARGIN}" y="{_MARGIN + 14 + number * _ROW}">{_spans(line)}</text>'
        for number, line in enumerate(lines)
        if line
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
            "<title>killick demo: killed at step 6, resumed, every invite sent once</title>",
            f'<style>{_CSS}</style><rect width="{width}" height="{height}" rx="8"/>',
            *rows,
            "</svg>\n",
        ]
    )


def _spans(line: str) -> str:
    made, style = "", ""
    for part in re.split(r"(\x1b\[\d+m)", line):
        if code := re.fullmatch(r"\x1b\[(\d+)m", part):
            style = _STYLES.get(code[1], "")
        elif part:
            made += f'<tspan class="{style}">{escape(part)}</tspan>' if style else escape(part)
    return made


def words(picture: str) -> list[str]:
    """The words of a picture, without numbers: processes, ports and times differ from one demo to the next."""
    return re.sub(r"\d+", "0", re.sub(r"<[^>]*>", " ", picture)).split()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        PICTURE.write_text(svg(demo(Path(folder))), encoding="utf-8")
