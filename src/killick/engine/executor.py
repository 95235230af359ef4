"""Advances runs on one loop: leases them, drives them until they end or wait, parks them, and wakes them.

Does not know how a step runs. A waiting run stays in a small warm cache; woken soon it resumes without replay.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final

from killick.definitions.agents import AGENTS, AnyAgent
from killick.engine import claims, completion, observers, state_machine
from killick.engine.agent_code import RunOf, begin, forget, raise_own_error, run_agent
from killick.engine.child_tasks import ChildTasks
from killick.engine.claims import ClaimedRun, Claims, ReadRun, Start, claim_run
from killick.engine.context import Context, initial_context, recorded_context
from killick.engine.control import commands
from killick.engine.effects import compensation
from killick.engine.effects.rewind import record_rewind
from killick.engine.engine import Engine
from killick.engine.execution import UNWIND_SECONDS, Branch, Execution
from killick.engine.outcome import RunOutcome, ended, outcome_of
from killick.engine.replay import Record
from killick.engine.signals import Cancelling, Interrupted, Parked, Rewinding, Signal
from killick.engine.steps.children import first_entries
from killick.engine.steps.workspace_hook import Files
from killick.engine.waits import waits
from killick.errors import (
    AlreadyClaimed,
    HeadMoved,
    InboxMoved,
    KillickError,
    LogError,
    MessageGone,
    RunBroken,
    RunBusy,
    RunExists,
    StillRunning,
    TimeRefused,
    ValueBroken,
)
from killick.log.writer import Entry, RunLog
from killick.logger import get_logger
from killick.model import events as e

logger: Final = get_logger("killick")

WARM_MAX: Final = 64
"""Runs that wait and are kept in memory."""

POLL_SECONDS: Final = 0.25
"""The interval at which a busy run reads its inbox; longer where hundreds of runs do."""

_AGAIN: Final = (AlreadyClaimed, MessageGone, InboxMoved, RunExists, HeadMoved)
"""Refusals of a commit after which the run is opened again. A worker that lost its lease gets EpochStale instead."""

_AGAIN_MAX: Final = 12


class _Rewound(Exception):
    """A run was rewound while it was leased here, and has to be opened again."""

    def __init__(self, claim: ClaimedRun) -> None:
        super().__init__(claim.head.run)
        self.claim = claim


class Executor:
    """The runs that one loop advances."""

    def __init__(self, engine: Engine, run_of: RunOf) -> None:
        self.engine = engine
        self._run_of = run_of
        self.poll_seconds = POLL_SECONDS
        self._live: dict[str, Execution | None] = {}
        self.warm: OrderedDict[str, Execution] = OrderedDict()
        self._claims = Claims(engine)
        self._children = ChildTasks(engine, self._live, partial(self.advance, sit_out=True))
        self._left = asyncio.Event()

    # advancing --------------------------------------------------------------------------------

    async def advance(
        self, run: str, *, start: Start | None = None, agent: AnyAgent | None = None, sit_out: bool = False,
        claim: ClaimedRun | None = None, read: ReadRun | None = None,
    ) -> RunOutcome:  # fmt: skip
        """Drive a run until it has ended or waits. With `sit_out`, timers and backoffs are waited for here.

        With a claim the run is leased already, and its children are left to the workers that claim them. `read` is
        the run as the caller has just read it.
        """
        if run in self._live:
            raise RunBusy(run, holder=self.engine.holder)
        self._live[run] = None
        self.engine.log.committer.live = len(self._live)
        hosts = claim is None
        again = 0
        try:
            while True:
                try:
                    return await self._advanced(run, start, agent, read, sit_out=sit_out, hosts=hosts, claim=claim)
                except _Rewound as rewound:
                    start, claim, read = None, rewound.claim, None
                except _AGAIN:
                    again += 1
                    if again == _AGAIN_MAX:
                        raise
                    await asyncio.sleep(self.engine.clock.nap_seconds(min(0.005 * 2**again, 1.0)))
                    start = claim = read = None
                except Interrupted as interrupted:
                    raise interrupted.error(run) from None
        except (RunBroken, ValueBroken) as damage:
            raise self.engine.log.damaged(run, damage) from None
        finally:
            self._live.pop(run, None)
            self.engine.log.committer.live = len(self._live)
            self._left.set()

    async def _advanced(
        self, run: str, start: Start | None, agent: AnyAgent | None, read: ReadRun | None, *, sit_out: bool,
        hosts: bool, claim: ClaimedRun | None,
    ) -> RunOutcome:  # fmt: skip
        taken = self._warmed(run, claim, hosts=hosts) if start is None else self._begun(start)
        if taken is None and claim is None and read is not None and read[0].holder is None and len(self._live) > 1:
            claim = await self._claims.claim(read[0])
        ex = taken or self._opened(run, agent, claim, read, hosts=hosts)
        if isinstance(ex, RunOutcome):
            return ex
        self._live[run], ex.driver = ex, asyncio.current_task()
        try:
            advanced = await self._driven(ex, sit_out=sit_out, hosts=hosts)
        except BaseException as error:
            observers.end_span(ex, error=error)
            raise
        ex.driver = None
        observers.end_span(ex, advanced)
        if advanced.has_ended:
            forget(ex)
        return advanced

    async def _driven(self, ex: Execution, *, sit_out: bool, hosts: bool) -> RunOutcome:
        try:
            await self._drive(ex, sit_out=sit_out)
            return await self._conclude(ex)
        except _Rewound:
            raise
        except GeneratorExit:
            self._release(ex, left=True)  # its loop is closed, and nothing can be awaited any more
            raise
        except BaseException as error:
            if not isinstance(ex.signal, Interrupted):
                ex.close(Interrupted(), cut=True)
            await _shielded(self._quieted(ex))
            if hosts or isinstance(error, asyncio.CancelledError | Signal | KillickError):
                self._release(ex, left=True)
            else:
                self._drop_lease(ex)  # a defect: the worker that claimed the run decides when it is due again
            if isinstance(error, Interrupted):
                raise error.error(ex.run_id) from None
            raise

    def leave(self, run: str) -> bool:
        """Release a live run at its next step, after its open attempts; it is due again at once."""
        ex = self._live.get(run)
        if ex is None or ex.signal is not None:
            return False
        ex.close(Parked())
        return True

    def priority(self, run: str) -> int | None:
        """The priority of a run that is live here."""
        ex = self._live.get(run)
        return None if ex is None else ex.log.fold.facts.priority

    def notify(self, run: str) -> bool:
        """Wake a run to read its inbox. True if it is live here."""
        if (ex := self._live.get(run)) is not None:
            ex.stirred.set()
        return run in self._live

    def notify_all(self) -> None:
        """Wake all live runs to read their inboxes."""
        for run in self._live:
            self.notify(run)

    async def close(self) -> None:
        """Release every run: live runs are interrupted, and resume later.

        It waits a few seconds for a blocking tool, and records its outcome; a run whose tool takes longer stays leased.
        """
        self._children.cancel()
        closing = [ex for ex in (*self._live.values(), *self.warm.values()) if ex is not None and ex.signal is None]
        for ex in closing:
            ex.close(Parked() if ex.parked else Interrupted(), cut=not ex.parked)
        await asyncio.gather(*(ex.unwind() for ex in closing))
        await self._children.wait(5)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(UNWIND_SECONDS):
                while self._live:
                    self._left.clear()
                    await self._left.wait()
        self.warm.clear()

    def abandon(self) -> None:
        """Release the runs of a loop that is closed, of which only threads still run."""
        for ex in [ex for ex in self._live.values() if ex is not None]:
            ex.signal = ex.signal or Interrupted()
            self._release(ex, left=True)
        self._live.clear()

    # taking a run -----------------------------------------------------------------------------

    def _begun(self, start: Start) -> Execution:
        """A new run. Its first events are committed with its first step."""
        engine, since = self.engine, self.engine.clock.monotonic()
        log = engine.log.begin(start.started.run, holder=engine.holder, seconds=engine.lease_seconds)
        started = log.with_key(start.started)
        document = initial_context(start.agent)
        context = Context(start.agent, document, 0 if document is None else 1)
        ex = self._execution(start.agent, log, state_machine.Resumed(), hosts=True, context=context)
        self._leased(ex, 1, since, engine.lease_seconds)
        ex.input = start.input
        taken = e.RunTaken(at=started.at, epoch=1, holder=engine.holder, build=started.build)
        taken = observers.taken(ex, taken, started=started)
        ex.write_behind(*first_entries(started, start.agent, start.input, document=document), Entry(taken))
        self._start(ex, state_machine.Resumed())
        return ex

    def _warmed(self, run: str, claim: ClaimedRun | None, *, hosts: bool) -> Execution | None:
        """A run that waits in memory, if its log has not changed since."""
        ex = self.warm.pop(run, None)
        if ex is None or ex.signal is not None:
            return None
        engine, ours = self.engine, claim is None
        try:
            claim = claim or claim_run(engine, run)
        except BaseException:
            self._children.unwind(ex)
            raise
        head = claim.head
        has_changed = head.seq != ex.log.seq or head.hash != ex.log.hash or ex.serves != claim.serves
        if has_changed or (claim.backs_off and claim.lapsed):
            if ours:
                engine.release(run, head.epoch, left=claim.left is not None)
            self._children.unwind(ex)
            return None
        ex.parked = False
        ex.log.epoch = head.epoch
        self._leased(ex, head.epoch, claim.since, claim.seconds)
        if ex.files is not None:
            ex.files.begin()
        ex.on_child = self._children.schedule if hosts else _nobody
        taken = e.RunTaken(at=ex.now_us(), epoch=head.epoch, holder=engine.holder, build=engine.build(ex.agent))
        ex.write_behind(Entry(observers.taken(ex, taken, warm=True)))
        try:
            waits.look(ex)
            for waiter in ex.waiters.values():
                if waiter.waits_for == "child":
                    ex.on_child(ex, waiter.name)
        except BaseException as error:
            observers.end_span(ex, error=error)
            self._children.unwind(ex)
            self._release(ex, left=True)
            raise
        return ex

    def _opened(
        self, run: str, agent: AnyAgent | None, claim: ClaimedRun | None, read: ReadRun | None, *, hosts: bool
    ) -> Execution | RunOutcome:
        """A run from its record. After a refusal it is released as it was found, unless the caller claimed it."""
        engine = self.engine
        claim = claim or claim_run(self.engine, run, None if read is None else read[0])
        ex: Execution | None = None
        try:
            is_current = read is not None and (read[1].seq, read[1].hash) == (claim.head.seq, claim.head.hash)
            log = read[1] if read is not None and is_current else engine.log.open(run, head=claim.head)
            log.epoch = claim.head.epoch
            if claims.is_death(engine, log, claim) and not log.fold.facts.ended:
                claims.record_death(log, claim.left, engine.clock.now_us(), quarantines=claim.backs_off)
            stays = claims.idle_outcome(engine, log, claim)
            if stays is not None:
                if not stays.suspect:
                    claims.mark_delivered(engine, log)
                    engine.release(run, log.epoch, left=False)
                return stays
            facts = log.fold.facts
            agent = agent or AGENTS.get(facts.agent)
            point = (
                state_machine.resume_point(engine.log, run, log.fold) if agent.is_machine else state_machine.Resumed()
            )
            ex = self._execution(agent, log, point, hosts=hosts)
            self._leased(ex, log.epoch, claim.since, claim.seconds)
            ex.serves = claim.serves
            ex.first_build = facts.build
            ex.was_abandoned = claim.left is not None
            ex.after_death = facts.crashes is not None or claim.lapsed not in (None, engine.holder)
            ex.input = claims.recorded_input(ex, facts.input)
            ex.touch_after_us = claims.touch_after(ex, claim)
            if facts.mend:
                ex.diverged_at = ex.engine.log.event(run, facts.mend).step  # type: ignore[attr-defined]
            taken = e.RunTaken(
                at=ex.now_us(), epoch=log.epoch, holder=engine.holder, build=engine.build(agent), alone=claim.alone
            )
            ex.write_behind(Entry(observers.taken(ex, taken)))
            if ex.after_death:
                log.barrier()  # code that killed its process may do so again, before its first step
            if facts.cancelling:
                ex.close(Cancelling())
            else:
                waits.look(ex, opening=True)
            self._start(ex, point)
        except BaseException as error:
            observers.end_span(ex, error=error)
            if hosts:
                engine.release(run, claim.head.epoch, left=claim.left is not None)
            raise
        return ex

    def _execution(
        self, agent: AnyAgent, log: RunLog, point: state_machine.Resumed, *, hosts: bool, context: Context | None = None
    ) -> Execution:
        """The execution of a run. A new run brings its context."""
        engine = self.engine
        record = Record(engine.log, log.run, log.fold, after=point.after, rows=log.rows)
        log.rows = None
        if context is None:
            context = recorded_context(agent, record, claims.context_base(engine, log, agent, point.after))
        ex = Execution(engine, agent, log, record, context)
        ex.on_child = self._children.schedule if hosts else _nobody
        ex.on_message = self.notify
        ex.on_command = commands.receive
        workspace = agent.options.workspace
        if workspace is not None and engine.stand_in is None:
            ex.files = Files(ex, engine.folders.of(workspace, log))
        return ex

    def _leased(self, ex: Execution, epoch: int, since: float, seconds: float) -> None:
        """Renew the lease from now on; its loss closes the handle."""

        def lost(error: LogError) -> None:
            with contextlib.suppress(RuntimeError):
                ex.loop.call_soon_threadsafe(_lose, ex, error)

        ex.lease = self.engine.leases.hold(ex.run_id, epoch, seconds=seconds, since=since, lost=lost)
        if ex.files is not None:
            self.engine.folders.use(ex.files)

    # driving ----------------------------------------------------------------------------------

    def _start(self, ex: Execution, point: state_machine.Resumed) -> None:
        """Begin the agent's code. The run ends within the same task, so that it may still wait."""
        branch = Branch(ex)
        ex.turns.computing = 1
        begin(ex, branch, partial(run_agent, ex, branch, point, self._run_of))

    async def _drive(self, ex: Execution, *, sit_out: bool) -> None:
        """Wait until the agent's code is over, the handle is closed, or the run only waits."""
        assert ex.main is not None
        clock = self.engine.clock
        while not ex.main.done():
            ex.stirred.clear()
            if ex.signal is not None:
                if not ex.attempts or isinstance(ex.signal, Interrupted | Cancelling):
                    return
                await ex.until_idle(self.poll_seconds)  # open attempts finish first
                self.engine.leases.look()
                continue
            wake = waits.next_deadline(ex)
            poll = self.poll_seconds * max(1.0, len(self._live) / 100)
            nap = poll if wake is None else min((wake - ex.now_us()) / 1_000_000, poll)
            if ex.busy == 0:
                if ex.files is not None:
                    await ex.files.settle()
                await ex.barrier()
                if ex.stirred.is_set():
                    waits.look(ex)  # something came meanwhile
                    continue
                if ex.busy:
                    continue  # a guest came
                sits = sit_out and any(
                    w.waits_for in ("time", "delay") or waits.in_doubt(ex, w) for w in ex.waiters.values()
                )
                parks = wake is None or (wake > ex.now_us() and not sits)
                if parks and not self._children.may_wake(ex):
                    if ex.inner_waits.notify():
                        continue
                    return
                if wake is not None:
                    # No longer at once than a lease can do without being kept, however quickly a clock may leap.
                    most = ex.lease.seconds / 3 if ex.lease is not None else math.inf
                    wait = min(max((wake - ex.now_us()) / 1_000_000, 0.0), most)
                    nap = min(clock.nap_seconds(wait), self.poll_seconds)
            await ex.until_idle(max(nap, 0.0))
            if not ex.main.done():
                self.engine.leases.look()
                waits.look(ex)

    async def _conclude(self, ex: Execution) -> RunOutcome:
        """The outcome, and whether the run is parked or released."""
        assert ex.main is not None
        if ex.signal is None and not ex.main.done():
            # All of it is committed, and nothing is awaited before this is parked: no guest can come in between.
            hosted = ex.log.fold.facts.hosted
            if hosted or self.engine.live.of(ex.run_id):
                # Nothing of this can be reused: the next external session brings its own functions, and the outcome of
                # a thread is recorded in the store, past an execution in memory.
                ex.close(Parked())
                await ex.unwind()
            self._mark_seen(ex)
            # A run without a recorded wait would never be woken.
            self._release(ex, left=not hosted and ex.log.fold.facts.status == "running")
            if ex.signal is None:
                self._keep_warm(ex)
            return outcome_of(ex)
        signal = ex.signal
        if signal is not None or not ex.main.done():
            await self._quieted(ex)
            signal = ex.signal
        if ex.files is not None and not isinstance(signal, Interrupted):
            await ex.files.settle()
        if isinstance(signal, Interrupted):
            self._release(ex, left=True)
            raise signal.error(ex.run_id)
        await ex.barrier()
        over = bool(ex.log.fold.facts.ended)  # the signal came too late: with its end the run was let go
        if isinstance(signal, Rewinding) and not over:
            claim = await self._rewound(ex, signal)
            raise _Rewound(claim)
        if isinstance(signal, Cancelling) and not over:
            if still := self.engine.live.of(ex.run_id):
                raise StillRunning(ex.run_id, still)
            ex = await self._cancelled(ex)
            if isinstance(ex.signal, Interrupted):
                raise ex.signal.error(ex.run_id)
            await ex.barrier()
        else:
            raise_own_error(ex.main)
        facts = ex.log.fold.facts
        if facts.ended:
            self._drop_lease(ex)
            if facts.parent is not None:
                self.notify(facts.parent)
            if facts.status == "completed" and facts.renewed_as is None:
                return RunOutcome(run=ex.run_id, status=facts.status, result=ex.result)
            return ended(self.engine, ex.run_id)
        left = isinstance(signal, Parked)
        if not left:
            self._mark_seen(ex)
        self._release(ex, left=left)
        return outcome_of(ex, left=left)

    async def _quieted(self, ex: Execution) -> None:
        """Let the code of a run and its calls end, and record their outcomes. After a timeout the calls keep running,
        and the run stays leased."""
        engine, calls = self.engine, self.engine.live.of(ex.run_id)
        await ex.unwind()
        if ex.signal is None:
            return
        if engine.live.of(ex.run_id):
            await engine.live.over(ex.run_id, ex.thread_seconds)
        with contextlib.suppress(KillickError, Signal):
            if ex.may_record:
                for call in calls:
                    call.record_late()
            # A run that is released before its last append is committed would have no holder, and be busy.
            await ex.log.barrier_soon()

    async def _cancelled(self, ex: Execution) -> Execution:
        """Carry a cancellation out, in a fresh execution that runs no agent code."""
        await ex.barrier()
        point = state_machine.Resumed()
        last = self._execution(ex.agent, ex.log, point, hosts=ex.on_child is not _nobody)
        last.lease = ex.lease
        last.input, last.has_unread = ex.input, True
        branch = Branch(last, count=len(ex.log.fold.tops))
        main = begin(last, branch, partial(completion.cancel, last, branch))
        self._live[ex.run_id] = last
        await self._drive(last, sit_out=True)
        if not main.done():
            last.close(Parked())
            await last.unwind()
        raise_own_error(main)
        return last

    async def undo(self, run: str, step: e.StepId, *, by: str | None, because: str | None, settled: str | None) -> str:
        """Undo one effect of a run that no process holds, as an out-of-band step; its code does not continue."""
        claim = claim_run(self.engine, run)
        dropped: Callable[[], object] | None = None
        try:
            log = self.engine.log.open(run, head=claim.head)
            ex = self._execution(AGENTS.get(log.fold.facts.agent), log, state_machine.Resumed(), hosts=False)
            dropped = partial(self._drop_lease, ex)
            self._live[run] = ex
            return await self._undone(
                ex, claim, step, partial(compensation.undo, by=by, because=because, settled=settled)
            )
        finally:
            self.engine.release(run, claim.head.epoch, left=claim.left is not None, dropped=dropped or (lambda: None))
            self._live.pop(run, None)
            self._left.set()

    async def _undone(self, ex: Execution, claim: ClaimedRun, step: e.StepId, undo: Callable[..., Any]) -> str:
        self._leased(ex, ex.log.epoch, claim.since, claim.seconds)
        branch = compensation.out_of_band(ex)
        observers.watch(ex)
        results: list[str] = []

        async def work() -> None:
            results.append(await undo(ex, branch, step))

        main = begin(ex, branch, work)
        try:
            await self._drive(ex, sit_out=True)
            if not main.done():
                ex.close(Parked())
            await self._quieted(ex)
            raise_own_error(ex.main)
            if isinstance(ex.signal, Interrupted):
                raise ex.signal
            await ex.barrier()
            if not results:  # a command came through the inbox, or its tool waits
                raise TimeRefused(ex.run_id, f"step {step}: undoing it was stopped on the way; undo it again")
        except Interrupted as interrupted:
            raise interrupted.error(ex.run_id) from None
        except BaseException:
            ex.close(ex.signal or Interrupted(), cut=True)
            await _shielded(self._quieted(ex))
            raise
        finally:
            observers.end_span(ex)
        return results[0]

    async def _rewound(self, ex: Execution, wanted: Rewinding) -> ClaimedRun:
        """Record a rewind that came through the inbox. The run stays leased, and is opened again."""
        await record_rewind(ex, wanted)
        lease, clock = ex.lease, self.engine.clock
        seconds = self.engine.lease_seconds if lease is None else lease.seconds
        since = clock.monotonic() if lease is None or math.isinf(seconds) else lease.until - seconds
        self._drop_lease(ex)
        return ClaimedRun(self.engine.log.head(ex.run_id), since, seconds)

    # parking ----------------------------------------------------------------------------------

    def _mark_seen(self, ex: Execution) -> None:
        """The messages that were looked at and left make the run due no more."""
        if ex.log.has_seen_more:
            ex.log.append()

    def _release(self, ex: Execution, *, left: bool = False) -> None:
        self.engine.release(ex.run_id, ex.log.epoch, left=left, dropped=partial(self._drop_lease, ex))

    def _drop_lease(self, ex: Execution) -> None:
        if ex.lease is not None:
            self.engine.leases.drop(ex.lease)
        if ex.files is not None:
            self.engine.folders.use(ex.files, ends=True)

    def _keep_warm(self, ex: Execution) -> None:
        ex.parked = True
        self.warm[ex.run_id] = ex
        while len(self.warm) > WARM_MAX:
            _, coldest = self.warm.popitem(last=False)
            self._children.unwind(coldest)


async def _shielded(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end, also if this task is cancelled meanwhile."""
    task = asyncio.ensure_future(work)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(task)
    task.result()


def _nobody(ex: Execution, child: str) -> None:
    """Schedule no child: workers claim the children of a claimed run."""


def _lose(ex: Execution, error: LogError) -> None:
    """The lease is lost. The end of a run releases its lease, so a run that has ended is ignored."""
    if ex.main is not None and not ex.main.done() and not ex.log.fold.facts.ended:
        ex.close(Interrupted(error), cut=True)
