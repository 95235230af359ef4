"""Previews of commands in plain words. A preview raises the error that the command would raise.

Reads the record as it is now: a worker may have advanced the run by the time that the command takes effect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

import msgspec

from killick.client import time_travel
from killick.client.client import Client
from killick.client.operations import refuse_answer
from killick.engine import renewals
from killick.engine.approval.argument_edits import shown
from killick.engine.control.inbox import refuse_own
from killick.engine.control.interventions import entries_of
from killick.engine.effects.fork import UNCHANGED, Conditions, fork
from killick.engine.waits import waits
from killick.errors import AnswerRefused, KillickError, RunBroken, RunExists, RunUnknown, TimeRefused
from killick.history.phrasing import counted, listed, span
from killick.history.rewind_preview import preview_rewind
from killick.history.undo_preview import UndoPreview
from killick.log import boundaries
from killick.model import events as e
from killick.model.facts import Facts
from killick.presenting import time_travel as report
from killick.store.protocol import is_held
from killick.store.records import ENDED

LINES_MAX: Final = 12
CHARS: Final = 80


class Will(msgspec.Struct, frozen=True):
    """A preview: one sentence, and further lines."""

    will: str
    more: tuple[str, ...] = ()


class RunPreview:
    """The state of a run that a command is about to act on."""

    def __init__(self, client: Client, run: str) -> None:
        self.client = client
        self.given = run
        self.run = renewals.latest(client.runtime.log, run)
        row = client.runtime.store.index(self.run)
        if row is None:
            raise RunUnknown(run)
        self.status = row.status
        self.state = client.runtime.log.state(self.run)
        self.fold = self.state.fold
        self.facts: Facts = self.fold.facts
        self.broken = client.runtime.store.quarantined(self.run)
        head = client.runtime.store.head(self.run)
        self.holder = head.holder if head is not None and is_held(client.runtime.store, head) else None

    @property
    def is_over(self) -> bool:
        return self.status in ENDED

    def refuse_over(self) -> None:
        if self.is_over:
            raise AnswerRefused(self.run, f"it is over ({self.status})")

    def refuse_broken(self) -> None:
        if self.broken is not None:
            raise RunBroken(self.run, seq=self.facts.seq, reason=self.broken)

    @property
    def lands(self) -> str:
        """When a command takes effect."""
        if self.holder is None:
            return "It takes effect at once: no process has the run."
        return f"It takes effect at the next step boundary: {self.holder} has the run."

    def step(self, name: str) -> str:
        found = self.fold.step(name)
        return f"step {name} ({found.name})" if found is not None else f"step {name}"

    def tried(self, command: str, **body: Any) -> None:
        """Raise where the record rules the command out."""
        entries_of(self.fold, {"command": command, **body}, by="a person", at=self.client.runtime.clock.now_us())


class CommandOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """A command for one of several runs: what was done or would be done, or why it is refused."""

    run: str
    done: str | None = None
    refused: str | None = None


def outcome(run: str, does: Callable[[], str]) -> CommandOutcome:
    """What a command says of a run, without the run's id before it."""
    try:
        return CommandOutcome(run=run, done=does().removeprefix(f"{run} "))
    except KillickError as error:
        return CommandOutcome(run=run, refused=str(error).removeprefix(f"{run}: "))


# commands -----------------------------------------------------------------------------------------


def pause(run: RunPreview) -> Will:
    run.refuse_over()
    if run.facts.cancelling:
        raise AnswerRefused(run.run, "it is being cancelled, and ends when it is run next")
    if run.status == "paused":
        raise AnswerRefused(run.run, "it is paused already")
    summary = f"{run.run} stops at its next step and stays there until it is resumed."
    return Will(summary, (*_open(run), "What people are asked can still be answered.", run.lands))


def resume(run: RunPreview) -> Will:
    facts = run.facts
    if run.status in ("completed", "cancelled"):
        raise AnswerRefused(run.run, f"it is over ({run.status}); start another")
    if facts.cancelling:
        raise AnswerRefused(run.run, "it is being cancelled, and ends when it is run next")
    if run.status == "failed":
        failed: Any = run.client.runtime.log.event(run.run, facts.ended)
        at = f"to before {run.step(failed.step)}, which failed" if failed.step else "to where its code failed"
        summary = f"{run.run} is rewound {at}, and makes a new attempt."
        return Will(summary, ("If steps were undone because it failed, it is rewound to the first of them.", _TWICE))
    if run.status == "paused":
        return Will(f"{run.run} continues where it was paused.", (_TWICE,))
    if facts.mend:
        held = run.client.runtime.log.event(run.run, facts.mend)
        why = "its code and its record disagreed" if isinstance(held, e.RunDiverged) else "its record was repaired"
        if isinstance(held, e.RunQuarantined):
            why = f"its process died {held.deaths} times in a row"
        return Will(f"{run.run} is tried again: {why}.", ("If nothing was fixed, it stops there again.",))
    if run.status == "running" and run.holder is None:
        summary = f"{run.run} is abandoned: its process died. It continues after its last recorded step."
        return Will(summary, (_TWICE,))
    if run.status == "waiting":
        store, agent = run.client.runtime.store, run.state.agent
        if any(row.run == run.run for row in store.due(run.client.runtime.clock.now_us(), limit=1_000, agents=[agent])):
            move = f'if no app declares it any more, declare it again, or give aliases=["{agent}"] to its new name'
            raise AnswerRefused(run.run, f"it is due, and continues when a worker that declares {agent} runs; {move}")
        raise AnswerRefused(run.run, "it is waiting, and not held back; `killick inbox` shows how to answer")
    raise AnswerRefused(run.run, f"it is {run.status}, and not held back")


def cancel(run: RunPreview, compensate: bool) -> Will:
    run.refuse_over()
    if run.facts.cancelling:
        raise AnswerRefused(run.run, "it is being cancelled already")
    count = len(run.fold.effects)
    if compensate:
        summary = f"{run.run} ends as cancelled, and its effects are undone, the last first."
        more = f"{counted(count, 'step')} with an effect; those with a compensation are undone, the others are listed."
    else:
        summary = f"{run.run} ends as cancelled. Its effects stay."
        more = f"{counted(count, 'step')} with an effect; none is undone." if count else ""
    asked = len([each for each in run.facts.waits.values() if each.waits_for in ("answer", "settlement")])
    lines = (
        more,
        f"{counted(asked, 'question')} to people {'is' if asked == 1 else 'are'} withdrawn." if asked else "",
    )
    children = [child.run for child in run.client.runtime.log.ledger(run.run).children if child.status not in ENDED][:5]
    below = f"Its children are cancelled too: {listed(children)}." if children else ""
    return Will(summary, tuple(line for line in (*lines, below, run.lands) if line))


def change(run: RunPreview, changes: Mapping[str, Any], unset: Sequence[str], saw: int | None) -> Will:
    run.refuse_over()
    if not changes and not unset:
        raise AnswerRefused(run.run, "change what? Give `set` or `unset`")
    if own := [name for name in changes if name in ("by", "unset", "saw", "because")]:
        raise AnswerRefused(run.run, f"{own[0]}: cannot be set from here; set it in the agent")
    run.tried("set", set=dict(changes), unset=list(unset), saw=saw)
    time_travel.refuse_misfit(run.client.runtime.log, run.run, dict(changes))
    context = cast("Mapping[str, Any]", run.state.context.document or {})
    version = run.facts.context_version
    lines = [f"{name}: {shown(context[name], CHARS) if name in context else 'nothing'} → {shown(value, CHARS)}"
             for name, value in changes.items()]  # fmt: skip
    lines += [f"{name}: {shown(context.get(name), CHARS)} → nothing" for name in unset]
    summary = f"The context of {run.run} goes from version {version} to {version + 1}."
    return Will(summary, (*lines, "Its code sees the change when its next step returns.", run.lands))


def prioritize(run: RunPreview, priority: int) -> Will:
    run.refuse_over()
    summary = f"{run.run} has priority {priority} instead of {run.facts.priority}."
    return Will(summary, ("Of the runs that are due, workers take those with the highest priority first.",))


def note(run: RunPreview) -> Will:
    run.refuse_over()
    return Will(f"A note with your name is added to the record of {run.run}. Its code never sees it.")


def override(run: RunPreview, step: str, output: Any) -> Will:
    run.refuse_over()
    run.tried("override", step=step, output=output)
    refuse_answer(run.client.log, run.run, step, output)
    summary = f"{run.step(step)} of {run.run} is given this result instead of being executed: {shown(output, CHARS)}."
    asked = ("The question that it waits for is withdrawn.",) if step in run.facts.waits else ()
    return Will(_begun(summary), (*asked, "The record names you as the source of the result, not the tool.", run.lands))


def skip(run: RunPreview, step: str) -> Will:
    run.refuse_over()
    run.tried("skip", step=step)
    wait = run.facts.waits.get(step)
    found = run.fold.step(step)
    if found is not None and found.sort == "wait":
        then = (
            "Its sleep ends."
            if wait is not None and wait.waits_for == "time"
            else "It takes its default; without one its code gets killick.errors.Skipped."
        )
    else:
        then = "It is not executed; its code gets killick.errors.Skipped."
    return Will(_begun(f"{run.step(step)} of {run.run} ends without being executed."), (then, run.lands))


def retry(run: RunPreview, step: str | None) -> Will:
    run.refuse_over()
    run.tried("retry", step=step)
    delayed = [each for index in run.facts.pending.values() if (each := run.fold.steps[index]).status == "delayed"]
    found = run.fold.step(step) if step else delayed[0]
    assert found is not None
    left = (found.delayed_until or 0) - run.client.runtime.clock.now_us()
    summary = f"{_begun(run.step(found.id))} is retried now instead of in {span(max(left, 0))}."
    return Will(summary, (f"{counted(len(found.attempts), 'attempt')} made so far; this is the next one.", run.lands))


def say(run: RunPreview, text: str) -> Will:
    run.refuse_over()
    return Will(
        f"{run.run} gets the message: {shown(text, CHARS)}.", ("Its loop reads it before its next model call.",)
    )


def send(run: RunPreview, name: str) -> Will:
    run.refuse_over()
    refuse_own(run.run, name, None)
    waiting = [wait.step for wait in run.facts.waits.values() if wait.waits_for == "event" and wait.name == name]
    then = f"{_begun(run.step(waiting[0]))} waits for it, and continues with it." if waiting else (
        "Nothing waits for it now: it stays in the inbox until the run asks for its name."
    )  # fmt: skip
    return Will(f"The message {name} is put into the inbox of {run.run}.", (then, "The same id again counts once."))


# time ---------------------------------------------------------------------------------------------

_TWICE: Final = "Its effects stay on its ledger: none is made twice."


def rewind(run: RunPreview, to: str) -> Will:
    if run.run != run.given:
        raise TimeRefused(run.given, f"continues as {run.run}; rewind that run, or fork this one")
    head = run.client.runtime.log.head(run.run)
    if head.parent is not None and boundaries.at(run.client.runtime.log, run.run, to).seq <= head.base:
        raise TimeRefused(run.run, f"the part before {to} belongs to the run that it was forked from; fork that run")
    found = preview_rewind(run.client.runtime.log, run.run, to)
    summary = f"{run.run} is rewound to {found.to}, and continues from there."
    return Will(summary, _cut([*_lines(report.rewind(found, CHARS)), run.lands]))


def _lines(parts: report.Report) -> list[str]:
    return [f"{label}: {line}" for label, lines in parts for line in lines]


def forked(run: RunPreview, at: str, name: str | None, conditions: Conditions) -> Will:
    log = run.client.runtime.log
    waits.refuse_own(name)
    if name is not None and run.client.runtime.store.head(name) is not None:
        raise RunExists(name)
    conditions = time_travel.checked(run.client.runtime.engine, run.given, run.facts.agent, conditions, None)
    called = name or time_travel.free_name(run.client.runtime.store, run.given)
    fork(log, run.given, at, called, conditions, at=run.client.runtime.clock.now_us())
    place = boundaries.at(log, run.given, at)
    lines = [f"other output of step {step}: {shown(output, CHARS)}" for step, output in conditions.output.items()]
    lines += [f"other context: {each} = {shown(value, CHARS)}" for each, value in conditions.set.items()]
    lines += [f"context without {each}" for each in conditions.unset]
    lines += [] if conditions.input is UNCHANGED else [f"other input: {shown(conditions.input, CHARS)}"]
    lines += [f"model: {conditions.model}"] if conditions.model else []
    summary = f"A new run, {called}, has the history of {run.given} up to {place.label} and continues from there."
    world = (
        f"It adopts the later effects of {run.given} where it makes the same calls; {report.WORLD[conditions.effects]}."
    )
    return Will(summary, _cut([*(lines or ["nothing is different"]), world, f"{run.given} itself does not change."]))


def undo(found: UndoPreview, settled: str | None) -> Will:
    if found.status is None:
        raise TimeRefused(found.run, f"step {found.step} has no effect that could be undone")
    if found.refuses is not None and settled is None:
        by_hand = "; undo it by hand, then settle it" if found.compensated_by is None else ""
        raise TimeRefused(found.run, f"step {found.step} cannot be undone: {found.refuses}{by_hand}")
    how = {"happened": "is recorded as undone", "not": "is recorded as not undone"}.get(
        settled or "", f"is undone by {found.compensated_by or 'its compensation'}"
    )
    summary = f"Step {found.step}, {report.call_line(found.tool, found.arguments)}, {how}. The run itself continues."
    shared = [line for line in _lines(report.undo(found, CHARS)) if line.startswith("shared by")]
    return Will(summary, _cut([*shared, "The same call again is executed."]))


# small things -------------------------------------------------------------------------------------


def _open(run: RunPreview) -> tuple[str, ...]:
    """Attempts that are open, and end first."""
    pending = [run.fold.steps[index] for index in list(run.facts.pending.values())[:50]]
    tried = [s for s in pending if s.status == "running" and s.attempts and not s.attempts[-1].ended][:3]
    return tuple(f"{_begun(run.step(step.id))} is being tried; that attempt ends first." for step in tried)


def _begun(text: str) -> str:
    return text[:1].upper() + text[1:]


def _cut(lines: Sequence[str]) -> tuple[str, ...]:
    if len(lines) <= LINES_MAX:
        return tuple(lines)
    return (*lines[: LINES_MAX - 2], f"and {len(lines) - LINES_MAX + 1} more", lines[-1])
