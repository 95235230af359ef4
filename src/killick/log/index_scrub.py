"""Compares the index of runs with their logs, a part at a time, and rebuilds at once what differs.

A run without its index entry, or with a damaged one, is never claimed, and no read of it would find that.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from killick.errors import LogError
from killick.log.checked import quarantine
from killick.log.derived import index_fits, indexed_again, lost_reason, missing_messages, slots_fit
from killick.log.log import Log
from killick.store.records import ENDED

HEADS_MAX: Final = 5_000
"""Heads in one part: their entries are looked up."""

FOLDED_MAX: Final = 100
"""Open runs in one part: their entries are compared with what their logs fold to."""


class IndexScrub:
    """The position of one process in the heads of a store."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._after = 0

    def scrub(self) -> list[str]:
        """Compares the next part, from the first head again after the last. Returns the rebuilt runs.

        A run with a damaged log, or a message that is missing in its inbox, is quarantined instead. The run of a live
        holder is left to it.
        """
        store, rebuilt, folded = self._log.store, list[str](), 0
        found = store.heads(after=self._after, limit=HEADS_MAX)
        statuses = store.statuses([head.run for _, head in found])
        self._after = 0
        for number, head in found:
            entry = statuses.get(head.run)
            if entry is None or entry.quarantined is not None or entry.status in ENDED:
                continue
            if entry.status is not None and head.holder is not None:
                continue
            if folded == FOLDED_MAX:
                self._after = number - 1
                return rebuilt
            folded += 1
            with suppress(LogError):
                if lost := missing_messages(store.index(head.run), store.messages(head.run)):
                    quarantine(store, head.run, lost_reason(lost))
                    continue
                fold = self._log.state(head.run).fold
                fits = (
                    entry.status is not None and index_fits(store, head.run, fold) and slots_fit(store, head.run, fold)
                )
                if not fits and indexed_again(store, head.run, fold, at=head.seq):
                    rebuilt.append(head.run)
        if len(found) == HEADS_MAX:
            self._after = found[-1][0]
        return rebuilt
