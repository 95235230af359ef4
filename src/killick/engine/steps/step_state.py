"""The state of a step that is not over: its attempts so far, and the outcome of each on record.

Decides when the next attempt is made. Calls no tool.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from killick.definitions.policy import Happened
from killick.engine.approval.verdicts import PendingVerdict
from killick.engine.execution import Branch, Execution
from killick.engine.failures import describe, is_any, not_retried, rate_limit_seconds
from killick.engine.steps import attempt as calls
from killick.engine.steps import permits
from killick.engine.steps.attempt import Applied, Work, waited_for
from killick.engine.steps.intention import Intent, claim_text
from killick.engine.waits.waits import until_time
from killick.errors import NotDone, RateLimited
from killick.log.append_groups import Hold
from killick.log.writer import Entry
from killick.model import events as e
from killick.model.facts import Step
from killick.model.failure import Failure
from killick.store.limits import PermitPool
from killick.store.records import UniqueRight

RATE_LIMIT_SECONDS: Final = 1.0
"""The first delay where the server names none; doubled each time."""

SAFE: Final = frozenset({"reads", "idempotent", "workspace", None})
"""Effect classes whose attempt in doubt may be repeated: of the workspace, because its files are restored first. A
transaction is in doubt only if its tool ended it."""


class StepState(PendingVerdict):
    """A step that is not over, as deduplication, reconciliation and transactions use it."""

    def __init__(self, ex: Execution, branch: Branch, step: e.StepId, intent: Intent, past: Step | None) -> None:
        super().__init__(ex, branch, step, intent)
        self.past = past
        self.key: str | None = None
        self.failure: Failure | None = None
        self.counted = 0
        self.limited_since: int | None = None
        self.limited = 0
        self.until_us = 0
        self.holds = False
        self.granted = False
        self.cancelled = False
        self.progress: Any = None
        self.late: Happened | None = None
        self.reconciler_said = ""
        """Why its reconciler could not be used."""
        self.permits: tuple[UniqueRight, ...] = ()
        """The permits of its limits, from their choice to the outcome of the attempt."""
        self.holds_permits = False
        self.slot: UniqueRight | None = None
        self.forks: tuple[str, ...] = ()
        """The forks of the run at the last deduplication."""
        self.other_effects: list[str] = []
        self.waited = 0
        self.began_us = self.started = 0
        self.inflight: tuple[str, e.Digest] | None = None
        self.hold: Hold | None = None
        self.waits_inside = False
        """Whether inner steps of the last attempt wait, or were refused."""

    def begins(self, tool: str, identity: e.Digest) -> None:
        """The same action in another branch waits until this one is over, and then uses its outcome."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ex.inflight[tool, identity] = future
        self.inflight = tool, identity

    def over(self) -> None:
        """Release the steps that wait for this one, and forget a thread that has ended."""
        self.ex.engine.live.forget(self.ex.run_id, self.step)
        self.ex.engine.permits.difference_update(self.permits)
        if self.inflight is not None:
            self.ex.inflight.pop(self.inflight).set_result(None)

    @property
    def allowed(self) -> int:
        return self.intent.retry.attempts

    def says_nothing_happened(self, error: BaseException | None) -> bool:
        """Whether the tool's author says, by this error, that nothing happened."""
        return error is not None and is_any(error, (NotDone, RateLimited, *self.intent.policy.nothing_happened))

    async def waited_on(self, work: Work) -> Applied:
        """The outcome of an abandoned thread; raises the signal when the run is closed meanwhile."""
        late = await waited_for(work, calls.ABANDON_SECONDS)
        if isinstance(late.error, asyncio.CancelledError):
            await self.ex.raise_if_closing()
        return late

    def _has_consumed(self) -> bool:
        """Whether this action, by its key, consumed its rights in an attempt of any run."""
        log = self.ex.engine.log
        for claim in self.intent.claims:
            owner = log.store.owned(claim.space, claim.key).get(claim)
            if owner is None or log.store.head(owner.run) is None:
                return False
            if getattr(log.event(owner.run, owner.seq), "key", None) != self.key:
                return False
        return bool(self.intent.claims) and self.key is not None

    def given_back(self, *, nothing_happened: bool) -> tuple[UniqueRight, ...]:
        """The rights that an outcome returns: consumed ones only if nothing happened, permits always."""
        return (*(self.intent.claims if self.holds and nothing_happened else ()), *self.permits)

    def release(self, rights: tuple[UniqueRight, ...]) -> None:
        """Note that rights were returned."""
        self.ex.consuming.difference_update(rights)
        self.holds = self.holds and not set(rights).intersection(self.intent.claims)
        if self.permits and set(rights).issuperset(self.permits):
            self.ex.engine.permits.difference_update(self.permits)
            self.permits, self.holds_permits = (), False

    def _files_ended(self) -> None:
        if self.ex.files is not None and self.intent.sort == "tool":
            self.ex.files.ended()

    def note_failed(
        self, failure: Failure, outcome: e.Outcome, retry_at: int | None, *, limited: bool = False,
        not_retried: e.NotRetried | None = None,
    ) -> int:  # fmt: skip
        ex = self.ex
        released = self.given_back(nothing_happened=outcome == "refused")
        event = e.AttemptEnded(
            at=ex.now_us(), step=self.step, attempt=self.made, outcome=outcome, retry_at=retry_at, limited=limited,
            released=tuple(map(claim_text, released)), not_retried=not_retried,
        )  # fmt: skip
        values = {"failure": failure} if self.progress is None else {"failure": failure, "progress": self.progress}
        seq = ex.write_behind(Entry(event, values), **permits.returned(ex.log, released, event.at))
        self.release(released)
        self.failure = failure
        self.until_us = retry_at or 0
        self.is_open = outcome == "unknown"
        self._files_ended()
        return seq

    async def delay(self, until_us: int, because: str) -> None:
        """Record a delay of the step, and wait until it is over."""
        delayed = e.StepDelayed(at=self.ex.now_us(), step=self.step, until=until_us, because=because)
        self.ex.write_behind(*self.written(), Entry(delayed))
        await until_time(self.ex, self.step, until_us)

    async def _turn(self) -> bool:
        """Wait for the declared limits, which is no attempt. True: it had to wait."""
        intent, ex, store = self.intent, self.ex, self.ex.engine.log.store
        limits, call = intent.policy.limits, (intent.arguments, store.secret_key)
        buckets = [found for limit in limits if (found := limit.bucket(*call)) is not None]
        pools = [pool for limit in limits if (pool := limit.pool(*call)) is not None]
        because = "limit " + ", ".join(limit.name for limit in limits)
        before, waited = self._waits_since(because), False
        since = ex.now_us() if before is None else before
        while True:
            passed_on: list[str] = []
            if not self.permits and pools:
                self.permits, passed_on = permits.choose(ex, pools, in_turn=waited or before is not None)
            is_full = bool(pools) and not self.permits
            wait_us = store.take_tokens(buckets) if buckets and not is_full else 0
            if is_full:
                wait_us = max(permits.LOOK_AGAIN_US, ex.now_us() - since)
            elif wait_us <= 0:
                return waited
            left_us = since + round(intent.policy.patience * 1_000_000) - ex.now_us()
            if left_us <= 0 or (wait_us > left_us and not is_full):
                problem = f"no turn within {intent.policy.patience:g} s by its own limits"
                await self.fail(describe(RateLimited(problem)))
            if not is_full:
                self._drop_permits()
                await self.delay(ex.now_us() + wait_us, because)
            else:
                await self._queue(ex.now_us() + min(wait_us, left_us), because, pools, passed_on)
            waited = True

    def _waits_since(self, because: str) -> int | None:
        """Since when the step waited for its limits in executions before this one."""
        found = self.ex.record.of(self.step, e.StepDelayed) if self.past is not None and not self.made else ()
        return min((event.at for _, event in found if event.because == because), default=None)

    def _drop_permits(self) -> None:
        """Leave permits that were chosen and not claimed to others."""
        if not self.holds_permits:
            self.ex.engine.permits.difference_update(self.permits)
            self.permits = ()

    async def _queue(self, until_us: int, because: str, pools: list[PermitPool], passed_on: list[str]) -> None:
        """Wait until a permit is free. The store sends a message with each that is returned from now on."""
        ex, tags = self.ex, tuple(pool.tag for pool in pools)
        delayed = e.StepDelayed(at=ex.now_us(), step=self.step, until=until_us, because=because, queued=tags)
        sends = permits.wake(ex.log, passed_on, delayed.at)
        await ex.recorded(ex.write_behind(*self.written(), Entry(delayed), sends=sends))
        if not passed_on:
            # One that was returned before the delay was on record woke others.
            self.permits, _ = permits.choose(ex, pools, in_turn=True)
        if not self.permits:
            await until_time(ex, self.step, until_us)

    def _limited(self, error: BaseException) -> float | None:
        """The delay that a rate limit asks for; None for other errors.

        A status alone does not prove that nothing happened: the tool may have acted before it was refused.
        """
        if self.intent.effect == "at_most_once" and not self.says_nothing_happened(error):
            return None
        return rate_limit_seconds(error, now_us=self.ex.now_us())

    def _retry_at(
        self, error: BaseException, limited: float | None, outcome: e.Outcome, *, nothing_happened: bool
    ) -> tuple[int | None, e.NotRetried | None]:
        """When the next attempt is made, or why none is."""
        ex, intent = self.ex, self.intent
        now = ex.now_us()
        if limited is not None:
            self.limited += 1
            since = self.limited_since = self.limited_since or now
            wait = limited or RATE_LIMIT_SECONDS * 2 ** min(self.limited - 1, 6)
            at = now + round(wait * 1_000_000)
            return (at, None) if at - since <= intent.policy.patience * 1_000_000 else (None, "patience_over")
        stops: e.NotRetried | None = None
        if outcome == "unknown" and intent.effect not in SAFE:
            stops = "may_have_happened"
        elif is_any(error, intent.retry.never):
            stops = "named_in_never"
        elif not nothing_happened:
            stops = not_retried(error, intent.policy.retry)
        if stops is None and self.counted >= self.allowed:
            stops = "no_attempts_left"
        if stops is not None:
            return None, stops
        delay: float = intent.retry.delay_seconds(self.counted, ex.engine.ids.fraction())
        return now + round(delay * 1_000_000), None

    def _action(self) -> e.Action | None:
        """The attempt's action, for the ledger of a rewound run, which knows only later intentions."""
        intent, past = self.intent, self.past
        if past is None or not self.ex.generation or intent.effect in ("reads", None):
            return None
        undoes = 0 if intent.undoes is None else intent.undoes[1]
        return e.Action(intent.name, intent.effect, intent.action, past.edited or past.intended, undoes)
