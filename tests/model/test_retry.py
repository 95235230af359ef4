"""How durations and rates are read, and how long a step backs off."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from killick.errors import DeclarationRefused, DurationRefused
from killick.model.retry import SECONDS_MAX, Retry, rate, seconds


@pytest.mark.parametrize(
    ("duration", "expected"),
    [
        (0, 0.0),
        (90, 90.0),
        (0.25, 0.25),
        (timedelta(minutes=2, milliseconds=5), 120.005),
        ("90s", 90.0),
        ("15m", 900.0),
        ("72h", 259_200.0),
        ("3d", 259_200.0),
        ("2w", 1_209_600.0),
        ("500ms", 0.5),
        ("1h30m", 5_400.0),
        ("1.5h", 5_400.0),
        ("1.1h", 3_960.0),
        (" 1 h  30 m ", 5_400.0),
        ("1d 2h 3m 4s 5ms", 93_784.005),
        ("2 minutes 1 second", 121.0),
        ("0s", 0.0),
    ],
)
def test_a_duration_is_a_number_of_seconds_or_text(duration: Any, expected: float) -> None:
    found = seconds(duration)
    assert found == expected
    assert type(found) is float


@pytest.mark.parametrize(
    "nonsense",
    [
        "", " ", "s", "90", "1.5", "-3s", "+3s", "3 parsecs", "3s!", "!3s", "1h30", "h1", "1,5h", "1e3s", ".5s", "5.s",
        "1H", "nan", "infs", "٣s", "1m1m", "1s1h", "3s 4", "9" * 400 + "s", "9" * 100_000 + "s", "9" * 40 + "w",
        "1s\x00",
        -1, -0.001, float("nan"), float("inf"), float("-inf"), 10**400, -(10**400), True, False, None, b"3s", [3],
        timedelta(seconds=-1), timedelta.max, SECONDS_MAX + 1,
    ],
)  # fmt: skip
def test_what_is_no_duration_is_refused(nonsense: Any) -> None:
    with pytest.raises(DurationRefused) as caught:
        seconds(nonsense)
    assert caught.value.text is nonsense


@given(st.integers(0, 10**9), st.sampled_from([("s", 1), ("m", 60), ("h", 3600), ("d", 86_400)]))
def test_text_with_one_unit_is_exact(number: int, unit: tuple[str, int]) -> None:
    if number * unit[1] <= SECONDS_MAX:
        assert seconds(f"{number}{unit[0]}") == number * unit[1]


@given(st.text(alphabet="0123456789. smhdw-/", max_size=12))
def test_any_text_is_read_or_refused_and_nothing_else(text: str) -> None:
    with suppress(DurationRefused):
        assert 0 <= seconds(text) <= SECONDS_MAX
    with suppress(DurationRefused):
        assert min(rate(text)) > 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10/min", (10, 60.0)),
        ("5/s", (5, 1.0)),
        ("100/h", (100, 3_600.0)),
        ("3/2m", (3, 120.0)),
        ("1000/day", (1_000, 86_400.0)),
        (" 7 / week ", (7, 604_800.0)),
        ("1/500ms", (1, 0.5)),
        ("2/1h30m", (2, 5_400.0)),
    ],
)
def test_a_rate_is_so_many_in_so_much_time(text: str, expected: tuple[int, float]) -> None:
    assert rate(text) == expected


@pytest.mark.parametrize(
    "nonsense",
    [
        "", "10", "/min", "10/", "0/min", "-1/s", "1.5/s", "10/0s", "10/-1s", "ten/min", "10/parsec", "10/min/s",
        "10 per min", "10/5", "1/9999999999w", "9" * 19 + "/s", 10, None, ("10", "min"),
    ],
)  # fmt: skip
def test_what_is_no_rate_is_refused_with_an_example(nonsense: Any) -> None:
    with pytest.raises(DurationRefused, match="10/min"):
        rate(nonsense)


def test_durations_of_a_retry_may_be_text_and_are_kept_as_seconds() -> None:
    retry = Retry(attempts=4, first="1s", max="5m", on=ConnectionError)
    assert (retry.attempts, retry.first, retry.max, retry.on) == (4, 1.0, 300.0, (ConnectionError,))
    assert retry == Retry(4, timedelta(seconds=1), max=300, on=(ConnectionError,))
    assert hash(retry) == hash(Retry(4, 1.0, max=300.0, on=(ConnectionError,)))


@pytest.mark.parametrize(
    "options",
    [
        {"attempts": 0}, {"attempts": -1}, {"attempts": True}, {"attempts": 2.0}, {"attempts": "3"},
        {"factor": 0.5}, {"factor": float("nan")}, {"factor": float("inf")}, {"factor": "2"}, {"factor": True},
        {"jitter": -0.1}, {"jitter": 1.1}, {"jitter": float("nan")}, {"jitter": None},
        {"on": ValueError("x")}, {"on": int}, {"on": (ValueError, "KeyError")}, {"on": "ValueError"}, {"on": None},
    ],
)  # fmt: skip
def test_a_retry_that_cannot_work_is_refused_by_the_option_that_is_wrong(options: dict[str, Any]) -> None:
    with pytest.raises(DeclarationRefused, match=f"Retry: {next(iter(options))}="):
        Retry(**options)


@pytest.mark.parametrize("options", [{"first": "soon"}, {"first": -1}, {"max": "3 parsecs"}, {"max": float("inf")}])
def test_a_retry_with_a_duration_that_is_none_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(DurationRefused):
        Retry(**options)


def test_backoff_grows_by_the_factor_up_to_the_most() -> None:
    retry = Retry(first=1, factor=3, max=20, jitter=0)
    assert [retry.delay_seconds(failed, 0.5) for failed in (1, 2, 3, 4, 5)] == [1, 3, 9, 20, 20]


def test_jitter_takes_up_to_its_share_away() -> None:
    retry = Retry(first=8, max=100, jitter=0.25)
    assert retry.delay_seconds(1, 0.0) == 8
    assert retry.delay_seconds(1, 0.5) == 7
    assert retry.delay_seconds(1, 1.0) == 6


@pytest.mark.parametrize("failed", [10**3, 10**9, 10**400])
def test_no_number_of_failures_is_too_large(failed: int) -> None:
    assert Retry(jitter=0).delay_seconds(failed, 0.0) == 60
    assert Retry(first=0).delay_seconds(failed, 0.0) == 0
    assert Retry(factor=1, jitter=0).delay_seconds(failed, 0.0) == 0.5


@given(
    first=st.floats(0, 1e6), factor=st.floats(1, 1e300), most=st.floats(0, 1e6), jitter=st.floats(0, 1),
    failed=st.integers(1, 10**6), fraction=st.floats(0, 1, exclude_max=True),
)  # fmt: skip
def test_a_backoff_is_never_negative_nor_longer_than_the_most(
    first: float, factor: float, most: float, jitter: float, failed: int, fraction: float
) -> None:
    retry = Retry(first=first, factor=factor, max=most, jitter=jitter)
    assert 0 <= retry.delay_seconds(failed, fraction) <= most
