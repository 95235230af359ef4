"""A worker: claims due runs by priority and age, executes them, yields slots to more urgent ones, and drains.

It decides which run gets a slot and when. The executor runs it; the store decides which runs are due.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import platform
from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from killick.agents.runtime import Runtime
from killick.definitions.agents import AGENTS
from killick.engine.claims import ClaimedRun
from killick.engine.executor import Executor
from killick.engine.leases import LEASE_SECONDS
from killick.engine.outcome import RunOutcome
from killick.engine.steps.attempt import call_on
from killick.errors import EpochStale, HandleClosed, KillickError, LeaseLost, LogError, StoreGone
from killick.log.index_scrub import IndexScrub
from killick.log.writer import RunLog
from killick.logger import get_logger
from killick.store.records import OUTBOX_CHANGED, OWN_AGENTS, Claimed, Head
from killick.workers import hooks, set_back, trigger_runner
from killick.workers.background import TaskControl
from killick.workers.code_versions import resume_diverged
from killick.workers.own_process import OwnProcess
from killick.workers.stale_leases import STALE_SECONDS, StaleLeases
from killick.workers.transitions import log_error, log_outcome, log_transition
from killick.workers.verification import BackgroundVerification

logger: Final = get_logger("killick.worker")

POLL_SECONDS: Final = 1.0
"""The polling interval, for changes without a notification: a due timer, an expired lease."""

SLICE_SECONDS: Final = 1.0
"""The shortest time slice of a run before a more urgent one may take its slot."""

DUTIES_MAX: Final = 1_000
TRIM_SECONDS: Final = 60.0

_BACKOFF_SECONDS_MAX: Final = 2.0
_CALM_SECONDS: Final = 0.005
"""How long an empty poll remains valid, however often the store notifies."""

_SIT_OUT_US: Final = 60_000_000
"""A worker is not idle while a run backs off after a crash, if that ends within this time."""

_STOP_SECONDS: Final = 5.0
"""How long a worker that stops waits for its verification to leave its place."""

_REST_SECONDS: Final = (1.0, 60.0)
"""How long a run that cannot be started here is held back from all workers, at first and at most."""


class Worker:
    """Serves the runs of a store until it is stopped: `async with kd.worker(): …`, or `await worker.serve()`."""

    def __init__(
        self,
        runtime: Runtime,
        *,
        agents: Collection[str] | None = None,
        concurrency: int = 10,
        per_agent: Mapping[str, int] | None = None,
        lease_seconds: float = LEASE_SECONDS,
        slice_seconds: float = SLICE_SECONDS,
        poll_seconds: float = POLL_SECONDS,
        verify_seconds: float | None = None,
        duties: bool = True,
    ) -> None:
        _refuse_odd(concurrency, per_agent or {}, lease_seconds)
        for name in (*(agents or ()), *(per_agent or ())):
            AGENTS.get(name)
        self._runtime = runtime
        self._agents = tuple(agents) if agents is not None else None
        self._concurrency = concurrency
        self._per_agent = dict(per_agent or {})
        self._lease_seconds = lease_seconds
        self._slice_seconds = slice_seconds
        self._poll_seconds = poll_seconds
        self._verification = None if verify_seconds is None else BackgroundVerification(runtime.engine, verify_seconds)
        self._verifying: asyncio.Task[Any] | None = None
        self._has_duties = duties
        self._duty_agents: tuple[str, ...] = ()
        self._slots: dict[str, _Slot] = {}
        self._attending: dict[str, asyncio.Task[None]] = {}
        self._resting: dict[str, asyncio.Task[None]] = {}
        self._refusals: dict[str, tuple[int, int, float]] = {}
        self._doubts: dict[str, float] = {}
        """Runs whose time seems past, and until when that is not believed."""
        self._back_offs: dict[str, int] = {}
        self._undeclared: Counter[str] = Counter()
        self._store_errors = 0
        self._bell = asyncio.Event()
        self._duties: dict[TaskControl, None] = {}
        self._task_rounds = 0
        self._draining = False
        self._serving: asyncio.Task[None] | None = None
        self._watching = False
        self._stop_watching: Callable[[], None] = lambda: None
        self.idle = asyncio.Event()
        """Set while no run is due and none is executed here."""

    @property
    def name(self) -> str:
        """The holder name of this worker's leases."""
        return self._runtime.engine.holder

    @property
    def stopping(self) -> bool:
        """Whether it claims no more runs."""
        return self._draining

    async def __aenter__(self) -> Worker:
        self._serving = asyncio.get_running_loop().create_task(self.serve(), name="killick-worker")
        return self

    async def __aexit__(self, *_: object) -> None:
        self.drain()
        assert self._serving is not None
        await self._serving

    # serving ----------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Claims and executes runs until `drain` or `stop`."""
        executor = self._runtime.executor()
        # The bell tells runs that are live of what comes.
        usual, executor.poll_seconds = executor.poll_seconds, self._poll_seconds * 2
        self._runtime.engine.host = platform.node()
        self._runtime.engine.slots += self._concurrency
        log_transition("started", worker=self.name, concurrency=self._concurrency)
        monotonic, stale = self._runtime.clock.monotonic, StaleLeases(self._runtime.store, self._runtime.clock)
        trimmed, looked, diverged = monotonic(), -STALE_SECONDS, dict[str, int]()
        set_backs = set_back.SetBacks(self._runtime.engine)
        await self._quietly(resume_diverged, self._runtime.engine, self._known(), diverged)
        await self._quietly(self._log_undeclared)
        scrub = IndexScrub(self._runtime.log)
        await self._quietly(_reindex, scrub)
        try:
            while not self._draining:
                self._bell.clear()
                self._runtime.log.committer.refuse_broken()
                found = await self._look(executor)
                if monotonic() - looked > STALE_SECONDS / 3:
                    looked = monotonic()
                    await self._quietly(stale.free, self._duty_agents)
                    self._verify()
                if set_backs.is_due():
                    await self._quietly(self._clock_set_back)
                if monotonic() - trimmed > TRIM_SECONDS:
                    trimmed = monotonic()
                    await self._quietly(hooks.trim, self._runtime.engine)
                    await self._quietly(resume_diverged, self._runtime.engine, self._known(), diverged)
                    await self._quietly(_reindex, scrub)
                if not self._draining:
                    await self._rest(calm=not found)
            await self._drained(executor)
        except StoreGone:
            self.stop()  # nothing that its runs do would be recorded
            raise
        finally:
            self._stop_watching()
            if self._verification is not None and self._verifying is not None:
                self._verification.stop()
                await asyncio.wait({self._verifying}, timeout=_STOP_SECONDS)
            executor.poll_seconds = usual
            self._runtime.engine.slots -= self._concurrency
            for task in (pending := [*self._attending.values(), *self._resting.values()]):
                task.cancel()
            if pending:  # gather makes a loop where none runs, as when this coroutine is closed after its loop
                await asyncio.gather(*pending, return_exceptions=True)
            log_transition("stopped", worker=self.name)

    def _verify(self) -> None:
        """Verifies the store in a thread, if it should and none of its threads does."""
        if self._verification is not None and (self._verifying is None or self._verifying.done()):
            look = self._verify_now(self._verification)
            self._verifying = asyncio.get_running_loop().create_task(look, name="killick verification")

    async def _verify_now(self, verification: BackgroundVerification) -> None:
        try:
            await asyncio.to_thread(verification.look)
        except Exception as error:
            log_error("verification", error, worker=self.name)

    def drain(self) -> None:
        """Claims no more runs; each run finishes its step, then is released to other workers."""
        if not self._draining:
            self._draining = True
            log_transition("draining", worker=self.name, runs=len(self._slots))
        self._wake_all()

    def stop(self) -> None:
        """Stops now: running steps are interrupted, and reconciled by the next worker."""
        self._draining = True
        for slot in self._slots.values():
            slot.task.cancel()
        self._wake_all()

    async def until_idle(self) -> None:
        """Waits until no run is due and none is executed here. A run whose process died, and that is due again within
        a minute, counts as due."""
        await self.idle.wait()
        await self._quietly(self._log_undeclared)

    def _clock_set_back(self) -> None:
        """Computes again what waits for a time that a wrong clock, here or elsewhere, put into the future."""
        set_back.wake(self._runtime.engine, self._known())
        if self._duty_agents:
            trigger_runner.ensure(self._runtime.engine)

    def _log_undeclared(self) -> None:
        """Logs which due runs no worker of this app takes, because it does not declare their agent."""
        runtime, known = self._runtime, AGENTS.names()
        found = Counter(
            row.agent
            for row in runtime.store.due(runtime.clock.now_us(), limit=DUTIES_MAX)
            if row.agent not in known and not row.agent.startswith(OWN_AGENTS)
            and not runtime.log.state(row.run).fold.facts.hosted
        )  # fmt: skip
        for agent in found - self._undeclared:
            runs = f"{found[agent]} due run{'s' * (found[agent] > 1)} of {agent}"
            move = f'declare it, or aliases=["{agent}"] on its new name'
            log_transition("undeclared", because=f"{runs}, which this app does not declare; {move}", agent=agent)
        self._undeclared = found

    async def _drained(self, executor: Executor) -> None:
        while self._slots:
            for slot in self._slots.values():
                slot.leave(executor)
            await asyncio.wait({slot.task for slot in self._slots.values()}, timeout=0.2)
        self._wake_all()
        if self._attending:
            await asyncio.wait(set(self._attending.values()), timeout=10)

    async def _rest(self, *, calm: bool) -> None:
        """Waits for a notification or the next wake-up time; after an empty poll, at least a moment."""
        if calm:
            await asyncio.sleep(_CALM_SECONDS)
        seconds = self._poll_seconds
        with contextlib.suppress(Exception):
            agents = (*(self._with_capacity(self._known()) if self._capacity() > 0 else ()), *self._duty_agents)
            soonest = await asyncio.to_thread(self._runtime.store.soonest_us, agents=agents)
            if soonest is not None:
                seconds = min(seconds, max((soonest - self._runtime.clock.now_us()) / 1_000_000, 0.0))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(self._runtime.clock.nap_seconds(seconds), _CALM_SECONDS)):
                await self._bell.wait()

    def _watch(self) -> None:
        """Subscribes to notifications of the store; after a failure, the next poll tries again."""
        if not self._watching:
            self._stop_watching = self._runtime.store.watch(partial(call_on, asyncio.get_running_loop(), self._woken))
            self._watching = True

    def _woken(self, run: str) -> None:
        """The store changed: its outbox, a run that is executed here, or one that may be due."""
        executor = self._runtime.executor()
        if run == OUTBOX_CHANGED:
            self._wake_tasks()
            return
        if run and executor.notify(run):
            return
        if run in self._doubts and (resting := self._resting.get(run)) is not None:
            del self._doubts[run]
            resting.cancel()  # a message may have come
        if not run:
            executor.notify_all()
        self._wake_all()

    def _wake_all(self) -> None:
        self._bell.set()
        self._wake_tasks()

    def _wake_tasks(self) -> None:
        for control in self._duties:
            control.bell.set()

    # claiming ---------------------------------------------------------------------------------

    def _capacity(self) -> int:
        return self._concurrency - len(self._slots)

    async def _look(self, executor: Executor) -> bool:
        """Claims due runs. Returns True if any was claimed."""
        try:
            self._watch()
            now = self._runtime.clock.now_us()
            self._back_offs = {run: until for run, until in self._back_offs.items() if until > now}
            quiet = not self._slots and not self._back_offs
            await self._start_tasks()
            rounds = self._task_rounds
            room = self._capacity()
            claimed = await self._claim(self._known(), room) if room > 0 else []
            if not claimed and room <= 0:
                await self._yield_slots(executor)
        except StoreGone:
            raise
        except Exception as error:
            self._runtime.engine.leases.note_unreachable()
            # Any error in one poll, a bug included, must not prevent the next one. The first ones are logged, then ever
            # fewer: a full disk may stay full for hours.
            times = self._store_errors = self._store_errors + 1
            if times.bit_count() == 1:
                log_error("store", error, worker=self.name, times=times)
            await asyncio.sleep(min(_CALM_SECONDS * 2 ** min(self._store_errors, 16), _BACKOFF_SECONDS_MAX))
            return False
        self._store_errors = 0
        for each in claimed:
            self._begin(executor, *each)
        if quiet and not claimed and rounds == self._task_rounds and not any(control.busy for control in self._duties):
            self.idle.set()  # nothing ran or backed off here when we looked, no trigger worked, and nothing was due
        else:
            self.idle.clear()
        return bool(claimed)

    def _known(self) -> tuple[str, ...]:
        return self._agents if self._agents is not None else AGENTS.names()

    def _free_slots(self) -> dict[str, int]:
        live = Counter(slot.agent for slot in self._slots.values())
        return {agent: most - live[agent] for agent, most in self._per_agent.items()}

    def _with_capacity(self, agents: Sequence[str]) -> list[str]:
        room = self._free_slots()
        return [agent for agent in agents if room.get(agent, 1) > 0]

    async def _claim(self, agents: Sequence[str], limit: int) -> list[tuple[Claimed, ClaimedRun]]:
        runtime = self._runtime
        since = runtime.clock.monotonic()
        claimed = await asyncio.to_thread(
            runtime.store.claim,
            self.name,
            now_us=runtime.clock.now_us(),
            seconds=self._lease_seconds,
            limit=limit,
            agents=self._with_capacity(agents),
            room=self._free_slots(),
        )
        if self._draining:  # it was stopped during the poll
            for each in claimed:
                await asyncio.to_thread(runtime.engine.release, each.head.run, each.head.epoch, left=True)
            return []
        return [
            (each, ClaimedRun(each.head, since, self._lease_seconds, each.left, each.left_until_us, backs_off=True))
            for each in claimed
        ]

    async def _yield_slots(self, executor: Executor) -> None:
        """All slots are taken: runs of lower priority yield theirs to more urgent ones that wait."""
        runtime, due = self._runtime, self._runtime.store.due
        waiting = await asyncio.to_thread(due, runtime.clock.now_us(), limit=self._concurrency, agents=self._known())
        leaving = [slot for slot in self._slots.values() if slot.leaves]
        now = runtime.clock.monotonic()
        staying = sorted(
            (slot for slot in self._slots.values() if not slot.leaves),
            key=lambda slot: (slot.priority(executor), -slot.since),
        )
        for row in waiting[len(leaving) :]:
            if not staying or staying[0].priority(executor) >= row.priority:
                return
            slot = staying.pop(0)
            if now - slot.since < self._slice_seconds:
                asyncio.get_running_loop().call_later(self._slice_seconds - (now - slot.since), self._bell.set)
                continue
            if executor.leave(slot.run):
                slot.leaves = True
                log_transition("preempted", run=slot.run, agent=slot.agent, for_run=row.run, priority=row.priority)

    # runs -------------------------------------------------------------------------------------

    def _begin(self, executor: Executor, claimed: Claimed, claim: ClaimedRun) -> None:
        row = claimed.row
        since = self._runtime.clock.monotonic()
        refused, doubted = self._refusals.get(row.run, (0, 0, 0.0))[2], self._doubts.get(row.run, 0.0)
        if (seconds := max(refused, doubted) - since) > 0:
            deferred = self._defer(claimed.head, seconds, left=refused > since)
            self._resting[row.run] = resting = asyncio.get_running_loop().create_task(deferred)
            resting.add_done_callback(partial(self._rested, row.run))
            return
        self._doubts.pop(row.run, None)
        work = self._advance(executor, claimed, claim, self._slots.get(row.run))
        task = asyncio.get_running_loop().create_task(work, name=f"killick {row.run}")
        slot = self._slots[row.run] = _Slot(row.run, row.agent, row.priority, since, task)
        task.add_done_callback(partial(self._ended, slot))

    def _rested(self, run: str, resting: asyncio.Task[None]) -> None:
        if self._resting.get(run) is resting:
            del self._resting[run]

    def _ended(self, slot: _Slot, task: asyncio.Task[None]) -> None:
        if self._slots.get(slot.run) is slot:
            del self._slots[slot.run]
        if not task.cancelled():
            task.exception()  # reported where it happened
        self._wake_all()

    async def _advance(self, executor: Executor, claimed: Claimed, claim: ClaimedRun, before: _Slot | None) -> None:
        row = claimed.row
        known: dict[str, Any] = {"epoch": claimed.head.epoch, "worker": self.name, "was": row.status}
        known |= {} if claimed.left is None else {"left_by": claimed.left}
        try:
            if before is not None:
                # The run was lost to another worker and claimed again before its old execution here noticed.
                await asyncio.wait({before.task})
            log_transition("claimed", run=row.run, agent=row.agent, **known)
            found = await executor.advance(row.run, claim=claim)
            advanced = await self._run_alone(executor, claimed, claim) if found.suspect else found
        except (EpochStale, LeaseLost) as error:
            log_transition("lost", level=logging.WARNING, run=row.run, agent=row.agent, error=str(error))
        except asyncio.CancelledError:
            log_transition("cut off", run=row.run, agent=row.agent)
            raise
        except Exception as error:
            self._refused(claimed, error)
        else:
            if advanced is not None and advanced.status == "running" and not (advanced.left or advanced.crashed):
                self._refused(claimed, KillickError("it waits for nothing that is on record"))
                return
            self._refusals.pop(row.run, None)
            if advanced is not None:
                log_outcome(row.agent, advanced)
                if advanced.doubt_seconds > 0:
                    self._doubts[row.run] = self._runtime.clock.monotonic() + advanced.doubt_seconds
                until, now = advanced.wake_at_us, self._runtime.clock.now_us()
                if advanced.crashed and until is not None and until - now <= _SIT_OUT_US:
                    self._back_offs[row.run] = until

    async def _run_alone(self, executor: Executor, claimed: Claimed, claim: ClaimedRun) -> RunOutcome | None:
        """Executes a suspect run in its own process, or here if that is impossible. None: the other process executed
        it."""
        row, head, runtime = claimed.row, claimed.head, self._runtime
        with self._renewing(head):
            own = await OwnProcess.start(runtime, head, row.agent, lease_seconds=self._lease_seconds)
        if isinstance(own, str):
            log_transition("in company", level=logging.WARNING, run=row.run, agent=row.agent, because=own)
            return await executor.advance(row.run, claim=claim._replace(backs_off=False))
        if (slot := self._slots.get(row.run)) is not None:
            slot.own = own
        log_transition("alone", run=row.run, agent=row.agent)
        code = await own.wait()
        level = logging.WARNING if code else logging.INFO
        log_transition("alone", level=level, run=row.run, agent=row.agent, exit_code=code)
        return None

    def _refused(self, claimed: Claimed, error: Exception) -> None:
        """A run could not be executed here: it is held back, each time twice as long while no step of it ends."""
        run, done, (least, most) = claimed.row.run, 0, _REST_SECONDS
        with contextlib.suppress(KillickError):
            fold = self._runtime.log.state(run).fold
            done = len(fold.steps) - len(fold.facts.pending)
        before, times, _ = self._refusals.get(run, (done, 0, 0.0))
        times = min(times + 1, 16) if done == before else 1
        seconds = min(least * 2 ** (times - 1), most)
        self._refusals[run] = done, times, self._runtime.clock.monotonic() + seconds
        log_error("interrupted", error, run=run, agent=claimed.row.agent, again_in_seconds=seconds)
        self._runtime.engine.release(run, claimed.head.epoch, left=True)

    async def _defer(self, head: Head, seconds: float, *, left: bool) -> None:
        """Holds the lease of a run that does not continue yet, without a slot; then it is due again."""
        clock = self._runtime.clock
        try:
            with self._renewing(head):
                until = clock.monotonic() + seconds
                await asyncio.sleep(clock.nap_seconds(seconds))
                while not left and (rest := until - clock.monotonic()) > 0:  # a clock of a test stands still
                    await asyncio.sleep(clock.nap_seconds(rest))
        finally:
            self._runtime.engine.release(head.run, head.epoch, left=left)

    @contextlib.contextmanager
    def _renewing(self, head: Head) -> Generator[None]:
        """Renews the lease of a run that no executor holds."""
        leases, since = self._runtime.engine.leases, self._runtime.clock.monotonic()
        lease = leases.hold(head.run, head.epoch, seconds=self._lease_seconds, since=since, lost=lambda _: None)
        try:
            yield
        finally:
            leases.drop(lease)

    # duties -----------------------------------------------------------------------------------

    async def _start_tasks(self) -> None:
        """Starts background tasks for due internal logs: triggers and hooks that are declared here."""
        if not self._has_duties:
            return
        if not self._duty_agents:
            self._duty_agents = tuple(await asyncio.to_thread(self._ensure))
            self._has_duties = bool(self._duty_agents)
            if not self._has_duties:
                return
        for claimed, claim in await self._claim(self._duty_agents, DUTIES_MAX):
            run = claimed.head.run
            task = asyncio.get_running_loop().create_task(self._run_task(claimed, claim), name=f"killick {run}")
            self._attending[run] = task
            task.add_done_callback(partial(self._task_ended, run))

    def _task_rested(self) -> None:
        """A background task stopped working. It may have started a run after this worker looked for due ones."""
        self._task_rounds += 1
        if not self._slots and not self.idle.is_set():
            self._bell.set()

    def _task_ended(self, run: str, task: asyncio.Task[None]) -> None:
        if self._attending.get(run) is task:
            del self._attending[run]

    def _ensure(self) -> list[str]:
        return [*trigger_runner.ensure(self._runtime.engine), *hooks.ensure(self._runtime.engine)]

    async def _run_task(self, claimed: Claimed, claim: ClaimedRun) -> None:
        runtime, head = self._runtime, claimed.head
        attend = hooks.attend if claimed.row.agent.startswith("killick.hook:") else trigger_runner.attend
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()

        def lost(_: LogError) -> None:
            loop.call_soon_threadsafe(task.cancel)

        lease = runtime.engine.leases.hold(head.run, head.epoch, seconds=claim.seconds, since=claim.since, lost=lost)
        left = True
        with TaskControl(self._duties, lambda: self._draining, self._task_rested) as control:
            try:
                log: RunLog = await asyncio.to_thread(runtime.log.open, head.run, head=head)
                await attend(runtime.engine, log, control)
                left = False
            except (EpochStale, HandleClosed, LeaseLost) as error:
                log_transition("lost", level=logging.WARNING, run=head.run, error=str(error))
            except Exception as error:
                log_error("interrupted", error, run=head.run)
                await control.rest(_REST_SECONDS[0])
            finally:
                runtime.engine.leases.drop(lease)
                runtime.engine.leases.release(head.run, head.epoch, left=left)
                self._bell.set()

    async def _quietly(self, do: Callable[..., Any], *args: Any) -> None:
        with contextlib.suppress(Exception):
            await asyncio.to_thread(do, *args)


@dataclass(slots=True, eq=False)
class _Slot:
    """A run that a worker executes."""

    run: str
    agent: str
    first_priority: int
    since: float
    task: asyncio.Task[None]
    leaves: bool = False
    own: OwnProcess | None = None

    def leave(self, executor: Executor) -> None:
        """Releases the run at its next step."""
        if self.own is not None and not self.leaves:
            self.leaves = True
            self.own.leave()
        executor.leave(self.run)

    def priority(self, executor: Executor) -> int:
        """The current priority, which a command may have changed."""
        now = executor.priority(self.run)
        return self.first_priority if now is None else now


def _refuse_odd(concurrency: int, per_agent: Mapping[str, int], lease_seconds: float) -> None:
    if concurrency < 1:
        raise KillickError(f"a worker needs a slot: concurrency={concurrency!r}; give a number from 1")
    for agent, most in per_agent.items():
        if most < 0:
            raise KillickError(f"per_agent[{agent!r}]={most!r}; give a number from 0")
    if not 0 < lease_seconds < float("inf"):
        raise KillickError(f"lease_seconds={lease_seconds!r}; a worker's leases must expire, give a number of seconds")


def _reindex(scrub: IndexScrub) -> None:
    """Rebuilds index entries that are lost or damaged: a worker never claims such a run."""
    for run in scrub.scrub():
        log_transition("reindexed", level=logging.WARNING, run=run, because="its index entry was lost or damaged")
