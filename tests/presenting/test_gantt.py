"""Steps on a time axis: true proportions while a run works, folded stretches where it idles."""

from __future__ import annotations

from typing import Any, Final

from killick.history.timeline_parts import NOTHING, Attempt, Moment, Step, Wait
from killick.model import events as e
from killick.presenting.gantt import Scale

SECOND: Final = 1_000_000
HOUR: Final = 3_600 * SECOND
START: Final = 1_000 * HOUR


def attempt(number: int, start: float, end: float | None, **given: Any) -> Attempt:
    ended = None if end is None else START + round(end * SECOND)
    return Attempt(number=number, key=f"k{number}", started_at=START + round(start * SECOND), ended_at=ended, **given)


def step(number: str, start: float, end: float | None, *attempts: Attempt, waits: tuple[Wait, ...] = ()) -> Step:
    return Step(
        number=number, sort="tool", name="work", status="done" if end is not None else "running", seq=int(number),
        intended_at=START + round(start * SECOND), ended_at=None if end is None else START + round(end * SECOND),
        attempts=attempts, waits=waits,
    )  # fmt: skip


def test_parallel_steps_overlap_and_lengths_are_in_proportion() -> None:
    steps = [
        step("1", 0, 4, attempt(1, 0, 4, outcome="returned")),
        step("2", 1, 3, attempt(1, 1, 3, outcome="returned")),
        step("3", 4, 8, attempt(1, 4, 8, outcome="returned")),
    ]
    scale = Scale(steps, START, START + 8 * SECOND)
    places = [(each.left, each.width) for step in steps for each in scale.segments(step)]
    assert places == [(0, 50), (12.5, 25), (50, 50)]
    axis = scale.axis()
    assert (axis.folds, [tick.text for tick in axis.ticks]) == ((), ["0", "2 s", "4 s", "6 s"])


def test_a_wait_of_hours_is_folded_with_its_length_and_seconds_stay_visible() -> None:
    wait = Wait(step="2", waits_for="answer", name="", to=(), opened_at=START + 2 * SECOND, deadline=None,
                closed_at=START + 50 * HOUR, how="answered")  # fmt: skip
    late = 50 * 3_600
    steps = [
        step("1", 0, 2, attempt(1, 0, 2, outcome="returned")),
        step("2", 2, late + 2, attempt(1, late, late + 2, outcome="returned"), waits=(wait,)),
    ]
    scale = Scale(steps, START, START + 60 * HOUR)
    [worked], [waited, paid] = map(scale.segments, steps)
    assert (waited.kind, waited.outcome, waited.seconds) == ("wait", "answered", late - 2)
    assert worked.width == paid.width > 40
    [fold] = scale.axis().folds
    assert (fold.left, fold.text) == (waited.left, "2d 1h")
    assert [each.text for each in scale.axis().ticks] == ["0", "1 s", "2d 2:00:00", "2d 2:00:01"]


def test_each_attempt_is_a_segment_and_a_death_cuts_the_one_it_ended() -> None:
    lapsed = Moment(seq=9, at=START + 3 * SECOND, kind="lease.lapsed", values=NOTHING,
                    event=e.LeaseLapsed(at=START + 3 * SECOND, holder="14532-a"))  # fmt: skip
    tried = step("1", 0, 6, attempt(1, 0, 1, outcome="refused"), attempt(2, 2, None, died=True),
                 attempt(3, 4, 6, outcome="returned"))  # fmt: skip
    scale = Scale([tried, lapsed], START, START + 6 * SECOND)
    assert [(each.outcome, each.left, each.width) for each in scale.segments(tried)] == [
        ("refused", 0, 16.67), ("died", 33.33, 16.67), ("returned", 66.67, 33.33),
    ]  # fmt: skip
    assert scale.axis().deaths == (50,)


def test_an_attempt_whose_step_was_given_its_result_lasts_no_longer_than_is_known() -> None:
    given = step("1", 0, 3_600, attempt(1, 0, None))
    [only] = Scale([given], START, START + HOUR).segments(given)
    assert (only.outcome, only.width) == ("overridden", 0)


def test_a_page_without_time_has_an_axis_and_a_step_that_is_open_reaches_to_now() -> None:
    assert Scale([], START, START).axis().ticks == ()
    at_once = step("1", 0, 0)
    assert (Scale([at_once], START, START).whole(at_once).left, Scale([at_once], START, START).at(START)) == (0, 0)
    running = step("1", 0, None, attempt(1, 0, None))
    [only] = Scale([running], START, START + 5 * SECOND).segments(running)
    assert (only.outcome, only.left, only.width, only.seconds) == (None, 0, 100, 5)


def test_offsets_count_from_the_start_of_the_run_on_a_later_page() -> None:
    later = step("1", 7_200, 7_200.04, attempt(1, 7_200, 7_200.04, outcome="returned"))
    ticks = [each.text for each in Scale([later], START, START + 3 * HOUR).axis().ticks]
    assert ticks == ["2:00:00.00", "2:00:00.01", "2:00:00.02", "2:00:00.03"]
