"""The items of a state's parts: their matching keys, and how to read them.

Changes nothing, and reads an item only when it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from killick.model.facts import Step
from killick.model.state import Output, State


class Item(NamedTuple):
    """One item of a part: its matching key, its content hash, and its reader."""

    key: str
    step: str
    made_of: object
    last: int
    load: Callable[[], Any]


def items(state: State, part: str) -> list[Item]:
    """Returns the items of a list part, in order."""
    fold = state.fold
    if part == "pending":
        waits = fold.facts.waits.values()
        return [Item(wait.step, wait.step, wait, wait.opened, partial(state.waiting, wait)) for wait in waits]
    if part == "failures":
        return [_failure(state, nth, seq) for nth, seq in enumerate(fold.failures)]
    if part == "outputs":
        steps = [step for step in fold.steps if step.status == "done"]
        return [Item(step.id, step.id, step, _last(step), partial(_output, state, step)) for step in steps]
    indexes: Sequence[int] = getattr(fold, {"retries": "retried"}.get(part, part))
    numbered = enumerate(fold.steps[index] for index in indexes)
    return [Item(step.id, step.id, step, _last(step), partial(_nth, state, part, nth)) for nth, step in numbered]


def _nth(state: State, part: str, nth: int) -> Any:
    return getattr(state, part)[nth]


def _output(state: State, step: Step) -> Output:
    return Output(step.id, step.name, state.output_of(step))


def _failure(state: State, nth: int, seq: int) -> Item:
    event = state.event(seq)
    step = str(getattr(event, "step", None) or "run")
    key = f"{event.__struct_config__.tag} {step} {getattr(event, 'attempt', None)}"
    return Item(key, step, seq, seq, partial(_nth, state, "failures", nth))


def _last(step: Step) -> int:
    attempts = (max(attempt.started, attempt.ended) for attempt in step.attempts)
    return max(step.intended, step.ended, step.output, *attempts)
