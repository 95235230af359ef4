"""The log of verifications: how far the current one came, and what the last complete one found.

Losing it loses no truth: a verification without it begins again.
"""

from __future__ import annotations

import contextlib
from typing import Final, NamedTuple

import msgspec

from killick.clock import Clock
from killick.errors import EpochStale, HeadMoved, KillickError, RunExists
from killick.log.log import Log
from killick.log.verify import Report
from killick.log.writer import Entry
from killick.model import events as e
from killick.model.system_events import StoreVerified
from killick.store.records import OWN_AGENTS, OWN_RUNS
from killick.type_init import ready

VERIFICATIONS: Final = f"{OWN_RUNS}verify"
AGENT: Final = f"{OWN_AGENTS}verify"

KEEP_SECONDS: Final = 10.0
"""How often the position is recorded: what an interruption repeats. A shorter verification leaves no record, unless the
store has this log."""

PROBLEMS_MAX: Final = 1_000
"""How many problems are recorded; a store with more is to be verified again."""

_TRIES: Final = 5


class Verification(NamedTuple):
    """A recorded verification."""

    seq: int
    event: StoreVerified

    def report(self, log: Log) -> Report:
        """Returns its report, from which an interrupted one continues."""
        return msgspec.convert(log.data(VERIFICATIONS, self.seq)["report"], ready(Report))


def newest(log: Log) -> Verification | None:
    """Returns the last recorded verification, complete or not."""
    head = log.store.head(VERIFICATIONS)
    return None if head is None else _at(log, head.seq)


def complete(log: Log) -> Verification | None:
    """Returns the last complete verification."""
    found = newest(log)
    if found is None or found.event.done:
        return found
    return _at(log, found.event.last) if found.event.last else None


def _at(log: Log, seq: int) -> Verification | None:
    event = log.event(VERIFICATIONS, seq)
    return Verification(seq, event) if isinstance(event, StoreVerified) else None


class Recorder:
    """Records how far one verification came. `resumed` is the interrupted one that it continues."""

    def __init__(self, log: Log, clock: Clock, *, resumed: Verification | None, every_us: int | None = None) -> None:
        self._log, self._clock, self._every_us = log, clock, every_us
        self._began = clock.now_us() if resumed is None else resumed.event.began
        self._kept = clock.monotonic()

    def keep(self, report: Report, *, now: bool = False) -> None:
        """Records the position, now and then. A store that cannot be written keeps none."""
        if now or self._clock.monotonic() - self._kept >= KEEP_SECONDS:
            self._kept = self._clock.monotonic()
            with contextlib.suppress(KillickError):
                self._record(report, done=False)

    def finish(self, report: Report) -> None:
        """Records the result, if the store has such a log or its worker verifies it."""
        with contextlib.suppress(KillickError):
            if self._every_us is not None or self._log.store.head(VERIFICATIONS) is not None:
                self._record(report, done=True)

    def _record(self, report: Report, *, done: bool) -> None:
        for tried in range(1, _TRIES + 1):
            last, before = complete(self._log), newest(self._log)
            every = self._every_us if before is None or self._every_us is not None else before.event.every
            event = StoreVerified(
                at=self._clock.now_us(), began=self._began, reached=report.reached, runs=report.runs,
                problems=sum(not problem.healed for problem in report.problems), done=done,
                last=0 if last is None else last.seq, every=every,
            )  # fmt: skip
            kept = msgspec.structs.replace(report, problems=report.problems[:PROBLEMS_MAX], explained=[])
            entry = Entry(event, {"report": msgspec.to_builtins(kept)})
            try:
                _append(self._log, entry)
                return
            except (RunExists, HeadMoved, EpochStale):
                if tried == _TRIES:
                    raise


def _append(log: Log, entry: Entry) -> None:
    if log.store.head(VERIFICATIONS) is not None:
        log.open(VERIFICATIONS).append(entry)
    else:
        started = e.RunStarted(at=entry.event.at, run=VERIFICATIONS, agent=AGENT)
        log.begin(VERIFICATIONS).append(Entry(started), entry)


def resume(log: Log) -> Verification | None:
    """Returns the verification that was interrupted, if any."""
    with contextlib.suppress(KillickError):
        found = newest(log)
        return found if found is not None and not found.event.done else None
    return None
