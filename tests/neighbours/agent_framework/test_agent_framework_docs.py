"""The page and the example say what is so."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from neighbours.trying import try_page
from pages import ROOT


def test_what_the_page_shows_is_so(tmp_path: Path) -> None:
    try_page("agent-framework", tmp_path)


def test_the_example_pays_once_however_often_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        runpy.run_path(str(ROOT / "examples/neighbours/agent_framework_agent.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert said.count("A7 is paid.") == 2
    assert said.count("paying 5 for A7") == 1
    assert said.count("the model is asked") == 3
