"""Calls inside of calls: a tool's own code takes steps of the same run, as one does that runs another agent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import killick
from killick.definitions.open_tools import open_tool
from killick.llm.external import Host
from killick.model import events as e

PAY = open_tool("pay", approve="managers", identity=("amount",))
SEND = open_tool("send")
RESEARCH = open_tool("research", effect="reads", retry=killick.Retry(attempts=1))
DELEGATE = open_tool("delegate")
SECONDS = 60
"""A backstop: what hangs fails."""

Body = Callable[..., Awaitable[Any]] | None


class World:
    """What was done, in order; and a tool whose body takes a step that must be agreed to."""

    def __init__(self) -> None:
        self.done: list[str] = []

    async def pay(self, amount: int) -> str:
        self.done.append(f"paid {amount}")
        return f"paid {amount}"

    async def delegate(self, amount: int) -> str:
        self.done.append("entered")
        host = Host.here()
        assert host is not None
        return f"delegated: {await host.call(PAY, {'amount': amount}, key='inner', fn=self.pay)}"


@pytest.fixture
def world() -> World:
    return World()


async def called(kd: killick.Client, tool: Any, body: Body, *, run: str = "thread", **options: Any) -> Any:
    async with asyncio.timeout(SECONDS), kd.host(run) as host:
        return await host.call(tool, {"amount": 7}, key="outer", fn=body, **options)


def call(kd: killick.Client, tool: Any, body: Body, **options: Any) -> Any:
    return asyncio.run(called(kd, tool, body, **options))


# outside of any agent -----------------------------------------------------------------------------


def test_a_call_whose_own_step_waits_parks_with_it_and_goes_on_when_that_is_answered(
    kd: killick.Client, world: World
) -> None:
    for _ in range(2):
        with pytest.raises(killick.RunWaiting, match="pay") as waiting:
            call(kd, RESEARCH, world.delegate)
        assert [wait.name for wait in waiting.value.waits] == ["approve"]
        assert kd.info("thread").status == "waiting"
    kd.answer("thread", "approve", by="ann")
    assert call(kd, RESEARCH, world.delegate) == "delegated: paid 7"
    assert call(kd, RESEARCH, world.delegate) == "delegated: paid 7"
    assert world.done == ["entered", "entered", "entered", "paid 7"]


def test_an_ordinary_error_in_an_inner_call_is_waited_for_with_the_outer_one(kd: killick.Client) -> None:
    async def send(to: str) -> None:
        raise ConnectionError("nobody knows")

    async def delegate(amount: int) -> Any:
        host = Host.here()
        assert host is not None
        return await host.call(SEND, {"to": "ann"}, key="inner", fn=send)

    with pytest.raises(killick.RunWaiting, match=r"send.*Did it happen"):
        call(kd, RESEARCH, delegate)
    kd.answer("thread", "happened", value="sent", by="ann")
    assert call(kd, RESEARCH, delegate) == "sent"


def test_what_is_done_at_most_once_is_entered_again_only_when_a_person_says_so(
    kd: killick.Client, world: World
) -> None:
    with pytest.raises(killick.RunWaiting, match="pay"):
        call(kd, DELEGATE, world.delegate)
    kd.answer("thread", "approve", by="ann")
    with pytest.raises(killick.RunWaiting, match=r"delegate.*left while step 1\.2\.1 .*Did it happen"):
        call(kd, DELEGATE, world.delegate)
    assert world.done == ["entered"]
    [wait] = kd.inbox()
    kd.answer(wait, "not", by="ann")
    assert call(kd, DELEGATE, world.delegate) == "delegated: paid 7"
    assert world.done == ["entered", "entered", "paid 7"]


def test_a_reconciler_says_whether_it_is_entered_again(kd: killick.Client, world: World) -> None:
    tool = open_tool("delegate", reconcile=lambda effect: killick.DidNotHappen)
    with pytest.raises(killick.RunWaiting, match="pay"):
        call(kd, tool, world.delegate)
    kd.answer("thread", "approve", by="ann")
    assert call(kd, tool, world.delegate) == "delegated: paid 7"


@pytest.mark.parametrize("depth", [2, 3])
def test_calls_wait_for_each_other_at_any_depth_in_threads_and_on_loops(kd: killick.Client, depth: int) -> None:
    done: list[int] = []

    def pay(amount: int) -> str:
        done.append(amount)
        return "paid"

    def deeper(level: int) -> Any:
        def blocking(amount: int) -> Any:
            host = Host.here()
            assert host is not None
            if level == depth:
                return host.call_sync(PAY, {"amount": amount}, key="pay", fn=pay)
            return host.call_sync(RESEARCH, {"amount": amount}, key=f"level {level}", fn=deeper(level + 1))

        async def awaited(amount: int) -> Any:
            host = Host.here()
            assert host is not None
            return await host.call(RESEARCH, {"amount": amount}, key=f"level {level}", fn=deeper(level + 1))

        return awaited if level == 1 else blocking

    with pytest.raises(killick.RunWaiting, match="pay"):
        call(kd, RESEARCH, deeper(1))
    assert [wait.name for wait in kd.inbox()] == ["approve"]
    kd.answer("thread", "approve", by="ann")
    assert call(kd, RESEARCH, deeper(1)) == "paid"
    assert done == [7]


def test_calls_inside_side_by_side_are_each_answered_and_made_once(kd: killick.Client, world: World) -> None:
    async def delegate(amount: int) -> list[Any]:
        host = Host.here()
        assert host is not None
        calls = (host.call(PAY, {"amount": n}, key=f"pay {n}", fn=world.pay) for n in (1, 2))
        return await asyncio.gather(*calls)

    with pytest.raises(killick.RunWaiting):
        call(kd, RESEARCH, delegate)
    first, second = kd.inbox()
    kd.answer(first, "approve", by="ann")
    with pytest.raises(killick.RunWaiting):
        call(kd, RESEARCH, delegate)
    kd.answer(second, "approve", by="ann")
    assert call(kd, RESEARCH, delegate) == ["paid 1", "paid 2"]
    assert sorted(world.done) == ["paid 1", "paid 2"]


def test_what_a_body_makes_of_the_wait_inside_of_it_is_not_its_outcome(kd: killick.Client, world: World) -> None:
    async def swallows(amount: int) -> str:
        try:
            return await world.delegate(amount)
        except killick.RunWaiting:
            return "an error, says the framework"

    with pytest.raises(killick.RunWaiting, match="pay"):
        call(kd, RESEARCH, swallows)
    kd.answer("thread", "approve", by="ann")
    assert call(kd, RESEARCH, swallows) == "delegated: paid 7"


def test_a_body_may_have_the_wait_inside_of_it_answered_and_go_on(kd: killick.Client, world: World) -> None:
    async def answers(amount: int) -> str:
        try:
            return await world.delegate(amount)
        except killick.RunWaiting as waiting:
            await asyncio.to_thread(kd.answer, waiting.waits[0], "approve", by="ann")
            return await world.delegate(amount)

    assert call(kd, DELEGATE, answers) == "delegated: paid 7"
    assert world.done == ["entered", "entered", "paid 7"]


def test_a_framework_that_leaves_the_outer_call_for_an_inner_one_comes_again(kd: killick.Client, world: World) -> None:
    class Leaving(Exception):
        """How a framework leaves a tool, to run it again from its top."""

    async def leaves(amount: int) -> str:
        try:
            return await world.delegate(amount)
        except killick.RunWaiting as waiting:
            raise Leaving from waiting

    with pytest.raises(Leaving):
        call(kd, DELEGATE, leaves, bubbles=(Leaving,))
    kd.answer("thread", "approve", by="ann")
    assert call(kd, DELEGATE, leaves, bubbles=(Leaving,)) == "delegated: paid 7"
    assert world.done == ["entered", "entered", "paid 7"]


def test_another_call_beside_goes_on_while_one_waits_inside(kd: killick.Client, world: World) -> None:
    async def both() -> list[Any]:
        async with asyncio.timeout(SECONDS), kd.host("thread") as host:
            entered, go_on = asyncio.Event(), asyncio.Event()

            async def slow(to: str) -> str:
                entered.set()
                await go_on.wait()
                return to

            waiting = asyncio.create_task(host.call(RESEARCH, {"amount": 7}, key="outer", fn=world.delegate))
            beside = asyncio.create_task(host.call(SEND, {"to": "bob"}, key="beside", fn=slow))
            await entered.wait()
            while not await asyncio.to_thread(kd.inbox):
                await asyncio.sleep(0.01)
            go_on.set()
            return await asyncio.gather(waiting, beside, return_exceptions=True)

    waiting, beside = asyncio.run(both())
    assert isinstance(waiting, killick.RunWaiting)
    assert beside == "bob"


def test_inner_calls_without_keys_are_the_same_when_the_outer_one_is_entered_again(
    kd: killick.Client, world: World
) -> None:
    """They are counted in each entering of their outer call: calls before it, and other entries, do not shift them."""

    async def send(to: str) -> str:
        world.done.append(f"sent {to}")
        return to

    async def delegate(amount: int) -> str:
        host = Host.here()
        assert host is not None
        await host.call(SEND, {"to": "ann"}, fn=send)
        return await world.delegate(amount)

    with pytest.raises(killick.RunWaiting):
        call(kd, RESEARCH, delegate)
    kd.answer("thread", "approve", by="ann")
    assert call(kd, RESEARCH, delegate) == "delegated: paid 7"

    async def two() -> None:
        async with asyncio.timeout(SECONDS), kd.host("thread") as host:
            await host.call(RESEARCH, {"amount": 7}, key="outer", fn=delegate)  # from the record
            await host.call(RESEARCH, {"amount": 7}, key="another", fn=delegate)

    asyncio.run(two())
    assert world.done.count("sent ann") == 2


def test_a_pause_leaves_the_outer_call_where_it_is(kd: killick.Client, world: World) -> None:
    async def pauses(amount: int) -> str:
        await asyncio.to_thread(kd.pause, "thread", by="ann")
        return await world.delegate(amount)

    with pytest.raises(killick.KillickError):
        call(kd, RESEARCH, pauses)
    kd.resume("thread", by="ann")
    with pytest.raises(killick.RunWaiting, match="pay"):
        call(kd, RESEARCH, world.delegate)
    kd.answer("thread", "approve", by="ann")
    assert call(kd, RESEARCH, world.delegate) == "delegated: paid 7"


# inside of an agent -------------------------------------------------------------------------------


def hosting(tool: Any, body: Body) -> Any:
    @killick.agent(name="hosting")
    async def agent(run: killick.Run) -> Any:
        async with run.hosting() as host:
            return await host.call(tool, {"amount": 7}, key="outer", fn=body)

    return agent


def test_in_an_agent_the_outer_call_goes_on_in_memory_where_it_waited(kd: killick.Client, world: World) -> None:
    agent = hosting(DELEGATE, world.delegate)
    with pytest.raises(killick.RunWaiting, match="pay"):
        kd.run(agent, id="r")
    assert kd.info("r").status == "waiting"
    assert kd.runtime.store.due(kd.runtime.clock.now_us() + 10**12, limit=10) == []
    kd.answer("r", "approve", by="ann")
    assert kd.run(agent, id="r") == "delegated: paid 7"
    assert world.done == ["entered", "paid 7"]


def test_in_another_process_the_outer_calls_effect_says_whether_it_is_entered_again(
    kd: killick.Client, world: World
) -> None:
    agent = hosting(RESEARCH, world.delegate)
    for _ in range(3):
        with killick.open(kd.runtime.store.place) as other, pytest.raises(killick.RunWaiting, match="pay"):
            other.run(agent, id="r")
    kd.answer("r", "approve", by="ann")
    assert kd.run(agent, id="r") == "delegated: paid 7"
    assert world.done == ["entered"] * 4 + ["paid 7"]


def test_in_another_process_what_is_done_at_most_once_is_asked_about(kd: killick.Client, world: World) -> None:
    agent = hosting(DELEGATE, world.delegate)
    with killick.open(kd.runtime.store.place) as other, pytest.raises(killick.RunWaiting, match="pay"):
        other.run(agent, id="r")
    with pytest.raises(killick.RunWaiting, match="left while step"):
        kd.run(agent, id="r")
    assert world.done == ["entered"]
    kd.answer(next(wait for wait in kd.inbox() if wait.waits_for == "settlement"), "not", by="ann")
    with pytest.raises(killick.RunWaiting, match="pay"):
        kd.run(agent, id="r")
    kd.answer("r", "approve", by="ann")
    assert kd.run(agent, id="r") == "delegated: paid 7"


# what cannot contain steps ------------------------------------------------------------------------


def test_a_transaction_takes_no_steps_inside_and_says_so(kd: killick.Client) -> None:
    @killick.tool(effect="transaction", name="rows")
    def rows(amount: int, tx: killick.Tx = killick.TX) -> Any:
        host = Host.here()
        assert host is not None
        return host.call_sync(SEND, {"to": "ann"}, key="inner", fn=lambda to: to)

    with pytest.raises(killick.StepFailed, match="takes no steps inside"):
        call(kd, rows, None)


def test_the_same_action_inside_of_itself_is_refused_where_it_is_done_once(kd: killick.Client) -> None:
    tool = open_tool("once", effect="idempotent", repeat="recorded", retry=killick.Retry(attempts=1))

    async def recurses(amount: int) -> Any:
        host = Host.here()
        assert host is not None
        return await host.call(tool, {"amount": amount}, key="inner", fn=recurses)

    with pytest.raises(killick.StepFailed, match="calls itself"):
        call(kd, tool, recurses)


@pytest.mark.parametrize(("outer", "inner"), [("workspace", "idempotent"), ("idempotent", "workspace")])
def test_a_workspace_tool_is_alone_in_its_workspace(kd: killick.Client, tmp_path: Path, outer: str, inner: str) -> None:
    (folder := tmp_path / "folder").mkdir()
    inside = open_tool("inside", effect=inner)

    async def writes(amount: int) -> Any:
        host = Host.here()
        assert host is not None
        return await host.call(inside, {"to": "ann"}, key="inner", fn=lambda to: to)

    @killick.agent(name="working", workspace=killick.Workspace(folder))
    async def agent(run: killick.Run) -> Any:
        async with run.hosting() as host:
            return await host.call(open_tool("outside", effect=outer), {"amount": 7}, key="outer", fn=writes)

    with pytest.raises(killick.RunFailed, match="has the workspace"):
        kd.run(agent, id="r")


def test_the_record_says_inside_of_which_step_a_step_was_taken(kd: killick.Client, world: World) -> None:
    with pytest.raises(killick.RunWaiting):
        call(kd, RESEARCH, world.delegate)
    intended = [each.event for each in kd.events("thread") if isinstance(each.event, e.StepIntended)]
    assert [(event.name, event.within) for event in intended[1:]] == [("research", None), ("pay", "1.1.1")]
