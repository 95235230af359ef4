"""The due times of a schedule, and the policy for missed ones. Reads no clock.

Times are microseconds since the epoch. Each due time is later than the one before, even if clocks or time zones
change.
"""

from __future__ import annotations

from collections import deque
from datetime import UTC, datetime, timedelta, tzinfo
from functools import lru_cache
from typing import Final, Literal, TypeAlias
from zoneinfo import ZoneInfo

import msgspec
from cronsim import CronSim

Missed = Literal["skip", "once", "all"]
Overlap = Literal["skip", "queue", "cancel", "allow"]

ALL_MAX: Final = 100
"""The maximum number of missed firings that start runs: the latest ones."""

COUNT_MAX: Final = 10_000
"""The maximum number of missed firings of a cron expression that are counted."""

LATE_US: Final = 60_000_000
"""A firing that is later than this was missed."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_US: Final = timedelta(microseconds=1)


class Dues(msgspec.Struct, frozen=True):
    """All times due by now: the first, their number, the latest ones in order, and the next one."""

    first: int
    count: int
    latest: tuple[int, ...]
    next: int


class Every(msgspec.Struct, frozen=True):
    """A fixed interval, counted from its start; slow firings do not delay later ones."""

    interval_us: int

    def begin(self, now_us: int) -> int:
        """The first time, for a schedule that begins now."""
        # Whole seconds make ids that can be read; below a second there are none.
        whole = 1_000_000 if self.interval_us % 1_000_000 == 0 else 1_000
        return now_us - now_us % whole + self.interval_us

    def dues(self, first: int, now_us: int) -> Dues:
        """All times from one that was due, up to now."""
        count = (now_us - first) // self.interval_us + 1
        last = first + (count - 1) * self.interval_us
        latest = range(last - (min(count, ALL_MAX + 1) - 1) * self.interval_us, last + 1, self.interval_us)
        return Dues(first, count, tuple(latest), last + self.interval_us)


class Cron(msgspec.Struct, frozen=True):
    """The times of a cron expression, read in a time zone."""

    expression: str
    tz: str = "UTC"

    def begin(self, now_us: int) -> int:
        return self.after(now_us)

    def after(self, us: int) -> int:
        """The first time later than this. In an hour that clocks repeat, the calendar alone would go back."""
        times = CronSim(self.expression, moment(us, self.tz))
        while (found := in_us(next(times))) <= us:
            pass
        return found

    def dues(self, first: int, now_us: int) -> Dues:
        latest: deque[int] = deque(maxlen=ALL_MAX + 1)
        count, at = 0, first
        while at <= now_us:
            latest.append(at)
            count += 1
            at = self.after(at)
            if count == COUNT_MAX:
                at = self._near(at, now_us, back=2 * (at - latest[0]))
        return Dues(first, min(count, COUNT_MAX), tuple(latest), at)

    def _near(self, at: int, now_us: int, *, back: int) -> int:
        """A time shortly before the latest ones, so that years of minutes are not enumerated."""
        while back < now_us - at:
            found = self.after(now_us - back)
            if found <= now_us:
                return found
            back *= 2
        return at


Schedule: TypeAlias = Every | Cron


class Decision(msgspec.Struct, frozen=True):
    """The decision on due times: those to fire for, and the first, the last and the number of those skipped."""

    fires: tuple[int, ...]
    passed: tuple[int, int, int] | None


def decide(dues: Dues, now_us: int, missed: Missed) -> Decision:
    """Decides on due times. A time is missed if it is late, or if a later one is due too."""
    latest = dues.latest
    if missed == "all":
        fires = latest[-ALL_MAX:]
    elif missed == "once" or now_us - latest[-1] <= LATE_US:
        fires = latest[-1:]
    else:
        fires = ()
    count = dues.count - len(fires)
    return Decision(fires, (dues.first, latest[-len(fires) - 1], count) if count > 0 else None)


# moments ------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def zone(tz: str) -> tzinfo:
    """A time zone by its name. Raises the errors of ZoneInfo."""
    return UTC if tz == "UTC" else ZoneInfo(tz)


def moment(us: int, tz: str = "UTC") -> datetime:
    """Converts microseconds to a datetime in a time zone."""
    return (_EPOCH + timedelta(microseconds=us)).astimezone(zone(tz))


def in_us(at: datetime) -> int:
    """Converts a datetime to microseconds."""
    return (at.astimezone(UTC) - _EPOCH) // _US


def stamp(us: int) -> str:
    """A time as ids name it: to the minute, or as exactly as necessary."""
    exactness = "minutes" if us % 60_000_000 == 0 else "seconds" if us % 1_000_000 == 0 else "milliseconds"
    return moment(us).replace(tzinfo=None).isoformat(timespec=exactness) + "Z"
