"""Counts worker crashes that hit a run and decides the response. Reads no clock, touches no store.

A crash is not an outcome: it uses no attempt, fails no run and compensates nothing.

- A crash is a lapsed lease: its holder died or stopped renewing it, without releasing the run. The next holder records
  `lease.lapsed` durably before any agent code runs. So crashes count wherever they happen: in a tool, at the first
  live step, or in agent code between two steps. A holder that releases the run (drain, preemption, a store error) did
  not crash.
- Only consecutive crashes count. A step that ends is progress and resets the count. So does a person who resumes,
  cancels, rewinds or forks the run. A due retry, a new wait, a note or a context change is no progress. A run that
  crashes its own process replays the same steps and crashes at the same place, so its count only grows. The holder
  after a crash writes every step through to the store, so that no step counts as progress twice.
- After each crash a worker backs off before it takes the run: 1 s, doubling to 5 min. `kd.run` and `killick run`
  continue at once and never quarantine a run, because the caller is present.
- After 3 crashes the run is a suspect: a worker runs it alone, in its own process. A run that only shared the process
  with a poison run completes there. A poison run crashes at most 4 workers: 3, and 1 before its steps were recorded.
- When a suspect crashes alone, that explains the crashes it shared with others. A run whose crashes are all explained
  is cleared: its count returns to zero, and it shares a process again.
- After 5 more crashes the run is quarantined until a person resumes or cancels it.
"""

from __future__ import annotations

from typing import Final

import msgspec

SUSPECT_AFTER: Final = 3
"""Consecutive crashes after which a run gets its own process."""

QUARANTINE_AFTER: Final = SUSPECT_AFTER + 5
"""Consecutive crashes after which a run waits for a person."""

BACKOFF_SECONDS: Final = (1.0, 300.0)
"""The backoff after the first crash, and its maximum. It doubles each time."""


class Crashes(msgspec.Struct, array_like=True, frozen=True):
    """The consecutive crashes of a run.

    deaths       how many
    until        no worker takes the run before this time; 0: no backoff
    holders      the last three holders that died while they held other runs too
    alone        how many holders died while they held only this run
    last         the seq of the last `lease.lapsed`
    quarantined  whether the run waits for a person because of them
    """

    deaths: int
    until: int
    holders: tuple[str, ...]
    alone: int
    last: int
    quarantined: bool = False

    @property
    def is_suspect(self) -> bool:
        """Whether a worker must run it in its own process."""
        return self.deaths >= SUSPECT_AFTER


def backoff_us(deaths: int) -> int:
    """Returns the backoff after this many consecutive crashes."""
    first, most = BACKOFF_SECONDS
    return round(min(first * 2.0 ** min(deaths - 1, 60), most) * 1_000_000)


def counted(before: Crashes | None, seq: int, holder: str, until: int, *, alone: bool) -> Crashes:
    """Returns the count after one more crash."""
    before = before or Crashes(0, 0, (), 0, 0)
    holders = before.holders if alone else (*before.holders, holder)[-SUSPECT_AFTER:]
    return Crashes(before.deaths + 1, until, holders, before.alone + alone, seq)
