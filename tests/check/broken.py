"""Agents that are broken on purpose, each in its own way. A comment `# fault: NAME` stands at the line to change."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from datetime import datetime
from pathlib import Path
from typing import Any

import killick


@killick.tool(effect="reads")
async def find_people(topic: str) -> list[str]:
    return [topic]


@killick.tool(effect="idempotent")
async def book(slot: str, key: killick.Key = killick.KEY) -> str:
    return slot


# 1. Idempotent by its word alone.


@killick.tool(effect="idempotent")  # fault: no_key
async def post_without_key(text: str) -> str:
    return text


@killick.agent
async def no_key(run: killick.Run, text: str) -> str:
    return await run.call(post_without_key, text)


# 2. A timeout taken for a refusal.


@killick.tool(effect="at_most_once", retry=3, nothing_happened=(TimeoutError,))  # fault: timeout_is_no_refusal
async def pay_in_time(amount: int) -> str:
    return str(amount)


@killick.agent
async def timeout_is_no_refusal(run: killick.Run, amount: int) -> str:
    return await run.call(pay_in_time, amount)


# 3. An id of its own making.


@killick.agent
async def own_id(run: killick.Run, slot: str) -> str:
    order = str(uuid.uuid4())  # fault: own_id
    await run.call(find_people, slot)
    return await run.call(book, f"{slot} {order}")


# 4. The time of day.


@killick.agent
async def own_clock(run: killick.Run, slot: str) -> str:
    await run.call(find_people, slot)
    moment = datetime.now()  # fault: own_clock
    return await run.call(book, f"{slot} {moment.isoformat()}")


# 5. Chance, in a function beside the agent.


def chosen(people: list[str]) -> str:
    return f"{random.choice(people)} {random.random()}"  # fault: own_chance


@killick.agent
async def own_chance(run: killick.Run, topic: str) -> str:
    people = await run.call(find_people, topic)
    return await run.call(book, chosen(people))


# 6. Files outside of a step.


@killick.agent
async def stray_file(run: killick.Run, topic: str) -> str:
    notes = Path(__file__).read_text()  # fault: stray_file
    await run.call(find_people, topic)
    return await run.call(book, notes[:3])


# 7. State in the process.

booked: list[str] = []


@killick.agent
async def keeps_state(run: killick.Run, topic: str) -> str:
    people = await run.call(find_people, topic)
    booked.append(topic)  # fault: keeps_state
    return await run.call(book, f"{people[0]} {len(booked)}")


# 8. A net too wide.


@killick.agent
async def catches_all(run: killick.Run, slot: str) -> str:
    while True:
        try:
            await run.ask("Now?")
            return await run.call(book, slot)
        except BaseException:  # fault: catches_all
            continue


# 9. Its own retry, with a new key each time.


@killick.agent
async def tries_itself(run: killick.Run, slot: str) -> str:
    for _ in range(2):
        try:
            return await run.call(book, slot)  # fault: tries_itself
        except killick.StepFailed:
            continue
    return "never"


# 10. The order of a set.


@killick.agent
async def unordered(run: killick.Run, slot: str) -> int:
    booked = 0
    for day in {"Tue", "Wed", slot}:  # fault: unordered
        await run.call(book, day)
        booked += 1
    return booked


# 11. Nothing said of the effect.


@killick.tool  # fault: undeclared
async def send(to: str) -> str:
    return to


@killick.agent
async def undeclared(run: killick.Run, to: str) -> str:
    return await run.call(send, to)


# 12. A wait that lives in memory.


@killick.agent
async def sleeps_in_memory(run: killick.Run, slot: str) -> str:
    await asyncio.sleep(0.001)  # fault: sleeps_in_memory
    return await run.call(book, slot)


@killick.agent
def sleeps_in_a_thread(run: killick.SyncRun, slot: str) -> str:
    time.sleep(0.001)  # fault: sleeps_in_a_thread
    return run.call(book, slot)


# 13. Something that cannot be taken back.


def unbook(effect: killick.Effect) -> None:
    """Undoes a booking."""


@killick.tool(effect="idempotent", compensate=unbook)
async def book_hotel(city: str, key: killick.Key = killick.KEY) -> str:
    return city


@killick.tool(effect="idempotent")  # fault: cannot_undo
async def book_flight(city: str, key: killick.Key = killick.KEY) -> str:
    return city


@killick.tool(effect="idempotent")
async def charge(amount: int, key: killick.Key = killick.KEY) -> str:
    return str(amount)


@killick.agent(on_failure="compensate")
async def cannot_undo(run: killick.Run, city: str) -> str:
    await run.call(book_hotel, city)
    await run.call(book_flight, city)
    return await run.call(charge, 1)


# 14. A value that cannot be stored.


@killick.agent
async def unstorable(run: killick.Run, slot: str) -> Any:
    await run.call(book, slot)
    return lambda: slot


# 15. A question without an answer.


@killick.agent
async def no_default(run: killick.Run, slot: str) -> str:
    answer = await run.ask("Book it?", timeout="72h")  # fault: no_default
    return await run.call(book, slot) if answer.approved else "no"


# 16. Tasks of its own.


@killick.agent
async def own_tasks(run: killick.Run, slot: str) -> list[str]:
    return list(await asyncio.gather(run.call(book, slot), run.call(book, "Wed")))  # fault: own_tasks
