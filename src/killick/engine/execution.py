"""One run in memory: its log, its record, its branches, and the order in which they continue.

Owns the turns and the closing of the handle. Steps are in `steps.pipeline`, wake-ups of waits in `steps.waits`.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from contextvars import Context as Variables
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, NoReturn, Protocol

from killick.credentials import without
from killick.definitions.agents import AnyAgent
from killick.definitions.current import HERE
from killick.definitions.markers import InnerSteps
from killick.engine.approval.call_answer import CallAnswer
from killick.engine.approval.contracts_in_force import ContractsInForce
from killick.engine.context import Context
from killick.engine.effects.run_tree import RunTree
from killick.engine.engine import Engine
from killick.engine.leases import Lease
from killick.engine.replay import Record
from killick.engine.signals import Interrupted, Parked, Signal, Stopped
from killick.engine.steps import attempt as calls
from killick.engine.steps.turns import InertSteps, TimedEvent, Turns, end_with
from killick.engine.waits.open_wait import InnerWaits, Intervened, Waiter
from killick.errors import KillickError, LeaseLost, OutsideBranch, StillRunning, ValueRefused
from killick.fork_safety import cached_property
from killick.log.append_groups import Hold
from killick.log.writer import Entry, RunLog
from killick.logger import get_logger
from killick.model import events as e
from killick.store.records import Message, UniqueRight
from killick.workspace.workspace import Workspace

logger: Final = get_logger("killick")

_LIVE: Final = math.inf
_PARKED_SECONDS: Final = 0.02
_SIGNALS_MAX: Final = 8
UNWIND_SECONDS: Final = 5.0


class Written(NamedTuple):
    """The seq of the last written event, and whether the task was cancelled meanwhile, which the caller must obey."""

    seq: int
    cancelled: bool


@dataclass(slots=True, eq=False)
class Branch:
    """One line of an agent's code: the main one, or one of a gather. Numbers its own steps."""

    in_agent = True  # not a field: equal for all
    execution: Execution
    path: str = ""
    scope: Scope | None = None
    count: int = 0
    task: asyncio.Task[Any] | None = None
    thread: int | None = None
    applying: asyncio.Task[Any] | None = None
    stopped: Stopped | None = None
    dormant: asyncio.Future[None] | None = None  # pending while it replays a cancelled step
    streaming: bool = False
    answer: CallAnswer | None = None
    """The approver's answer to the last call, with their edits."""
    guest: str | None = None
    """The key by which external code finds this branch again."""
    inner: InnerSteps | None = None
    """The inner steps of the open attempt of this branch."""
    outer: InnerSteps | None = None
    """The inner steps of the attempt whose code began this branch."""
    awaited_by: list[InnerSteps] = field(default_factory=list[InnerSteps])

    @property
    def within(self) -> e.StepId | None:
        """The step in whose attempt the steps of this branch are taken."""
        return None if self.outer is None else self.outer.step

    def number(self) -> str:
        step = self.position
        self.count += 1
        if (tracer := self.execution.engine.tracer) is not None:
            tracer.asked(self.execution, step)
        return step

    @property
    def position(self) -> str:
        """The id of the next step."""
        return f"{self.path}.{self.count + 1}" if self.path else str(self.count + 1)

    @property
    def last(self) -> str:
        """The id of the step that it took last."""
        return f"{self.path}.{self.count}" if self.path else str(self.count)

    @property
    def replaying(self) -> bool:
        return self.execution.record.has_more(self.path, self.count)

    def tell(self) -> tuple[str, str | None, int | None]:
        return self.execution.run_id, self.position, None

    @property
    def over_at(self) -> int:
        """The seq at which the gather of this branch ended on record; 0 where it did not."""
        return 0 if self.scope is None else self.scope.over_at

    @property
    def may_be_stopped(self) -> bool:
        """Whether its record ends here, and the end of its gather on record may have stopped it here."""
        return self.scope is not None and self.scope.has_stopped and not self.replaying


@dataclass(slots=True, eq=False)
class Scope:
    """A running gather: its branches, and whether they may begin new steps."""

    step: str
    branch: Branch
    over_at: int
    """The seq at which it, or a gather around it, ended on record; 0 where neither did."""
    has_stopped: bool = False
    """Whether that end may have stopped branches."""
    branches: list[Branch] = field(default_factory=list[Branch])
    running: int = 0


class RunFiles(Protocol):
    """The workspace of a run, as steps and the executor use it. `a` is a step whose tool may touch it."""

    workspace: Workspace

    @property
    def path(self) -> Path: ...
    async def opened(self) -> None: ...
    async def restore_due(self) -> None: ...
    def begin(self) -> object: ...
    def around(self, a: Any) -> AbstractAsyncContextManager[None]: ...
    async def failed(self, a: Any) -> None: ...
    def ended(self) -> None: ...
    async def settle(self) -> None: ...
    async def revert(self, step: e.StepId, started: int, ended: int) -> int: ...


class ExternalCalls(Protocol):
    """Steps of code that Killick did not start."""

    outside: bool


def _ignore(*_: object) -> None:
    """Nobody listens."""


class Execution:
    """A run while it is in memory."""

    # What most runs never change is set here: an execution is made for every start and wake-up.
    signal: Signal | None = None
    main: asyncio.Future[Any] | None = None
    driver: asyncio.Task[Any] | None = None  # Python 3.11 may crash when it collects one of a closed loop
    busy = 0
    hosting = False
    """Whether a framework's own loop runs in a block of the agent: its calls come in no order."""
    hosted: ExternalCalls | None = None
    at_close: Callable[[], object] = staticmethod(_ignore)
    lease: Lease | None = None
    serves: Callable[[str, str], bool] | None = None
    left_for: str | None = None
    attempts = 0
    """The number of open attempts. A worker that gives the run up lets them finish first."""
    touch_after_us = 0
    on_child: Callable[[Execution, str], None] = staticmethod(_ignore)
    on_message: Callable[[str], object] = staticmethod(_ignore)
    on_command: Callable[[Execution, Message], None] = staticmethod(_ignore)
    input: Any = None
    result: Any = None
    received: Any = None
    first_build: e.Build | None = None
    diverged: tuple[str, str, str, tuple[str, str]] | None = None
    diverged_at: str | None = None
    """The step at which the record ends with a divergence, until something is written after it."""
    parked = False
    inbox: Sequence[Message] = ()  # unconsumed when the run was opened; none if they were many
    has_unread = False
    """Whether a look at the inbox left an answer or a command there."""
    after_death = False
    """Whether the previous process died, and the run has made no progress since."""
    was_abandoned = False
    """Whether the previous holder left the run in the middle."""
    files: RunFiles | None = None
    _signals = 0
    _is_first = True
    _ahead: tuple[Hold, asyncio.Event] | None = None
    _threads_until = 0.0

    def __init__(self, engine: Engine, agent: AnyAgent, log: RunLog, record: Record, context: Context) -> None:
        self.engine = engine
        self.agent = agent
        self.log = log
        self.record = record
        self.context = context
        self.run_id = log.run
        self.stirred = TimedEvent()
        self.waiters: dict[e.StepId, Waiter] = {}
        self.interventions: dict[e.StepId, Intervened] = {}
        """Steps that a person ended since this execution began."""
        self.branches: set[Branch] = set()
        self.inner_waits = InnerWaits(self.mark_idle, self.mark_busy)
        self.patches: dict[str, bool] = {}
        facts, left = log.fold.facts, log.ledger.facts
        self.is_after_end = bool(facts.ended)
        """Whether the run had ended before: one of its effects is being undone."""
        self.generation = facts.generation
        self.has_outside_effects = bool(facts.generation or facts.forked_from or left.open or left.forks)
        """Whether there may be effects outside of this timeline: of a rewind, a repair or a fork."""
        self.fork_effects = facts.fork_effects
        self.model = facts.model
        self.turns = Turns(is_threaded=not agent.is_async)
        self.inert_steps = InertSteps()
        self.now_us = engine.clock.now_us
        self.loop = asyncio.get_running_loop()
        self.progress: dict[e.StepId, Any] = {}
        self.taken: set[int] = set()
        self.last_taken: dict[str, int] = {}
        self.asked_of: dict[e.StepId, tuple[tuple[str, ...], list[str] | None]] = {}
        """By step, its approvers, who are also asked any other question about it."""
        self.inflight: dict[tuple[str, e.Digest], asyncio.Future[None]] = {}
        self.consuming: set[UniqueRight] = set()
        """Unique rights that attempts of this execution claimed and that may not be committed yet."""
        self.transacting = asyncio.Lock()

    @property
    def folder(self) -> Path | None:
        """The folder that the run works in. A rehearsal or replay takes no snapshot of it."""
        if self.files is not None:
            return self.files.path
        declared = self.agent.options.workspace
        return None if declared is None else declared.of(self.run_id).path

    @cached_property
    def judge(self) -> ContractsInForce:
        """The contracts in force."""
        context = self.context
        return ContractsInForce(self.engine, self.agent, self.log, context.latest, lambda: context.version)

    @cached_property
    def is_unguarded(self) -> bool:
        """Whether its steps are not traced, touch no workspace, and are all taken here."""
        return not (self.engine.tracer or self.files or self.agent.options.workspace or self.serves)

    @cached_property
    def run_tree(self) -> RunTree:
        """The effects of the other runs of its run tree."""
        return RunTree(self.engine.log, self.log, self.record)

    @property
    def is_outside(self) -> bool:
        """Whether calls come from outside of any agent: an external caller may repeat one that it gave up."""
        return self.hosted is not None and self.hosted.outside

    # time and writing -------------------------------------------------------------------------

    def write_behind(self, *entries: Entry, **rights: Any) -> int:
        """Write without waiting; returns the seq of the last event."""
        try:
            return self.log.append_behind(*(entries if self.diverged_at is None else self._mended(entries)), **rights)
        except KillickError as error:
            self._failed(error)

    async def write(self, *entries: Entry, **rights: Any) -> Written:
        """Write and wait until the commit, also if this task is cancelled meanwhile."""
        try:
            writing = self.log.append_begun(*(entries if self.diverged_at is None else self._mended(entries)), **rights)
            return Written(writing.item.last[0], not writing.is_committed and await self.log.settled(writing))
        except KillickError as error:
            self._failed(error)

    async def barrier(self) -> None:
        """Wait until everything written so far is committed."""
        try:
            await self.log.barrier_soon()
        except KillickError as error:
            self._failed(error)

    def noted(self, note: str, step: e.StepId | None = None) -> Entry:
        """A note of the engine's own, for readers of the history."""
        return Entry(e.NoteMade(at=self.now_us(), step=step, by="killick"), {"note": without(note)})

    def step_ended(self, step: e.StepId, outcome: Literal["returned", "failed", "cancelled"], **values: Any) -> Entry:
        """The end of a step without attempts of its own."""
        return Entry(e.StepEnded(at=self.now_us(), step=step, outcome=outcome), values)

    def wait_closed(self, step: e.StepId, how: e.WaitEnd) -> Entry:
        """The end of a wait that no answer ended."""
        return Entry(e.WaitClosed(at=self.now_us(), step=step, how=how))

    def _failed(self, error: KillickError) -> NoReturn:
        """Close the handle after a failed commit. A value that cannot be stored is an error of the caller."""
        raise error if isinstance(error, ValueRefused) else self.interrupted(self.log.failure or error)

    def interrupted(self, error: BaseException) -> Signal:
        """Close the handle after an error of the store. It is no failure of the run, which resumes later."""
        self.close(Interrupted(error), cut=True)
        return self.signal or Interrupted(error)

    @property
    def is_ours(self) -> bool:
        """Whether the lease is still valid by the local clock."""
        return self.lease is None or self.engine.clock.monotonic() < self.lease.until

    @property
    def may_record(self) -> bool:
        """Whether outcomes can still be recorded, also if the handle is closed: lease and store are intact."""
        lost = isinstance(self.signal, Interrupted) and not isinstance(self.signal.cause, StillRunning | None)
        return not lost and self.is_ours and self.log.failure is None

    def check_lease(self) -> None:
        """Check the lease just before a call; interrupt the run if it is lost."""
        if self.lease is not None and self.engine.clock.monotonic() >= self.lease.until:
            raise self.interrupted(LeaseLost(self.run_id))

    def _mended(self, entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
        """Prefix the first write after a divergence with the event that the code was corrected."""
        if self.diverged_at is None or isinstance(entries[0].event, e.RunTaken):
            return entries
        self.diverged_at = None
        return (Entry(e.RunResumed(at=self.now_us(), by="killick"), {"because": "the code was mended"}), *entries)

    def is_first_live(self) -> bool:
        """True once: the first live step is durable before it begins, so that a step that kills its process is known.

        After a death every step is, so that the next process sees how far this one got.
        """
        first, self._is_first = self._is_first, False
        return first or self.after_death

    def leave_for(self, name: str, sort: e.Sort) -> None:
        """Leave the run before a step that this process does not take."""
        if self.serves is not None and self.signal is None and not self.serves(name, sort):
            self.left_for = name
            leaving = Parked()
            self.close(leaving)
            raise leaving

    async def raise_if_closing(self) -> None:
        """After a CancelledError: raise the signal, unless the agent's own code cancelled."""
        if await self.is_closing():
            assert self.signal is not None
            raise self.signal

    async def is_closing(self) -> bool:
        """Whether the handle is closed, or will be within the next turns of the loop."""
        if self.parked:
            self.close(Interrupted())
        for _ in range(3):
            if self.signal is None:
                await asyncio.sleep(0)
        return self.signal is not None

    # entering and leaving Run methods ----------------------------------------------------------

    def branch_here(self) -> Branch:
        """The branch whose code is running, or an error that says why there is none."""
        branch = HERE.get()
        if not isinstance(branch, Branch) or branch.execution is not self:
            raise OutsideBranch(self.run_id, "a Run was used outside of its agent's own code")
        return branch

    def enter(self, branch: Branch, *, task: asyncio.Task[Any] | None = None) -> None:
        if branch.thread is None:
            if asyncio.current_task() is not branch.task:
                raise OutsideBranch(self.run_id, "a Run was used in a task that Killick did not start")
        elif task is not None:
            branch.applying = task
        if branch.streaming:
            raise KillickError(f"{self.run_id}: a stream is still open; read it to its end before the next step")
        if self.hosting and branch.guest is None and branch.scope is None:
            raise KillickError(
                f"{self.run_id}: in a run.hosting block steps are the host's; use host.call, or leave it"
            )
        if self.signal is not None or branch.stopped is None or not self._left_open(branch):
            self.refuse(branch)
        self.turns.computing -= 1

    def _left_open(self, branch: Branch) -> bool:
        """Whether a dead process left an attempt open in a stopped branch, which is reconciled first."""
        inside = f"{branch.path}."
        return any(step.startswith(inside) and self.is_open(step) for step in self.record.open)

    def is_open(self, step: e.StepId) -> bool:
        """Whether an attempt of a step is open, so that it may have had effects."""
        found = self.log.fold.step(step)
        return found is not None and bool(found.attempts) and not found.attempts[-1].ended and not found.ended

    def refuse(self, branch: Branch) -> None:
        """Raise the signal that closed the handle, or that stopped the branch."""
        if self.signal is not None:
            raise self.signal
        if branch.stopped is not None:
            raise branch.stopped

    async def refused_again(self) -> None:
        """Code that catches every signal would never end: after a while none is raised in it any more."""
        self._signals += 1
        if self._signals > _SIGNALS_MAX and self.loop.is_running():
            await self.loop.create_future()
        await asyncio.sleep(0)  # giving back control is all that ends code that is collected after its loop

    # whose turn it is --------------------------------------------------------------------------

    async def await_turn(self, seq: float = _LIVE, *, computed: bool = False) -> None:
        """Wait until everything on record before a seq was replayed; live work waits for all of it.

        With `computed`, also until the code of other branches reached its next step or its end.
        """
        if self.is_solo or self.hosting:
            return
        if not computed and not self.record.unplayed and (seq is _LIVE or not (self.turns or self.turns.is_threaded)):
            self.turns.pass_on()
            return
        await self.turns.wait(seq)
        if seq is _LIVE:
            self.turns.pass_on()

    @property
    def is_solo(self) -> bool:
        """Whether there is one line of code only, so that no order has to be kept."""
        return len(self.branches) == 1

    def mark_replayed(self, seq: int) -> None:
        """A recorded outcome was given to the code."""
        self.record.unplayed -= not self.hosting
        self.see(seq)

    def see(self, seq: int) -> None:
        """The code sees everything up to the recorded end of a step."""
        self.context.see(seq)
        if self.engine.tracer is not None:
            self.engine.tracer.given(self, seq)

    @contextmanager
    def awaiting_commit(self, hold: Hold) -> Generator[None]:
        """While a step ends in a transaction, whose commit is on record before this loop learns of it."""
        committed = asyncio.Event()
        self._ahead = hold, committed
        try:
            yield
        finally:
            self._ahead = None
            committed.set()

    async def recorded(self, seq: int) -> None:
        """Wait until the code may see an outcome that is on record now."""
        if self._ahead is not None:
            hold, committed = self._ahead
            if hold.seq is not None and hold.seq < seq:
                await committed.wait()
        if self.turns.is_threaded or self.record.unplayed:
            await self.await_turn(seq)
        self.context.see(seq)

    # waiting -----------------------------------------------------------------------------------

    def mark_idle(self) -> None:
        """A branch waits for something outside."""
        self.busy -= 1
        if self.busy == 0:
            self.stirred.set()

    def mark_busy(self) -> None:
        self.busy += 1

    async def until_taken(self) -> None:
        """Wait until a parked run is leased again or leaves memory: nothing can be written meanwhile."""
        while self.parked and self.signal is None:
            await asyncio.sleep(_PARKED_SECONDS)

    async def until_over(self, steps: Iterable[e.StepId]) -> None:
        """Wait until steps that were begun here are over, or the handle is closed."""
        wanted, inner = set(steps), InnerSteps("", None, None, None)
        branches = [branch for branch in self.branches if f"{branch.path}.1" in wanted and branch.task is not None]
        for branch in branches:
            self.inner_waits.begin(inner, branch)
        try:
            if branches:
                await asyncio.wait({branch.task for branch in branches if branch.task is not None})
        finally:
            for branch in branches:
                self.inner_waits.end(inner, branch)

    async def until_idle(self, seconds: float) -> None:
        """Wait until the agent ended, every branch is idle, a message came, or the time is up."""
        await self.stirred.wait(self.loop, seconds)

    def close(self, signal: Signal, *, cut: bool = False) -> None:
        """Close the handle: waits end with the signal now, other branches meet it at their next step.

        With `cut` running tools are cancelled; otherwise open attempts finish first.
        """
        if self.signal is None:
            self._threads_until = self.loop.time() + calls.ABANDON_SECONDS
        if self.signal is None or isinstance(signal, Interrupted):
            self.signal = signal
        for waiter in self.waiters.values():
            if not waiter.future.done():
                self.mark_busy()
                end_with(waiter.future, self.signal)
        for branch in self.branches:
            end_with(branch.dormant, self.signal)
        self.turns.close(self.signal)
        self.at_close()
        if cut:
            for branch in self.branches:
                task = branch.applying or branch.task
                if task is not None and task is not asyncio.current_task():
                    task.cancel()
        self.stirred.set()

    @property
    def thread_seconds(self) -> float:
        """How long to wait for threads after the handle was closed."""
        return max(self._threads_until - self.loop.time(), 0.0)

    async def unwind(self) -> None:
        """Let the agent's code leave its blocks. Its steps are refused there, and its result is dropped."""
        if self.main is None or self.main.done():
            return
        # A running thread cannot be cancelled: its attempt waits for it, and records its outcome.
        more = self.thread_seconds if self.engine.live.of(self.run_id) else 0.0
        done, _ = await asyncio.wait({self.main}, timeout=UNWIND_SECONDS + more)
        if not done:
            for branch in self.branches:
                if branch.task is not None:
                    branch.task.cancel()
            await asyncio.wait({self.main}, timeout=0.1)

    # starting code -----------------------------------------------------------------------------

    def start(self, branch: Branch, code: Callable[[], Any], *, on_loop: bool = False) -> asyncio.Future[Any]:
        """Run a branch's code: on the loop, or in a thread of its own."""
        self.branches.add(branch)
        self.busy += 1
        self.turns.computing += 1
        context = copy_context()
        context.run(HERE.set, branch)
        if self.agent.is_async or on_loop:
            task = asyncio.get_running_loop().create_task(_awaited(code), context=context)
            branch.task = task
            future: asyncio.Future[Any] = task
        else:
            future = self.in_thread(branch, code, context)
        future.add_done_callback(partial(self._ended, branch))
        return future

    def in_thread(self, branch: Branch, code: Callable[[], Any], context: Variables) -> asyncio.Future[Any]:
        """Run a branch's code in a thread, by which the branch is known from then on."""
        branch.thread = -1

        def begin() -> Any:
            branch.thread = threading.get_ident()
            return code()

        return self.engine.threads.start(begin, context).future

    def _ended(self, branch: Branch, future: asyncio.Future[Any]) -> None:
        if not future.cancelled():
            future.exception()  # retrieved here, because no task awaits the branches of a parked run
        self.branches.discard(branch)
        for inner in tuple(branch.awaited_by):
            self.inner_waits.end(inner, branch)
        self.turns.computing -= 1
        self.busy -= 1
        if (scope := branch.scope) is not None:
            scope.running -= 1
            if not scope.running:  # the branch that gathered continues, and asks for its turn before any other branch
                self.busy += 1
                self.turns.computing += 1
        if self.busy == 0:
            self.stirred.set()
        self.turns.pass_on()


async def _awaited(code: Callable[[], Any]) -> Any:
    made = code()
    return await made if hasattr(made, "__await__") else made
