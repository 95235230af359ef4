"""The place at which a run is rewound or forked, and the events that remain valid there. Changes nothing.

A cut inside parallel work is logical: the other branches keep the steps that they had ended, and an attempt that was
open at the cut takes its outcome from the later log, if there is one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final, NamedTuple

from killick.errors import TimeRefused
from killick.log.boundaries import RunMoment, at, before
from killick.log.log import Log
from killick.model import event_codec
from killick.model import events as e
from killick.model.facts import OUT_OF_BAND, Step
from killick.model.fold import Fold, timeline

_ENDED: Final = frozenset({"done", "failed"})
"""How a step may have ended by itself; a cancelled one is repeated."""


class Cut(NamedTuple):
    """Where a timeline is cut: the last event of the log before it, the later events that stay, in their order, and
    what it then adds up to."""

    seq: int
    keep: tuple[int, ...]
    label: str
    fold: Fold
    files_seq: int
    """The event whose files are restored: later than `seq` where steps after that stay."""

    def drops(self, seq: int) -> bool:
        """Whether an event before the cut is none of the timeline after it."""
        return seq > self.seq and seq not in self.keep


def cut(
    log: Log, run: str, text: str, *, anew: Collection[e.StepId] = (), is_fork: bool = False, has_undone: bool = False,
) -> Cut:  # fmt: skip
    """The cut of a run at a place, as a person names it.

    `anew` are steps that had ended there and whose outcomes are dropped. A fork repeats what its parent had begun and
    not ended. A run repeats its open questions: answers do not carry over. With `has_undone`, effects that are kept
    and were undone since are undone there too.
    """
    place = at(log, run, text)
    files_seq = max((place.seq, *place.keep))
    fold = log.state(run, place.seq, keep=place.keep).fold
    _refuse_compensating(log, fold, place, run)
    own = place.label.partition(":")[0].partition("~")[0] if place.label[:1].isdigit() else ""
    begun = {fold.steps[index].id: fold.steps[index] for index in fold.facts.pending.values()}
    begun = {name: step for name, step in begun.items() if step.sort != "scope"}
    given_up = _given_up(fold)
    if not is_fork:
        begun = {name: step for name, step in begun.items() if not name.startswith(OUT_OF_BAND)}
    if "." not in own and not begun and not anew and not has_undone and not given_up:
        return Cut(place.seq, place.keep, place.label, fold, files_seq)
    ended = _ended_later(log, run, place)
    asked = {wait.step for wait in fold.facts.waits.values() if wait.waits_for in ("answer", "settlement")}
    transitions = {step.id for step in ended.values() if step.sort == "scope" and step.name == "transition"}
    # The files go back: steps that changed them after the cut are done again, with what came after in their lines.
    redone = _firsts(step.id for step in ended.values() if step.effect == "workspace" and step.ended > place.seq)
    stays = {name for name in begun if name in ended and in_sibling_branch(name, own, transitions)}
    # A step that had been tried at the cut and has an outcome since takes it: a retry would be the same action.
    tried = (step for step in begun.values() if step.attempts and step.id in ended)
    stays |= {step.id for step in tried if ended[step.id].intended == step.intended}
    stays = {name for name in stays if not _is_after(name, redone)}
    gone = {name for name in begun.keys() - stays if is_fork or name in asked}
    firsts = [begun[name].intended for name in gone] + [step.intended for step in given_up.values()]
    gone |= given_up.keys()
    firsts += [step.ended for step in map(fold.step, anew) if step is not None and step.ended]
    start = min(
        (before(fold, seq, place.label) for seq in firsts), key=lambda one: (one.seq, len(one.keep)), default=place
    )
    keep = list(start.keep)
    undoing: set[e.StepId] = set()
    for seq, event in _later(log, run, start, place):
        name = _step_of(event)
        if (has_undone and isinstance(event, e.StepIntended) and event.step.startswith(OUT_OF_BAND)
            and (event.undoes_seq <= start.seq or event.undoes_seq in keep)):  # fmt: skip
            undone = fold.step(event.undoes or "")
            if undone is None or undone.effect != "workspace":  # files return to how they were before the undo
                undoing.add(event.step)
        if seq <= place.seq or seq in place.keep:
            stands = name not in gone and not (name in anew and seq in firsts)
        else:
            stands = name in stays or (name in ended and in_sibling_branch(str(name), own, transitions))
            stands = stands and not _is_after(str(name), redone)
            # A scope that had not ended is kept open, for the steps in it.
            stands = stands and (ended[str(name)].status in _ENDED or isinstance(event, e.StepIntended))
            stands = stands or name in undoing
        if stands:
            keep.append(seq)
    return Cut(start.seq, tuple(keep), place.label, log.state(run, start.seq, keep=keep).fold, files_seq)


def _refuse_compensating(log: Log, fold: Fold, place: RunMoment, run: str) -> None:
    """No code continues after a cancellation's or a compensation's own steps, so a timeline cannot be cut there."""
    asked = place.seq
    if fold.facts.cancelling:
        rows = (row for row in log.rows(run) if row.body.startswith(b'{"kind":"cancel.requested"'))
        asked = max((row.seq for row in rows if row.seq <= place.seq), default=place.seq)
    first = None
    for index in reversed(fold.tops):  # they are the last steps of a run
        step = fold.steps[index]
        if step.id[:2] != OUT_OF_BAND:
            if step.sort != "undo" and step.intended <= asked:
                break
            first = step.id
    if first is not None:
        raise TimeRefused(run, f"was being undone at {place.label}; choose {first}:before, or an earlier position")


def in_sibling_branch(step: e.StepId, own: e.StepId, transitions: Collection[e.StepId] = ()) -> bool:
    """Whether a step is in another branch of a gather than the given one, at any depth.

    Below a gather come branches, and below each its steps; below a transition come steps.
    """
    path, is_branch = "", False
    for one, other in zip(step.split("."), own.split("."), strict=False):
        if one != other:
            return is_branch
        path = f"{path}.{one}" if path else one
        is_branch = not is_branch and path not in transitions
    return False


def _given_up(fold: Fold) -> dict[e.StepId, Step]:
    """Cancelled steps in a scope that is not over: the cause may be gone, so they and their successors are repeated."""
    scopes = [index for index in fold.facts.pending.values() if fold.steps[index].sort == "scope"]
    first = min(scopes, default=fold.tops[-1] if len(fold.tops) else 0)
    steps = [fold.steps[index] for index in range(first, len(fold.steps))]
    lines = _firsts(step.id for step in steps if step.status == "cancelled")
    return {step.id: step for step in steps if lines and _is_after(step.id, lines)}


def _firsts(steps: Iterable[e.StepId]) -> dict[str, int]:
    """By line of code, the number of its first step among some."""
    lines: dict[str, int] = {}
    for step in steps:
        path, _, number = step.rpartition(".")
        if not step.startswith(OUT_OF_BAND):
            lines[path] = min(int(number), lines.get(path, int(number)))
    return lines


def _is_after(step: e.StepId, lines: Mapping[str, int]) -> bool:
    """Whether a step is, or is within, one that comes at or after a number in its line."""
    if not lines or step.startswith(OUT_OF_BAND):
        return False
    parts = step.split(".")
    places = ((".".join(parts[:depth]), int(parts[depth])) for depth in range(len(parts)))
    return any(path in lines and number >= lines[path] for path, number in places)


def _step_of(event: e.Event) -> e.StepId | None:
    return getattr(event, "step", None)


def _later(log: Log, run: str, start: RunMoment, place: RunMoment) -> list[tuple[int, e.Event]]:
    """The events after a start in the timeline of a place, up to that place."""
    events: list[tuple[int, e.Event]] = []
    for row in log.rows(run, after=start.seq):
        event = event_codec.decode(row.body)
        if isinstance(event, e.RunRewound) and event.cut < place.seq < row.seq:
            break  # here the timeline of the place was left
        events.append((row.seq, event))
    return [(seq, event) for seq, event in timeline(events) if seq not in start.keep]


def _ended_later(log: Log, run: str, place: RunMoment) -> dict[e.StepId, Step]:
    """The steps that are over by now in the timeline of a place, and its scopes, by id."""
    fold = log.state(run, place.seq, keep=place.keep).fold
    names: dict[e.StepId, None] = {}
    for seq, event in _later(log, run, place, place):
        fold.apply(seq, event)
        if (name := _step_of(event)) is not None:
            names[name] = None
            parts = name.split(".")
            names.update(dict.fromkeys(".".join(parts[:depth]) for depth in range(1, len(parts))))
    found = [step for step in map(fold.step, names) if step is not None]
    return {step.id: step for step in found if step.status in _ENDED or step.sort == "scope"}
