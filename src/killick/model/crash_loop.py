"""Counts the deaths of the processes that held a run, and decides what follows. Reads no clock, touches no store.

A death is not an outcome: it uses up no attempt, fails no run and compensates nothing. It is counted for the run.

- A death is a lease that lapsed: its holder died, or stopped keeping it, and did not let the run go. The next holder
  records it as `lease.lapsed`, durably, before any code of the agent runs. So deaths are counted wherever they happen:
  in a tool, at the first live step, or in agent code between two steps. A holder that lets the run go (drain,
  preemption, an error of the store) did not die.
- Deaths are counted in a row. A step that ends is progress and sets the count to zero; so does a person who resumes,
  cancels, rewinds or forks the run. A retry that is due, a wait that opens, a note or a context change is no progress.
  A run that its own code kills replays the same steps and dies in the same place, so its count only grows. A taking
  after a death writes every step through to the store, so that no step is progress twice.
- After each death a worker backs off before it takes the run: 1 s, doubling to 5 min. `kd.run` and `killick run` go on
  at once, and never quarantine a run: the caller is there to see it.
- After 3 deaths the run is a suspect: a worker runs it alone, in a process of its own. An innocent neighbour of a
  poison run completes there. A poison run kills at most 4 workers: 3, and 1 before its steps were on record.
- When a suspect dies alone, it explains the deaths that it shared. A run all of whose deaths are explained so is
  cleared: its count is zero again, and it runs in company.
- After 5 more deaths the run is quarantined: it waits for a person, who resumes or cancels it.
"""

from __future__ import annotations

from typing import Final

import msgspec

SUSPECT_AFTER: Final = 3
"""Deaths in a row after which a run is run alone."""

QUARANTINE_AFTER: Final = SUSPECT_AFTER + 5
"""Deaths in a row after which a run waits for a person."""

BACKOFF_SECONDS: Final = (1.0, 300.0)
"""How long a worker waits after the first death, and at the most; doubled each time."""


class Crashes(msgspec.Struct, array_like=True, frozen=True):
    """The deaths of a run in a row.

    deaths       how many
    until        before when no worker takes the run; 0: at once
    holders      the holders that died in company of other runs, the last three
    alone        how many deaths were alone
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
        """Whether the run is to be run alone."""
        return self.deaths >= SUSPECT_AFTER


def backoff_us(deaths: int) -> int:
    """How long a worker leaves a run alone after so many deaths in a row."""
    first, most = BACKOFF_SECONDS
    return round(min(first * 2.0 ** min(deaths - 1, 60), most) * 1_000_000)


def counted(before: Crashes | None, seq: int, holder: str, until: int, *, alone: bool) -> Crashes:
    """The deaths in a row after one more."""
    before = before or Crashes(0, 0, (), 0, 0)
    holders = before.holders if alone else (*before.holders, holder)[-SUSPECT_AFTER:]
    return Crashes(before.deaths + 1, until, holders, before.alone + alone, seq)
