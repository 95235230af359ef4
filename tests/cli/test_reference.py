"""The page of the command line is what the commands say, and says all of it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click
import pytest

import command_reference as reference
from killick.cli.exit_codes import Exit
from killick.cli.main import COMMANDS, GROUPS, MODULES, killick

ROOT: Final = Path(__file__).resolve().parents[2]


def test_the_page_is_what_the_commands_say() -> None:
    written = (ROOT / reference.PAGE).read_text(encoding="utf-8")
    if written != reference.page():
        pytest.fail(f"{reference.PAGE} is stale; write it again with python tests/command_reference.py", pytrace=False)


def test_every_command_option_and_code_is_on_the_page() -> None:
    page = reference.page()
    context = click.Context(killick)
    for name in killick.list_commands(context):
        assert f"## killick {name}\n" in page
        command = killick.get_command(context, name)
        assert command is not None
        for option in (parameter for parameter in command.params if isinstance(parameter, click.Option)):
            assert option.hidden or option.opts[-1] in page
    for code in Exit:
        assert f"| {code.value} | {code.means} |" in page


def test_a_command_that_is_not_there_yet_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODULES, "ps", "killick.cli.nowhere")
    page = reference.page()
    assert "## killick ps\n" not in page
    assert "## killick show\n" in page


COMMAND: Final = re.compile(r"(?<![\w./~-])killick ([a-z]+)(?: ([a-z]+(?:-[a-z]+)*))?")
"""A command, as texts and pages name it; capitals and punctuation end it."""
PACKAGE: Final = frozenset(
    {
        "agent", "anchors", "anthropic", "child", "digests", "host", "import", "is", "macs", "metrics", "nonces",
        "tool", "values", "verification", "web", "workspace",
    }
)  # fmt: skip
"""Words that follow the name of the package, of an anchor, or of a derived key."""


def texts() -> Iterator[tuple[str, str]]:
    """Where a person is told what to type: error texts, help, templates, pages and examples."""
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", *(ROOT / "src").rglob("*.html")]
    for page in pages:
        yield str(page.relative_to(ROOT)), page.read_text(encoding="utf-8")
    for file in [*(ROOT / "src").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield f"{file.relative_to(ROOT)}:{node.lineno}", node.value


@pytest.mark.slow
def test_every_command_that_a_text_names_is_there() -> None:
    wrong = []
    for place, text in texts():
        for found in COMMAND.finditer(text):
            word, inner = found[1], found[2]
            is_there = word in COMMANDS or (word in GROUPS and (inner is None or f"{word} {inner}" in MODULES))
            if not is_there and word not in PACKAGE:
                wrong.append(f"{place}: {found[0]!r}")
    assert wrong == []


@pytest.mark.slow
def test_it_is_written_where_the_repository_is(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tests" / "command_reference.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    (tmp_path / "docs").mkdir()
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / reference.PAGE).read_text(encoding="utf-8") == reference.page()
