"""Runs that start runs, and branches that race: spawn, gather, first, and what reaches children and running tools."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import killick
from killick.errors import RunExists, StoreUnavailable
from killick.model import events as e
from processes import Processes, kinds, steps, told


@pytest.fixture
def processes() -> Iterator[Processes]:
    with Processes() as made:
        yield made


DONE: list[Any] = []


@pytest.fixture(autouse=True)
def nothing_done() -> None:
    DONE.clear()


def park(kd: killick.Client, agent: killick.Agent[None, Any], run: str = "r") -> killick.RunWaiting:
    with pytest.raises(killick.RunWaiting) as waiting:
        kd.run(agent, id=run)
    return waiting.value


@dataclass
class Order:
    item: str
    count: int = 1


@killick.tool(effect="at_most_once", name="children_do")
async def do(what: Any) -> Any:
    DONE.append(what)
    return what


@killick.agent(name="packs")
async def packs(run: killick.Run, order: Order) -> Order:
    await run.call(do, order.item)
    return Order(order.item.upper(), order.count + 1)


@killick.agent(name="asks_first")
async def asks_first(run: killick.Run, name: str) -> str:
    answer = await run.ask(f"{name}?")
    await run.call(do, name)
    return f"{name} {answer.kind}"


@killick.agent(name="breaks_down")
async def breaks_down(run: killick.Run) -> None:
    raise LookupError("no such thing")


# spawning -----------------------------------------------------------------------------------------


def test_a_child_is_a_run_of_its_own_and_returns_what_its_agent_declares(processes: Processes) -> None:
    seen: list[Any] = []

    @killick.agent(name="parent")
    async def parent(run: killick.Run) -> str:
        child = await run.spawn(packs, Order("cup"))
        packed = await child.result()
        seen.append(packed)
        await run.ask("well?")
        return child.id

    kd = processes.new()
    park(kd, parent)
    kd.answer("r", "approve")
    child = processes.new().run(parent, id="r")
    assert seen == [Order("CUP", 2)] * 2
    assert DONE == ["cup"]
    info = kd.info(child)
    assert (info.status, info.parent, info.agent) == ("completed", "r", "packs")
    assert list(steps(kd, "r").values()) == ["packs", child, "ask"]
    [spawned], [ended] = told(kd, "r", e.ChildSpawned), told(kd, "r", e.ChildEnded)
    assert (spawned.event.run, ended.event.run, ended.event.status) == (child, child, "completed")


def test_a_child_is_spawned_once_however_often_the_parent_replays(processes: Processes) -> None:
    @killick.agent(name="parent_of_asker")
    async def parent(run: killick.Run) -> str:
        child = await run.spawn(asks_first, "child")
        return await child.result()

    kd = processes.new()
    waiting = park(kd, parent)
    [child] = [wait.run for wait in waiting.waits]
    assert [wait.prompt for wait in waiting.waits] == ["child?"]
    for _ in range(3):
        park(processes.new(), parent)
    processes.new().answer(child, "approve")
    assert processes.new().run(parent, id="r") == "child approve"
    assert DONE == ["child"]
    assert sorted(listed.id for listed in kd.list()) == sorted(["r", child])


def test_a_child_that_fails_raises_child_failed_with_its_failure_again_on_replay(processes: Processes) -> None:
    seen: list[Any] = []

    @killick.agent(name="parent_of_broken")
    async def parent(run: killick.Run) -> None:
        child = await run.spawn(breaks_down)
        try:
            await child.result()
        except killick.errors.ChildFailed as failed:
            seen.append((failed.run, failed.is_a(LookupError), str(failed)))
        await run.ask("well?")

    kd = processes.new()
    park(kd, parent)
    kd.answer("r", "approve")
    processes.new().run(parent, id="r")
    assert len(seen) == 2
    assert seen[0] == seen[1]
    assert seen[0][1] is True


def test_a_child_that_was_cancelled_raises_child_failed(processes: Processes) -> None:
    @killick.agent(name="parent_of_cancelled")
    async def parent(run: killick.Run) -> str:
        child = await run.spawn(asks_first, "child", id="c")
        try:
            return await child.result()
        except killick.errors.ChildFailed as failed:
            return f"{failed.failure.kind} {failed.run}"

    kd = processes.new()
    park(kd, parent)
    kd.cancel("c")
    kd.advance("c")
    assert kd.run(parent, id="r") == "cancelled c"


def test_a_child_may_be_given_an_id_and_one_that_is_taken_fails_the_step(processes: Processes) -> None:
    @killick.agent(name="parent_of_named")
    async def parent(run: killick.Run) -> list[str]:
        child = await run.spawn(packs, Order("cup"), id="order-17")
        await child.result()
        try:
            await run.spawn(packs, Order("saucer"), id="order-17")
        except killick.StepFailed as failed:
            return [child.id, str(failed.is_a(RunExists))]
        return [child.id]

    kd = processes.new()
    assert kd.run(parent, id="r") == ["order-17", "True"]
    assert DONE == ["cup"]


def test_children_side_by_side_all_return(processes: Processes) -> None:
    @killick.agent(name="parent_of_many")
    async def parent(run: killick.Run) -> list[str]:
        async def one(n: int) -> str:
            child = await run.spawn(packs, Order(f"cup{n}"))
            return (await child.result()).item

        return list(await run.gather(*(one(n) for n in range(5))))

    assert processes.new().run(parent, id="r") == [f"CUP{n}" for n in range(5)]
    assert sorted(DONE) == [f"cup{n}" for n in range(5)]


def test_a_blocking_agent_spawns_and_waits_too(processes: Processes) -> None:
    @killick.agent(name="blocking_parent")
    def parent(run: killick.SyncRun) -> list[Any]:
        child = run.spawn(packs, Order("cup"))
        other = run.spawn(asks_first, "child", id="c")
        return [run.result(child).item, run.result(other)]

    kd = processes.new()
    park(kd, parent)
    kd.answer("c", "approve")
    assert processes.new().run(parent, id="r") == ["CUP", "child approve"]


def test_children_of_children_are_advanced_and_their_waits_are_told(processes: Processes) -> None:
    @killick.agent(name="middle")
    async def middle(run: killick.Run, name: str) -> str:
        child = await run.spawn(asks_first, name, id="grandchild")
        return await child.result()

    @killick.agent(name="top")
    async def top(run: killick.Run) -> str:
        child = await run.spawn(middle, "deep", id="child")
        return await child.result()

    kd = processes.new()
    waiting = park(kd, top)
    assert [(wait.run, wait.prompt) for wait in waiting.waits] == [("grandchild", "deep?")]
    kd.answer("grandchild", "approve")
    assert processes.new().run(top, id="r") == "deep approve"


def test_an_agent_may_spawn_itself(processes: Processes) -> None:
    @killick.agent(name="counts_down")
    async def counts_down(run: killick.Run, n: int) -> int:
        if n == 0:
            return 0
        child = await run.spawn(counts_down, n - 1)
        return n + int(await child.result())

    assert processes.new().run(counts_down, 4, id="r") == 10


def test_a_childs_input_that_cannot_be_stored_is_refused_and_nothing_is_spawned(processes: Processes) -> None:
    @killick.agent(name="parent_of_unstorable")
    async def parent(run: killick.Run) -> None:
        bad: Any = object()
        await run.spawn(packs, bad)

    kd = processes.new()
    with pytest.raises(killick.RunFailed) as failed:
        kd.run(parent, id="r")
    assert failed.value.failure.is_a("ValueRefused")
    assert [listed.id for listed in kd.list()] == ["r"]
    assert "child.spawned" not in kinds(kd, "r")


def test_a_childs_input_of_the_wrong_type_is_refused_before_it_is_spawned(processes: Processes) -> None:
    @killick.agent(name="parent_of_mistyped")
    async def parent(run: killick.Run) -> None:
        bad: Any = "a cup"
        await run.spawn(packs, bad)

    kd = processes.new()
    with pytest.raises(killick.RunFailed):
        kd.run(parent, id="r")
    assert [listed.id for listed in kd.list()] == ["r"]


def test_a_child_inherits_the_priority_unless_it_is_given_one(processes: Processes) -> None:
    @killick.agent(name="parent_with_priority")
    async def parent(run: killick.Run) -> None:
        await run.spawn(packs, Order("a"), id="inherits")
        await run.spawn(packs, Order("b"), id="own", priority=1)
        await run.ask("well?")
        await run.spawn(packs, Order("c"), id="later")

    kd = processes.new()
    kd.start(parent, id="r", priority=5)
    kd.advance("r")
    kd.edit.prioritize("r", 9)
    kd.answer("r", "approve")
    kd.advance("r")
    assert [kd.info(run).priority for run in ("r", "inherits", "own", "later")] == [9, 5, 1, 9]


def test_a_parent_in_another_process_is_woken_when_its_child_ends(processes: Processes) -> None:
    @killick.agent(name="parent_elsewhere")
    async def parent(run: killick.Run) -> str:
        child = await run.spawn(asks_first, "child", id="c")
        return await child.result()

    here, there = processes.new(), processes.new()
    park(here, parent)
    there.answer("c", "approve")
    assert there.advance("c").status == "completed"
    assert [advanced.run for advanced in here.advance_due()] == ["r"]
    assert here.info("r").status == "completed"


def test_a_process_that_died_between_spawn_and_record_spawns_no_second_child(processes: Processes) -> None:
    dying, life = processes.mortal()
    create = processes.store.append

    @killick.agent(name="parent_that_dies")
    async def parent(run: killick.Run) -> str:
        child = await run.spawn(packs, Order("cup"), id="c")
        return (await child.result()).item

    def append_and_die(births: Any) -> Any:
        outcome = create(births)
        if processes.store.head("c") is not None:
            life.die()
        return outcome

    processes.store.append = append_and_die  # type: ignore[method-assign, assignment]
    with pytest.raises(killick.KillickError):
        dying.run(parent, id="r")
    processes.store.append = create  # type: ignore[method-assign]
    processes.mourn()
    kd = processes.new()
    assert kd.run(parent, id="r") == "CUP"
    assert DONE == ["cup"]
    assert len(told(kd, "r", e.ChildSpawned)) == 1


# when the parent ends -----------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "status"), [("cancel", "cancelled"), ("abandon", "waiting")])
@pytest.mark.parametrize("end", ["completes", "fails", "is cancelled"])
def test_on_parent_end_says_what_becomes_of_a_child(processes: Processes, policy: Any, status: str, end: str) -> None:
    @killick.agent(name="parent_ends")
    async def parent(run: killick.Run) -> None:
        await run.spawn(asks_first, "child", id="c", on_parent_end=policy)
        if end == "is cancelled":
            await run.ask("well?")
        if end == "fails":
            raise LookupError("broken")

    kd = processes.new()
    if end == "is cancelled":
        kd.start(parent, id="r")
        kd.advance("r")
        kd.cancel("r")
    expected = {"fails": killick.RunFailed, "is cancelled": killick.errors.RunCancelled}.get(end)
    if expected is None:
        kd.run(parent, id="r")
    else:
        with pytest.raises(expected):
            kd.run(parent, id="r")
    kd.advance_due()
    assert kd.info("c").status == status
    assert DONE == []


@killick.tool(effect="idempotent", name="children_undo")
async def undo(effect: Any) -> None:
    DONE.append(f"undid {effect.arguments['what']}")


@killick.tool(effect="idempotent", name="children_do_undoably", compensate=undo)
async def do_undoably(what: str) -> str:
    DONE.append(what)
    return what


@killick.agent(name="is_undone", on_failure="compensate")
async def is_undone(run: killick.Run, what: str) -> Any:
    await run.call(do_undoably, what)
    return await run.wait("never")


@killick.agent(name="undoes_all", on_failure="compensate")
async def undoes_all(run: killick.Run) -> None:
    await run.call(do_undoably, "first")
    for what in ("left", "right"):
        await run.spawn(is_undone, what, id=what)
    await run.call(do_undoably, "last")
    await run.sleep(1)
    raise LookupError("broken")


@pytest.mark.gate("after")
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_parent_and_its_children_undo_every_effect_at_whichever_commit_their_process_dies(
    make_world: Any, when: str
) -> None:
    number, has_died = 0, True
    while has_died:
        number, has_died = number + 1, False
        world = make_world(killick.clock.LeapingClock())
        world.line.cut_at = number, when
        DONE.clear()
        for _ in range(2):
            try:
                with pytest.raises(killick.RunFailed) as failed:
                    world.kd.run(undoes_all, id="r")
            except StoreUnavailable:
                has_died = True
                for run in ("r", "left", "right"):
                    world.bury(run)
        said = f"died {when} commit {number}: {DONE}"
        done = [each for each in DONE if not each.startswith("undid ")]
        assert has_died or sorted(done) == ["first", "last", "left", "right"], said
        assert [each for each in done if f"undid {each}" not in DONE] == [], said
        assert failed.value.not_undone == (), said
    assert number > 25


def test_on_parent_end_wait_keeps_the_parent_until_the_child_has_ended(processes: Processes) -> None:
    @killick.agent(name="parent_waits")
    async def parent(run: killick.Run) -> str:
        await run.spawn(asks_first, "child", id="c", on_parent_end="wait")
        return "parent"

    kd = processes.new()
    waiting = park(kd, parent)
    assert [wait.run for wait in waiting.waits] == ["c"]
    assert kd.info("r").status == "waiting"
    processes.new().answer("c", "approve")
    assert processes.new().run(parent, id="r") == "parent"
    assert kd.info("c").status == "completed"
    assert DONE == ["child"]


def test_on_parent_end_wait_outlives_a_child_that_fails(processes: Processes) -> None:
    @killick.agent(name="parent_waits_for_broken")
    async def parent(run: killick.Run) -> str:
        await run.spawn(breaks_down, id="c", on_parent_end="wait")
        await run.spawn(packs, Order("cup"), id="d", on_parent_end="wait")
        return "parent"

    kd = processes.new()
    assert kd.run(parent, id="r") == "parent"
    assert (kd.info("c").status, kd.info("d").status) == ("failed", "completed")


def test_cancelling_reaches_children_of_children(processes: Processes) -> None:
    @killick.agent(name="middle_cancelled")
    async def middle(run: killick.Run, name: str) -> str:
        child = await run.spawn(asks_first, name, id="grandchild")
        return await child.result()

    @killick.agent(name="top_cancelled")
    async def top(run: killick.Run) -> str:
        child = await run.spawn(middle, "deep", id="child")
        return await child.result()

    kd = processes.new()
    park(kd, top)
    kd.cancel("r", by="ann")
    with pytest.raises(killick.errors.RunCancelled):
        kd.run(top, id="r")
    for _ in range(3):
        kd.advance_due()
    assert [kd.info(run).status for run in ("r", "child", "grandchild")] == ["cancelled"] * 3


def test_cancelling_reaches_a_tool_that_runs(processes: Processes) -> None:
    started = threading.Event()

    @killick.tool(effect="reads", name="hangs_for_ever")
    async def hangs() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            DONE.append("cancelled")
            raise

    @killick.agent(name="hangs")
    async def agent(run: killick.Run) -> None:
        try:
            await run.call(hangs)
        finally:
            await run.call(do, "cleaned up")

    kd = processes.new()
    raised: list[str] = []

    def drive() -> None:
        try:
            kd.run(agent, id="r")
        except killick.KillickError as error:
            raised.append(type(error).__name__)

    thread = threading.Thread(target=drive)
    thread.start()
    assert started.wait(300)
    kd.cancel("r")
    thread.join(300)
    assert raised == ["RunCancelled"]
    assert DONE == ["cancelled"]
    assert kd.info("r").status == "cancelled"


def test_cancelling_reaches_a_tool_that_runs_in_a_child_held_by_the_same_process(processes: Processes) -> None:
    started = threading.Event()

    @killick.tool(effect="reads", name="hangs_in_child")
    async def hangs() -> None:
        started.set()
        await asyncio.Event().wait()

    @killick.agent(name="child_hangs")
    async def child(run: killick.Run) -> None:
        await run.call(hangs)

    @killick.agent(name="parent_of_hanging")
    async def parent(run: killick.Run) -> None:
        spawned = await run.spawn(child, id="c")
        await spawned.result()

    kd = processes.new()
    raised: list[str] = []

    def drive() -> None:
        try:
            kd.run(parent, id="r")
        except killick.KillickError as error:
            raised.append(type(error).__name__)

    thread = threading.Thread(target=drive)
    thread.start()
    assert started.wait(300)
    kd.cancel("r")
    thread.join(300)
    assert raised == ["RunCancelled"]
    for _ in range(100):
        if kd.info("c").status == "cancelled":
            break
        threading.Event().wait(0.02)
    assert kd.info("c").status == "cancelled"


# first --------------------------------------------------------------------------------------------


def test_first_returns_the_branch_that_is_done_first_and_stops_the_others(processes: Processes) -> None:
    @killick.tool(effect="reads", name="sleeps_a_little")
    async def sleeps(seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    @killick.agent(name="races")
    async def agent(run: killick.Run) -> list[Any]:
        async def slow() -> str:
            await run.call(sleeps, 0.05)
            await run.call(do, "never")
            return "slow"

        async def quick() -> str:
            await run.call(sleeps, 0.0)
            return "quick"

        async def waits() -> str:
            await run.ask("well?")
            return "answered"

        first = await run.first(slow(), quick(), waits())
        await run.ask("sure?")
        return [first.index, first.value]

    kd = processes.new()
    waiting = park(kd, agent)
    assert [wait.prompt for wait in waiting.waits] == ["sure?"]
    kd.answer("r", "approve")
    assert processes.new().run(agent, id="r") == [1, "quick"]
    assert DONE == []


def test_first_of_an_answer_and_a_timer(processes: Processes) -> None:
    @killick.agent(name="races_a_timer")
    async def agent(run: killick.Run) -> str:
        async def timer() -> str:
            await run.sleep("1h")
            return "too late"

        async def question() -> str:
            return (await run.ask("well?")).kind

        return (await run.first(timer(), question())).value

    kd = processes.new()
    for run, late in (("slow", True), ("quick", False)):
        kd.start(agent, id=run)
        kd.advance(run)
        if late:
            processes.clock.advance(3601)
        else:
            kd.answer(f"{run}", "approve")
        assert processes.new().run(agent, id=run) == ("too late" if late else "approve")
    assert kd.inbox() == []


def test_first_whose_branch_fails_raises_and_so_it_does_on_replay(processes: Processes) -> None:
    seen: list[str] = []

    @killick.tool(effect="reads", retry=killick.Retry(attempts=1), name="fails_in_race")
    async def fails() -> None:
        raise LookupError("broken")

    @killick.agent(name="race_fails")
    async def agent(run: killick.Run) -> None:
        try:
            await run.first(run.call(fails), run.wait("nothing"))
        except killick.StepFailed as failed:
            seen.append(failed.step)
        await run.ask("well?")

    kd = processes.new()
    park(kd, agent)
    kd.answer("r", "approve")
    processes.new().run(agent, id="r")
    assert seen == ["1.1.1", "1.1.1"]


def test_first_needs_a_branch(processes: Processes) -> None:
    @killick.agent(name="races_nobody")
    async def agent(run: killick.Run) -> None:
        await run.first()

    with pytest.raises(killick.RunFailed, match=r"run\.first"):
        processes.new().run(agent, id="r")


def test_a_code_s_own_timeout_around_a_step_replays_the_same(processes: Processes) -> None:
    seen: list[str] = []

    @killick.tool(effect="reads", name="is_slow")
    async def is_slow() -> str:
        await asyncio.sleep(5)
        return "slow"

    @killick.agent(name="has_a_timeout")
    async def agent(run: killick.Run) -> None:
        try:
            async with asyncio.timeout(0.05):
                seen.append(await run.call(is_slow))
        except TimeoutError:
            seen.append("timeout")
        await run.ask("well?")

    kd = processes.new()
    park(kd, agent)
    kd.answer("r", "approve")
    processes.new().run(agent, id="r")
    assert seen == ["timeout", "timeout"]


def test_a_backoff_that_the_code_gives_up_is_on_record_and_replays_the_same(disk: Any) -> None:
    seen: list[str] = []

    @killick.tool(effect="idempotent", name="is_flaky", retry=killick.Retry(attempts=9, first=3600, max=3600))
    async def is_flaky() -> None:
        seen.append("called")
        raise ConnectionError("flaky")

    @killick.agent(name="gives_a_backoff_up")
    async def agent(run: killick.Run) -> None:
        try:
            async with asyncio.timeout(0.05):
                await run.call(is_flaky)
        except TimeoutError:
            seen.append("timeout")
        await run.ask("well?")

    park(disk.kd, agent)
    assert disk.kd.state("r").fold.step("1").status == "cancelled"
    disk.kd.answer("r", "approve")
    disk.process().run(agent, id="r")
    assert seen == ["called", "timeout", "timeout"]


COMPUTES, BROKEN = asyncio.Event(), asyncio.Event()
LONG = [{"role": role, "content": "word " * 400} for role in ("user", "assistant") * 4]
BETWEEN_STEPS: dict[str, Any] = {
    "at": lambda run: run.at("late"),
    "fit": lambda run: run.fit(killick.Window(1_500), LONG),
    "note": lambda run: run.note("late"),
    "now": lambda run: run.now(),
    "patched": lambda run: run.patched("late"),
    "plan": lambda run: run.plan(["late"]),
    "random": lambda run: run.random(),
    "remarks": lambda run: run.remarks(),
    "update": lambda run: run.update(late=True),
    "uuid": lambda run: run.uuid(),
}


@killick.tool(effect="reads", name="children_fail", retry=killick.Retry(attempts=1))
async def fail() -> None:
    raise LookupError("broken")


@killick.agent(name="is_stopped_between_steps")
async def is_stopped_between_steps(run: killick.Run, kind: str) -> str:
    async def breaks() -> None:
        await COMPUTES.wait()
        try:
            await run.call(fail)
        finally:
            BROKEN.set()

    async def within() -> None:
        await run.call(do, "first")
        COMPUTES.set()
        await BROKEN.wait()  # in the first life: until it is stopped; in later ones it does not wait
        noted = BETWEEN_STEPS[kind](run)
        if kind not in ("now", "patched", "random", "uuid"):
            await noted

    try:
        await run.gather(run.gather(within()), breaks())
    except killick.StepFailed:
        await run.call(do, dict(run.context))
    answer = await run.ask("well?")
    return answer.kind


@pytest.mark.parametrize("kind", BETWEEN_STEPS)
def test_a_branch_that_was_stopped_notes_nothing_once_its_gather_is_over_on_record(world: Any, kind: str) -> None:
    COMPUTES.clear()
    BROKEN.clear()
    world.kd.start(is_stopped_between_steps, kind, id="r")
    world.kd.say("r", "hurry up")
    world.kd.advance("r")
    lives = [[each.event for each in world.kd.events("r") if not isinstance(each.event, e.RunTaken)]]
    for _ in range(2):
        with pytest.raises(killick.RunWaiting):
            world.process().run(is_stopped_between_steps, kind, id="r")
        lives.append([each.event for each in world.kd.events("r") if not isinstance(each.event, e.RunTaken)])
    assert lives[1:] == [lives[0]] * 2


# forks --------------------------------------------------------------------------------------------


@killick.agent(name="waits_for_packing")
async def waits_for_packing(run: killick.Run) -> str:
    child = await run.spawn(asks_first, "ann", on_parent_end="abandon")
    return await child.result()


def test_a_child_that_ends_wakes_every_run_of_the_tree_that_waits_for_it(processes: Processes) -> None:
    kd = processes.new()
    park(kd, waits_for_packing)
    fork = kd.fork("r", "1:after", id="f")
    second = kd.fork("f", "now", id="ff")
    kd.advance_due()
    assert {kd.info(run).waits[0].name for run in ("r", "f", "ff")} == {"r/1"}
    kd.answer("r/1", "approve")
    for _ in range(4):
        processes.new().advance_due()
    assert [kd.info(run).status for run in ("r", "f", "ff")] == ["completed"] * 3
    assert fork.result(timeout=0) == second.result(timeout=0) == kd.run(waits_for_packing, id="r")


@pytest.mark.parametrize("operation", ["head", "index", "inbox"])
def test_a_child_that_cannot_read_who_waits_for_it_ends_later_and_wakes_every_one(
    processes: Processes, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    kd = processes.new()
    park(kd, waits_for_packing)
    kd.fork("r", "1:after", id="f")
    kd.advance_due()
    kd.answer("r/1", "approve")
    worker = processes.new()
    forks, store, fails = worker.runtime.engine.forks, worker.runtime.store, [True]
    members, intact = forks.members, getattr(store, operation)

    def failing(*args: Any, **options: Any) -> Any:
        if fails:
            fails.clear()
            raise StoreUnavailable(store.place, "disk I/O error")
        return intact(*args, **options)

    def read(run: str) -> list[str]:
        with monkeypatch.context() as patch:
            patch.setattr(store, operation, failing)
            return members(run)

    monkeypatch.setattr(forks, "members", read)
    with pytest.raises(StoreUnavailable):
        worker.advance("r/1")
    assert fails == []
    for _ in range(4):
        processes.new().advance_due()
    assert [kd.info(run).status for run in ("r/1", "r", "f")] == ["completed"] * 3


def test_a_child_that_ends_again_after_a_rewind_wakes_its_parent_again(processes: Processes) -> None:
    kd = processes.new()
    park(kd, waits_for_packing)
    kd.cancel("r/1")
    for _ in range(2):
        processes.new().advance_due()
    assert kd.info("r").status == "failed"
    assert kd.resume("r").startswith("rewound to step 2")
    kd.rewind("r/1", "1:before")
    for _ in range(2):
        processes.new().advance_due()
    assert kd.info("r").waits[0].name == "r/1"
    kd.answer("r/1", "approve")
    for _ in range(2):
        processes.new().advance_due()
    assert kd.info("r").status == "completed"


@killick.agent(name="waits_for_asker")
async def waits_for_asker(run: killick.Run) -> str:
    child = await run.spawn(asks_first, "ann")
    return str(await child.result())


@pytest.mark.parametrize("made", ["before the child ends", "while the child ends"])
def test_a_fork_that_its_held_parent_has_not_recorded_hears_of_their_child(processes: Processes, made: str) -> None:
    kd = processes.new()
    park(kd, waits_for_asker)
    [child] = [info.id for info in kd.list() if info.id != "r"]
    store = kd.runtime.store
    held = store.lease("r", "another worker", seconds=600)

    def fork() -> None:
        kd.fork("r", "1:after", id="f")

    if made == "before the child ends":
        fork()
        assert kd.advance("f").status == "waiting"
        kd.answer(f"{child}:1", "approve")
        kd.advance(child)
    else:
        kd.answer(f"{child}:1", "approve")
        members = kd.runtime.engine.forks.members
        late = [fork]

        def found(run: str) -> list[str]:
            known = members(run)
            if late:
                thread = threading.Thread(target=late.pop())
                thread.start()
                thread.join()
            return known

        kd.runtime.engine.forks.members = found  # type: ignore[method-assign]
        kd.advance(child)
    assert "killick.child" in {message.name for message in store.messages("f")}
    assert kd.advance("f").status == "completed"
    store.release("r", epoch=held.epoch)
