"""Completion of commands and options, by the protocol that shells speak."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from claims import call, plain_environment
from killick.cli.main import COMMANDS, COMPLETING, GROUPS

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("killick re", ["resume"]),
        ("killick time re", ["replay", "restore", "rewind"]),
        ("killick pause --sta", ["--status"]),
        ("killick pause --status wa", ["waiting"]),
    ],
)
def test_a_line_is_completed(monkeypatch: pytest.MonkeyPatch, capsys: Capture, line: str, values: list[str]) -> None:
    monkeypatch.setenv(COMPLETING, "bash_complete")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
    found = call(capsys)
    assert (found.code, found.err) == (0, "")
    assert [item.removeprefix("plain,") for item in found.out.split()] == values


def test_all_commands_are_offered_and_none_is_imported_for_it() -> None:
    code = (
        "import sys; from killick.cli.main import main; main(); "
        "print([m for m in sys.modules if m in ('killick.cli.commands.run', 'killick.cli.context', "
        "'rich', 'pydantic')])"
    )
    env = plain_environment(**{COMPLETING: "bash_complete", "COMP_WORDS": "killick ", "COMP_CWORD": "1"})
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300, check=True
    )
    *items, imported = done.stdout.splitlines()
    assert sorted(item.removeprefix("plain,") for item in items) == sorted([*COMMANDS, *GROUPS])
    assert imported == "[]"


@pytest.mark.parametrize(
    "line",
    [
        "killick nosuch ",
        "killick",
        "",
        "killick 'unclosed",
        "killick pause --status",
        "killick --nosuch x",
        "killick store repair x ",
    ],
)
@pytest.mark.parametrize("asked", ["bash_complete", "nosuch_complete", "bash", "bash_nosuch"])
def test_completing_never_fails_and_never_writes_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, line: str, asked: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "killick.db").write_bytes(b"no store")
    (tmp_path / "pyproject.toml").write_text("[tool.killick\n", encoding="utf-8")
    monkeypatch.setenv(COMPLETING, asked)
    monkeypatch.setenv("COMP_WORDS", line)
    found = call(capsys)
    assert (found.code, found.err) == (0, "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell_is_printed(shell: str) -> None:
    environment = {**plain_environment(), COMPLETING: f"{shell}_source"}
    done = subprocess.run(
        [sys.executable, "-m", "killick"], env=environment, capture_output=True, text=True, check=True
    )
    assert f"{COMPLETING}={shell}_complete" in done.stdout
