"""What the page and the example of the OpenAI Agents SDK show is so. Done here, because importing the SDK is slow."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

import agents
from neighbours.trying import try_page
from pages import ROOT, script, split

agents.set_tracing_disabled(True)


def test_what_the_page_shows_is_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs/neighbours/openai-agents.md"
    (tmp_path / "page.py").write_text(script(split(page.read_text(encoding="utf-8"))[1]), encoding="utf-8")
    shown = runpy.run_path("page.py")
    shown["runner"].close()
    assert [amount for _, amount, _ in shown["paid"]] == [5]


def test_what_the_tutorial_shows_is_so(tmp_path: Path) -> None:
    try_page("start-openai-agents", tmp_path)


def test_the_example_asks_and_pays_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "examples/neighbours/openai_agents.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("thread-1: waits for answer at step 1.4.1: pay(account=17, amount=500)")
    assert lines[1].startswith("paying 500 into 17, key thread-1:step_1.4.1:pay:")
    assert lines[2:] == ["Ann has her 500."]
