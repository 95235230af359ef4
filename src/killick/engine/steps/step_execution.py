"""The execution of one step: intend, record, check the lease, apply, record; attempt by attempt.

Reconciliation, deduplication and compensation are in `effects`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from typing import Any, Final

from killick.definitions.current import HERE
from killick.definitions.markers import KEY, STEP, WORKSPACE, InnerSteps, Key, ToolStep, is_marker
from killick.definitions.policy import Happened
from killick.engine import observers
from killick.engine.approval import approvals
from killick.engine.approval.contracts_in_force import with_paths
from killick.engine.approval.verdicts import model_of
from killick.engine.effects import dedupe, reconcile
from killick.engine.effects.run_tree import ACTION
from killick.engine.execution import Branch, Execution
from killick.engine.failures import IsolatedError, called_nothing, describe, not_retried
from killick.engine.replay import OVER
from killick.engine.signals import Cancelling, Interrupted
from killick.engine.steps import attempt as calls
from killick.engine.steps import permits
from killick.engine.steps.attempt import Applied, LiveCall, Untouched, Work, outlasted, waited_for
from killick.engine.steps.intention import Intent, called, claim_text, restored
from killick.engine.steps.isolation import run_isolated
from killick.engine.steps.model_reply import reasoning_of, reply_kind, usage_of, wire
from killick.engine.steps.step_state import SAFE, StepState
from killick.engine.steps.transaction import Transacting
from killick.engine.waits.waits import deadline_us, raise_if_intervened, until_time
from killick.errors import AlreadyClaimed, LeaseLost, NotDone, StepFailed, StillRunning, TransactionEnded, ValueRefused
from killick.log.group_commit import current_loop
from killick.log.writer import Entry
from killick.model import events as e
from killick.model.chunks import through_codec
from killick.model.facts import Step
from killick.model.failure import Failure
from killick.model.hashing import action_key, undo_key
from killick.model.typed import convert

CANCELLED: Final = Failure.of("asyncio.CancelledError", "the agent's own code gave it up", kind="cancelled")


class _TooLate(NotDone):
    """The lease was lost before a thread began with the tool."""


class StepExecution(StepState):
    """A step that is not over: its attempts so far, and those to come."""

    def __init__(self, ex: Execution, branch: Branch, step: e.StepId, intent: Intent, past: Step | None) -> None:
        super().__init__(ex, branch, step, intent, past)
        if past is None:
            self.intended()
        else:
            self._resume(past)

    def _resume(self, past: Step) -> None:
        """Resume a step of another execution, with the recorded arguments instead of those of the code."""
        record = self.ex.record
        intended: e.StepIntended = record.event(past.intended)
        self.intent.effect = intended.effect
        if self.intent.shape is not None and self.intent.undoes is None:
            recorded = record.data(past.intended)["arguments"]
            self.intent.replay(recorded, intended, self.step, self.ex.log.secret_key)
            approvals.restore_answers(self, past)
            self.paths = record.data(past.edited or past.intended).get("paths") or {}
            self.intent.arguments = with_paths(self.intent.arguments, self.paths)
        self.made = len(past.attempts)
        self.granted = bool(past.attempts) and past.status == "intended"
        self.until_us = past.delayed_until or 0
        for attempt in past.attempts:
            started: e.Started = record.event(attempt.started)
            self.key = started.key
            ended: e.AttemptEnded | None = record.event(attempt.ended) if attempt.ended else None
            limited = ended is not None and ended.limited
            self.counted += ended is not None and not limited  # a death is not an outcome
            self.limited += limited
            if limited and self.limited_since is None:
                self.limited_since = attempt.at
            if ended is not None and ended.outcome != "returned":
                self.failure = convert(record.data(attempt.ended)["failure"], Failure, at="failure")
        self.holds = self._has_consumed()
        if past.attempts and not past.attempts[-1].ended:
            # After several deaths it is not the last attempt that claimed them.
            self.permits = permits.held(self.ex.log, by={attempt.started for attempt in past.attempts})
            self.holds_permits = bool(self.permits)
        if past.attempts and not past.attempts[-1].ended and past.status != "intended":
            # An outcome in a transaction that is not on record did not happen, and its rows are not there.
            self.is_open = self.intent.effect != "transaction"
            self.until_us = 0  # a delay on record was its last holder's, and is decided anew for this one
            if self.is_open and self.intent.effect not in SAFE:
                self.failure = reconcile.DIED
            if self.ex.log.fold.inside(self.step):
                self._note_left()
        elif past.status in ("in_doubt", "waiting") and past.attempts and past.attempts[-1].outcome == "unknown":
            self.is_open = True

    # the loop ---------------------------------------------------------------------------------

    async def run(self) -> Any:
        """Make attempts until one returns, or none is left."""
        ex = self.ex
        raise_if_intervened(ex, self.step)
        policy = self.intent.policy
        looked = not self.made
        judged = self.concerns_rules
        if judged and not self.made:
            is_shared = ex.has_outside_effects and self.intent.effect not in dedupe.OWN_ONLY
            await approvals.agreed(self, adopts=is_shared and dedupe.was_done(self, self.intent.name))
            if ex.has_outside_effects and self.unwritten:
                ex.write_behind(*self.written())  # the lookup of earlier effects may take a while
        elif self.past is not None and not self.made:
            approvals.void(self)
        if not self.made and (ex.has_outside_effects or policy.repeat != "allow" or self.intent.claims):
            found = await self._done_before()
            if found is not None:
                return found.value
        acts = self.intent.effect not in ("reads", None)
        if self.is_open and acts and ex.touch_after_us > ex.now_us() and self.step not in ex.log.fold.facts.waits:
            # The previous holder may only be frozen: its attempt gets a grace period. An open question about the step
            # shows that the period is over.
            await self.delay(ex.touch_after_us, "the last holder may still be at it")
            self.until_us = 0
        if self.intent.undoes is not None:
            await self._until_over(self.intent.undoes[0])
        return await self._attempts(ex.engine.live.work_of(ex.run_id, self.step), looked=looked)

    async def continue_after(self, applied: Applied, inner: InnerSteps | None) -> Any:
        """As `run`, after a first attempt that was made elsewhere."""
        if inner is not None:
            await self._taken_again(applied)
            self._note_inner(inner)
        return await self._attempts(None, looked=False, applied=applied)

    async def _attempts(self, work: Work | None, *, looked: bool, applied: Applied | None = None) -> Any:
        ex = self.ex
        while True:
            if applied is None:
                found = await self._before_attempt(work, looked=looked)
                if found is not None:
                    return found.value
                applied = await self._attempt()
            work, looked = applied.work, False
            if isinstance(applied.error, asyncio.CancelledError):
                await ex.raise_if_closing()
            if work is not None and self.intent.effect in SAFE and self.counted + 1 < self.allowed:
                # The next attempt may not begin before the thread of this one ends, which may still bring a result.
                late_one = await self.waited_on(work)
                applied = late_one if late_one.error is None else applied
            if self.waits_inside and not isinstance(applied.error, (asyncio.CancelledError, *self.intent.bubbles)):
                await self._rest_inside()
            elif applied.error is None:
                ended = applied.ended or self._returned(applied.value)
                if applied.ended is not None:
                    self._files_ended()
                self._leave()
                if ended is not None:
                    return await self._ended(*ended)
            else:
                await self._raised(applied)
            applied = None

    async def _before_attempt(self, work: Work | None, *, looked: bool) -> reconcile.RecordedOutcome | None:
        """Checks before the next attempt. Returns the outcome if no attempt is to be made."""
        ex, policy = self.ex, self.intent.policy
        if self.is_open and self.intent.effect not in SAFE:
            settled = await reconcile.settle(self, work)
            if settled is not None:
                return settled._replace(value=await self._ended(settled.seq, settled.value))
            if self.cancelled:
                await ex.recorded(ex.write_behind(*self.written(), ex.step_ended(self.step, "cancelled")))
                raise asyncio.CancelledError
        elif self.counted >= self.allowed and not self.granted:
            await self.fail(self.failure)
        self.granted = False
        if self.until_us:
            looked = False
            await until_time(ex, self.step, self.until_us)
        if policy.limits and await self._turn():
            looked = False
        late = await self._outlived(work)
        if late is not None:
            return late._replace(value=await self._ended(late.seq, late.value))
        if ex.has_outside_effects and not looked and not self.is_open:
            # Meanwhile another run of the lineage may have done it.
            found = await self._done_before()
            if found is not None:
                return found
        if self.intent.claims and not self.holds and (taken := ex.consuming.intersection(self.intent.claims)):
            await self.fail(describe(AlreadyClaimed(ex.run_id, space=taken.pop().space, owner=ex.run_id, seq=0)))
        if self.concerns_rules and (self.paths or not self.is_open) and not self.is_judged:
            await approvals.agreed(self)
        return None

    async def _done_before(self) -> reconcile.RecordedOutcome | None:
        """The outcome of the action if it was done before; raises where it may not be done now."""
        if self.ex.has_outside_effects or (self.intent.policy.repeat != "allow" and not self.made):
            found = await dedupe.earlier(self)
            if found is not None:
                await self.ex.recorded(found.seq)
                return found
        if self.intent.claims and not self.made:
            await self._refuse_consumed()
        await dedupe.allowed(self)
        return None

    async def open_stream(self) -> Any:
        """As `run`, for a stream: returns the open stream, before any chunk is recorded."""
        while True:
            await self._before_attempt(None, looked=False)
            applied = await self._attempt()
            if applied.error is None:
                return applied.value
            await self._raised(applied)

    async def _ended(self, seq: int, value: Any) -> Any:
        ex, intent = self.ex, self.intent
        if intent.policy.confirm and not await reconcile.confirmed(ex, intent, reconcile.effect_of(self), value):
            await ex.recorded(ex.log.seq)
            raise StepFailed(self.step, intent.name, reconcile.NOT_CONFIRMED)
        if ex.after_death:
            await ex.barrier()
        if not ex.is_solo:
            await ex.recorded(seq)
        ex.context.see(seq)
        return value

    def given_up(self) -> None:
        """A sibling ended, or the code gave up, while this step waited for its next attempt: it makes none any more."""
        is_known = not self.is_open or self.intent.effect in SAFE
        is_noted = self.step in self.ex.log.fold.facts.pending and not self.branch.over_at
        if is_known and is_noted and not self.unwritten and self.ex.signal is None:
            self.ex.write_behind(self.ex.step_ended(self.step, "cancelled"))

    async def _refuse_consumed(self) -> None:
        """Fail a step whose unique right was consumed before, without any call."""
        self.holds = self._has_consumed()
        for claim in self.intent.claims if not self.holds else ():
            owner = self.ex.engine.log.store.owned(claim.space, claim.key).get(claim)
            if owner is not None:
                gone = AlreadyClaimed(self.ex.run_id, space=claim.space, owner=owner.run, seq=owner.seq)
                await self.fail(describe(gone))

    # one attempt ------------------------------------------------------------------------------

    async def _attempt(self) -> Applied:
        files = self.ex.files
        if self.intent.effect == "workspace" and files is None and self.ex.engine.stand_in is None:
            raise NotDone(f"{self.intent.name} works in a workspace; declare one: @killick.agent(workspace=…)")
        if files is None or self.intent.sort != "tool":
            return await self._attempt_made()
        self._refuse_shared_files()
        async with files.around(self):
            applied = await self._attempt_made()
            if self.intent.effect == "workspace" and applied.error is not None and self._goes_again(applied):
                await files.failed(self)
            return applied

    def _refuse_shared_files(self) -> None:
        """Refuse a tool with exclusive use of the workspace inside of another one: it would deadlock."""
        for around in self.branch.outer.around() if self.branch.outer is not None else ():
            effects_of = {self.intent.effect, around.effect}
            if "workspace" in effects_of and not effects_of & {"reads", None}:
                problem = (
                    f"{self.intent.name} is called inside of step {around.step}, and one of them has the workspace"
                )
                raise NotDone(f"{problem} for itself; declare what only takes other steps effect='reads'")

    def _goes_again(self, applied: Applied) -> bool:
        """Whether an attempt that failed in doubt will be followed by another."""
        error = applied.error
        assert error is not None
        if applied.work is not None or self.says_nothing_happened(error):
            return False
        # A rate limit of the remote service does not show whether the tool changed files before.
        left = self.counted + 1 < self.allowed
        return self._limited(error) is not None or (left and not_retried(error, self.intent.policy.retry) is None)

    async def _attempt_made(self) -> Applied:
        ex, intent = self.ex, self.intent
        ex.refuse(self.branch)
        raise_if_intervened(ex, self.step)
        ex.check_lease()
        forks = ex.log.ledger.facts.forks
        acts = intent.effect not in dedupe.OWN_ONLY and intent.undoes is None
        if acts and forks != self.forks and not self.is_open:
            # A fork was made since the look, and may have done it: the run is taken up anew and looks again.
            raise ex.interrupted(AlreadyClaimed(ex.run_id, space=ACTION, owner=forks[-1], seq=0))
        now = self.began_us = ex.now_us()
        timeout = intent.policy.timeout
        self.made += 1
        if self.key is None:
            self.key = action_key(ex.run_id, self.step, intent.name, intent.digest, generation=ex.generation)
            if intent.undoes is not None:
                self.key = undo_key(intent.recording["key"])
        claims = () if self.holds else intent.claims
        ex.consuming.update(claims)
        if self.slot is not None:
            claims, self.slot = (*claims, self.slot), None
        if self.slots:
            claims, self.slots = (*claims, *self.slots), ()
        if not self.holds_permits:
            claims, self.holds_permits = (*claims, *self.permits), bool(self.permits)
        self.holds = bool(intent.claims)
        started = e.AttemptStarted(
            at=now, step=self.step, attempt=self.made, key=self.key, epoch=ex.log.epoch,
            deadline=deadline_us(now, timeout), claims=tuple(map(claim_text, claims)), action=self._action(),
        )  # fmt: skip
        entries = self.written_with(started)
        first = ex.is_first_live()
        if intent.effect in ("reads", None) and not first and not claims:
            ex.write_behind(*entries)
        else:
            written = await ex.write(*entries, claims=claims)
            self.started = written.seq
            if written.cancelled:
                return Applied(error=Untouched())
        ex.check_lease()
        folder = ex.folder
        place = ToolStep(ex.run_id, self.step, self.made, Key(self.key), self.record_progress, folder)
        inner = place.inner = self.branch.inner = InnerSteps(
            self.step, intent.effect, self.branch.guest, self.branch.outer
        )
        inner.inflight, inner.hosted = self.inflight, ex.hosted
        touch = partial(self._touch, place, timeout)
        stand_in = ex.engine.stand_in
        ex.attempts += 1
        try:
            applied = await (touch() if stand_in is None else stand_in.apply(intent, place, touch))
        finally:
            self.branch.inner = None
            ex.inner_waits.close(inner)
            ex.attempts -= 1
            if ex.signal is not None:
                ex.stirred.set()  # the executor may be waiting for open attempts to finish
        await self._taken_again(applied)
        self._note_inner(inner)
        return applied

    async def _taken_again(self, applied: Applied) -> None:
        """An attempt that waited for steps of its own and gave them up is recorded when the run is taken again."""
        ex = self.ex
        if ex.parked and not isinstance(applied.error, asyncio.CancelledError):
            await ex.until_taken()
            if ex.parked and ex.signal is not None:
                raise ex.signal

    def _note_inner(self, inner: InnerSteps) -> None:
        waits = inner.waits  # only then the log is folded in the middle of a step
        self.waits_inside = inner.is_refused or bool(waits and not waits.isdisjoint(self.ex.log.fold.facts.pending))

    async def _touch(self, place: ToolStep, timeout: float | None) -> Applied:
        try:
            injected = await self._injected(place) if self.intent.injected else {}
        except Exception as error:
            return Applied(error=error, untouched=True)
        with observers.applying(self.ex, place, self.intent):
            return await self._apply(place, timeout, injected)

    async def _apply(self, place: ToolStep, timeout: float | None, injected: dict[str, Any]) -> Applied:
        ex, intent = self.ex, self.intent
        if intent.effect == "transaction":
            return await Transacting(self, place, injected, self.begins_live).apply(timeout)
        call = partial(called, intent, injected)
        live = self.begins_live()
        if place.inner is not None:
            place.inner.live = live
        if intent.policy.isolate == "process":
            try:
                return await run_isolated(intent.fn, intent.arguments, place, timeout)
            finally:
                if live is not None:
                    live.end()
        if intent.is_async:
            token = HERE.set(place)
            limit = asyncio.timeout(timeout)
            try:
                if timeout is None:
                    return Applied(await call())
                async with limit:
                    return Applied(await call())
            except BaseException as error:
                return Applied(error=error, timed_out=isinstance(error, TimeoutError) and limit.expired())
            finally:
                HERE.reset(token)
                if live is not None:
                    live.end()
        context = copy_context()
        context.run(HERE.set, place)
        work = ex.engine.threads.start(partial(self._in_thread, call), context, live)
        ex.engine.live.remember(ex.run_id, self.step, work)
        applied = await waited_for(work, timeout)
        if live is not None and isinstance(applied.error, asyncio.CancelledError) and await ex.is_closing():
            applied = await outlasted(work, ex.thread_seconds)
        if isinstance(applied.error, _TooLate):
            raise ex.interrupted(LeaseLost(ex.run_id))
        return applied

    def begins_live(self) -> LiveCall | None:
        """The attempt may have effects from now on. A late outcome of its thread is recorded too."""
        if self.intent.effect in ("reads", None):
            return None
        late = None if self.intent.effect in ("transaction", "workspace") else self._record_late
        return self.ex.engine.live.begin(self.ex.run_id, self.step, self.intent.name, late)

    def _in_thread(self, call: Callable[[], Any]) -> Any:
        """Check the lease again in the thread, which may start late."""
        if not self.ex.is_ours:
            raise _TooLate
        return call()

    async def _injected(self, place: ToolStep) -> dict[str, Any]:
        """The arguments that no caller gives. A resource is open before the tool is called."""
        injected: dict[str, Any] = {}
        for name, marker in self.intent.injected.items():
            if not is_marker(marker):
                injected[name] = await self.ex.engine.resources.get(marker.resource)
            elif marker is KEY or marker is STEP:
                injected[name] = place.key if marker is KEY else place
            elif marker is WORKSPACE and place.workspace is not None:
                injected[name] = place.workspace
        return injected

    def record_progress(self, value: Any) -> None:
        """Record a tool's progress, from any thread."""
        loop = self.ex.loop
        self.progress = self.ex.progress[self.step] = through_codec(value)
        entry = Entry(
            e.AttemptProgressed(at=self.ex.now_us(), step=self.step, attempt=self.made), {"progress": self.progress}
        )
        if loop is current_loop():
            self.ex.write_behind(entry)
        else:
            loop.call_soon_threadsafe(self._tell_progress, entry)

    def _tell_progress(self, entry: Entry) -> None:
        over = self.hold is not None and self.hold.seq is not None
        if self.ex.signal is None and not over:
            self.ex.write_behind(entry)

    # outcomes ---------------------------------------------------------------------------------

    def _returned(self, value: Any) -> tuple[int, Any] | None:
        """Record a value at once; None when it cannot be stored, which leaves the attempt in doubt."""
        intent, ex = self.intent, self.ex
        values: dict[str, Any] = {"output": value}
        usage = None
        try:
            if intent.sort == "model":
                reply = reply_kind(value)
                usage = ex.judge.priced(usage_of(value), model_of(intent))
                reasoning = reasoning_of(value)
                values |= {"output": wire(value), "reply": reply} if reply else {}
                values |= {"reasoning": reasoning} if reasoning else {}
            seen = restored(intent, through_codec(values["output"]), values.get("reply"), self.step)
            released = self.given_back(nothing_happened=False)
            event = e.AttemptEnded(
                at=ex.now_us(), step=self.step, attempt=self.made, outcome="returned", usage=usage,
                released=tuple(map(claim_text, released)),
            )  # fmt: skip
            seq = ex.write_behind(Entry(event, values), **permits.returned(ex.log, released, event.at))
            self.release(released)
            self._files_ended()
            return seq, seen
        except ValueRefused as refused:
            self.note_failed(describe(refused), "unknown", None)
            self.counted = self.allowed
            if intent.effect in SAFE:
                raise StepFailed(self.step, intent.name, self.failure) from refused
            return None

    async def _rest_inside(self) -> None:
        """Leave an attempt open whose inner steps are not over. When they are, its effect class decides whether it is
        entered again."""
        ex = self.ex
        if isinstance(ex.signal, Interrupted | Cancelling):
            raise ex.signal
        self._note_left()
        ex.refuse(self.branch)
        await ex.until_over(ex.log.fold.inside(self.step))
        ex.refuse(self.branch)

    def _note_left(self) -> None:
        again = self.ex.now_us() if self.intent.effect in SAFE else None
        self.note_failed(reconcile.left_failure(self.ex.log.fold.inside(self.step)), "unknown", again, limited=True)

    async def _raised(self, applied: Applied) -> None:
        """Record a failure, and decide: again later, in doubt, or over."""
        ex, intent, error = self.ex, self.intent, applied.error
        assert error is not None
        if isinstance(error, asyncio.CancelledError | Untouched):
            await ex.raise_if_closing()
        if isinstance(ex.signal, Interrupted) and not ex.may_record:
            raise ex.signal
        # An external caller may repeat the call, which then continues from here.
        given_up = ex.now_us() if ex.is_outside else None
        if isinstance(error, Untouched):
            seq = self.note_failed(CANCELLED, "refused", given_up, limited=ex.is_outside)
            ex.refuse(self.branch)
            await ex.recorded(seq)
            raise asyncio.CancelledError
        if isinstance(error, intent.bubbles):
            await ex.recorded(self.note_failed(describe(error), "refused", ex.now_us(), limited=True))
            raise error
        cancelled = isinstance(error, asyncio.CancelledError) and not applied.timed_out
        if isinstance(error, IsolatedError):
            failure = error.failure
        else:
            failure = describe(error, kind="timeout" if applied.timed_out else None)
        limited = None if cancelled else self._limited(error)
        nothing_happened = applied.untouched or self.says_nothing_happened(error)
        rolled_back = intent.effect == "transaction" and not isinstance(error, TransactionEnded)
        is_refused = (
            nothing_happened or rolled_back or (intent.effect == "at_most_once" and called_nothing(error, intent.fn))
        )
        outcome: e.Outcome = "refused" if is_refused else "unknown"
        self.counted += limited is None
        is_safe = intent.effect in SAFE or rolled_back
        if cancelled:
            retry_at, stops = (given_up if is_safe else None), None
        else:
            retry_at, stops = self._retry_at(error, limited, outcome, nothing_happened=nothing_happened)
        is_free = limited is not None or (cancelled and retry_at is not None)
        seq = self.note_failed(failure, outcome, retry_at, limited=is_free, not_retried=stops)
        self._leave()
        if cancelled:
            ex.refuse(self.branch)
            self.cancelled = True
            if is_safe:
                await ex.recorded(seq)
                raise asyncio.CancelledError
        elif retry_at is None and (outcome == "refused" or intent.effect in SAFE):
            await ex.recorded(seq)
            raise StepFailed(self.step, intent.name, failure) from error

    async def _outlived(self, work: Work | None) -> reconcile.RecordedOutcome | None:
        """No further attempt of a blocking tool starts while the thread of the last one lives; it may yet succeed."""
        if work is None or not work.alive:
            return None
        late = await self.waited_on(work)
        if late.work is not None:
            await self.fail(describe(TimeoutError("the thread of the last attempt is still at it"), kind="timeout"))
        return reconcile.settled(self, Happened(late.value), by="late result") if late.error is None else None

    async def _until_over(self, step: e.StepId) -> None:
        """Wait until no thread runs the step any more, before it is undone."""
        live = self.ex.engine.live
        if live.of(self.ex.run_id, step):
            await live.over(self.ex.run_id, calls.ABANDON_SECONDS)
        if still := live.of(self.ex.run_id, step):
            raise self.ex.interrupted(StillRunning(self.ex.run_id, still))

    def _leave(self) -> None:
        """Return a recorded outcome; raise the signal if the run is cancelled or interrupted."""
        if isinstance(self.ex.signal, Interrupted | Cancelling):
            raise self.ex.signal

    def _record_late(self, value: Any, error: BaseException | None) -> None:
        """Record the outcome of a thread whose execution is gone, in any thread, while the lease is valid."""
        ex, log = self.ex, self.ex.log
        if not ex.may_record:
            return
        fold = log.fold
        past = fold.step(self.step) if fold.facts.generation == ex.generation else None
        if past is None or past.status in OVER or len(past.attempts) != self.made or inspect.isawaitable(value):
            return
        entries, rights = reconcile.late_entries(self, past, value, error)
        if entries:
            log.append(*entries, **rights)
