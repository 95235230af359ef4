"""Code that Killick did not start: its calls are steps, found again by their keys, in whatever order they are made."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

import killick
from killick.definitions.open_tools import open_tool
from killick.llm import external
from killick.llm.external import Host
from killick.model import events as e
from seeds import draw_seed

PROGRAM = Path(__file__).with_name("hosted_process.py")


def on_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


class Leaving(Exception):
    """How a framework leaves a tool before it did anything."""


@pytest.fixture
def done() -> list[Any]:
    """What was done to the world."""
    return []


def paying(done: list[Any]) -> Any:
    async def pay(amount: int) -> dict[str, int]:
        done.append(amount)
        await asyncio.sleep(0)
        return {"paid": amount}

    return pay


PAY = open_tool("pay", identity=("amount",))
LOOK = open_tool("look", effect="reads", retry=killick.Retry(attempts=1))


# outside of any agent -----------------------------------------------------------------------------


@on_loop
async def test_a_key_that_is_on_record_gives_what_is_on_record(kd: killick.Client, done: list[Any]) -> None:
    for _ in range(2):
        async with kd.host("thread") as host:
            calls = (host.call(PAY, {"amount": n}, key=f"call_{n}", fn=paying(done)) for n in (3, 1, 2))
            assert await asyncio.gather(*calls) == [{"paid": 3}, {"paid": 1}, {"paid": 2}]
            assert await host.call(PAY, {"amount": 1}, key="call_1", fn=paying(done)) == {"paid": 1}
    assert sorted(done) == [1, 2, 3]


@on_loop
async def test_a_run_waits_between_two_blocks_and_nobody_takes_it(kd: killick.Client, done: list[Any]) -> None:
    async with kd.host("thread", agent="framework") as host:
        await host.call(PAY, {"amount": 1}, key="a", fn=paying(done))
    info = kd.info("thread")
    assert (info.status, info.agent) == ("waiting", "framework")
    assert kd.runtime.store.due(kd.runtime.clock.now_us() + 10**12, limit=10) == []


@on_loop
async def test_a_call_after_the_block_is_refused_and_leases_nothing(kd: killick.Client, done: list[Any]) -> None:
    """A call that a block left behind, when another one of its `gather` failed, would hold the run for ever."""
    async with kd.host("thread") as host:
        await host.call(PAY, {"amount": 1}, key="a", fn=paying(done))
    with pytest.raises(killick.KillickError, match="thread: its host has ended; call inside the block"):
        await host.call(PAY, {"amount": 2}, key="b", fn=paying(done))
    head = kd.runtime.store.head("thread")
    assert head is not None
    assert head.holder is None
    async with kd.host("thread") as again:
        assert await again.call(PAY, {"amount": 3}, key="c", fn=paying(done)) == {"paid": 3}
    assert done == [1, 3]


def test_blocking_code_calls_from_any_thread(kd: killick.Client) -> None:
    def pay(amount: int) -> str:
        return f"{threading.current_thread() is threading.main_thread()} {amount}"

    with kd.host("thread") as host:
        assert host.call_sync(PAY, {"amount": 1}, key="a", fn=pay) == "False 1"
        found: list[Any] = []
        other = threading.Thread(target=lambda: found.append(host.call_sync(PAY, {"amount": 2}, key="b", fn=pay)))
        other.start()
        other.join()
        assert found == ["False 2"]


@on_loop
async def test_what_is_called_runs_on_the_callers_loop_and_in_its_context(kd: killick.Client) -> None:
    told: ContextVar[str] = ContextVar("told", default="nothing")
    loop = asyncio.get_running_loop()

    async def there(amount: int) -> list[Any]:
        return [asyncio.get_running_loop() is loop, told.get()]

    def in_thread(amount: int) -> str:
        return told.get()

    async with kd.host("thread") as host:
        told.set("by the caller")
        assert await host.call(PAY, {"amount": 1}, key="a", fn=there) == [True, "by the caller"]
        assert await host.call(PAY, {"amount": 2}, key="b", fn=in_thread) == "by the caller"


@on_loop
async def test_the_same_run_is_shared_in_a_process_and_refused_to_another(
    kd: killick.Client, done: list[Any], tmp_path: Path
) -> None:
    async with kd.host("thread") as one, kd.host("thread") as two:
        await one.call(PAY, {"amount": 1}, key="a", fn=paying(done))
        assert await two.call(PAY, {"amount": 1}, key="a", fn=paying(done)) == {"paid": 1}
        with killick.open(tmp_path / "killick.db") as other, pytest.raises(killick.errors.RunBusy):
            async with other.host("thread"):
                pass
    async with kd.host("thread") as again:
        assert await again.call(PAY, {"amount": 1}, key="a", fn=paying(done)) == {"paid": 1}
    assert done == [1]


@pytest.mark.parametrize("same_block", [True, False])
@on_loop
async def test_another_call_under_a_key_is_refused_and_nothing_runs(
    kd: killick.Client, done: list[Any], same_block: bool
) -> None:
    async with kd.host("thread") as host:
        await host.call(PAY, {"amount": 1}, key="a", fn=paying(done))
        if same_block:
            with pytest.raises(killick.KillickError, match="on record as tool pay with other arguments"):
                await host.call(PAY, {"amount": 2}, key="a", fn=paying(done))
    async with kd.host("thread") as host:
        with pytest.raises(killick.KillickError, match="give this call another key"):
            await host.call(PAY, {"amount": 2}, key="a", fn=paying(done))
        assert await host.call(PAY, {"amount": 2}, key="b", fn=paying(done)) == {"paid": 2}
    assert done == [1, 2]


@on_loop
async def test_without_a_key_the_nth_call_of_the_same_is_the_same(kd: killick.Client, done: list[Any]) -> None:
    for _ in range(2):
        async with kd.host("thread") as host:
            for amount in (1, 1, 2):
                await host.call(PAY, {"amount": amount}, fn=paying(done))
    assert done == [1, 1, 2]


@on_loop
async def test_calls_without_a_key_are_counted_apart_in_each_scope(kd: killick.Client, done: list[Any]) -> None:
    async def called_in(scope: str) -> None:
        external.SCOPE.set(external.CallScope(scope))
        async with kd.host("thread") as host:
            await host.call(PAY, {"amount": 1}, fn=paying(done))

    for scope in ("first/", "second/", "second/", "first/"):
        await asyncio.create_task(called_in(scope))
    assert done == [1, 1]


@on_loop
async def test_an_error_is_a_failed_step_with_the_tools_own_as_its_cause(kd: killick.Client) -> None:
    async def look(path: str) -> str:
        raise LookupError(path)

    for is_live in (True, False):
        async with kd.host("thread") as host:
            with pytest.raises(killick.StepFailed, match="LookupError: there") as failed:
                await host.call(LOOK, {"path": "there"}, key="a", fn=look)
        assert isinstance(failed.value.__cause__, LookupError) is is_live


@on_loop
async def test_what_is_in_doubt_waits_for_a_person_and_goes_on_under_the_same_key(
    kd: killick.Client, done: list[Any]
) -> None:
    async def pay(amount: int) -> None:
        done.append(amount)
        raise ConnectionError("nobody knows")

    async with kd.host("thread") as host:
        for _ in range(2):
            with pytest.raises(killick.RunWaiting, match="Did it happen"):
                await host.call(PAY, {"amount": 1}, key="a", fn=pay)
        kd.answer("thread", "happened", value={"paid": 1}, by="ann")
        assert await host.call(PAY, {"amount": 1}, key="a", fn=pay) == {"paid": 1}
    assert done == [1]


@on_loop
async def test_an_approval_is_asked_for_and_an_edit_counts(kd: killick.Client, done: list[Any]) -> None:
    pay = open_tool("pay", approve="managers")
    with pytest.raises(killick.RunWaiting):
        async with kd.host("thread") as host:
            await host.call(pay, {"amount": 100}, key="a", fn=paying(done))
    [wait] = kd.inbox()
    kd.answer(wait, "edit", value={"amount": 5}, by="ann")
    async with kd.host("thread") as host:
        assert await host.call(pay, {"amount": 100}, key="a", fn=paying(done)) == {"paid": 5}
    assert done == [5]


@pytest.mark.slow
@on_loop
async def test_a_call_that_comes_as_the_run_is_let_go_is_made_all_the_same(kd: killick.Client) -> None:
    chance, told = random.Random(seed := draw_seed()), Counter[str]()
    pay = open_tool("pay", approve="managers")

    async def later(host: Host, thread: str) -> Any:
        await asyncio.sleep(chance.random() * 0.012)

        async def tell(to: str) -> str:
            told[thread] += 1
            return to

        return await host.call(PAY, {"to": "ann"}, key="b", fn=tell)

    for number in range(40):
        thread = f"thread-{number}"
        async with kd.host(thread) as host:
            both = host.call(pay, {"amount": 1}, key="a", fn=paying([])), later(host, thread)
            waiting, came = await asyncio.gather(*both, return_exceptions=True)
        assert isinstance(waiting, killick.RunWaiting), seed
        assert came == "ann", seed
        assert [wait.waits_for for wait in kd.inbox() if wait.run == thread] == ["answer"], seed
    assert set(told.values()) == {1}, seed


@on_loop
async def test_a_contract_judges_guests_too(kd: killick.Client, done: list[Any]) -> None:
    contract = killick.Contract("careful", [killick.rules.deny("pay")])
    async with kd.host("thread", contract=contract) as host:
        with pytest.raises(killick.Rejected):
            await host.call(PAY, {"amount": 1}, key="a", fn=paying(done))
    assert done == []


@on_loop
async def test_a_framework_may_leave_a_tool_and_come_again(kd: killick.Client, done: list[Any]) -> None:
    async def leave(amount: int) -> None:
        raise Leaving(str(amount))

    for _ in range(2):
        async with kd.host("thread") as host:
            for _ in range(2):
                with pytest.raises(Leaving, match="7"):
                    await host.call(PAY, {"amount": 7}, key="a", fn=leave, bubbles=(Leaving,))
    async with kd.host("thread") as host:
        assert await host.call(PAY, {"amount": 7}, key="a", fn=paying(done), bubbles=(Leaving,)) == {"paid": 7}
    assert done == [7]


@on_loop
async def test_models_are_asked_once_and_people_too(kd: killick.Client, done: list[Any]) -> None:
    async def model(messages: list[str]) -> str:
        done.append(messages)
        return "pay"

    for _ in range(2):
        async with kd.host("thread") as host:
            assert await host.model(model, messages=["hi"], key="m1") == "pay"
    async with kd.host("thread") as host:
        with pytest.raises(killick.RunWaiting):
            await host.ask("Pay?", key="q")
        kd.answer("thread", "respond", value="later", by="ann")
        answer = await host.ask("Pay?", key="q")
        assert (answer.value, answer.by) == ("later", "ann")
    assert done == [["hi"]]


@on_loop
async def test_a_call_that_its_caller_gives_up_is_given_up(kd: killick.Client) -> None:
    began = asyncio.Event()

    async def slow(path: str) -> None:
        began.set()
        await asyncio.sleep(60)

    async with kd.host("thread") as host:
        task = asyncio.create_task(host.call(LOOK, {"path": "x"}, key="a", fn=slow))
        await began.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    [attempt] = [each.event for each in kd.events("thread") if isinstance(each.event, e.AttemptEnded)]
    assert attempt.outcome == "unknown"
    assert not kd.state("thread").fold.facts.live


@pytest.mark.parametrize("same_block", [True, False])
@on_loop
async def test_a_call_that_its_caller_gave_up_can_be_made_again(kd: killick.Client, same_block: bool) -> None:
    began, kept = asyncio.Event(), asyncio.Event()

    async def look(path: str) -> str:
        began.set()
        await kept.wait()
        return f"saw {path}"

    async def again(host: Host) -> None:
        kept.set()
        async with asyncio.timeout(300):
            assert await host.call(LOOK, {"path": "x"}, key="a", fn=look) == "saw x"
            assert await host.model(look, path="y", key="m") == "saw y"

    async with kd.host("thread") as host:
        calls = (host.call(LOOK, {"path": "x"}, key="a", fn=look), host.model(look, path="y", key="m"))
        for number, call in enumerate(calls, 1):
            began.clear()
            task = asyncio.create_task(call)
            await began.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while sum(isinstance(each.event, e.AttemptEnded) for each in kd.events("thread")) < number:
                await asyncio.sleep(0.01)  # the code runs on the client's own loop, and is cancelled there
        if same_block:
            await again(host)
    async with kd.host("thread") as host:
        await again(host)
    assert [len(step.attempts) for step in kd.state("thread").fold.steps if step.sort != "scope"] == [2, 2]


@pytest.mark.parametrize("approval", [True, False])
@on_loop
async def test_a_question_that_its_caller_gave_up_can_be_asked_again(kd: killick.Client, approval: bool) -> None:
    began, kept = asyncio.Event(), asyncio.Event()
    pay = open_tool("pay", approve="managers")

    def asked(host: Host) -> Any:
        if approval:
            return host.call(pay, {"amount": 1}, key="q", fn=lambda amount: f"paid {amount}")
        return host.ask("Pay?", key="q")

    async def slow(path: str) -> str:
        began.set()
        await kept.wait()
        return path

    async with asyncio.timeout(300), kd.host("thread") as host:
        beside = asyncio.create_task(host.call(LOOK, {"path": "x"}, key="a", fn=slow))
        await began.wait()
        asking = asyncio.create_task(asked(host))
        while not await asyncio.to_thread(kd.inbox):
            await asyncio.sleep(0.01)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        kept.set()
        assert await beside == "x"
        with pytest.raises(killick.RunWaiting):
            await asked(host)
    kd.answer("thread", "approve", by="ann")
    async with asyncio.timeout(300), kd.host("thread") as host:
        answer = await asked(host)
        assert answer == "paid 1" if approval else answer.by == "ann"


@on_loop
async def test_pausing_a_thread_stops_its_calls_and_resuming_lets_them_go_on(
    kd: killick.Client, done: list[Any]
) -> None:
    async with kd.host("thread") as host:
        await host.call(PAY, {"amount": 1}, key="a", fn=paying(done))
    kd.pause("thread", by="ann")
    with pytest.raises(killick.KillickError):
        async with kd.host("thread") as host:
            await host.call(PAY, {"amount": 2}, key="b", fn=paying(done))
    kd.resume("thread", by="ann")
    async with kd.host("thread") as host:
        assert await host.call(PAY, {"amount": 2}, key="b", fn=paying(done)) == {"paid": 2}
    assert done == [1, 2]


# inside of an agent -------------------------------------------------------------------------------


def test_a_framework_in_an_agent_is_replayed_call_by_call_in_any_order(kd: killick.Client, done: list[Any]) -> None:
    order = [3, 1, 2]

    @killick.agent
    async def framework(run: killick.Run) -> list[Any]:
        async def one(n: int) -> Any:
            host = external.here()
            assert host is not None
            return await host.call(PAY, {"amount": n}, key=f"call_{n}", fn=paying(done))

        async with run.hosting():
            found = await asyncio.gather(*(asyncio.create_task(one(n)) for n in order))
        await run.ask("Go on?")
        return found

    with pytest.raises(killick.RunWaiting):
        kd.run(framework, id="r")
    kd.answer("r", "approve", by="ann")
    order.reverse()
    with killick.open(kd.runtime.store.place) as other:
        assert [each["paid"] for each in other.run(framework, id="r")] == [2, 1, 3]
    assert sorted(done) == [1, 2, 3]


def test_a_plain_def_agent_hosts_too(kd: killick.Client, done: list[Any]) -> None:
    def pay(amount: int) -> int:
        done.append(amount)
        return amount

    @killick.agent
    def framework(run: killick.SyncRun) -> list[int]:
        with run.hosting() as host:
            first = host.call_sync(PAY, {"amount": 1}, key="a", fn=pay)
            return [first, host.call_sync(PAY, {"amount": 2}, key="b", fn=pay)]

    assert kd.run(framework, id="r") == [1, 2]
    kd.rewind("r", "1:before")
    assert kd.run(framework, id="r") == [1, 2]
    assert done == [1, 2]


def test_an_agent_parks_when_all_its_guests_wait(kd: killick.Client) -> None:
    @killick.agent
    async def framework(run: killick.Run) -> list[str | None]:
        async with run.hosting() as host:
            asked = [asyncio.create_task(host.ask(f"{name}?", key=name)) for name in ("a", "b")]
            return [answer.by for answer in await asyncio.gather(*asked)]

    with pytest.raises(killick.RunWaiting):
        kd.run(framework, id="r")
    first, second = kd.inbox()
    kd.answer(first, "approve", by="ann")
    with pytest.raises(killick.RunWaiting):
        kd.run(framework, id="r")
    kd.answer(second, "approve", by="bob")
    assert sorted(filter(None, kd.run(framework, id="r"))) == ["ann", "bob"]


def test_an_edited_prompt_strands_nobody(kd: killick.Client, done: list[Any]) -> None:
    words = ["hello"]

    async def model(prompt: str) -> str:
        done.append(prompt)
        return f"to {prompt}"

    @killick.agent
    async def framework(run: killick.Run) -> str:
        async with run.hosting() as host:
            reply = await host.model(model, prompt=words[0])
            await host.ask("Go on?", key="q")
            return str(reply)

    with pytest.raises(killick.RunWaiting):
        kd.run(framework, id="r")
    kd.answer("r", "approve", by="ann")
    words[0] = "good day"
    with killick.open(kd.runtime.store.place) as other:
        assert other.run(framework, id="r") == "to hello"
        assert any(isinstance(each.event, e.StepDrifted) for each in other.events("r"))
    assert done == ["hello"]


def test_the_agents_own_steps_are_refused_in_the_block(kd: killick.Client) -> None:
    @killick.agent
    async def framework(run: killick.Run) -> None:
        async with run.hosting():
            await run.note("not here")

    with pytest.raises(killick.RunFailed, match="steps are the host's"):
        kd.run(framework, id="r")


def test_steps_before_and_after_the_block_stand_in_order(kd: killick.Client, done: list[Any]) -> None:
    @killick.agent
    async def framework(run: killick.Run) -> list[Any]:
        before = await run.decided("first?", "yes")
        async with run.hosting() as host:
            inner = await host.call(PAY, {"amount": 1}, key="a", fn=paying(done))
        after = await run.decided("last?", "no")
        await run.ask("Go on?")
        return [before, inner, after]

    with pytest.raises(killick.RunWaiting):
        kd.run(framework, id="r")
    kd.answer("r", "approve", by="ann")
    with killick.open(kd.runtime.store.place) as other:
        assert other.run(framework, id="r") == ["yes", {"paid": 1}, "no"]


# killed -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "each"),
    [
        ("inside", 1),
        *((where, 2) for where in ("inside", "outside", "nested-inside", "nested-outside")),
    ],
)
def test_killed_at_every_moment_nothing_that_finished_is_done_again(where: str, each: int, tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAM), str(tmp_path), where, str(each)]
    environment = {**os.environ, "PYTHONPATH": str(PROGRAM.parent.parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result, deaths = map(json.loads, done.stdout.splitlines())
    assert len(result) == 4
    told = [json.loads(line) for line in (tmp_path / "world").read_text().splitlines()]
    booked = Counter((each["n"], each["key"]) for each in told if "n" in each)
    assert len(booked) == 6, "each call has one key, however often it was tried"
    with killick.open(tmp_path / "killick.db") as kd:
        tries = [len(step.attempts) for step in kd.state("thread").fold.steps if step.name == "book"]
    assert len(tries) == 6
    assert sum(booked.values()) <= sum(tries)
    assert deaths > 3
