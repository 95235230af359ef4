"""Places in a run's time, as people write them: `6:before`, `6:after`, `@17`, `start`, `now`. Changes nothing.

A step is meant in the current timeline; `4~1:before` means the timeline of generation 1, as it was when it was left.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from kedge.errors import BoundaryUnknown
from kedge.log.log import Log
from kedge.model import events as e
from kedge.model.fold import Fold, StepStatus

_PLACE: Final = re.compile(r"(?P<step>\d+(?:\.\d+)*)(?:~(?P<generation>\d+))?(?::(?P<side>before|after))?")
_NAMED_MAX: Final = 12


class Place(msgspec.Struct, frozen=True):
    """An event of a log, and how people call it. The state there is the state after that event, and after those of
    `keep`, which are later: where a rewind kept part of what it left, a timeline is put together of parts."""

    seq: int
    label: str
    keep: tuple[int, ...] = ()


class Boundary(msgspec.Struct, frozen=True, kw_only=True):
    """One step of the current timeline: the events before and after it, when it was, and what came of it.

    `after` and `ended_at` are None while the step has not ended.
    """

    step: e.StepId
    sort: e.Sort
    name: str
    before: int
    after: int | None
    at: int
    ended_at: int | None
    outcome: StepStatus


def is_place(text: str) -> bool:
    """Whether a text is written as places are, whatever run it is meant for."""
    return text in ("start", "now", "head") or text[:1] == "@" or _PLACE.fullmatch(text) is not None


def at(log: Log, run: str, text: str) -> Place:
    """The place that a text names in a run. BoundaryUnknown, with the steps that there are, when it names none."""
    text = text.strip()
    head = log.head(run)
    if text in ("now", "head"):
        return Place(head.seq, "now")
    if text == "start":
        return Place(head.base + 1, "start")
    if text[:1] == "@":
        if not text[1:].isdecimal() or int(text[1:]) > head.seq:
            raise BoundaryUnknown(run, text, f"there is no event {text}; it has @1 to @{head.seq}")
        return Place(int(text[1:]), text)
    written = _PLACE.fullmatch(text)
    if written is None:
        raise BoundaryUnknown(run, text, f"{text!r} names no place; write 6:before, 6:after, @17, start or now")
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
    return Place(last, f"{label} (step {name} has not ended: {'now' if last == head.seq else f'@{last}'})")


def before(fold: Fold, seq: int, label: str) -> Place:
    """Just before an event of a timeline."""
    for kept in fold.facts.kept:
        if seq in kept.keep:
            return Place(kept.cut, label, kept.keep[: kept.keep.index(seq)])
    return Place(seq - 1, label)


def after(fold: Fold, seq: int, label: str) -> Place:
    """Just after an event of a timeline."""
    for kept in fold.facts.kept:
        if seq in kept.keep:
            return Place(kept.cut, label, kept.keep[: kept.keep.index(seq) + 1])
    return Place(seq, label)


def history(log: Log, run: str) -> list[Boundary]:
    """Every step of the current timeline, with the events before and after it."""
    fold = log.state(run).fold
    return [
        Boundary(
            step=step.id,
            sort=step.sort,
            name=step.name,
            before=before(fold, step.intended, "").seq,
            after=step.ended or None,
            at=step.at,
            ended_at=step.ended_at or None,
            outcome=step.status,
        )
        for step in fold.steps
    ]


def _last_of(log: Log, run: str, generation: int, text: str) -> int:
    """The last event before a generation was left by a rewind or a fork; the head, for the current one."""
    current, known = 0, {0}
    for row in log.rows(run):
        if not row.body.startswith((b'{"kind":"run.rewound"', b'{"kind":"run.forked"')):
            continue
        event = e.decode(row.body)
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
    """The steps that somebody may have meant: those beside the one that was asked for."""
    if not fold.tops:
        return "it has none yet"
    top = asked.partition(".")[0]
    inside = [step.id for step in fold.steps if step.id.startswith(f"{top}.")] if "." in asked else []
    if inside:
        more = f" and {len(inside) - _NAMED_MAX} more" if len(inside) > _NAMED_MAX else ""
        return f"in step {top} there are {', '.join(inside[:_NAMED_MAX])}{more}"
    return f"it has step 1 to {len(fold.tops)}" if len(fold.tops) > 1 else "it has step 1"
