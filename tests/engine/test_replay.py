"""Running again from the top: R22 (replay), R23 (numbers, branches), R24 (divergence, drift), R29 (builds, logging)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast
from uuid import UUID

import pytest

import killick
from faulty_store import faulty
from killick.errors import OutsideBranch, StoreUnavailable
from killick.model import events as e
from killick.store import Store, open_store
from processes import Processes, View, kinds, record, steps, told


@pytest.fixture
def processes() -> Iterator[Processes]:
    with Processes() as made:
        yield made


class Calls(list[Any]):
    """What was really done, outside of any record."""


@pytest.fixture
def calls() -> Calls:
    return Calls()


def keyed(calls: Calls) -> killick.Tool[[Any], Any]:
    @killick.tool(effect="idempotent", name="keyed")
    async def keyed(what: Any) -> Any:
        calls.append(what)
        return what

    return keyed


def looked(calls: Calls, name: str = "looked") -> killick.Tool[[Any], Any]:
    @killick.tool(effect="reads", name=name)
    async def looked(what: Any) -> Any:
        calls.append(what)
        return what

    return looked


def park(kd: killick.Client, agent: killick.Agent[None, Any], run: str = "r") -> None:
    """Run until the agent waits for a person."""
    with pytest.raises(killick.RunWaiting) as waiting:
        kd.run(agent, id=run)
    assert not isinstance(waiting.value, killick.errors.RunDiverged), waiting.value


# R22: from the top, in the recorded order ---------------------------------------------------------


def test_r22_recorded_steps_return_their_outcomes_and_touch_nothing(processes: Processes, calls: Calls) -> None:
    seen: list[Any] = []

    @killick.agent(name="replayed")
    async def agent(run: killick.Run) -> list[Any]:
        seen.append("top")
        values = [await run.call(keyed(calls), n) for n in range(3)]
        values.append(await run.decided("go on?", "yes", options=["yes", "no"], because="it is Monday"))
        await run.ask("well?")
        return [*values, await run.call(keyed(calls), "last")]

    park(processes.new(), agent)
    assert calls == [0, 1, 2]
    later = processes.new()
    later.answer("r", "approve")
    assert later.run(agent, id="r") == [0, 1, 2, "yes", "last"]
    assert calls == [0, 1, 2, "last"]
    assert seen == ["top", "top"]


def test_r22_a_run_whose_process_died_at_step_6_goes_on_at_step_6(processes: Processes, calls: Calls) -> None:
    dying, life = processes.mortal()

    @killick.tool(effect="idempotent", name="deadly")
    async def deadly(n: int, key: killick.Key = killick.KEY) -> int:
        calls.append((n, str(key)))
        if n == 6:
            life.die()
        return n

    @killick.agent(name="nine_steps")
    async def agent(run: killick.Run) -> list[int]:
        return [await run.call(deadly, n) for n in range(1, 10)]

    with pytest.raises(StoreUnavailable):
        dying.run(agent, id="r")
    processes.mourn()
    assert processes.new().run(agent, id="r") == list(range(1, 10))
    assert [n for n, _ in calls] == [1, 2, 3, 4, 5, 6, 6, 7, 8, 9]
    keys = [key for n, key in calls if n == 6]
    assert len(set(keys)) == 1
    assert keys[0].startswith("r:step_6:deadly:")


def test_r22_models_are_never_asked_again(processes: Processes, calls: Calls) -> None:
    async def model(**request: Any) -> dict[str, Any]:
        calls.append(request)
        return {"text": f"answer {len(calls)}"}

    def blocking_model(*, prompt: str) -> str:
        calls.append(prompt)
        return f"answer {len(calls)}"

    @killick.agent(name="asks_models")
    async def agent(run: killick.Run) -> list[str]:
        one = await run.model(model, model="m", messages=[{"role": "user", "content": "hi"}])
        two = await run.model(blocking_model, prompt="hi")
        await run.ask("well?")
        return [one["text"], two]

    park(processes.new(), agent)
    processes.new().answer("r", "approve")
    assert processes.new().run(agent, id="r") == ["answer 1", "answer 2"]
    assert len(calls) == 2


def test_r22_a_failed_step_fails_again_with_the_recorded_failure(processes: Processes, calls: Calls) -> None:
    seen: list[tuple[str, bool, str]] = []

    @killick.tool(effect="reads", retry=killick.Retry(attempts=1))
    async def breaks() -> None:
        calls.append("breaks")
        raise LookupError("nothing there")

    @killick.agent(name="catches")
    async def agent(run: killick.Run) -> None:
        try:
            await run.call(breaks)
        except killick.StepFailed as failed:
            seen.append((failed.step, failed.is_a(LookupError), str(failed)))
        await run.ask("well?")

    park(processes.new(), agent)
    processes.new().answer("r", "approve")
    processes.new().run(agent, id="r")
    assert calls == ["breaks"]
    assert len(seen) == 2
    assert seen[0] == seen[1]
    assert seen[0][1] is True


@dataclass
class Point:
    x: int
    tags: tuple[str, ...]


def test_r22_code_sees_on_replay_what_it_saw_live(processes: Processes) -> None:
    seen: list[Any] = []

    @killick.tool(effect="reads")
    async def typed() -> Point:
        return Point(1, ("a", "b"))

    @killick.tool(effect="reads")
    async def untyped() -> Any:
        return Point(1, ("a", "b"))

    @killick.agent(name="sees")
    async def agent(run: killick.Run) -> None:
        seen.append([await run.call(typed), await run.call(untyped), await run.decided("which?", Point(2, ()))])
        await run.ask("well?")

    park(processes.new(), agent)
    processes.new().answer("r", "approve")
    processes.new().run(agent, id="r")
    assert len(seen) == 2
    assert seen[0] == seen[1]
    assert [type(value) for value in seen[0]] == [type(value) for value in seen[1]]
    assert seen[0][0] == Point(1, ("a", "b"))


@pytest.mark.parametrize("seed", range(6))
def test_r22_parallel_branches_change_shared_memory_in_the_same_order_on_replay(
    processes: Processes, seed: int
) -> None:
    chance = random.Random(seed)
    orders: list[list[str]] = []
    naps = {(branch, n): chance.choice([0, 0, 0.001, 0.003]) for branch in range(5) for n in range(4)}

    @killick.tool(effect="reads")
    async def naps_a_while(branch: int, n: int) -> int:
        await asyncio.sleep(naps[branch, n])
        return n

    @killick.agent(name="side_by_side")
    async def agent(run: killick.Run) -> None:
        shared: list[str] = []
        orders.append(shared)

        async def work(branch: int) -> None:
            for n in range(4):
                if (branch + n) % 3 == 0:
                    await run.decided(f"{branch}?", n)
                done = await run.call(naps_a_while, branch, n)
                shared.append(f"{branch}.{done}")

        await run.gather(*(work(branch) for branch in range(5)))
        await run.ask("well?")

    park(processes.new(), agent)
    processes.new().answer("r", "approve")
    processes.new().run(agent, id="r")
    assert len(orders) == 2, f"seed {seed}"
    assert orders[0] == orders[1], f"seed {seed}"
    assert len(orders[0]) == 20


@pytest.mark.parametrize("seed", range(4))
def test_r22_branches_in_threads_change_shared_memory_in_the_same_order_on_replay(
    processes: Processes, seed: int
) -> None:
    chance = random.Random(seed)
    orders: list[list[str]] = []
    naps = {(branch, n): chance.choice([0, 0.001, 0.003]) for branch in range(4) for n in range(3)}

    @killick.tool(effect="reads")
    def naps_in_thread(branch: int, n: int) -> int:
        threading.Event().wait(naps[branch, n])
        return n

    @killick.agent(name="threads_side_by_side")
    def agent(run: killick.SyncRun) -> None:
        shared: list[str] = []
        orders.append(shared)

        def work(branch: int) -> Callable[[], None]:
            def do() -> None:
                for n in range(3):
                    done = run.call(naps_in_thread, branch, n)
                    shared.append(f"{branch}.{done}")

            return do

        run.gather(*(work(branch) for branch in range(4)))
        run.ask("well?")

    park(processes.new(), agent)
    processes.new().answer("r", "approve")
    processes.new().run(agent, id="r")
    assert len(orders) == 2, f"seed {seed}"
    assert orders[0] == orders[1], f"seed {seed}"
    assert len(orders[0]) == 12


def test_r22_a_run_goes_on_whichever_operation_of_the_store_failed(calls: Calls) -> None:
    @killick.agent(name="survives")
    async def agent(run: killick.Run) -> list[Any]:
        one = await run.call(keyed(calls), "one")
        await run.update(one=one)
        two, three = await run.gather(run.call(looked(calls), "two"), run.call(keyed(calls), "three"))
        choice = await run.decided("which?", "left")
        await run.sleep("3d")
        return [one, two, three, choice, run.context.one, await run.call(keyed(calls), "four")]

    def attempt(fail_at: int | None) -> int:
        with Processes() as made:
            breaking = faulty(
                cast("Store", View(made.store)), fail_at=fail_at, when="after" if (fail_at or 0) % 2 else "before"
            )
            with contextlib.suppress(killick.KillickError):
                made.new(store=breaking, lease_seconds=3 * 86_400.0).run(agent, id="r")
            made.mourn()
            after = made.new()
            expected = ["one", "two", "three", "left", "one", "four"]
            assert after.run(agent, id="r") == expected, f"operation {fail_at} ({breaking.failed}) failed"
            assert after.store.verify().problems == [], f"operation {fail_at} ({breaking.failed}) failed"
            return breaking.operations

    operations = attempt(None)
    for fail_at in range(1, operations + 1):
        attempt(fail_at)


# R23: numbers and branches ------------------------------------------------------------------------


def test_r23_a_step_is_numbered_when_it_is_first_awaited(processes: Processes, calls: Calls) -> None:
    @killick.agent(name="out_of_order")
    async def agent(run: killick.Run) -> list[Any]:
        first, second = run.call(looked(calls, "made_first"), 1), run.call(looked(calls, "made_second"), 2)
        await run.decided("which is first?", "the second")
        return [await second, await first]

    kd = processes.new()
    assert kd.run(agent, id="r") == [2, 1]
    assert list(steps(kd, "r").items()) == [("1", "decision"), ("2", "made_second"), ("3", "made_first")]


def test_r23_a_step_that_nobody_awaits_does_nothing_and_fails_the_run(processes: Processes, calls: Calls) -> None:
    @killick.agent(name="forgets")
    async def agent(run: killick.Run) -> None:
        forgotten: list[Any] = [run.call(keyed(calls), "never"), run.ask("never"), run.spawn(child_agent(), 1)]
        del forgotten
        await run.decided("what?", "this")

    kd = processes.new()
    with pytest.raises(killick.RunFailed, match="never awaited"):
        kd.run(agent, id="r")
    assert calls == []
    assert steps(kd, "r") == {}


def test_r23_a_step_can_be_awaited_once(processes: Processes, calls: Calls) -> None:
    @killick.agent(name="awaits_twice")
    async def agent(run: killick.Run) -> None:
        step = run.call(keyed(calls), 1)
        await step
        with pytest.raises((killick.KillickError, RuntimeError), match="awaited"):
            await step

    processes.new().run(agent, id="r")
    assert calls == [1]


def test_r23_branch_k_of_step_6_numbers_6_k_1_and_6_k_2(processes: Processes, calls: Calls) -> None:
    @killick.agent(name="numbers")
    async def agent(run: killick.Run) -> None:
        async def branch(name: str) -> None:
            await run.call(looked(calls, f"{name}1"), name)
            await run.call(looked(calls, f"{name}2"), name)

        for n in range(5):
            await run.decided("?", n)
        await run.gather(branch("a"), branch("b"), run.call(looked(calls, "c1"), "c"))
        await run.decided("?", 7)

    kd = processes.new()
    kd.run(agent, id="r")
    found = steps(kd, "r")
    assert {number: name for number, name in found.items() if number.startswith("6")} == {
        "6": "gather", "6.1.1": "a1", "6.1.2": "a2", "6.2.1": "b1", "6.2.2": "b2", "6.3.1": "c1",
    }  # fmt: skip
    assert list(found)[-1] == "7"


def test_r23_a_gather_inside_a_branch_numbers_below_it(processes: Processes, calls: Calls) -> None:
    @killick.agent(name="numbers_deeper")
    async def agent(run: killick.Run) -> Any:
        async def outer() -> Any:
            await run.decided("?", 0)
            return await run.gather(run.call(looked(calls), 1), run.call(looked(calls), 2))

        result = await run.gather(outer(), run.call(looked(calls), 3))
        await run.ask("well?")
        return result

    kd = processes.new()
    park(kd, agent)
    assert set(steps(kd, "r")) == {"1", "1.1.1", "1.1.2", "1.1.2.1.1", "1.1.2.2.1", "1.2.1", "2"}
    kd.answer("r", "approve")
    assert processes.new().run(agent, id="r") == ((1, 2), 3)
    assert sorted(calls) == [1, 2, 3]


def test_r23_a_gather_of_nothing_is_a_step_that_returns_nothing(processes: Processes) -> None:
    @killick.agent(name="gathers_nothing")
    async def agent(run: killick.Run) -> int:
        assert await run.gather() == ()
        assert await run.gather([]) == ()
        await run.ask("well?")
        return 1

    kd = processes.new()
    park(kd, agent)
    kd.answer("r", "approve")
    assert processes.new().run(agent, id="r") == 1


@pytest.mark.parametrize("way", ["create_task", "gather", "task_group", "thread", "now_in_task"])
def test_r23_a_run_used_in_a_foreign_task_or_thread_raises_and_names_gather(
    processes: Processes, calls: Calls, way: str
) -> None:
    @killick.agent(name="strays")
    async def agent(run: killick.Run) -> None:
        async def stray() -> Any:
            return await run.call(keyed(calls), 1)

        async def draws() -> Any:
            return run.now()

        if way == "create_task":
            await asyncio.create_task(stray())
        elif way == "gather":
            await asyncio.gather(run.call(keyed(calls), 1), run.call(keyed(calls), 2))
        elif way == "task_group":
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(stray())
            except* OutsideBranch as group_error:
                raise group_error.exceptions[0] from None
        elif way == "now_in_task":
            await asyncio.create_task(draws())
        else:
            await asyncio.to_thread(lambda: asyncio.run(stray()))

    kd = processes.new()
    with pytest.raises(killick.RunFailed, match=r"run\.gather") as failed:
        kd.run(agent, id="r")
    assert failed.value.failure.is_a(OutsideBranch)
    assert calls == []
    assert steps(kd, "r") == {}


def test_r23_a_blocking_run_used_in_a_foreign_thread_raises_and_names_gather(
    processes: Processes, calls: Calls
) -> None:
    raised: list[BaseException] = []

    @killick.agent(name="strays_in_thread")
    def agent(run: killick.SyncRun) -> None:
        def stray() -> None:
            try:
                run.call(keyed(calls), 1)
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=stray)
        thread.start()
        thread.join()

    kd = processes.new()
    kd.run(agent, id="r")
    assert [type(error) for error in raised] == [OutsideBranch]
    assert "run.gather" in str(raised[0])
    assert (calls, steps(kd, "r")) == ([], {})


def test_r23_a_run_kept_after_its_end_is_refused(processes: Processes, calls: Calls) -> None:
    kept: list[killick.Run] = []

    @killick.agent(name="leaks")
    async def agent(run: killick.Run) -> None:
        kept.append(run)

    async def later() -> None:
        await kept[0].call(keyed(calls), 1)

    kd = processes.new()
    kd.run(agent, id="r")
    before = kinds(kd, "r")
    with pytest.raises(OutsideBranch):
        asyncio.run(later())
    assert (calls, kinds(kd, "r")) == ([], before)


def test_r23_when_a_branch_fails_siblings_start_nothing_new_and_open_attempts_settle(processes: Processes) -> None:
    done: list[str] = []
    open_attempt = asyncio.Event()

    @killick.tool(effect="at_most_once")
    async def slow_payment() -> str:
        open_attempt.set()
        while not any(step.name == "fails_meanwhile" and step.status == "failed" for step in kd.state("r").fold.steps):
            await asyncio.sleep(0.001)
        done.append("paid")
        return "paid"

    @killick.tool(effect="at_most_once")
    async def never(n: int) -> None:
        done.append("never")

    @killick.tool(effect="reads", retry=killick.Retry(attempts=1))
    async def fails_meanwhile() -> None:
        await open_attempt.wait()
        while "1.2.1" not in steps(kd, "r"):
            await asyncio.sleep(0.001)
        raise LookupError("broken")

    @killick.agent(name="fails_in_a_branch")
    async def agent(run: killick.Run) -> str:
        async def pays() -> None:
            await run.call(slow_payment)
            await run.call(never, 1)

        async def waits() -> None:
            await run.wait("something")
            await run.call(never, 2)

        try:
            await run.gather(pays(), waits(), run.call(fails_meanwhile))
        except killick.StepFailed as failed:
            await run.ask("well?")
            return f"{failed.step}: {failed.name}, {failed.is_a(LookupError)}"
        return "no error"

    kd = processes.new()
    park(kd, agent)
    assert done == ["paid"]
    found = {step.id: step.status for step in kd.state("r").fold.steps}
    assert found == {"1": "failed", "1.1.1": "done", "1.2.1": "cancelled", "1.3.1": "failed", "2": "waiting"}
    kd.answer("r", "approve")
    assert processes.new().run(agent, id="r") == "1.3.1: fails_meanwhile, True"
    assert done == ["paid"]


def test_r23_of_two_branches_that_fail_the_recorded_first_is_raised_again(processes: Processes) -> None:
    raised: list[str] = []

    @killick.tool(effect="reads", retry=killick.Retry(attempts=1))
    async def fails_after(seconds: float) -> None:
        await asyncio.sleep(seconds)
        raise LookupError(str(seconds))

    @killick.agent(name="fails_twice")
    async def agent(run: killick.Run) -> None:
        try:
            await run.gather(run.call(fails_after, 0.02), run.call(fails_after, 0.0))
        except killick.StepFailed as failed:
            raised.append(failed.step)
        await run.ask("well?")

    park(processes.new(), agent)
    processes.new().answer("r", "approve")
    processes.new().run(agent, id="r")
    assert raised == ["1.2.1", "1.2.1"]


# R24: divergence ----------------------------------------------------------------------------------


def other_child() -> killick.Agent[Any, Any]:
    @killick.agent(name="child_of_divergence")
    async def child(run: killick.Run, n: int) -> int:
        return n

    @killick.agent(name="other_child_of_divergence")
    async def other(run: killick.Run, n: int) -> int:
        return n

    return other


def child_agent() -> killick.Agent[int, int]:
    @killick.agent(name="child_of_divergence")
    async def child(run: killick.Run, n: int) -> int:
        return n

    return child


async def a_model(**request: Any) -> str:
    return "said"


Edit = Callable[[killick.Run, Calls], Any]

DIVERGING: dict[str, tuple[Edit, Edit]] = {
    "another kind": (lambda run, calls: run.call(looked(calls), 1), lambda run, calls: run.model(a_model, n=1)),
    "another name": (lambda run, calls: run.call(looked(calls), 1), lambda run, calls: run.call(keyed(calls), 1)),
    "another argument of an effect": (
        lambda run, calls: run.call(keyed(calls), 1), lambda run, calls: run.call(keyed(calls), 2),
    ),
    "another type of answer to a prompt": (
        lambda run, calls: run.ask("How much?", returns=int), lambda run, calls: run.ask("How much?", returns=str),
    ),
    "another event": (
        lambda run, calls: run.wait("paid", timeout=1, default=0),
        lambda run, calls: run.wait("sent", timeout=1, default=0),
    ),
    "a question where a sleep was": (lambda run, calls: run.sleep(1), lambda run, calls: run.ask("Pay?")),
    "another input of a child": (
        lambda run, calls: run.spawn(child_agent(), 1), lambda run, calls: run.spawn(child_agent(), 2),
    ),
    "another child": (lambda run, calls: run.spawn(child_agent(), 1), lambda run, calls: run.spawn(other_child(), 1)),
    "another message": (
        lambda run, calls: run.send("r", "noise", 1), lambda run, calls: run.send("r", "noise", 2),
    ),
    "first where a gather was": (
        lambda run, calls: run.gather(run.call(looked(calls), 1)),
        lambda run, calls: run.first(run.call(looked(calls), 1)),
    ),
    "a decision where a tool was": (
        lambda run, calls: run.call(looked(calls), 1), lambda run, calls: run.decided("?", 1),
    ),
}  # fmt: skip


def diverging(step: Edit, calls: Calls) -> killick.Agent[None, str]:
    """An agent with a step that is edited, between two that are not, and a wait."""

    @killick.agent(name="edited")
    async def agent(run: killick.Run) -> str:
        await run.call(keyed(calls), "before")
        await step(run, calls)
        await run.call(keyed(calls), "after")
        await run.ask("well?")
        return "done"

    return agent


def built(version: str) -> Callable[[killick.Agent[Any, Any]], e.Build]:
    return lambda agent: e.Build(version=version)


@pytest.mark.parametrize("edit", DIVERGING)
def test_r24_code_that_means_another_step_diverges_and_goes_on_when_it_is_mended(
    processes: Processes, calls: Calls, edit: str
) -> None:
    before, after = DIVERGING[edit]
    first = processes.new(build=built("1.0"))
    park(first, diverging(before, calls))
    if "prompt" in edit:
        first.answer("r", "reject")
        park(first, diverging(before, calls))
    if "event" in edit:
        processes.clock.advance(2)
        park(first, diverging(before, calls))
    recorded, done = record(first, "r"), list(calls)

    second = processes.new(build=built("2.0"))
    with pytest.raises(killick.errors.RunDiverged) as diverged:
        second.run(diverging(after, calls), id="r")
    assert diverged.value.step == "2"
    assert diverged.value.builds == ("1.0", "2.0")
    assert diverged.value.recorded != diverged.value.found
    for named in (diverged.value.recorded, diverged.value.found, "1.0", "2.0"):
        assert named in str(diverged.value)
    assert calls == done
    assert record(second, "r") == [*recorded, "run.diverged"]
    assert second.info("r").status == "code_mismatch"
    [on_record] = told(second, "r", e.RunDiverged)
    assert on_record.event.step == "2"
    assert on_record.data == {
        "recorded": diverged.value.recorded, "found": diverged.value.found, "builds": ["1.0", "2.0"],
        "code": diverging(after, calls).code,
    }  # fmt: skip

    mended = processes.new(build=built("3.0"))
    mended.answer("r:4", "approve")
    assert mended.run(diverging(before, calls), id="r") == "done"
    assert calls == done


def test_r24_a_message_to_a_diverged_run_makes_it_due_once(processes: Processes) -> None:
    @killick.agent(name="diverges_when_called")
    async def before(run: killick.Run) -> None:
        await run.ask("one?")
        await run.ask("two?")

    kd = processes.new()
    with pytest.raises(killick.RunWaiting):
        kd.run(before, id="r")
    kd.answer("r", "approve")

    @killick.agent(name="diverges_when_called")
    async def after(run: killick.Run) -> None:
        await run.sleep(1)

    kd = processes.new()
    [outcome] = kd.advance_due()
    assert outcome.diverged is not None
    kd.send("r", "word", 1)
    assert [each.run for each in processes.new().advance_due()] == ["r"]
    assert processes.new().advance_due() == []


def test_r24_a_run_that_diverges_again_and_again_says_it_once(processes: Processes, calls: Calls) -> None:
    before, after = DIVERGING["another name"]
    park(processes.new(), diverging(before, calls))
    for _ in range(3):
        with pytest.raises(killick.errors.RunDiverged):
            processes.new().run(diverging(after, calls), id="r")
    assert kinds(processes.new(), "r").count("run.diverged") == 1


@pytest.mark.parametrize("ends", ["returns", "raises"])
def test_r24_code_that_ends_early_diverges(processes: Processes, calls: Calls, ends: str) -> None:
    def version(early: bool) -> killick.Agent[None, str]:
        @killick.agent(name="ends_early")
        async def agent(run: killick.Run) -> str:
            await run.call(keyed(calls), 1)
            if early and ends == "raises":
                raise LookupError("a bug")
            if early:
                return "early"
            await run.call(keyed(calls), 2)
            await run.ask("well?")
            return "done"

        return agent

    park(processes.new(), version(early=False))
    kd = processes.new()
    with pytest.raises(killick.errors.RunDiverged) as diverged:
        kd.run(version(early=True), id="r")
    assert diverged.value.step == "2"
    assert "keyed" in diverged.value.recorded
    assert kd.info("r").status == "code_mismatch"
    kd.answer("r", "approve")
    assert processes.new().run(version(early=False), id="r") == "done"
    assert calls == [1, 2]


def test_r24_a_branch_that_ends_early_diverges(processes: Processes, calls: Calls) -> None:
    def version(count: int) -> killick.Agent[None, str]:
        @killick.agent(name="branch_ends_early")
        async def agent(run: killick.Run) -> str:
            async def branch(steps: int) -> None:
                for n in range(steps):
                    await run.call(looked(calls), n)

            await run.gather(branch(count), branch(2))
            await run.ask("well?")
            return "done"

        return agent

    park(processes.new(), version(2))
    kd = processes.new()
    with pytest.raises(killick.errors.RunDiverged) as diverged:
        kd.run(version(1), id="r")
    assert diverged.value.step == "1.1.2"
    kd.answer("r", "approve")
    assert processes.new().run(version(2), id="r") == "done"


def test_r24_a_branch_that_goes_on_after_its_gather_was_over_diverges(processes: Processes, calls: Calls) -> None:
    def version(count: int) -> killick.Agent[None, str]:
        @killick.agent(name="branch_goes_on")
        async def agent(run: killick.Run) -> str:
            async def branch(steps: int) -> None:
                for n in range(steps):
                    await run.call(keyed(calls), n)

            await run.gather(branch(count))
            await run.ask("well?")
            return "done"

        return agent

    park(processes.new(), version(1))
    kd = processes.new()
    with pytest.raises(killick.errors.RunDiverged) as diverged:
        kd.run(version(2), id="r")
    assert diverged.value.step == "1.1.2"
    assert calls == [0]


@pytest.mark.parametrize(("build", "names_chance"), [("1.0", True), ("2.0", False)])
def test_r24_the_same_build_that_asks_for_something_else_is_told_to_look_for_chance(
    processes: Processes, calls: Calls, build: str, names_chance: bool
) -> None:
    drawn = iter([931, 17])

    @killick.agent(name="draws")
    async def agent(run: killick.Run) -> None:
        await run.call(keyed(calls), next(drawn))
        await run.ask("well?")

    park(processes.new(build=built("1.0")), agent)
    with pytest.raises(killick.errors.RunDiverged, match=r"guard the change with run\.patched") as diverged:
        processes.new(build=built(build)).run(agent, id="r")
    chance = r"if the code is unchanged, it uses chance, a clock or process state; `killick check` names the line"
    assert (chance in str(diverged.value)) is names_chance


@pytest.mark.parametrize("count", [1, 3])
def test_r24_a_gather_with_more_or_fewer_branches_than_on_record_diverges(
    processes: Processes, calls: Calls, count: int
) -> None:
    def version(count: int) -> killick.Agent[None, str]:
        @killick.agent(name="other_branches")
        async def agent(run: killick.Run) -> str:
            await run.gather(*(run.call(keyed(calls), n) for n in range(count)))
            await run.ask("well?")
            return "done"

        return agent

    park(processes.new(), version(2))
    kd = processes.new()
    with pytest.raises(killick.errors.RunDiverged) as diverged:
        kd.run(version(count), id="r")
    assert diverged.value.step.startswith("1")
    assert sorted(calls) == [0, 1]
    kd.answer("r", "approve")
    assert processes.new().run(version(2), id="r") == "done"


def test_r24_a_new_step_before_recorded_ones_diverges_and_is_not_done(processes: Processes, calls: Calls) -> None:
    def version(new: bool) -> killick.Agent[None, None]:
        @killick.agent(name="new_step")
        async def agent(run: killick.Run) -> None:
            if new:
                await run.call(keyed(calls), "new")
            await run.call(looked(calls), "old")
            await run.ask("well?")

        return agent

    park(processes.new(), version(new=False))
    with pytest.raises(killick.errors.RunDiverged, match="keyed"):
        processes.new().run(version(new=True), id="r")
    assert calls == ["old"]


# R24: drift ---------------------------------------------------------------------------------------

DRIFTING: dict[str, tuple[Edit, Edit]] = {
    "a model's messages": (
        lambda run, calls: run.model(a_model, model="m1", system="Be brief."),
        lambda run, calls: run.model(a_model, model="m2", system="Be kind."),
    ),
    "a read's arguments": (
        lambda run, calls: run.call(looked(calls), "a"), lambda run, calls: run.call(looked(calls), "b"),
    ),
    "a decision's question": (
        lambda run, calls: run.decided("Who?", "manager", because="large"),
        lambda run, calls: run.decided("Who decides?", "nobody", because="small"),
    ),
    "an argument outside of an effect's identity": (
        lambda run, calls: run.call(mailer(calls), "ann", "dear ann"),
        lambda run, calls: run.call(mailer(calls), "ann", "hello ann"),
    ),
}  # fmt: skip


def mailer(calls: Calls) -> killick.Tool[[str, str], str]:
    @killick.tool(effect="at_most_once", identity=("to",), name="mailer")
    async def mailer(to: str, body: str) -> str:
        calls.append((to, body))
        return body

    return mailer


@pytest.mark.parametrize("edit", DRIFTING)
def test_r24_other_arguments_only_drift_and_the_recorded_result_is_kept(
    processes: Processes, calls: Calls, edit: str
) -> None:
    def version(step: Edit) -> killick.Agent[None, Any]:
        @killick.agent(name="drifts")
        async def agent(run: killick.Run) -> Any:
            result = await step(run, calls)
            await run.ask("well?")
            await run.ask("sure?")
            return result

        return agent

    before, after = DRIFTING[edit]
    first = processes.new()
    park(first, version(before))
    done = list(calls)
    kept = first.state("r").outputs["1"] if edit != "a decision's question" else "manager"
    for wait in ("r:2", "r:3"):
        kd = processes.new()
        kd.answer(wait, "approve")
        with contextlib.suppress(killick.RunWaiting):
            assert kd.run(version(after), id="r") == kept
    assert calls == done
    assert kd.info("r").status == "completed"
    [drift] = told(kd, "r", e.StepDrifted)
    assert drift.event.step == "1"
    assert drift.data["recorded"] != drift.data["found"]


@pytest.mark.parametrize("is_open", [True, False])
def test_r24_a_question_in_other_words_strands_no_run_and_one_that_is_open_keeps_its_text(
    processes: Processes, is_open: bool
) -> None:
    def version(text: str, options: list[str]) -> killick.Agent[None, str]:
        @killick.agent(name="asks")
        async def agent(run: killick.Run) -> str:
            answer = await run.ask(text, options=options, timeout="1h", default=options[0])
            await run.ask("well?")
            return str(answer.value)

        return agent

    before, after = version("Which colour?", ["red", "blue"]), version("Which colour do you want?", ["red", "green"])
    first = processes.new()
    park(first, before)
    if not is_open:
        first.answer("r:1", "respond", value="blue")
        park(first, before)
    for _ in range(2):
        second = processes.new()
        park(second, after)
    if is_open:
        [wait] = second.inbox()
        assert (wait.prompt, wait.options) == ("Which colour?", ("red", "blue"))
        second.answer("r:1", "respond", value="blue")
        park(second, after)
    [drift] = told(second, "r", e.StepDrifted)
    assert drift.data["recorded"]["prompt"] == "Which colour?"
    assert drift.data["found"]["prompt"] == "Which colour do you want?"
    second.answer("r:2", "approve")
    assert second.run(after, id="r") == "blue"


def test_r24_a_changed_note_strands_nobody_and_the_recorded_one_stays(processes: Processes) -> None:
    def version(text: str) -> killick.Agent[None, str]:
        @killick.agent(name="notes")
        async def agent(run: killick.Run) -> str:
            await run.note(text)
            await run.plan([text])
            await run.at(text)
            await run.ask("well?")
            return "done"

        return agent

    park(processes.new(), version("old"))
    kd = processes.new()
    kd.answer("r", "approve")
    assert kd.run(version("new"), id="r") == "done"
    assert [note.data["note"] for note in told(kd, "r", e.NoteMade)] == ["old"]


def edited(edit: str, calls: Calls) -> killick.Agent[None, list[Any]]:
    """An agent as it was deployed first, or with one edit."""

    async def pays_amount(amount: int) -> int:
        calls.append(amount)
        return amount

    async def pays_currency(amount: int, currency: str = "EUR") -> int:
        calls.append((amount, currency))
        return amount

    declare = killick.tool(effect="at_most_once", name="pays")
    pays = declare(pays_currency) if edit == "a new default argument" else declare(pays_amount)

    @killick.agent(name="claims")
    async def agent(run: killick.Run) -> list[Any]:
        if edit == "a print":
            print("I was here")  # noqa: T201
        if edit == "time and chance":
            assert len({run.now(), run.uuid(), run.random()}) == 3
        if edit == "a new note, plan and stage":
            await run.note("new")
            await run.plan(["a", "b"])
            await run.at("a")
        system = "Be kind." if edit == "a changed system prompt" else "Be brief."
        model = "m2" if edit == "another model" else "m1"
        said = await run.model(a_model, model=model, system=system)
        paid: int = await run.call(pays, 5)
        await run.ask("well?", timeout="5d" if edit == "another timeout" else None)
        if edit == "a new step after the wait":
            await run.call(looked(calls), "new")
        return [said, paid]

    return agent


EDITS = [
    "a print", "a changed system prompt", "another model", "a new step after the wait", "a new default argument",
    "time and chance", "a new note, plan and stage", "another timeout",
]  # fmt: skip


@pytest.mark.parametrize("edit", EDITS)
def test_r24_an_everyday_edit_strands_no_parked_run(processes: Processes, calls: Calls, edit: str) -> None:
    park(processes.new(), edited("", calls))
    kd = processes.new()
    kd.answer("r", "approve")
    assert kd.run(edited(edit, calls), id="r") == ["said", 5]
    assert calls == [5] + ["new"] * (edit == "a new step after the wait")


def test_r24_a_renamed_agent_goes_on_under_its_alias(processes: Processes) -> None:
    @killick.agent(name="old_name")
    async def old(run: killick.Run) -> str:
        await run.ask("well?")
        return "old"

    park(processes.new(), old)

    @killick.agent(name="new_name", aliases=["old_name"])
    async def new(run: killick.Run) -> str:
        await run.ask("well?")
        return "new"

    kd = processes.new()
    kd.answer("r", "approve")
    assert kd.run(new, id="r") in ("old", "new")


def test_r24_patched_keeps_old_runs_on_the_old_branch(processes: Processes, calls: Calls) -> None:
    def version(patched: bool) -> killick.Agent[None, str]:
        @killick.agent(name="patched")
        async def agent(run: killick.Run) -> str:
            if patched and run.patched("check first"):
                await run.call(keyed(calls), "check")
                way = "new"
            else:
                way = "old"
            await run.call(keyed(calls), "pay")
            await run.ask("well?")
            if patched and run.patched("check first"):
                way += " again"
            return way

        return agent

    park(processes.new(), version(patched=False), "before")
    kd = processes.new()
    kd.answer("before", "approve")
    assert kd.run(version(patched=True), id="before") == "old"
    park(kd, version(patched=True), "after")
    kd.answer("after", "approve")
    assert processes.new().run(version(patched=True), id="after") == "new again"
    assert calls == ["pay", "check", "pay"]
    assert list(steps(kd, "after")) == ["1", "2", "3"]


def test_r24_patched_is_true_for_a_run_that_has_not_come_to_the_place(processes: Processes) -> None:
    def version(patched: bool) -> killick.Agent[None, str]:
        @killick.agent(name="patched_later")
        async def agent(run: killick.Run) -> str:
            await run.ask("well?")
            way = "new" if patched and run.patched("later") else "old"
            await run.ask("sure?")
            return way

        return agent

    park(processes.new(), version(patched=False))
    kd = processes.new()
    kd.answer("r", "approve")
    park(kd, version(patched=True))
    kd.answer("r", "approve")
    assert processes.new().run(version(patched=True), id="r") == "new"


@pytest.mark.parametrize("successor", ["old", "new"])
def test_r24_patched_goes_the_way_of_the_code_that_made_the_next_step(
    processes: Processes, calls: Calls, successor: str
) -> None:
    """New code passes the guard and dies before its step is on record; code without the guard may come next."""
    dying, life = processes.mortal()
    watching = processes.new()

    def version(code: str) -> killick.Agent[None, str]:
        @killick.agent(name="patched_and_died")
        async def agent(run: killick.Run) -> str:
            way = "old"
            if code != "old" and run.patched("check first"):
                if code == "dies":
                    while "FactDrawn" not in record_kinds():
                        await asyncio.sleep(0)
                    life.die()
                await run.call(keyed(calls), "check")
                way = "new"
            await run.call(keyed(calls), "pay")
            await run.ask("well?")
            return way

        return agent

    def record_kinds() -> list[str]:
        return [type(each.event).__name__ for each in watching.events("r")]

    with pytest.raises(StoreUnavailable):
        dying.run(version("dies"), id="r")
    processes.mourn()
    kd = processes.new()
    park(kd, version(successor))
    kd.answer("r", "approve")
    assert processes.new().run(version("new"), id="r") == successor
    assert calls == (["pay"] if successor == "old" else ["check", "pay"])


def test_r24_time_and_chance_take_no_number_and_are_the_same_on_replay(processes: Processes, calls: Calls) -> None:
    seen: list[tuple[datetime, datetime, UUID, UUID, float]] = []

    @killick.agent(name="draws")
    async def agent(run: killick.Run) -> None:
        early = run.now()
        await run.sleep(60)
        seen.append((early, run.now(), run.uuid(), run.uuid(), run.random()))
        await run.call(keyed(calls), 1)
        await run.ask("well?")

    kd = processes.new()
    park(kd, agent)
    assert list(steps(kd, "r")) == ["1", "2", "3"]
    kd.answer("r", "approve")
    processes.new().run(agent, id="r")
    assert seen[0] == seen[1]
    early, late, one, other, fraction = seen[0]
    assert (late - early).total_seconds() >= 60
    assert early.tzinfo is not None
    assert one != other
    assert 0 <= fraction < 1


def test_r24_time_and_chance_in_branches_are_each_branchs_own_on_replay(processes: Processes) -> None:
    seen: list[Any] = []

    @killick.agent(name="draws_in_branches")
    def agent(run: killick.SyncRun) -> None:
        seen.append(run.gather(*[lambda: (run.uuid(), run.random())] * 3))
        run.ask("well?")

    kd = processes.new()
    park(kd, agent)
    kd.answer("r", "approve")
    processes.new().run(agent, id="r")
    assert seen[0] == seen[1]
    assert len(set(seen[0])) == 3


# R29: builds and logging --------------------------------------------------------------------------


def test_r29_the_run_and_every_taking_of_it_record_the_build(processes: Processes) -> None:
    @killick.agent(name="built")
    async def agent(run: killick.Run) -> None:
        await run.ask("well?")

    park(processes.new(build=built("1.0")), agent)
    second = processes.new(build=built("2.0"))
    second.answer("r", "approve")
    second.run(agent, id="r")
    assert [start.event.build.version for start in told(second, "r", e.RunStarted)] == ["1.0"]
    assert [taken.event.build.version for taken in told(second, "r", e.RunTaken)] == ["1.0", "2.0"]


def test_r29_the_build_is_the_package_s_version_and_the_repository_s_commit(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    @killick.agent(name="built_here")
    async def agent(run: killick.Run) -> None: ...

    kd = processes.new()
    kd.run(agent, id="r")
    [start] = told(kd, "r", e.RunStarted)
    assert isinstance(start.event.build, e.Build)
    monkeypatch.setenv("KILLICK_BUILD", "2026-11-04")
    kd.run(agent, id="named")
    assert kd.info("named").build.version == "2026-11-04"


def test_r29_logging_is_silent_while_replaying_and_otherwise_names_run_step_and_attempt(
    processes: Processes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "agents")
    heard = logging.getLogger("agents")

    @killick.tool(effect="reads", retry=killick.Retry(attempts=2))
    async def logs() -> None:
        heard.info("in the tool")
        if len([r for r in caplog.records if r.message == "in the tool"]) == 1:
            raise ConnectionResetError("once")

    @killick.agent(name="logs")
    async def agent(run: killick.Run) -> None:
        heard.info("before")
        await run.call(logs)
        heard.info("between")
        await run.ask("well?")
        heard.info("after")

    park(processes.new(), agent)
    processes.new().answer("r", "approve")
    processes.new().run(agent, id="r")
    found: list[Any] = [record for record in caplog.records if record.name == "agents"]
    assert [(r.message, r.killick_run, r.killick_step, r.killick_attempt) for r in found] == [
        ("before", "r", "1", None),
        ("in the tool", "r", "1", 1),
        ("in the tool", "r", "1", 2),
        ("between", "r", "2", None),
        ("after", "r", "3", None),
    ]


def test_r29_logging_of_a_blocking_agent_and_its_branches_is_silent_while_replaying(
    processes: Processes, calls: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "agents")
    heard = logging.getLogger("agents")

    @killick.agent(name="logs_in_threads")
    def agent(run: killick.SyncRun) -> None:
        def branch() -> None:
            heard.info("branch")
            run.call(looked(calls), 1)

        heard.info("before")
        run.gather(branch, branch)
        run.ask("well?")
        heard.info("after")

    park(processes.new(), agent)
    processes.new().answer("r", "approve")
    processes.new().run(agent, id="r")
    found: list[Any] = [record for record in caplog.records if record.name == "agents"]
    assert [(r.message, r.killick_run, r.killick_step) for r in found] == [
        ("before", "r", "1"), ("branch", "r", "1.1.1"), ("branch", "r", "1.2.1"), ("after", "r", "3"),
    ]  # fmt: skip


def test_r29_a_run_knows_whether_it_replays(processes: Processes, calls: Calls) -> None:
    seen: list[bool] = []

    @killick.agent(name="knows")
    async def agent(run: killick.Run) -> None:
        seen.append(run.replaying)
        await run.call(looked(calls), 1)
        await run.ask("well?")
        seen.append(run.replaying)

    park(processes.new(), agent)
    processes.new().answer("r", "approve")
    processes.new().run(agent, id="r")
    assert seen == [False, True, False]


# Branches that a sibling's end kept from their next step --------------------------------------------


@killick.tool(effect="reads")
async def glance(at: int) -> int:
    return at


@killick.agent
async def raced(run: killick.Run) -> int:
    await run.call(glance, 1)
    first = await run.first(run.call(glance, 3), run.wait("never"))
    await run.ask("Right?")
    return int(first.value)


@killick.agent
async def broken_off(run: killick.Run) -> str:
    await run.call(glance, 1)
    with contextlib.suppress(killick.StepFailed):
        await run.gather(run.call(refuses, 3), run.wait("never"))
    return (await run.ask("Right?")).kind


@killick.tool(effect="reads")
async def refuses(at: int) -> int:
    raise ValueError("no")


@pytest.mark.parametrize(("agent", "expected"), [(raced, 3), (broken_off, "approve")])
def test_a_branch_that_was_stopped_before_its_first_step_is_stopped_again_when_it_is_replayed(
    agent: Any, expected: Any
) -> None:
    store = open_store("memory:")
    with pytest.raises(killick.RunWaiting):
        killick.Client(store, behind=False).run(agent, id="r")
    other = killick.Client(store, behind=False)
    with pytest.raises(killick.RunWaiting, match=r"Right\?"):
        other.run(agent, id="r")
    other.answer("r", "approve")
    assert killick.Client(store, behind=False).run(agent, id="r") == expected
