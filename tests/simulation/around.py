"""What the simulated agents act on and who is around them: tools of every kind, people, and other programs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import killick
from killick.check.crashes import RUN, Outside
from simulation.crash_stories import World, world

# tools --------------------------------------------------------------------------------------------


def effect_of(tool: str, what: str) -> str:
    """How the world calls what a tool does."""
    return f"{tool} {what}"


def act(tool: str, what: str, key: str | None = None) -> str:
    done: str = world().do(effect_of(tool, what), f"{tool} of {what}", key=key)
    return done


def seen(effect: killick.Effect) -> killick.Happened | killick.DidNotHappen:
    """A reconciler that looks at the world."""
    name = effect_of(effect.tool, effect.arguments["what"])
    world().visit(f"reconciling {name}")
    return killick.Happened(world().results[name]) if world().happened(name) else killick.DidNotHappen()


async def seen_later(effect: killick.Effect) -> killick.Happened | killick.DidNotHappen:
    await asyncio.sleep(0)
    return seen(effect)


async def take_back(effect: killick.Effect) -> str:
    return act("undo", effect.key)


@killick.tool(effect="idempotent", retry=killick.Retry(attempts=6))
def take_back_at_the_second_try(effect: killick.Effect, key: killick.Key = killick.KEY) -> str:
    if world().visit(f"undoing {effect.key}") < 2:
        raise killick.NotDone("the far side is closed")
    return act("undo", effect.key, key)


@killick.tool
async def pay(what: str) -> str:
    """At most once, and only a person can tell whether it happened."""
    await asyncio.sleep(0)
    return act("pay", what)


@killick.tool
def pay_blocking(what: str) -> str:
    return act("pay_blocking", what)


@killick.tool(reconcile=seen_later)
async def book(what: str) -> str:
    return act("book", what)


@killick.tool(reconcile=seen)
def book_blocking(what: str) -> str:
    return act("book_blocking", what)


@killick.tool(effect="idempotent")
async def mail(what: str, key: killick.Key = killick.KEY) -> str:
    return act("mail", what, key)


@killick.tool(effect="reads")
async def price(what: str) -> int:
    world().visit(f"price {what}")
    return len(what)


@killick.tool
async def refuse(what: str) -> str:
    world().visit(f"refuse {what}")
    raise killick.NotDone(f"no {what} here")


@killick.tool(compensate=take_back)
async def reserve(what: str) -> str:
    return act("reserve", what)


@killick.tool(compensate=take_back_at_the_second_try, reconcile=seen)
def rent(what: str) -> str:
    return act("rent", what)


@killick.tool(retry=killick.Retry(attempts=6, first="1s"), nothing_happened=ConnectionRefusedError)
async def shaky(what: str) -> str:
    refusals = (
        killick.NotDone("closed"),
        ConnectionRefusedError("nobody listens"),
        killick.RateLimited(retry_after=30),
    )
    if (visit := world().visit(f"shaky {what}")) <= len(refusals):
        raise refusals[visit - 1]
    return act("shaky", what)


@killick.tool(effect="reads", retry=killick.Retry(attempts=6, first="1s"))
def flaky(what: str) -> int:
    if world().visit(f"flaky {what}") < 3:
        raise ConnectionResetError("gone")
    return len(what)


@killick.tool
async def crawl(what: str) -> str:
    done = act("crawl", what)
    await asyncio.sleep(0.02)
    return done


@killick.tool(timeout=0.005)
def stall(what: str) -> str:
    time.sleep(0.02)
    return act("stall", what)


@killick.tool(timeout=0.005, effect="idempotent", retry=killick.Retry(attempts=6))
def stall_with_key(what: str, key: killick.Key = killick.KEY) -> str:
    if world().visit(f"stall_with_key {what}") == 1:
        time.sleep(0.02)
    return act("stall_with_key", what, key)


@killick.tool(consumes=("token",))
async def redeem(what: str, token: str) -> str:
    return act("redeem", what)


@killick.tool(consumes=("token",), reconcile=seen, retry=killick.Retry(attempts=6))
async def redeem_at_the_second_try(what: str, token: str) -> str:
    if world().visit(f"redeeming {what}") == 1:
        raise killick.NotDone("later")
    return act("redeem_at_the_second_try", what)


@killick.tool
async def stamp(what: str, mark: str) -> str:
    """The mark must be the same whoever asks: an effect with another mark would be another effect."""
    return str(world().do(effect_of("stamp", what), mark))


@killick.tool(repeat="recorded", identity=("what",))
async def order(what: str, wording: str) -> str:
    return act("order", what)


@killick.tool
async def slowly(what: str) -> str:
    for _ in range(4):
        await asyncio.sleep(0)
    return act("slowly", what)


# people and other programs ------------------------------------------------------------------------


def truthful(client: killick.Client, waits: Sequence[killick.Wait], around: World) -> bool:
    """A person who looks at the world and says what happened."""
    doubts = [wait for wait in waits if wait.waits_for == "settlement"]
    for wait in doubts:
        told: dict[str, Any] = wait.intention["arguments"]
        effect = effect_of("undo", told["key"]) if "key" in told else effect_of(wait.intention["tool"], told["what"])
        if around.happened(effect):
            client.answer(wait.id, "happened", value=around.results[effect], by="person")
        else:
            client.answer(wait.id, "not", by="person")
    return bool(doubts)


def answering(**values: Any) -> Outside:
    """Besides telling the truth, answer questions and send the events that are waited for, by name."""

    def outside(client: killick.Client, waits: Sequence[killick.Wait], around: World) -> bool:
        acted = truthful(client, waits, around)
        for wait in (wait for wait in waits if wait.name in values):
            if wait.waits_for == "answer":
                client.answer(wait.id, "respond", value=values["ask"], by="person")
            else:
                client.send(wait.run, wait.name, values[wait.name], id=f"{wait.name} for {wait.run}", by="program")
            acted = True
        return acted

    return outside


def cancelling(client: killick.Client, waits: Sequence[killick.Wait], around: World) -> bool:
    """Somebody calls it off as soon as it waits for an event."""
    if truthful(client, waits, around):
        return True
    if any(wait.waits_for == "event" for wait in waits):
        client.cancel(RUN, compensate=True, by="person")
        return True
    return False
