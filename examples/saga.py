"""A trip of four bookings: the car cannot be had, so the others are undone, the last one first.

Each tool says how it is undone (`compensate=`), and the agent says that it wants that when it fails. Undoing is a step
like any other: it has a key, it is tried again, it is on record. What cannot be undone waits for a person, who does it
by hand or leaves it; what is left is listed at the end. The agent's own code has no `except` in it.
"""

import asyncio
import tempfile
from dataclasses import dataclass
from pathlib import Path

import killick


@dataclass
class Trip:
    to: str
    nights: int


class NotRefundable(Exception): ...


# What undoes a booking is given what was done: its arguments, its key, and what it returned. It is a tool itself.


@killick.tool(effect="idempotent")
def cancel_flight(booked: killick.Effect) -> None:
    print(f"  cancel_flight    {booked.result}")


@killick.tool(effect="idempotent", retry=killick.Retry(attempts=3, first="10ms"))
def cancel_hotel(booked: killick.Effect, step: killick.ToolStep = killick.STEP) -> None:
    if step.attempt == 1:
        print("  cancel_hotel     nobody picks up the phone")
        raise ConnectionError("nobody picks up the phone")
    print(f"  cancel_hotel     {booked.result}, {booked.arguments['nights']} nights")


@killick.tool(effect="idempotent")
def return_policy(bought: killick.Effect) -> None:
    print(f"  return_policy    {bought.result}: they do not take it back")
    raise NotRefundable("they do not take it back")  # nothing that passes by itself: it is not tried again


@killick.tool(effect="idempotent")
def return_car(rented: killick.Effect) -> None:
    print(f"  return_car       {rented.result}")


@killick.tool(effect="idempotent", compensate=cancel_flight)
def book_flight(to: str, key: killick.Key = killick.KEY) -> str:
    print(f"  book_flight      {to}")
    return f"flight to {to}"


@killick.tool(effect="idempotent", compensate=return_policy)
def buy_insurance(to: str, key: killick.Key = killick.KEY) -> str:
    print("  buy_insurance    policy 77")
    return "policy 77"


@killick.tool(effect="idempotent", compensate=cancel_hotel)
def book_hotel(to: str, nights: int, key: killick.Key = killick.KEY) -> str:
    print(f"  book_hotel       {to}, {nights} nights")
    return f"hotel in {to}"


@killick.tool(effect="idempotent", compensate=return_car, retry=killick.Retry(attempts=3, first="10ms"))
def rent_car(to: str, key: killick.Key = killick.KEY) -> str:
    print("  rent_car         no car left")
    raise killick.NotDone(f"there is no car left in {to}")  # says for certain that nothing happened


@killick.agent(on_failure="compensate")
async def travel(run: killick.Run, trip: Trip) -> list[str]:
    flight = await run.call(book_flight, trip.to)
    insurance = await run.call(buy_insurance, trip.to)
    hotel = await run.call(book_hotel, trip.to, trip.nights)
    car = await run.call(rent_car, trip.to)
    return [flight, insurance, hotel, car]


async def main() -> None:
    trip = Trip("Oslo", 3)
    with tempfile.TemporaryDirectory(prefix="killick-") as folder:
        async with killick.open_async(str(Path(folder) / "killick.db")) as kd:
            print("What was done, as it was done:")
            try:
                await kd.run(travel, trip, id="trip_1")
            except killick.RunWaiting as waiting:
                [wait] = waiting.waits
                print(f"\nA person is asked:\n  {wait.prompt}\n  mia leaves it: it is only 12 euros\n")
                await kd.answer(wait.id, "stop", by="mia", comment="it is only 12 euros")
            try:
                await kd.run(travel, trip, id="trip_1")
            except killick.RunFailed as failed:
                print(f"\nWhy it failed:\n  {failed.failure.message}")
                print(f"\nWhat could not be undone:\n  {', '.join(failed.not_undone)}")
            print("\nWhat is on record:")
            for effect in (await kd.state("trip_1")).effects:
                what = f"undoes step {effect.undoes}: " if effect.undoes else ""
                print(f"  {effect.step:<3} {effect.key:<45} {what}{'undone' if effect.undone else effect.status}")
            assert (await kd.info("trip_1")).status == "failed"


if __name__ == "__main__":
    asyncio.run(main())
