"""`killick check`: its verdict, its progress on a terminal, and its reports for CI."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from killick.check.findings import Finding, Reached, Report
from killick.cli.commands.check import document, rendered
from killick.cli.main import main

APP = """\
import killick


@killick.tool(effect="idempotent", name="reported_book")
async def book(day: str) -> str:
    return day


@killick.tool(effect="reads", name="reported_look")
async def look(day: str, key: killick.Key = killick.KEY) -> int:
    return 1


@killick.agent(name="reported_books")
async def books(run: killick.Run, day: str) -> str:
    if await run.call(look, day) > 1:
        return "full"
    return await run.call(book, day)


@killick.agent(name="reported_looks")
async def looks(run: killick.Run, day: str) -> int:
    return await run.call(look, day)


both = [books, looks]
"""

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    monkeypatch.chdir(tmp_path)
    Path("app.py").write_text(APP, encoding="utf-8")

    def run(*args: str) -> tuple[int, str, str]:
        code = main(["check", *args])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_ci_gets_every_finding_with_its_file_and_line(cli: Cli) -> None:
    code, out, err = cli("app.py:both", "--json")
    assert (code, err) == (1, "")
    broken, sound = json.loads(out)
    assert (broken["verdict"], sound["verdict"], sound["holds"]) == ("faults", "sound", True)
    [found] = broken["findings"]
    assert (found["kind"], found["weight"], found["file"], found["line"]) == ("twice", "fault", "app.py", 4)
    assert (broken["reached"]["tools"], broken["reached"]["tools_never"]) == (2, [])


def test_a_pipe_gets_no_progress(cli: Cli) -> None:
    _, out, err = cli("app.py:looks")
    assert err == ""
    assert "\r" not in out
    assert "interrupting" not in out


def test_a_terminal_sees_one_line_that_is_rewritten(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(
        "killick.cli.context.Shell.err",
        property(lambda shell: Console(file=terminal, force_terminal=True, width=100)),
        raising=False,
    )
    cli("app.py:looks")
    shown = terminal.getvalue()
    assert "interrupting reported_looks" in shown
    lines = [line for line in shown.replace("\r", "\n").splitlines() if "interrupting" in line]
    assert lines
    assert shown.rstrip().endswith("\x1b[2K")  # the last line is erased


REPORT: dict[str, Any] = {
    "agent": "a", "where": "a.py:1", "left_alone": "completed", "steps": 1, "questions": 0, "tools": (),
    "ways": {"death": 2},
}  # fmt: skip


def shown(report: Report) -> str:
    lines = [line.plain for line in rendered(report, 1.0, 120)]
    assert lines == [line.rstrip() for line in lines], "a line ends with no blanks"
    return "\n".join(lines)


def finding(**changes: Any) -> Finding:
    told: dict[str, Any] = {"kind": "unreached", "title": "t", "where": "a.py:3", "why": "w", "fix": "f"}
    return Finding(**(told | changes))


def test_green_is_only_what_is_whole() -> None:
    assert "✓" in shown(Report(**REPORT, findings=()))
    for report in (
        Report(**REPORT, findings=(finding(),)),
        Report(**REPORT, findings=(), cut_short="stopped after 2 rehearsals"),
    ):
        assert "✓" not in shown(report)
        assert report.holds


def test_how_many_tools_were_called_is_shown() -> None:
    text = shown(Report(**REPORT, findings=(), reached=Reached(tools=3, tools_never=("x",))))
    assert "2 of 3 tools" in text


def test_a_place_without_a_line_is_a_file_alone() -> None:
    found = document(Report(**REPORT, findings=(finding(where="a b.py:3"), finding(where="partial"))))["findings"]
    assert [(each["file"], each["line"]) for each in found] == [("a b.py", 3), ("partial", None)]
