"""The page and the example say what is so."""

from __future__ import annotations

import asyncio
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from autogen_agentchat.agents import AssistantAgent

from neighbours.autogen.scripted_client import ScriptedClient, call

ROOT = Path(__file__).resolve().parents[3]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    named: dict[str, Any] = {"__name__": "page"}
    for block in BLOCK.findall((ROOT / "docs/neighbours/autogen.md").read_text()):
        exec(compile(block, "autogen.md", "exec", dont_inherit=True), named)
    chat = ScriptedClient(call("c1", "pay", order="A7", amount=5), "done")
    assert [asyncio.run(named["turn"](chat, "pay A7")) for _ in range(2)] == ["done", "done"]
    assert chat.asked == 2

    for expected in ("one", "two"):
        clerk = AssistantAgent("clerk", ScriptedClient("one", "two"))
        asyncio.run(named["talk"](clerk, "go on"))
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
