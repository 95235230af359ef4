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


def tried(case: str, times: int, *, store: str = "sqlite") -> dict[str, Any]:
    """Try a case in a process that holds no thread, because it forks."""
    seed = draw_seed()
    asked = [case, "--times", str(times), "--store", store, "--seed", str(seed), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "attack", *asked],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        check=False,
    )
    assert done.stdout, f"seed {seed}: {done.stderr[-6_000:]}"
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["wrong"] == [], f"seed {seed}: {'; '.join(found['wrong'][:5])}"
    assert found["held"] == times, seed
    return found


# the attacks --------------------------------------------------------------------------------------


def test_a_payment_that_a_rewound_model_words_anew_is_made_once_every_time() -> None:
    times = repeats(30, 100)
    found = tried("reworded_after_a_rewind", times)
    assert found["payments"] == times
    assert min(found["killed"], found["reworded"]) > times // 3, found  # otherwise nothing was attacked


def test_also_when_it_was_killed_at_a_moment_that_nobody_chose() -> None:
    assert tried("reworded_after_a_death_at_any_moment", 20)["payments"] == 20


def test_a_fork_that_words_a_payment_anew_takes_the_receipt_of_its_parent() -> None:
    found = tried("reworded_in_a_fork", 27)
    assert (found["payments"], found["reworded"]) == (27, 27)


def test_two_processes_that_go_on_after_the_rewind_pay_nothing_more() -> None:
    assert tried("reworded_by_two_processes", 12)["payments"] == 12


def test_a_rewind_that_comes_while_the_payment_is_under_way_does_not_repeat_it() -> None:
    assert tried("reworded_while_it_runs", 12)["payments"] == 12


def test_a_payment_that_another_run_was_sent_for_is_made_once() -> None:
    assert tried("reworded_by_a_child", 12)["payments"] == 12


def test_where_nobody_said_which_payments_are_the_same_a_person_is_asked() -> None:
    assert tried("reworded_and_nobody_said_what_is_the_same", 6)["payments"] == 6


def test_a_spent_token_is_not_redirected_after_a_rewind() -> None:
    times = repeats(30, 100)
    assert tried("redirected_after_a_rewind", times)["payments"] == times


def test_a_spent_token_is_not_redirected_in_a_fork() -> None:
    assert tried("redirected_in_a_fork", 15)["payments"] == 15


def test_two_runs_that_use_one_token_at_the_same_instant_make_one_payment() -> None:
    assert tried("redirected_by_another_run", 15)["payments"] == 15


# the honest cases ---------------------------------------------------------------------------------


def test_two_equal_payments_are_two_and_still_two_after_rewinds_and_deaths() -> None:
    assert tried("two_equal_payments", 16)["payments"] == 32


def test_three_equal_payments_side_by_side_are_three_after_rewinds_and_deaths() -> None:
    assert tried("three_equal_payments_side_by_side", 15)["payments"] == 45


def test_a_payment_that_was_undone_is_charged_again_under_a_fresh_key() -> None:
    assert tried("paid_undone_and_paid_again", 12)["payments"] == 24


def test_a_fork_and_its_parent_pay_once_between_them_whichever_comes_first() -> None:
    assert tried("a_fork_and_its_parent_in_turn", 12)["payments"] == 18


def test_a_fork_and_its_parent_pay_once_between_them_at_the_same_instant() -> None:
    assert tried("a_fork_and_its_parent_at_the_same_instant", 40)["payments"] == 60


def test_a_fork_that_is_made_while_its_parent_is_about_to_pay_pays_once_with_it() -> None:
    assert tried("a_fork_of_a_parent_that_runs", 12)["payments"] == 12


def test_a_fork_that_acts_while_its_parent_is_held_up_pays_once_with_it() -> None:
    assert tried("a_fork_of_a_parent_that_is_held_up", 4)["payments"] == 6


def test_three_of_one_lineage_pay_once_between_them() -> None:
    assert tried("a_fork_a_fork_of_it_and_their_parent", 12)["payments"] == 18


def test_a_payment_that_was_refused_is_not_adopted() -> None:
    assert tried("refused_is_not_adopted", 9)["payments"] == 9


def test_a_payment_in_doubt_is_looked_up_before_it_is_made_again() -> None:
    assert tried("in_doubt_is_settled_first", 15)["payments"] == 15


def test_a_payment_in_doubt_that_nobody_can_look_up_is_asked_about_and_not_repeated() -> None:
    assert tried("in_doubt_and_nobody_can_look", 12)["payments"] == 12


def test_another_payment_than_the_one_that_is_left_is_asked_about() -> None:
    found = tried("another_payment_is_asked_about", 10)
    assert found["payments"] == 15  # every second one was approved


# on many machines ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        "reworded_after_a_rewind",
        "redirected_after_a_rewind",
        "a_fork_and_its_parent_at_the_same_instant",
    ],
)
def test_the_same_holds_on_postgresql(case: str) -> None:
    tried(case, 4, store="postgres")
