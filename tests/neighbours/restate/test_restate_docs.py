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
from neighbours.restate.restate_server import RestateServer
from neighbours.restate.serve import listens

ROOT = Path(__file__).parents[3]


def test_the_page_runs(server: RestateServer, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/neighbours/restate.md").read_text()
    names: dict[str, Any] = {"__name__": "page"}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(block, "restate.md", "exec", dont_inherit=True), names)

    async def story() -> None:
        stop = asyncio.Event()
        serving = asyncio.create_task(names["endpoint"](stop, server.ingress, port))
        await listens(port)
        await asyncio.to_thread(server.register, port)
        async with killick.open_async("killick.db") as elsewhere:
            handle = await elsewhere.start(names["refund"], "ann", id="refund-18")
            while not await elsewhere.inbox():
                assert not serving.done()
                await asyncio.sleep(0.05)
            await elsewhere.answer("refund-18", "approve", by="managers")
            assert await handle.result(20) == "refunded"
        stop.set()
        await serving

    asyncio.run(story())


def test_the_example_runs(server: RestateServer, port: int) -> None:
    env = {**os.environ, "INGRESS": server.ingress, "ADMIN": server.admin, "PORT": str(port)}
    command = [sys.executable, str(ROOT / "examples/neighbours/restate_engine.py")]
    told = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True).stdout
    assert told == "40 to ann\n"
