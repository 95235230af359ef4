"""Previews the compensation of a step, with the steps and runs that share its effect by the ledger. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from killick.engine.effects.run_tree import effects_of, step_of, undo_refusal
from killick.log.log import Log
from killick.model import event_codec, facts
from killick.model import events as e
from killick.model import fold as folds
from killick.model import ledger as ledgers


class SharedBy(msgspec.Struct, frozen=True):
    """A step that shares another step's effect: it adopted the recorded result, or another run inherited the step."""

    run: str
    step: e.StepId
    name: str
    how: Literal["adopted", "inherited"]


class UndoPreview(msgspec.Struct, frozen=True, kw_only=True):
    """The preview of a compensation. `refuses` says why it is impossible; `claims` are rights that stay consumed."""

    run: str
    step: e.StepId
    tool: str
    status: ledgers.EffectStatus | None
    key: str | None
    arguments: Any
    result: Any
    compensated_by: str | None
    shared_by: tuple[SharedBy, ...]
    claims: tuple[str, ...] = ()
    refuses: str | None = None


# undoing ------------------------------------------------------------------------------------------


def undoing(log: Log, run: str, step: e.StepId, tools: Mapping[str, Any]) -> UndoPreview:
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
    name = found.name
    no_way = f"its tool {name} is not declared here" if tool is None else f"{name} has no compensate="
    return UndoPreview(
        run=run,
        step=step,
        tool=found.name,
        status=done.effect.status if done is not None else None,
        key=done.effect.key if done is not None else None,
        arguments=state.data(found.edited or found.intended).get("arguments"),
        result=state.output_of(found) if found.status == "done" else None,
        compensated_by=named,
        shared_by=tuple(shared_by(log, run, step)),
        claims=done.effect.claims if done is not None else (),
        refuses=undo_refusal(run, found, done, begun) or (no_way if named is None else None),
    )


# who shares its effect ----------------------------------------------------------------------------


def shared_by(log: Log, run: str, step: e.StepId) -> list[SharedBy]:
    """Returns the steps that share a step's effect: of the current timeline, then of the parent and of forks."""
    source = step_of(log, run, step)
    done = effects_of(log, run, [source]).get(step)
    if done is None:
        return []
    key = done.effect.key
    timeline = folds.timeline([(each.seq, each.event) for each in log.read(run, limit=max(log.head(run).seq, 1))])
    own = [event.step for _, event in timeline if isinstance(event, e.StepAdopted) and event.key == key]
    adopted = [SharedBy(run, other, source.name, "adopted") for other in own if other != step]
    return [*adopted, *_in_other_runs(log, run, source, key)]


def _in_other_runs(log: Log, run: str, source: facts.Step, key: str) -> Iterator[SharedBy]:
    """Returns related runs whose timelines contain this effect: the parent, and later forks."""
    head = log.head(run)
    if head.parent is not None and source.intended <= head.base:
        yield SharedBy(head.parent, source.id, source.name, "inherited")
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
            yield SharedBy(fork, source.id, source.name, "inherited")
            continue
        for row in log.rows(fork, after=below.base):
            if row.body.startswith(b'{"kind":"step.adopted"'):
                adopted = event_codec.decode(row.body)
                if isinstance(adopted, e.StepAdopted) and adopted.key == key:
                    yield SharedBy(fork, adopted.step, source.name, "adopted")
