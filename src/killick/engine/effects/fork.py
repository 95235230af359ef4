"""Makes a run that leaves another one at a place in its time, under other conditions. The other run stays as it is."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final, cast, get_args

import msgspec

from killick.engine import renewals
from killick.engine.control.inbox import Verb
from killick.engine.effects.branch_point import Cut, cut
from killick.engine.effects.rewind import refuse_own
from killick.errors import HeadMoved, TimeRefused
from killick.log.log import Log
from killick.log.writer import Entry
from killick.model import events as e
from killick.model.facts import Step
from killick.model.fold import Fold
from killick.model.ledger import Capture
from killick.store.records import Delivery
from killick.text import meant

UNCHANGED: Final[Any] = msgspec.UNSET
"""The fork has its parent's input."""


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """The differences of a fork from its parent. `output` gives steps that had ended another outcome."""

    output: Mapping[e.StepId, Any] = {}
    set: Mapping[str, Any] = {}
    unset: Collection[str] = ()
    input: Any = UNCHANGED
    model: str | None = None
    effects: e.ForkEffects = "recorded"


class Fork(msgspec.Struct, frozen=True):
    """A fork to be created, and its resulting state."""

    forked: e.RunForked
    entries: tuple[Entry, ...]
    sends: tuple[Delivery, ...]
    fold: Fold


def fork(
    log: Log, parent: str, place: str, run: str, conditions: Conditions, *, at: int, by: str | None = None,
    because: str | None = None, workspace: str | None = None, captured: Capture | None = None,
    unrecorded: int | None = None,
) -> Fork:  # fmt: skip
    """The first events of a fork: it shares a run's history up to a place, with its files in a workspace of its own.

    `captured` is a snapshot of its parent's files that is not on record; it counts while the parent took none since.
    `unrecorded` is the change of the files that had no snapshot when the caller looked. Raises HeadMoved if there is
    another one by now.
    """
    found = cut(log, parent, place, anew=conditions.output, is_fork=True)
    facts = found.fold.facts
    refuse_own(facts.agent, parent)
    if not facts.input:
        raise TimeRefused(parent, "it has no events before its start; fork it at start")
    generation = facts.generation
    if found.keep:
        # Shared events may have been rewound in between.
        generation = log.ledger(parent, max((found.seq, *found.keep))).facts.generation
    ledger = log.ledger(parent) if workspace is not None else None
    files = None if ledger is None else ledger.files_from(found.files_seq)
    if ledger is not None and unrecorded is not None and ledger.uncaptured() not in (0, unrecorded):
        raise HeadMoved(parent, expected=unrecorded, actual=ledger.uncaptured())
    if ledger is not None and captured is not None and captured.after == ledger.uncaptured() <= found.files_seq:
        files = captured.root
    forked = e.RunForked(
        at=at, run=run, parent=parent, cut=found.seq, keep=found.keep, generation=generation + 1,
        effects=conditions.effects, model=conditions.model, renews_input=conditions.input is not UNCHANGED, by=by,
        files=files, workspace=workspace,
    )  # fmt: skip
    values: dict[str, Any] = {"because": because} if because else {}
    if conditions.input is not UNCHANGED:
        values["input"] = conditions.input
    entries = [Entry(forked, values)]
    for step, output in conditions.output.items():
        entries.append(_overridden(log, parent, found, step, output, at=at, by=by))
    if conditions.set or conditions.unset:
        version = facts.context_version
        changed = e.ContextChanged(at=at, version=version + 1, saw=version, by=by or "a person")
        entries.append(Entry(changed, {"set": dict(conditions.set), "unset": list(conditions.unset)}))
    return Fork(forked, tuple(entries), tuple(copied(log, parent, run, found)), found.fold)


def _overridden(log: Log, parent: str, found: Cut, name: e.StepId, output: Any, *, at: int, by: str | None) -> Entry:
    """The outcome that a step has in the fork."""
    past = log.state(parent).fold.step(name)
    step = found.fold.step(name)
    if step is None or step.status in ("done", "failed", "cancelled"):
        step = past if step is None and past is not None and past.sort == "decision" else None
    path, dot, number = name.rpartition(".")
    if step is None or found.fold.step(f"{path}{dot}{int(number) + 1}") is not None:  # its branch continued after it
        raise TimeRefused(parent, f"step {name} did not end at {found.label}; fork at {name}:after to change it")
    if step.sort == "decision":
        decision = {**log.data(parent, step.output), "choice": output}
        return Entry(e.DecisionMade(at=at, step=name, by=by or "a person"), decision)
    if step.sort not in ("tool", "model", "wait") or step.name == "sleep":
        raise TimeRefused(parent, f"step {name} is a {step.name}, which has no output to change")
    values: dict[str, Any] = {
        "output": _answer(log, parent, found.fold, step, output) if step.sort == "wait" else output
    }
    if step.sort == "model" and past is not None and past.output:
        reply = log.data(parent, past.output).get("reply")
        values |= {"reply": reply} if reply else {}
    return Entry(e.StepOverridden(at=at, step=name, by=by or "a person"), values)


def _answer(log: Log, parent: str, fold: Fold, step: Step, output: Any) -> Any:
    """A given answer, as answers are recorded."""
    wait = fold.facts.waits.get(step.id)
    if wait is not None and wait.waits_for == "child":
        return {"status": "completed", "result": output, "failure": None}
    if wait is None or wait.waits_for == "event":
        return output
    given: dict[str, Any] = {"kind": output} if not isinstance(output, dict) else dict(cast("Any", output))
    if given.get("kind") in get_args(Verb):
        return {"value": None, **given}
    takes = log.data(parent, wait.opened).get("verbs") or ()
    if isinstance(output, str) and "approve" in takes and (hint := meant(output, takes, otherwise="")):
        text = f'{{"kind": "respond", "value": "{output}"}}'
        raise TimeRefused(parent, f"{output!r} is no answer to step {step.id}; {hint} Give {text} if it is a text")
    return {"kind": "respond", "value": cast("Any", output)}


def copied(log: Log, parent: str, run: str, found: Cut) -> list[Delivery]:
    """The messages that a run got and had not taken at a cut, for a fork of it. Answers belong to dropped waits."""
    return [
        renewals.forwarded(log, message, run)
        for message in log.store.messages(parent)
        if renewals.goes_along(message) and (message.taken is None or found.drops(message.taken))
    ]
