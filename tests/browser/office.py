"""An office with agents of every sort, and a record of what they did, for pages to show.

Its clock stands still but for what the tools take, and its ids are seeded: the same record each time.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any, Final

import killick
from killick import rules
from killick.client.client import Client
from killick.clock import ManualClock
from killick.ids import SeededIds
from killick.model.events import Build

MONDAY_US: Final = 1_794_819_600_000_000  # 2026-11-16 09:00 UTC


class OfficeClock(ManualClock):
    """Passes when somebody works, and leaps over what is waited for; when the office is shut it stands still."""

    is_open = False

    def nap_seconds(self, seconds: float) -> float:
        if not self.is_open:
            return seconds
        self.advance(max(seconds, 0.0))
        return 0.0


CLOCK: Final = OfficeClock(MONDAY_US)


class BankDown(Exception):
    """The bank answered, and not with what was asked for."""

    __module__ = "bank"


@dataclass
class Claim:
    id: int
    name: str
    amount: int
    mail: str = "ann@example.org"


@dataclass
class Standing:
    """What a review knows."""

    route: str = ""
    documents: list[str] = field(default_factory=list)
    paid: int = 0


# tools --------------------------------------------------------------------------------------------


@killick.tool(effect="reads")
def fetch_documents(claim: int) -> list[str]:
    CLOCK.advance(0.42)
    return [f"invoice-{claim}.pdf", f"photo-{claim}.jpg", "policy.pdf"]


@killick.tool(effect="reads", retry=killick.Retry(attempts=4, first="2s"))
def read_policy(claim: int) -> dict[str, Any]:
    CLOCK.advance(0.2)
    FLAKY["read_policy"] = FLAKY.get("read_policy", 0) + 1
    if FLAKY["read_policy"] % 3:
        raise TimeoutError("the archive did not answer in 5 s")
    return {"covers": ["water", "fire"], "limit": 5000, "deductible": 150}


FLAKY: Final[dict[str, int]] = {}


def take_back(effect: killick.Effect) -> str:
    return f"took back {effect.arguments['amount']}"


@killick.tool(effect="idempotent", compensate=take_back, identity=("claim",))
def pay(claim: int, to: str, amount: int, key: killick.Key = killick.KEY) -> dict[str, Any]:
    """Transfer money to the claimant."""
    CLOCK.advance(1.3)
    return {"transfer": f"T-{claim}-{amount}", "to": to}


@killick.tool(effect="at_most_once")
def send_letter(to: str, text: str) -> str:
    CLOCK.advance(0.8)
    raise ConnectionResetError("the printer went away while it was printing")


@killick.tool(effect="idempotent")
def send_mail(to: str, subject: str, key: killick.Key = killick.KEY) -> str:
    CLOCK.advance(0.3)
    return f"sent to {to}"


@killick.tool(effect="reads")
def open_books(month: str) -> int:
    CLOCK.advance(0.1)
    raise BankDown(f"the bank answered 503 for {month}")


def assess(model: str, messages: list[dict[str, str]]) -> dict[str, Any]:
    """A model, played by a script."""
    CLOCK.advance(2.6)
    return {
        "model": model,
        "content": [
            {"type": "thinking", "thinking": "The photo shows water damage, which the policy covers up to 5,000."},
            {"type": "text", "text": "Covered. The invoice is plausible; a manager should see sums above 1,000."},
        ],
        "usage": {"input_tokens": 1840, "output_tokens": 212},
    }


# agents -------------------------------------------------------------------------------------------

money: Final = killick.Contract(
    "money",
    [rules.arguments("pay", amount={"max": 1000}, name="large sums", ask=killick.Approval("managers", timeout="72h"))],
    people={"managers": ["ann", "max"]},
)


@killick.agent(name="claims.review", context=Standing, contract=money)
async def review(run: killick.Run[Standing], claim: Claim) -> str:
    """Six steps, one of which a person has to agree to where the sum is large."""
    await run.plan(["gather", "assess", "pay", "tell"])
    await run.at("gather")
    documents = await run.call(fetch_documents, claim.id)
    await run.call(read_policy, claim.id)
    await run.update(documents=documents)
    await run.at("assess")
    reply = await run.model(
        assess,
        model="claude-sonnet-4",
        messages=[
            {"role": "system", "content": "You assess insurance claims."},
            {"role": "user", "content": f"Claim {claim.id}: {claim.amount} for water damage. Is it covered?"},
        ],
    )
    why = reply["content"][1]["text"]
    route = "manager" if claim.amount > 1000 else "automatic"
    await run.decided("Who decides?", route, options=["automatic", "manager"], because=why, by="model")
    await run.update(route=route)
    await run.at("pay")
    paid = await run.call(
        pay.options(because=f"covered by the policy; decided by {route}"), claim.id, claim.name, claim.amount
    )
    await run.update(paid=claim.amount)
    await run.at("tell")
    await run.call(send_mail, claim.mail, "Your claim")
    return f"paid: {paid['transfer']}"


@killick.agent
async def tell(run: killick.Run, to: str) -> str:
    """Sends a letter, and nobody knows whether it went out."""
    return await run.call(send_letter, to, "Your claim was settled.")


@killick.agent
async def close_month(run: killick.Run, month: str) -> int:
    """Fails."""
    await run.plan(["open", "sum", "close"])
    await run.at("open")
    return await run.call(open_books, month)


@killick.agent
async def onboard(run: killick.Run, name: str) -> str:
    """Asks a person for something that only they know."""
    await run.plan(["ask", "mail"])
    await run.at("ask")
    answer = await run.ask(
        f"Which team does {name} join?", to="people-team", options=["claims", "sales", "boats"], timeout="48h"
    )
    await run.at("mail")
    await run.call(send_mail, f"{name}@example.org", "Welcome")
    return f"{name} joins {answer.value}"


@killick.agent
async def batch(run: killick.Run, claims: list[int]) -> list[Any]:
    """Looks at several at once, and lets a child do the rest."""
    found = await run.gather(*(run.call(fetch_documents, each) for each in claims))
    await run.spawn(onboard, "cyd", id=f"{run.id}-child")
    return list(found)


@killick.agent
async def subscribe(run: killick.Run, customer: str) -> str:
    """Waits for an event from outside."""
    await run.wait("payment.received", timeout="30d")
    return customer


@killick.agent
async def report(run: killick.Run, day: str) -> str:
    return f"report of {day}"


def low_stock() -> str | None:
    return None


def day_of(firing: killick.triggers.Firing) -> str:
    return firing.due.date().isoformat()


def triggers() -> None:
    """Declared when the office opens, so that no other test has them."""
    killick.triggers.cron("0 9 * * mon-fri", report, tz="Europe/Berlin", input=day_of)
    killick.triggers.every("6h", report, input="noon", name="noon", overlap="queue")
    killick.triggers.when(low_stock, report, every="30s", name="low-stock")
    killick.triggers.on_event("claim.filed", report, input="today", name="filed")


# the record ---------------------------------------------------------------------------------------


def opened(url: str) -> Client:
    """The office's store, empty."""
    build = Build(version="2.4.1", commit="9f3c2ab10d44")
    return killick.open(url, clock=CLOCK, ids=SeededIds(7), build=lambda agent: build)


def fill(kd: Client) -> None:
    """A morning in the office."""
    CLOCK.set_wall(MONDAY_US)
    FLAKY.clear()
    CLOCK.is_open = True
    ran(kd, review, Claim(17, "Ann Berg", 640), "claim-17")
    CLOCK.advance(900)
    ran(kd, review, Claim(18, "Bob Ruiz", 2400), "claim-18", priority=5, tags=["vip"])
    CLOCK.advance(600)
    ran(kd, close_month, "2026-10", "close-2026-10")
    CLOCK.advance(300)
    ran(kd, tell, "Cyd Okoye", "letter-3")
    CLOCK.advance(120)
    ran(kd, onboard, "dora", "onboard-dora")
    ran(kd, subscribe, "ACME", "sub-acme")
    ran(kd, batch, [21, 22, 23], "batch-9")
    CLOCK.advance(60)
    ran(kd, review, Claim(19, "Eve Stone", 3100), "claim-19")
    kd.pause("claim-19", by="max", because="the invoice looks odd")
    kd.start(review, Claim(20, "Finn Lund", 80), id="claim-20")
    CLOCK.advance(30)
    CLOCK.is_open = False


def week(kd: Client) -> None:
    """Six more days: some claims a day, which a manager answers late in the day, and books that fail to open."""
    CLOCK.is_open = True
    for number in range(48):
        CLOCK.advance(3 * 3_600)
        for each in range(1 + number * 7 % 5):
            ran(kd, review, Claim(100 * number + each, "Ann Berg", 400 + 700 * (each % 3)), f"claim-{number}-{each}")
            FLAKY.clear()
        if number % 7 == 3:
            ran(kd, close_month, f"2026-{number}", f"close-{number}")
        if number % 6 == 5:
            for wait in kd.inbox():
                if wait.run.startswith("claim-") and wait.rule is not None:
                    kd.answer(wait, "approve", by="max")
                    kd.advance(wait.run)
    CLOCK.is_open = False


def ran(kd: Client, agent: Any, given: Any, run: str, **options: Any) -> None:
    """Run an agent as far as it goes."""
    with contextlib.suppress(killick.RunWaiting, killick.RunFailed):
        kd.run(agent, given, id=run, **options)


def went_on(kd: Client, run: str) -> None:
    """Let a run go on as far as it goes, in the office's hours."""
    CLOCK.is_open = True
    kd.advance(run)
    CLOCK.is_open = False
