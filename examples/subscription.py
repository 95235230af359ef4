"""A subscription for a year: a trial, a reminder, a charge each month, cards that are refused, a cancellation.

It is a state machine: a function from a state to the next one, with what to wait for in between. Between two
transitions nothing of it is in memory. However long it lives, only the current transition is ever replayed, so its
last month costs what its first did.
"""

import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import killick

DAY_SECONDS = 24 * 3600


@dataclass(frozen=True)
class Subscription:
    customer: str
    phase: Literal["new", "trial", "paying", "overdue"] = "new"
    months_paid: int = 0
    refusals: int = 0


@dataclass
class Charge:
    paid: bool
    note: str


# The world: a bank, and a post office. Whose card is refused when is part of the story.

BROKE = {"ann": {3}, "bob": {2, 3, 4, 5}}
TRIES = Counter[str]()
SEEN: list[str] = []


@killick.tool(effect="idempotent")  # under one key the bank charges once
def charge(customer: str, cents: int, key: killick.Key = killick.KEY) -> Charge:
    TRIES[customer] += 1
    paid = TRIES[customer] not in BROKE.get(customer, ())
    SEEN.append(f"{customer}  {'pays' if paid else 'cannot pay'}")
    return Charge(paid, "paid" if paid else "your card was refused")


@killick.tool(effect="idempotent")  # the post office drops a mail whose key it has seen
def send_mail(to: str, text: str, key: killick.Key = killick.KEY) -> None:
    SEEN.append(f"{to}  gets a mail: {text}")


@killick.machine
async def subscription(run: killick.Run, now: Subscription) -> killick.WaitFor[Subscription] | killick.Done:
    """Every wait is for the word `cancel`; when it does not come in time, `run.received` is None and life goes on."""
    who = now.customer
    if run.received is not None:
        await run.call(send_mail, who, f"goodbye, after {now.months_paid} months")
        return killick.Done(f"{who}  has cancelled: {run.received}")

    if now.phase == "new":
        await run.call(send_mail, who, "welcome, the first 14 days are free")
        return killick.WaitFor("cancel", replace(now, phase="trial"), timeout="12d")
    if now.phase == "trial":
        await run.call(send_mail, who, "two days left")
        return killick.WaitFor("cancel", replace(now, phase="paying"), timeout="2d")

    if now.months_paid == 12:
        return killick.Done(f"{who}  has had a year")
    bill = await run.call(charge, who, 900)
    if bill.paid:
        paid = replace(now, phase="paying", months_paid=now.months_paid + 1, refusals=0)
        return killick.WaitFor("cancel", paid, timeout="30d")
    if now.refusals == 3:
        await run.call(send_mail, who, "we could not charge you four times, and have stopped")
        return killick.Done(f"{who}  is let go: {bill.note}")
    await run.call(send_mail, who, f"{bill.note}; we try again in three days")
    return killick.WaitFor("cancel", replace(now, phase="overdue", refusals=now.refusals + 1), timeout="3d")


def main() -> None:
    clock = killick.clock.LeapingClock()  # in a real program, leave the clock out
    with tempfile.TemporaryDirectory(prefix="killick-") as folder:
        store = str(Path(folder) / "killick.db")
        with killick.open(store, clock=clock) as kd:
            for customer in ("ann", "bob"):
                kd.start(subscription, Subscription(customer), id=f"sub_{customer}")
        for day in range(150):
            with killick.open(store, clock=clock) as kd:  # every day another process
                if day == 120:
                    kd.send("sub_ann", "cancel", "I moved to the sea", id="form_815")  # a form on a web page
                ended = [run.result for run in kd.advance_due() if run.result]
            for line in [*sorted(SEEN), *ended]:
                print(f"day {day:<4} {line}")
            SEEN.clear()
            clock.advance(DAY_SECONDS)
        with killick.open(store, clock=clock) as kd:
            assert [listed.status for listed in kd.list()] == ["completed", "completed"]
            events = sum(len(kd.events(listed.id)) for listed in kd.list())
            print(f"{events} events tell it all")


if __name__ == "__main__":
    main()
