"""Advances runs on one loop: takes them, drives them until they end or wait, parks them, and wakes them.

Knows nothing of how a step is done. A run that waits stays in a small warm cache; woken soon it goes on without replay.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

from killick.definitions.agents import AGENTS, AnyAgent
from killick.definitions.current import HERE
from killick.engine import commands, completion, deaths, inbox, observers, renewals, state_machine
from killick.engine.context import recorded_context
from killick.engine.effects import compensation
from killick.engine.effects.rewind import rewind
from killick.engine.engine import Engine
from killick.engine.execution import UNWIND_SECONDS, Branch, Execution, RunFiles
from killick.engine.outcome import RunOutcome, ended, outcome_of
from killick.engine.replay import OVER, Record
from killick.engine.signals import Cancelling, Interrupted, Parked, Rewinding, Signal
from killick.engine.steps import waits
from killick.engine.steps.kinds import first_entries
from killick.engine.steps.workspace_hook import Files
from killick.errors import (
    AlreadyClaimed,
    BoundaryUnknown,
    HandleClosed,
    HeadMoved,
    KillickError,
    LogError,
    MessageGone,
    RunBusy,
    RunExists,
    StillRunning,
    StoreError,
    TimeRefused,
    ValueRefused,
    WorkspaceRefused,
)
from killick.log.writer import Entry, RunLog
from killick.logger import get_logger
from killick.model import events as e
from killick.model.chunks import through_codec
from killick.model.fold import OUT_OF_BAND
from killick.model.typed import convert
from killick.store.protocol import ENDED, Head

logger: Final = get_logger("killick")

WARM_MAX: Final = 64
"""Runs that wait and are kept in memory."""

POLL_SECONDS: Final = 0.25
"""How often a run that is busy looks whether another process sent it something."""

_AGAIN: Final = (AlreadyClaimed, MessageGone, RunExists, HeadMoved)
"""Refusals of a commit that another look at the store resolves. What was written after one that was refused for another
reason finds the head elsewhere; whoever took the run over since is told by its epoch."""


_AGAIN_MAX: Final = 12


RunOf: TypeAlias = Callable[[Execution], object]
"""Makes the handle that the agent's code receives."""


class Start(NamedTuple):
    """A run to be created."""

    started: e.RunStarted
    agent: AnyAgent
    input: Any


class ClaimedRun(NamedTuple):
    """A run that is ours: its head, since when and for how long.

    left           who had it before and left it in the middle; `left_until_us`: until when they may believe to have it
    patient        a run that crashed rests until its back-off is over, and a suspect is given back, to be run alone
    alone          this process runs nothing else
    """

    head: Head
    since: float
    seconds: float
    left: str | None = None
    left_until_us: int | None = None
    patient: bool = False
    alone: bool = False

    @property
    def lapsed(self) -> str | None:
        """The holder before, where it died or lost the run, and did not let it go."""
        return None if self.left_until_us == 0 else self.left


class _Rewound(Exception):
    """A run was taken back while it was ours, and is to be opened again."""

    def __init__(self, claim: ClaimedRun) -> None:
        super().__init__(claim.head.run)
        self.claim = claim


class Executor:
    """The runs that one loop advances."""

    def __init__(self, engine: Engine, run_of: RunOf, *, warm_max: int = WARM_MAX) -> None:
        self.engine = engine
        self._run_of = run_of
        self.poll_seconds = POLL_SECONDS
        self._warm_max = warm_max
        self._live: dict[str, Execution | None] = {}
        self._warm: OrderedDict[str, Execution] = OrderedDict()
        self._children: dict[str, asyncio.Task[Any]] = {}
        self._watchers: dict[str, set[Execution]] = {}
        self._left = asyncio.Event()

    # advancing --------------------------------------------------------------------------------

    async def advance(
        self,
        run: str,
        *,
        start: Start | None = None,
        agent: AnyAgent | None = None,
        sit_out: bool = False,
        claim: ClaimedRun | None = None,
    ) -> RunOutcome:
        """Drive a run until it has ended or waits. With `sit_out`, timers and backoffs are waited for here.

        With a claim the run is ours already, and its children are for whoever claims them.
        """
        if run in self._live:
            raise RunBusy(run, holder=self.engine.holder)
        self._live[run] = None
        hosts = claim is None
        again = 0
        try:
            while True:
                try:
                    return await self._advanced(run, start, agent, sit_out=sit_out, hosts=hosts, claim=claim)
                except _Rewound as rewound:
                    start, claim = None, rewound.claim
                except _AGAIN:
                    again += 1
                    if again == _AGAIN_MAX:
                        raise
                    await asyncio.sleep(self.engine.clock.nap_seconds(min(0.005 * 2**again, 1.0)))
                    start = claim = None
                except Interrupted as interrupted:
                    raise _cause(interrupted, run) from None
        finally:
            self._live.pop(run, None)
            self._left.set()

    async def _advanced(
        self,
        run: str,
        start: Start | None,
        agent: AnyAgent | None,
        *,
        sit_out: bool,
        hosts: bool,
        claim: ClaimedRun | None,
    ) -> RunOutcome:
        taken = self._warmed(run, claim, hosts=hosts) if start is None else self._begun(start)
        ex = taken or self._opened(run, agent, claim, hosts=hosts)
        if isinstance(ex, RunOutcome):
            return ex
        self._live[run] = ex
        try:
            advanced = await self._driven(ex, sit_out=sit_out, hosts=hosts)
        except BaseException as error:
            observers.let_go(ex, error=error)
            raise
        observers.let_go(ex, advanced)
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
            await _whoever_cancels(self._quieted(ex))
            if hosts or isinstance(error, asyncio.CancelledError | Signal | KillickError):
                self._release(ex, left=True)
            else:
                self._drop_lease(ex)  # a fault of our own: whoever claimed it decides when it may come back
            if isinstance(error, Interrupted):
                raise _cause(error, ex.run_id) from None
            raise

    def leave(self, run: str) -> bool:
        """Let a run that is live here go at its next step, with open attempts finished; it is due again at once."""
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
        """Something came for a run; if it is live here it looks at once. True: it is."""
        ex = self._live.get(run)
        if ex is not None:
            ex.stirred.set()
        return run in self._live

    def notify_all(self) -> None:
        """Something came for some run: all that are live here look."""
        for ex in self._live.values():
            if ex is not None:
                ex.stirred.set()

    async def close(self) -> None:
        """Let go of everything: what is live here is interrupted, and goes on another time.

        A blocking tool is waited for a while, and its outcome recorded; the run of one that lives longer stays leased.
        """
        for task in self._children.values():
            task.cancel()
        closing = [ex for ex in (*self._live.values(), *self._warm.values()) if ex is not None and ex.signal is None]
        for ex in closing:
            ex.close(Parked() if ex.parked else Interrupted(), cut=not ex.parked)
        await asyncio.gather(*(ex.unwind() for ex in closing))
        if self._children:
            await asyncio.wait(set(self._children.values()), timeout=5)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(UNWIND_SECONDS):
                while self._live:
                    self._left.clear()
                    await self._left.wait()
        self._warm.clear()

    def abandon(self) -> None:
        """Let go of what a loop left that is closed: nothing of it goes on but its threads."""
        for ex in [ex for ex in self._live.values() if ex is not None]:
            self._release(ex, left=True)
        self._live.clear()

    # taking a run -----------------------------------------------------------------------------

    def _begun(self, start: Start) -> Execution:
        """A new run, written with its first step; nothing of it is to be seen before."""
        engine, started = self.engine, start.started
        since = engine.clock.monotonic()
        log = engine.log.begin(started.run, holder=engine.holder, seconds=engine.lease_seconds)
        ex = self._execution(start.agent, log, state_machine.Resumed(), hosts=True)
        self._leased(ex, 1, since, engine.lease_seconds)
        ex.input = start.input
        taken = e.RunTaken(at=started.at, epoch=1, holder=engine.holder, build=started.build)
        taken = observers.taken(ex, taken, started=started)
        ex.behind(*first_entries(started, start.agent, start.input), Entry(taken))
        ex.context = recorded_context(start.agent, ex.record, (_document(start.agent), _version(start.agent), None))
        self._start(ex, state_machine.Resumed())
        return ex

    def _claimed(self, run: str) -> ClaimedRun:
        """Take a run for ourselves."""
        engine = self.engine
        engine.leases.await_release(run)
        since = engine.clock.monotonic()
        if (kept := engine.take_over(run, seconds=engine.lease_seconds)) is not None:
            head, left_open = kept
            return ClaimedRun(head, since, engine.lease_seconds, engine.holder if left_open else None, 0)
        left = engine.log.head(run)
        try:
            head = engine.log.store.lease(run, engine.holder, seconds=engine.lease_seconds)
        except StoreError:
            # It may have been taken all the same, and nobody here would be at it.
            engine.leases.release(run, left.epoch + 1, left=left.holder is not None)
            raise
        return ClaimedRun(head, since, engine.lease_seconds, left.holder, left.lease_until_us)

    def _warmed(self, run: str, claim: ClaimedRun | None, *, hosts: bool) -> Execution | None:
        """A run that waits in memory, if nobody touched it since."""
        ex = self._warm.pop(run, None)
        if ex is None or ex.signal is not None:
            return None
        engine = self.engine
        ours = claim is None
        try:
            claim = claim or self._claimed(run)
        except BaseException:
            self._drop(ex)
            raise
        head = claim.head
        if head.seq != ex.log.seq or head.hash != ex.log.hash or (claim.patient and claim.lapsed):
            if ours:
                engine.let_go(run, head.epoch, left=False)
            self._drop(ex)
            return None
        ex.parked = False
        ex.log.go_on(head)
        self._leased(ex, head.epoch, claim.since, claim.seconds)
        if ex.files is not None:
            ex.files.begin()
        ex.on_child = partial(self._schedule, ex) if hosts else _nobody
        taken = e.RunTaken(at=ex.now_us(), epoch=head.epoch, holder=engine.holder, build=engine.build(ex.agent))
        ex.behind(Entry(observers.taken(ex, taken, warm=True)))
        try:
            waits.look(ex)
        except BaseException as error:
            observers.let_go(ex, error=error)
            self._release(ex, left=True)
            raise
        for waiter in ex.waiters.values():
            if waiter.waits_for == "child":
                ex.on_child(waiter.name)
        return ex

    def _opened(
        self, run: str, agent: AnyAgent | None, claim: ClaimedRun | None, *, hosts: bool
    ) -> Execution | RunOutcome:
        """A run from its record. What is refused here is let go as it was found, unless somebody else claimed it."""
        engine = self.engine
        ours = claim is None
        claim = claim or self._claimed(run)
        ex: Execution | None = None
        try:
            log = engine.log.open(run, head=claim.head)
            if claim.lapsed not in (None, engine.holder) and not log.fold.facts.ended:
                deaths.record(log, claim.lapsed, engine.clock.now_us(), quarantines=claim.patient)
            stays = self._stays(log) or self._rests(log, claim)
            if stays is not None:
                if not stays.suspect:
                    self._hear_nothing(log)
                    engine.let_go(run, log.epoch, left=False)
                return stays
            facts = log.fold.facts
            agent = agent or AGENTS.get(facts.agent)
            point = (
                state_machine.resume_point(engine.log, run, log.fold) if agent.is_machine else state_machine.Resumed()
            )
            ex = self._execution(agent, log, point, hosts=hosts)
            self._leased(ex, log.epoch, claim.since, claim.seconds)
            ex.first_build = facts.build
            ex.was_left = claim.left is not None
            ex.after_death = facts.crashes is not None
            ex.input = _input(ex, facts.input)
            now = engine.clock.now_us()
            ex.touch_after_us = _touch_after(ex, claim)
            if facts.mend:
                ex.diverged_at = ex.engine.log.event(run, facts.mend).step  # type: ignore[attr-defined]
            taken = e.RunTaken(
                at=now, epoch=log.epoch, holder=engine.holder, build=engine.build(agent), alone=claim.alone
            )
            ex.behind(Entry(observers.taken(ex, taken)))
            if ex.after_death:
                log.barrier()  # code that killed its process may do so again, before its first step
            if facts.follows is not None and not facts.taken:
                renewals.bring_along(engine.log, run, facts.follows)
            if facts.cancelling:
                ex.close(Cancelling())
            else:
                waits.look(ex)
            self._start(ex, point)
        except BaseException as error:
            observers.let_go(ex, error=error)
            if ours:
                engine.let_go(run, claim.head.epoch, left=claim.left is not None)
            raise
        return ex

    def _hear_nothing(self, log: RunLog) -> None:
        """What came for a run that does not go on makes it due no longer; it does again when somebody resumes it."""
        row = self.engine.log.store.index(log.run)
        if row is not None and row.status not in ENDED and row.delivered != log.seen:
            log.seen = row.delivered
            log.append()

    def _stays(self, log: RunLog) -> RunOutcome | None:
        """How a run stands that does not go on: ended, paused, or repaired and not looked at yet."""
        facts = log.fold.facts
        if facts.ended:
            return ended(self.engine, log.run)
        if facts.paused and not facts.cancelling:
            return RunOutcome(run=log.run, status="paused")
        if facts.mend and not isinstance(self.engine.log.event(log.run, facts.mend), e.RunDiverged):
            return RunOutcome(run=log.run, status="waiting")
        return None

    def _rests(self, log: RunLog, claim: ClaimedRun) -> RunOutcome | None:
        """How a run stands whose holders died: it rests for a while, or is to be run alone; None: it goes on here."""
        crashes = log.fold.facts.crashes
        if not claim.patient or crashes is None:
            return None
        if crashes.until > self.engine.clock.now_us():
            return RunOutcome(run=log.run, status=log.fold.facts.status, wake_at_us=log.fold.wake_at)
        if crashes.is_suspect and not deaths.clear(self.engine.log, log, self.engine.clock.now_us()):
            return RunOutcome(run=log.run, status=log.fold.facts.status, suspect=True)
        return None

    def _execution(self, agent: AnyAgent, log: RunLog, point: state_machine.Resumed, *, hosts: bool) -> Execution:
        engine = self.engine
        record = Record(engine.log, log.run, log.fold, after=point.after, rows=log.rows)
        log.rows = None
        base = _context_base(engine, log, agent, point.after)
        ex = Execution(engine, agent, log, record, recorded_context(agent, record, base))
        ex.on_child = partial(self._schedule, ex) if hosts else _nobody
        ex.on_message = self.notify
        ex.on_command = partial(commands.take, ex)
        workspace = agent.options.workspace
        if workspace is not None and engine.stand_in is None:
            ex.files = Files(ex, engine.folders.of(workspace, log.run, log.ledger))
        return ex

    def _leased(self, ex: Execution, epoch: int, since: float, seconds: float) -> None:
        """From now on the lease is kept; when it is lost all the same, the handle is closed."""

        def lost(error: LogError) -> None:
            with contextlib.suppress(RuntimeError):
                ex.loop.call_soon_threadsafe(_lose, ex, error)

        ex.lease = self.engine.leases.hold(ex.run_id, epoch, seconds=seconds, since=since, lost=lost)
        if ex.files is not None:
            self.engine.folders.use(ex.files)

    # driving ----------------------------------------------------------------------------------

    def _start(self, ex: Execution, point: state_machine.Resumed) -> None:
        """Begin the agent's code. What it comes to is decided within the same task, so that it may still wait."""
        branch = Branch(ex)
        context = copy_context()
        context.run(HERE.set, branch)
        ex.branches.add(branch)
        ex.busy = ex.computing = 1
        main = asyncio.get_running_loop().create_task(
            _to_its_end(partial(_main, ex, branch, point, self._run_of)), context=context
        )
        branch.task = main
        ex.main = main
        main.add_done_callback(partial(_main_done, ex))

    async def _drive(self, ex: Execution, *, sit_out: bool) -> None:
        """Until the agent's code is over, or something closed the handle, or the run only waits."""
        assert ex.main is not None
        clock = self.engine.clock
        while not ex.main.done():
            ex.stirred.clear()
            if ex.signal is not None:
                if not ex.attempts or isinstance(ex.signal, Interrupted | Cancelling):
                    return
                await ex.rest(self.poll_seconds)  # open attempts finish first
                self.engine.leases.look()
                continue
            wake = waits.next_deadline(ex)
            nap = self.poll_seconds if wake is None else min((wake - ex.now_us()) / 1_000_000, self.poll_seconds)
            if ex.busy == 0:
                if ex.files is not None:
                    await ex.files.settle()
                await ex.barrier()
                if ex.stirred.is_set():
                    waits.look(ex)  # something came meanwhile
                    continue
                if ex.busy:
                    continue  # a guest came
                sits = sit_out and any(waiter.waits_for in ("time", "delay") for waiter in ex.waiters.values())
                parks = wake is None or (wake > ex.now_us() and not sits)
                if parks and not self._children_of(ex):
                    if ex.tell_inner_callers():
                        continue
                    return
                if wake is not None:
                    # No longer at once than a lease can do without being kept, however quickly a clock may leap.
                    most = ex.lease.seconds / 3 if ex.lease is not None else math.inf
                    wait = min(max((wake - ex.now_us()) / 1_000_000, 0.0), most)
                    nap = min(clock.nap_seconds(wait), self.poll_seconds)
            await ex.rest(max(nap, 0.0))
            self.engine.leases.look()
            if not ex.main.done():
                waits.look(ex)

    async def _conclude(self, ex: Execution) -> RunOutcome:
        """What came of it, and what becomes of what is in memory."""
        assert ex.main is not None
        if ex.signal is None and not ex.main.done():
            # All of it is committed, and nothing is awaited before this is parked: no guest can come in between.
            if ex.log.fold.facts.hosted:
                # Whoever comes again comes with functions of their own: nothing of this is of use to them.
                ex.close(Parked())
                await ex.unwind()
                self._release(ex)
                return outcome_of(self.engine, ex)
            if self.engine.live.of(ex.run_id):
                # What a thread comes to is recorded behind the back of what would be in memory.
                ex.close(Parked())
                await ex.unwind()
            # What waits for nothing that is on record would never be woken.
            self._release(ex, left=ex.log.fold.facts.status == "running")
            if ex.signal is None:
                self._keep_warm(ex)
            return outcome_of(self.engine, ex)
        await self._quieted(ex)
        signal = ex.signal
        if ex.files is not None and not isinstance(signal, Interrupted):
            await ex.files.settle()
        if isinstance(signal, Interrupted):
            self._release(ex, left=True)
            raise _cause(signal, ex.run_id)
        await ex.barrier()
        over = bool(ex.log.fold.facts.ended)  # the signal came too late: with its end the run was let go
        if isinstance(signal, Rewinding) and (not over or self._retaken(ex)):
            raise _Rewound(await self._taken_back(ex, signal))
        if isinstance(signal, Cancelling) and not over:
            if still := self.engine.live.of(ex.run_id):
                raise StillRunning(ex.run_id, still)
            ex = await self._cancelled(ex)
            if isinstance(ex.signal, Interrupted):
                raise _cause(ex.signal, ex.run_id)
        else:
            _raise_own(ex.main)
        await ex.barrier()
        facts = ex.log.fold.facts
        if facts.ended:
            self._drop_lease(ex)
            if facts.parent is not None:
                self.notify(facts.parent)
            if facts.status == "completed" and facts.renewed_as is None:
                return RunOutcome(run=ex.run_id, status=facts.status, result=ex.result)
            return ended(self.engine, ex.run_id)
        left = isinstance(signal, Parked)
        self._release(ex, left=left)
        return outcome_of(self.engine, ex, left=left)

    async def _quieted(self, ex: Execution) -> None:
        """Let the code of a run and what it began come to rest, and record what that came to. Calls that take longer
        than they are waited for live on, and the run stays leased."""
        engine, calls = self.engine, self.engine.live.of(ex.run_id)
        await ex.unwind()
        if ex.signal is None:
            return
        if engine.live.of(ex.run_id):
            await engine.live.over(ex.run_id, ex.patience_seconds)
        with contextlib.suppress(KillickError, Signal):
            if ex.may_record:
                for call in calls:
                    call.record_late()
            # A run that is released before its last append is committed would be held by nobody, and busy.
            await ex.log.barrier_soon()

    async def _cancelled(self, ex: Execution) -> Execution:
        """Carry a cancellation out, in a fresh execution that runs no agent code."""
        await ex.barrier()
        point = state_machine.Resumed()
        last = self._execution(ex.agent, ex.log, point, hosts=ex.on_child is not _nobody)
        last.lease = ex.lease
        last.input = ex.input
        branch = Branch(last)
        branch.count = len(ex.log.fold.tops)
        context = copy_context()
        context.run(HERE.set, branch)
        last.branches.add(branch)
        last.busy = 1
        work = _to_its_end(partial(completion.cancel, last, branch))
        last.main = asyncio.get_running_loop().create_task(work, context=context)
        branch.task = last.main
        last.main.add_done_callback(partial(_main_done, last))
        self._live[ex.run_id] = last
        await self._drive(last, sit_out=True)
        if not last.main.done():
            last.close(Parked())
            await last.unwind()
        _raise_own(last.main)
        return last

    async def undo(self, run: str, step: e.StepId, *, by: str | None, because: str | None, settled: str | None) -> str:
        """Undo one effect of a run that nobody is at, as a step beside the agent's own; its code does not go on."""
        claim = self._claimed(run)
        dropped: Callable[[], object] = _nothing
        try:
            log = self.engine.log.open(run, head=claim.head)
            ex = self._execution(AGENTS.get(log.fold.facts.agent), log, state_machine.Resumed(), hosts=False)
            dropped = partial(self._drop_lease, ex)
            self._live[run] = ex
            return await self._undone(
                ex, claim, step, partial(compensation.undo, by=by, because=because, settled=settled)
            )
        finally:
            self.engine.let_go(run, claim.head.epoch, left=claim.left is not None, dropped=dropped)
            self._live.pop(run, None)
            self._left.set()

    async def _undone(self, ex: Execution, claim: ClaimedRun, step: e.StepId, undo: Callable[..., Any]) -> str:
        log = ex.log
        self._leased(ex, log.epoch, claim.since, claim.seconds)
        branch = Branch(ex, path=OUT_OF_BAND[:-1])
        branch.count = len(log.fold.facts.beside)
        observers.watch(ex)
        told: list[str] = []

        async def work() -> None:
            told.append(await undo(ex, branch, step))

        context = copy_context()
        context.run(HERE.set, branch)
        ex.branches.add(branch)
        ex.busy = 1
        ex.main = branch.task = asyncio.get_running_loop().create_task(_to_its_end(work), context=context)
        ex.main.add_done_callback(partial(_main_done, ex))
        try:
            await self._drive(ex, sit_out=True)
            if not ex.main.done():
                ex.close(Parked())
            await self._quieted(ex)
            _raise_own(ex.main)
            if isinstance(ex.signal, Interrupted):
                raise ex.signal
            await ex.barrier()
        except Interrupted as interrupted:
            raise _cause(interrupted, ex.run_id) from None
        except BaseException:
            ex.close(ex.signal or Interrupted(), cut=True)
            await _whoever_cancels(self._quieted(ex))
            raise
        finally:
            observers.let_go(ex)
        return told[0]

    def _retaken(self, ex: Execution) -> bool:
        """Lease a run again that has just ended here; False: another process was first, and rewinds it itself."""
        try:
            claim = self._claimed(ex.run_id)
        except RunBusy:
            return False
        if (claim.head.seq, claim.head.hash) != (ex.log.seq, ex.log.hash):
            self.engine.let_go(ex.run_id, claim.head.epoch, left=False)
            return False
        ex.log.go_on(claim.head)
        self._drop_lease(ex)
        self._leased(ex, claim.head.epoch, claim.since, claim.seconds)
        return True

    async def _taken_back(self, ex: Execution, wanted: Rewinding) -> ClaimedRun:
        """Put a rewind on record that came through the inbox, with the message; the run stays ours."""
        engine = self.engine
        await ex.barrier()
        taken = e.MessageTaken(at=ex.now_us(), message=wanted.message, name=inbox.COMMAND, id=wanted.id, by=wanted.by)
        try:
            found = rewind(engine.log, ex.log, wanted.to, at=ex.now_us(), by=wanted.by, because=wanted.because)
            entries, rights = [Entry(taken), found.entry], found.rights
        except (BoundaryUnknown, TimeRefused) as refused:
            note = {"note": f"{wanted.by or 'somebody'} wanted the run rewound: {refused.reason}"}
            entries, rights = [Entry(taken), Entry(e.NoteMade(at=ex.now_us(), by="killick"), note)], {}
        await ex.write(*entries, **rights, takes=(wanted.message,))
        seconds = engine.lease_seconds if ex.lease is None else ex.lease.seconds
        timed = ex.lease is not None and not math.isinf(seconds)
        since = ex.lease.until - seconds if ex.lease is not None and timed else engine.clock.monotonic()
        self._drop_lease(ex)
        return ClaimedRun(engine.log.head(ex.run_id), since, seconds)

    # parking ----------------------------------------------------------------------------------

    def _release(self, ex: Execution, *, left: bool = False) -> None:
        self.engine.let_go(ex.run_id, ex.log.epoch, left=left, dropped=partial(self._drop_lease, ex))

    def _drop_lease(self, ex: Execution) -> None:
        if ex.lease is not None:
            self.engine.leases.drop(ex.lease)
        if ex.files is not None:
            self.engine.folders.use(ex.files, ends=True)

    def _keep_warm(self, ex: Execution) -> None:
        ex.parked = True
        self._warm[ex.run_id] = ex
        while len(self._warm) > self._warm_max:
            _, coldest = self._warm.popitem(last=False)
            self._drop(coldest)

    def _drop(self, ex: Execution) -> None:
        """A parked run leaves memory: its code unwinds, and nothing it does meanwhile counts."""
        ex.close(Parked())
        task = asyncio.get_running_loop().create_task(ex.unwind())
        self._children[f"unwinding {id(ex)}"] = task
        task.add_done_callback(lambda _: self._children.pop(f"unwinding {id(ex)}", None))

    # children ---------------------------------------------------------------------------------

    def _schedule(self, parent: Execution, child: str) -> None:
        """A child of a run that is live here is advanced here too, unless somebody else has it."""
        child = renewals.latest(self.engine.log, child)
        row = self.engine.log.store.index(child)
        if row is None or row.status in ENDED:
            return
        if child not in self._live and child not in self._children:
            task = asyncio.get_running_loop().create_task(self._advance_child(child))
            self._children[child] = task
            task.add_done_callback(partial(self._child_done, child))
        if child in self._children:
            self._watchers.setdefault(child, set()).add(parent)

    async def _advance_child(self, child: str) -> None:
        while True:
            try:
                advanced = await self.advance(child, sit_out=True)
                if advanced.renewed_as is None:
                    return
                child = advanced.renewed_as
            except RunBusy:
                await asyncio.sleep(POLL_SECONDS)
            except Exception as error:
                logger.warning("%s: stopped being advanced here: %s", child, error)
                if isinstance(error, StoreError) or not isinstance(error, KillickError):
                    raise
                return

    def _child_done(self, child: str, task: asyncio.Task[Any]) -> None:
        """A child is not advanced here any more. An error of the store, or of our own, reaches the runs that wait for
        the child: they are interrupted too, and go on from the store another time."""
        self._children.pop(child, None)
        error = None if task.cancelled() else task.exception()
        for parent in self._watchers.pop(child, set()):
            if error is not None and parent.signal is None:
                parent.close(Interrupted(error), cut=True)
            parent.stirred.set()

    def _children_of(self, ex: Execution) -> bool:
        """Whether something that is live here may wake the run."""
        return any(ex in self._watchers.get(child, ()) for child in self._children)


# the agent's code -------------------------------------------------------------------------------------


def _nothing() -> None:
    pass


async def _whoever_cancels(work: Coroutine[Any, Any, None]) -> None:
    """Carry something to its end, though the task is cancelled meanwhile."""
    task = asyncio.ensure_future(work)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(task)
    task.result()


def _nobody(child: str) -> None:
    """Children of a run that was claimed are claimed by themselves."""


def _lose(ex: Execution, error: LogError) -> None:
    """The lease is gone. One whose run has ended was let go by its end."""
    if ex.main is not None and not ex.main.done() and not ex.log.fold.facts.ended:
        ex.close(Interrupted(error), cut=True)


def _raise_own(main: asyncio.Future[Any] | None) -> None:
    """An error that is neither the agent's nor a signal is our own, and nothing is to hide it."""
    if main is not None and main.done() and not main.cancelled():
        error = main.exception()
        if error is not None and not isinstance(error, Signal):
            raise error


async def _to_its_end(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """A signal ends the code of a run, maybe before it begins; the execution knows it, and nobody else need be told."""
    with contextlib.suppress(Signal):
        await work()


def _main_done(ex: Execution, main: asyncio.Future[Any]) -> None:
    if not main.cancelled():
        main.exception()  # looked at here, because nobody awaits the code of a run that was parked
    ex.stirred.set()


async def _main(ex: Execution, branch: Branch, point: state_machine.Resumed, run_of: RunOf) -> None:
    """Run the agent's code to its end, and put that on record."""
    error: BaseException | None = None
    result: Any = None
    if ex.signal is not None:
        raise ex.signal  # it is being cancelled: none of its code runs
    if ex.files is not None:
        await _files_opened(ex, ex.files)
    try:
        result = through_codec(await _code(ex, branch, point, run_of))
        if ex.agent.returns is not Any and not ex.agent.is_machine:
            convert(result, ex.agent.returns, at="result")
    except Signal:
        raise
    except BaseException as raised:
        if isinstance(raised, GeneratorExit) and not _is_running(ex):
            raise  # the agent did not raise it: its coroutine is being collected
        error = raised
    finally:
        ex.computing -= 1
    if isinstance(error, asyncio.CancelledError):
        await ex.still_wanted()
    if ex.signal is not None:
        raise ex.signal
    if isinstance(error, ValueRefused) and error.__traceback__ is not None:
        error = ValueRefused(f"result of {ex.agent.name}: {error.path}", error.reason) if result is None else error
    branch.thread = None
    if ex.files is not None:
        ex.files.ended()  # what others did in the folder, since the last tool, is the run's too
        await ex.files.settle()
    await completion.finish(ex, branch, result, error)


def _is_running(ex: Execution) -> bool:
    with contextlib.suppress(RuntimeError):  # no loop runs here
        return asyncio.current_task() is ex.main
    return False


async def _files_opened(ex: Execution, files: RunFiles) -> None:
    """A workspace that is not there, or cannot be brought back, is no failure of the run: it goes on another time."""
    try:
        await files.opened()
    except KillickError as error:
        raise ex.interrupted(error) from error
    except OSError as error:
        raise ex.interrupted(WorkspaceRefused(str(files.path), str(error))) from error


async def _code(ex: Execution, branch: Branch, point: state_machine.Resumed, run_of: RunOf) -> Any:
    agent = ex.agent
    run = run_of(ex)
    if agent.is_machine:
        return await state_machine.transitions(
            ex, branch, agent, point, lambda state: _called(ex, branch, agent, run, state)
        )
    return await _called(ex, branch, agent, run, *((ex.input,) if agent.takes_input else ()))


async def _called(ex: Execution, branch: Branch, agent: AnyAgent, run: Any, *args: Any) -> Any:
    """The agent's function: on the loop, or in a thread of its own."""
    if agent.is_async:
        return await agent.fn(run, *args)

    def begin() -> Any:
        import threading

        branch.thread = threading.get_ident()
        return agent.fn(run, *args)

    branch.thread = -1
    work = ex.engine.threads.start(begin, copy_context())
    while not work.future.done():
        try:
            await asyncio.wait({work.future})
        except asyncio.CancelledError:
            # A thread cannot be cancelled: it meets the signal at its next step.
            if ex.signal is None:
                raise
    return work.future.result()


def _cause(signal: Interrupted, run: str) -> BaseException:
    cause = signal.cause
    if isinstance(cause, HandleClosed):
        cause = cause.cause
    return cause or KillickError(f"{run}: was interrupted; run it again to go on")


def _document(agent: AnyAgent) -> dict[str, Any] | None:
    from killick.engine.context import initial_context

    return initial_context(agent)


def _version(agent: AnyAgent) -> int:
    return 1 if agent.options.context is not None else 0


def _context_base(engine: Engine, log: RunLog, agent: AnyAgent, after: int) -> tuple[Any, int, int | None]:
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


def _input(ex: Execution, seq: int) -> Any:
    data = ex.record.data(seq) if ex.record.has(seq) else ex.engine.log.data(ex.run_id, seq)
    return ex.agent.checked(data.get("input"))


def _touch_after(ex: Execution, claim: ClaimedRun) -> int:
    """R16: where whoever began an attempt may be frozen rather than dead, it is left alone for a while."""
    store = ex.engine.log.store
    grace = round(ex.engine.grace_seconds * 1_000_000)
    open_ones = [step for step in ex.record.steps.values() if step.attempts and not step.attempts[-1].ended]
    latest = 0
    for step in open_ones:
        if step.status in OVER:
            continue
        started: e.AttemptStarted = ex.record.event(step.attempts[-1].started)
        holder = ex.record.holder_of(started.epoch)
        if holder is not None and holder != ex.engine.holder and store.lives(holder):
            # Leases end by the store's own clock, deadlines by ours.
            left = 0 if not claim.left_until_us else claim.left_until_us - store.now_us()
            latest = max(latest, (started.deadline or ex.now_us() + left) + grace)
    return latest
