"""The page and the example say what is so."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from crewai import BaseLLM

from neighbours.trying import try_page
from pages import ROOT, script, split


class Says(BaseLLM):
    said: str

    def call(self, messages: Any, *args: Any, **kwargs: Any) -> str:
        return f"Thought: I now know the final answer\nFinal Answer: {self.said}"

    def get_input_tokens_count(self, *args: Any, **kwargs: Any) -> int:
        return 10


def test_what_the_page_shows_is_so(tmp_path: Path) -> None:
    try_page("crewai", tmp_path)


def test_the_crew_of_the_page_asks_its_model_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    named: dict[str, Any] = {"__name__": "page"}
    page = (ROOT / "docs" / "neighbours" / "crewai.md").read_text(encoding="utf-8")
    exec(compile(script(split(page)[1]), "crewai.md", "exec", dont_inherit=True), named)
    said = [named["work"](Says(model="scripted/one", said=said), "pay A7") for said in ("first", "second")]
    assert said == ["first", "first"]


def test_the_example_pays_once_however_often_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CREWAI_STORAGE_DIR", str(tmp_path))
    for _ in range(2):
        runpy.run_path(str(ROOT / "examples/neighbours/crewai_flow.py"), run_name="__main__")
    told = capsys.readouterr().out
    assert told.count("A7 is paid and on its way.") == 2
    assert told.count("paying 5 for A7") == told.count("shipping A7") == 1
