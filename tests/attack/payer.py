"""Agents that pay as their model tells them, which words everything anew whenever it is asked; and where they die.

A payment is known by whom it goes to and how much it is. Its memo and its request id are the model's, and differ.
"""

from __future__ import annotations

import os
import signal
import time
from itertools import count
from typing import Any, Final
from uuid import uuid4

import killick
from attack import bank

PLACES: Final = ("told", "about", "sent", "paid", "kept", "thought", "filed")
"""told: the model has answered. about: the payment is on record as started. sent: the request is on its way. paid: the
bank has answered. kept: the step is over. thought: the model was asked once more. filed: a later step is over."""
PAID: Final = PLACES[2:]
"""Where the bank has paid, or will whoever dies."""

DIES: Final = {"at": ""}
"""Where this process dies, if it comes there: a place, or a place and which time it is there (`sent`, `kept 2`)."""

LINGERS: Final[dict[str, float]] = {}
"""How many seconds this process takes at a place."""

_visits: Final = {place: count(1) for place in PLACES}

TO: Final = {"payee": ""}
"""Whom the model pays from now on, where that is somebody else than the order says."""

HELD_SECONDS: Final = 0.6
"""How long a payment is held up that the bank refused, or that comes too soon after another one."""

_OPENINGS: Final = ("As agreed,", "Thank you:", "With thanks,", "Please find", "Here comes", "Kindly accept")


def here(place: str) -> None:
    """If this is where the process dies, it does, without a word; or it takes its time."""
    times = next(_visits[place])
    if DIES["at"] in (place, f"{place} {times}"):
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(LINGERS.get(place, 0))


# the model ----------------------------------------------------------------------------------------


def worded(order: dict[str, Any], payment: int) -> dict[str, Any]:
    """What a model makes of an order: never twice the same words, and a fresh id each time."""
    fresh = uuid4()
    opening = _OPENINGS[fresh.int % len(_OPENINGS)]
    memo = f"{opening} payment {payment} of order {order['account']} ({fresh.hex[:6]})"
    return {
        "to": TO["payee"] or order["to"],
        "amount": order["amount"],
        "memo": memo,
        "request_id": str(fresh),
    }


# what they can do ---------------------------------------------------------------------------------


def in_the_books(effect: killick.Effect) -> killick.Happened | killick.DidNotHappen:
    """The bank is asked by the reference that went with the payment."""
    found = bank.books(effect.arguments["account"], reference=effect.key)
    return killick.Happened(found[0]["receipt"]) if found else killick.DidNotHappen()


async def in_the_books_soon(effect: killick.Effect) -> killick.Happened | killick.DidNotHappen:
    return in_the_books(effect)


def take_back(effect: killick.Effect) -> None:
    bank.ask("/refunds", {"receipt": effect.result, "reference": effect.key})


def _pay(**asked: Any) -> int:
    here("about")
    try:
        receipt = bank.ask("/payments", asked, sent=lambda: here("sent"))["receipt"]
    except bank.Refused as refused:
        raise killick.NotDone(str(refused)) from None
    here("paid")
    return int(receipt)


async def _pay_soon(**asked: Any) -> int:
    here("about")
    try:
        receipt = (await bank.ask_soon("/payments", asked, sent=lambda: here("sent")))["receipt"]
    except bank.Refused as refused:
        raise killick.NotDone(str(refused)) from None
    here("paid")
    return int(receipt)


@killick.tool(effect="reads")
async def balance(account: str) -> int:
    """How much was spent."""
    return sum(each["amount"] for each in await bank.ask_soon(f"/payments?account={account}"))


@killick.tool(identity=("to", "amount"), reconcile=in_the_books_soon, compensate=take_back)
async def pay(account: str, to: str, amount: int, memo: str, request_id: str, key: killick.Key = killick.KEY) -> int:
    return await _pay_soon(
        account=account, to=to, amount=amount, memo=memo, request_id=request_id, reference=key, token=None
    )


@killick.tool(identity=("to", "amount"), reconcile=in_the_books, compensate=take_back)
def pay_blocking(account: str, to: str, amount: int, memo: str, request_id: str, key: killick.Key = killick.KEY) -> int:
    return _pay(account=account, to=to, amount=amount, memo=memo, request_id=request_id, reference=key, token=None)


@killick.tool(reconcile=in_the_books_soon)
async def pay_as_worded(
    account: str, to: str, amount: int, memo: str, request_id: str, key: killick.Key = killick.KEY
) -> int:
    """It is the same payment only if every word is the same."""
    return await _pay_soon(
        account=account, to=to, amount=amount, memo=memo, request_id=request_id, reference=key, token=None
    )


@killick.tool(identity=("to", "amount"))
async def pay_unseen(
    account: str, to: str, amount: int, memo: str, request_id: str, key: killick.Key = killick.KEY
) -> int:
    """Nobody can look up afterwards whether it happened."""
    return await _pay_soon(
        account=account, to=to, amount=amount, memo=memo, request_id=request_id, reference=key, token=None
    )


@killick.tool(
    identity=("to", "amount"), reconcile=in_the_books, retry=killick.Retry(attempts=3, first=HELD_SECONDS, jitter=0)
)
async def pay_patiently(
    account: str, to: str, amount: int, memo: str, request_id: str, key: killick.Key = killick.KEY
) -> int:
    """Tries again when the bank has refused it."""
    return await _pay_soon(
        account=account, to=to, amount=amount, memo=memo, request_id=request_id, reference=key, token=None
    )


@killick.tool(
    identity=("to", "amount"), reconcile=in_the_books, limit=killick.Limit("bank", f"1/{HELD_SECONDS}s", by="account")
)
async def pay_in_turn(
    account: str, to: str, amount: int, memo: str, request_id: str, key: killick.Key = killick.KEY
) -> int:
    """Waits for its turn, if this process has paid a moment ago."""
    return await _pay_soon(
        account=account, to=to, amount=amount, memo=memo, request_id=request_id, reference=key, token=None
    )


@killick.tool(identity=("to", "amount"), consumes=("token",), reconcile=in_the_books)
async def redeem(
    account: str, to: str, amount: int, memo: str, request_id: str, token: str, key: killick.Key = killick.KEY
) -> int:
    """Pays on an approval that holds once. The bank does not look at it."""
    return await _pay_soon(
        account=account, to=to, amount=amount, memo=memo, request_id=request_id, reference=key, token=token
    )


@killick.tool(identity=("to", "amount"), consumes=("token",), reconcile=in_the_books)
def redeem_blocking(
    account: str, to: str, amount: int, memo: str, request_id: str, token: str, key: killick.Key = killick.KEY
) -> int:
    return _pay(account=account, to=to, amount=amount, memo=memo, request_id=request_id, reference=key, token=token)


@killick.tool(effect="idempotent")
async def file(account: str) -> str:
    """Puts an account on file; doing it again changes nothing."""
    return f"{account} is on file"


TOOLS: Final = {
    tool.name: tool
    for tool in (pay, pay_blocking, pay_as_worded, pay_unseen, pay_patiently, pay_in_turn, redeem, redeem_blocking)
}


# the agents ---------------------------------------------------------------------------------------


@killick.agent(name="payer")
async def payer(run: killick.Run, order: dict[str, Any]) -> list[int]:
    """Step 1 reads; then for each payment a model call and a payment (2 and 3, 4 and 5 …); then model, file."""
    account, tool = order["account"], TOOLS[order["tool"]]
    token = {"token": order["token"]} if "token" in order else {}
    await run.call(balance, account)
    receipts: list[int] = []
    for payment in range(order.get("times", 1)):
        asked = await run.model(worded, order, payment)
        here("told")
        receipts.append(await run.call(tool, account, **asked, **token))
        here("kept")
    await run.model(worded, order, len(receipts))
    here("thought")
    await run.call(file, account)
    here("filed")
    return receipts


@killick.agent(name="payer_blocking")
def payer_blocking(run: killick.SyncRun, order: dict[str, Any]) -> list[int]:
    account, tool = order["account"], TOOLS[order["tool"]]
    token = {"token": order["token"]} if "token" in order else {}
    run.call(balance, account)
    receipts: list[int] = []
    for payment in range(order.get("times", 1)):
        asked = run.model(worded, order, payment)
        here("told")
        receipts.append(run.call(tool, account, **asked, **token))
        here("kept")
    run.model(worded, order, len(receipts))
    here("thought")
    run.call(file, account)
    here("filed")
    return receipts


@killick.agent(name="payer_side_by_side")
async def payer_side_by_side(run: killick.Run, order: dict[str, Any]) -> list[int]:
    """Step 1 reads; step 2 has a branch for each payment: 2.1.1 a model call, 2.1.2 the payment."""
    account, tool = order["account"], TOOLS[order["tool"]]

    async def one(payment: int) -> int:
        asked = await run.model(worded, order, payment)
        receipt: int = await run.call(tool, account, **asked)
        here("kept")
        return receipt

    await run.call(balance, account)
    receipts = list(await run.gather(one(payment) for payment in range(order["times"])))
    here("thought")
    await run.call(file, account)
    here("filed")
    return receipts


@killick.agent(name="payer_by_another")
async def payer_by_another(run: killick.Run, order: dict[str, Any]) -> list[int]:
    """Step 1 is a model call; step 2 lets another agent pay."""
    await run.model(worded, order, 0)
    child = await run.spawn(payer, order)
    receipts: list[int] = await child.result()
    here("kept")
    await run.call(file, order["account"])
    here("filed")
    return receipts


AGENTS: Final = {agent.name: agent for agent in (payer, payer_blocking, payer_side_by_side, payer_by_another)}
