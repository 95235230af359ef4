"""Kills processes around tools whose rows commit with the record, for real. Run as a program; prints JSON.

A process is killed by itself, at a point of its code that is counted: every call and every return of every thread,
of Python or C, is one. Others are killed from outside, at any moment, also within the database. After each death, and
before anybody goes on, the application's rows are those that the log says were written; in the end all are, once.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import sqlite3
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from typing import Any, Final, NamedTuple

import killick
from engine.killing import Life, live
from killick.errors import LeaseLost, RunBusy
from killick.model import events as e
from warm import load_client

MANY: Final = killick.Retry(attempts=200, first=0.002, max=0.01)
PAID: Final = ("ann", "bob", "cleo", "dan")
TOGETHER: Final = 10
"""Dead runs that one process goes on with."""

WHERE: Final = {"url": ""}


def connect() -> Any:
    if "://" not in WHERE["url"]:
        return sqlite3.connect(WHERE["url"], isolation_level=None)
    import psycopg

    return psycopg.connect(WHERE["url"].partition("?")[0], autocommit=True)  # the store has a schema of its own


def statement(sql: str) -> str:
    """With parameters as the database writes them."""
    return sql.replace("?", "%s") if "://" in WHERE["url"] else sql


# the agent ----------------------------------------------------------------------------------------


class Row(NamedTuple):
    run: str
    step: str
    attempt: int
    who: str


@killick.tool(effect="transaction", retry=MANY)
def pay(who: str, tx: killick.Tx = killick.TX, step: killick.ToolStep = killick.STEP) -> Row:
    row = Row(step.run, step.id, step.attempt, who)
    tx.execute(statement("INSERT INTO paid VALUES (?, ?, ?, ?)"), row)
    tx.execute(statement("UPDATE total SET paid = paid + 1 WHERE run = ?"), (step.run,))
    return row


@killick.tool(effect="transaction", retry=MANY)
def begin(tx: killick.Tx = killick.TX, step: killick.ToolStep = killick.STEP) -> None:
    tx.execute(statement("INSERT INTO total VALUES (?, 0)"), (step.run,))


@killick.tool(effect="idempotent", retry=MANY)
async def look(who: str) -> str:
    return who


@killick.agent(name="teller")
async def teller(run: killick.Run) -> list[Row]:
    async def seen(who: str) -> Row:
        await run.call(look, who)
        return await run.call(pay, who)

    POINTS.armed = True
    await run.call(begin)
    first = await run.call(pay, PAID[0])
    both = await run.gather(seen(PAID[1]), run.call(look, "nobody"), seen(PAID[2]))
    rows = [first, both[0], both[2], await run.call(pay, PAID[3])]
    POINTS.armed = False
    return rows


# points -------------------------------------------------------------------------------------------


class Points:
    """Counts calls and returns, and ends its process at one of them."""

    def __init__(self) -> None:
        self.passed = 0
        self.last = 0
        self.armed = False

    def begin(self, last: int) -> None:
        self.last = last
        threading.setprofile(self._passed)
        sys.setprofile(self._passed)

    def end(self) -> None:
        threading.setprofile(None)
        sys.setprofile(None)

    def _passed(self, frame: Any, event: str, argument: Any) -> None:
        if self.armed:
            self.passed += 1
            if self.passed == self.last:
                os.kill(os.getpid(), signal.SIGKILL)


POINTS: Final = Points()


# lives --------------------------------------------------------------------------------------------


def agrees(kd: killick.Client, run: str) -> list[Row]:
    """The rows of a run, which are those that its log says were written."""
    with closing(connect()) as connection:
        found = connection.execute(statement("SELECT * FROM paid WHERE run = ?"), (run,)).fetchall()
        total = connection.execute(statement("SELECT paid FROM total WHERE run = ?"), (run,)).fetchall()
    rows = sorted(Row(*row) for row in found)
    if kd.runtime.store.head(run) is None:
        assert (rows, total) == ([], []), f"{run} is not there, but {rows}, {total}"
        return rows
    written: list[Row] = []
    begun = 0
    names = {step.id: step.name for step in kd.state(run).fold.steps}
    for recorded in kd.events(run):
        if isinstance(recorded.event, e.AttemptEnded) and recorded.event.outcome == "returned":
            name = names[recorded.event.step]
            begun += name == "begin"
            if name == "pay":
                written.append(Row(*kd.runtime.log.data(run, recorded.seq)["output"]))
    assert rows == sorted(written), f"{run}: the application has {rows}, the log has {sorted(written)}"
    assert [paid for (paid,) in total] == [len(rows)] * begun, f"{run}: {total}, {begun}, {rows}"
    return rows


def go_on(*runs: str, last: int = 0) -> Callable[[int], None]:
    """In a child: look whether everything agrees, and run, or go on."""

    def task(out: int) -> None:
        logging.disable()
        if last >= 0:
            POINTS.begin(last)
        with killick.open(WHERE["url"], lease_seconds=0.4 if "://" in WHERE["url"] else float("inf")) as kd:
            for run in runs:
                agrees(kd, run)
            for run in runs:
                result = ran(kd, run)
                assert agrees(kd, run) == sorted(result)
                assert sorted(row.who for row in result) == sorted(PAID)
            POINTS.end()
            os.write(out, f"done {POINTS.passed}\n".encode())

    return task


def ran(kd: killick.Client, run: str) -> list[Row]:
    """What a run comes to. Where its holder is dead and nobody can know, its lease runs out soon."""
    while True:
        try:
            return kd.run(teller, id=run)
        except (RunBusy, LeaseLost):
            time.sleep(0.01)


def verified(out: int) -> None:
    with killick.open(WHERE["url"]) as kd:
        os.write(out, f"{[str(problem) for problem in kd.store.verify().problems]}\n".encode())


def done(life: Life, where: str) -> int:
    """How many points a life passed that came to its end."""
    assert not life.killed, where
    assert [line[:5] for line in life.told] == ["done "], f"{where}: {life.told}"
    return int(life.told[0].removeprefix("done "))


def kill(url: str, points: int, moments: int, seed: int) -> dict[str, object]:
    """Kill runs at so many points, and at so many moments, and go on with each to its end."""
    WHERE["url"] = url
    load_client(url)
    live(verified)  # which makes the store
    with closing(connect()) as connection:
        connection.execute("DROP TABLE IF EXISTS paid")
        connection.execute("DROP TABLE IF EXISTS total")
        connection.execute("CREATE TABLE paid (run TEXT, step TEXT, attempt INTEGER, who TEXT)")
        connection.execute("CREATE TABLE total (run TEXT, paid INTEGER)")
    chance = random.Random(seed)
    whole = [live(go_on(f"whole_{number}")) for number in range(3)]
    length = min(done(life, "whole") for life in whole)
    seconds = min(life.seconds for life in whole)
    dead: list[str] = []
    killed = Counter[str]()
    for number in range(points + moments):
        how = "points" if number < points else "moments"
        run = f"{how}_{number}"
        # One point of every stretch of the code, or any moment.
        at = 1 + (length * number + chance.randrange(length)) // points
        when = chance.uniform(0, seconds) if how == "moments" else None
        life = live(go_on(run, last=at if when is None else -1), when)
        killed[how] += not life.told
        dead.append(run)
        if len(dead) == TOGETHER or number == points + moments - 1:
            where = f"seed {seed}, {dead}"
            if chance.random() < 0.5:
                again = live(go_on(*dead, last=chance.randrange(1, length * len(dead) // 4)))
                killed["again"] += not again.told
            done(live(go_on(*dead, last=-1)), where)
            dead.clear()
    [problems] = live(verified).told
    assert problems == "[]", problems
    return {**killed, "length": length, "seconds": seconds}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(kill(sys.argv[1], *map(int, sys.argv[2:]))))
