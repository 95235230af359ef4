"""An agent asks a person and parks. A day later the answer comes from elsewhere, and it goes on.

Three claims: one is approved, one rejected, one forgotten. Money is held for each before anybody is asked; where
it is not paid out it is given back, because the tool that holds it says how to undo that. Each part below opens
the file anew, as another process would.
"""

import logging
import os
import sys
import tempfile
from pathlib import Path

import msgspec

import kedge

log = logging.getLogger("demo")  # silent while agent code is replayed
CLOCK = kedge.ManualClock(1_750_064_400_000_000)  # a Monday; in a real program, leave the clock out


def shade(text: str, style: str) -> str:
    return f"\x1b[{style}m{text}\x1b[0m" if sys.stdout.isatty() and "NO_COLOR" not in os.environ else text


class Claim(msgspec.Struct):
    id: int
    name: str
    amount: int


class NotApproved(Exception): ...


async def give_back(hold: kedge.Effect) -> None:
    log.info("give_back   %s, held under %s", hold.result, hold.key)


@kedge.tool(effect="idempotent", compensate=give_back)
async def hold_money(claim: int, amount: int, key: kedge.Key = kedge.KEY) -> str:
    log.info("hold_money  %d", amount)
    return f"{amount} euros"


@kedge.tool  # at most once, unless declared otherwise
async def pay(claim: int, to: str, amount: int) -> str:
    log.info(shade("pay         %d to %s", "32"), amount, to)
    return f"paid {amount} to {to}"


@kedge.agent(on_failure="compensate")
async def settle(run: kedge.Run, claim: Claim) -> str:
    await run.call(hold_money, claim.id, claim.amount)
    answer = await run.ask(f"Pay {claim.amount} to {claim.name}?", to="managers", timeout="72h", default="reject")
    if not answer.approved:
        reason = "nobody answered in 72 hours" if answer.expired else f"{answer.by} says: {answer.comment}"
        raise NotApproved(reason)
    return await run.call(pay, claim.id, claim.name, claim.amount)


def ask(path: Path) -> None:
    print(shade("Monday: the agent starts on three claims, and asks", "1"))
    with kedge.open(str(path), clock=CLOCK) as kd:
        for claim in (Claim(17, "Ann", 1250), Claim(18, "Bob", 9900), Claim(19, "Cyd", 400)):
            handle = kd.start(settle, claim, id=f"claim_{claim.id}")
            kd.advance(handle.id)
        waiting = kd.list(status="waiting")
    print(f"  {len(waiting)} runs wait in the file, and nowhere else")


def answer(path: Path) -> None:
    print(shade("\nTuesday: a manager opens her inbox", "1"))
    with kedge.open(str(path), clock=CLOCK) as kd:
        for wait in kd.inbox(to="managers"):
            print(f"  {wait.id}  {wait.prompt}  [{' / '.join(wait.verbs)}]")
        kd.answer("claim_17", "approve", by="mia")
        kd.answer("claim_18", "reject", by="mia", comment="the roof was gone before the storm")
        print("  mia approves claim_17, rejects claim_18 and forgets claim_19")
        try:
            kd.answer("claim_18", "approve", by="max")
        except kedge.KedgeError as refused:
            print(f"  max is late: {refused}")


def go_on(path: Path, when: str) -> None:
    print(shade(f"\n{when}: somebody goes on with every run whose time has come", "1"))
    with kedge.open(str(path), clock=CLOCK) as kd:
        for run in kd.advance_due():
            print(f"  {run.run}  {run.status}: {run.result or run.failure}")


def tell(path: Path) -> None:
    print(shade("\nWhat the record says", "1"))
    with kedge.open(str(path), clock=CLOCK) as kd:
        runs = kd.list()[::-1]
        assert [run.status for run in runs] == ["completed", "failed", "failed"]
        for run in runs:
            print(f"  {run.run}  {run.status}")
            for effect in kd.state(run.run).effects:
                print(f"    {effect.key}{'  (undone)' * effect.undone}")
        report = kd.verify()
        assert report.holds
        print(shade(f"  {report.events} events, every hash as written: the record verifies", "32"))


def main() -> None:
    logging.basicConfig(format="  %(kedge_run)s  %(kedge_step)s  %(message)s", level=logging.INFO, stream=sys.stdout)
    with tempfile.TemporaryDirectory(prefix="kedge-") as folder:
        path = Path(folder) / "kedge.db"
        ask(path)
        CLOCK.advance(24 * 3600)
        answer(path)
        go_on(path, "Tuesday")
        CLOCK.advance(48 * 3600)
        go_on(path, "Thursday")
        tell(path)


if __name__ == "__main__":
    main()
