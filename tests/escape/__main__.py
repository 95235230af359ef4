"""`python -m escape [CASE[:N] …] [--times N] [--seed N]`: a table of what a scripted model, its children and its forks
tried in order to do what their contract forbids, and what came of it. Fails if one story does not hold."""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, Final

from escape import anything, families, models, people
from escape.law import Tried
from escape.stage import Stage, stage

Case = Callable[[Stage], Tried]

CASES: Final[dict[str, Case]] = {
    case.__name__: case
    for case in (
        models.paths_that_lead_out,
        models.links_made_on_the_way,
        models.values_in_disguise,
        models.raw_json,
        models.amounts_in_pieces,
        models.names_that_look_alike,
        models.large_and_deep_values,
        models.the_same_again_and_again,
        people.an_approval_for_something_else,
        people.an_approval_of_another_time,
        people.forged_answers,
        people.answers_of_the_wrong_people,
        people.edits,
        people.monday_and_tuesday,
        people.an_approval_of_what_was_asked,
        people.an_approval_under_other_terms,
        people.a_link_changed_after_the_approval,
        people.other_runs,
        families.in_another_order,
        families.after_it_was_taken_back,
        families.twice_at_once,
        families.children_and_messages_once,
        families.somebody_else_does_it,
        families.a_child_asks_its_own_people,
        families.time_that_begins_anew,
        families.the_context_made_to_fit,
        families.two_processes_at_once,
        families.two_processes_spawn_at_once,
        families.a_fork_at_the_same_instant,
        families.killed_and_the_contract_changed,
        families.killed_at_any_moment,
        families.another_folder_between_two_attempts,
        families.another_root,
        families.other_arguments_than_those_on_record,
        anything.anything_at_all,
    )
}


def tried(name: str, times: int, seed: int) -> dict[str, Any]:
    """One case so many times, each by a seed of its own: what was counted, and what does not hold."""
    began, found, held, wrong = time.monotonic(), Tried(0), 0, list[str]()
    lives = deaths = 0
    for number in range(times):
        try:
            with stage(f"{seed}:{name}:{number}") as made:
                found += CASES[name](made)
            held += 1
            lives, deaths = lives + made.lives, deaths + made.deaths
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            wrong.append(f"number {number}, {where.name}, line {where.lineno}: {type(error).__name__}: {error}")
    return {
        "case": name, "told": times, "held": held, **found._asdict(), "processes": lives, "killed": deaths,
        "seconds": round(time.monotonic() - began, 1), "wrong": wrong,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="escape", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE[:N]", help=f"of {', '.join(CASES)}; all, if none is named")
    parser.add_argument("--times", type=int, default=10, help="each story is told, each time another way")
    parser.add_argument("--seed", type=int, default=random.randrange(10**9))
    parser.add_argument("--json", action="store_true", help="a line of JSON for each case")
    asked = parser.parse_args()
    failed = False
    if not asked.json:
        sys.stdout.write(f"seed {asked.seed}\n")
        _row("case", "held", "tries", "stopped", "done", "asked", "processes", "killed", "seconds")
    for case in asked.cases or CASES:
        name, _, times = case.partition(":")
        found = tried(name, int(times or asked.times), asked.seed)
        failed = failed or bool(found["wrong"])
        _tell(found, asked.seed, as_json=asked.json)
    return int(failed)


def _row(*cells: Any) -> None:
    sys.stdout.write(f"{cells[0]:40}" + "".join(f"{cell!s:>11}" for cell in cells[1:]) + "\n")
    sys.stdout.flush()


def _tell(found: dict[str, Any], seed: int, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(f"{json.dumps(found)}\n")
        sys.stdout.flush()
        return
    counted = [found[name] for name in ("tries", "stopped", "done", "asked", "processes", "killed", "seconds")]
    _row(found["case"].replace("_", " "), f"{found['held']} of {found['told']}", *counted)
    sys.stdout.writelines(f"  WRONG (seed {seed}): {each}\n" for each in found["wrong"][:5])


if __name__ == "__main__":
    sys.exit(main())
