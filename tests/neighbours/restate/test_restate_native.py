"""An agent as a Restate engineer expects it: an object per agent, called over HTTP, with handlers for people."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx

import killick
from neighbours import engine_agents as engine_agents
from neighbours.restate.restate_server import RestateServer
from neighbours.restate.test_restate_crashes import lines, wait_for_port, wait_until
from neighbours.restate.test_restate_engine import serving

Process = Callable[..., "subprocess.Popen[bytes]"]


def post(server: RestateServer, path: str, body: Any = None, *, status: int = 200) -> Any:
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{server.ingress}/{path}", content=json.dumps(body), headers=headers, timeout=300)
    assert answer.status_code == status, answer.text
    return answer.json() if answer.content else None


def asks(server: RestateServer, path: str, kind: str) -> bool:
    """Whether a run waits for something of this kind, as Restate knows it."""
    answer = httpx.post(f"{server.ingress}/{path}/state", timeout=300)
    state = answer.json() if answer.content else None
    return state is not None and [each["kind"] for each in state["waits"]] == [kind]


def test_an_agent_is_called_answered_and_sent_messages_over_http(
    server: RestateServer, store: str, port: int, world: Path
) -> None:
    async def story() -> None:
        async with serving(server, store, port) as (kd, _):
            calling = asyncio.create_task(asyncio.to_thread(post, server, "asker/native-1/run", "ann"))
            await asyncio.to_thread(wait_until, lambda: asks(server, "asker/native-1", "answer"))
            approve = {"verb": "approve", "by": "managers"}
            await asyncio.to_thread(post, server, "asker/native-1/answer", approve)
            await asyncio.to_thread(post, server, "asker/native-1/send", {"name": "word", "body": "thanks"})
            assert await calling == "ann: thanks"
            # Once more: the same run, the same result, and nothing is paid.
            assert await asyncio.to_thread(post, server, "asker/native-1/run", "ann") == "ann: thanks"
            wrong = await asyncio.to_thread(post, server, "asker/native-1/run", "bob", status=400)
            assert "RunMismatch" in wrong["message"]
            assert kd.info("native-1").agent == "asker"

    asyncio.run(story())
    assert len(lines(world)) == 1


def test_a_wrong_answer_is_the_error_of_its_caller_and_the_question_stays_open(
    server: RestateServer, store: str, port: int
) -> None:
    async def story() -> None:
        async with serving(server, store, port) as (kd, engine):
            handle = await engine.start(engine_agents.asker, "ann", id="wrong-1")
            await asyncio.to_thread(wait_until, lambda: asks(server, "asker/wrong-1", "answer"))
            for wrong in ({"verb": "maybe"}, {"verb": "approve", "step": "9"}, {"answer": "yes"}, {}):
                refused = await asyncio.to_thread(post, server, "asker/wrong-1/answer", wrong, status=400)
                assert "AnswerRefused" in refused["message"]
            assert len(kd.inbox()) == 1
            await asyncio.to_thread(post, server, "asker/wrong-1/answer", {"verb": "reject"})
            assert await handle.result(300) == "no"
            await asyncio.to_thread(post, server, "asker/nobody/pause", {}, status=404)

    asyncio.run(story())


def test_a_failed_run_is_an_error_of_its_call(server: RestateServer, store: str, port: int) -> None:
    async def story() -> None:
        async with serving(server, store, port):
            failed = await asyncio.to_thread(post, server, "failing/failed-1/run", None, status=500)
            assert "RunFailed" in failed["message"]
            assert "no such account" in failed["message"]

    asyncio.run(story())


def test_cancelling_a_call_cancels_its_run(server: RestateServer, store: str, port: int) -> None:
    async def story() -> None:
        async with serving(server, store, port) as (kd, _):
            sent = await asyncio.to_thread(post, server, "asker/cancelled-1/run/send", "ann", status=202)
            await asyncio.to_thread(wait_until, lambda: asks(server, "asker/cancelled-1", "answer"))
            cancel = f"{server.admin}/invocations/{sent['invocationId']}/cancel"
            (await asyncio.to_thread(httpx.patch, cancel, timeout=300)).raise_for_status()
            await asyncio.to_thread(wait_until, lambda: kd.info("cancelled-1").status == "cancelled")

    asyncio.run(story())


def test_pause_and_resume_are_handlers(server: RestateServer, store: str, port: int) -> None:
    async def story() -> None:
        async with serving(server, store, port) as (kd, engine):
            handle = await engine.start(engine_agents.asker, "ann", id="paused-1")
            await asyncio.to_thread(wait_until, lambda: asks(server, "asker/paused-1", "answer"))
            await asyncio.to_thread(post, server, "asker/paused-1/pause", {"by": "ops"})
            await asyncio.to_thread(wait_until, lambda: kd.info("paused-1").status == "paused")
            await asyncio.to_thread(post, server, "asker/paused-1/resume", {"by": "ops"})
            await asyncio.to_thread(wait_until, lambda: kd.info("paused-1").status == "waiting")
            await asyncio.to_thread(post, server, "asker/paused-1/answer", {"verb": "reject"})
            assert await handle.result(300) == "no"

    asyncio.run(story())


def test_endpoints_die_while_answers_and_messages_arrive_and_each_counts_once(
    server: RestateServer, store: str, port: int, world: Path, process: Process
) -> None:
    names = [f"storm-{number}" for number in range(6)]

    def tell(name: str) -> Any:
        wait_until(lambda: asks(server, f"asker/{name}", "answer"))
        post(server, f"asker/{name}/send", {"name": "word", "body": name})
        post(server, f"asker/{name}/answer", {"verb": "approve", "by": "managers"})
        return post(server, f"asker/{name}/run", name)

    async def story() -> list[Any]:
        # Each caller blocks a thread until its run has ended.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(16))
        endpoint = process("serve.py", store, server.ingress, str(port))
        await asyncio.to_thread(wait_for_port, port)
        server.register(port)
        for name in names:
            await asyncio.to_thread(post, server, f"asker/{name}/run/send", name, status=202)
        telling = [asyncio.create_task(asyncio.to_thread(tell, name)) for name in names]
        with killick.open(store) as kd:
            for kill in range(2):
                is_late = partial(lambda kill: answered(kd, names) > kill or all(task.done() for task in telling), kill)
                await asyncio.to_thread(wait_until, is_late)
                endpoint.send_signal(signal.SIGKILL)
                await asyncio.to_thread(endpoint.wait, 300)
                endpoint = process("serve.py", store, server.ingress, str(port))
            return list(await asyncio.gather(*telling))

    assert asyncio.run(story()) == [f"{name}: {name}" for name in names]
    assert Counter(line.split()[1] for line in lines(world)) == dict.fromkeys(names, 1)


def answered(kd: killick.Client, names: list[str]) -> int:
    """How many runs have used their answer."""
    infos = [kd.info(row.id) for row in kd.list() if row.id in names]
    return sum(each.status == "completed" or [wait.name for wait in each.waits] == ["word"] for each in infos)
