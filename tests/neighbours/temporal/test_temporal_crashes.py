"""Processes die, workers and the server itself: every run ends, and every effect is there once."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import killick
from killick.adapters.temporal import Temporal
from killick.model.events import Started
from neighbours import engine_agents as agents
from neighbours.results import result
from neighbours.temporal import plain
from neighbours.temporal.dev_server import DevServer

# Temporal cancels an activity whose worker was killed, and warns that the worker does not know it.
pytestmark = pytest.mark.filterwarnings("ignore:Cannot find activity to cancel")

Process = Callable[..., "subprocess.Popen[bytes]"]


def lines(world: Path) -> list[str]:
    return world.read_text().splitlines() if world.exists() else []


def wait_until(seen: Callable[[], Any]) -> None:
    until = time.monotonic() + 900
    while not seen():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_temporal_alone_pays_twice_when_a_worker_dies_and_with_killick_it_pays_once(
    server: DevServer, store: str, world: Path, process: Process
) -> None:
    plain_world = world.with_name("plain.txt")
    for each in (world, plain_world):
        each.with_suffix(".die").write_text("ann")  # whoever pays ann dies of it, the first time

    async def both() -> None:
        client = await server.client()
        alone = await client.start_workflow(plain.PlainPayer.run, "ann", id="crash-alone", task_queue="crash-alone")
        async with killick.open_async(store) as kd:
            engine = Temporal(kd, client, task_queue="crash", heartbeat_seconds=2, build_id="tests")
            ours = await engine.start(agents.payer, "ann", id="crash-1")
            dying = [
                process("plain.py", server.address, "crash-alone"),
                process("serve.py", store, server.address, "crash"),
            ]
            for each in dying:
                assert await asyncio.to_thread(each.wait, 300) == -signal.SIGKILL
            async with plain.worker(client, "crash-alone"), engine:
                assert await alone.result() == "paid"
                assert await ours.result() == "ann is paid"

    asyncio.run(both())
    paid = (len(lines(plain_world)), len(lines(world)))
    result("temporal", killed="a worker, after a payment", alone=f"{paid[0]} payments", ours=f"{paid[1]} payment")
    assert paid == (2, 1)


def test_workers_and_the_server_die_under_load_and_every_run_ends_with_every_effect_once(
    server: DevServer, store: str, world: Path, process: Process
) -> None:
    names = [f"load-{number}" for number in range(12)]
    world.with_suffix(".die").write_text("load-3-before")  # whoever pays this dies of it, the first time

    async def all_ended(kd: killick.Client, handles: list[Any], last: subprocess.Popen[bytes]) -> list[str]:
        async with Temporal(kd, await server.client(), task_queue="load", heartbeat_seconds=2, build_id="tests"):
            last.kill()
            return list(await asyncio.gather(*(asyncio.to_thread(handle.result, 900) for handle in handles)))

    with killick.open(store) as kd:
        handles = [kd.start(agents.patient, name, id=name) for name in names]
        workers = [process("serve.py", store, server.address, "load") for _ in range(2)]
        wait_until(lambda: any(each.poll() is not None for each in workers))
        [last] = [each for each in workers if each.poll() is None]
        server.kill()
        server.start()
        outcomes = asyncio.run(all_ended(kd, handles, last))
    assert outcomes == ["paid"] * len(names)
    counts = Counter(line.split()[1] for line in lines(world))
    print(f"{len(names)} runs, two workers and the server killed: {sum(counts.values())} payments")
    assert counts == {f"{name}-{when}": 1 for name in names for when in ("before", "after")}


def test_a_worker_that_is_told_to_stop_finishes_its_step_and_another_goes_on(
    server: DevServer, store: str, world: Path, process: Process
) -> None:
    async def goes_on(kd: killick.Client, handle: Any) -> int:
        async with Temporal(kd, await server.client(), task_queue="stopping", build_id="tests"):
            return int(await asyncio.to_thread(handle.result, 900))

    with killick.open(store) as kd:
        handle = kd.start(agents.walker, 1_500, id="stopping-1")
        first = process("serve.py", store, server.address, "stopping")
        wait_until(lambda: kd.runtime.log.head("stopping-1").seq > 60)
        first.terminate()
        assert first.wait(300) == 0
        assert kd.info("stopping-1").status != "completed"
        assert asyncio.run(goes_on(kd, handle)) == 1_500
        began = Counter(
            each.event.step for each in kd.events("stopping-1", limit=10_000) if isinstance(each.event, Started)
        )
    assert set(began.values()) == {1}
