"""When schedules want something: never twice, never backwards, whatever clocks and time zones do."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from killick.definitions.schedules import (
    ALL_MAX,
    COUNT_MAX,
    LATE_US,
    Cron,
    Dues,
    Every,
    Schedule,
    decide,
    in_us,
    moment,
    stamp,
)
from seeds import repeats

HOUR = 3_600_000_000
DAY = 24 * HOUR


def us(*parts: int) -> int:
    return in_us(datetime(*parts, tzinfo=UTC))  # type: ignore[arg-type,misc]


def times(cron: Cron, after: int, count: int) -> list[str]:
    """The next times, as the clock on the wall shows them, with its distance from UTC."""
    found = []
    for _ in range(count):
        after = cron.after(after)
        found.append(moment(after, cron.tz).strftime("%d %H:%M %z"))
    return found


# clocks that change -------------------------------------------------------------------------------

SPRING = us(2026, 3, 28, 23)
"""The night in which the clocks of Berlin go from 02:00 to 03:00."""

AUTUMN = us(2026, 10, 24, 22)
"""The night in which they go from 03:00 back to 02:00."""


def test_a_time_that_the_clock_leaves_out_comes_when_the_clock_has_jumped() -> None:
    assert times(Cron("30 2 * * *", "Europe/Berlin"), SPRING, 2) == ["29 03:00 +0200", "30 02:30 +0200"]


def test_two_times_that_the_clock_leaves_out_come_as_one() -> None:
    assert times(Cron("0,30 2 * * *", "Europe/Berlin"), SPRING, 2) == ["29 03:00 +0200", "30 02:00 +0200"]
    assert times(Cron("30 2,3 * * *", "Europe/Berlin"), SPRING, 2) == ["29 03:00 +0200", "29 03:30 +0200"]


def test_a_time_that_the_clock_shows_twice_comes_the_first_time_only() -> None:
    assert times(Cron("30 2 * * *", "Europe/Berlin"), AUTUMN, 2) == ["25 02:30 +0200", "26 02:30 +0100"]


def test_what_comes_every_so_many_minutes_goes_by_real_time() -> None:
    assert times(Cron("*/30 * * * *", "Europe/Berlin"), SPRING + 2 * HOUR - HOUR // 2, 3) == [
        "29 03:00 +0200",
        "29 03:30 +0200",
        "29 04:00 +0200",
    ]
    assert times(Cron("*/30 * * * *", "Europe/Berlin"), AUTUMN + HOUR + HOUR // 2, 5) == [
        "25 02:00 +0200",
        "25 02:30 +0200",
        "25 02:00 +0100",
        "25 02:30 +0100",
        "25 03:00 +0100",
    ]


def test_who_looks_between_the_two_times_that_look_the_same_is_not_sent_back() -> None:
    second = us(2026, 10, 25, 1, 10)
    assert moment(second, "Europe/Berlin").strftime("%H:%M %z") == "02:10 +0100"
    assert times(Cron("30 2 * * *", "Europe/Berlin"), second, 1) == ["26 02:30 +0100"]


ZONES = st.sampled_from(["UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "America/Havana"])
EXPRESSIONS = st.sampled_from(
    ["30 2 * * *", "*/7 * * * *", "0 0 * * *", "15 */5 * * mon-fri", "0 9 1 * *", "59 1,2,3 * * *", "0 0 L * *"]
)


@settings(max_examples=repeats(37, 150))
@given(EXPRESSIONS, ZONES, st.integers(us(2025, 1, 1), us(2027, 1, 1)))
def test_the_time_after_another_is_later(expression: str, tz: str, at: int) -> None:
    cron = Cron(expression, tz)
    for _ in range(5):
        later = cron.after(at)
        assert later > at
        at = later


@settings(max_examples=repeats(15, 60))
@given(EXPRESSIONS, ZONES, st.integers(us(2026, 1, 1), us(2027, 1, 1)), st.integers(1, 40 * DAY))
def test_from_wherever_one_looks_the_same_times_come(expression: str, tz: str, at: int, later: int) -> None:
    """What one worker finds due step by step, another finds at once."""
    cron = Cron(expression, tz)
    first = cron.after(at)
    if first > at + later:
        return
    dues = cron.dues(first, at + later)
    middle = at + later // 2
    found = [*cron.dues(first, middle).latest] if first <= middle else []
    rest = cron.after(middle)
    found += cron.dues(rest, at + later).latest if rest <= at + later else ()
    assert tuple(found[-ALL_MAX - 1 :])[-len(dues.latest) :] == dues.latest


# what is due --------------------------------------------------------------------------------------


def test_an_interval_is_counted_from_whole_seconds() -> None:
    assert Every(600_000_000).begin(us(2026, 11, 15, 9) + 123_456) == us(2026, 11, 15, 9, 10)
    assert Every(250_000).begin(1_000_999_999) == 1_001_249_000


@given(st.integers(0, 10 * DAY), st.integers(100_000, DAY))
def test_an_interval_keeps_its_grid(late: int, interval: int) -> None:
    first = us(2026, 11, 15)
    dues = Every(interval).dues(first, first + late)
    assert (dues.next - first) % interval == 0
    assert first + late < dues.next <= first + late + interval
    assert dues.count == late // interval + 1
    assert dues.latest[-1] == dues.next - interval
    assert len(dues.latest) == min(dues.count, ALL_MAX + 1)


def test_years_of_minutes_are_not_gone_through_one_by_one() -> None:
    now = us(2026, 11, 15)
    dues = Cron("* * * * *").dues(us(2020, 1, 1), now)
    assert dues.count == COUNT_MAX
    assert dues.latest[-1] == now
    assert dues.latest[0] == now - ALL_MAX * 60_000_000
    assert dues.next == now + 60_000_000


def test_the_latest_times_are_found_where_they_lie_far_back() -> None:
    """Every minute of the first of a month, asked in its middle, after a long time."""
    dues = Cron("* * 1 * *").dues(us(2025, 1, 1), us(2026, 11, 15))
    assert dues.latest[-1] == us(2026, 11, 1, 23, 59)
    assert dues.next == us(2026, 12, 1)


# deciding -----------------------------------------------------------------------------------------

FIRST = us(2026, 11, 15, 9)


def due(count: int) -> Dues:
    return Every(HOUR).dues(FIRST, FIRST + (count - 1) * HOUR)


def test_what_is_due_just_now_is_fired_whatever_the_policy() -> None:
    for missed in ("skip", "once", "all"):
        decision = decide(due(1), FIRST + LATE_US, missed)  # type: ignore[arg-type]
        assert (decision.fires, decision.passed) == ((FIRST,), None)


def test_what_is_late_is_passed_or_made_up_for() -> None:
    now = FIRST + 3 * HOUR + LATE_US + 1
    times = tuple(FIRST + n * HOUR for n in range(4))
    assert decide(due(4), now, "skip").fires == ()
    assert decide(due(4), now, "skip").passed == (times[0], times[3], 4)
    assert decide(due(4), now, "once").fires == times[3:]
    assert decide(due(4), now, "once").passed == (times[0], times[2], 3)
    assert decide(due(4), now, "all").fires == times
    assert decide(due(4), now, "all").passed is None


def test_one_that_is_followed_by_another_was_missed_even_if_it_is_young() -> None:
    dues = Every(1_000_000).dues(FIRST, FIRST + 4_000_000)
    assert decide(dues, FIRST + 4_000_000, "skip").fires == (FIRST + 4_000_000,)
    assert decide(dues, FIRST + 4_000_000, "skip").passed == (FIRST, FIRST + 3_000_000, 4)


def test_all_has_an_end() -> None:
    decision = decide(due(250), FIRST + 249 * HOUR, "all")
    assert len(decision.fires) == ALL_MAX
    assert decision.fires[-1] == FIRST + 249 * HOUR
    assert decision.passed == (FIRST, FIRST + 149 * HOUR, 150)


@settings(max_examples=repeats(25, 100))
@given(
    st.sampled_from([Every(HOUR), Every(90_000_000), Cron("30 2 * * *", "Europe/Berlin"), Cron("*/20 * * * *")]),
    st.sampled_from(["skip", "once", "all"]),
    st.lists(st.integers(-HOUR, 2 * DAY), min_size=1, max_size=8),
    st.integers(us(2026, 3, 27), us(2026, 3, 30)),
)
def test_nothing_is_decided_twice_and_nothing_forgotten(
    schedule: Schedule, missed: str, jumps: list[int], begin: int
) -> None:
    """Whichever way the clock goes, the decisions add up to every time there was, each once."""
    due_us, now = schedule.begin(begin), begin
    first, furthest = due_us, begin
    fired: list[int] = []
    passed = 0
    for jump in jumps:
        now += jump
        furthest = max(furthest, now)
        if due_us > now:
            continue
        dues = schedule.dues(due_us, now)
        decision = decide(dues, now, missed)  # type: ignore[arg-type]
        fired += decision.fires
        passed += decision.passed[2] if decision.passed is not None else 0
        assert dues.next > now
        due_us = dues.next
    assert fired == sorted(set(fired))
    assert len(fired) + passed == (schedule.dues(first, furthest).count if first <= furthest else 0)


# moments ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at", "said"),
    [
        (us(2026, 11, 15, 9), "2026-11-15T09:00Z"),
        (us(2026, 11, 15, 9, 0, 30), "2026-11-15T09:00:30Z"),
        (us(2026, 11, 15, 9) + 250_000, "2026-11-15T09:00:00.250Z"),
    ],
)
def test_a_stamp_is_as_exact_as_it_has_to_be(at: int, said: str) -> None:
    assert stamp(at) == said


def test_moments_come_back() -> None:
    at = us(2026, 11, 15, 9, 30)
    assert in_us(moment(at, "Europe/Berlin")) == at
    assert moment(at, "Europe/Berlin").utcoffset() == timedelta(hours=1)
