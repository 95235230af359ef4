"""Nothing happens twice: what is in doubt is settled, what was done is adopted, what must go is undone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kedge.errors import StepFailed, ValueErased
from kedge.log.handle import Entry
from kedge.model import events as e
from kedge.model import ledger
from kedge.model.failure import Failure
from kedge.model.typed import convert
from kedge.runtime.context import through_codec
from kedge.runtime.execution import Branch, Execution
from kedge.runtime.failures import describe, is_transient
from kedge.runtime.here import HERE
from kedge.runtime.registry import (
    TOOLS,
    AnyTool,
    DidNotHappen,
    Effect,
    Happened,
    Key,
    Policy,
    Shape,
    Tool,
    ToolStep,
    Unknown,
)
from kedge.runtime.replay import OVER, short
from kedge.runtime.signals import Signal
from kedge.runtime.threads import Work
from kedge.runtime.waits import SETTLEMENT_VERBS, Closed, Waiter, binding, until
from kedge.store.base import Claim

if TYPE_CHECKING:
    from kedge.runtime.gate import Attempting

DIED: Final = Failure.told("kedge.Died", "the process died while this attempt was open", kind="died")
NOT_CONFIRMED: Final = Failure.told("kedge.NotConfirmed", "the tool returned, but the world does not show its effect")
RECONCILED_MAX: Final = 4
"""Attempts that a reconciler may let go again, before a person is asked."""


class Found(NamedTuple):
    """An outcome that is on record at a seq."""

    seq: int
    value: Any


def stopped(by: str | None, because: Any) -> Failure:
    """Somebody said to stop, rather than what happened."""
    told = f": {because}" if because else ""
    return Failure.told("kedge.Stopped", f"stopped by {by or 'somebody'}{told}")


# in doubt -----------------------------------------------------------------------------------------


async def settle(a: Attempting, work: Work | None) -> Found | None:
    """Find out what became of an attempt: by its thread, its reconciler, or a person.

    None: it did not happen, and may be tried again. Raises when a person says to stop.
    """
    from kedge.runtime.gate import ABANDON_SECONDS, waited_for

    if work is not None:
        late = await waited_for(work, ABANDON_SECONDS)
        if late.error is None:
            return _settled(a, Happened(late.value), by="late result")
        if late.work is not None:
            return await _ask(a)
    policy = a.intent.policy
    if policy.reconcile is not None and a.step not in a.ex.log.fold.facts.waits:
        found = await _reconciled(a, policy.reconcile)
        if isinstance(found, Happened):
            return _settled(a, found, by="reconcile")
        if isinstance(found, DidNotHappen) and a.made < max(a.allowed, RECONCILED_MAX):
            _settled(a, found, by="reconcile")
            return None
    return await _ask(a)


async def _reconciled(a: Attempting, reconcile: Callable[[Effect], Any]) -> Any:
    """What the reconciler says; one that fails knows nothing."""
    for attempt in range(3):
        try:
            return await aside(a.ex, reconcile, effect_of(a), step=a.step, key=str(a.key))
        except Exception as error:
            if attempt == 2 or not is_transient(error):
                note = {"note": f"reconcile failed: {describe(error)}"}
                a.ex.behind(Entry(e.NoteMade(at=a.ex.now_us(), step=a.step, by="kedge"), note))
                return Unknown()
            await asyncio.sleep(a.ex.engine.clock.nap_seconds(0.2 * 2**attempt))
    return Unknown()


def effect_of(a: Attempting) -> Effect:
    """The effect of a step, as far as it is known."""
    progressed = a.ex.record.of(a.step, e.AttemptProgressed)
    progress = a.ex.record.data(progressed[-1][0]).get("progress") if progressed else a.progress
    return Effect(
        tool=a.intent.name,
        step=a.step,
        key=str(a.key),
        arguments=a.intent.arguments,
        progress=progress,
        failure=a.failure,
    )


def _settlement(a: Attempting, found: Happened | DidNotHappen | None, by: str | None, because: str | None) -> Entry:
    released = a.intent.claims if isinstance(found, DidNotHappen) else ()
    how: e.Settlement = "stopped" if found is None else "happened" if isinstance(found, Happened) else "did_not_happen"
    event = e.AttemptSettled(
        at=a.ex.now_us(),
        step=a.step,
        attempt=a.made,
        key=str(a.key),
        settlement=how,
        by=by,
        released=tuple(f"{claim.space}:{e.to_text(claim.key)}" for claim in released),
    )
    values: dict[str, Any] = {"output": found.result} if isinstance(found, Happened) else {}
    return Entry(event, values | ({"because": because} if because else {}))


def _settled(a: Attempting, found: Happened | DidNotHappen, *, by: str) -> Found | None:
    from kedge.runtime.gate import restored

    a.is_open = False
    a.granted = isinstance(found, DidNotHappen)
    released = a.intent.claims if a.granted else ()
    seq = a.ex.behind(_settlement(a, found, by, None), **({"releases": released} if released else {}))
    if isinstance(found, DidNotHappen):
        return None
    return Found(seq, restored(a.intent, through_codec(found.result), None, a.step))


async def _ask(a: Attempting) -> Found | None:
    """Nobody here can know: a person says whether it happened."""
    from kedge.runtime.gate import restored

    ex, intent = a.ex, a.intent
    call = f"{intent.name}({short(intent.recording)})"
    prompt = f"{call} was started and its outcome is not known ({a.failure}). Did it happen?"

    def then(closed: Closed) -> list[Entry]:
        verb = closed.answer["kind"]
        found = (
            Happened(closed.answer.get("value")) if verb == "happened" else DidNotHappen() if verb == "not" else None
        )
        return [_settlement(a, found, closed.by, closed.comment)]

    def fits(value: Any) -> Any:
        return restored(intent, value, None, a.step)

    closed = await ask_person(
        ex, a.branch, a.step, "settlement", prompt,
        intention={"tool": intent.name, "arguments": intent.recording}, verbs=SETTLEMENT_VERBS, then=then, fits=fits,
    )  # fmt: skip
    a.is_open = False
    verb = closed.answer["kind"]
    if verb == "happened":
        return Found(closed.seq, restored(intent, closed.answer.get("value"), None, a.step))
    if verb == "stop":
        await ex.recorded(closed.seq)
        raise StepFailed(a.step, intent.name, stopped(closed.by, closed.comment))
    a.granted = True
    return None


async def ask_person(
    ex: Execution,
    branch: Branch,
    step: e.StepId,
    waits_for: e.WaitFor,
    prompt: str,
    *,
    intention: dict[str, Any],
    verbs: tuple[str, ...],
    before: list[Entry] | None = None,
    then: Callable[[Closed], list[Entry]] | None = None,
    fits: Callable[[Any], Any] | None = None,
) -> Closed:
    """Ask within a step that is not itself a wait."""
    facts = ex.log.fold.facts
    bound = binding(ex.run_id, facts.generation, step, waits_for, intention=intention, prompt=prompt)
    wait = facts.waits.get(step)
    if wait is None:
        opened = e.WaitOpened(at=ex.now_us(), step=step, waits_for=waits_for, name=waits_for, digest=bound)
        values = {"prompt": prompt, "intention": intention, "verbs": list(verbs)}
        await ex.durably(*(before or ()), Entry(opened, values))
        at = ex.log.seq
    else:
        at = wait.opened
        event = ex.record.event(at)
        bound = event.digest
    waiter = Waiter(step, waits_for, digest=bound, opened=at, then=then, fits=fits)
    return await until(ex, branch, waiter)


async def aside(ex: Execution, fn: Callable[..., Any], effect: Effect, *, step: e.StepId, key: str) -> Any:
    """Call a reconciler or the like, which is no step of its own; a blocking one in a thread."""
    from kedge.runtime.gate import _is_async, waited_for  # pyright: ignore[reportPrivateUsage]

    fn = fn.fn if isinstance(fn, Tool) else fn
    place = ToolStep(ex.run_id, step, 0, Key(key), lambda _: None)
    if _is_async(fn):
        token = HERE.set(place)
        try:
            return await fn(effect)
        finally:
            HERE.reset(token)
    context = copy_context()
    context.run(HERE.set, place)
    applied = await waited_for(ex.engine.threads.start(lambda: fn(effect), context), None)
    if applied.error is not None:
        raise applied.error
    return applied.value


async def confirmed(a: Attempting, value: Any) -> bool:
    """Look at the world after an effect, and put on record what it shows."""
    assert a.intent.policy.confirm is not None
    effect = effect_of(a)
    seen = bool(await aside(a.ex, a.intent.policy.confirm, _with_result(effect, value), step=a.step, key=effect.key))
    a.ex.behind(Entry(e.EffectConfirmed(at=a.ex.now_us(), step=a.step, key=effect.key, confirmed=seen)))
    return seen


def _with_result(effect: Effect, value: Any) -> Effect:
    import msgspec

    return msgspec.structs.replace(effect, result=value)


# done before --------------------------------------------------------------------------------------


async def earlier(a: Attempting) -> Found | None:
    """Whether the action was done before: in this timeline by `repeat`, or in one that was left, as an orphan."""
    ex, intent = a.ex, a.intent
    if intent.effect in ("reads", None) or intent.sort == "undo":
        return None
    facts = ex.log.fold.facts
    if facts.generation or facts.forked_from:
        found = await _adopted(a)
        if found is not None:
            return found
    if intent.policy.repeat == "allow":
        return None
    identity = e.to_text(intent.identity or intent.digest)
    standing = {step.attempts[0].started for step in ex.log.fold.steps if step.attempts}
    for effect in ex.log.ledger.effects:
        same = effect.tool == intent.name and effect.identity == identity and effect.started in standing
        if same and effect.status == "happened" and effect.step != a.step:
            if intent.policy.repeat == "recorded" or not await _may_repeat(a, effect):
                return _adopt(a, ex.run_id, effect)
            return None
    return None


async def _may_repeat(a: Attempting, effect: ledger.Effect) -> bool:
    prompt = f"{a.intent.name}({short(a.intent.recording)}) was done at step {effect.step} already. Do it again?"
    return await _agreed(a, prompt)


async def _agreed(a: Attempting, prompt: str) -> bool:
    """Ask a person before acting; the answer, once given, stays with the step."""
    given = [seq for seq, event in a.ex.record.of(a.step, e.WaitClosed) if event.how == "answered"]
    if given:
        return bool(a.ex.record.data(given[-1])["answer"]["kind"] == "approve")
    intention = {"tool": a.intent.name, "arguments": a.intent.recording}
    closed = await ask_person(
        a.ex, a.branch, a.step, "answer", prompt, intention=intention, verbs=("approve", "reject"), before=a.written()
    )
    return bool(closed.answer["kind"] == "approve")


class Orphan(NamedTuple):
    """An effect that the current timeline does not have, and the run whose log has it."""

    run: str
    effect: ledger.Effect


def orphans(ex: Execution, tool: str) -> list[Orphan]:
    """Effects of a tool started after a cut and not claimed by a later step, oldest first."""
    log, facts = ex.engine.log, ex.log.fold.facts
    standing = {step.attempts[0].started for step in ex.log.fold.steps if step.attempts}
    found = [Orphan(ex.run_id, effect) for effect in ex.log.ledger.effects if effect.started not in standing]
    head = log.head(ex.run_id)
    if facts.forked_from is not None and head.parent is not None:
        found += [Orphan(head.parent, effect) for effect in log.ledger(head.parent).orphans(head.base)]
    return [
        orphan
        for orphan in found
        if orphan.effect.tool == tool
        and orphan.effect.status in ("open", "in_doubt", "happened")
        and orphan.effect.adopted_by is None
        and log.store.owner(_claim_on(orphan)) is None
    ]


def _claim_on(orphan: Orphan) -> Claim:
    from hashlib import sha256

    return Claim("orphan", sha256(f"{orphan.effect.key}@{orphan.effect.started}".encode()).digest())


async def _adopted(a: Attempting) -> Found | None:
    """R18: the recorded result of an orphan of the same identity, whatever the new wording."""
    ex, intent = a.ex, a.intent
    identity = e.to_text(intent.identity or intent.digest)
    left = orphans(ex, intent.name)
    for orphan in (each for each in left if each.effect.identity == identity):
        effect = orphan.effect
        if effect.status != "happened":
            if effect.effect == "idempotent":
                # The far side honours the key: going on under it cannot do it twice.
                a.key = effect.key
                return None
            settled = await _settle_orphan(a, orphan)
            if not settled:
                continue
        return _adopt(a, orphan.run, effect, claim=_claim_on(orphan))
    others = [each for each in left if each.effect.identity != identity]
    if others:
        told = "; ".join(f"{each.effect.tool} at step {each.effect.step}" for each in others[:3])
        prompt = (
            f"{intent.name}({short(intent.recording)}): before the run was taken back it did {told}, with other "
            "arguments. Do this as well?"
        )
        if not await _agreed(a, prompt):
            return _adopt(a, others[0].run, others[0].effect, claim=_claim_on(others[0]))
    return None


async def _settle_orphan(a: Attempting, orphan: Orphan) -> bool:
    """One in doubt is settled first. True: it happened."""
    effect = orphan.effect
    intended = a.ex.engine.log.data(orphan.run, effect.intended).get("arguments", {})
    told = Effect(tool=effect.tool, step=effect.step, key=effect.key, arguments=intended)
    found: Any = Unknown()
    if a.intent.policy.reconcile is not None:
        found = await aside(a.ex, a.intent.policy.reconcile, told, step=a.step, key=effect.key)
    if isinstance(found, Unknown) or found is None:
        prompt = f"{effect.tool}({short(intended)}) was started before the run was taken back. Did it happen?"
        closed = await ask_person(
            a.ex, a.branch, a.step, "settlement", prompt, intention={"tool": effect.tool, "arguments": intended},
            verbs=SETTLEMENT_VERBS, before=a.written(),
        )  # fmt: skip
        verb = closed.answer["kind"]
        if verb == "stop":
            raise StepFailed(a.step, a.intent.name, stopped(closed.by, closed.comment))
        found = Happened(closed.answer.get("value")) if verb == "happened" else DidNotHappen()
    happened = isinstance(found, Happened)
    event = e.AttemptSettled(
        at=a.ex.now_us(),
        step=effect.step,
        attempt=effect.attempts,
        key=effect.key,
        settlement="happened" if happened else "did_not_happen",
    )
    a.ex.behind(*a.written(), Entry(event, {"output": found.result} if isinstance(found, Happened) else {}))
    a.late = found.result if isinstance(found, Happened) else None
    return happened


def _adopt(a: Attempting, run: str, effect: ledger.Effect, *, claim: Claim | None = None) -> Found:
    from kedge.runtime.gate import restored

    ex = a.ex
    try:
        output = ex.engine.log.data(run, effect.ended).get("output") if effect.ended else a.late
    except ValueErased:
        output = a.late
    event = e.StepAdopted(at=ex.now_us(), step=a.step, run=run, key=effect.key, seq=effect.started)
    rights = {"claims": (claim,)} if claim is not None else {}
    seq = ex.behind(*a.written(), Entry(event, {"output": output}), **rights)
    return Found(seq, restored(a.intent, output, None, a.step))


# undoing ------------------------------------------------------------------------------------------


async def compensate(ex: Execution, branch: Branch) -> list[str]:
    """Undo what was done, the last first. Returns what could not be undone."""
    left: list[str] = []
    fold = ex.log.fold
    steps = [fold.steps[index] for index in fold.effects]
    for step in reversed([step for step in steps if step.sort == "tool" and step.attempts]):
        effect = _effect_started(ex, step.attempts[0].started)
        if effect is None or (effect.status not in ("happened", "undone", "in_doubt", "open")):
            continue
        tool = TOOLS.get(step.name)
        told = f"{step.name} at step {step.id}"
        if tool is None or tool.policy.compensate is None or not await _undone(ex, branch, tool, effect):
            left.append(told)
    return left


def _effect_started(ex: Execution, seq: int) -> ledger.Effect | None:
    return next((effect for effect in ex.log.ledger.effects if effect.started == seq), None)


async def _undone(ex: Execution, branch: Branch, tool: AnyTool, effect: ledger.Effect) -> bool:
    """One effect through its own compensation, as a step like any other."""
    from kedge.runtime.gate import Intent, perform

    undo = tool.policy.compensate
    assert undo is not None
    told = _told(ex, tool, effect)
    fn = undo.fn if isinstance(undo, Tool) else undo
    policy: Policy = undo.policy if isinstance(undo, Tool) else Policy()
    intent = Intent(
        "undo", tool.name, fn, Shape(fn, tool.name), {}, policy,
        told={"key": effect.key}, recording={"key": effect.key}, undoes=(effect.step, effect.started),
    )  # fmt: skip
    parameter = next(iter(intent.shape.hints)) if intent.shape is not None and intent.shape.hints else "effect"
    intent.arguments = {parameter: told}
    step = ex.record.undoing.get(effect.step) or branch.number()
    past = ex.record.step(step)
    if past is not None and past.status in OVER:
        return past.status == "done"
    try:
        await perform(ex, branch, intent, step)
    except Signal:
        raise
    except StepFailed as failed:
        return await _given_up(ex, branch, step, tool, failed)
    return True


async def _given_up(ex: Execution, branch: Branch, step: e.StepId, tool: AnyTool, failed: StepFailed) -> bool:
    """What could not be undone waits for a person: it was undone by hand, or is left."""
    if failed.is_a("kedge.Stopped"):
        return False
    at = branch.number()
    prompt = f"{tool.name} could not be undone ({failed.failure}). Undo it by hand and say so, or leave it."
    intended = e.StepIntended(at=ex.now_us(), step=at, sort="wait", name="undo", digest=None)
    before = [] if ex.log.fold.step(at) is not None else [Entry(intended, {"arguments": {"step": step}})]
    closed = await ask_person(
        ex, branch, at, "settlement", prompt, intention={"tool": tool.name, "step": step},
        verbs=("happened", "stop"), before=before,
    )  # fmt: skip
    return bool(closed.answer["kind"] == "happened")


def _told(ex: Execution, tool: AnyTool, effect: ledger.Effect) -> Effect:
    log = ex.engine.log
    arguments = log.data(ex.run_id, effect.intended).get("arguments", {})
    data = log.data(ex.run_id, effect.ended) if effect.ended and effect.status in ("happened", "undone") else {}
    failed = log.data(ex.run_id, effect.ended) if effect.ended and effect.status == "in_doubt" else {}
    progressed = ex.record.of(effect.step, e.AttemptProgressed)
    progress = log.data(ex.run_id, progressed[-1][0]).get("progress") if progressed else ex.progress.get(effect.step)
    result = data.get("output")
    return Effect(
        tool=tool.name,
        step=effect.step,
        key=effect.key,
        arguments=tool.shape.restore(arguments, arguments),
        result=convert(result, tool.returns, at="result") if data and tool.returns is not Any else result,
        progress=progress,
        failure=convert(failed["failure"], Failure, at="failure") if "failure" in failed else None,
    )
