"""Completion, by the protocol that shells speak and in a real bash where there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from claims import call, move_in, open_office, plain_environment
from killick.cli.main import COMMANDS, COMPLETING, GROUPS, main

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("office")
    with pytest.MonkeyPatch.context() as monkeypatch:
        move_in(folder, monkeypatch)
        open_office()
        main(["run", "app.py:choose", "--id", "c1", "--tag", "walk"])
    return folder


@pytest.fixture
def office(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return move_in(prepared, monkeypatch)


def completed(monkeypatch: pytest.MonkeyPatch, capsys: Capture, line: str, shell: str = "bash") -> list[str]:
    """What completes a line, as the program tells the shell."""
    monkeypatch.setenv(COMPLETING, f"{shell}_complete")
    monkeypatch.setenv("COMP_WORDS", line)
    words = line.split(" ")
    monkeypatch.setenv("COMP_CWORD", words[-1] if shell == "fish" else str(len(words) - 1))
    found = call(capsys)
    assert (found.code, found.err) == (0, "")
    return found.out.splitlines()


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("killick re", ["resume"]),
        ("killick time re", ["replay", "restore", "rewind"]),
        ("killick time rewind claim_17 --to 9", ["9:before", "9:after"]),
        ("killick time fork claim_17 --at 2:", ["2:before", "2:after"]),
        ("killick time restore claim_17 --at 2:", ["2:before", "2:after"]),
        ("killick time undo claim_16 --step ", ["1"]),
        ("killick show claim_1", ["claim_16", "claim_19", "claim_18", "claim_17"]),
        ("killick answer claim_17", ["claim_17:9"]),
        ("killick answer claim_17:", ["claim_17:9"]),
        ("killick answer c1 ", ["reject", "respond"]),
        ("killick answer c1:1 re", ["reject", "respond"]),
        ("killick run app.py:re", ["app.py:review"]),
        ("killick run", ["run"]),
        ("killick pause --sta", ["--status"]),
        ("killick pause --status wa", ["waiting"]),
        ("killick pause --agent re", ["review"]),
        ("killick pause --tag ", ["walk", "small"]),
        ("killick pause claim_17 claim_1", ["claim_16", "claim_19", "claim_18"]),
        ("killick completion ", ["bash", "zsh", "fish"]),
        ("killick show --store nosuch.db ", []),
        ("killick show --store app.py ", []),
        ("killick run --app nosuch ", ["app.py:review"]),
    ],
)
def test_a_line_is_completed(
    office: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, line: str, values: list[str]
) -> None:
    found = [item.removeprefix("plain,") for item in completed(monkeypatch, capsys, line) if item]
    assert found[: len(values) or None] == values if "run --app" in line else found == values


def test_all_commands_are_offered_and_none_is_imported_for_it(office: Path) -> None:
    code = (
        "import sys; from killick.cli.main import main; main(); "
        "print([m for m in sys.modules if m in ('killick.cli.commands.run', 'killick.cli.context', "
        "'rich', 'pydantic')])"
    )
    env = plain_environment(**{COMPLETING: "bash_complete", "COMP_WORDS": "killick "})
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300, check=True
    )
    *items, imported = done.stdout.splitlines()
    assert sorted(item.removeprefix("plain,") for item in items) == sorted([*COMMANDS, *GROUPS])
    assert imported == "[]"


def test_files_are_left_to_the_shell(office: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    assert completed(monkeypatch, capsys, "killick ps --store ") == ["file,"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_are_told_what_a_run_is(
    office: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, shell: str
) -> None:
    found = "\n".join(completed(monkeypatch, capsys, "killick show claim_17", shell))
    assert "claim_17" in found
    assert "waiting review" in found


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
def test_the_script_names_the_program_and_its_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, shell: str
) -> None:
    found = call(capsys, "completion", shell)
    assert found.code == 0
    assert f"{COMPLETING}={shell}_complete" in found.out
    monkeypatch.setenv("SHELL", f"/usr/bin/{shell}")
    assert call(capsys, "completion").out == found.out


@pytest.mark.gate(1)
@pytest.mark.parametrize(
    ("line", "replies"),
    [
        ("killick in", "inbox"),
        ("killick answer claim_17:", "9"),
        ("killick answer claim_17:9 ap", "approve"),
        ("killick run app.py:gre", "greet"),
        ("killick show claim_1", "claim_16 claim_19 claim_18 claim_17"),
    ],
)
def test_a_real_bash_completes_words_with_colons(office: Path, line: str, replies: str) -> None:
    killick = office / "killick"
    killick.write_text(f'#!/bin/sh\nexec {sys.executable} -m killick "$@"\n', encoding="utf-8")
    killick.chmod(0o755)
    script = (
        f'eval "$(./killick completion bash)"\nCOMP_LINE="{line}" COMP_POINT={len(line)}\n'
        '_killick_completion ./killick\necho "${COMPREPLY[*]}"'
    )
    env = plain_environment() | {"PATH": f"{office}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "--norc", "-c", script], cwd=office, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{replies}\n", "")
