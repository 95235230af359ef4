"""The page and the example say what is so."""

from __future__ import annotations

import asyncio
import runpy
from pathlib import Path
from typing import Any

import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import RoundRobinGroupChat

from neighbours.autogen.scripted_client import ScriptedClient
from neighbours.trying import try_page
from pages import ROOT, script, split


def test_what_the_page_shows_is_so(tmp_path: Path) -> None:
    try_page("autogen", tmp_path)


def test_the_page_saves_and_loads_the_state_of_a_team(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    named: dict[str, Any] = {"__name__": "page"}
    page = (ROOT / "docs" / "neighbours" / "autogen.md").read_text(encoding="utf-8")
    exec(compile(script(split(page)[1]), "autogen.md", "exec", dont_inherit=True), named)
    for expected in ("one", "two"):
        clerk = AssistantAgent("clerk", ScriptedClient("one", "two"))
        asyncio.run(named["talk"](RoundRobinGroupChat([clerk], max_turns=1), "go on"))
        assert asyncio.run(clerk.save_state())["llm_context"]["messages"][-1]["content"] == expected


def test_the_example_pays_once_however_often_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        runpy.run_path(str(ROOT / "examples/neighbours/autogen_team.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert said.count("A7 is paid.") == 2
    assert said.count("paying 5 for A7") == 1
    assert said.count("the model is asked") == 2
