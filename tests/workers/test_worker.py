"""A worker takes what is due, by priority and age; gives way; drains; and applies nothing once its lease is gone."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import killick
from killick.definitions.agents import AGENTS
from killick.definitions.current import HERE
from killick.engine import executor
from killick.engine.execution import Branch
from killick.engine.waits.waits import until_time
from killick.errors import AgentUnknown, MessageGone, StoreUnavailable
from killick.model import events as e
from killick.workers import code_versions
from killick.workers import worker as worker_module
from killick.workers.background import TaskControl
from killick.workers.worker import Worker


@pytest.fixture(params=["memory", "sqlite"])
def kd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[killick.Client]:
    url = "memory:" if request.param == "memory" else str(tmp_path / "killick.db")
    with killick.open(url, durability="process") if request.param == "sqlite" else killick.open(url) as client:
        yield client


def on_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def whole() -> None:
            await test(*args, **kwargs)

        asyncio.run(whole())

    return run


async def until(holds: Callable[[], bool], seconds: float = 300) -> None:
    """Until something holds, or the test fails for want of it."""
    async with asyncio.timeout(seconds):
        while not holds():
            await asyncio.sleep(0.005)


async def ended(kd: killick.Client, *runs: str) -> None:
    await until(lambda: all(kd.runtime.store.index(run).status in ("completed", "failed", "cancelled") for run in runs))  # type: ignore[union-attr]


class Gate:
    """Tools that stop until they are let go on, and what they were called for."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.open = asyncio.Event()

        @killick.tool(name="worker_gated", effect="idempotent")
        async def gated(what: str, key: killick.Key = killick.KEY) -> str:
            self.calls.append(what)
            await self.open.wait()
            return what

        self.tool = gated


@killick.tool(name="worker_noted", effect="idempotent")
async def noted(what: str, key: killick.Key = killick.KEY) -> str:
    CALLS.append(what)
    return what


CALLS: list[str] = []


@pytest.fixture(autouse=True)
def _fresh() -> None:
    CALLS.clear()


@killick.agent(name="worker_steps")
async def stepping(run: killick.Run, names: list[str]) -> int:
    for name in names:
        await run.call(noted, name)
    return len(names)


@killick.agent(name="worker_asks")
async def asking(run: killick.Run) -> str:
    answer = await run.ask("Go on?", to="ann")
    return answer.kind


@killick.agent(name="worker_naps")
async def napping(run: killick.Run) -> str:
    await run.sleep(0.05)
    return "awake"


@killick.agent(name="worker_parent")
async def parent(run: killick.Run) -> int:
    child = await run.spawn(stepping, ["of a child"])
    return await child.result()


@killick.agent(name="worker_broken")
async def broken(run: killick.Run) -> None:
    raise ValueError("no use")


@on_loop
async def test_runs_that_are_started_are_driven_to_their_end(kd: killick.Client) -> None:
    handles = [kd.start(stepping, [f"{n}a", f"{n}b"], id=f"run_{n}") for n in range(5)]
    async with kd.worker(concurrency=2):
        await ended(kd, *(handle.id for handle in handles))
    assert [handle.result(timeout=0) for handle in handles] == [2] * 5
    assert sorted(CALLS) == sorted(f"{n}{part}" for n in range(5) for part in "ab")


@on_loop
async def test_the_more_urgent_go_first_and_of_equals_the_older(kd: killick.Client) -> None:
    for name, priority in (("low", 0), ("also low", 0), ("high", 5), ("middle", 2)):
        kd.start(stepping, [name], id=name, priority=priority)
    async with kd.worker(concurrency=1):
        await ended(kd, "low", "also low", "high", "middle")
    assert CALLS == ["high", "middle", "low", "also low"]


@on_loop
async def test_never_more_run_at_once_than_there_are_slots_in_all_and_for_an_agent(kd: killick.Client) -> None:
    gate = Gate()

    @killick.agent(name="worker_scarce")
    async def scarce(run: killick.Run, name: str) -> None:
        await run.call(gate.tool, name)

    @killick.agent(name="worker_plenty")
    async def plenty(run: killick.Run, name: str) -> None:
        await run.call(gate.tool, name)

    for n in range(4):
        kd.start(scarce, f"scarce {n}", id=f"s{n}", priority=9)
        kd.start(plenty, f"plenty {n}", id=f"p{n}")
    async with kd.worker(concurrency=3, per_agent={"worker_scarce": 1}):
        await until(lambda: len(gate.calls) == 3)
        assert sorted(gate.calls) == ["plenty 0", "plenty 1", "scarce 0"]
        gate.open.set()
        await ended(kd, *(f"{kind}{n}" for kind in "sp" for n in range(4)))


@on_loop
async def test_only_runs_of_its_own_agents_are_taken(kd: killick.Client) -> None:
    kd.start(stepping, ["mine"], id="mine")
    kd.start(napping, id="others")
    async with kd.worker(agents=["worker_steps"]):
        await ended(kd, "mine")
    assert kd.info("others").status == "queued"


@on_loop
async def test_an_answer_a_time_and_a_childs_end_wake_the_run(kd: killick.Client) -> None:
    kd.start(asking, id="asks")
    kd.start(napping, id="naps")
    kd.start(parent, id="has a child")
    async with kd.worker(concurrency=1):
        await until(lambda: bool(kd.inbox()))
        await kd.as_async().answer("asks", "approve", by="ann")
        await ended(kd, "asks", "naps", "has a child")
    assert not kd.store.verify().problems


@on_loop
async def test_a_run_that_waits_takes_no_slot(kd: killick.Client) -> None:
    kd.start(asking, id="asks", priority=9)
    kd.start(stepping, ["after"], id="after")
    async with kd.worker(concurrency=1):
        await ended(kd, "after")
    assert kd.info("asks").status == "waiting"
    assert kd.runtime.log.head("asks").holder is None


@on_loop
async def test_a_failed_run_is_failed_and_the_worker_goes_on(kd: killick.Client, caplog: Any) -> None:
    kd.start(broken, id="broken")
    kd.start(stepping, ["fine"], id="fine")
    with caplog.at_level("INFO", logger="killick.worker"):
        async with kd.worker():
            await ended(kd, "broken", "fine")
    told = [record.killick for record in caplog.records if getattr(record, "killick", None)]
    assert [each["what"] for each in told if each.get("run") == "broken"] == ["claimed", "failed"]
    assert [each["what"] for each in told if each.get("run") == "fine"] == ["claimed", "completed"]
    assert (told[0]["what"], told[-1]["what"]) == ("started", "stopped")


@on_loop
async def test_a_worker_records_its_host_and_its_slots_where_it_takes_a_run(kd: killick.Client) -> None:
    kd.run(stepping, ["here"], id="here")
    kd.start(stepping, ["there"], id="there")
    async with kd.worker(concurrency=7):
        await ended(kd, "there")
    taken = {
        run: [(event.host, event.slots) for _, event, _ in kd.events(run) if isinstance(event, e.RunTaken)]
        for run in ("here", "there")
    }
    assert taken == {"here": [("", 0)], "there": [(platform.node(), 7)]}


@on_loop
async def test_draining_finishes_the_step_and_leaves_the_rest_to_others(kd: killick.Client) -> None:
    gate = Gate()

    @killick.agent(name="worker_two_steps")
    async def two_steps(run: killick.Run) -> str:
        await run.call(gate.tool, "first")
        return await run.call(noted, "second")

    kd.start(two_steps, id="two")
    worker = kd.worker()
    serving = asyncio.ensure_future(worker.serve())
    await until(lambda: gate.calls == ["first"])
    worker.drain()
    await until(lambda: kd.runtime.executor()._live["two"].signal is not None)
    assert not serving.done(), "the step is still open"
    gate.open.set()
    await serving
    state = kd.state("two")
    assert [step.status for step in state.fold.steps] == ["done"]
    assert [row.run for row in kd.runtime.store.due(kd.runtime.clock.now_us())] == ["two"]
    async with kd.worker():
        await ended(kd, "two")
    assert gate.calls == ["first"]
    assert CALLS == ["second"]


@on_loop
async def test_stopping_now_cuts_off_what_is_open_and_it_is_made_again(kd: killick.Client) -> None:
    gate = Gate()

    @killick.agent(name="worker_one_step")
    async def one_step(run: killick.Run) -> str:
        return await run.call(gate.tool, "once")

    kd.start(one_step, id="one")
    worker = kd.worker()
    serving = asyncio.ensure_future(worker.serve())
    await until(lambda: gate.calls == ["once"])
    worker.drain()
    worker.stop()
    await asyncio.wait_for(serving, 300)
    assert kd.info("one").status == "running"
    gate.open.set()
    async with kd.worker():
        await ended(kd, "one")
    assert gate.calls == ["once", "once"]
    assert len({event.key for _, event, _ in kd.events("one") if isinstance(event, e.Started)}) == 1


@on_loop
async def test_what_is_claimed_while_somebody_says_to_stop_is_left_to_others(
    kd: killick.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    kd.start(stepping, ["not here"], id="late")
    worker = kd.worker()
    claim = kd.runtime.store.claim

    def stopped_meanwhile(*args: Any, **options: Any) -> Any:
        found = claim(*args, **options)
        loop.call_soon_threadsafe(worker.stop)
        time.sleep(0.05)
        return found

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(kd.runtime.store, "claim", stopped_meanwhile)
    await asyncio.wait_for(worker.serve(), 300)
    monkeypatch.undo()
    assert CALLS == []
    assert [row.run for row in kd.runtime.store.due(kd.runtime.clock.now_us())] == ["late"]


@on_loop
async def test_a_branch_that_takes_its_time_to_leave_is_not_ended_under_its_task(kd: killick.Client) -> None:
    gate = Gate()
    leaving = asyncio.Event()
    left: list[str] = []

    @killick.agent(name="worker_slow_to_leave")
    async def slow_to_leave(run: killick.Run) -> None:
        async def branch() -> None:
            try:
                await run.call(gate.tool, "it")
            finally:
                await leaving.wait()
                left.append("it")

        await run.gather(branch())

    kd.start(slow_to_leave, id="slow")
    worker = kd.worker()
    serving = asyncio.ensure_future(worker.serve())
    await until(lambda: gate.calls == ["it"])
    worker.stop()
    await asyncio.wait_for(serving, 300)
    leaving.set()
    await until(lambda: left == ["it"])


@on_loop
async def test_a_run_that_cannot_be_begun_does_not_come_back_at_once(kd: killick.Client, caplog: Any) -> None:
    @killick.agent(name="worker_typed")
    async def typed(run: killick.Run, number: int) -> int:
        return number

    kd.start(typed, 7, id="typed")

    @killick.agent(name="worker_typed")
    async def retyped(run: killick.Run, number: list[str]) -> int:
        return 0

    with caplog.at_level("INFO", logger="killick.worker"):
        async with kd.worker():
            await until(lambda: any("interrupted" in record.getMessage() for record in caplog.records))
            await asyncio.sleep(0.2)
    tries = [record.killick for record in caplog.records if getattr(record, "killick", {}).get("what") == "claimed"]
    assert len(tries) == 1
    assert [row.run for row in kd.runtime.store.due(kd.runtime.clock.now_us())] == ["typed"]


def rests(kd: killick.Client) -> None:
    @killick.agent(name="worker_rests")
    async def resting(run: killick.Run) -> None:
        branch = HERE.get()
        assert isinstance(branch, Branch)
        await until_time(branch.execution, "1", kd.runtime.clock.now_us() + 3_600_000_000)

    kd.start(resting, id="rests")


@on_loop
async def test_a_run_that_rests_on_nothing_on_record_is_due_at_once(kd: killick.Client) -> None:
    rests(kd)
    advanced = await kd.as_async().advance("rests")
    assert (advanced.status, advanced.wake_at_us) == ("running", None)
    assert [row.run for row in kd.runtime.store.due(kd.runtime.clock.now_us())] == ["rests"]


@on_loop
async def test_a_fault_of_our_own_does_not_bring_a_run_back_at_once(kd: killick.Client, caplog: Any) -> None:
    async def faulty(*_: object, **__: object) -> None:
        raise RuntimeError("a fault of our own")

    kd.start(asking, id="faulty")
    with caplog.at_level("INFO", logger="killick.worker"):
        async with kd.worker():
            kd.runtime.executor()._conclude = faulty  # type: ignore[method-assign, assignment]
            await until(lambda: any("interrupted" in record.getMessage() for record in caplog.records))
            await asyncio.sleep(0.2)
    tries = [record.killick for record in caplog.records if getattr(record, "killick", {}).get("what") == "claimed"]
    assert len(tries) == 1
    assert [row.run for row in kd.runtime.store.due(kd.runtime.clock.now_us())] == ["faulty"]


def held_back(caplog: Any) -> list[float]:
    """For how long a worker held runs back, in turn."""
    told = (getattr(record, "killick", {}) for record in caplog.records)
    return [each["again_in_seconds"] for each in told if each.get("what") == "interrupted"]


@on_loop
async def test_a_run_whose_commits_are_refused_is_held_back_ever_longer(
    kd: killick.Client, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "_REST_SECONDS", (0.01, 0.05))
    monkeypatch.setattr(executor, "_AGAIN_MAX", 2)
    append, refuses = kd.runtime.store.append, [True]

    def refusing(items: Any, **options: Any) -> Any:
        if refuses and any(item.run == "refused" for item in items):
            raise MessageGone("refused", 1)
        return append(items, **options)

    kd.start(stepping, ["first"], id="refused")
    monkeypatch.setattr(kd.runtime.store, "append", refusing)
    with caplog.at_level("INFO", logger="killick.worker"):
        async with kd.worker():
            await until(lambda: len(held_back(caplog)) >= 5)
            refuses.clear()
            await ended(kd, "refused")
    assert held_back(caplog)[:5] == [0.01, 0.02, 0.04, 0.05, 0.05]
    claims = [record for record in caplog.records if getattr(record, "killick", {}).get("what") == "claimed"]
    assert len(claims) == len(held_back(caplog)) + 1
    assert CALLS == ["first"]


@on_loop
async def test_a_run_that_is_interrupted_after_each_of_its_steps_is_not_held_back_longer(
    kd: killick.Client, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "_REST_SECONDS", (0.01, 0.05))
    names = [f"step-{number}" for number in range(6)]
    append, refused = kd.runtime.store.append, set(names)

    def refusing(items: Any, **options: Any) -> Any:
        found = {name for name in refused for item in items for row in item.rows if name.encode() in (row.data or b"")}
        if found:
            refused.difference_update(found)
            raise StoreUnavailable(kd.runtime.store.place, "failed on purpose")
        return append(items, **options)

    kd.start(stepping, names, id="flaky")
    monkeypatch.setattr(kd.runtime.store, "append", refusing)
    with caplog.at_level("INFO", logger="killick.worker"):
        async with kd.worker():
            await ended(kd, "flaky")
    # The outcome of a step may be committed with the next one, and be lost with it.
    assert len(held_back(caplog)) > 3
    assert max(held_back(caplog)) <= 0.02


@on_loop
async def test_a_run_that_rests_on_nothing_on_record_is_held_back_ever_longer(
    kd: killick.Client, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "_REST_SECONDS", (0.01, 0.05))
    rests(kd)
    with caplog.at_level("INFO", logger="killick.worker"):
        async with kd.worker():
            await until(lambda: len(held_back(caplog)) >= 5)
    assert held_back(caplog)[:5] == [0.01, 0.02, 0.04, 0.05, 0.05]


@on_loop
async def test_what_another_process_left_is_taken_over(kd: killick.Client) -> None:
    kd.start(stepping, ["left"], id="left")
    kd.runtime.store.release("left", epoch=kd.runtime.store.lease("left", "somebody", seconds=60).epoch, left=True)
    async with kd.worker():
        await ended(kd, "left")


@on_loop
async def test_whose_lease_ran_out_applies_nothing_and_says_so(kd: killick.Client, caplog: Any) -> None:
    gate = Gate()

    @killick.agent(name="worker_frozen")
    async def frozen(run: killick.Run) -> None:
        await run.call(gate.tool, "first")
        await run.call(noted, "second")

    kd.start(frozen, id="frozen")
    with caplog.at_level("INFO", logger="killick.worker"):
        async with kd.worker(lease_seconds=60):
            await until(lambda: gate.calls == ["first"])
            lease = kd.runtime.executor()._live["frozen"].lease  # type: ignore[union-attr]
            assert lease is not None
            lease.until = kd.runtime.clock.monotonic() - 1
            kd.runtime.engine.leases.drop(lease)
            gate.open.set()
            await until(lambda: any("lost" in record.getMessage() for record in caplog.records))
            # Nobody has taken it meanwhile, so it is due again, and this worker may take it anew.
            await ended(kd, "frozen")
    assert CALLS == ["second"]
    assert gate.calls[0] == "first"


@on_loop
async def test_a_run_that_comes_back_before_its_loss_was_noticed_is_gone_on_with_after_that(
    kd: killick.Client, caplog: Any
) -> None:
    gate = Gate()

    @killick.agent(name="worker_robbed")
    async def robbed(run: killick.Run) -> str:
        return await run.call(gate.tool, "it")

    def told() -> list[str]:
        return [record.killick["what"] for record in caplog.records if record.killick.get("run") == "robbed"]

    kd.start(robbed, id="robbed")
    with caplog.at_level("INFO", logger="killick.worker"):
        async with kd.worker(lease_seconds=60):
            await until(lambda: gate.calls == ["it"])
            held = kd.runtime.log.head("robbed").epoch  # taken in one transaction: the worker would claim a free run
            other = kd.runtime.store.lease("robbed", "another", seconds=60, handed=held)
            kd.runtime.store.release("robbed", epoch=other.epoch, left=True)
            await until(lambda: kd.runtime.log.head("robbed").epoch > other.epoch)
            gate.open.set()
            await ended(kd, "robbed")
    assert told() == ["claimed", "lost", "claimed", "completed"]
    assert gate.calls == ["it", "it"]


@on_loop
async def test_a_lease_is_kept_while_a_step_takes_longer_than_it(kd: killick.Client) -> None:
    gate = Gate()

    @killick.agent(name="worker_slow")
    async def slow(run: killick.Run) -> None:
        await run.call(gate.tool, "slow")

    kd.start(slow, id="slow")
    async with kd.worker(lease_seconds=0.3):
        await until(lambda: gate.calls == ["slow"])
        first = kd.runtime.log.head("slow")
        await until(lambda: kd.runtime.log.head("slow").lease_until_us > first.lease_until_us + 500_000)  # type: ignore[operator]
        assert kd.runtime.log.head("slow").epoch == first.epoch
        gate.open.set()
        await ended(kd, "slow")
    assert gate.calls == ["slow"]


# code that was corrected --------------------------------------------------------------------------


def deploy(names: list[str]) -> None:
    """Another version of an agent's code, which takes these steps."""

    @killick.agent(name="worker_deployed")
    async def deployed(run: killick.Run) -> None:
        for name in names:
            await run.call(noted, name)
        await run.wait("more")


@on_loop
async def test_each_version_of_the_code_tries_a_diverged_run_once(kd: killick.Client) -> None:
    versions = ["first"]
    kd = killick.Client(kd.runtime.store, build=lambda _: e.Build(version=versions[-1]))

    async def serve(version: str, *names: str) -> tuple[str, int]:
        """The run's status after a worker with this code was idle, and how many events it wrote."""
        versions.append(version)
        deploy([*names])
        before = kd.runtime.log.head("r").seq
        async with kd.worker(agents=["worker_deployed"]) as worker:
            await worker.until_idle()
        return kd.info("r").status, kd.runtime.log.head("r").seq - before

    deploy(["a"])
    kd.start("worker_deployed", id="r")  # type: ignore[call-overload]
    assert (await serve("first", "a"))[0] == "waiting"
    await kd.as_async().runtime.finish()  # a warm run is not replayed
    kd.send("r", "other")
    assert (await serve("second", "b"))[0] == "code_mismatch"
    assert await serve("second", "b") == ("code_mismatch", 0), "this version diverged from it"
    status, wrote = await serve("third", "c")
    assert status == "code_mismatch"
    assert wrote > 0
    for version in ("third", "second", "third"):
        assert await serve(version, "c") == ("code_mismatch", 0)
    assert (await serve("fourth", "a"))[0] == "waiting"
    assert CALLS == ["a"]


@on_loop
async def test_a_run_resumed_for_a_version_that_another_one_took_is_resumed_again(
    kd: killick.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = ["old"]
    kd = killick.Client(kd.runtime.store, build=lambda _: e.Build(version=versions[-1]))

    async def serve(version: str, *names: str) -> str:
        versions.append(version)
        deploy([*names])
        async with kd.worker(agents=["worker_deployed"]) as worker:
            await worker.until_idle()
        await kd.as_async().runtime.finish()
        return kd.info("r").status

    deploy(["a"])
    kd.start("worker_deployed", id="r")  # type: ignore[call-overload]
    assert await serve("new", "a") == "waiting"
    kd.send("r", "other")
    assert await serve("old", "b") == "code_mismatch"
    versions.append("new")
    deploy(["a"])
    code_versions.resume_diverged(kd.runtime.engine, ["worker_deployed"], {})
    assert await serve("old", "b") == "code_mismatch", "a worker that was not upgraded yet takes it"
    assert await serve("new", "a") == "code_mismatch", "not at once: the old workers may still be there"
    monkeypatch.setattr(code_versions, "AGAIN_US", 0)
    assert await serve("new", "a") == "waiting"


@on_loop
async def test_a_worker_is_refused_what_makes_no_sense(kd: killick.Client) -> None:
    for options in ({"concurrency": 0}, {"lease_seconds": float("inf")}, {"per_agent": {"worker_steps": -1}}):
        with pytest.raises(killick.KillickError):
            kd.worker(**options)
    with pytest.raises(AgentUnknown):
        kd.worker(agents=["nobody_declared_this"])


# as a process -----------------------------------------------------------------------------------------

APP = """
import os, time, killick

@killick.tool(effect="idempotent")
def mark(path: str, word: str, key: killick.Key = killick.KEY) -> str:
    with open(path, "a") as file:
        file.write(word + "\\n")
    time.sleep(float(os.environ.get("SLOW", "0")))
    while word == os.environ.get("STUCK"):
        time.sleep(1)
    return word

@killick.agent
def marks(run: killick.SyncRun, job: dict) -> int:
    for word in job["words"]:
        run.call(mark, job["path"], word)
    return len(job["words"])
"""


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start_worker(folder: Path) -> Iterator[Start]:
    """Starts workers as processes, and sees to it that none outlives the test."""
    started: list[subprocess.Popen[str]] = []

    def start(*flags: str, slow: float = 0.0, stuck: str = "") -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "killick", "worker", "app.py", "--store", "killick.db", "--json", *flags]
        env = {**os.environ, "SLOW": str(slow), "STUCK": stuck}
        started.append(subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True, bufsize=1))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def lines_until(process: subprocess.Popen[str], what: str) -> list[dict[str, Any]]:
    """What it told, up to the first line of that kind."""
    assert process.stdout is not None
    told: list[dict[str, Any]] = []
    for line in process.stdout:
        told.append(json.loads(line))
        if told[-1]["what"] == what:
            return told
    raise AssertionError(f"it ended without {what!r}: {told}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "app.py").write_text(APP)
    return tmp_path


def start_marks(folder: Path, *words: str, run: str = "job") -> None:
    job = json.dumps({"path": str(folder / "marks"), "words": words})
    command = ["start", "app.py:marks", "--store", "killick.db", "--id", run, "--input", job]
    subprocess.run([sys.executable, "-m", "killick", *command], cwd=folder, check=True, capture_output=True)


@pytest.mark.slow
def test_a_process_serves_until_idle_and_says_each_transition_on_a_line(folder: Path, start_worker: Start) -> None:
    start_marks(folder, "a", "b")
    worker = start_worker("--until-idle")
    told = lines_until(worker, "stopped")
    assert worker.wait(300) == 0
    assert [each["what"] for each in told if each.get("run") == "job"] == ["claimed", "completed"]
    assert (folder / "marks").read_text() == "a\nb\n"


@pytest.mark.slow
def test_a_worker_with_edited_source_continues_a_run_that_diverged_from_the_old_source(
    folder: Path, start_worker: Start
) -> None:
    start_marks(folder, "a", "b")
    worker = start_worker(slow=0.7)
    lines_until(worker, "claimed")
    while not (folder / "marks").exists():
        time.sleep(0.01)
    worker.send_signal(signal.SIGTERM)
    lines_until(worker, "stopped")
    for source, what in ((APP.replace('in job["words"]', 'in ["x"]'), "diverged"), (APP, "completed")):
        (folder / "app.py").write_text(source)
        told = lines_until(start_worker("--until-idle"), "stopped")
        assert [each["what"] for each in told if each.get("run") == "job"][-1] == what


@pytest.mark.slow
def test_sigterm_finishes_the_step_and_leaves_the_run_and_another_worker_goes_on(
    folder: Path, start_worker: Start
) -> None:
    start_marks(folder, "a", "b", "c")
    worker = start_worker(slow=0.7)
    lines_until(worker, "claimed")
    while not (folder / "marks").exists():
        time.sleep(0.01)
    worker.send_signal(signal.SIGTERM)
    told = lines_until(worker, "stopped")
    assert worker.wait(300) == 0
    assert [each["what"] for each in told if each.get("run") == "job"] == ["left"]
    assert (folder / "marks").read_text() == "a\n"
    other = start_worker("--until-idle")
    assert "completed" in [each["what"] for each in lines_until(other, "stopped")]
    other.wait(300)
    assert (folder / "marks").read_text() == "a\nb\nc\n"


@pytest.mark.slow
def test_a_killed_workers_run_is_taken_over_after_a_moment_and_goes_on_at_its_step(
    folder: Path, start_worker: Start
) -> None:
    words = [*"abcd"]
    start_marks(folder, *words)
    first = start_worker("--lease", "1h", stuck="b")
    lines_until(first, "claimed")
    while not (folder / "marks").exists() or "b" not in (folder / "marks").read_text():
        time.sleep(0.01)
    second = start_worker()
    lines_until(second, "started")
    first.kill()
    first.wait(300)
    told = lines_until(second, "completed")
    # It is taken at once, to put the death on record, and again when it has backed off.
    assert [each.get("left_by") is not None for each in told if each["what"] == "claimed"] == [True, False]
    second.send_signal(signal.SIGTERM)
    assert second.wait(300) == 0
    made = (folder / "marks").read_text().split()
    # The step that was open when it died may have been made twice, under one key; no other was.
    assert (sorted(set(made)), len(made) <= len(words) + 1) == (words, True)


@on_loop
async def test_a_worker_does_not_spin_while_runs_of_a_full_agent_are_due(
    kd: killick.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()

    @killick.agent(name="worker_full")
    async def full(run: killick.Run) -> None:
        await run.call(gate.tool, run.id)

    for number in range(3):
        kd.start(full, id=f"full-{number}")
    asked: list[Any] = []
    soonest_us = kd.runtime.store.soonest_us

    def counted(*, agents: Any) -> int | None:
        asked.append(agents)
        return soonest_us(agents=agents)

    monkeypatch.setattr(kd.runtime.store, "soonest_us", counted)
    async with Worker(kd.runtime, per_agent={"worker_full": 1}, poll_seconds=0.01):
        await until(lambda: len(gate.calls) == 1)
        asked.clear()
        await until(lambda: len(asked) > 2)
        gate.open.set()
        while_full = [*asked][:3]
        await until(lambda: len(gate.calls) == 3)
    assert not any("worker_full" in agents for agents in while_full)


@on_loop
async def test_a_worker_is_not_idle_if_a_trigger_worked_while_it_looked_for_due_runs(
    kd: killick.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(kd.runtime, agents=[], duties=False)
    control = TaskControl(worker._duties, lambda: worker.stopping, worker._task_rested).__enter__()
    claim, looks, rests = worker._claim, 0, list[asyncio.Task[None]]()

    async def claim_while_a_trigger_ends(*args: Any) -> Any:
        nonlocal looks
        looks += 1
        assert not worker.idle.is_set()
        if looks == 1:
            rests.append(asyncio.create_task(control.rest(300)))
        return await claim(*args)

    monkeypatch.setattr(worker, "_claim", claim_while_a_trigger_ends)
    serving = asyncio.create_task(worker.serve())
    await worker.until_idle()
    assert looks == 2
    worker.drain()
    await asyncio.gather(serving, *rests)


@on_loop
async def test_a_worker_is_not_idle_until_a_run_whose_process_died_was_executed(kd: killick.Client) -> None:
    ran: list[str] = []

    @killick.agent(name="worker_after_death")
    async def after_death(run: killick.Run) -> None:
        ran.append(run.id)

    kd.start(after_death, id="r")
    kd.runtime.store.lease("r", "1-gone", seconds=0.001)
    worker = Worker(kd.runtime, agents=["worker_after_death"])
    async with worker:
        await worker.until_idle()
    assert ran == ["r"]
    assert kd.info("r").status == "completed"


@on_loop
async def test_a_worker_names_due_runs_whose_agent_is_not_declared_here(
    kd: killick.Client, caplog: pytest.LogCaptureFixture
) -> None:
    declared = dict(AGENTS.declared)

    @killick.agent(name="worker_renamed")
    async def renamed(run: killick.Run) -> None:
        """A run of it is left when its name is gone."""

    for run in ("r", "s"):
        kd.start(renamed, id=run)
    AGENTS.declared.clear()
    AGENTS.declared.update(declared)
    worker = Worker(kd.runtime)
    with caplog.at_level("INFO", "killick.worker"):
        async with worker:
            await worker.until_idle()
    [line] = [each.getMessage() for each in caplog.records if each.getMessage().startswith("undeclared")]
    assert "2 due runs of worker_renamed, which this app does not declare" in line
    assert 'aliases=["worker_renamed"] on its new name' in line
