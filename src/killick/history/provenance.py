"""Finds later uses of a step's output, by ledger and by data; and previews its compensation.

A value is evidence if it first appeared in the step's output and occurs in a later action. A value that a person
paraphrased cannot be traced. Changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

from killick.engine.effects.recorded_effects import RecordedEffect, effects_of, step_of, undo_refusal
from killick.history.value_matches import FINDS_MAX, Find, How, Needle, Sight, written
from killick.log.log import Log
from killick.model import events as e
from killick.model import fold as folds
from killick.model import ledger as ledgers
from killick.model.state import State


class Use(msgspec.Struct, frozen=True, kw_only=True):
    """A later use of a step's output. `step` is None if the run itself has it: its context, a note, its result. `what`
    is where the value was found; `through` is the step whose derived output was used here; `run` is set for another
    run. For an effect: whether it happened, and whether it was compensated."""

    step: e.StepId | None
    name: str
    what: str
    value: str
    how: How
    through: e.StepId | None = None
    run: str | None = None
    effect: e.EffectClass | None = None
    happened: bool = False
    undone: bool = False


class Undoing(msgspec.Struct, frozen=True, kw_only=True):
    """The preview of a compensation. `refuses` says why it is impossible; `claims` are rights that stay consumed."""

    run: str
    step: e.StepId
    tool: str
    status: ledgers.EffectStatus | None
    key: str | None
    arguments: Any
    result: Any
    compensated_by: str | None
    used_by: tuple[Use, ...]
    claims: tuple[str, ...] = ()
    refuses: str | None = None


# undoing ------------------------------------------------------------------------------------------


def undoing(log: Log, run: str, step: e.StepId, tools: Mapping[str, Any]) -> Undoing:
    """Previews the compensation of a step of the current timeline: its effect, its uses, and any refusal."""
    found = step_of(log, run, step)
    state = log.state(run)
    done = effects_of(log, run, [found]).get(step)
    tool = tools.get(found.name)
    undo = tool.policy.compensate if tool is not None else None
    named: str | None = None if undo is None else getattr(undo, "name", None) or getattr(undo, "__name__", "its own")
    if tool is not None and undo is None and found.effect == "workspace":
        named = "its files, which go back"
    begun = next((each for each in reversed(state.fold.steps) if each.undoes == step and each.sort == "undo"), None)
    return Undoing(
        run=run,
        step=step,
        tool=found.name,
        status=done.effect.status if done is not None else None,
        key=done.effect.key if done is not None else None,
        arguments=state.data(found.edited or found.intended).get("arguments"),
        result=state.output_of(found) if found.status == "done" else None,
        compensated_by=named,
        used_by=tuple(uses(log, run, step)),
        claims=done.effect.claims if done is not None else (),
        refuses=undo_refusal(run, found, done, begun) or _no_way(found, named, is_known=tool is not None),
    )


def _no_way(step: folds.Step, undo: str | None, *, is_known: bool) -> str | None:
    if undo is not None:
        return None
    return f"{step.name} has no compensate=" if is_known else f"its tool {step.name} is not declared here"


# who used it --------------------------------------------------------------------------------------

_USING: Final[dict[type[e.Event], tuple[str, ...]]] = {
    e.StepIntended: ("arguments", "because"),
    e.DecisionMade: ("question", "options", "choice", "because"),
    e.WaitOpened: ("prompt", "default"),
    e.MessageSent: ("body",),
    e.ChildSpawned: ("input",),
    e.ContextChanged: ("set", "document"),
    e.NoteMade: ("note",),
    e.RunCompleted: ("result",),
    e.RunRenewed: ("input",),
}
"""By event kind, the values that the agent's code supplied. All other values came from outside."""

_OF_RUN: Final[dict[type[e.Event], str]] = {
    e.ContextChanged: "context", e.NoteMade: "note", e.RunCompleted: "result", e.RunRenewed: "renewal",
}  # fmt: skip


def uses(log: Log, run: str, step: e.StepId) -> list[Use]:
    """Returns later uses of a step's output in the current timeline, in order; then dependent other runs."""
    source = step_of(log, run, step)
    state = log.state(run)
    steps = {each.id: each for each in state.fold.steps}
    effects = effects_of(log, run, steps.values())
    effect = effects[step].effect if step in effects else None
    found = list(_by_data(log, state, source, effect.key if effect is not None else None, steps))
    told = [_with_effect(use, steps.get(use.step or ""), effects.get(use.step or "")) for use in found]
    return told if effect is None else [*told, *_by_lineage(log, run, source, effect)]


def _by_data(
    log: Log, state: State, source: folds.Step, key: str | None, steps: Mapping[e.StepId, folds.Step]
) -> Iterator[Use]:
    recorded = {each.seq: each for each in log.read(state.run, limit=max(state.seq, 1))}
    outputs = {each.output: each for each in steps.values() if each.status == "done" and each.output}
    sight = Sight(log.store.pieces, source.id)
    if source.output in outputs:
        sight.expect(state.output_of(source), source.id)
    told: set[tuple[str, str]] = set()
    using: Counter[str] = Counter()
    for seq, event in folds.timeline([(seq, each.event) for seq, each in recorded.items()]):
        ended = outputs.get(seq)
        if ended is not None and using[ended.id]:
            sight.expect(state.output_of(ended), ended.id, known=sight.words)
        sight.is_after = sight.is_after or seq == source.output
        found = sight.look(recorded[seq].row.data)
        if not sight.is_after or seq == source.output:
            continue
        if isinstance(event, e.StepAdopted) and event.key == key:
            found = [Find(("effect",), Needle(event.key, source.id), "adopted it")]
        for use in _told(event, found, steps, source.id):
            who = use.step or use.name
            if (who, use.value) not in told and using[who] < FINDS_MAX:
                told.add((who, use.value))
                using[who] += 1
                yield use


def _told(event: e.Event, found: Iterable[Find], steps: Mapping[str, folds.Step], source: e.StepId) -> Iterator[Use]:
    """Returns the finds in an event's values that the agent supplied."""
    if isinstance(event, e.StepIntended) and event.sort == "undo":
        return
    parts = ("effect",) if isinstance(event, e.StepAdopted) else _USING.get(type(event), ())
    within = sorted(
        (find for find in found if find.path and find.path[0] in parts), key=lambda find: find.how == "within a text"
    )
    direct = [find for find in within if find.needle.source == source]
    step: str | None = None if type(event) in _OF_RUN else getattr(event, "step", None)
    name = _OF_RUN.get(type(event)) or (steps[step].name if step is not None and step in steps else "")
    for find in direct or within:
        path = ("context", *find.path[1:]) if isinstance(event, e.ContextChanged) else find.path
        through = find.needle.source if find.needle.source != source else None
        yield Use(step=step, name=name, what=written(path), value=find.needle.text, how=find.how, through=through)


def _with_effect(use: Use, step: folds.Step | None, done: RecordedEffect | None) -> Use:
    if step is None or step.effect in (None, "reads"):
        return use
    status = done.effect.status if done is not None else None
    happened, undone = status in ("happened", "undone"), status == "undone"
    return msgspec.structs.replace(use, effect=step.effect, happened=happened, undone=undone)


def _by_lineage(log: Log, run: str, source: folds.Step, effect: ledgers.Effect) -> Iterator[Use]:
    """Returns related runs whose timelines contain this effect: the parent, and later forks."""
    head = log.head(run)
    if head.parent is not None and source.intended <= head.base:
        yield _stands(head.parent, source, effect, "stands on it too")
    sharing = {run}
    forks = list(log.ledger(run).facts.forks)
    for fork in forks:
        below = log.store.head(fork)
        forked = log.event(fork, below.base + 1) if below is not None else None
        if below is None or not isinstance(forked, e.RunForked):
            continue
        forks += log.ledger(fork).facts.forks
        if forked.parent in sharing and (source.output <= forked.cut or source.output in forked.keep):
            sharing.add(fork)
            yield _stands(fork, source, effect, "stands on it too")
            continue
        for row in log.rows(fork, after=below.base):
            if row.body.startswith(b'{"kind":"step.adopted"'):
                adopted = e.decode(row.body)
                if isinstance(adopted, e.StepAdopted) and adopted.key == effect.key:
                    yield _stands(fork, source, effect, "adopted it", adopted.step)


def _stands(run: str, source: folds.Step, effect: ledgers.Effect, how: How, step: e.StepId | None = None) -> Use:
    return Use(
        step=step or source.id, name=source.name, what="effect", value=effect.key, how=how, run=run,
        effect=source.effect, happened=True, undone=effect.status == "undone",
    )  # fmt: skip
