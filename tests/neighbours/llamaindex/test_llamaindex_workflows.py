"""Workflows of LlamaIndex: one that ended early goes on from its last finished step."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from workflows import Context, Workflow, step
from workflows.events import Event, HumanResponseEvent, InputRequiredEvent, StartEvent, StopEvent
from workflows.retry_policy import retry_policy, stop_after_attempt, wait_fixed

import killick
from killick.adapters.llamaindex import KillickRuntime, gated
from killick.errors import RunBusy
from neighbours.llamaindex.orders import ScriptedModel


class Paid(Event):
    order: str


class Part(Event):
    name: str


class Packed(Event):
    name: str


class Orders(Workflow):
    """Pays for an order, packs its parts at once, and ships it."""

    def __init__(self, kd: killick.Client, world: list[str], dies: str = "", **options: Any) -> None:
        super().__init__(runtime=KillickRuntime(kd))
        self.world, self.dies = world, dies

        async def pay(amount: int) -> str:
            world.append(f"paid {amount}")
            return "ok"

        self.pay = gated(FunctionTool.from_defaults(pay), tools={"pay": options})

    def at(self, what: str) -> None:
        self.world.append(what)
        if what == self.dies:
            raise RuntimeError(f"died {what}")

    @step
    async def start(self, ctx: Context, ev: StartEvent) -> Paid:
        await ctx.store.set("amount", ev.amount)
        await self.pay.acall(amount=ev.amount)
        self.at("started")
        return Paid(order="A7")

    @step
    async def split(self, ctx: Context, ev: Paid) -> Part | None:
        self.at("split")
        for name in ("hull", "mast"):
            ctx.send_event(Part(name=name))
        return None

    @step
    async def pack(self, ctx: Context, ev: Part) -> Packed:
        await self.pay.acall(amount=1)
        self.at(f"packed {ev.name}")
        return Packed(name=ev.name)

    @step
    async def ship(self, ctx: Context, ev: Packed) -> StopEvent | None:
        if (packed := ctx.collect_events(ev, [Packed, Packed])) is None:
            return None
        self.at("shipped")
        amount = await ctx.store.get("amount")
        return StopEvent(result={"parts": sorted(each.name for each in packed), "amount": amount})


@pytest.fixture
def kd(tmp_path: Path) -> Iterator[killick.Client]:
    with killick.open(tmp_path / "killick.db") as client:
        yield client


WHOLE = ["paid 5", "started", "split", "paid 1", "paid 1", "packed hull", "packed mast", "shipped"]


@pytest.mark.parametrize("dies", ["", "started", "split", "packed hull", "packed mast", "shipped"])
async def test_a_run_goes_on_from_its_last_finished_step(kd: killick.Client, dies: str) -> None:
    world: list[str] = []
    if dies:
        with pytest.raises(RuntimeError, match=dies):
            await Orders(kd, world, dies).run(amount=5, run_id="A7")
    for _ in range(2):
        assert await Orders(kd, world).run(amount=5, run_id="A7") == {"parts": ["hull", "mast"], "amount": 5}
    assert [world.count(each) for each in ("paid 5", "paid 1")] == [1, 2]
    marks = [each for each in WHOLE if not each.startswith("paid")]
    again = [each for each in marks if world.count(each) > 1]
    assert set(marks) <= set(world)
    # The parts are packed at once, so that the end of one interrupts the other.
    assert set(again) <= ({dies} if not dies.startswith("packed") else {"packed hull", "packed mast"})


async def test_a_person_may_let_a_step_go_on(kd: killick.Client) -> None:
    world: list[str] = []
    with pytest.raises(killick.RunWaiting):
        await Orders(kd, world, approve="managers").run(amount=5, run_id="A7")
    assert world == []
    for _ in range(3):
        for wait in kd.inbox():
            kd.answer(wait, "approve", by="managers")
        with suppress(killick.RunWaiting):
            await Orders(kd, world, approve="managers").run(amount=5, run_id="A7")
    assert [world.count(each) for each in ("paid 5", "paid 1", "shipped")] == [1, 2, 1]


async def test_other_runs_of_a_conversation_are_other_runs(kd: killick.Client) -> None:
    world: list[str] = []
    async with kd.host("ann"):
        for number in (5, 5):
            await Orders(kd, world).run(amount=number, run_id=f"order-{len(world)}")
    assert world.count("paid 5") == 2
    context = await KillickRuntime(kd).context(workflow := Orders(kd, world), "order-0")
    assert context is not None
    assert await context.store.get("amount") == 5
    assert (await workflow.run(amount=6, run_id="order-6", ctx=context))["amount"] == 6
    assert await KillickRuntime(kd).context(workflow, "order-7") is None


async def test_a_run_under_way_cannot_be_started_again_elsewhere(kd: killick.Client, tmp_path: Path) -> None:
    held = asyncio.Event()

    class Slow(Workflow):
        @step
        async def only(self, ev: StartEvent) -> StopEvent:
            held.set()
            await asyncio.sleep(5)
            return StopEvent(result=None)

    first = Slow(runtime=KillickRuntime(kd)).run(run_id="slow")
    await held.wait()
    with killick.open(tmp_path / "killick.db") as other:
        second = Slow(runtime=KillickRuntime(other)).run(run_id="slow")
        assert [event async for event in second.stream_events()] != []
        with pytest.raises(RunBusy):
            await second
    await first.cancel_run()


async def test_a_workflow_in_a_step_goes_on_too(kd: killick.Client) -> None:
    world: list[str] = []

    class Shop(Workflow):
        dies = "packed hull"

        @step
        async def only(self, ev: StartEvent) -> StopEvent:
            amounts = [(await Orders(kd, world, self.dies).run(amount=amount))["amount"] for amount in (5, 6)]
            return StopEvent(result=amounts)

    with pytest.raises(RuntimeError):
        await Shop(runtime=KillickRuntime(kd)).run(run_id="shop")
    Shop.dies = ""
    assert await Shop(runtime=KillickRuntime(kd)).run(run_id="shop") == [5, 6]
    assert [world.count(each) for each in ("paid 5", "paid 6", "paid 1", "shipped")] == [1, 1, 4, 2]


async def test_a_step_that_is_tried_again_asks_its_model_again_and_does_the_rest_once(kd: killick.Client) -> None:
    world: list[str] = []

    async def pay(amount: int) -> str:
        world.append("paid")
        return "ok"

    class Picky(Workflow):
        @step(retry_policy=retry_policy(wait=wait_fixed(0), stop=stop_after_attempt(3)))
        async def only(self, ev: StartEvent) -> StopEvent:
            await gated(FunctionTool.from_defaults(pay)).acall(amount=1)
            llm = gated(ScriptedModel(script=["a reply"], before=lambda _: world.append("asked")))
            said = (await llm.achat([ChatMessage(content="hi")])).message.content
            if world.count("asked") < 2:
                raise ValueError(f"{said} does not do")
            return StopEvent(result=said)

    assert await Picky(runtime=KillickRuntime(kd)).run(run_id="picky") == "a reply"
    assert world == ["paid", "asked", "asked"]


class Greeting(Workflow):
    """Asks for two names, and greets."""

    @step
    async def ask(self, ev: StartEvent) -> InputRequiredEvent:
        return InputRequiredEvent(prefix="Your name?")

    @step
    async def greet(self, ctx: Context, ev: HumanResponseEvent) -> StopEvent | InputRequiredEvent:
        names = [*await ctx.store.get("names", default=[]), ev.response]
        await ctx.store.set("names", names)
        return InputRequiredEvent(prefix="Your name?") if len(names) < 2 else StopEvent(result=" ".join(names))


async def test_questions_of_a_workflow_are_answered_in_the_inbox(kd: killick.Client) -> None:
    def greeting() -> Any:
        runtime = KillickRuntime(kd, respond=lambda asked, value: HumanResponseEvent(response=value))
        return Greeting(runtime=runtime).run(run_id="greeting")

    for name in ("Ann", "Bob"):
        with pytest.raises(killick.RunWaiting):
            await greeting()
        [wait] = kd.inbox()
        assert wait.prompt == "Your name?"
        kd.answer(wait, "respond", value=name, by="ann")
    assert [await greeting(), await greeting()] == ["Ann Bob", "Ann Bob"]


async def test_an_event_of_a_person_is_waited_for_over_processes(kd: killick.Client) -> None:
    handler = Greeting(runtime=KillickRuntime(kd)).run(run_id="greeting")
    async for event in handler.stream_events():
        if isinstance(event, InputRequiredEvent):
            await handler.cancel_run()
    handler = Greeting(runtime=KillickRuntime(kd)).run(run_id="greeting")
    for name in ("Ann", "Bob"):
        await handler.send_event(HumanResponseEvent(response=name))
    assert await handler == "Ann Bob"
