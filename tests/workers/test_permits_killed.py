"""So many calls at once, by tenant, over real workers that are killed: never more, and none is lost."""

from __future__ import annotations

import asyncio
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

import killick
import servers
from killick.model.facts import PERMIT

pytestmark = pytest.mark.slow

AT_ONCE: Final = 2
RUNS: Final = 24
KILLS: Final = 4

APP: Final = f"""
import asyncio
import pathlib
import sys

import killick

crm = killick.Limit("crm", at_once={AT_ONCE}, by="tenant")


@killick.tool(effect="idempotent", limit=crm)
async def call(tenant: str, key: killick.Key = killick.KEY) -> str:
    live = pathlib.Path("live") / tenant
    live.mkdir(parents=True, exist_ok=True)
    marker = live / key.replace(":", "_")  # a call that is repeated after a death has the one it had
    marker.touch()
    count = len(list(live.iterdir()))
    with open("calls", "a") as file:
        file.write(f"{{tenant}} {{count}} {{key}}\\n")
    await asyncio.sleep(0.05)
    marker.unlink()
    return tenant


@killick.agent
async def visit(run: killick.Run, tenant: str) -> list[str]:
    return [await run.call(call, tenant) for _ in range(2)]


async def serve() -> None:
    async with killick.open_async(sys.argv[1], grace_seconds=0.2) as kd:
        print("serving", flush=True)
        await kd.worker(lease_seconds=1, concurrency=8).serve()


if __name__ == "__main__":
    asyncio.run(serve())
"""


@pytest.mark.parametrize("store", ["sqlite", "postgres"])
def test_never_more_calls_than_allowed_are_in_flight_over_killed_workers_and_every_run_completes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str
) -> None:
    url = servers.postgres_store() if store == "postgres" else str(tmp_path / "killick.db")
    (tmp_path / f"permits_{store}.py").write_text(APP)
    started: list[subprocess.Popen[str]] = []

    def worker() -> None:
        command = [sys.executable, f"permits_{store}.py", url]
        started.append(subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True))
        assert (pipe := started[-1].stdout) is not None
        assert pipe.readline() == "serving\n"

    def end(process: subprocess.Popen[str]) -> None:
        process.kill()
        process.communicate()

    def calls() -> list[list[str]]:
        path = tmp_path / "calls"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    async def play(visit: killick.Agent[Any, list[str]]) -> None:
        async with killick.open_async(url) as kd:
            handles = [await kd.start(visit, f"t{number % 2}", id=f"visit{number}") for number in range(RUNS)]
            worker()
            worker()
            for struck in range(KILLS):
                while len(calls()) < (struck + 1) * 6:
                    await asyncio.sleep(0.005)
                end(started.pop(0))
                worker()
            for number, handle in enumerate(handles):
                assert await asyncio.wait_for(handle.result(), 240) == [f"t{number % 2}"] * 2
            assert kd.runtime.store.owned(PERMIT) == {}

    monkeypatch.syspath_prepend(tmp_path)
    try:
        asyncio.run(play(importlib.import_module(f"permits_{store}").visit))
    finally:
        for each in started:
            end(each)
    assert max(int(count) for _, count, _ in calls()) <= AT_ONCE
    assert len({key for *_, key in calls()}) == RUNS * 2
