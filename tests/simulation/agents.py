"""Agents that make it hard for whoever must go on where they died."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import killick
from simulation.around import (
    answering,
    book,
    book_blocking,
    cancelling,
    crawl,
    flaky,
    mail,
    order,
    pay,
    pay_blocking,
    price,
    redeem,
    redeem_at_the_second_try,
    refuse,
    rent,
    reserve,
    shaky,
    slowly,
    stall,
    stall_with_key,
    stamp,
    truthful,
)
from simulation.crash_stories import Scenario, tick

# one line -----------------------------------------------------------------------------------------


@killick.agent
async def one_after_the_other(run: killick.Run, name: str) -> list[Any]:
    cost = await run.call(price, name)
    tick()
    paid = await run.call(pay, name)
    tick()
    booked = await run.call(book, name)
    route = await run.decided("Whom to tell?", "all", options=["all", "none"], because="policy")
    tick()
    mailed = await run.call(mail, name)
    blocked = [await run.call(pay_blocking, name), await run.call(book_blocking, name)]
    return [cost, paid, booked, route, mailed, blocked]


@killick.agent
def one_after_the_other_blocking(run: killick.SyncRun, name: str) -> list[Any]:
    cost = run.call(price, name)
    tick()
    paid = run.call(pay_blocking, name)
    tick()
    booked = run.call(book, name)
    route = run.decided("Whom to tell?", "all", options=["all", "none"], because="policy")
    tick()
    return [cost, paid, booked, route, run.call(mail, name)]


@killick.agent
async def trying_again(run: killick.Run) -> list[Any]:
    found = await run.call(flaky, "x")
    tick()
    return [found, await run.call(shaky, "x"), await run.call(pay, "x")]


@killick.agent
async def another_way(run: killick.Run) -> list[str]:
    taken: list[str] = []
    for way in ("train", "boat"):
        try:
            taken.append(await run.call(refuse, way))
        except killick.StepFailed as failed:
            tick()
            taken.append(f"{failed.name}: {failed.failure.message}")
            taken.append(await run.call(pay, f"taxi instead of {way}"))
    return taken


@killick.agent
async def at_last(run: killick.Run) -> str:
    try:
        await run.call(pay, "before")
        tick()
        await run.call(refuse, "this")
        return "never"
    finally:
        tick()
        await run.call(mail, "the end")
        await run.call(pay, "the bill")


@killick.agent
def at_last_blocking(run: killick.SyncRun) -> str:
    try:
        run.call(pay_blocking, "before")
        tick()
        run.call(refuse, "this")
        return "never"
    finally:
        tick()
        run.call(mail, "the end")
        run.call(pay_blocking, "the bill")


@asynccontextmanager
async def table(run: killick.Run, name: str) -> AsyncGenerator[str]:
    held = await run.call(book, f"table {name}")
    try:
        yield held
    finally:
        tick()
        await run.call(mail, f"leave {name}")


@killick.agent
async def in_a_block(run: killick.Run) -> list[str]:
    told: list[str] = []
    async with table(run, "1") as one:
        told.append(await run.call(pay, one))
        try:
            async with table(run, "2"):
                tick()
                await run.call(refuse, "dessert")
        except killick.StepFailed as failed:
            told.append(failed.name)
    return told


@killick.agent
async def beside_computation(run: killick.Run) -> list[Any]:
    async def computed(number: int) -> int:
        for _ in range(number):
            await asyncio.sleep(0)
        return number * number

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(computed(number)) for number in range(1, 5)]
        paid = await run.call(pay, "one")
        tick()
        mailed = await run.call(mail, "two")
    return [paid, mailed, await run.call(pay, str(sum(task.result() for task in tasks)))]


@killick.agent
async def impatient(run: killick.Run) -> list[str]:
    told: list[str] = []
    try:
        async with asyncio.timeout(0.005):
            told.append(await run.call(crawl, "home"))
    except TimeoutError:
        told.append("too slow")
    tick()
    return [*told[1:], await run.call(pay, "taxi")]


@killick.agent
async def catching_everything(run: killick.Run) -> list[str]:
    told: list[str] = []
    for number in range(3):
        try:
            told.append(await run.call(pay, f"{number}"))
            tick()
            await run.call(refuse, f"{number}")
        except BaseException as error:
            told.append(type(error).__name__)
            try:
                told.append(await run.call(mail, f"{number}"))
            except BaseException as again:
                told.append(type(again).__name__)
    return told


@killick.agent
def catching_everything_blocking(run: killick.SyncRun) -> list[str]:
    told: list[str] = []
    for number in range(3):
        try:
            told.append(run.call(pay_blocking, f"{number}"))
            tick()
            run.call(refuse, f"{number}")
        except BaseException as error:
            told.append(type(error).__name__)
    return told


@killick.agent
async def stalling(run: killick.Run) -> list[str]:
    late = await run.call(stall, "a")
    tick()
    return [late, await run.call(stall_with_key, "b"), await run.call(pay, "c")]


@killick.agent
async def using_up(run: killick.Run) -> list[str]:
    told = [await run.call(redeem, "first", "token 1"), await run.call(redeem_at_the_second_try, "second", "token 2")]
    for token in ("token 1", "token 2"):
        try:
            told.append(await run.call(redeem, f"{token} again", token))
        except killick.StepFailed as failed:
            tick()
            told.append(failed.failure.type)
    return told


@killick.agent
async def drawing(run: killick.Run) -> list[Any]:
    begun = run.now()
    mark, chance = run.uuid(), run.random()
    await run.update(stops=1)
    stamped = await run.call(stamp, "letter", f"{mark}")
    tick()
    await run.update(stops=run.context.stops + 1, last="letter")
    again = run.uuid()
    stamped_again = await run.call(stamp, "card", f"{again} {chance}")
    await run.update(stops=run.context.stops + 1)
    await run.note("done")
    tick()
    marks = [stamped == f"{mark}", stamped_again == f"{again} {chance}", mark != again, run.now() >= begun]
    return [*marks, dict(run.context), await run.call(pay, "postage")]


@killick.agent
async def repeating(run: killick.Run) -> list[str]:
    told: list[str] = []
    for wording in ("please", "quickly", "now"):
        told.append(await run.call(order, "book", wording))
        tick()
    return [*told, await run.call(pay, "book")]


# side by side -------------------------------------------------------------------------------------


@killick.agent
async def side_by_side(run: killick.Run) -> list[Any]:
    async def branch(name: str) -> list[str]:
        paid = await run.call(pay, name)
        tick()
        return [paid, await run.call(mail, name)]

    return list(await run.gather(branch("a"), branch("b"), branch("c")))


@killick.agent
def side_by_side_blocking(run: killick.SyncRun) -> list[Any]:
    def branch(name: str) -> list[str]:
        paid = run.call(pay_blocking, name)
        tick()
        return [paid, run.call(mail, name)]

    both = list(run.gather(lambda: branch("a"), lambda: branch("b")))
    return [*both, run.call(book_blocking, "c")]


@killick.agent
async def scopes_in_scopes(run: killick.Run) -> list[Any]:
    async def inner(name: str) -> list[Any]:
        both = await run.gather(run.call(book, f"{name}1"), run.call(book, f"{name}2"))
        tick()
        return [*both, await run.call(mail, name)]

    outer = await run.gather(inner("a"), inner("b"), run.call(price, "c"))
    return [list(outer), await run.call(pay, "all")]


@killick.agent
async def one_fails(run: killick.Run) -> list[str]:
    async def fails() -> str:
        await run.call(mail, "first")
        tick()
        return await run.call(refuse, "second")

    try:
        await run.gather(run.call(slowly, "a"), run.call(slowly, "b"), fails())
    except killick.StepFailed as failed:
        tick()
        return [failed.name, await run.call(pay, "instead")]
    return ["never"]


@killick.agent
async def the_first_of(run: killick.Run) -> list[Any]:
    async def told() -> str:
        heard = await run.wait("news")
        tick()
        return await run.call(pay, heard)

    async def asleep() -> str:
        await run.sleep("2s")
        tick()
        return await run.call(pay, "alarm")

    early = await run.first(asleep(), run.wait("never"), run.ask("Anything?"))
    late = await run.first(told(), run.wait("never"))
    return [early.index, early.value, late.index, late.value, await run.call(pay, "breakfast")]


# children and messages ----------------------------------------------------------------------------


@killick.agent
async def grandchild(run: killick.Run, name: str) -> str:
    await run.call(pay, f"{name} toys")
    tick()
    return await run.call(mail, name)


@killick.agent
async def child(run: killick.Run, name: str) -> list[str]:
    paid = await run.call(pay, f"{name} school")
    below = await run.spawn(grandchild, f"{name} junior")
    tick()
    return [paid, await below.result()]


@killick.agent
async def parent(run: killick.Run) -> list[Any]:
    children = [await run.spawn(child, "one"), await run.spawn(child, "two")]
    paid = await run.call(pay, "rent")
    tick()
    return [paid, [await each.result() for each in children]]


@killick.agent
def parent_blocking(run: killick.SyncRun) -> list[Any]:
    spawned = run.spawn(child, "one")
    paid = run.call(pay_blocking, "rent")
    tick()
    return [paid, run.result(spawned)]


@killick.agent
async def listener(run: killick.Run) -> list[str]:
    heard = [await run.wait("word"), await run.wait("word")]
    tick()
    return [*heard, await run.call(pay, " ".join(heard))]


@killick.agent
async def talker(run: killick.Run) -> list[Any]:
    spawned = await run.spawn(listener)
    await run.send(spawned.id, "word", "hello")
    tick()
    await run.send(spawned.id, "word", "there")
    return await spawned.result()


@killick.agent(on_failure="compensate")
async def child_that_is_undone(run: killick.Run) -> str:
    await run.call(reserve, "cot")
    tick()
    heard: str = await run.wait("never")
    return heard


# waits --------------------------------------------------------------------------------------------


@killick.agent
async def waiting(run: killick.Run) -> list[Any]:
    paid = await run.call(pay, "deposit")
    answer = await run.ask("Which room?", to="clerk")
    tick()
    key = await run.wait("key")
    await run.sleep("3s")
    late = await run.ask("Breakfast?", timeout="2s", default="reject")
    tick()
    return [paid, answer.value, key, late.kind, late.expired, await run.call(pay, "rest")]


@killick.agent
def waiting_blocking(run: killick.SyncRun) -> list[Any]:
    paid = run.call(pay_blocking, "deposit")
    answer = run.ask("Which room?", to="clerk")
    tick()
    key = run.wait("key")
    run.sleep("3s")
    return [paid, answer.value, key, run.call(pay_blocking, "rest")]


@killick.agent
async def waits_side_by_side(run: killick.Run) -> list[Any]:
    async def asked() -> str:
        answer = await run.ask("Which room?")
        tick()
        return await run.call(pay, f"room {answer.value}")

    async def told() -> str:
        return await run.call(book, await run.wait("key"))

    return list(await run.gather(asked(), told(), run.call(pay, "deposit")))


# endings ------------------------------------------------------------------------------------------


@killick.agent(on_failure="compensate")
async def undone(run: killick.Run) -> str:
    await run.call(reserve, "room")
    tick()
    await run.call(rent, "car")
    await run.call(reserve, "table")
    tick()
    return await run.call(refuse, "weather")


@killick.agent(on_failure="compensate")
async def undone_with_children(run: killick.Run) -> str:
    await run.call(reserve, "room")
    await run.spawn(child_that_is_undone)
    await run.gather(run.call(rent, "car"), run.call(reserve, "table"))
    tick()
    return await run.call(refuse, "weather")


@killick.agent
async def called_off(run: killick.Run) -> str:
    await run.call(reserve, "room")
    tick()
    await run.call(rent, "car")
    heard: str = await run.wait("weather")
    return heard


# state machines -----------------------------------------------------------------------------------


@killick.machine
async def stages(run: killick.Run, state: dict[str, Any]) -> Any:
    match state["at"]:
        case "start":
            paid = await run.call(pay, "entry")
            tick()
            return killick.Next({"at": "middle", "told": [paid]})
        case "middle":
            both = await run.gather(run.call(book, "left"), run.call(mail, "right"))
            await run.update(middle=len(both))
            tick()
            return killick.WaitFor("gate", {"at": "end", "told": [*state["told"], *both]})
        case _:
            tick()
            return killick.Done([*state["told"], run.received, await run.call(pay, "exit"), dict(run.context)])


@killick.machine
def stages_blocking(run: killick.SyncRun, state: dict[str, Any]) -> Any:
    if state["count"] < 3:
        paid = run.call(pay_blocking, f"stage {state['count']}")
        tick()
        return killick.Next({"count": state["count"] + 1, "told": [*state["told"], paid]})
    return killick.Done(state["told"])


SCENARIOS: dict[str, Scenario] = {
    scenario.agent.name: scenario
    for scenario in (
        Scenario(agent=one_after_the_other, input="trip", outside=truthful),
        Scenario(agent=one_after_the_other_blocking, input="trip", outside=truthful),
        *(
            Scenario(agent=agent, outside=truthful)
            for agent in (
                trying_again, another_way, at_last, at_last_blocking, in_a_block, beside_computation, impatient,
                catching_everything, catching_everything_blocking, stalling, using_up, repeating,
                side_by_side, side_by_side_blocking, scopes_in_scopes, parent, parent_blocking, talker, undone,
            )
        ),
        *(Scenario(agent=agent, outside=truthful, exact=False) for agent in (drawing, one_fails, undone_with_children)),
        Scenario(agent=the_first_of, outside=answering(news="good")),
        Scenario(agent=waiting, outside=answering(ask="12", key="iron")),
        Scenario(agent=waiting_blocking, outside=answering(ask="12", key="iron")),
        Scenario(agent=waits_side_by_side, outside=answering(ask="12", key="iron")),
        Scenario(agent=called_off, outside=cancelling),
        Scenario(agent=stages, input={"at": "start"}, outside=answering(gate="open")),
        Scenario(agent=stages_blocking, input={"count": 0, "told": []}, outside=truthful),
    )
}  # fmt: skip
"""Every agent, by name, with what is around it."""
