"""What the page and the example of the Claude Agent SDK show is so."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from neighbours.trying import try_page
from pages import ROOT


def test_what_the_page_shows_is_so(tmp_path: Path) -> None:
    try_page("claude-agent", tmp_path)


def test_the_example_pays_once_and_finds_the_session_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "examples/neighbours/claude_agent.py"), run_name="__main__")
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("paying 5 to ann, key message-1:step_")
    assert rest == ["['Pay ann 5.']"] * 2
