"""Nothing happens twice: what is in doubt is settled, what was done is adopted, what must go is undone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

from msgspec.structs import replace

from kedge.errors import NotDone, StepFailed, ValueErased
from kedge.log.handle import Entry
from kedge.model import events as e
from kedge.model import ledger
from kedge.model.failure import Failure
from kedge.model.fold import Step
from kedge.model.typed import convert
from kedge.runtime.applying import ABANDON_SECONDS, waited_for
from kedge.runtime.context import through_codec
from kedge.runtime.execution import Branch, Execution
from kedge.runtime.failures import describe, is_transient
from kedge.runtime.here import HERE
from kedge.runtime.intent import Intent, is_async, restored
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
from kedge.runtime.threads import Work
from kedge.runtime.waits import SETTLEMENT_VERBS, Closed, Then, Waiter, binding, until
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
    if work is not None and a.step not in a.ex.log.fold.facts.waits:
        late = await waited_for(work, ABANDON_SECONDS)
        if late.error is None:
            return happened_late(a, late.value)
        if isinstance(late.error, NotDone):
            return _settled(a, DidNotHappen(), by="late result")
        if late.work is not None:
            return await _ask(a)
    policy = a.intent.policy
    if policy.reconcile is not None and a.step not in a.ex.log.fold.facts.waits:
        found = await _reconciled(a, policy.reconcile, effect_of(a))
        allowed = a.allowed if policy.retry is not None else RECONCILED_MAX
        if isinstance(found, Happened) or (isinstance(found, DidNotHappen) and a.made < allowed):
            return _settled(a, found, by="reconcile")
    return await _ask(a)


def happened_late(a: Attempting, value: Any) -> Found | None:
    """A thread that was given up came back with a result: that settles it."""
    return _settled(a, Happened(value), by="late result")


async def _reconciled(a: Attempting, reconcile: Callable[[Effect], Any], effect: Effect) -> Any:
    """What the reconciler says; one that fails, or tells of a result that cannot be, knows nothing."""
    for attempt in range(3):
        try:
            found = await aside(a.ex, reconcile, effect, step=a.step)
            if found in (DidNotHappen, Unknown):
                return found()
            if isinstance(found, Happened):
                restored(a.intent, through_codec(found.result), None, a.step)
            return found
        except Exception as error:
            if attempt == 2 or not is_transient(error):
                note = {"note": f"reconcile failed: {describe(error)}"}
                a.ex.behind(*a.written(), Entry(e.NoteMade(at=a.ex.now_us(), step=a.step, by="kedge"), note))
                return Unknown()
            await asyncio.sleep(a.ex.engine.clock.nap_seconds(0.2 * 2**attempt))
    return Unknown()


def effect_of(a: Attempting) -> Effect:
    """The effect of a step, as far as it is known."""
    progress = a.progress
    if progress is None and (progressed := a.ex.record.of(a.step, e.AttemptProgressed)):
        progress = a.ex.record.data(progressed[-1][0]).get("progress")
    return Effect(
        tool=a.intent.name,
        step=a.step,
        key=str(a.key),
        arguments=a.intent.arguments,
        progress=progress,
        failure=a.failure,
    )


def _settlement(a: Attempting, found: Happened | DidNotHappen | None, by: str | None, because: str | None) -> Entry:
    released = _released(a, found)
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


def _released(a: Attempting, found: object) -> tuple[Claim, ...]:
    """What was consumed comes back only when nothing happened."""
    return a.intent.claims if a.holds and isinstance(found, DidNotHappen) else ()


def _settled(a: Attempting, found: Happened | DidNotHappen, *, by: str) -> Found | None:
    a.is_open = False
    a.granted = isinstance(found, DidNotHappen)
    released = _released(a, found)
    seq = a.ex.behind(_settlement(a, found, by, None), **({"releases": released} if released else {}))
    a.holds = a.holds and not released
    if isinstance(found, DidNotHappen):
        return None
    return Found(seq, restored(a.intent, through_codec(found.result), None, a.step))


async def _ask(a: Attempting) -> Found | None:
    """Nobody here can know: a person says whether it happened."""
    ex, intent = a.ex, a.intent
    call = f"{intent.name}({short(intent.recording)})"
    if intent.undoes is not None:
        call = f"undoing {intent.name} of step {intent.undoes[0]}"
    prompt = f"{call} was started and its outcome is not known ({a.failure}). Did it happen?"

    def then(closed: Closed) -> tuple[list[Entry], dict[str, Any]]:
        verb = closed.answer["kind"]
        happened = Happened(closed.answer.get("value")) if verb == "happened" else None
        found = DidNotHappen() if verb == "not" else happened
        entry, released = _settlement(a, found, closed.by, closed.comment), _released(a, found)
        a.holds = a.holds and not released
        return [entry], {"releases": released} if released else {}

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
    then: Then | None = None,
    fits: Callable[[Any], Any] | None = None,
) -> Closed:
    """Ask within a step that is not itself a wait."""
    facts = ex.log.fold.facts
    told = through_codec(intention, at="intention", secret_key=ex.engine.secret_key)
    bound = binding(ex.run_id, facts.generation, step, waits_for, intention=told, prompt=prompt)
    wait = facts.waits.get(step)
    if wait is None:
        opened = e.WaitOpened(at=ex.now_us(), step=step, waits_for=waits_for, name=waits_for, digest=bound)
        values = {"prompt": prompt, "intention": intention, "verbs": list(verbs)}
        asked = Entry(opened, values)
        at = (await ex.durably(*(before or ()), asked)).seq
    else:
        at = wait.opened
        event: Any = ex.engine.log.event(ex.run_id, at)
        asked, bound = Entry(event, ex.engine.log.data(ex.run_id, at)), event.digest
    waiter = Waiter(step, waits_for, digest=bound, opened=at, then=then, fits=fits, asked=asked)
    return await until(ex, branch, waiter)


async def aside(ex: Execution, fn: Callable[..., Any], effect: Effect, *, step: e.StepId) -> Any:
    """Call a reconciler or the like, which is no step of its own; a blocking one in a thread."""
    fn = fn.fn if isinstance(fn, Tool) else fn
    stand_in = ex.engine.stand_in
    if stand_in is not None:
        return await stand_in.aside(fn, effect, partial(_aside, ex, fn, effect, step))
    return await _aside(ex, fn, effect, step)


async def _aside(ex: Execution, fn: Callable[..., Any], effect: Effect, step: e.StepId) -> Any:
    place = ToolStep(ex.run_id, step, 0, Key(effect.key), lambda _: None)
    if is_async(fn):
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
    return await _confirmed(a.ex, a.intent, effect_of(a), value)


async def stays_confirmed(ex: Execution, branch: Branch, past: Step, intent: Intent, value: Any) -> bool:
    """On replay what was seen then; a process that died before it had looked has left that to us."""
    looked = ex.record.of(past.id, e.EffectConfirmed)
    if looked:
        return bool(looked[-1][1].confirmed)
    if intent.policy.confirm is None or not past.attempts or ex.record.goes_on(branch.path, branch.count):
        return True
    key = ex.record.event(past.attempts[0].started).key
    effect = Effect(tool=intent.name, step=past.id, key=key, arguments=intent.arguments)
    return await _confirmed(ex, intent, effect, value)


async def _confirmed(ex: Execution, intent: Intent, effect: Effect, value: Any) -> bool:
    assert intent.policy.confirm is not None
    try:
        seen = bool(await aside(ex, intent.policy.confirm, replace(effect, result=value), step=effect.step))
    except Exception as error:
        note = {"note": f"confirm failed, and counts as no: {describe(error)}"}
        ex.behind(Entry(e.NoteMade(at=ex.now_us(), step=effect.step, by="kedge"), note))
        seen = False
    ex.behind(Entry(e.EffectConfirmed(at=ex.now_us(), step=effect.step, key=effect.key, confirmed=seen)))
    return seen


# done before --------------------------------------------------------------------------------------


async def earlier(a: Attempting) -> Found | None:
    """Whether the action was done before: in this timeline by `repeat`, or in one that was left, as an orphan."""
    ex, intent = a.ex, a.intent
    if intent.effect in ("reads", None) or intent.sort == "undo":
        return None
    if ex.left_behind:
        found = await _adopted(a)
        if found is not None:
            return found
    if intent.policy.repeat == "allow":
        return None
    identity = e.to_text(intent.identity or intent.digest)
    while (first := ex.inflight.get((intent.name, identity))) is not None:
        await asyncio.shield(first)
    done = _done_before(a, identity)
    if done is not None and (intent.policy.repeat == "recorded" or not await _may_repeat(a, done)):
        return await _adopt(a, ex.run_id, done)
    a.begins(intent.name, identity)
    return None


def _done_before(a: Attempting, identity: e.Digest) -> ledger.Effect | None:
    standing = _standing(a.ex)
    for effect in a.ex.log.ledger.effects:
        same = effect.tool == a.intent.name and effect.identity == identity and not effect.undoes
        stands = effect.started in standing or effect.adopted_at in standing
        if same and stands and effect.status == "happened" and effect.step != a.step:
            return effect
    return None


def _standing(ex: Execution) -> set[int]:
    """Where the steps of the current timeline started and ended."""
    seqs = {step.output for step in ex.log.fold.steps}
    return seqs | {attempt.started for step in ex.log.fold.steps for attempt in step.attempts}


async def _may_repeat(a: Attempting, effect: ledger.Effect) -> bool:
    prompt = f"{a.intent.name}({short(a.intent.recording)}) was done at step {effect.step} already. Do it again?"
    return await _agreed(a, prompt)


async def _agreed(a: Attempting, prompt: str) -> bool:
    """Ask a person before acting; the answer to this very question, once given, stays with the step."""
    ex = a.ex
    intention = {"tool": a.intent.name, "arguments": a.intent.recording}
    told = through_codec(intention, at="intention", secret_key=ex.engine.secret_key)
    bound = binding(ex.run_id, ex.generation, a.step, "answer", intention=told, prompt=prompt)
    asked = None
    for seq, event in sorted(ex.record.of(a.step, e.WaitOpened) + ex.record.of(a.step, e.WaitClosed)):
        if isinstance(event, e.WaitOpened):
            asked = event.digest
        elif asked == bound and event.how == "answered":
            return bool(ex.record.data(seq)["answer"]["kind"] == "approve")
    closed = await ask_person(
        ex, a.branch, a.step, "answer", prompt, intention=intention, verbs=("approve", "reject"), before=a.written()
    )
    return bool(closed.answer["kind"] == "approve")


class Orphan(NamedTuple):
    """An effect that the current timeline does not have, and the run whose log has it."""

    run: str
    effect: ledger.Effect

    @property
    def claim(self) -> Claim:
        """What makes sure that it is adopted once in a lineage."""
        return Claim("orphan", sha256(f"{self.effect.key}@{self.effect.started}".encode()).digest())


def orphans(ex: Execution, tool: str) -> list[Orphan]:
    """Effects of a tool started after a cut and not claimed by a step that stands, oldest first."""
    log = ex.engine.log
    standing = _standing(ex)
    found = [Orphan(ex.run_id, effect) for effect in ex.log.ledger.effects if effect.started not in standing]
    head = log.head(ex.run_id)
    if head.parent is not None:
        found += [Orphan(head.parent, effect) for effect in log.ledger(head.parent).orphans(head.base)]
    return [each for each in found if each.effect.tool == tool and _is_left(ex, each, standing)]


def _is_left(ex: Execution, orphan: Orphan, standing: set[int]) -> bool:
    effect = orphan.effect
    if effect.undoes or effect.status not in ("open", "in_doubt", "happened") or effect.adopted_at in standing - {0}:
        return False
    if effect.key in ex.record.ruled_out:
        return False
    owner = ex.engine.log.store.owner(orphan.claim)
    return owner is None or (owner.run == ex.run_id and owner.seq not in standing)


async def _adopted(a: Attempting) -> Found | None:
    """R18: the recorded result of an orphan of the same identity, whatever the new wording."""
    ex, intent = a.ex, a.intent
    identity = e.to_text(intent.identity or intent.digest)
    left = orphans(ex, intent.name)
    # What a repair left in doubt is known by its tool alone: its arguments went with the record.
    for orphan in (each for each in left if each.effect.identity in (identity, None)):
        effect = orphan.effect
        if effect.status != "happened":
            if effect.effect == "idempotent" and orphan.run == ex.run_id:
                # The far side honours the key: going on under it cannot do it twice.
                a.key = effect.key
                return None
            settled = await _settle_orphan(a, orphan)
            if not settled:
                continue
        return await _adopt(a, orphan.run, effect, orphan)
    others = [each for each in left if each.effect.identity not in (identity, None)]
    if others:
        told = "; ".join(f"{each.effect.tool} at step {each.effect.step}" for each in others[:3])
        prompt = (
            f"{intent.name}({short(intent.recording)}): before the run was taken back it did {told}, with other "
            "arguments. Do this as well?"
        )
        if not await _agreed(a, prompt):
            await _refused(a, Failure.told("kedge.Rejected", "a person said not to do it beside what was done before"))
    return None


async def _refused(a: Attempting, failure: Failure) -> NoReturn:
    """The step ends before anything was tried."""
    event = e.StepEnded(at=a.ex.now_us(), step=a.step, outcome="failed")
    await a.ex.recorded(a.ex.behind(*a.written(), Entry(event, {"failure": failure})))
    raise StepFailed(a.step, a.intent.name, failure)


async def _settle_orphan(a: Attempting, orphan: Orphan) -> bool:
    """One in doubt is settled first. True: it happened."""
    effect = orphan.effect
    why = "before the run was taken back"
    intended = a.ex.engine.log.data(orphan.run, effect.intended).get("arguments", {})
    if effect.identity is None:
        intended, why = a.intent.recording, "in a part of the record that did not hold"
    told = Effect(tool=effect.tool, step=effect.step, key=effect.key, arguments=intended)
    found: Any = Unknown()
    by: str | None = "reconcile"
    if a.intent.policy.reconcile is not None:
        found = await _reconciled(a, a.intent.policy.reconcile, told)
    if not isinstance(found, Happened | DidNotHappen):
        prompt = f"{effect.tool}({short(intended)}) was started {why}. Did it happen?"
        closed = await ask_person(
            a.ex, a.branch, a.step, "settlement", prompt, intention={"tool": effect.tool, "arguments": intended},
            verbs=SETTLEMENT_VERBS, before=a.written(),
        )  # fmt: skip
        verb, by = closed.answer["kind"], closed.by
        if verb == "stop":
            await _refused(a, stopped(closed.by, closed.comment))
        found = Happened(closed.answer.get("value")) if verb == "happened" else DidNotHappen()
    happened = isinstance(found, Happened)
    event = e.AttemptSettled(
        at=a.ex.now_us(),
        step=effect.step,
        attempt=effect.attempts,
        key=effect.key,
        settlement="happened" if happened else "did_not_happen",
        by=by,
    )
    a.ex.behind(*a.written(), Entry(event, {"output": found.result} if isinstance(found, Happened) else {}))
    if isinstance(found, Happened):
        a.late = Happened(found.result)
    else:
        a.ex.record.ruled_out.add(effect.key)
    return happened


async def _adopt(a: Attempting, run: str, effect: ledger.Effect, orphan: Orphan | None = None) -> Found:
    """Take a recorded result; the claim on it and the event that says so are one write."""
    ex = a.ex
    await ex.barrier()  # the outcome may be on its way to the store
    if a.late is not None:
        output = a.late.result
    else:
        try:
            output = ex.engine.log.data(run, effect.ended).get("output")
        except ValueErased:
            output = None
    free = orphan is not None and ex.engine.log.store.owner(orphan.claim) is None
    claims = (orphan.claim,) if orphan is not None and free else ()
    event = e.StepAdopted(
        at=ex.now_us(),
        step=a.step,
        run=run,
        key=effect.key,
        seq=effect.started,
        claims=tuple(f"{claim.space}:{e.to_text(claim.key)}" for claim in claims),
    )
    rights = {"claims": claims} if claims else {}
    seq = ex.behind(*a.written(), Entry(event, {"output": output}), **rights)
    return Found(seq, restored(a.intent, output, None, a.step))


# undoing ------------------------------------------------------------------------------------------


async def compensate(ex: Execution, branch: Branch) -> list[str]:
    """Undo what was done, the last first. Returns what could not be undone."""
    left: list[str] = []
    await ex.barrier()
    doubted = ("happened", "undone", "in_doubt", "open")
    for effect in reversed([each for each in ex.log.ledger.effects if not each.undoes and each.status in doubted]):
        tool = TOOLS.get(effect.tool)
        if effect.status == "undone" and effect.started not in ex.record.undoing:
            continue
        if tool is None or tool.policy.compensate is None or not await _undone(ex, branch, tool, effect):
            left.append(f"{effect.tool} at step {effect.step}")
    return left + [f"child {child}" for child in _done_by_children(ex)]


def _done_by_children(ex: Execution) -> list[str]:
    """Children that ended well and did something: their effects are theirs, and stay."""
    found: list[str] = []
    for child in ex.log.ledger.children:
        row = ex.engine.log.store.index(child.run)
        if row is not None and row.status == "completed" and child.on_parent_end != "abandon":
            effects = ex.engine.log.ledger(child.run).effects
            if any(effect.status == "happened" and not effect.undoes for effect in effects):
                found.append(child.run)
    return found


async def _undone(ex: Execution, branch: Branch, tool: AnyTool, effect: ledger.Effect) -> bool:
    """One effect through its own compensation, as a step like any other."""
    from kedge.runtime.gate import perform

    undo = tool.policy.compensate
    assert undo is not None
    fn = undo.fn if isinstance(undo, Tool) else undo
    policy: Policy = undo.policy if isinstance(undo, Tool) else Policy()
    shape = Shape(fn, tool.name)
    arguments = {next(iter(shape.hints), "effect"): _told(ex, tool, effect)}
    key = {"key": effect.key}
    intent = Intent(
        "undo", tool.name, fn, shape, arguments, policy, told=key, recording=key, undoes=(effect.step, effect.started)
    )
    step = _again(branch, ex.record.undoing.get(effect.started))
    past = ex.record.step(step)
    try:
        if past is None or past.status not in OVER:
            await perform(ex, branch, intent, step)
        elif past.status != "done":
            data = ex.record.data(past.output) if past.output else {}
            event = ex.record.event(past.output) if past.output else None
            failure = stopped(event.by, None) if isinstance(event, e.AttemptSettled) else data.get("failure")
            told = convert(failure, Failure, at="failure") if not isinstance(failure, Failure) else failure
            raise StepFailed(step, tool.name, told)
    except StepFailed as failed:
        return await _given_up(ex, branch, step, tool, failed)
    return True


def _again(branch: Branch, step: e.StepId | None) -> e.StepId:
    """A step of an earlier process, or the next number; either way later numbers come after it."""
    if step is None:
        return branch.number()
    branch.count = max(branch.count, int(step))
    return step


async def _given_up(ex: Execution, branch: Branch, step: e.StepId, tool: AnyTool, failed: StepFailed) -> bool:
    """What could not be undone waits for a person: it was undone by hand, or is left."""
    if failed.is_a("kedge.Stopped"):
        return False
    name = f"undo {step}"
    past = next((each for each in ex.record.steps.values() if each.sort == "wait" and each.name == name), None)
    at = _again(branch, past.id if past is not None else None)
    if past is not None and past.status in OVER:
        return bool(ex.record.data(past.output)["answer"]["kind"] == "happened")
    prompt = f"{tool.name} could not be undone ({failed.failure}). Undo it by hand and say so, or leave it."
    intended = e.StepIntended(at=ex.now_us(), step=at, sort="wait", name=name)
    before = [] if past is not None else [Entry(intended, {"arguments": {"step": step}})]
    closed = await ask_person(
        ex, branch, at, "settlement", prompt, intention={"tool": tool.name, "step": step},
        verbs=("happened", "stop"), before=before,
    )  # fmt: skip
    return bool(closed.answer["kind"] == "happened")


def _told(ex: Execution, tool: AnyTool, effect: ledger.Effect) -> Effect:
    """What a compensation is told: the arguments and, as far as there are any, result, progress and failure."""
    log = ex.engine.log
    arguments = log.data(ex.run_id, effect.intended).get("arguments", {})
    data = log.data(ex.run_id, effect.ended) if effect.ended else {}
    failure = data.get("failure") if effect.status == "in_doubt" else None
    progress = ex.progress.get(effect.step)
    if progress is None and (progressed := ex.record.of(effect.step, e.AttemptProgressed)):
        progress = log.data(ex.run_id, progressed[-1][0]).get("progress")
    result = data.get("output")
    return Effect(
        tool=tool.name,
        step=effect.step,
        key=effect.key,
        arguments=tool.shape.restore(arguments, arguments),
        result=convert(result, tool.returns, at="result") if "output" in data and tool.returns is not Any else result,
        progress=progress,
        failure=None if failure is None else convert(failure, Failure, at="failure"),
    )
