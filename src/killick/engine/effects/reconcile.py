"""Reconciliation: settles effects in doubt by thread, reconciler or person; confirms effects afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import partial
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from killick.definitions.current import HERE
from killick.definitions.markers import Key, ToolStep
from killick.definitions.policy import DidNotHappen, Effect, Happened, Reconciled, Unknown
from killick.definitions.tools import Tool
from killick.engine.control.inbox import SETTLEMENT_VERBS
from killick.engine.execution import Branch, Execution
from killick.engine.failures import describe, is_bug, is_transient
from killick.engine.replay import short
from killick.engine.steps import permits
from killick.engine.steps.attempt import Work
from killick.engine.steps.intention import Intent, claim_text, is_async, restored
from killick.engine.steps.step_state import StepState
from killick.engine.waits.open_wait import Closed, Then, Waiter
from killick.engine.waits.waits import binding, raise_if_intervened, until
from killick.errors import StepFailed, TimeRefused, ValueRefused
from killick.log.writer import AppendExtras, Entry
from killick.model import events as e
from killick.model.chunks import through_codec
from killick.model.facts import OUT_OF_BAND, Step
from killick.model.failure import Failure
from killick.store.records import UniqueRight

DIED: Final = Failure.of("killick.Died", "the process died while this attempt was open", kind="died")
NOT_CONFIRMED: Final = Failure.of("killick.NotConfirmed", "the tool returned, but the world does not show its effect")
_FINDINGS: Final = "killick.Happened(result), killick.DidNotHappen() or killick.Unknown()"
RECONCILED_MAX: Final = 4
"""How many attempts a reconciler may repeat before a person is asked."""


def left_failure(inside: Sequence[e.StepId]) -> Failure:
    """An attempt was left because steps that its own code took wait, or because its process died in them."""
    steps = f"step{'s' if len(inside) > 1 else ''} {', '.join(inside)} inside of it waited" if inside else "it waited"
    hint = "what else it did is not known; 'not' enters it again, with those steps from the record"
    return Failure.of("killick.Left", f"it was left while {steps}; {hint}")


class RecordedOutcome(NamedTuple):
    """An outcome that is on record at a seq."""

    seq: int
    value: Any


def stopped(by: str | None, because: Any) -> Failure:
    """A person stopped the step instead of settling it."""
    reason = f": {because}" if because else ""
    return Failure.of("killick.Stopped", f"stopped by {by or 'a person'}{reason}")


async def settle(a: StepState, work: Work | None) -> RecordedOutcome | None:
    """Determines the outcome of an attempt: by its thread, its reconciler, or a person.

    None: it did not happen, and may be tried again. Raises when a person says to stop.
    """
    if work is not None and a.step not in a.ex.log.fold.facts.waits:
        late = await a.waited_on(work)
        if late.error is None:
            return settled(a, Happened(late.value), by="late result")
        if a.says_nothing_happened(late.error):
            return settled(a, DidNotHappen(), by="late result")
        if late.work is not None:
            return await _ask(a)
    policy = a.intent.policy
    if policy.reconcile is not None and a.step not in a.ex.log.fold.facts.waits:
        found = await reconciled(a, policy.reconcile, effect_of(a))
        allowed = a.allowed if policy.retry is not None else RECONCILED_MAX
        if isinstance(found, Happened) or (isinstance(found, DidNotHappen) and a.counted < allowed):
            return settled(a, found, by="reconcile")
    return await _ask(a)


def late_entries(a: StepState, past: Step, value: Any, error: BaseException | None) -> tuple[list[Entry], AppendExtras]:
    """The outcome of a thread that outlived its execution: an ended attempt, or the settlement of one in doubt."""
    refused = error is not None and a.says_nothing_happened(error)
    if error is None:
        try:
            restored(a.intent, through_codec(value), None, a.step)
        except ValueRefused as misfit:
            error = misfit
    if not past.attempts[-1].ended:
        outcome: e.Outcome = "returned" if error is None else "refused" if refused else "unknown"
        released = a.given_back(nothing_happened=refused)
        event = e.AttemptEnded(
            at=a.ex.now_us(), step=a.step, attempt=a.made, outcome=outcome, released=tuple(map(claim_text, released))
        )
        values = {"output": value} if error is None else {"failure": describe(error)}
        return [Entry(event, values)], permits.returned(a.ex.log, released, event.at)
    if past.attempts[-1].outcome != "unknown" or (error is not None and not refused):
        return [], {}
    found = Happened(value) if error is None else DidNotHappen()
    closed = e.WaitClosed(at=a.ex.now_us(), step=a.step, how="voided", by="killick")
    waits = [Entry(closed)] if a.step in a.ex.log.fold.facts.waits else []
    return [*waits, _settlement(a, found, "late result", None)], _rights(a, _released(a, found))


async def reconciled(a: StepState, reconcile: Callable[[Effect], Any], effect: Effect) -> Any:
    """The reconciler's verdict; Unknown if it fails, or returns an impossible result."""
    for attempt in range(3):
        try:
            found = await call_hook(a.ex, reconcile, effect, step=a.step)
            if found in (DidNotHappen, Unknown):
                return found()
            if isinstance(found, Happened):
                restored(a.intent, through_codec(found.result), None, a.step)
            if isinstance(found, Reconciled):
                return found
            a.reconciler_said = f"reconcile returned {found!r:.100}; it has to return {_FINDINGS}"
        except Exception as error:
            if attempt < 2 and is_transient(error):
                await asyncio.sleep(a.ex.engine.clock.nap_seconds(0.2 * 2**attempt))
                continue
            a.reconciler_said = f"reconcile failed: {describe(error)}"
        a.ex.write_behind(*a.written(), a.ex.noted(a.reconciler_said, a.step))
        break
    return Unknown()


def effect_of(a: StepState) -> Effect:
    """The effect of a step, as far as it is known."""
    progress = a.progress
    if progress is None and (progressed := a.ex.record.of(a.step, e.AttemptProgressed)):
        progress = a.ex.record.data(progressed[-1][0]).get("progress")
    return Effect(
        tool=a.intent.name, step=a.step, key=str(a.key), arguments=a.intent.arguments, progress=progress,
        failure=a.failure,
    )  # fmt: skip


def _settlement(a: StepState, found: Happened | DidNotHappen | None, by: str | None, because: str | None) -> Entry:
    released = _released(a, found)
    how: e.Settlement = "stopped" if found is None else "happened" if isinstance(found, Happened) else "did_not_happen"
    event = e.AttemptSettled(
        at=a.ex.now_us(), step=a.step, attempt=a.made, key=str(a.key), settlement=how, by=by,
        released=tuple(map(claim_text, released)),
    )  # fmt: skip
    values: dict[str, Any] = {"output": found.result} if isinstance(found, Happened) else {}
    return Entry(event, values | ({"because": because} if because else {}))


def _released(a: StepState, found: object) -> tuple[UniqueRight, ...]:
    return a.given_back(nothing_happened=isinstance(found, DidNotHappen))


def _rights(a: StepState, released: tuple[UniqueRight, ...]) -> AppendExtras:
    return permits.returned(a.ex.log, released, a.ex.now_us())


def settled(a: StepState, found: Happened | DidNotHappen, *, by: str) -> RecordedOutcome | None:
    """Settle an attempt in doubt by its own reconciler, or by a thread that was given up and came back."""
    a.is_open = False
    a.granted = isinstance(found, DidNotHappen)
    released = _released(a, found)
    seq = a.ex.write_behind(_settlement(a, found, by, None), **_rights(a, released))
    a.release(released)
    if isinstance(found, DidNotHappen):
        return None
    return RecordedOutcome(seq, restored(a.intent, through_codec(found.result), None, a.step))


def needs_value(fits: Callable[[str, Any], Any]) -> bool:
    """Whether "it happened" is no answer without the value that the tool returned."""
    try:
        fits("happened", None)
    except ValueRefused:
        return True
    return False


async def _ask(a: StepState) -> RecordedOutcome | None:
    """Ask a person whether the effect happened."""
    ex, intent = a.ex, a.intent
    if a.step.startswith(OUT_OF_BAND):
        # The person who undoes it gets the outcome at once; the run may be over and waits for no answer.
        problem = f"undoing {intent.name} began and its outcome is not known ({a.failure})"
        raise TimeRefused(ex.run_id, f"{problem}; check, and give settled='happened' or 'not'")
    call = f"{intent.name}({short(intent.recording)})"
    if intent.undoes is not None:
        call = f"undoing {intent.name} of step {intent.undoes[0]}"
    said = f"; {a.reconciler_said}" if a.reconciler_said else ""
    if not said and a.failure is not None and is_bug(a.failure):
        said = "; it had called other code, which may have acted; raise killick.NotDone where nothing happened"
    prompt = f"{call} was started and its outcome is not known ({a.failure}{said}). Did it happen?"

    def then(closed: Closed) -> tuple[list[Entry], dict[str, Any]]:
        verb = closed.answer["kind"]
        happened = Happened(closed.answer.get("value")) if verb == "happened" else None
        found = DidNotHappen() if verb == "not" else happened
        entry, released = _settlement(a, found, closed.by, closed.comment), _released(a, found)
        a.release(released)
        return [entry], dict(_rights(a, released))

    def fits(kind: str, value: Any) -> Any:
        return restored(intent, value, None, a.step)

    asked = {"tool": intent.name, "arguments": intent.recording, "key": str(a.key), "returns": needs_value(fits)}
    closed = await ask_person(
        ex, a.step, "settlement", prompt, intention=asked, verbs=SETTLEMENT_VERBS, then=then, fits=fits,
    )  # fmt: skip
    a.is_open = False
    verb = closed.answer["kind"]
    if verb == "happened":
        return RecordedOutcome(closed.seq, restored(intent, closed.answer.get("value"), None, a.step))
    if verb == "stop":
        await ex.recorded(closed.seq)
        raise StepFailed(a.step, intent.name, stopped(closed.by, closed.comment))
    a.granted = True
    return None


async def ask_person(
    ex: Execution, step: e.StepId, waits_for: e.WaitFor, prompt: str, *, intention: dict[str, Any],
    verbs: tuple[str, ...], before: list[Entry] | None = None, then: Then | None = None,
    fits: Callable[[str, Any], Any] | None = None,
) -> Closed:  # fmt: skip
    """Ask within a step that is not itself a wait."""
    raise_if_intervened(ex, step)
    facts = ex.log.fold.facts
    shown = through_codec(intention, at="intention", secret_key=ex.log.secret_key)
    bound = binding(ex.log.secret_key, ex.run_id, facts.generation, step, waits_for, intention=shown, prompt=prompt)
    wait = facts.waits.get(step)
    if wait is None:
        to, may = ex.asked_of.get(step, ((), None))
        opened = e.WaitOpened(at=ex.now_us(), step=step, waits_for=waits_for, name=waits_for, to=to, digest=bound)
        values = {"prompt": prompt, "intention": intention, "verbs": list(verbs)}
        if may is not None:
            values["may"] = may
        asked = Entry(opened, values)
        at, is_cancelled = await ex.write(*(before or ()), asked)
        if is_cancelled:
            raise asyncio.CancelledError
    else:
        at = wait.opened
        event: Any = ex.engine.log.event(ex.run_id, at)
        asked = Entry(event, ex.engine.log.data(ex.run_id, at))
    return await until(ex, Waiter.of(asked, at, then=then, fits=fits))


async def call_hook(ex: Execution, fn: Callable[..., Any], effect: Effect, *, step: e.StepId) -> Any:
    """Call a reconciler or the like, which is no step of its own; a blocking one in a thread."""
    fn = fn.fn if isinstance(fn, Tool) else fn
    stand_in = ex.engine.stand_in
    if stand_in is not None:
        return await stand_in.call_hook(fn, effect, partial(_called_hook, ex, fn, effect, step))
    return await _called_hook(ex, fn, effect, step)


async def _called_hook(ex: Execution, fn: Callable[..., Any], effect: Effect, step: e.StepId) -> Any:
    place = ToolStep(ex.run_id, step, 0, Key(effect.key), lambda _: None)
    if is_async(fn):
        token = HERE.set(place)
        try:
            return await fn(effect)
        finally:
            HERE.reset(token)
    context = copy_context()
    context.run(HERE.set, place)
    live = ex.engine.live.begin(ex.run_id, step, getattr(fn, "__name__", "reconcile"))
    return await ex.engine.threads.call(lambda: fn(effect), live, context=context)


async def stays_confirmed(ex: Execution, branch: Branch, past: Step, intent: Intent, value: Any) -> bool:
    """On replay, the recorded confirmation; if the process died before it, it runs now."""
    looked = ex.record.of(past.id, e.EffectConfirmed)
    if looked:
        return bool(looked[-1][1].confirmed)
    if intent.policy.confirm is None or not past.attempts or ex.record.has_more(branch.path, branch.count):
        return True
    key = ex.record.event(past.attempts[0].started).key
    effect = Effect(tool=intent.name, step=past.id, key=key, arguments=intent.arguments)
    return await confirmed(ex, intent, effect, value)


async def confirmed(ex: Execution, intent: Intent, effect: Effect, value: Any) -> bool:
    """Runs the confirmation after an effect, and records its result."""
    assert intent.policy.confirm is not None
    try:
        seen = bool(await call_hook(ex, intent.policy.confirm, replace(effect, result=value), step=effect.step))
    except Exception as error:
        ex.write_behind(ex.noted(f"confirm failed, and counts as no: {describe(error)}", effect.step))
        seen = False
    ex.write_behind(Entry(e.EffectConfirmed(at=ex.now_us(), step=effect.step, key=effect.key, confirmed=seen)))
    return seen
