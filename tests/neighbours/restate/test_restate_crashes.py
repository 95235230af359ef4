"""Processes die, endpoints and the server itself: every run ends, and every effect is there once."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

import killick
from killick.adapters.restate import Restate
from killick.model.events import Started
from neighbours import engine_agents as agents
from neighbours.restate import plain
from neighbours.restate.restate_server import RestateServer, free_port
from neighbours.restate.serve import served
from neighbours.results import result

Process = Callable[..., "subprocess.Popen[bytes]"]


def lines(world: Path) -> list[str]:
    return world.read_text().splitlines() if world.exists() else []


def wait_until(seen: Callable[[], Any]) -> None:
    until = time.monotonic() + 300
    while not seen():
        assert time.monotonic() < until
        time.sleep(0.01)


def wait_for_port(port: int) -> None:
    wait_until(lambda: _answers(port))


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).is_success
    except httpx.HTTPError:
        return False


async def goes_on(kd: killick.Client, server: RestateServer, port: int, handles: list[Any]) -> list[Any]:
    """Serve here until some runs have ended."""
    async with Restate(kd, server.ingress) as engine, served(engine.app, port):
        ended = await asyncio.gather(*(asyncio.to_thread(handle.result, 900) for handle in handles))
        await engine.drain()
        return list(ended)


def test_restate_alone_pays_twice_when_an_endpoint_dies_and_with_killick_it_pays_once(
    server: RestateServer, store: str, port: int, world: Path, process: Process
) -> None:
    plain_world, plain_port = world.with_name("plain.txt"), free_port()
    for each in (world, plain_world):
        each.with_suffix(".die").write_text("ann")  # whoever pays ann dies of it, the first time
    dying = [process("plain.py", str(plain_port)), process("serve.py", store, server.ingress, str(port))]
    for each in (plain_port, port):
        wait_for_port(each)
        server.register(each)
    asked = httpx.post(f"{server.ingress}/plain/pay/send", json="ann", headers={"idempotency-key": "ann"}).json()[
        "invocationId"
    ]

    async def both() -> None:
        with killick.open(store) as kd:
            handle = kd.start(agents.payer, "ann", id="crash-1")
            for each in dying:
                assert await asyncio.to_thread(each.wait, 300) == -signal.SIGKILL
            async with served(plain.app, plain_port):
                assert await goes_on(kd, server, port, [handle]) == ["ann is paid"]
                attach = f"{server.ingress}/restate/invocation/{asked}/attach"
                assert (await asyncio.to_thread(httpx.get, attach, timeout=30)).json() == "paid"

    asyncio.run(both())
    paid = (len(lines(plain_world)), len(lines(world)))
    result("restate", killed="an endpoint, after a payment", alone=f"{paid[0]} payments", ours=f"{paid[1]} payment")
    assert paid == (2, 1)


def test_an_endpoint_and_the_server_die_under_load_and_every_run_ends_with_every_effect_once(
    server: RestateServer, store: str, port: int, world: Path, process: Process
) -> None:
    names = [f"load-{number}" for number in range(12)]
    world.with_suffix(".die").write_text("load-3-before")  # whoever pays this dies of it, the first time

    async def without_the_server(kd: killick.Client, handles: list[Any]) -> list[Any]:
        """The server dies while the last endpoint is at work, and comes back."""
        ending = asyncio.create_task(goes_on(kd, server, port, handles))
        await asyncio.to_thread(wait_until, lambda: len(lines(world)) > len(names))
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        return await ending

    with killick.open(store) as kd:
        first = process("serve.py", store, server.ingress, str(port))
        wait_for_port(port)
        server.register(port)
        handles = [kd.start(agents.patient, name, id=name) for name in names]
        wait_until(lambda: first.poll() is not None)
        outcomes = asyncio.run(without_the_server(kd, handles))
    assert first.returncode == -signal.SIGKILL
    assert outcomes == ["paid"] * len(names)
    counts = Counter(line.split()[1] for line in lines(world))
    print(f"{len(names)} runs, an endpoint and the server killed: {sum(counts.values())} payments")
    assert counts == {f"{name}-{when}": 1 for name in names for when in ("before", "after")}


def test_an_endpoint_that_is_told_to_stop_finishes_its_step_and_another_goes_on(
    server: RestateServer, store: str, port: int, world: Path, process: Process
) -> None:
    with killick.open(store) as kd:
        first = process("serve.py", store, server.ingress, str(port))
        wait_for_port(port)
        server.register(port)
        handle = kd.start(agents.walker, 1_500, id="stopping-1")
        wait_until(lambda: kd.runtime.log.head("stopping-1").seq > 60)
        first.send_signal(signal.SIGINT)
        assert first.wait(300) == 0
        assert kd.info("stopping-1").status != "completed"
        assert asyncio.run(goes_on(kd, server, port, [handle])) == [1_500]
        events = [each.event for each in kd.events("stopping-1", limit=10_000)]
    began = Counter(event.step for event in events if isinstance(event, Started))
    assert set(began.values()) == {1}
