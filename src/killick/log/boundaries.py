"""Positions in a run's time, as users write them: `6:before`, `6:after`, `@17`, `start`, `now`. Read-only.

A step is one of the current timeline; `4~1:before` refers to generation 1 of the timeline, just before it was rewound.
Boundaries are also numbered from the start to now, so that one in a long run is found without listing the others.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable
from typing import Final, Literal

import msgspec

from killick.errors import BoundaryUnknown
from killick.log.log import Log
from killick.model import event_codec
from killick.model import events as e
from killick.model.facts import OUT_OF_BAND, Step
from killick.model.fold import Fold

_PLACE: Final = re.compile(r"(?P<step>\d+(?:\.\d+)*)(?:~(?P<generation>\d+))?(?::(?P<side>before|after))?")
_NAMED_MAX: Final = 12


class RunMoment(msgspec.Struct, frozen=True):
    """An event of a log, and its user-facing name. Its state includes that event and the later ones in `keep`, which a
    rewind kept."""

    seq: int
    label: str
    keep: tuple[int, ...] = ()


def is_place(text: str) -> bool:
    """Returns whether a text has the syntax of a position, for any run."""
    return text in ("start", "now", "head") or text[:1] == "@" or _PLACE.fullmatch(text) is not None


def at(log: Log, run: str, text: str) -> RunMoment:
    """Resolves a text to a position in a run. Raises BoundaryUnknown, with the nearest steps."""
    text = text.strip()
    head = log.head(run)
    if text in ("now", "head"):
        return RunMoment(head.seq, "now")
    if text == "start":
        return RunMoment(head.base + 1, "start")
    if text[:1] == "@":
        if not text[1:].isdecimal() or int(text[1:]) > head.seq:
            raise BoundaryUnknown(run, text, f"there is no event {text}; it has @1 to @{head.seq}")
        return RunMoment(int(text[1:]), text)
    written = _PLACE.fullmatch(text)
    if written is None:
        raise BoundaryUnknown(run, text, f"{text!r} is not a position; write 6:before, 6:after, @17, start or now")
    name, side = written["step"], written["side"] or "after"
    last = head.seq
    if written["generation"] is not None:
        last = _last_of(log, run, int(written["generation"]), text)
        label = f"{name}~{written['generation']}:{side}"
    else:
        label = f"{name}:{side}"
    fold = log.settled(run) if last == head.seq else None
    step = None if fold is None else fold.step(name)
    if fold is None or step is None or not step.ended:
        fold = log.state(run, last).fold
        step = fold.step(name)
    if step is None:
        raise BoundaryUnknown(run, text, f"there is no step {name}; {_steps_of(fold, name)}")
    if side == "before":
        return before(fold, step.intended, label)
    if step.ended:
        return after(fold, step.ended, label)
    return RunMoment(last, f"{label} (step {name} has not ended: {'now' if last == head.seq else f'@{last}'})")


def before(fold: Fold, seq: int, label: str) -> RunMoment:
    """Returns the position just before an event of a timeline."""
    return after(fold, seq, label, events=0)


def after(fold: Fold, seq: int, label: str, *, events: int = 1) -> RunMoment:
    """Returns the position just after an event of a timeline; with 0 events, just before it."""
    for kept in fold.facts.kept:
        if seq in kept.keep:
            return RunMoment(kept.cut, label, kept.keep[: kept.keep.index(seq) + events])
    return RunMoment(seq - 1 + events, label)


# by number ----------------------------------------------------------------------------------------

Side = Literal["start", "before", "after", "now", "event"]


class Numbered(msgspec.Struct, frozen=True):
    """A boundary by its number: a side of a step. The first is the start, and the last is now.

    An `event` is no boundary: a position after boundary `n`.
    """

    n: int
    side: Side
    place: RunMoment
    step: Step | None = None


def count(fold: Fold) -> int:
    """Counts a timeline's boundaries: before and after each step, without future ones, plus both ends."""
    return 2 * len(fold.steps) - len(fold.facts.pending) + 2


def nth(fold: Fold, n: int) -> Numbered:
    """Returns boundary `n` of a timeline in time order. Reads only the steps around it."""
    if n <= 0:
        return Numbered(0, "start", RunMoment(1, "start" if fold.facts.forked_from is None else "@1"))
    if n >= count(fold) - 1:
        return Numbered(count(fold) - 1, "now", RunMoment(fold.facts.seq, "now"))
    stretches = range(-1, len(fold.tops))
    which = bisect_right(stretches, n - 1, key=lambda top: _first(fold, top)) - 2
    _, step, is_after = _sides(fold, which)[n - 1 - _first(fold, which)]
    side: Side = "after" if is_after else "before"
    label = f"{step.id}:{side}"
    place = after(fold, step.ended, label) if is_after else before(fold, step.intended, label)
    return Numbered(n, side, place, step)


def number(fold: Fold, step: e.StepId, side: Literal["before", "after"]) -> int | None:
    """Returns the number of a boundary; None if the timeline has no such boundary."""
    index = fold.find(step)
    if index is None:
        return None
    which = bisect_right(fold.tops, index) - 1
    found = (at for at, (_, each, late) in enumerate(_sides(fold, which)) if (each.id, late) == (step, side == "after"))
    at = next(found, None)
    return None if at is None else 1 + _first(fold, which) + at


def _first(fold: Fold, top: int) -> int:
    """Counts the boundaries before a top-level step and its nested ones; -1 precedes them all."""
    index = fold.tops[top] if top >= 0 else 0
    return 2 * index - sum(pending < index for pending in fold.facts.pending.values())


def _sides(fold: Fold, top: int) -> list[tuple[int, Step, bool]]:
    """Returns both sides of a step and of its nested ones in time order: seq, step, and whether after."""
    start = fold.tops[top] if top >= 0 else 0
    end = fold.tops[top + 1] if top + 1 < len(fold.tops) else len(fold.steps)
    steps = fold.steps[start:end]
    sides = [(2 * step.intended - 1, step, False) for step in steps]
    sides += [(2 * step.ended + 1, step, True) for step in steps if step.id not in fold.facts.pending]
    return sorted(sides, key=lambda each: (each[0], not each[2]))


class _Narrowed(Fold):
    """A fold with only some of its steps."""

    __slots__ = ("places",)

    def __init__(self, fold: Fold) -> None:
        super().__init__(fold.facts)
        self.places: dict[e.StepId, int] = {}

    def find(self, step: e.StepId) -> int | None:
        return self.places.get(step)


def narrowed(fold: Fold, indexes: Iterable[int], failures: Iterable[int] = ()) -> Fold:
    """Returns a fold of these steps alone, and of the failures at these seqs, for cheap reads."""
    small = _Narrowed(fold)
    for index in sorted(indexes):
        step = fold.steps[index]
        at = small.places[step.id] = small.steps.append(step)
        if "." not in step.id:
            small.tops.append(at)
        if step.sort == "decision":
            small.decisions.append(at)
        elif step.sort in ("model", "tool") and not step.id.startswith(OUT_OF_BAND):
            small.trace.append(at)
        if any(attempt.outcome not in (None, "returned") for attempt in step.attempts):
            small.retried.append(at)
        if step.attempts and step.effect not in (None, "reads"):
            small.effects.append(at)
    for seq in failures:
        small.failures.append(seq)
    return small


def _last_of(log: Log, run: str, generation: int, text: str) -> int:
    """Returns the last event before a rewind or a fork left a generation; the head, for the current one."""
    current, known = 0, {0}
    for row in log.rows(run):
        if not row.body.startswith((b'{"kind":"run.rewound"', b'{"kind":"run.forked"')):
            continue
        event = event_codec.decode(row.body)
        if isinstance(event, e.RunRewound | e.RunForked) and event.generation != current:
            if current == generation:
                return row.seq - 1
            current = event.generation
            known.add(current)
    if current == generation:
        return log.head(run).seq
    raise BoundaryUnknown(
        run, text, f"there is no generation {generation}; it has {', '.join(map(str, sorted(known)))}"
    )


def _steps_of(fold: Fold, asked: str) -> str:
    """Returns the steps nearest to the requested one, for the error message."""
    if not fold.tops:
        return "it has none yet"
    top = asked.partition(".")[0]
    inside = [step.id for step in fold.steps if step.id.startswith(f"{top}.")] if "." in asked else []
    if inside:
        more = f" and {len(inside) - _NAMED_MAX} more" if len(inside) > _NAMED_MAX else ""
        return f"in step {top} there are {', '.join(inside[:_NAMED_MAX])}{more}"
    return f"it has step 1 to {len(fold.tops)}" if len(fold.tops) > 1 else "it has step 1"
