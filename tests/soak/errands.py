"""What the runs of a soak do: eight steps, each in its turn first, with tools of every effect class and waits."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sqlite3
import time
from typing import Any, Final

import killick
from soak.draws import draw, fate

FAR: Final = {"path": os.environ.get("SOAK_FAR", "")}
"""Where the far side listens, known before any tool runs. A run that is executed alone has a process of its own, which
knows it by the environment."""

SEED: Final = {"seed": int(os.environ.get("SOAK_SEED", "0"))}
CODE: Final = {"version": int(os.environ.get("SOAK_CODE", "1"))}
"""Which version of the agent's code this process has."""

MANY: Final = killick.Retry(attempts=500, first=0.02, max=0.2)
"""A step may be cut off again and again: how often is not what this is about."""

STEPS: Final = ("look", "reserve", "pause", "pay", "hear", "enter", "notify", "ship")
WAITS: Final = ("sleep", "message", "question")
TIMEOUT_SECONDS: Final = 0.8


# the far side, from both kinds of code ------------------------------------------------------------


def _request(do: str, what: str, step: killick.ToolStep) -> dict[str, Any]:
    dated = time.monotonic_ns()
    return {"do": do, "what": what, "key": step.key, "attempt": step.attempt, "pid": os.getpid(), "dated": dated}


def _receipt(line: bytes) -> int:
    if not line:
        raise ConnectionResetError("the far side hung up")
    reply = json.loads(line)
    if "refused" in reply:
        if reply["refused"] == "done already":
            raise RuntimeError("the far side did it before")
        raise killick.NotDone(reply["refused"])
    return int(reply["receipt"])


async def asked(request: dict[str, Any]) -> bytes:
    """What the far side says."""
    reader, writer = await asyncio.open_unix_connection(FAR["path"], limit=1 << 30)
    try:
        writer.write(json.dumps(request).encode() + b"\n")
        return await reader.readline()
    finally:
        writer.close()


def asked_blocking(request: dict[str, Any]) -> bytes:
    with socket.socket(socket.AF_UNIX) as far:
        far.settimeout(TIMEOUT_SECONDS)
        far.connect(FAR["path"])
        far.sendall(json.dumps(request).encode() + b"\n")
        with far.makefile("rb") as reader:
            return reader.readline()


def _settled(line: bytes) -> killick.Happened | killick.DidNotHappen:
    found = json.loads(line)
    return killick.Happened(found["receipt"]) if "receipt" in found else killick.DidNotHappen()


async def settle(effect: killick.Effect) -> killick.Happened | killick.DidNotHappen:
    return _settled(await asked({"do": "settle", "key": effect.key}))


def settle_blocking(effect: killick.Effect) -> killick.Happened | killick.DidNotHappen:
    return _settled(asked_blocking({"do": "settle", "key": effect.key}))


# tools --------------------------------------------------------------------------------------------


@killick.tool(effect="reads", retry=MANY, timeout=TIMEOUT_SECONDS)
async def look(what: str, step: killick.ToolStep = killick.STEP) -> int:
    """Changes nothing."""
    return _receipt(await asked(_request("read", what, step)))


@killick.tool(effect="idempotent", retry=MANY, timeout=TIMEOUT_SECONDS)
async def reserve(what: str, step: killick.ToolStep = killick.STEP) -> int:
    """The far side honours the key."""
    return _receipt(await asked(_request("keyed", what, step)))


@killick.tool(effect="idempotent", retry=MANY, timeout=2 * TIMEOUT_SECONDS)
def notify(what: str, step: killick.ToolStep = killick.STEP) -> int:
    """The same, blocking."""
    return _receipt(asked_blocking(_request("keyed", what, step)))


@killick.tool(reconcile=settle, retry=MANY, timeout=TIMEOUT_SECONDS)
async def pay(what: str, step: killick.ToolStep = killick.STEP) -> int:
    """At most once; the far side can be asked."""
    return _receipt(await asked(_request("once", what, step)))


@killick.tool(reconcile=settle_blocking, retry=MANY, timeout=2 * TIMEOUT_SECONDS)
def ship(what: str, step: killick.ToolStep = killick.STEP) -> int:
    """The same, blocking."""
    return _receipt(asked_blocking(_request("once", what, step)))


@killick.tool(effect="transaction", retry=MANY, timeout=2 * TIMEOUT_SECONDS)
def enter(what: str, tx: killick.Tx = killick.TX, step: killick.ToolStep = killick.STEP) -> int:
    """A row of our own beside the record. Returns how many rows there are of it, this one among them."""
    drawn = fate(SEED["seed"], what, step.attempt)
    if drawn in ("refuse", "drop before"):
        raise killick.NotDone("not now")
    sign = "?" if isinstance(tx.connection, sqlite3.Connection) else "%s"
    tx.execute(f"INSERT INTO entries VALUES ({sign})", (what,))
    if drawn in ("late", "too late"):
        time.sleep(0.03)
    if drawn == "drop after":
        raise ConnectionResetError("the row was written, and is gone with its transaction")
    return int(tx.execute(f"SELECT count(*) FROM entries WHERE what = {sign}", (what,)).fetchone()[0])


TOOLS: Final = {"look": look, "reserve": reserve, "notify": notify, "pay": pay, "ship": ship, "enter": enter}


def make_entries(kd: killick.Client) -> None:
    """Where rows of our own go, in the store's own database."""
    with kd.runtime.store.transaction() as own:
        own.connection.execute("CREATE TABLE entries (what text)")


def entries(kd: killick.Client) -> list[str]:
    """Every row of our own."""
    with kd.runtime.store.transaction() as own:
        return [what for (what,) in own.connection.execute("SELECT what FROM entries").fetchall()]


# the agent ----------------------------------------------------------------------------------------


def plan(number: int) -> list[str]:
    """The steps of a run in order: every one of them is the first in some run."""
    turn = number % len(STEPS)
    return [*STEPS[turn:], *STEPS[:turn]]


def wait_of(number: int, label: str) -> str:
    """What kind of wait a run has at a step."""
    return WAITS[(number + (label == "hear")) % len(WAITS)]


@killick.agent
async def errand(run: killick.Run, number: int) -> dict[str, int]:
    """Eight steps; the result says which receipts it got. Version 2 has a step before `pay`, and one at the end."""
    receipts: dict[str, int] = {}
    is_new = CODE["version"] > 1
    for label in plan(number):
        what = f"{run.id}/{label}"
        if label == "pay" and is_new and run.patched("confirm"):
            receipts["confirm"] = await run.call(reserve, f"{run.id}/confirm")
        if label in TOOLS:
            receipts[label] = await run.call(TOOLS[label], what)
        elif (kind := wait_of(number, label)) == "sleep":
            await run.sleep(0.05 + 0.6 * draw(what))
        elif kind == "message":
            assert await run.wait(label) == what
        else:
            assert (await run.ask(f"May {what} go on?")).approved
    if is_new:
        receipts["thank"] = await run.call(notify, f"{run.id}/thank")
    return receipts
