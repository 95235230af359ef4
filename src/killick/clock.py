"""The only module that reads a clock. All others take a Clock."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Final, Protocol

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_START: Final = _EPOCH.replace(tzinfo=None)
_LAST_US: Final = 253_402_300_799_999_999
"""The last microsecond of the year 9999, the last that RFC 3339 can write."""


def timestamp(at_us: int) -> str:
    """A time as RFC 3339 in UTC, always with microseconds: as texts they sort in their order."""
    return (_START + timedelta(microseconds=min(max(at_us, 0), _LAST_US))).isoformat("T", "microseconds") + "Z"


def microseconds(timestamp: str) -> int:
    """The microseconds since the epoch of a `timestamp`."""
    return (datetime.fromisoformat(timestamp) - _EPOCH) // timedelta(microseconds=1)


class Clock(Protocol):
    """Wall time for the log, monotonic time for measurements."""

    def now_us(self) -> int:
        """Microseconds since the epoch, UTC."""
        ...

    def monotonic(self) -> float:
        """Monotonic seconds."""
        ...

    def thread_seconds(self) -> float:
        """The CPU seconds of this thread."""
        ...

    def nap_seconds(self, seconds: float) -> float:
        """Returns how long to really sleep before checking again whether that much time has passed."""
        ...


class SystemClock:
    """The machine's own clock."""

    monotonic = staticmethod(time.monotonic)
    thread_seconds = staticmethod(time.thread_time)

    def now_us(self) -> int:
        return time.time_ns() // 1_000

    def nap_seconds(self, seconds: float) -> float:
        return seconds


class ManualClock:
    """A clock that only the test moves, for tests and simulation."""

    def __init__(self, now_us: int = 1_750_000_000_000_000) -> None:
        self._now_us = now_us
        self._monotonic = 0.0

    def now_us(self) -> int:
        return self._now_us

    def monotonic(self) -> float:
        return self._monotonic

    def thread_seconds(self) -> float:
        return 0.0

    def nap_seconds(self, seconds: float) -> float:
        return 0.001

    def advance(self, seconds: float) -> None:
        """Moves both readings forward together."""
        self._now_us += round(seconds * 1_000_000)
        self._monotonic += seconds

    def set_wall(self, now_us: int) -> None:
        """Moves the wall clock alone, as an administrator or daylight saving would."""
        self._now_us = now_us


class LeapingClock(ManualClock):
    """A manual clock that jumps forward when a caller would sleep, so that days pass instantly."""

    def nap_seconds(self, seconds: float) -> float:
        self.advance(max(seconds, 0.0))
        return 0.0
