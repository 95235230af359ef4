"""Inngest owns scheduling, timers, events and failover; agents are as they are; the log is the truth.

The server is ours, and speaks the SDK's protocol: `inngest_server.py`.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import killick
from killick.adapters.inngest import Inngest
from neighbours import engine_agents as agents
from neighbours.inngest.inngest_server import FunctionRun, InngestServer, free_port
from neighbours.inngest.serve import client, served

Process = Callable[..., "subprocess.Popen[bytes]"]


@asynccontextmanager
async def serving(store: str) -> AsyncIterator[tuple[killick.Client, InngestServer]]:
    async with InngestServer() as server, killick.open_async(store) as kd:
        app = client(server.url)
        async with Inngest(kd, app) as engine, served(app, engine.functions, free_port()) as url:
            await server.sync(url)
            yield kd.as_sync(), server


def lines(world: Path) -> list[str]:
    return world.read_text().splitlines() if world.exists() else []


async def until(seen: Callable[[], Any]) -> None:
    async with asyncio.timeout(300):
        while not await asyncio.to_thread(seen):
            await asyncio.sleep(0.02)


def waiting(server: InngestServer, run: str) -> bool:
    return any(each.event["data"].get("run") == run and each.waits is not None for each in server.runs)


def ops(run: FunctionRun) -> int:
    return len(run.steps)


def test_an_agent_is_started_answered_and_sent_messages_by_events(store: str, world: Path) -> None:
    async def story() -> FunctionRun:
        async with serving(store) as (kd, server):
            [flow] = await server.send("killick/asker", run="people-1", input="ann")
            await until(lambda: waiting(server, "people-1"))
            await server.send("killick/run.answer", run="people-1", verb="approve", by="managers")
            await until(lambda: [wait.name for wait in kd.info("people-1").waits] == ["word"])
            await server.send("killick/run.send", run="people-1", name="word", body="thanks")
            return await server.ended(flow)

    flow = asyncio.run(story())
    assert (flow.status, flow.output) == ("completed", "ann: thanks")
    assert len(lines(world)) == 1


def test_a_run_that_anybody_starts_becomes_a_function_run(store: str, world: Path) -> None:
    async def story() -> None:
        async with serving(store) as (_, server):
            with killick.open(store) as elsewhere:  # knows nothing of Inngest
                handle = await elsewhere.as_async().start(agents.payer, "ann", id="whole-1")
                assert await handle.result(300) == "ann is paid"
            [flow] = [each for each in server.runs if each.event["data"]["run"] == "whole-1"]
            await server.ended(flow)
            assert flow.output == "ann is paid"
            # The same run, started again: the same result, and nothing is paid.
            [again] = await server.send("killick/payer", run="whole-1", input="ann")
            assert (await server.ended(again)).output == "ann is paid"

    asyncio.run(story())
    assert len(lines(world)) == 1


def test_a_sleep_is_a_step_of_inngests_and_nothing_of_ours_waits_for_it(store: str, world: Path) -> None:
    async def story() -> FunctionRun:
        async with serving(store) as (_, server):
            [flow] = await server.send("killick/patient", run="timers-1", input="ann")
            return await server.ended(flow)

    flow = asyncio.run(story())
    assert flow.output == "paid"
    assert ops(flow) == 4  # create, turn, sleep, turn
    assert len(lines(world)) == 2


def test_a_wrong_command_fails_its_own_function_run_alone(store: str, world: Path) -> None:
    async def story() -> None:
        async with serving(store) as (kd, server):
            [flow] = await server.send("killick/asker", run="wrong-1", input="ann")
            await until(lambda: waiting(server, "wrong-1"))
            for wrong in ({"verb": "maybe"}, {"answer": "yes"}, {}):
                [refused] = await server.send("killick/run.answer", run="wrong-1", **wrong)
                assert "AnswerRefused" in (await server.ended(refused)).output
            [nameless] = await server.send("killick/run.pause", by="ops")
            assert "needs the id of the run" in (await server.ended(nameless)).output
            await server.send("killick/run.answer", run="wrong-1", verb="reject", by="managers")
            assert (await server.ended(flow)).output == "no"
            assert kd.info("wrong-1").status == "completed"

    asyncio.run(story())


def test_pause_resume_and_cancel_are_events(store: str, world: Path) -> None:
    async def story() -> None:
        async with serving(store) as (kd, server):
            [flow] = await server.send("killick/asker", run="pause-1", input="ann")
            await until(lambda: waiting(server, "pause-1"))
            await server.send("killick/run.pause", run="pause-1", by="ops")
            await until(lambda: kd.info("pause-1").status == "paused")
            await until(lambda: waiting(server, "pause-1"))
            await server.send("killick/run.resume", run="pause-1", by="ops")
            await until(lambda: kd.info("pause-1").status == "waiting")
            await server.send("killick/run.cancel", run="pause-1", by="ops")
            assert "RunCancelled" in (await server.ended(flow)).output
            assert kd.info("pause-1").status == "cancelled"

    asyncio.run(story())


@pytest.mark.parametrize(
    ("agent", "given", "why"), [("failing", None, "no such account"), ("asker", {"a": 1}, "input")]
)
def test_a_run_that_fails_or_cannot_start_fails_its_function_run_for_good(
    store: str, agent: str, given: Any, why: str
) -> None:
    async def story() -> FunctionRun:
        async with serving(store) as (_, server):
            [flow] = await server.send(f"killick/{agent}", run="failing-1", input=given)
            return await server.ended(flow)

    flow = asyncio.run(story())
    assert flow.status == "failed"
    assert flow.output.startswith("for good: ")
    assert why in flow.output


def test_inngest_alone_pays_twice_when_an_app_dies_and_with_killick_it_pays_once(
    store: str, world: Path, process: Process
) -> None:
    plain_world = world.with_name("plain.txt")
    for each in (world, plain_world):
        each.with_suffix(".die").write_text("ann")  # whoever pays ann dies of it, the first time

    async def paying(server: InngestServer, event: str, *alone: str, **data: Any) -> Any:
        port = str(free_port())
        app = process("serve.py", store, server.url, port, *alone)
        await server.sync(f"http://127.0.0.1:{port}/api/inngest")
        [flow] = await server.send(event, **data)
        assert await asyncio.to_thread(app.wait, 300) == -signal.SIGKILL
        process("serve.py", store, server.url, port, *alone)
        return (await server.ended(flow)).output

    async def both() -> None:
        async with InngestServer() as server:
            assert await paying(server, "plain", "alone", whom="ann") == "paid"
            assert await paying(server, "killick/payer", run="crash-1", input="ann") == "ann is paid"

    asyncio.run(both())
    paid = (len(lines(plain_world)), len(lines(world)))
    print(f"an app dies after it paid: Inngest alone pays {paid[0]} times, with Killick {paid[1]}")
    assert paid == (2, 1)


def test_apps_die_while_commands_arrive_and_each_counts_once(store: str, world: Path, process: Process) -> None:
    names = [f"storm-{number}" for number in range(6)]

    async def story() -> list[Any]:
        async with InngestServer() as server:
            port = str(free_port())
            app = process("serve.py", store, server.url, port)
            await server.sync(f"http://127.0.0.1:{port}/api/inngest")
            flows = [(await server.send("killick/asker", run=name, input=name))[0] for name in names]
            with killick.open(store) as kd:
                for name in names:
                    await until(lambda: waiting(server, name))
                    await server.send("killick/run.send", run=name, name="word", body=name)
                    await server.send("killick/run.answer", run=name, verb="approve", by="managers")
                    if name in names[::2]:
                        app.send_signal(signal.SIGKILL)
                        await asyncio.to_thread(app.wait, 300)
                        app = process("serve.py", store, server.url, port)
                await until(lambda: all(kd.info(name).status == "completed" for name in names))
            return [(await server.ended(flow)).output for flow in flows]

    assert asyncio.run(story()) == [f"{name}: {name}" for name in names]
    assert Counter(line.split()[1] for line in lines(world)) == dict.fromkeys(names, 1)
