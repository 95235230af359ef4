"""Somebody changes one word of the record, with the file alone in their hands. Verifying finds it, and says where.

Every event is linked to the one before by its hash, and names the hash of its values. The forger here does not even
need SQL: a hex editor will do. What was written before the forgery still holds, and other runs are not touched by it.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import killick


@dataclass
class Claim:
    number: int
    amount: int


@killick.tool(effect="reads")
def limit_of(number: int) -> int:
    return 2000


@killick.tool(effect="idempotent")
def pay(number: int, amount: int, key: killick.Key = killick.KEY) -> str:
    return f"receipt for {amount}"


@killick.agent
async def settle(run: killick.Run, claim: Claim) -> str:
    limit = await run.call(limit_of, claim.number)
    side = "below" if claim.amount < limit else "above"
    route = await run.decided(
        "Who decides?",
        "nobody" if side == "below" else "a manager",
        options=["nobody", "a manager"],
        because=f"{claim.amount} is {side} the limit of {limit}",
    )
    if route != "nobody" and not (await run.ask(f"Pay {claim.amount}?", to="managers")).approved:
        return "rejected"
    return await run.call(pay, claim.number, claim.amount)


def holds(path: Path) -> bool:
    with killick.open(str(path)) as kd:
        report = kd.store.verify()
        print(
            f"{path.name}: {report.runs} runs, {report.events} events, {'holds' if report.holds else 'does not hold'}"
        )
        for problem in report.problems:
            print(f"  {problem}")
    return report.holds


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="killick-") as folder:
        path, forged = Path(folder) / "killick.db", Path(folder) / "forged.db"
        with killick.open(str(path)) as kd:
            kd.run(settle, Claim(17, 1250), id="claim_17")
            kd.run(settle, Claim(18, 400), id="claim_18")
        assert holds(path)

        record = path.read_bytes()
        assert record.count(b"1250 is below the limit") == 1
        forged.write_bytes(record.replace(b"1250 is below the limit", b"1250 is above the limit"))
        print("\nin a copy, somebody turns `below` into `above`: why the claim was paid\n")
        assert not holds(forged)
        with killick.open(str(forged)) as kd:
            print(f"  claim_18 is untouched: {kd.state('claim_18').result}")


if __name__ == "__main__":
    main()
