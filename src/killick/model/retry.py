"""Durations, rates and retry policies. Reads no clock and draws no random numbers."""

from __future__ import annotations

import math
import re
from datetime import timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from killick.errors import DeclarationRefused, DurationRefused

Duration: TypeAlias = float | int | str | timedelta
"""A number of seconds, or text such as "90s" or "1h30m"."""

ExceptionTypes: TypeAlias = type[BaseException] | tuple[type[BaseException], ...]

SECONDS_MAX: Final = 1000 * 366 * 86_400
"""A thousand years. A longer duration would not fit a microsecond timestamp."""

_UNITS: Final = {
    name: Decimal(length)
    for length, names in {
        "0.001": "ms",
        "1": "s sec second seconds",
        "60": "m min minute minutes",
        "3600": "h hour hours",
        "86400": "d day days",
        "604800": "w week weeks",
    }.items()
    for name in names.split()
}
_PART: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]+)\s*")
_RATE: Final = re.compile(r"\s*([0-9]{1,18})\s*/(.*)")

_RATE_EXPECTED: Final = "a rate such as '10/min', '5/s', '100/h' or '3/2m'"


def seconds(duration: Duration) -> float:
    """Returns a duration in seconds. Text names its units, the largest first."""
    if isinstance(duration, str):
        found = _seconds_of_text(duration)
    elif isinstance(duration, timedelta):
        found = duration.total_seconds()
    else:
        found = _finite(duration)
    if found is None or found < 0:
        raise DurationRefused(duration)
    if found > SECONDS_MAX:
        raise DurationRefused(duration, expected="at most a thousand years")
    return found


def rate(text: str) -> tuple[int, float]:
    """Parses a rate into a count and its seconds."""
    match = _RATE.fullmatch(text) if isinstance(text, str) else None  # pyright: ignore[reportUnnecessaryIsInstance]
    if match is not None:
        count, per = int(match[1]), match[2].strip()
        per_seconds = _seconds_of_text(f"1{per}" if per in _UNITS else per)
        if count and per_seconds and per_seconds <= SECONDS_MAX:
            return count, per_seconds
    raise DurationRefused(text, expected=_RATE_EXPECTED)


def _seconds_of_text(text: str) -> float | None:
    total, above, at = Decimal(0), Decimal("Infinity"), 0
    while match := _PART.match(text, at):
        unit = _UNITS.get(match[2])
        if unit is None or unit >= above:
            return None
        # Decimals, so that 1.1h is 3960 seconds and not a little more.
        total, above, at = total + Decimal(match[1]) * unit, unit, match.end()
    return float(total) if at and at == len(text) else None


def _finite(number: object) -> float | None:
    if isinstance(number, bool) or not isinstance(number, int | float):
        return None
    try:
        return float(number) if math.isfinite(number) else None
    except OverflowError:
        return None


class Retry(msgspec.Struct, frozen=True):
    """A retry policy: the number of attempts, the errors, and the backoff. Raises DeclarationRefused.

    attempts  the number of attempts in total
    first     the backoff after the first failure
    factor    the factor by which each backoff grows
    max       the longest backoff
    jitter    the fraction of a backoff that jitter may remove
    on        retry only after these exceptions; by default after every Exception except programming errors
    never     never retry after these exceptions

        retry = killick.Retry(attempts=5, first="1s", on=(TimeoutError,))
    """

    attempts: int = 3
    first: float = 0.5
    factor: float = 2.0
    max: float = 60.0
    jitter: float = 0.25
    on: tuple[type[BaseException], ...] = ()
    never: tuple[type[BaseException], ...] = ()

    if TYPE_CHECKING:
        # The accepted types are wider than the stored ones.
        def __init__(
            self,
            attempts: int = 3,
            first: Duration = 0.5,
            factor: float = 2.0,
            max: Duration = 60.0,  # noqa: A002
            jitter: float = 0.25,
            on: ExceptionTypes = (),
            never: ExceptionTypes = (),
        ) -> None: ...

    def __post_init__(self) -> None:
        if not isinstance(self.attempts, int) or isinstance(self.attempts, bool) or self.attempts < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DeclarationRefused("Retry", f"attempts={self.attempts!r}; give a whole number from 1")
        factor, jitter = _finite(self.factor), _finite(self.jitter)
        if factor is None or factor < 1:
            raise DeclarationRefused("Retry", f"factor={self.factor!r}; give a number from 1")
        if jitter is None or not 0 <= jitter <= 1:
            raise DeclarationRefused("Retry", f"jitter={self.jitter!r}; give a share from 0 to 1")
        kept = {
            "first": seconds(self.first),
            "max": seconds(self.max),
            "on": exception_types("Retry", "on", self.on),
            "never": exception_types("Retry", "never", self.never),
        }
        for name, value in kept.items():
            msgspec.structs.force_setattr(self, name, value)

    def delay_seconds(self, failed: int, fraction: float) -> float:
        """Returns the backoff after this many failures; `fraction`, from [0, 1), is the jitter."""
        try:
            delay = self.first * self.factor ** (failed - 1)
        except OverflowError:
            delay = self.max if self.first else 0.0
        return min(delay, self.max) * (1 - self.jitter * fraction)


def retry_of(about: str, given: object, default: Retry) -> Retry:
    """Parses a retry option: a Retry, or the number of attempts for the default policy."""
    if isinstance(given, Retry):
        return given
    if not isinstance(given, int):
        raise DeclarationRefused(about, f"retry={given!r}; give a number of attempts, or killick.Retry(…)")
    return msgspec.structs.replace(default, attempts=given)


def exception_types(about: str, option: str, given: object) -> tuple[type[BaseException], ...]:
    """Parses an option of one or several exception classes."""
    listed: tuple[object, ...] = tuple(given) if isinstance(given, tuple | list | set | frozenset) else (given,)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    kept = tuple(kind for kind in listed if isinstance(kind, type) and issubclass(kind, BaseException))
    if len(kept) < len(listed):
        problem = f"{option}={given!r}; give exception classes, as in {option}=(ConnectionError,)"
        raise DeclarationRefused(about, problem)
    return kept
