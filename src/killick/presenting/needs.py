"""The work for people: the open questions of all runs, and the runs that only a person can continue."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from killick.client import inbox
from killick.engine.views import Wait
from killick.history.doctor import LATE_US
from killick.history.listing import counted
from killick.presenting import approvals
from killick.presenting.documents import Document
from killick.store.records import RunQuery

if TYPE_CHECKING:
    from killick.client.client import Client

ASKING_MAX: Final = 200
"""The number of runs whose questions are counted, the most urgent ones; and of late runs."""

NEW_MAX: Final = 50
"""The number of logs that one count reads. The next count continues."""


class Needs(Document, frozen=True):
    """How much needs a person. `asks_you` are questions that the caller may answer; `late` runs have been due for a
    minute without a worker; `more`: not all were counted."""

    abandoned: int
    in_doubt: int
    code_mismatch: int
    failed: int
    asks_you: int
    late: int
    more: bool


class Questions:
    """The open questions of all runs, as the inbox has them. Reads a run again only when it changed."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._kept: dict[str, tuple[tuple[int, int], list[Wait]]] = {}

    def now(self) -> tuple[list[Wait], bool]:
        """The questions, and whether more runs ask."""
        log, known = self._client.runtime.log, self._kept
        rows = log.store.asking(self._client.runtime.clock.now_us(), limit=ASKING_MAX + 1)
        standings = log.store.statuses([row.run for row in rows[:ASKING_MAX]])
        self._kept = kept = dict[str, tuple[tuple[int, int], list[Wait]]]()
        new = 0
        for row in (row for row in rows[:ASKING_MAX] if row.run in standings):
            seen, found = (standings[row.run].head.seq, row.delivered), known.get(row.run)
            if found is None or found[0] != seen:
                new += 1
                if new > NEW_MAX:
                    continue
                found = seen, inbox.readable(log, row, answered=False)
            kept[row.run] = found
        return [wait for _, waits in kept.values() for wait in waits], len(rows) > ASKING_MAX or new > NEW_MAX

    def badge(self) -> str:
        """How many questions are open; empty for none."""
        waits, more = self.now()
        return f"{len(waits)}{'+' * more}" if waits else ""

    def needs(self, person: str, counts: Counter[str] | None = None, *, may_answer: bool) -> Needs:
        """The work for people, as this person sees it. `counts` are those of all runs, if known."""
        (waits, more), counts = self.now(), counts or counted(self._client.runtime.store, RunQuery())
        asks = [each for each in waits if each.waits_for == "answer"]
        mine = [each for each in asks if may_answer and approvals.why_not(self._client, each, person) is None]
        due = self._client.runtime.store.due(self._client.runtime.clock.now_us() - LATE_US, limit=ASKING_MAX)
        return Needs.of(None, **{name: counts[name] for name in ("abandoned", "code_mismatch", "failed")},
                        in_doubt=len(waits) - len(asks), asks_you=len(mine), more=more,
                        late=sum(each.status != "running" for each in due))  # fmt: skip
