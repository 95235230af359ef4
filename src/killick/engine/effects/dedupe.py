"""Deduplication of effects over this timeline, abandoned timelines and the other runs of the run tree.

R17, R18 and R34: a recorded result is adopted, an effect in doubt is reconciled first, a new one may need approval.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from msgspec.structs import replace

from killick.definitions.policy import DidNotHappen, Effect, Happened, Unknown
from killick.engine.approval.verdicts import PendingVerdict
from killick.engine.control.commands import command
from killick.engine.control.inbox import FORKED, SETTLEMENT_VERBS
from killick.engine.effects.reconcile import RecordedOutcome, ask_person, reconciled, stopped
from killick.engine.effects.run_tree import RecordedEffect
from killick.engine.execution import Branch, Execution
from killick.engine.replay import short
from killick.engine.steps.intention import restored
from killick.engine.steps.step_state import StepState
from killick.engine.waits.waits import binding
from killick.errors import KillickError, NotDone, StoreError, ValueErased
from killick.log.writer import Entry
from killick.model import events as e
from killick.model import ledger
from killick.model.chunks import through_codec
from killick.model.codec import digest
from killick.model.failure import Failure
from killick.model.ledger import SENDING

_ANNOUNCE_SECONDS: Final = 0.05
"""The first pause between two attempts to announce a fork; doubled each time."""

OWN_ONLY: Final = ("reads", "workspace", None)
"""The effect classes that timelines never share: files are restored with the run, and a fork has its own."""


async def _announced(ex: Execution, branch: Branch) -> None:
    """Tell all ancestors of a fork that it exists, before it acts: from then on they read its effects."""
    tree = ex.run_tree
    if tree.is_announced:
        return
    engine = ex.engine
    for parent, fork in tree.ancestry():
        body, pause = {"command": "forked", "fork": fork.run, "cut": fork.base}, _ANNOUNCE_SECONDS
        while True:
            try:
                is_known = fork.run in engine.log.ledger(parent).facts.forks
                if is_known or command(engine, parent, body, by=None, id=FORKED + fork.run):
                    break
            except StoreError:
                raise  # a fork that acts unannounced is missed by its siblings
            except KillickError:
                break  # it is gone, or does not hold: it does nothing any more
            await asyncio.sleep(engine.clock.nap_seconds(pause))
            ex.refuse(branch)
            pause = min(pause * 2, 1.0)
    tree.is_announced = True


async def earlier(a: StepState) -> RecordedOutcome | None:
    """The outcome of the same action before: in this timeline, by `repeat`, or on an abandoned one."""
    ex, intent = a.ex, a.intent
    if intent.effect in ("reads", None) or intent.sort == "undo":
        return None
    if ex.has_outside_effects and intent.effect != "workspace":
        found = await _adopted(a)
        if found is not None:
            return found
    if intent.policy.repeat == "allow" or a.made:
        return None
    identity = intent.action
    while a.inflight is None and (first := ex.inflight.get((intent.name, identity))) is not None:
        await _until_over(a, first, identity)
    done = ex.run_tree.stood(intent.name, identity, a.step)
    if done is not None:
        prompt = f"{intent.name}({short(intent.recording)}) was done at step {done.effect.step} already. Do it again?"
        if intent.policy.repeat == "recorded" or not await _agreed(a, prompt):
            return await _adopt(a, done)
    if a.inflight is None:
        a.begins(intent.name, identity)
    return None


async def _until_over(a: StepState, first: asyncio.Future[None], identity: e.Digest) -> None:
    """Wait for the same action in another branch, which may itself wait for a person."""
    outer = a.branch.outer
    if outer is not None and any(each.inflight == (a.intent.name, identity) for each in outer.around()):
        raise NotDone(f"{a.intent.name} calls itself with the same arguments; give other arguments")
    a.ex.mark_idle()
    try:
        await asyncio.shield(first)
    finally:
        a.ex.mark_busy()
    a.ex.refuse(a.branch)


async def _agreed(wanted: PendingVerdict, prompt: str) -> bool:
    """Ask a person before acting; the answer to this very question, once given, stays with the step."""
    ex, step = wanted.ex, wanted.step
    intention = {"tool": wanted.intent.name, "arguments": dict(wanted.intent.recording)}
    shown = through_codec(intention, at="intention", secret_key=ex.log.secret_key)
    bound = binding(ex.log.secret_key, ex.run_id, ex.generation, step, "answer", intention=shown, prompt=prompt)
    asked = None
    for seq, event in sorted(ex.record.of(step, e.WaitOpened) + ex.record.of(step, e.WaitClosed)):
        if isinstance(event, e.WaitOpened):
            asked = event.digest
        elif asked == bound and event.how == "answered":
            return bool(ex.record.data(seq)["answer"]["kind"] == "approve")
    closed = await ask_person(
        ex, step, "answer", prompt, intention=intention, verbs=("approve", "reject"),
        before=wanted.written(),
    )  # fmt: skip
    if closed.how == "cancelled":
        ex.write_behind(ex.step_ended(step, "cancelled"))
        ex.refuse(wanted.branch)
    return bool(closed.answer["kind"] == "approve")


async def sent_before(wanted: PendingVerdict) -> bool:
    """Whether a message to another run was sent before, on an abandoned timeline or by another run of the run tree."""
    ex = wanted.ex
    await _announced(ex, wanted.branch)
    left = ex.run_tree.adoptable(SENDING, wanted.step)
    for done in left:
        if done.effect.identity == wanted.intent.action:
            event = e.StepAdopted(
                at=ex.now_us(), step=wanted.step, run=done.run, key=done.effect.key, seq=done.effect.started
            )
            ex.run_tree.adopt(done, wanted.step)
            await ex.recorded(ex.write_behind(Entry(event)))
            return True
    others = [f"that of step {done.effect.step}" for done in left if done.is_of(ex.run_id)]
    await _may_go_on(wanted, others)
    return False


def spawned(wanted: PendingVerdict) -> tuple[str, ledger.Child] | None:
    """The child that was spawned before, and its run, so that it is taken rather than another."""
    asked, log = digest(dict(wanted.intent.recording), at="input"), wanted.ex.engine.log
    for run, child in wanted.ex.run_tree.children(wanted.intent.name):
        if digest({"input": log.data(run, child.spawned).get("input")}, at="input") == asked:
            return run, child
    return None


async def spawned_before(wanted: PendingVerdict) -> ledger.Child | None:
    """A run of the same agent on the same input, spawned on an abandoned timeline or in the run tree."""
    ex = wanted.ex
    await _announced(ex, wanted.branch)
    found = spawned(wanted)
    if found is not None:
        run, child = found
        ex.run_tree.has_child(child.run)
        # Another run's child does not end with this one.
        return child if run == ex.run_id else replace(child, on_parent_end="abandon")
    left = ex.run_tree.children(wanted.intent.name)
    await _may_go_on(wanted, [f"{child.run} at step {child.step}" for run, child in left if run == ex.run_id])
    return None


def was_done(wanted: PendingVerdict, tool: str) -> bool:
    """Whether the same action was done before, so that it is adopted rather than done again."""
    left, action = wanted.ex.run_tree.adoptable(tool, wanted.step), wanted.intent.action
    return any(done.effect.identity == action for done in left)


async def _adopted(a: StepState) -> RecordedOutcome | None:
    """R18: the recorded result of an effect of the same identity on an abandoned timeline, even if worded otherwise."""
    ex, intent = a.ex, a.intent
    tree, identity = ex.run_tree, intent.action
    await _announced(ex, a.branch)
    left = tree.adoptable(intent.name, a.step)
    if tree.is_shared and a.inflight is None:
        # The same action in another branch takes its right first, and then this one another.
        while (first := ex.inflight.get((intent.name, identity))) is not None:
            await _until_over(a, first, identity)
            left = tree.adoptable(intent.name, a.step)
        a.begins(intent.name, identity)
    a.forks = ex.log.ledger.facts.forks
    # An effect that a repair left in doubt is known by its tool alone: its arguments were removed.
    same = [each for each in left if each.effect.identity in (identity, None)]
    # Branches of a gather come in any order: each takes its own again, where there is one.
    for done in sorted(same, key=lambda each: each.effect.step != a.step):
        effect = done.effect
        if effect.status != "happened" and effect.effect == "idempotent" and effect.identity is not None:
            # The remote service honours the key: continuing with it cannot execute the call twice.
            a.key = effect.key
            tree.adopt(done, a.step)
            return None
        if effect.status != "happened":
            # In a thread of this process, or held by another worker: both use the outcome.
            run = done.run if ex.engine.live.of(done.run, effect.step) else tree.is_at_work(done)
            if run is not None:
                a.waited += 1
                until = ex.now_us() + round(min(0.05 * 2**a.waited, 60.0) * 1_000_000)
                await a.delay(until, f"{run} is at {effect.tool} (step {effect.step}), which counts for both")
                return await _adopted(a)
        tree.adopt(done, a.step)  # from here on no other branch may take it
        if effect.status == "happened" or await _settle_left(a, done):
            return await _adopt(a, done)
        tree.release(done)  # another step may still do it
        return await _adopted(a)
    others = [each for each in left if each.is_of(ex.run_id) and each.effect.identity not in (identity, None)]
    a.other_effects = [f"{each.effect.tool} at step {each.effect.step}" for each in others]
    a.slot = tree.slot(intent.name, identity)
    return None


async def allowed(a: StepState) -> None:
    """Ask a person about an effect that was not done before, once a step."""
    if a.ex.has_outside_effects and not a.made and a.intent.effect not in OWN_ONLY and a.intent.sort != "undo":
        await _may_go_on(a, a.other_effects)


async def _may_go_on(wanted: PendingVerdict, others: Sequence[str]) -> None:
    """Whether a new effect needs a person's approval: after a rewind that left similar effects, and in a fork (R34)."""
    ex, mode = wanted.ex, wanted.ex.fork_effects
    call = f"{wanted.intent.name}({short(wanted.intent.recording)})"
    if mode == "none":
        problem = f"{call}: this fork does nothing to the world (effects='none'), and that was not done before"
        await wanted.fail(Failure.of("killick.EffectRefused", problem))
    if others:
        earlier = "; ".join(others[:3])
        prompt = f"{call}: before the rewind it did {earlier}, with other arguments. Do this as well?"
        if not await _agreed(wanted, prompt):
            problem = "a person declined to do it in addition to the earlier action"
            await wanted.fail(Failure.of("killick.Rejected", problem))
    elif mode == "recorded":
        prompt = f"{call}: {ex.run_id}, a fork of {ex.run_tree.own.parent}, wants to do it. Do it?"
        if not await _agreed(wanted, prompt):
            await wanted.fail(Failure.of("killick.Rejected", "a person said not to do it in a fork"))


async def _settle_left(a: StepState, done: RecordedEffect) -> bool:
    """One in doubt is settled first. True: it happened."""
    effect = done.effect
    why = "before the run was taken back" if done.is_of(a.ex.run_id) else f"by {done.run}"
    intended = a.ex.engine.log.data(done.run, effect.intended).get("arguments", {})
    if effect.identity is None:
        intended, why = a.intent.recording, "in a part of the record that did not hold"
    original = Effect(tool=effect.tool, step=effect.step, key=effect.key, arguments=intended)
    found: Any = Unknown()
    by: str | None = "reconcile"
    if a.intent.policy.reconcile is not None:
        found = await reconciled(a, a.intent.policy.reconcile, original)
    if not isinstance(found, Happened | DidNotHappen):
        prompt = f"{effect.tool}({short(intended)}) was started {why}. Did it happen?"
        closed = await ask_person(
            a.ex, a.step, "settlement", prompt, verbs=SETTLEMENT_VERBS, before=a.written(),
            intention={"tool": effect.tool, "arguments": intended, "key": effect.key},
        )  # fmt: skip
        verb, by = closed.answer["kind"], closed.by
        if verb == "stop":
            await a.fail(stopped(closed.by, closed.comment))
        found = Happened(closed.answer.get("value")) if verb == "happened" else DidNotHappen()
    happened = isinstance(found, Happened)
    event = e.AttemptSettled(
        at=a.ex.now_us(), step=effect.step, attempt=effect.attempts, key=effect.key,
        settlement="happened" if happened else "did_not_happen", by=by, started=effect.started,
    )  # fmt: skip
    a.ex.write_behind(*a.written(), Entry(event, {"output": found.result} if isinstance(found, Happened) else {}))
    if isinstance(found, Happened):
        a.late = Happened(found.result)
    else:
        a.ex.record.ruled_out[effect.key] = effect.attempts
    return happened


async def _adopt(a: StepState, done: RecordedEffect) -> RecordedOutcome:
    """Take a recorded result."""
    ex, effect = a.ex, done.effect
    await ex.barrier()  # the outcome may be on its way to the store
    if a.late is not None:
        output = a.late.result
    else:
        try:
            output = ex.engine.log.data(done.run, effect.ended).get("output")
        except ValueErased:
            output = None
    event = e.StepAdopted(at=ex.now_us(), step=a.step, run=done.run, key=effect.key, seq=effect.started)
    seq = ex.write_behind(*a.written(), Entry(event, {"output": output}))
    return RecordedOutcome(seq, restored(a.intent, output, None, a.step))
