"""What the pages say is true: their Python runs, their links lead somewhere, the examples exit with 0.

A block that is only there to be read is opened with ```python no-run.
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from kedge.model.events import KINDS

ROOT: Final = Path(__file__).resolve().parents[2]
RUN_SECONDS_MAX: Final = 120

FENCE: Final = re.compile(r"^( *)(`{3,}|~{3,})([^`]*)$")
LINK: Final = re.compile(
    r"\]\(\s*<?([^\s()<>]+)>?(?:\s+[\"'][^)]*)?\)"  # [text](target "title")
    r"|^ *\[[^\]]+\]:\s+(\S+)"  # [name]: target
    r"|\b(?:href|src)=\"([^\"]+)\""
)
HEADING: Final = re.compile(r"^#{1,6}\s+(.+?)\s*#*$")


def pages(root: Path) -> list[Path]:
    return sorted([*root.glob("*.md"), *(root / "docs").rglob("*.md")])


class Block(NamedTuple):
    """A fenced block: the words after the fence, the number of its first line on the page, and its lines."""

    info: str
    number: int
    lines: list[str]


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


def script(text: str) -> str:
    """A page's Python as one program, each line at the page's own number, so that tracebacks point there."""
    lines: list[str] = []
    for block in split(text)[1]:
        words = block.info.split()
        if words[:1] == ["python"] and "no-run" not in words:
            lines += [""] * (block.number - 1 - len(lines))
            lines += textwrap.dedent("\n".join(block.lines)).split("\n")
    return "\n".join(lines)


def anchors(text: str) -> set[str]:
    """The names that the headings of a page can be linked by."""
    found: set[str] = set()
    for line in split(text)[0]:
        if heading := HEADING.match(line):
            words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).lower()
            name = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
            count = 0
            while (anchor := f"{name}-{count}" if count else name) in found:
                count += 1
            found.add(anchor)
    return found


def dead_links(root: Path) -> list[str]:
    dead = []
    for page in pages(root):
        for number, line in enumerate(split(page.read_text(encoding="utf-8"))[0], 1):
            for groups in LINK.findall(re.sub(r"`[^`]*`", "", line)):
                target = "".join(groups)
                path, _, anchor = target.partition("#")
                if re.match(r"[a-z][a-z0-9+.-]*:", target):
                    continue
                there = page.parent / path if path else page
                if not there.exists():
                    dead.append(f"{page.relative_to(root)}:{number}: {target} leads nowhere; mend the link")
                elif anchor and there.suffix == ".md" and anchor not in anchors(there.read_text(encoding="utf-8")):
                    dead.append(f"{page.relative_to(root)}:{number}: {path or 'this page'} has no heading #{anchor}")
    return dead


def run(file: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a program as a reader would: in a folder of its own, with nobody at the keyboard."""
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, str(file)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_SECONDS_MAX,
        check=False,
    )


def run_page(page: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    file = folder / f"{page.stem}.py"
    file.write_text(script(page.read_text(encoding="utf-8")), encoding="utf-8")
    (folder / "cwd").mkdir()
    return run(file, folder / "cwd")


PAGES: Final = [page for page in pages(ROOT) if script(page.read_text(encoding="utf-8"))]
EXAMPLES: Final = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_python_on_a_page_runs(page: Path, tmp_path: Path) -> None:
    done = run_page(page, tmp_path)
    if done.returncode:
        pytest.fail(f"{page.relative_to(ROOT)} (line numbers are the page's):\n{done.stdout}", pytrace=False)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda file: file.name)
def test_an_example_runs_and_exits_with_0(example: Path, tmp_path: Path) -> None:
    done = run(example, tmp_path)
    if done.returncode:
        pytest.fail(f"{example.relative_to(ROOT)} exited with {done.returncode}:\n{done.stdout}", pytrace=False)


def test_every_relative_link_leads_somewhere() -> None:
    if dead := dead_links(ROOT):
        pytest.fail("\n".join(dead), pytrace=False)


# These tests, tried -------------------------------------------------------------------------------

PAGE: Final = """# A page

```python
from __future__ import annotations
x = 1
```

```python no-run
x = undefined
```

```sh
exit 1
```

1. In a list:

   ```python
   assert x == 1
   ```
"""


def test_blocks_share_names_and_no_run_blocks_are_not_run(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    done = run_page(page, tmp_path)
    assert (done.returncode, done.stdout) == (0, "")


def test_a_failing_block_is_reported_at_its_line_on_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.replace("assert x == 1", "assert x == 2"))
    done = run_page(page, tmp_path)
    assert done.returncode == 1
    line = PAGE.splitlines().index("   assert x == 1") + 1
    assert f"line {line}, in <module>" in done.stdout


def test_dead_links_and_missing_headings_are_caught(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "there.md").write_text("# The `first` one\n\n[up](../README.md) [here](#the-first-one)\n")
    (tmp_path / "README.md").write_text(
        "[a](docs/there.md#the-first-one) [b](https://example.org/x) `[c](code.md)`\n"
        "```text\n[d](fenced.md)\n```\n"
        '[e](gone.md)\n[f](docs/there.md#gone "title")\n<img src="docs/gone.svg">\n\n[g]: lost.md\n'
    )
    assert [problem.split(";")[0] for problem in dead_links(tmp_path)] == [
        "README.md:5: gone.md leads nowhere",
        "README.md:6: docs/there.md has no heading #gone",
        "README.md:7: docs/gone.svg leads nowhere",
        "README.md:9: lost.md leads nowhere",
    ]


def test_the_table_of_events_says_what_the_code_says() -> None:
    page = (ROOT / "docs" / "events.md").read_text()
    for kind, event in KINDS.items():
        said = " ".join((inspect.getdoc(event) or "").split())
        fields = ", ".join(f"`{name}`" for name in event.__struct_fields__ if name not in ("at", "data"))
        assert f"| `{kind}` | {said} | {fields} |" in page, f"docs/events.md: the row of {kind} is stale"
