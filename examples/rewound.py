"""A payment that is rewound, forked and undone, at a bank that pays whatever it is sent.

The bank takes any request with a new id, so nothing on its side keeps a payment from being made twice. The clerk who
writes the requests is like a model: asked again, it says the same in other words and makes up another id. What is on
the ledger decides. The same action, by its payee and invoice, is adopted and not done again, until somebody undoes it.
"""

import tempfile
import uuid
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import killick

BANK: dict[str, str] = {}  # what the bank did, by the id of the request
SAID: list[str] = []  # what the clerk wrote
WORDS = ("Kindly pay", "Please transfer", "We owe", "Settle")
number_of = count()


def clerk(messages: list[dict[str, Any]]) -> dict[str, str]:
    SAID.append(f"{WORDS[next(number_of) % 4]} {messages[-1]['content']}")
    return {"text": SAID[-1], "request": str(uuid.uuid4())}


def refund(paid: killick.Effect) -> str:
    BANK[f"refund of {paid.key}"] = f"{paid.arguments['amount']} back"
    return f"{paid.result} is paid back"


@dataclass
class Invoice:
    payee: str
    amount: int
    disputed: bool = False


@killick.tool(effect="reads")
def invoice(number: int) -> Invoice:
    return Invoice("Ada", 1250)


def find_payment(effect: killick.Effect) -> killick.Happened | killick.DidNotHappen:
    """Looks into the bank's books, for when a process dies while it pays."""
    request = effect.arguments["order"]["request"]
    if request not in BANK:
        return killick.DidNotHappen()
    return killick.Happened(f"R-{effect.arguments['number']}00{list(BANK).index(request) + 1}")


@killick.tool(effect="at_most_once", reconcile=find_payment, identity=("payee", "number"), compensate=refund)
def pay(payee: str, number: int, amount: int, order: dict[str, str]) -> str:
    BANK[order["request"]] = f"{amount} to {payee}"
    return f"R-{number}00{len(BANK)}"


@killick.tool(effect="idempotent", identity=("to",))
def mail(to: str, text: str, key: killick.Key = killick.KEY) -> str:
    return f"mail to {to}"


@killick.agent
def payer(run: killick.SyncRun, number: int) -> str:
    due = run.call(invoice, number)
    if due.disputed:
        return "not paid: it is disputed"
    order = run.model(clerk, messages=[{"role": "user", "content": f"{due.amount} for invoice {number}"}])
    receipt = run.call(pay, due.payee, number, due.amount, order)
    run.call(mail, due.payee, f"Dear {due.payee}, we paid. The receipt is {receipt}.")
    return receipt


def tell(what: str, *lines: object) -> None:
    print(what, *(f"  {line}" for line in (*lines, f"the bank: {', '.join(BANK.values())}")), "", sep="\n")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="killick-") as folder, killick.open(str(Path(folder) / "killick.db")) as kd:
        first = kd.run(payer, 7, id="invoice_7")
        tell(f"Paid: {first}", f"the clerk: {SAID[-1]}")

        kd.rewind("invoice_7", "2:before", by="mia", because="that was too blunt")
        again = kd.run(payer, 7, id="invoice_7")
        tell(f"Rewound to before the clerk wrote, and run again: {again}", f"the clerk: {SAID[-1]}")
        assert (again, len(BANK)) == (first, 1)

        disputed = Invoice("Ada", 1250, disputed=True)
        fork = kd.fork("invoice_7", "1:after", output={"1": disputed}, because="what if somebody disputes it?")
        otherwise = kd.run(payer, 7, id=fork.id)
        parts = [line.text for line in kd.diff("invoice_7", against=fork.id).lines() if line.part == "outputs"]
        tell(f"Forked as {fork.id}, with another invoice: {otherwise}", f"they part here: {parts[0]}")

        shared = [f"{use.run} shares it, by its step {use.step}" for use in kd.undoing("invoice_7", "3").shared_by]
        done = kd.undo("invoice_7", "3", by="mia", because="it was Bob's invoice")
        tell(f"Undone: {done}", *shared)

        kd.rewind("invoice_7", "3:before", by="mia", because="it was Ada's after all")
        anew = kd.run(payer, 7, id="invoice_7")
        effects = kd.log.ledger("invoice_7").effects
        keys = [effect.key for effect in effects if effect.tool == "pay" and not effect.undoes]
        tell(f"Rewound once more. What was undone is done anew: {anew}", *(f"key {key}" for key in keys))
        assert list(BANK.values()) == ["1250 to Ada", "1250 back", "1250 to Ada"]
        assert len(set(keys)) == 2


if __name__ == "__main__":
    main()
