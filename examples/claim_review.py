"""A claim is reviewed by a model and, where money is at stake, by people who take days to answer.

Small claims are paid at once. For others an adjuster is asked, for three days. If nobody answers, the question goes up
to a manager, who has a week; silence then means no. A run that waits is in the file and nowhere else: every day below
opens the store anew, as another process would, and days pass in no time because the clock is one that can be moved.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import kedge


@dataclass
class Claim:
    number: int
    name: str
    amount: int
    story: str


@dataclass
class Assessment:
    plausible: bool
    why: str


# The model, played by a script, and two tools.


@kedge.tool(effect="reads")
def assess(claim: Claim) -> Assessment:
    storm = "storm" in claim.story
    return Assessment(storm, "the storm is on record" if storm else "there was no storm that week")


@kedge.tool(effect="idempotent")  # the bank honours the key: the same payment twice is one payment
def pay(to: str, amount: int, key: kedge.Key = kedge.KEY) -> str:
    return f"paid {amount} to {to}"


POSTED: set[str] = set()  # the post office's own book


def look_in_the_book(effect: kedge.Effect) -> kedge.Happened | kedge.DidNotHappen:
    return kedge.Happened() if effect.key in POSTED else kedge.DidNotHappen()


@kedge.tool(effect="at_most_once", reconcile=look_in_the_book)  # a letter in the post cannot be taken back
def send_letter(to: str, text: str, key: kedge.Key = kedge.KEY) -> None:
    POSTED.add(key)
    print(f"        letter to {to}: {text}")


@kedge.agent
async def review(run: kedge.Run, claim: Claim) -> str:
    await run.plan(["assess", "ask", "settle"])
    await run.at("assess")
    found = await run.model(assess, claim)
    route = await run.decided(
        "Who decides?",
        "nobody" if found.plausible and claim.amount < 500 else "people",
        options=["nobody", "people"],
        because=found.why,
        by="model",
    )
    amount = claim.amount
    if route == "people":
        await run.at("ask")
        question = f"Pay {claim.amount} to {claim.name}, who says: {claim.story}? The model says {found.why}."
        answer = await run.ask(question, to="adjusters", timeout="3d", default="reject", returns=int)
        if answer.expired:
            answer = await run.ask(question, to="managers", timeout="7d", default="reject", returns=int)
        if not answer.approved:
            reason = "nobody had the time" if answer.expired else answer.comment or "it is not covered"
            await run.call(send_letter, claim.name, f"We are sorry: {reason}.")
            return f"rejected, because {reason}"
        amount = answer.value if answer.kind == "edit" else claim.amount
    await run.at("settle")
    receipt = await run.call(pay, claim.name, amount)
    await run.call(send_letter, claim.name, f"You have {amount} euros.")
    return receipt


CLAIMS = [
    Claim(17, "ann", 120, "the storm took my shutters"),
    Claim(18, "bob", 2400, "the storm took my roof"),
    Claim(19, "cyd", 9900, "the storm took my boat"),
    Claim(20, "dan", 700, "the wind took my hat"),
]


def main() -> None:
    clock = kedge.LeapingClock()  # in a real program, leave the clock out
    with tempfile.TemporaryDirectory(prefix="kedge-") as folder:
        store = str(Path(folder) / "kedge.db")
        with kedge.open(store, clock=clock) as kd:
            for claim in CLAIMS:
                kd.start(review, claim, id=f"claim_{claim.number}")
        for day in range(12):
            with kedge.open(store, clock=clock) as kd:  # another day, another process
                if day == 1:
                    kd.answer("claim_18", "approve", by="mia")
                    print("day 1   mia approves claim_18")
                if day == 5:
                    kd.answer("claim_19", "edit", value=4000, by="max", comment="the boat was old")
                    print("day 5   max grants claim_19, with 4000")
                for run in kd.advance_due():
                    waits = [f"asks {', '.join(wait.to)}" for wait in kd.info(run.run).waits]
                    print(f"day {day:<2}  {run.run}: {run.result or ' '.join(waits)}")
            clock.advance(24 * 3600)
        with kedge.open(store, clock=clock) as kd:
            assert [listed.status for listed in kd.list()] == ["completed"] * len(CLAIMS)
            assert kd.verify().holds


if __name__ == "__main__":
    main()
