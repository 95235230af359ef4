"""The changes that events make to a fold: one handler a kind of event, for those that change the state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from msgspec.structs import replace

from killick.model import events as e
from killick.model import system_events
from killick.model.crash_loop import counted
from killick.model.facts import (
    OWN_TAGS,
    Attempt,
    ContractInForce,
    Hook,
    KeptEvents,
    Queued,
    Step,
    Trigger,
    Wait,
    is_model,
)
from killick.model.fold_data import FoldData, is_started_at


def _run_started(fold: FoldData, seq: int, event: e.RunStarted) -> None:
    facts = fold.facts
    facts.run, facts.agent, facts.build = event.run, event.agent, event.build
    facts.priority, facts.tags = event.priority, event.tags
    facts.parent, facts.parent_step, facts.follows = event.parent, event.parent_step, event.follows
    facts.started_at = facts.changed_at = event.at
    facts.input, facts.key = seq, event.key
    facts.starters = _with_starter(event.starters, event.by)


def _with_starter(starters: tuple[str, ...], by: str | None) -> tuple[str, ...]:
    return starters if by is None or by in starters else (*starters, by)


def _kept(fold: FoldData, seq: int, event: e.RunForked | e.RunRewound) -> None:
    if event.keep:
        fold.facts.kept += (KeptEvents(seq, event.cut, event.keep),)


def _clear_holds(fold: FoldData, seq: int, event: e.Event) -> None:
    """Clears holds and the holder: after a rewind, in a fork, or on resume."""
    facts = fold.facts
    facts.paused, facts.cancelling = "", False
    facts.mend = facts.ended = facts.rejected = 0
    facts.ended_as = facts.crashes = None


def _run_resumed(fold: FoldData, seq: int, event: e.RunResumed) -> None:
    """Resuming does not take the lease; a holder that resumes its own run keeps it.

    A cancellation request stays in force unless the run ended.
    """
    facts = fold.facts
    cancelling = facts.cancelling and not facts.ended
    _clear_holds(fold, seq, event)
    facts.cancelling = cancelling
    facts.taken = facts.taken and event.by == "killick"
    if facts.trigger is not None:
        facts.trigger = replace(facts.trigger, resumed=event.at)


def _run_forked(fold: FoldData, seq: int, event: e.RunForked) -> None:
    _clear_holds(fold, seq, event)
    _kept(fold, seq, event)
    facts = fold.facts
    facts.run, facts.forked_from, facts.generation = event.run, event.parent, event.generation
    facts.fork_effects, facts.model = event.effects, event.model or facts.model
    facts.starters = _with_starter(facts.starters, event.by)
    # No parent waits for a fork of a child, and a fork does not inherit its parent's trigger tags.
    facts.parent = facts.parent_step = facts.follows = facts.renewed_as = None
    facts.tags = tuple(tag for tag in facts.tags if not tag.startswith(OWN_TAGS))
    facts.started_at = facts.changed_at = event.at
    facts.taken = False
    if event.renews_input:
        facts.input = seq


def _run_rewound(fold: FoldData, seq: int, event: e.RunRewound) -> None:
    _clear_holds(fold, seq, event)
    _kept(fold, seq, event)
    fold.facts.generation = event.generation
    fold.facts.taken = False


def _run_taken(fold: FoldData, seq: int, event: e.RunTaken) -> None:
    facts = fold.facts
    facts.epoch, facts.build, facts.taken, facts.alone = event.epoch, event.build, True, event.alone
    facts.cancel_begun = facts.cancelling
    for index in facts.pending.values():
        step = fold.steps[index]
        # The previous holder is gone; whether its open attempt took effect is unknown.
        if step.status == "running" and step.effect == "at_most_once":
            fold.move(fold.steps.changing(index), "in_doubt", event, seq)


def _lease_lapsed(fold: FoldData, seq: int, event: e.LeaseLapsed) -> None:
    facts = fold.facts
    facts.taken = False
    facts.deaths += 1
    facts.crashes = counted(facts.crashes, seq, event.holder, event.until, alone=event.alone)


def _run_quarantined(fold: FoldData, seq: int, event: e.RunQuarantined) -> None:
    facts = fold.facts
    facts.mend = seq
    if facts.crashes is not None:
        facts.crashes = replace(facts.crashes, quarantined=True)


def _run_paused(fold: FoldData, seq: int, event: e.RunPaused) -> None:
    """A model does not take over a pause, because a model may end its own."""
    if not (fold.facts.paused and is_model(event.by)):
        fold.facts.paused = event.by or "a person"


def _run_prioritized(fold: FoldData, seq: int, event: e.RunPrioritized) -> None:
    fold.facts.priority = event.priority


def _run_tagged(fold: FoldData, seq: int, event: e.RunTagged) -> None:
    fold.facts.tags = event.tags


def _blocked(fold: FoldData, seq: int, event: e.Event) -> None:
    fold.facts.mend = seq
    fold.facts.diverged = seq if isinstance(event, e.RunDiverged) else 0


def _cancel_requested(fold: FoldData, seq: int, event: e.CancelRequested) -> None:
    if fold.facts.crashes is not None:
        # A person intervened: the quarantine ends, and the crash count restarts.
        fold.facts.mend = 0 if fold.facts.crashes.quarantined else fold.facts.mend
        fold.facts.crashes = None
    fold.facts.cancelling, fold.facts.cancel_begun = True, False
    if fold.facts.trigger is not None or fold.facts.hook is not None:
        # Nothing to unwind: a trigger or a hook ends on request.
        fold.facts.ended, fold.facts.ended_as = seq, "cancelled"


def _run_ended(fold: FoldData, seq: int, event: e.Event) -> None:
    facts, kind = fold.facts, type(event)
    facts.ended = seq
    facts.ended_as = "failed" if kind is e.RunFailed else "cancelled" if kind is e.RunCancelled else "completed"
    if kind is e.RunFailed:
        fold.failures.append(seq)
    elif isinstance(event, e.RunRenewed):
        facts.renewed_as = event.run


def _step_intended(fold: FoldData, seq: int, event: e.StepIntended) -> None:
    step = fold.open_step(seq, event)
    if event.sort == "scope" and event.name == "guests":
        fold.facts.hosted = True
    if event.verdict is not None:
        _judged(fold, step, event, seq, event.verdict)


def _step_started(fold: FoldData, seq: int, event: e.StepStarted) -> None:
    _step_intended(fold, seq, event)
    _attempt_started(fold, seq, event)


def _judged(fold: FoldData, step: Step, event: e.Event, seq: int, verdict: e.Verdict) -> None:
    """A rejection ends the step. Consecutive rejections are counted, to stop a model that does not learn."""
    if verdict.ruling == "reject":
        fold.facts.rejected += 1
        step.output = seq
        fold.failures.append(seq)
        fold.move(step, "failed", event, seq)
    elif step.sort != "model":
        fold.facts.rejected = 0


def _step_edited(fold: FoldData, seq: int, event: e.StepEdited) -> None:
    """Applies an edit, unless the contract rejected it."""
    step = fold.changing(event.step)
    if step is not None and (event.verdict is None or event.verdict.ruling != "reject"):
        step.edited, step.effect = seq, event.effect


def _step_delayed(fold: FoldData, seq: int, event: e.StepDelayed) -> None:
    step = fold.changing(event.step)
    if step is not None:
        step.delayed_until, step.delayed_at, step.queued = event.until, event.at, event.queued
        fold.move(step, "delayed", event, seq)


def _step_done(
    fold: FoldData, seq: int, event: e.StepAdopted | e.StepOverridden | e.ChildSpawned | e.MessageSent
) -> None:
    if isinstance(event, e.StepAdopted):
        fold.facts.adopted.append(event.key)
    if (step := fold.changing(event.step)) is not None:
        step.output = seq
        fold.move(step, "done", event, seq)


def _step_ended(fold: FoldData, seq: int, event: e.StepEnded) -> None:
    step = fold.changing(event.step)
    if step is not None and event.verdict is not None:
        _judged(fold, step, event, seq, event.verdict)
    elif step is not None:
        step.output = seq
        fold.move(step, "done" if event.outcome == "returned" else event.outcome, event, seq)
        if event.outcome == "failed":
            fold.failures.append(seq)


def _attempt_started(fold: FoldData, seq: int, event: e.Started) -> None:
    step = fold.changing(event.step)
    if step is None:
        return
    if not step.attempts and step.effect not in (None, "reads"):
        fold.effects.append(fold.facts.pending[event.step])
    step.attempts.append(Attempt(seq, event.at, event.epoch))
    step.delayed_until = None
    fold.move(step, "running", event, seq)


def _attempt_ended(fold: FoldData, seq: int, event: e.AttemptEnded) -> None:
    step = fold.changing(event.step)
    if step is None or not 0 < event.attempt <= len(step.attempts) or event.key is not None:
        return
    attempt = step.attempts[event.attempt - 1]
    attempt.ended, attempt.ended_at = seq, event.at
    attempt.outcome, attempt.retry_at = event.outcome, event.retry_at
    if event.outcome == "returned":
        step.output = seq
        fold.move(step, "done", event, seq)
        return
    fold.failures.append(seq)
    if sum(tried.outcome not in (None, "returned") for tried in step.attempts) == 1:
        fold.retried.append(fold.facts.pending[event.step])
    if event.retry_at is not None:
        step.delayed_until, step.delayed_at = event.retry_at, event.at
        fold.move(step, "delayed", event, seq)
    elif event.outcome == "unknown" and step.effect in ("at_most_once", "transaction"):
        fold.move(step, "in_doubt", event, seq)
    else:
        step.output = seq
        fold.move(step, "failed", event, seq)


def _attempt_settled(fold: FoldData, seq: int, event: e.AttemptSettled) -> None:
    step = fold.changing(event.step)
    if step is None or not step.attempts or (event.started and not is_started_at(step, event.started)):
        return  # this settles another timeline's attempt, whose step had the same number
    step.delayed_until = None
    if event.settlement == "did_not_happen":
        fold.move(step, "intended", event, seq)
    else:
        step.output = seq
        fold.move(step, "done" if event.settlement == "happened" else "failed", event, seq)


def _decision_made(fold: FoldData, seq: int, event: e.DecisionMade) -> None:
    step = fold.open_step(seq, e.StepIntended(at=event.at, step=event.step, sort="decision", name="decision"))
    step.output = seq
    fold.decisions.append(fold.facts.pending[event.step])
    fold.move(step, "done", event, seq)


def _wait_opened(fold: FoldData, seq: int, event: e.WaitOpened) -> None:
    facts = fold.facts
    facts.waits[event.step] = Wait(
        event.step, event.waits_for, event.name, event.to, event.deadline, seq, event.at, event.need,
        rule=event.rule, round=event.round,
    )  # fmt: skip
    step = fold.changing(event.step)
    if step is not None:
        step.delayed_until = None
        step.asked = step.asked or event.rule is not None
        fold.move(step, "waiting", event, seq)


def _wait_voted(fold: FoldData, seq: int, event: e.WaitVoted) -> None:
    wait = fold.facts.waits.get(event.step)
    if wait is not None and event.by not in wait.votes:
        channels = wait.channels if event.channel is None else (*wait.channels, (event.by, event.channel))
        fold.facts.waits[event.step] = replace(wait, votes=(*wait.votes, event.by), channels=channels)


def _wait_closed(fold: FoldData, seq: int, event: e.WaitClosed) -> None:
    wait, step = fold.facts.waits.pop(event.step, None), fold.changing(event.step)
    if step is not None and step.sort == "wait":
        step.output = seq
        fold.move(step, "cancelled" if event.how in ("cancelled", "voided") else "done", event, seq)
    elif step is not None and step.status == "waiting":
        # An outcome stays in doubt until it is settled, also if a cancel closes the question about it.
        doubted = wait is not None and wait.waits_for == "settlement"
        fold.move(step, "in_doubt" if doubted else "intended", event, seq)


def _context_changed(fold: FoldData, seq: int, event: e.ContextChanged) -> None:
    facts = fold.facts
    facts.context_version = event.version
    if event.verdict is not None and event.by == "agent":
        facts.rejected = 0
    if event.whole:
        facts.context_parts = []
    facts.context_parts.append(seq)


def _context_refused(fold: FoldData, seq: int, event: e.ContextRefused) -> None:
    fold.facts.rejected += event.verdict is not None and event.by == "agent"


def _contract_bound(fold: FoldData, seq: int, event: e.ContractBound) -> None:
    facts = fold.facts
    others = tuple(bound for bound in facts.contracts if bound.of != event.of)
    facts.contracts = (*others, ContractInForce(event.digest, seq, event.of)) if event.digest else others


def _plan_made(fold: FoldData, seq: int, event: e.PlanMade) -> None:
    fold.facts.plan, fold.facts.stage = event.stages, None


def _plan_reached(fold: FoldData, seq: int, event: e.PlanReached) -> None:
    fold.facts.stage = event.stage
    if event.stage not in fold.facts.entered:
        fold.facts.entered += (event.stage,)


def _note_made(fold: FoldData, seq: int, event: e.NoteMade) -> None:
    fold.notes.append(seq)


def _trigger_set(fold: FoldData, seq: int, event: system_events.TriggerSet) -> None:
    """Keeps firings, queue and condition state across a redeclaration."""
    known = fold.facts.trigger or Trigger(seq, event.digest, event.sort)
    fold.facts.trigger = replace(known, set=seq, digest=event.digest, sort=event.sort, next=event.next)


def _trigger_fired(fold: FoldData, seq: int, event: system_events.TriggerFired) -> None:
    known = fold.facts.trigger
    if known is not None:
        fold.facts.trigger = replace(
            known,
            next=event.next,
            last=max(known.last, event.due or 0),
            number=max(known.number, event.number),
            fired=known.fired + 1,
            run=event.run,
            queued=tuple(one for one in known.queued if one.number != event.number),
        )


def _trigger_queued(fold: FoldData, seq: int, event: system_events.TriggerQueued) -> None:
    known = fold.facts.trigger
    if known is not None:
        waits = (*known.queued, Queued(event.number, seq, event.at, event.due))
        last = max(known.last, event.due or 0)
        fold.facts.trigger = replace(known, next=event.next, last=last, number=event.number, queued=waits)


def _trigger_passed(fold: FoldData, seq: int, event: system_events.TriggerPassed) -> None:
    known = fold.facts.trigger
    if known is not None:
        waits = tuple(one for one in known.queued if one.number != event.number)
        # Only scheduled firings set the last time; conditions are skipped when they are evaluated.
        last = max(known.last, event.last) if known.sort in ("cron", "every") else known.last
        fold.facts.trigger = replace(known, next=event.next, last=last, queued=waits)


def _trigger_turned(fold: FoldData, seq: int, event: system_events.TriggerTurned) -> None:
    known = fold.facts.trigger
    if known is not None:
        fold.facts.trigger = replace(known, next=event.next, holds=event.holds)


def _hook_set(fold: FoldData, seq: int, event: system_events.HookSet) -> None:
    """A redeclared hook keeps its cursor."""
    hook = fold.facts.hook
    fold.facts.hook = Hook(event.position if hook is None else hook.cursor, seq)


def _hook_moved(
    fold: FoldData, seq: int, event: system_events.HookCalled | system_events.HookDropped | system_events.HookMoved
) -> None:
    hook = fold.facts.hook
    if hook is not None:
        fold.facts.hook = Hook(event.position, hook.set)


def _hook_failed(fold: FoldData, seq: int, event: system_events.HookFailed) -> None:
    hook = fold.facts.hook
    if hook is not None:
        fold.facts.hook = Hook(hook.cursor, hook.set, event.position, event.attempt, event.retry_at, event.at)


HANDLERS: Final[dict[type[e.Event], Callable[[FoldData, int, Any], None]]] = {
    e.RunStarted: _run_started,
    e.RunForked: _run_forked,
    e.RunTaken: _run_taken,
    e.LeaseLapsed: _lease_lapsed,
    e.RunQuarantined: _run_quarantined,
    e.RunPaused: _run_paused,
    e.RunResumed: _run_resumed,
    e.RunPrioritized: _run_prioritized,
    e.RunTagged: _run_tagged,
    e.RunDiverged: _blocked,
    e.RunRewound: _run_rewound,
    e.RunRepaired: _blocked,
    e.RunRenewed: _run_ended,
    e.CancelRequested: _cancel_requested,
    e.RunCompleted: _run_ended,
    e.RunFailed: _run_ended,
    e.RunCancelled: _run_ended,
    e.StepIntended: _step_intended,
    e.StepStarted: _step_started,
    e.StepEdited: _step_edited,
    e.StepDelayed: _step_delayed,
    e.StepAdopted: _step_done,
    e.StepOverridden: _step_done,
    e.StepEnded: _step_ended,
    e.AttemptStarted: _attempt_started,
    e.AttemptEnded: _attempt_ended,
    e.AttemptSettled: _attempt_settled,
    e.DecisionMade: _decision_made,
    e.WaitOpened: _wait_opened,
    e.WaitVoted: _wait_voted,
    e.WaitClosed: _wait_closed,
    e.ChildSpawned: _step_done,
    e.MessageSent: _step_done,
    e.ContextChanged: _context_changed,
    e.ContextRefused: _context_refused,
    e.ContractBound: _contract_bound,
    e.PlanMade: _plan_made,
    e.PlanReached: _plan_reached,
    e.NoteMade: _note_made,
    system_events.TriggerSet: _trigger_set,
    system_events.TriggerFired: _trigger_fired,
    system_events.TriggerQueued: _trigger_queued,
    system_events.TriggerPassed: _trigger_passed,
    system_events.TriggerTurned: _trigger_turned,
    system_events.HookSet: _hook_set,
    system_events.HookCalled: _hook_moved,
    system_events.HookFailed: _hook_failed,
    system_events.HookDropped: _hook_moved,
    system_events.HookMoved: _hook_moved,
    # The logs of seals, tokens and entries end after each, so that they are never due. Later ones are still appended.
    system_events.StoreSealed: _run_ended,
    system_events.StoreVerified: _run_ended,
    system_events.TokenIssued: _run_ended,
    system_events.TokenRevoked: _run_ended,
    system_events.EntryKept: _run_ended,
    system_events.EntryDropped: _run_ended,
}
