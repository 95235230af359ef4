"""R18, R19, R33, R34: an agent taken back to before a payment, whose model words it anew, does not pay twice; a token
that was spent is not spent for somebody else; and what was meant twice is still done twice.

The bank is a real server and the deaths are real: see `python -m attack`, which prints what is asserted here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from seeds import draw_seed, repeats

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]


def tried(*cases: str, store: str = "sqlite") -> list[dict[str, Any]]:
    """Try cases, each so often as `case:times` says, in a process that holds no thread, because it forks."""
    seed = draw_seed()
    done = subprocess.run(
        [sys.executable, "-m", "attack", *cases, "--store", store, "--seed", str(seed), "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        check=False,
    )
    assert done.stdout, f"seed {seed}: {done.stderr[-6_000:]}"
    found: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    wrong = [each for row in found for each in row["wrong"][:5]]
    assert wrong == [], f"seed {seed}: {'; '.join(wrong)}"
    assert [f"{row['case']}:{row['held']}" for row in found] == [*cases], seed
    return found


def pays(case: str, times: int, each: float = 1.0) -> dict[str, Any]:
    """Try one case; `each` is how many payments it makes."""
    [found] = tried(f"{case}:{times}")
    assert found["payments"] == times * each, found
    return found


# the attacks --------------------------------------------------------------------------------------


def test_a_payment_that_a_rewound_model_words_anew_is_made_once_every_time() -> None:
    times = repeats(9, 100)
    found = pays("reworded_after_a_rewind", times)
    assert min(found["killed"], found["reworded"]) > times // 3, found  # otherwise nothing was attacked


def test_also_when_it_was_killed_at_a_moment_that_nobody_chose() -> None:
    pays("reworded_after_a_death_at_any_moment", repeats(6, 20))


def test_a_fork_that_words_a_payment_anew_takes_the_receipt_of_its_parent() -> None:
    times = repeats(9, 27)  # three ways to call a tool, three kinds of effects
    assert pays("reworded_in_a_fork", times)["reworded"] == times


def test_two_processes_that_go_on_after_the_rewind_pay_nothing_more() -> None:
    pays("reworded_by_two_processes", repeats(6, 12))


def test_a_rewind_that_comes_while_the_payment_is_under_way_does_not_repeat_it() -> None:
    pays("reworded_while_it_runs", repeats(6, 12))


def test_a_payment_that_another_run_was_sent_for_is_made_once() -> None:
    pays("reworded_by_a_child", repeats(6, 12))


def test_where_nobody_said_which_payments_are_the_same_a_person_is_asked() -> None:
    pays("reworded_and_nobody_said_what_is_the_same", repeats(3, 6))


def test_a_spent_token_is_not_redirected_after_a_rewind() -> None:
    pays("redirected_after_a_rewind", repeats(6, 100))


def test_a_spent_token_is_not_redirected_in_a_fork() -> None:
    pays("redirected_in_a_fork", repeats(6, 15))


def test_two_runs_that_use_one_token_at_the_same_instant_make_one_payment() -> None:
    pays("redirected_by_another_run", repeats(6, 15))


# the honest cases ---------------------------------------------------------------------------------


def test_two_equal_payments_are_two_and_still_two_after_rewinds_and_deaths() -> None:
    pays("two_equal_payments", repeats(6, 16), 2)


def test_three_equal_payments_side_by_side_are_three_after_rewinds_and_deaths() -> None:
    pays("three_equal_payments_side_by_side", repeats(6, 15), 3)


def test_a_payment_that_was_undone_is_charged_again_under_a_fresh_key() -> None:
    pays("paid_undone_and_paid_again", repeats(6, 12), 2)


def test_a_fork_and_its_parent_pay_once_between_them_whichever_comes_first() -> None:
    pays("a_fork_and_its_parent_in_turn", repeats(6, 12), 1.5)


def test_a_fork_and_its_parent_pay_once_between_them_at_the_same_instant() -> None:
    pays("a_fork_and_its_parent_at_the_same_instant", repeats(8, 40), 1.5)


def test_a_fork_that_is_made_while_its_parent_is_about_to_pay_pays_once_with_it() -> None:
    pays("a_fork_of_a_parent_that_runs", repeats(6, 12))


def test_a_fork_that_acts_while_its_parent_is_held_up_pays_once_with_it() -> None:
    pays("a_fork_of_a_parent_that_is_held_up", repeats(2, 4), 1.5)


def test_three_of_one_lineage_pay_once_between_them() -> None:
    pays("a_fork_a_fork_of_it_and_their_parent", repeats(6, 12), 1.5)


def test_a_payment_that_was_refused_is_not_adopted() -> None:
    pays("refused_is_not_adopted", repeats(6, 9))


def test_a_payment_in_doubt_is_looked_up_before_it_is_made_again() -> None:
    pays("in_doubt_is_settled_first", repeats(9, 15))


def test_a_payment_in_doubt_that_nobody_can_look_up_is_asked_about_and_not_repeated() -> None:
    pays("in_doubt_and_nobody_can_look", repeats(6, 12))


def test_another_payment_than_the_one_that_is_left_is_asked_about() -> None:
    pays("another_payment_is_asked_about", repeats(6, 10), 1.5)  # every second one was approved


# on many machines ---------------------------------------------------------------------------------


def test_the_same_holds_on_postgresql() -> None:
    tried(
        "reworded_after_a_rewind:4",
        "redirected_after_a_rewind:4",
        "a_fork_and_its_parent_at_the_same_instant:4",
        store="postgres",
    )
