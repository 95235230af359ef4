"""Steps on a time axis: offsets from the start of the run, on a linear scale that folds long idle stretches.

Pure: reads no log and no clock. Positions are percentages of the axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from killick.history.phrasing import span
from killick.history.timeline_parts import Entry, Step, walked
from killick.model import events as e
from killick.presenting.documents import Document
from killick.presenting.moments import all_moments

FOLD_US: Final = 10_000_000
"""A shorter idle stretch is never folded."""

_KEPT_US: Final = 5_000
_FOLD_PERCENT: Final = 9.0
_FOLDS_PERCENT: Final = 45.0
_APART_PERCENT: Final = 17.0
_NICE: Final = (
    *(each * 10**power for power in range(6) for each in (1, 2, 5)),
    *(each * 1_000_000 for each in (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1_800, 3_600, 7_200, 10_800, 21_600)),
    *(each * 43_200_000_000 for each in (1, 2, 4, 10, 20, 60, 200, 730, 7_300)),
)  # fmt: skip


class Segment(Document, frozen=True):
    """A stretch of a step. `kind` is `attempt`, with its `outcome`, or `wait`; `outcome` is null while it is open,
    `died` where the process died during it, and `overridden` where a person gave the result instead."""

    kind: str
    left: float
    width: float
    seconds: float
    outcome: str | None = None


class AxisMark(Document, frozen=True):
    """A place on the axis, with its text: an offset, or how long a folded stretch is."""

    left: float
    text: str
    width: float = 0.0


class TimeAxis(Document, frozen=True):
    """The axis of a page of steps. `started_at` is where offsets count from; `deaths` are places where a process of
    the run was found dead."""

    started_at_us: int
    ticks: tuple[AxisMark, ...]
    folds: tuple[AxisMark, ...]
    deaths: tuple[float, ...]


class _Piece(NamedTuple):
    start: int
    end: int
    left: float
    right: float
    is_folded: bool


class Scale:
    """Where times are on the axis of some entries.

    An idle stretch, in which no attempt was open, is folded if it lasts longer than everything shorter together.
    """

    def __init__(self, entries: Sequence[Entry], started_us: int, now_us: int) -> None:
        self._now = now_us
        self._deaths = [each.at for each in all_moments(entries) if isinstance(each.event, e.LeaseLapsed)]
        busy = _merged(each for step in walked(entries) for each in self._busy(step))
        self._start = min(started_us, busy[0][0]) if busy else started_us
        self._pieces = tuple(_pieces(busy))

    def axis(self) -> TimeAxis:
        """The axis as a document."""
        folds = (
            AxisMark(left=each.left, width=each.right - each.left, text=span(each.end - each.start))
            for each in self._pieces
            if each.is_folded
        )
        first, last = (self._pieces[0].start, self._pieces[-1].end) if self._pieces else (0, -1)
        deaths = tuple(self.at(each) for each in self._deaths if first <= each <= last)
        return TimeAxis(started_at_us=self._start, ticks=tuple(self._ticks()), folds=tuple(folds), deaths=deaths)

    def at(self, us: int) -> float:
        """The place of a time."""
        for each in self._pieces:
            if us <= each.end:
                part = max(us - each.start, 0) / max(each.end - each.start, 1)
                return round(each.left + part * (each.right - each.left), 2)
        return 100.0 if self._pieces else 0.0

    def whole(self, step: Step) -> Segment:
        """A step from its intention to its end."""
        return self._segment("step", step.intended_at, self._end(step), None)

    def segments(self, step: Step) -> tuple[Segment, ...]:
        """The waits and attempts of a step, each kind in order."""
        end = self._end(step)
        waits = [self._segment("wait", each.opened_at, each.closed_at or end, each.how) for each in step.waits]
        tried = [self._segment("attempt", *each) for each in self._attempts(step)]
        return (*waits, *tried)

    def _segment(self, kind: str, start: int, end: int, outcome: str | None) -> Segment:
        left = self.at(start)
        return Segment(
            kind=kind, left=left, width=max(round(self.at(end) - left, 2), 0.0), seconds=max(end - start, 0) / 1e6,
            outcome=outcome,
        )  # fmt: skip

    def _end(self, step: Step) -> int:
        last = max((each.ended_at or each.started_at for each in step.attempts), default=step.intended_at)
        return step.ended_at or (last if step.is_over else max(self._now, last))

    def _attempts(self, step: Step) -> Iterator[tuple[int, int, str | None]]:
        """When each attempt began and ended, and how. A death cuts an attempt where the next holder noticed it."""
        begun = [each.started_at for each in step.attempts[1:]]
        for each, following in zip(step.attempts, [*begun, None], strict=False):
            end = each.ended_at or following or self._end(step)
            cut = next((at for at in self._deaths if each.started_at <= at <= end), None)
            if cut is not None:
                yield each.started_at, cut, "died"
            elif each.ended_at is not None or not (each.died or step.is_over):
                yield each.started_at, end, each.outcome
            else:
                yield each.started_at, each.started_at, "died" if each.died else "overridden"

    def _busy(self, step: Step) -> Iterator[tuple[int, int]]:
        """The times that are never folded: attempts, and the moments at which a step or a wait began or ended."""
        points = [step.intended_at, self._end(step)]
        for start, end, outcome in self._attempts(step):
            yield start, end if outcome != "died" else start
            points.append(end)
        points += [at for wait in step.waits for at in (wait.opened_at, wait.closed_at) if at is not None]
        yield from ((at, at) for at in points)

    def _ticks(self) -> Iterator[AxisMark]:
        kept = [each for each in self._pieces if not each.is_folded]
        room = sum(each.right - each.left for each in kept) or 100.0
        wanted = sum(each.end - each.start for each in kept) * _APART_PERCENT / room
        size = next((each for each in _NICE if each >= wanted), _NICE[-1])
        last, until = -_APART_PERCENT, [each.left - _APART_PERCENT for each in kept[1:]]
        for piece, latest in zip(kept, [*until, 88.0], strict=False):
            begin, end = piece.start - self._start, piece.end - self._start
            for offset in (begin, *range(-(-begin // size) * size, end + 1, size)):
                left = self.at(self._start + offset)
                if left - last >= _APART_PERCENT and (left <= latest or offset == begin):
                    last = left
                    yield AxisMark(left=left, text=_offset(offset, size))


def _offset(us: int, size: int) -> str:
    """An offset from the start, as exact as ticks of this size need it: 4 s, 12:30, 2d 3:00:05."""
    digits = 0 if size >= 1_000_000 else 7 - len(str(size))
    if us < 60_000_000:
        return f"{us / 1e6:.{digits}f} s" if us else "0"
    minutes, rest = divmod(us, 60_000_000)
    seconds = f"{rest / 1e6:0{3 + digits if digits else 2}.{digits}f}"
    days, hours = divmod(minutes // 60, 24)
    clock = f"{hours}:{minutes % 60:02}:{seconds}" if minutes >= 60 else f"{minutes}:{seconds}"
    return f"{days}d {clock}" if days else clock


def _merged(stretches: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start, end in sorted(stretches):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def _pieces(busy: Sequence[tuple[int, int]]) -> Iterator[_Piece]:
    """The stretches of the axis: those in true proportion to each other, and the folded ones between them."""
    gaps = [(before[1], after[0]) for before, after in pairwise(busy)]
    kept = sum(end - start for start, end in busy)
    folded: set[tuple[int, int]] = set()
    for gap in sorted(gaps, key=lambda gap: gap[1] - gap[0]):
        length = gap[1] - gap[0]
        if length > FOLD_US and length > kept >= _KEPT_US:
            folded.add(gap)
        else:
            kept += length
    fold = min(_FOLD_PERCENT, _FOLDS_PERCENT / len(folded)) if folded else 0.0
    rate, left, start = (100 - fold * len(folded)) / max(kept, 1), 0.0, busy[0][0] if busy else 0
    for begin, end in sorted(folded):
        right = left + (begin - start) * rate
        yield _Piece(start, begin, left, right, is_folded=False)
        yield _Piece(begin, end, right, right + fold, is_folded=True)
        left, start = right + fold, end
    if busy:
        yield _Piece(start, busy[-1][1], left, 100.0, is_folded=False)
