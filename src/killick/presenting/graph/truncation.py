"""Selects a timeline's steps for a graph: all, or, for a long one, its ends and the notable ones.

Reads only the selected steps: some dozens of a run of twenty thousand. Changes nothing.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from killick.history.compare_runs import StepKeys
from killick.history.page import PageBuilder
from killick.history.phrasing import short
from killick.history.timeline_parts import Step
from killick.log.log import Log
from killick.model.fold import Fold
from killick.presenting.documents import recorded_failure

LONG: Final = 400
"""A longer timeline is not read whole."""

HEAD: Final = 6
TAIL: Final = 14
"""The number of steps at each end of a long timeline."""

NOTABLE_MAX: Final = 12
"""The maximum number of notable steps between them."""


class LaneSteps(StepKeys):
    """The steps of a timeline; of a long one its ends, the steps near the given events, and the notable ones. A number
    among them replaces that many unread ones.

    since   steps up to this event are on another lane; of those only the last, the branch point, is included
    near    events at which lanes branch off this one
    """

    def __init__(
        self, log: Log, run: str, fold: Fold, at: int | None = None, *, since: int = 0, near: Iterable[int] = (),
    ) -> None:  # fmt: skip
        super().__init__(log, run, fold)
        self._log = log
        self._making = PageBuilder(log, run, fold, at)
        self._first = max(bisect_left(fold.tops, since + 1, key=self._ended) - 1, 0) if since else 0
        if len(fold.steps) > LONG:
            self.steps: list[Step | int] = list(self._read(self._chosen(near)))
        else:
            self.steps = [entry for entry in self._making.everything() if isinstance(entry, Step)]

    def _ended(self, index: int) -> int:
        return self.fold.steps[index].ended or self.fold.facts.seq + 1

    def _chosen(self, near: Iterable[int]) -> list[int]:
        """Returns the indexes of the selected own steps."""
        fold, total = self.fold, len(self.fold.tops)
        places = {*range(self._first, self._first + HEAD), *range(total - TAIL, total)}
        for seq in near:
            place = bisect_right(fold.tops, seq, key=lambda index: fold.steps[index].intended) - 1
            places |= {place - 1, place, place + 1}
        places |= self._notable()
        return sorted(place for place in places if self._first <= place < total)

    def _notable(self) -> set[int]:
        fold, failures = self.fold, self.fold.failures
        half = NOTABLE_MAX // 2
        seqs = [*failures[:half], *failures[max(len(failures) - half, half) :]]
        named = [getattr(self._log.event(self.run, seq), "step", None) for seq in seqs]
        named += [*list(fold.facts.pending)[:half], *(fold.steps[index].undoes for index in fold.facts.beside[-half:])]
        tops = (str(step).partition(".")[0] for step in named if step)
        return {int(top) - 1 for top in tops if top.isdecimal()}

    def _read(self, places: list[int]) -> Iterator[Step | int]:
        """Reads these steps, and counts those between; a single one between is read too."""
        shown = {place + 1 for place in places if place + 2 in places} | set(places)
        last = self._first
        for first, end in _ranges(sorted(shown)):
            if first > last:
                yield first - last
            for entry in self._making.section(first + 1, end).entries:
                if isinstance(entry, Step):
                    yield entry
            last = end

    @property
    def ended_at(self) -> int | None:
        """When the run ended, if it has."""
        ended = self.fold.facts.ended
        return self._making.event(ended).at if ended else None

    @property
    def failed(self) -> str | None:
        """Why the run failed, on one line."""
        facts = self.fold.facts
        found: Mapping[str, Any] = self._making.state().data(facts.ended) if facts.ended_as == "failed" else {}
        if (failure := recorded_failure(found.get("failure"))) is None:
            return None
        return short(failure.cause if failure.type.endswith(".StepFailed") and failure.cause is not None else failure)


def _ranges(places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Groups consecutive indexes into half-open ranges."""
    start = 0
    for at in range(1, len(places) + 1):
        if at == len(places) or places[at] != places[at - 1] + 1:
            yield places[start], places[at - 1] + 1
            start = at
