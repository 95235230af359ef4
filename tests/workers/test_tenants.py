"""Tenants on one PostgreSQL store: a rate limit by tenant holds over killed workers, and delays no other tenant."""

from __future__ import annotations

import asyncio
import importlib
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Final

import pytest

import killick
import servers

pytestmark = pytest.mark.slow

PER_HOUR: Final = 5
BUSY: Final = 20
CALM: Final = 4

APP: Final = f"""
import asyncio
import sys

import killick


@killick.tool(effect="idempotent", limit=killick.Limit("crm", "{PER_HOUR}/h", by="tenant"), patience="2d")
async def call(tenant: str, number: int, key: killick.Key = killick.KEY) -> int:
    with open("calls", "a") as file:
        file.write(f"{{tenant}} {{key}}\\n")
    await asyncio.sleep(0.05)
    return number


@killick.agent
async def visit(run: killick.Run, whom: tuple[str, int]) -> int:
    return await run.call(call, *whom)


async def serve() -> None:
    async with killick.open_async(sys.argv[1], grace_seconds=0.2) as kd:
        print("serving", flush=True)
        await kd.worker(lease_seconds=1, concurrency=2).serve()


if __name__ == "__main__":
    asyncio.run(serve())
"""


def test_a_limit_by_tenant_is_exact_over_killed_workers_and_holds_up_no_other_tenant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = servers.postgres_store()
    (tmp_path / "tenants_app.py").write_text(APP)

    def worker() -> subprocess.Popen[str]:
        started = subprocess.Popen(
            [sys.executable, "tenants_app.py", url], cwd=tmp_path, stdout=subprocess.PIPE, text=True
        )
        assert started.stdout is not None
        assert started.stdout.readline() == "serving\n"
        return started

    def end(process: subprocess.Popen[str]) -> None:
        process.kill()
        process.communicate()

    def calls() -> list[list[str]]:
        path = tmp_path / "calls"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    async def story(kd: killick.AsyncClient, visit: killick.Agent[Any, int]) -> None:
        for number in range(BUSY):
            await kd.start(visit, ("busy", number), id=f"busy{number}")
        workers = [worker(), worker()]
        for struck in range(3):
            while len(calls()) < struck + 1:
                await asyncio.sleep(0.01)
            end(workers.pop(0))
            workers.append(worker())
        # The busy tenant used up its hour, and was there first.
        handles = [await kd.start(visit, ("calm", number), id=f"calm{number}") for number in range(CALM)]
        for number, handle in enumerate(handles):
            assert await asyncio.wait_for(handle.result(), 120) == number
        for each in workers:
            end(each)

    async def play(visit: killick.Agent[Any, int]) -> None:
        async with killick.open_async(url) as kd:
            await story(kd, visit)

    monkeypatch.syspath_prepend(tmp_path)
    asyncio.run(play(importlib.import_module("tenants_app").visit))
    found = Counter(tenant for tenant, _ in calls())
    keys = {key for tenant, key in calls() if tenant == "busy"}
    assert found["calm"] == CALM
    # A call that was cut off is made again under its key, and takes a turn of its own.
    assert len(keys) <= found["busy"] <= PER_HOUR
