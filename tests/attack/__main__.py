"""`python -m attack [CASE[:N] …] [--store postgres]`: a table of what was tried and what the bank paid. Fails if one
case does not hold."""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, Final

from attack import attacks, honest
from attack.attacks import Paid
from attack.lives import Stage, Starved, on_sqlite, the_bank
from servers import Server

Case = Callable[[Stage, int], Paid]

CASES: Final[dict[str, Case]] = {
    case.__name__: case
    for case in (
        attacks.reworded_after_a_rewind,
        attacks.reworded_after_a_death_at_any_moment,
        attacks.reworded_in_a_fork,
        attacks.reworded_by_two_processes,
        attacks.reworded_while_it_runs,
        attacks.reworded_by_a_child,
        attacks.reworded_and_nobody_said_what_is_the_same,
        attacks.redirected_after_a_rewind,
        attacks.redirected_in_a_fork,
        attacks.redirected_by_another_run,
        honest.two_equal_payments,
        honest.three_equal_payments_side_by_side,
        honest.paid_undone_and_paid_again,
        honest.a_fork_and_its_parent_in_turn,
        honest.a_fork_and_its_parent_at_the_same_instant,
        honest.a_fork_of_a_parent_that_runs,
        honest.a_fork_of_a_parent_that_is_held_up,
        honest.a_fork_a_fork_of_it_and_their_parent,
        honest.refused_is_not_adopted,
        honest.in_doubt_is_settled_first,
        honest.in_doubt_and_nobody_can_look,
        honest.another_payment_is_asked_about,
    )
}

LEASE_SECONDS: Final = 0.6
"""On PostgreSQL a dead holder is known by its lease."""


def tried(stage: Stage, name: str, times: int) -> dict[str, Any]:
    """One case so many times: what was counted, and what does not hold."""
    began, lives, deaths = time.monotonic(), stage.lives, stage.deaths
    found: list[Paid] = []
    wrong: list[str] = []
    numbers = count()
    while len(found) + len(wrong) < times:
        number = next(numbers)
        try:
            found.append(CASES[name](stage, number))
        except Starved:
            continue
        except AssertionError as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            wrong.append(f"number {number}, {where.name}, line {where.lineno}: {error}")
    problems: list[str] = stage.live(lambda kd: [str(problem) for problem in kd.store.verify().problems])
    return {
        "case": name,
        "tried": times,
        "held": len(found),
        "payments": sum(each.payments for each in found),
        "reworded": sum(each.reworded for each in found),
        "processes": stage.lives - lives,
        "killed": stage.deaths - deaths,
        "seconds": round(time.monotonic() - began, 1),
        "wrong": wrong + problems,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="attack", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE[:N]", help=f"of {', '.join(CASES)}; all, if none is named")
    parser.add_argument("--times", type=int, default=100, help="each case is tried")
    parser.add_argument("--store", choices=("sqlite", "postgres"), default="sqlite")
    parser.add_argument("--seed", type=int, default=random.randrange(10**9))
    parser.add_argument("--json", action="store_true", help="a line of JSON for each case")
    asked = parser.parse_args()
    failed = False
    with contextlib.ExitStack() as stack:
        if asked.store == "postgres":
            server = stack.enter_context(Server())
            stage = Stage(f"{server.url}?namespace=attack", asked.seed, lease_seconds=LEASE_SECONDS)
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="attack-")))
            stage = Stage(on_sqlite(folder), asked.seed)
        stack.enter_context(the_bank())
        if not asked.json:
            _row("case", "held", "payments", "reworded", "processes", "killed", "seconds")
        for case in asked.cases or CASES:
            name, _, times = case.partition(":")
            found = tried(stage, name, int(times or asked.times))
            failed = failed or bool(found["wrong"])
            _tell(found, asked.seed, as_json=asked.json)
    return int(failed)


def _row(*cells: Any) -> None:
    sys.stdout.write(f"{cells[0]:44}" + "".join(f"{cell!s:>13}" for cell in cells[1:]) + "\n")
    sys.stdout.flush()


def _tell(found: dict[str, Any], seed: int, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(f"{json.dumps(found)}\n")
        return
    counted = [found[name] for name in ("payments", "reworded", "processes", "killed", "seconds")]
    _row(found["case"].replace("_", " "), f"{found['held']} of {found['tried']}", *counted)
    sys.stdout.writelines(f"  WRONG (seed {seed}): {each}\n" for each in found["wrong"][:10])


if __name__ == "__main__":
    sys.exit(main())
