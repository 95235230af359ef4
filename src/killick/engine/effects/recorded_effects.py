"""The effects of recorded steps, by the ledgers of the runs that performed them. Reads only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from killick.errors import RunUnknown, TimeRefused
from killick.log.boundaries import at as place_at
from killick.log.log import Log
from killick.model import events as e
from killick.model import facts, ledger


def effect_to_undo(log: Log, run: str, step: e.StepId) -> ledger.Effect:
    """The effect that a step of the current timeline had or reused. TimeRefused if there is none to undo."""
    found = step_of(log, run, step)
    done = effects_of(log, run, [found]).get(step)
    refused = undo_refusal(run, found, done, None)
    if done is None or refused is not None:
        raise TimeRefused(run, f"step {step}: {refused}")
    return done.effect


def undo_refusal(run: str, step: facts.Step, done: RecordedEffect | None, begun: facts.Step | None) -> str | None:
    """Why there is nothing to undo, or not from here."""
    if step.sort == "undo":
        return f"it undoes step {step.undoes} itself"
    if done is None:
        what = "reads" if step.effect == "reads" else "never began" if step.effect else f"is a {step.sort}"
        return f"it did nothing to the world ({step.name} {what})"
    if done.effect.status == "undone":
        return f"it was undone already{f', by step {begun.id}' if begun is not None else ''}"
    if done.effect.status == "did_not_happen":
        return f"{step.name} did not happen"
    if done.effect.status in ("open", "in_doubt"):
        return f"whether {step.name} happened is not known; settle that first"
    if done.run != run:
        return f"it was done by {done.run}; undo it there"
    if begun is not None and begun.status == "in_doubt":
        return f"undoing it began, as step {begun.id}, and whether that happened is not known"
    return None


def effects_of(log: Log, run: str, steps: Iterable[facts.Step]) -> dict[e.StepId, RecordedEffect]:
    """The effects of steps, from the ledgers of their runs: their own effects, and reused ones."""
    books: dict[str, dict[int, ledger.Effect]] = {}
    found: dict[e.StepId, RecordedEffect] = {}
    for step in steps:
        owner, seq = run, step.attempts[0].started if step.attempts and step.effect not in (None, "reads") else 0
        adopted = log.event(run, step.output) if step.output and not step.attempts and step.sort == "tool" else None
        if isinstance(adopted, e.StepAdopted):
            owner, seq = adopted.run, adopted.seq
        owner = _owner(log, owner, seq) if seq else ""
        if owner and owner not in books:
            books[owner] = {effect.started: effect for effect in log.ledger(owner).effects}
        effect = books[owner].get(seq) if owner else None
        if effect is not None:
            found[step.id] = RecordedEffect(owner, effect)
    return found


def _owner(log: Log, run: str, seq: int) -> str:
    """The run of a run tree whose own log holds an event; "" where that is archived."""
    try:
        return log.owner(run, seq)
    except RunUnknown:
        return ""


def step_of(log: Log, run: str, step: e.StepId) -> facts.Step:
    place_at(log, run, f"{step}:after")  # which names the existing steps if there is no such step
    found = log.state(run).fold.step(step)
    if found is None:
        raise TimeRefused(run, f"step {step} was rewound; name a step of the current timeline")
    return found


class RecordedEffect(NamedTuple):
    """One run's record of an effect, with the records of other runs of the run tree under the same key."""

    run: str
    effect: ledger.Effect
    others: tuple[RecordedEffect, ...] = ()

    def is_of(self, run: str) -> bool:
        """Whether a run has it on record itself."""
        return self.run == run or any(each.run == run for each in self.others)
