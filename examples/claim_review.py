"""A claim is reviewed by a model, paid within a contract, and put to people who take days to answer.

claim_review.toml has the rules. Small claims are paid at once, too large ones never. For those between, an adjuster is
asked for three days; if nobody answers, a manager, for a week; silence then means no. Whoever is asked can change the
sum, and what they change is judged again. A run that waits is in the file and nowhere else: every day below opens the
store anew, as another process would, and days pass in no time because the clock is one that can be moved.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import killick


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


@killick.tool(effect="reads")
def assess(claim: Claim) -> Assessment:
    storm = "storm" in claim.story
    return Assessment(storm, "the storm is on record" if storm else "there was no storm that week")


@killick.tool(effect="idempotent")  # the bank honours the key: the same payment twice is one payment
def pay(to: str, amount: int, key: killick.Key = killick.KEY) -> str:
    return f"paid {amount} to {to}"


POSTED: set[str] = set()  # the post office's own book


def look_in_the_book(effect: killick.Effect) -> killick.Happened | killick.DidNotHappen:
    return killick.Happened() if effect.key in POSTED else killick.DidNotHappen()


@killick.tool(effect="at_most_once", reconcile=look_in_the_book)  # a letter in the post cannot be taken back
def send_letter(to: str, text: str, key: killick.Key = killick.KEY) -> None:
    POSTED.add(key)
    print(f"        letter to {to}: {text}")


@killick.agent(contract="claim_review.toml")
async def review(run: killick.Run, claim: Claim) -> str:
    found = await run.model(assess, claim)
    try:
        receipt = await run.call(pay.options(because=found.why), claim.name, claim.amount)
    except killick.Rejected as no:  # by a rule, by a person, or because nobody had the time
        await run.call(send_letter, claim.name, f"We are sorry: {no.message}.")
        return f"not paid: {no.message}"
    told = run.call_answer  # what a person changed, if one was asked
    why = f" ({told.comment})" if told is not None and told.changed else ""
    await run.call(send_letter, claim.name, f"We {receipt}{why}.")
    return receipt


CLAIMS = [
    Claim(17, "ann", 120, "the storm took my shutters"),
    Claim(18, "bob", 2400, "the storm took my roof"),
    Claim(19, "cyd", 4900, "the storm took my boat"),
    Claim(20, "dan", 700, "the wind took my hat"),
    Claim(21, "eve", 99000, "the storm took my castle"),
]
ANSWERS = {
    1: ("claim_18", "approve", "mia", None, None),
    5: ("claim_19", "edit", "max", {"amount": 4000}, "the boat was old"),
}


def main() -> None:
    clock = killick.clock.LeapingClock()  # in a real program, leave the clock out
    with tempfile.TemporaryDirectory(prefix="killick-") as folder:
        store = str(Path(folder) / "killick.db")
        with killick.open(store, clock=clock) as kd:
            for claim in CLAIMS:
                kd.start(review, claim, id=f"claim_{claim.number}")
        for day in range(12):
            with killick.open(store, clock=clock) as kd:  # another day, another process
                if day in ANSWERS:
                    run, verb, by, value, comment = ANSWERS[day]
                    kd.answer(run, verb, value=value, by=by, comment=comment)
                    print(f"day {day:<2}  {run}: {by} says {verb}{f', {value}' if value else ''}")
                for due in kd.advance_due():
                    waits = [f"asks {', '.join(wait.to)} about {wait.prompt}" for wait in kd.info(due.run).waits]
                    print(f"day {day:<2}  {due.run}: {due.result or ' '.join(waits)}")
            clock.advance(24 * 3600)
        with killick.open(store, clock=clock) as kd:
            assert [listed.status for listed in kd.list()] == ["completed"] * len(CLAIMS)
            assert kd.store.verify().holds
            assert all(kd.rejudge(listed.id).agrees for listed in kd.list())  # the same rules, the same verdicts


if __name__ == "__main__":
    main()
