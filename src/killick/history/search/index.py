"""Updates the search index of a store on demand; if it is not writable, scans all logs instead.

Terms are committed in small batches, so that writers never wait long. Two concurrent processes only duplicate work.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

from killick.errors import KillickError, RunUnknown, StoreError
from killick.history.search.terms import Marker
from killick.log.log import Log
from killick.log.paging import heads, pages
from killick.model import event_codec
from killick.model import events as e
from killick.model.ledger import Ledger
from killick.model.state import State
from killick.store.records import Head, IndexQuery, TermBatch, TermPosition, UnindexedRun

Progress = Callable[[int], None]
"""Called with the number of events indexed so far."""

Marked = Callable[[IndexQuery], list[TermPosition]]
"""Finds events by groups of terms, as `Store.search` does."""

_RUNS: Final = 1_000
"""The number of runs in one read."""

_MARKS: Final = 2_000
"""The number of terms in one commit: a concurrent writer waits some ten milliseconds for it."""


class CaughtUp:
    """The number of indexed events, and the unreadable runs."""

    def __init__(self) -> None:
        self.events = 0
        self.unread: list[str] = []


def catch_up(log: Log, progress: Progress | None = None) -> CaughtUp:
    """Indexes all new events."""
    done, waiting, size, after = CaughtUp(), list[TermBatch](), 0, 0
    while behind := log.store.unindexed(after=after, limit=_RUNS):
        after = behind[-1].number
        for marking in _markings(log, behind, done):
            waiting.append(marking)
            size += len(marking.terms) + 1
            done.events += marking.up_to - marking.after
            if size >= _MARKS:
                log.store.index_terms(waiting)
                waiting, size = [], 0
                if progress is not None:
                    progress(done.events)
    if waiting:
        log.store.index_terms(waiting)
    return done


def _markings(log: Log, behind: Sequence[UnindexedRun], done: CaughtUp) -> Iterator[TermBatch]:
    for each in behind:
        try:
            yield from _run_markings(log, each)
        except StoreError:
            raise
        except RunUnknown:
            continue  # removed meanwhile
        except Exception:  # a damaged row can be anything, and one run's damage must not hide another's
            done.unread.append(each.run)


def _run_markings(log: Log, behind: UnindexedRun) -> Iterator[TermBatch]:
    """Returns the terms of one run in batches. If values were erased since, all are rebuilt."""
    run, base, seq, anew = behind.run, behind.base, behind.indexed_to, False
    while True:
        head = log.head(run)
        marker = marker_of(log, run, base, seq)
        # Values erased before this read were never indexed.
        seen = head.seq if seq == base else seq
        for rows in _rows(log, run, seq):
            if any(row_seq > seen and isinstance(event, e.ValueErasedOnPurpose) for row_seq, event, _ in rows):
                break
            for row in rows:
                marker.take(*row)
            if rows[-1][0] >= head.seq:
                marker.finish()
            yield TermBatch(run=run, after=seq, up_to=rows[-1][0], terms=marker.drain(), reset=anew)
            seq, anew = rows[-1][0], False
        else:
            return
        seq, anew = base, True


def _rows(
    log: Log, run: str, after: int, up_to: int | None = None
) -> Iterator[list[tuple[int, e.Event, bytes | None]]]:
    """Returns a run's own events in batches, up to the first unreadable one."""
    for rows in pages(log.store, run, after=after, up_to=up_to):
        part: list[tuple[int, e.Event, bytes | None]] = []
        try:
            part += ((row.seq, event_codec.decode(row.body), row.data) for row in rows)
        except KillickError:
            if part:
                yield part
            raise
        yield part


def marker_of(log: Log, run: str, base: int, at: int) -> Marker:
    """Returns a term extractor for a run's events after a seq."""
    row = log.store.index(run)
    agent = row.agent if row is not None else log.state(run).agent
    ledger = log.ledger(run, at) if at else Ledger()
    return Marker(run, agent, base, ledger, _Before(log, run, at), hides_values=log.keys is not None)


class _Before:
    """Reads earlier events for the extractor."""

    def __init__(self, log: Log, run: str, at: int) -> None:
        self._log, self._run, self._at = log, run, at

    @cached_property
    def _state(self) -> State:
        return self._log.state(self._run, self._at)

    def name(self, step: e.StepId) -> str:
        found = self._state.fold.step(step) if self._at else None
        return "" if found is None else found.name

    def opened(self, step: e.StepId) -> e.WaitOpened | None:
        wait = self._state.fold.facts.waits.get(step) if self._at else None
        event = None if wait is None else self._log.event(self._run, wait.opened)
        return event if isinstance(event, e.WaitOpened) else None

    def event(self, seq: int) -> e.Event:
        return self._log.event(self._run, seq)

    def data(self, seq: int) -> Mapping[str, Any]:
        return self._log.data(self._run, seq)

    def owner(self, seq: int) -> str:
        return self._log.owner(self._run, seq)


# without marks in the store -----------------------------------------------------------------------


class Scan:
    """Scans logs from their start: one run's ancestors, or all. Keeps only matching events."""

    def __init__(self, log: Log, groups: Sequence[Collection[int]], run: str | None = None) -> None:
        self.unread: list[str] = []
        self._groups = [frozenset(group) for group in groups]
        self._places: list[TermPosition] = []
        self._links: defaultdict[int, list[TermPosition]] = defaultdict(list)
        if run is None:
            for number, head in heads(log.store):
                self._read(log, number, head, head.seq)
        else:
            for depth, (head, up_to) in enumerate(log.ancestry(run)):
                self._read(log, -depth, head, up_to)
        self._places.sort(reverse=True)

    def _read(self, log: Log, number: int, head: Head, up_to: int) -> None:
        marker = marker_of(log, head.run, head.base, head.base)
        try:
            for rows in _rows(log, head.run, head.base, up_to):
                for row in rows:
                    marker.take(*row)
        except StoreError:
            raise
        except Exception:  # as above
            self.unread.append(head.run)
        marker.finish()
        bearing: defaultdict[TermPosition, set[int]] = defaultdict(set)
        for mark in marker.marks:
            bearing[TermPosition(mark.at_us, number, mark.seq, head.run)].add(mark.term)
        for place, terms in bearing.items():
            for link in terms & marker.links:
                self._links[link].append(place)
            if all(terms & group for group in self._groups):
                self._places.append(place)

    def marked(self, query: IndexQuery) -> list[TermPosition]:
        """As `Store.search`, for the scanned groups and for links."""
        if [frozenset(group) for group in query.all_of] == self._groups:
            found = self._places
        else:
            [[link]] = query.all_of
            found = self._links[link]
        fits = (
            place
            for place in found
            if (query.since_us is None or place.at_us >= query.since_us)
            and (query.until_us is None or place.at_us < query.until_us)
            and (query.before is None or place < query.before)
        )
        return [place for place, _ in zip(fits, range(query.limit), strict=False)]
