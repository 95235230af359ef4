"""The page and the example run as they stand."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import killick
from neighbours.temporal.dev_server import CLI, DevServer

ROOT = Path(__file__).parents[3]


def test_the_page_runs(server: DevServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/neighbours/temporal.md").read_text()
    names: dict[str, Any] = {"__name__": "page"}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(block, "temporal.md", "exec", dont_inherit=True), names)

    async def story() -> None:
        serving = asyncio.create_task(names["serve"](server.address))
        async with killick.open_async("killick.db") as elsewhere:
            while not await elsewhere.inbox():
                assert not serving.done()
                await asyncio.sleep(0.05)
            await elsewhere.answer("refund-17", "approve", by="managers")
        await serving

    asyncio.run(story())
    assert capsys.readouterr().out == "completed\n"


def test_the_example_runs() -> None:
    env = {**os.environ, "PATH": f"{CLI.parent}:{os.environ['PATH']}"}
    command = [sys.executable, str(ROOT / "examples/neighbours/temporal.py")]
    told = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "40 to ann\n" in told
