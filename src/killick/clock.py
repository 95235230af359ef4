"""The only module that reads a clock. All others take a Clock."""

from __future__ import annotations

import math
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


DOUBT_SECONDS: Final = 60.0
"""For how long a wall clock must agree with monotonic time before its word alone ends a wait."""

SET_BACK_US: Final = 60_000_000
"""A record that is later than now by more was made while the clock was ahead."""

_STEP_SECONDS: Final = 1.0
_SLEW: Final = 0.001
"""A clock that differs by more was set. One that is only kept exact is slewed by less."""


class ClockWatch:
    """Watches one wall clock: since when it has agreed with monotonic time. Nothing else says whether to trust it."""

    def __init__(self) -> None:
        self._since: tuple[float, int] | None = None
        self._last = 0.0, 0
        self.set_backs = 0
        """How often the clock was seen to go back."""

    def look(self, clock: Clock) -> tuple[float, int]:
        """Compares both clocks; returns since when they agree, as monotonic seconds and as wall time."""
        monotonic, now_us = clock.monotonic(), clock.now_us()
        passed, ahead_us = monotonic - self._last[0], now_us - self._last[1]
        step = ahead_us / 1_000_000 - passed
        if self._since is None:
            self._since = monotonic, now_us
        elif abs(step) > _STEP_SECONDS + _SLEW * abs(passed):
            self._since = monotonic, now_us
            self.set_backs += step < 0
        self._last = monotonic, now_us
        return self._since


class Clock(Protocol):
    """Wall time for the log, monotonic time for measurements."""

    watch: ClockWatch

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


def doubt_seconds(clock: Clock, past_us: int, length_seconds: float = math.inf) -> float:
    """Returns how much longer not to believe a clock that a time is past: one that was ahead for a moment must end no
    wait. 0: the process watched the clock from before that time on, or for a minute, or for as long as the wait lasts.

    past_us         the time, which is past by this clock
    length_seconds  how long the wait lasts from its beginning
    """
    since, since_us = clock.watch.look(clock)
    if past_us >= since_us:
        return 0.0
    return max(min(DOUBT_SECONDS, length_seconds) - (clock.monotonic() - since), 0.0)


def meant_us(until_us: int, since_us: int, now_us: int) -> int:
    """Returns when a duration is over that began at `since_us`. If that is later than now, the clock was ahead then and
    was set back: the whole duration begins now."""
    return until_us if since_us <= now_us + SET_BACK_US else now_us + until_us - since_us


class SystemClock:
    """The machine's own clock. All of a process are watched as one."""

    watch = ClockWatch()
    monotonic = staticmethod(time.monotonic)
    thread_seconds = staticmethod(time.thread_time)

    def now_us(self) -> int:
        return time.time_ns() // 1_000

    def nap_seconds(self, seconds: float) -> float:
        return seconds


SystemClock.watch.look(SystemClock())


class ManualClock:
    """A clock that only the test moves, for tests and simulation."""

    def __init__(self, now_us: int = 1_750_000_000_000_000) -> None:
        self._now_us = now_us
        self._monotonic = 0.0
        self.watch = ClockWatch()
        self.watch.look(self)

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
        self.watch.look(self)


class LeapingClock(ManualClock):
    """A manual clock that jumps forward when a caller would sleep, so that days pass instantly."""

    def nap_seconds(self, seconds: float) -> float:
        self.advance(max(seconds, 0.0))
        return 0.0
