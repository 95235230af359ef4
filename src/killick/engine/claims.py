"""A leased run, and the state from which its code starts or resumes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from killick.clock import SET_BACK_US, meant_us
from killick.definitions.agents import AnyAgent
from killick.engine.engine import Engine
from killick.engine.execution import Execution
from killick.engine.leases import LEASE_SECONDS
from killick.engine.outcome import RunOutcome, ended
from killick.engine.replay import OVER
from killick.errors import StoreError
from killick.log.log import Leased, Log
from killick.log.writer import Entry, RunLog
from killick.model import events as e
from killick.model.crash_loop import QUARANTINE_AFTER, backoff_us
from killick.store.protocol import lease_all
from killick.store.records import DIED_ALONE, ENDED, Head, RunQuery

_CULPRITS_MAX: Final = 100

ReadRun = tuple[Head, RunLog]  # as it was read, without a lease


class Start(NamedTuple):
    """A run to be created."""

    started: e.RunStarted
    agent: AnyAgent
    input: Any


class ClaimedRun(NamedTuple):
    """A leased run: its head, since when and for how long.

    left           the previous holder, if it left the run in the middle; `left_until_us`: the end of its lease
    backs_off      a run that crashed waits for its back-off, and a suspect is released, to be run alone
    alone          this process runs nothing else
    serves         whether this process takes a step of a name and a sort; for others the run is left. None: all
    """

    head: Head
    since: float
    seconds: float
    left: str | None = None
    left_until_us: int | None = None
    backs_off: bool = False
    alone: bool = False
    serves: Callable[[str, str], bool] | None = None

    @property
    def lapsed(self) -> str | None:
        """The holder before, where it died or lost the run, and did not let it go."""
        return None if self.left_until_us == 0 else self.left


def context_base(engine: Engine, log: RunLog, agent: AnyAgent, after: int) -> tuple[Any, int, int | None]:
    """The context where replay begins: as the run was started, or as it was at the last transition."""
    facts = log.fold.facts
    if not facts.context_parts:
        return None, 0, None
    if after:
        state = engine.log.state(log.run, at=after)
        found = state.context
        form = state.data(state.fold.facts.context_parts[0]).get("form") if state.fold.facts.context_parts else None
        return found.document, found.version, form
    if agent.options.context is None and facts.context_parts[0] != facts.input + 1:
        return None, 0, None
    data = engine.log.data(log.run, facts.input + 1)
    return data.get("document"), 1, data.get("form")


def recorded_input(ex: Execution, seq: int) -> Any:
    """The input of a run, from its record, as the type that its agent takes."""
    data = ex.record.data(seq) if ex.record.has(seq) else ex.engine.log.data(ex.run_id, seq)
    return ex.agent.checked(data.get("input"))


def touch_after(ex: Execution, claim: ClaimedRun) -> int:
    """R16: until when an open attempt is left alone, because its worker may be frozen rather than dead.

    One that only reads runs again at once. The first worker to find the attempt records the time; others keep to it.
    """
    store = ex.engine.log.store
    grace = round(ex.engine.grace_seconds * 1_000_000)
    latest = 0
    for step in ex.record.steps.values():
        is_open = step.attempts and not step.attempts[-1].ended and step.status not in OVER
        if not is_open or step.effect in ("reads", None):
            continue
        started: e.Started = ex.record.event(step.attempts[-1].started)
        holder = ex.record.holder_of(started.epoch)
        if holder is not None and holder != ex.engine.holder and store.lives(holder):
            # Leases end by the store's own clock, deadlines by ours.
            left = 0 if not claim.left_until_us else claim.left_until_us - store.now_us()
            now = ex.now_us()
            deadline = meant_us(started.deadline, started.at, now) if started.deadline else now + left
            latest = max(latest, step.delayed_until or deadline + grace)
    return latest


def claim_run(engine: Engine, run: str, known: Head | None = None) -> ClaimedRun:
    """Lease a run for this engine's holder. RunBusy if another worker holds it. `known` is its head just now."""
    engine.leases.await_release(run)
    since = engine.clock.monotonic()
    if (kept := engine.take_over(run, seconds=engine.lease_seconds)) is not None:
        head, left_open = kept
        return ClaimedRun(head, since, engine.lease_seconds, engine.holder if left_open else None, 0)
    left = known or engine.log.head(run)
    try:
        leased = engine.log.lease(run, engine.holder, seconds=engine.lease_seconds, known=left)
    except StoreError:
        # The store may have granted the lease all the same.
        engine.leases.release(run, left.epoch + 1, left=left.holder is not None)
        raise
    return ClaimedRun(leased.head, since, engine.lease_seconds, leased.left, leased.left_until_us)


class Claims:
    """Leases the runs that the tasks of one turn of a loop open, in one write."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._wanted: list[tuple[Head, asyncio.Future[ClaimedRun]]] = []

    async def claim(self, known: Head) -> ClaimedRun:
        """As `claim_run`, for a run that no worker held when its head was read."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[ClaimedRun] = loop.create_future()
        if not self._wanted:
            loop.call_soon(self._claim_all)
        self._wanted.append((known, future))
        try:
            return await future
        except asyncio.CancelledError:
            if not future.cancelled() and future.exception() is None:
                self._engine.release(known.run, future.result().head.epoch, left=False)
            raise

    def _claim_all(self) -> None:
        engine, wanted = self._engine, [each for each in self._wanted if not each[1].done()]
        self._wanted, since, seconds = [], engine.clock.monotonic(), engine.lease_seconds
        try:
            heads = lease_all(engine.store, [known.run for known, _ in wanted], engine.holder, seconds=seconds)
        except Exception as error:
            for known, future in wanted:
                engine.leases.release(known.run, known.epoch + 1)  # the store may have granted it all the same
                future.set_exception(error)
            return
        for (known, future), head in zip(wanted, heads, strict=True):
            if isinstance(head, Head):
                leased = Leased.since(known, head)
                future.set_result(ClaimedRun(head, since, seconds, leased.left, leased.left_until_us))
            else:
                future.set_exception(head)


def idle_outcome(engine: Engine, log: RunLog, claim: ClaimedRun) -> RunOutcome | None:
    """The outcome of a leased run that does not continue now: ended, paused, repaired and not looked at yet; or its
    holders died, and it backs off or has to run alone. None if it continues."""
    facts = log.fold.facts
    if facts.ended:
        return ended(engine, log.run)
    if facts.paused and not facts.cancelling:
        return RunOutcome(run=log.run, status="paused")
    if facts.mend and not isinstance(engine.log.event(log.run, facts.mend), e.RunDiverged):
        return RunOutcome(run=log.run, status="waiting")
    crashes, now = facts.crashes, engine.clock.now_us()
    if not claim.backs_off or crashes is None:
        return None
    backs_off = now < crashes.until <= now + backoff_us(crashes.deaths) + SET_BACK_US  # else the clock was set back
    if backs_off and not facts.taken:  # a worker that took it since saw the backoff end, by its own clock
        return RunOutcome(run=log.run, status=facts.status, wake_at_us=log.fold.wake_at, crashed=True)
    if crashes.is_suspect and not clear_suspect(engine.log, log, now):
        return RunOutcome(run=log.run, status=log.fold.facts.status, suspect=True)
    return None


def mark_delivered(engine: Engine, log: RunLog) -> None:
    """Mark the inbox of a run that does not continue as seen, so that it is not due until it is resumed."""
    row = engine.log.store.index(log.run)
    if row is not None and row.status not in ENDED and row.delivered != log.seen:
        log.seen = row.delivered
        log.append()


# deaths: `killick.model.crash_loop` decides which count, and the consequences ------------------------------


def is_death(engine: Engine, log: RunLog, claim: ClaimedRun) -> bool:
    """Whether a lapsed lease shows that its holder died (R40). While the store is away, every lease lapses."""
    holder, store, facts = claim.lapsed, engine.store, log.fold.facts
    if holder is None or holder == engine.holder:
        return False
    if facts.epoch != log.epoch - 1:
        return False  # no code ran under that lease: its taking is on record before the code begins, or soon after
    if store.proves_life and store.place != "memory:" and store.lives(holder):
        return False  # its lock is held: it is frozen, or was slow
    if engine.clock.monotonic() - engine.leases.unreachable_at < claim.seconds + LEASE_SECONDS:
        return False  # this process could not reach the store either
    return not any(each.holder == holder and each.lives for each in store.holders())  # it renews other runs


def record_death(log: RunLog, holder: str | None, at: int, *, quarantines: bool) -> None:
    """Put a death on record, durably. With `quarantines`, one too many leaves the run to a person."""
    fold, facts = log.fold, log.fold.facts
    deaths = 1 if facts.crashes is None else facts.crashes.deaths + 1
    pending = (fold.steps[index] for index in facts.pending.values())
    lapsed = e.LeaseLapsed(
        at=at,
        holder=holder or "",
        until=at + backoff_us(deaths),
        build=facts.build,
        steps=tuple(step.id for step in pending if step.status in ("running", "in_doubt")),
        alone=facts.alone,
    )
    is_over = quarantines and deaths >= QUARANTINE_AFTER
    log.append(Entry(lapsed), *([Entry(e.RunQuarantined(at=at, deaths=deaths))] if is_over else []))


def clear_suspect(store_log: Log, log: RunLog, at: int) -> bool:
    """Clear a suspect all of whose deaths were shared with runs that have died alone since."""
    crashes = log.fold.facts.crashes
    if crashes is None or crashes.alone or not crashes.holders:
        return False
    unexplained, culprits = set(crashes.holders), list[str]()
    for row in store_log.store.runs(RunQuery(tag=DIED_ALONE), limit=_CULPRITS_MAX):
        found = store_log.state(row.run).fold.facts.crashes
        if found is not None and unexplained.intersection(found.holders):
            unexplained.difference_update(found.holders)
            culprits.append(row.run)
    if unexplained:
        return False
    because = f"it only ran at the same time as {', '.join(culprits)}, which died alone"
    log.append(Entry(e.RunResumed(at=at, by="killick"), {"because": because}))
    return True
