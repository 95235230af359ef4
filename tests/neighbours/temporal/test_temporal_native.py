"""An agent as a Temporal engineer expects it: a workflow type, updates, signals, search attributes, a sandbox."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from temporalio import activity
from temporalio.client import (
    Client,
    WorkflowExecutionStatus,
    WorkflowFailureError,
    WorkflowHandle,
    WorkflowUpdateFailedError,
)
from temporalio.exceptions import ApplicationError
from temporalio.worker import Replayer

import killick
from killick.adapters.temporal import Temporal
from killick.adapters.temporal_workflow import RunWorkflow
from neighbours import engine_agents as agents
from neighbours.temporal.dev_server import CLI, DevServer
from neighbours.temporal.test_temporal_crashes import lines
from neighbours.temporal.test_temporal_engine import events, serving, until

Process = Callable[..., "subprocess.Popen[bytes]"]


def temporal(server: DevServer, *words: str) -> Any:
    """Temporal's own command line, which is written in Go: it knows an agent's name, and JSON."""
    command = [str(CLI), *words, "--address", server.address, "--output", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) if done.stdout.strip().startswith(("{", "[")) else done.stdout


async def waits(workflow: WorkflowHandle[Any, Any], kind: str) -> None:
    """Until a workflow knows that its run waits for something of this kind."""
    async with asyncio.timeout(300):
        while True:
            state = await workflow.query("state")
            if state is not None and [each["kind"] for each in state["waits"]] == [kind]:
                return
            await asyncio.sleep(0.02)


def test_an_agent_is_started_answered_and_sent_messages_from_another_language(
    server: DevServer, store: str, world: Path
) -> None:
    async def story() -> Any:
        async with serving(server, store, "native") as (_, _, client):
            flow = "--workflow-id", "native-1"
            start = ("workflow", "start", "--type", "asker", *flow, "--task-queue", "native", "--input", '"ann"')
            await asyncio.to_thread(temporal, server, *start)
            workflow = client.get_workflow_handle("native-1")
            await waits(workflow, "answer")
            answer = '{"verb": "approve", "by": "managers"}'
            update = ("workflow", "update", "execute", *flow, "--name", "answer", "--input", answer)
            await asyncio.to_thread(temporal, server, *update)
            await asyncio.to_thread(
                temporal, server, "workflow", "signal", *flow, "--name", "word", "--input", '{"so": "be it"}'
            )
            return await asyncio.to_thread(temporal, server, "workflow", "result", *flow)

    shown = asyncio.run(story())
    assert shown["result"] == "ann: {'so': 'be it'}"
    assert len(lines(world)) == 1
    with killick.open(store) as kd:
        assert kd.info("native-1").agent == "asker"


def test_a_wrong_answer_is_rejected_by_the_validator_and_leaves_nothing_in_the_history(
    server: DevServer, store: str, world: Path
) -> None:
    wrong: list[dict[str, Any]] = [
        {"verb": "maybe"}, {"verb": "approve", "value": 7}, {"verb": "approve", "step": "9"}, {"verb": "respond"},
        {"answer": "yes"}, {},
    ]  # fmt: skip

    async def story() -> tuple[Counter[str], Counter[str]]:
        async with serving(server, store, "wrong") as (_, engine, client):
            workflow = await engine.start(agents.asker, "ann", id="wrong-1")
            await waits(workflow, "answer")
            for each in wrong:
                with pytest.raises(WorkflowUpdateFailedError) as raised:
                    await workflow.execute_update("answer", each)
                assert isinstance(raised.value.cause, ApplicationError)
                assert raised.value.cause.type == "AnswerRefused"
            before = await events(client, "wrong-1")
            await workflow.execute_update("answer", {"verb": "reject", "by": "managers"})
            assert await workflow.result() == "no"
            return before, await events(client, "wrong-1")

    before, after = asyncio.run(story())
    assert before["WORKFLOW_EXECUTION_UPDATE_ACCEPTED"] == 0
    assert after["WORKFLOW_EXECUTION_UPDATE_COMPLETED"] == 1


def test_an_answer_that_only_the_store_can_refuse_fails_its_update(server: DevServer, store: str) -> None:
    async def story() -> None:
        client = await server.client()
        roles = {"mia": ("managers",), "eve": ("interns",)}
        async with (
            killick.open_async(store, roles=lambda who: roles.get(who, ())) as kd,
            Temporal(kd, client, task_queue="roles", build_id="tests") as engine,
        ):
            workflow = await engine.start(agents.asker, "ann", id="roles-1")
            await waits(workflow, "answer")
            with pytest.raises(WorkflowUpdateFailedError) as raised:
                await workflow.execute_update("answer", {"verb": "approve", "by": "eve"})
            assert isinstance(raised.value.cause, ApplicationError)
            assert raised.value.cause.type == "NotAsked"
            await workflow.execute_update("answer", {"verb": "reject", "by": "mia"})
            assert await workflow.result() == "no"

    asyncio.run(story())


def test_signals_are_messages_in_their_order_even_before_the_run_exists(server: DevServer, store: str) -> None:
    async def story() -> None:
        client = await server.client()
        started: WorkflowHandle[Any, Any] = await client.start_workflow(
            "listener", 20, id="order-1", task_queue="order", start_signal="number", start_signal_args=[0]
        )
        for number in range(1, 20):
            await started.signal("number", number)
        async with serving(server, store, "order"):
            assert await started.result() == list(range(20))

    asyncio.run(story())


def test_pause_and_resume_are_updates(server: DevServer, store: str, world: Path) -> None:
    async def story() -> None:
        async with serving(server, store, "pause") as (kd, engine, _):
            workflow = await engine.start(agents.asker, "ann", id="pause-1")
            await waits(workflow, "answer")
            await workflow.execute_update("pause", {"by": "ops", "because": "an audit"})
            await until(lambda: kd.info("pause-1").status == "paused")
            await workflow.execute_update("resume", {"by": "ops"})
            await until(lambda: kd.info("pause-1").status == "waiting")
            await kd.as_async().answer("pause-1", "reject", by="managers")
            assert await workflow.result() == "no"

    asyncio.run(story())


def test_search_attributes_and_details_say_which_agent_waits_for_whom(server: DevServer, store: str) -> None:
    async def found(client: Client, query: str) -> list[str]:
        return [each.id async for each in client.list_workflows(query)]

    async def story() -> None:
        async with serving(server, store, "search") as (_, engine, client):
            workflow = await engine.start(agents.asker, "ann", id="search-1")
            await waits(workflow, "answer")
            query = "KillickAgent = 'asker' AND KillickStatus = 'waiting' AND KillickWaitingFor = 'managers'"
            async with asyncio.timeout(300):
                while "search-1" not in await found(client, query):  # what is listed comes a little later
                    await asyncio.sleep(0.05)
            metadata = await workflow.query("__temporal_workflow_metadata")
            assert "asked of managers: Pay ann?" in metadata.current_details
            description = await workflow.describe()
            assert description.workflow_type == "asker"
            await workflow.execute_update("answer", {"verb": "reject", "by": "managers"})
            await workflow.result()
            async with asyncio.timeout(300):
                while "search-1" not in await found(client, "KillickStatus = 'completed' AND WorkflowType = 'asker'"):
                    await asyncio.sleep(0.05)

    asyncio.run(story())


@pytest.mark.parametrize("args", [["ann", "bob"], [{"not": "text"}]], ids=["two inputs", "another type"])
def test_an_input_that_the_agent_does_not_take_fails_the_workflow(
    server: DevServer, store: str, args: list[Any]
) -> None:
    async def story() -> None:
        async with serving(server, store, "inputs") as (kd, _, client):
            workflow = await client.start_workflow("asker", args=args, id=f"inputs-{len(args)}", task_queue="inputs")
            with pytest.raises(WorkflowFailureError):
                await workflow.result()
            assert kd.list() == []

    asyncio.run(story())


def test_a_finished_run_started_again_returns_its_result_and_does_nothing(
    server: DevServer, store: str, world: Path
) -> None:
    async def story() -> None:
        async with serving(server, store, "again") as (_, _, client):
            for _ in range(2):
                given: dict[str, Any] = {"id": "again-1", "task_queue": "again"}
                assert await client.execute_workflow("payer", "ann", **given) == "ann is paid"
            with pytest.raises(WorkflowFailureError) as raised:
                await client.execute_workflow("payer", "bob", **given)
            failed = getattr(raised.value.cause, "cause", None)
            assert isinstance(failed, ApplicationError)
            assert failed.type == "RunMismatch"

    asyncio.run(story())
    assert len(lines(world)) == 1


def test_histories_replay_in_the_sandbox(server: DevServer, store: str, world: Path) -> None:
    async def story() -> None:
        async with serving(server, store, "replays") as (_, engine, client):
            workflow = await engine.start(agents.asker, "ann", id="replays-1")
            await waits(workflow, "answer")
            await workflow.signal("word", "thanks")
            await workflow.execute_update("answer", {"verb": "approve", "by": "managers"})
            assert await workflow.result() == "ann: thanks"
            cancelled = await engine.start(agents.asker, "bob", id="replays-2")
            await waits(cancelled, "answer")
            await cancelled.cancel()
            with pytest.raises(WorkflowFailureError):
                await cancelled.result()
            assert (await cancelled.describe()).status is WorkflowExecutionStatus.CANCELED
            for each in (workflow, cancelled):
                # The replayer's default runner is the sandbox; it raises where commands differ.
                await Replayer(workflows=[RunWorkflow]).replay_workflow(await each.fetch_history())

    asyncio.run(story())


def test_workers_die_while_updates_and_signals_arrive_and_each_counts_once(
    server: DevServer, store: str, world: Path, process: Process
) -> None:
    names = [f"storm-{number}" for number in range(6)]

    async def story() -> list[Any]:
        client = await server.client()
        flows = [await client.start_workflow("asker", name, id=name, task_queue="storm") for name in names]
        worker = process("serve.py", store, server.address, "storm")

        async def tell(flow: WorkflowHandle[Any, Any]) -> Any:
            await waits(flow, "answer")
            await flow.signal("word", flow.id)
            await flow.execute_update("answer", {"verb": "approve", "by": "managers"})
            return await flow.result()

        telling = [asyncio.create_task(tell(each)) for each in flows]
        for _ in range(3):
            await until(lambda: any(task.done() for task in telling) or any_answered(store, names))
            worker.send_signal(signal.SIGKILL)
            await asyncio.to_thread(worker.wait, 300)
            worker = process("serve.py", store, server.address, "storm")
        return list(await asyncio.gather(*telling))

    assert asyncio.run(story()) == [f"{name}: {name}" for name in names]
    assert Counter(line.split()[1] for line in lines(world)) == dict.fromkeys(names, 1)


def any_answered(store: str, names: list[str]) -> bool:
    with killick.open(store) as kd:
        return any(len(kd.events(row.id)) > 4 for row in kd.list() if row.id in names)


@killick.tool(effect="idempotent")
async def render(scene: int) -> str:
    return activity.info().task_queue


@killick.tool(effect="idempotent")
async def publish(scene: int) -> str:
    return activity.info().task_queue


@killick.agent
async def studio(run: killick.Run, scenes: int) -> list[str]:
    rendered = [await run.call(render, scene) for scene in range(scenes)]
    both = await run.gather(run.call(publish, 1), run.call(render, scenes))
    return [*rendered, *both, await run.call(publish, 2)]


def test_a_tool_runs_on_its_own_task_queue(server: DevServer, store: str, world: Path) -> None:
    async def story() -> Counter[str]:
        queues = {"render": "studio-gpu"}
        async with (
            serving(server, store, "studio", tool_queues=queues) as (_, engine, client),
            serving(server, store, "studio-gpu", tool_queues=queues),
        ):
            workflow = await engine.start(studio, 2, id="studio-1")
            home, gpu = "studio", "studio-gpu"
            assert await workflow.result() == [gpu, gpu, home, gpu, home]
            return await events(client, "studio-1")

    assert asyncio.run(story())["ACTIVITY_TASK_SCHEDULED"] <= 7


def test_a_tool_whose_worker_dies_is_settled_on_its_own_task_queue(
    server: DevServer, store: str, world: Path, process: Process
) -> None:
    async def story() -> None:
        world.with_suffix(".die").write_text("ann")
        async with serving(server, store, "tills", tool_queues={"pay": "tills-safe"}) as (_, engine, _):
            first = process("serve.py", store, server.address, "tills-safe", '{"pay": "tills-safe"}')
            workflow = await engine.start(agents.payer, "ann", id="tills-1")
            assert await asyncio.to_thread(first.wait, 300) == -signal.SIGKILL
            process("serve.py", store, server.address, "tills-safe", '{"pay": "tills-safe"}')
            assert await workflow.result() == "ann is paid"

    asyncio.run(story())
    assert len(lines(world)) == 1
