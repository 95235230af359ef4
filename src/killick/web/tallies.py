"""The usage of each run, the response times of its people, and its error: from its events, each read once."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

from killick.clock import Clock
from killick.errors import KillickError
from killick.history.listing import Listing
from killick.log.log import Log
from killick.lru import Lru
from killick.model import event_codec
from killick.model import events as e
from killick.presenting.documents import Document
from killick.store.records import ENDED, RunRow

KEPT_MAX: Final = 20_000

READ_SECONDS: Final = 0.04
"""How long one request reads logs. The next request continues."""

_ROWS: Final = 1_000
_PEOPLE: Final = ("answer", "settlement")


class RunUsage(Document, frozen=True):
    """The usage of all attempts ever made. Money is in millionths of a US dollar."""

    model_calls: int
    tokens_in: int
    tokens_out: int
    tokens_cached: int
    cost_micros: int


class RunTally:
    """The usage of one run, without steps that a fork shares; `answers` are times, each with its seconds."""

    __slots__ = ("answers", "error", "opened", "row", "seq", *RunUsage.__struct_fields__)

    def __init__(self) -> None:
        self.seq = self.model_calls = self.tokens_in = self.tokens_out = self.tokens_cached = self.cost_micros = 0
        self.answers: list[tuple[int, float]] = []
        self.opened: dict[str, int] = {}
        self.error: str | None = None
        self.row: RunRow | None = None

    def take(self, body: bytes) -> None:
        """Counts an event. Most kinds count nothing, and are not decoded."""
        if not (b'"usage":{' in body or body.startswith((b'{"kind":"wait.', b'{"kind":"run.rewound"'))):
            return
        match event_codec.decode(body):
            case e.AttemptEnded(usage=e.Usage() as usage):
                self.model_calls += 1
                self.tokens_in += usage.tokens_in
                self.tokens_out += usage.tokens_out
                self.tokens_cached += usage.tokens_cached
                self.cost_micros += usage.cost_micros
            case e.WaitOpened() as opened if opened.waits_for in _PEOPLE:
                self.opened.setdefault(opened.step, opened.at)
            case e.WaitClosed() as closed if (since := self.opened.pop(closed.step, None)) is not None:
                if closed.how == "answered":
                    self.answers.append((closed.at, (closed.at - since) / 1_000_000))
            case e.RunRewound():
                self.opened.clear()
            case _:
                pass


class Tallies:
    """The tallies of many runs. Thread-safe."""

    def __init__(self, log: Log, clock: Clock) -> None:
        self._store, self._clock = log.store, clock
        self._failures = Listing(log)
        self._kept: Lru[str, RunTally] = Lru(KEPT_MAX)
        self._mutex = threading.Lock()

    def of(self, rows: Sequence[RunRow], *, seconds: float) -> dict[str, RunTally]:
        """The tallies of these runs, by id. After some seconds no more is read; a run never read whole is absent."""
        found, late = dict[str, RunTally](), self._clock.monotonic() + seconds
        with self._mutex:
            for row in rows:
                tally = self._kept.get(row.run) or RunTally()
                self._kept.put(row.run, tally)
                is_same = row.status in ENDED and tally.row == row
                if not is_same and self._clock.monotonic() <= late:
                    self._read(tally, row, late)
                if tally.row is not None:
                    found[row.run] = tally
        return found

    def _read(self, tally: RunTally, row: RunRow, late: float) -> None:
        """Reads the new events of a run, or as many as time permits."""
        try:
            while rows := self._store.read(row.run, after=tally.seq, limit=_ROWS, data=False):
                for each in rows:
                    tally.take(each.body)
                tally.seq = rows[-1].seq
                if len(rows) < _ROWS:
                    break
                if self._clock.monotonic() > late:
                    return
        except KillickError:
            pass  # a run that cannot be read keeps the part that was read
        tally.row, tally.error = row, None
        if row.status == "failed":
            about = [each for line in self._failures.lines([row], row.changed_at_us) for each in line.about]
            tally.error = about[0].text.partition(":")[0] if about else "unknown"
