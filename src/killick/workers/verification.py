"""A worker's verification of its store: run by run, at a small share of one thread, one worker of a store at a time.

It verifies logs, not the store's tables. Its position and results are in the log of verifications, whose lease chooses
the worker.
"""

from __future__ import annotations

import logging
import threading
from typing import Final

from killick.engine.engine import Engine
from killick.engine.leases import LEASE_SECONDS
from killick.errors import LogError, RunBusy
from killick.log.verification import VERIFICATIONS, Recorder, newest
from killick.log.verify import Report, verify
from killick.logger import get_logger

logger: Final = get_logger("killick.worker")

SHARE: Final = 0.1
"""The share of its thread's time in which it reads the store."""

_NAP_SECONDS_MAX: Final = 30.0


class _Stopped(BaseException):
    """The worker stops, or lost the lease. No error of a run."""


class BackgroundVerification:
    """Verifies the store when its last complete verification is older than the interval."""

    def __init__(self, engine: Engine, every_seconds: float, *, share: float = SHARE) -> None:
        self._engine = engine
        self._every_us = round(every_seconds * 1_000_000)
        self._share = share
        self._stopped = threading.Event()
        self._is_lost = False
        self._since = 0.0

    def stop(self) -> None:
        """Ends at the next page of a run; another worker continues there."""
        self._stopped.set()

    def _lose(self, _: LogError) -> None:
        self._is_lost = True

    def look(self) -> Report | None:
        """Verifies the store, if that is due and no other worker does. Returns the report of a complete one."""
        log, clock = self._engine.log, self._engine.clock
        found = newest(log)
        if found is not None and found.event.done and clock.now_us() - found.event.at < self._every_us:
            return None
        resumed = found if found is not None and not found.event.done else None
        recorder = Recorder(log, clock, resumed=resumed, every_us=self._every_us)
        if found is None:
            recorder.keep(Report(), now=True)  # there is no lease without a log
        try:
            head = self._engine.store.lease(VERIFICATIONS, self._engine.holder, seconds=LEASE_SECONDS)
        except RunBusy:
            return None
        self._is_lost = False
        leases, since = self._engine.leases, clock.monotonic()
        lease = leases.hold(VERIFICATIONS, head.epoch, seconds=LEASE_SECONDS, since=since, lost=self._lose)
        try:
            return self._verify(recorder, Report() if resumed is None else resumed.report(log))
        except _Stopped:
            return None
        finally:
            leases.drop(lease)
            leases.release(VERIFICATIONS, head.epoch)

    def _verify(self, recorder: Recorder, report: Report) -> Report:
        self._since = self._engine.clock.monotonic()

        def keep(report: Report) -> None:
            recorder.keep(report)
            self._rest()

        report = verify(self._engine.log, tables=False, report=report, keep=keep, progress=lambda _, __: self._rest())
        recorder.finish(report)
        broken = report.broken
        level = logging.INFO if report.holds else logging.WARNING
        fields = {"what": "verified", "runs": report.runs, "problems": len(report.problems), "broken": broken[:10]}
        text = " ".join(f"{name}={value}" for name, value in fields.items() if name != "what")
        logger.log(level, "verified %s", text, extra={"killick": fields})
        return report

    def _rest(self) -> None:
        """Sleeps so that its share of time is kept."""
        clock = self._engine.clock
        worked = clock.monotonic() - self._since
        nap = min(worked * (1 / self._share - 1), _NAP_SECONDS_MAX)
        if self._stopped.wait(clock.nap_seconds(nap)) or self._is_lost:
            raise _Stopped
        self._since = clock.monotonic()
