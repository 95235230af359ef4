"""Advances runs on one loop: takes them, drives them until they end or wait, parks them, and wakes them.

Knows nothing of how a step is done. A run that waits stays in a small warm cache; woken soon it goes on without replay.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Coroutine
from contextvars import copy_context
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec

from kedge.errors import (
    AlreadyClaimed,
    EpochStale,
    HandleClosed,
    HeadMoved,
    KedgeError,
    MessageGone,
    RunBroken,
    RunBusy,
    RunExists,
    ValueRefused,
)
from kedge.log.handle import Entry, RunLog
from kedge.model import events as e
from kedge.model.failure import Failure
from kedge.model.typed import convert
from kedge.runtime import ending, machine, waits
from kedge.runtime.context import recorded_context, through_codec
from kedge.runtime.execution import Branch, Engine, Execution
from kedge.runtime.here import HERE
from kedge.runtime.registry import AGENTS, AnyAgent
from kedge.runtime.replay import OVER, Record
from kedge.runtime.run import Run, SyncRun
from kedge.runtime.signals import Cancelling, Diverging, Interrupted, Parked, Paused, Signal
from kedge.runtime.steps import first_entries
from kedge.store.base import ENDED

logger: Final = logging.getLogger("kedge")

WARM_MAX: Final = 64
"""Runs that wait and are kept in memory."""

POLL_SECONDS: Final = 0.25
"""How often a run that is busy looks whether another process sent it something."""

_AGAIN: Final = (AlreadyClaimed, MessageGone, RunExists)
"""Refusals of a commit that another look at the store resolves."""


class Start(NamedTuple):
    """A run to be created."""

    started: e.RunStarted
    agent: AnyAgent
    input: Any


class Advanced(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run stands after it was advanced: ended, or waiting until a time or for something outside."""

    run: str
    status: str
    wake_at_us: int | None = None
    result: Any = None
    failure: Any = None
    step: str | None = None
    diverged: tuple[str, str, str, tuple[str, str]] | None = None
    not_undone: tuple[str, ...] = ()

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED


class Executor:
    """The runs that one loop advances."""

    def __init__(self, engine: Engine, *, warm_max: int = WARM_MAX) -> None:
        self.engine = engine
        self._warm_max = warm_max
        self._live: dict[str, Execution | None] = {}
        self._warm: OrderedDict[str, Execution] = OrderedDict()
        self._children: dict[str, asyncio.Task[Any]] = {}
        self._watchers: dict[str, set[Execution]] = {}

    # advancing --------------------------------------------------------------------------------

    async def advance(
        self, run: str, *, start: Start | None = None, agent: AnyAgent | None = None, sit_out: bool = False
    ) -> Advanced:
        """Drive a run until it has ended or waits. With `sit_out`, timers and backoffs are waited for here."""
        if run in self._live:
            raise RunBusy(run, holder=self.engine.holder)
        self._live[run] = None
        try:
            while True:
                try:
                    return await self._advanced(run, start, agent, sit_out)
                except _AGAIN:
                    start = None
        finally:
            self._live.pop(run, None)

    async def _advanced(self, run: str, start: Start | None, agent: AnyAgent | None, sit_out: bool) -> Advanced:
        taken = self._warmed(run) if start is None else self._begun(start)
        ex = taken or self._opened(run, agent)
        if isinstance(ex, Advanced):
            return ex
        self._live[run] = ex
        try:
            await self._drive(ex, sit_out=sit_out)
            return await self._conclude(ex)
        except BaseException as error:
            if not isinstance(ex.signal, Interrupted):
                ex.close(Interrupted(), cut=True)
            await asyncio.shield(ex.unwind())
            self._release(ex)
            if isinstance(error, Interrupted):
                raise _cause(error, run) from None
            raise

    def notify(self, run: str) -> None:
        """Something came for a run; if it is live here it looks at once."""
        ex = self._live.get(run)
        if ex is not None:
            ex.stirred.set()

    async def close(self) -> None:
        """Let go of everything: what is live here is interrupted, and goes on another time."""
        for task in self._children.values():
            task.cancel()
        for ex in [*self._live.values(), *self._warm.values()]:
            if ex is not None and ex.signal is None:
                ex.close(Parked() if ex.parked else Interrupted(), cut=not ex.parked)
                await ex.unwind()
        if self._children:
            await asyncio.wait(set(self._children.values()), timeout=5)
        self._warm.clear()

    # taking a run -----------------------------------------------------------------------------

    def _begun(self, start: Start) -> Execution:
        """A new run, written with its first step; nothing of it is to be seen before."""
        engine, started = self.engine, start.started
        log = engine.log.begin(started.run, holder=engine.holder, seconds=engine.lease_seconds)
        ex = self._execution(start.agent, log, machine.Resumed())
        ex.input = start.input
        taken = e.RunTaken(at=started.at, epoch=1, holder=engine.holder, build=started.build)
        ex.behind(*first_entries(started, start.agent, start.input), Entry(taken))
        ex.context = recorded_context(start.agent, ex.record, (_document(start.agent), _version(start.agent), None))
        self._start(ex, machine.Resumed())
        return ex

    def _warmed(self, run: str) -> Execution | None:
        """A run that waits in memory, if nobody touched it since."""
        ex = self._warm.pop(run, None)
        if ex is None or ex.signal is not None:
            return None
        engine = self.engine
        try:
            head = engine.log.store.lease(run, engine.holder, seconds=engine.lease_seconds)
        except BaseException:
            self._drop(ex)
            raise
        if head.seq != ex.log.seq or head.hash != ex.log.hash:
            engine.log.store.release(run, epoch=head.epoch, holder=engine.holder)
            self._drop(ex)
            return None
        ex.parked = False
        ex.log.go_on(head)
        self._leased(ex)
        taken = e.RunTaken(at=ex.now_us(), epoch=head.epoch, holder=engine.holder, build=engine.build(ex.agent))
        ex.behind(Entry(taken))
        waits.look(ex)
        for waiter in ex.waiters.values():
            if waiter.waits_for == "child":
                self._schedule(ex, waiter.name)
        return ex

    def _opened(self, run: str, agent: AnyAgent | None) -> Execution | Advanced:
        """A run from its record."""
        engine = self.engine
        now = engine.clock.now_us()
        lease_until_us = engine.log.head(run).lease_until_us
        log = engine.log.open(run, holder=engine.holder, seconds=engine.lease_seconds)
        try:
            facts = log.fold.facts
            stays = self._stays(log)
            if stays is not None:
                engine.log.store.release(run, epoch=log.epoch, holder=engine.holder)
                return stays
            agent = agent or AGENTS.get(facts.agent)
            point = machine.resume_point(engine.log, run, log.fold) if agent.is_machine else machine.Resumed()
            ex = self._execution(agent, log, point)
            ex.first_build = facts.build
            ex.input = _input(engine, agent, run, facts.input)
            ex.touch_after_us = _touch_after(ex, lease_until_us or now)
            if facts.mend:
                ex.diverged_at = ex.engine.log.event(run, facts.mend).step  # type: ignore[attr-defined]
            taken = e.RunTaken(at=now, epoch=log.epoch, holder=engine.holder, build=engine.build(agent))
            ex.behind(Entry(taken))
            if facts.cancelling:
                ex.close(Cancelling())
            else:
                waits.look(ex)
            self._start(ex, point)
        except BaseException:
            engine.log.store.release(run, epoch=log.epoch, holder=engine.holder)
            raise
        return ex

    def _stays(self, log: RunLog) -> Advanced | None:
        """How a run stands that does not go on: ended, paused, or repaired and not looked at yet."""
        facts = log.fold.facts
        if facts.ended:
            return ended(self.engine, log.run)
        if facts.paused and not facts.cancelling:
            return Advanced(run=log.run, status="paused")
        if facts.mend and not isinstance(self.engine.log.event(log.run, facts.mend), e.RunDiverged):
            return Advanced(run=log.run, status="waiting")
        return None

    def _execution(self, agent: AnyAgent, log: RunLog, point: machine.Resumed) -> Execution:
        engine = self.engine
        record = Record(engine.log, log.run, log.fold, after=point.after)
        base = _context_base(engine, log, agent, point.after)
        ex = Execution(engine, agent, log, record, recorded_context(agent, record, base))
        ex.on_child = partial(self._schedule, ex)
        ex.on_message = self.notify
        self._leased(ex)
        return ex

    def _leased(self, ex: Execution) -> None:
        ex.lease_until = self.engine.clock.monotonic() + self.engine.lease_seconds

    # driving ----------------------------------------------------------------------------------

    def _start(self, ex: Execution, point: machine.Resumed) -> None:
        """Begin the agent's code. What it comes to is decided within the same task, so that it may still wait."""
        branch = Branch(ex)
        context = copy_context()
        context.run(HERE.set, branch)
        ex.branches.add(branch)
        ex.busy = ex.computing = 1
        main = asyncio.get_running_loop().create_task(_to_its_end(_main(ex, branch, point)), context=context)
        branch.task = main
        ex.main = main
        main.add_done_callback(partial(_main_done, ex))

    async def _drive(self, ex: Execution, *, sit_out: bool) -> None:
        """Until the agent's code is over, or something closed the handle, or the run only waits."""
        assert ex.main is not None
        clock = self.engine.clock
        while not ex.main.done() and ex.signal is None:
            ex.stirred.clear()
            wake = waits.next_deadline(ex)
            nap = POLL_SECONDS if wake is None else min((wake - ex.now_us()) / 1_000_000, POLL_SECONDS)
            if ex.busy == 0:
                await ex.barrier()
                if wake is None and not self._children_of(ex):
                    return
                sits = sit_out and any(waiter.waits_for in ("time", "delay") for waiter in ex.waiters.values())
                if wake is not None and wake > ex.now_us() and not sits and not self._children_of(ex):
                    return
                if wake is not None:
                    nap = min(clock.nap_seconds(max((wake - ex.now_us()) / 1_000_000, 0.0)), POLL_SECONDS)
            await ex.rest(max(nap, 0.0))
            self._keep(ex)
            if not ex.main.done():
                waits.look(ex)

    def _keep(self, ex: Execution) -> None:
        """Renew a lease that ends, in good time; one that was lost closes the handle."""
        engine = self.engine
        left = ex.lease_until - engine.clock.monotonic()
        if left < engine.lease_seconds / 2:
            if engine.log.store.renew(ex.run_id, epoch=ex.log.epoch, seconds=engine.lease_seconds):
                self._leased(ex)
            else:
                head = engine.log.head(ex.run_id)
                ex.close(Interrupted(EpochStale(ex.run_id, held=ex.log.epoch, actual=head.epoch)), cut=True)

    async def _conclude(self, ex: Execution) -> Advanced:
        """What came of it, and what becomes of what is in memory."""
        assert ex.main is not None
        if ex.signal is None and not ex.main.done():
            await ex.barrier()
            self._release(ex)
            self._keep_warm(ex)
            return standing(self.engine, ex)
        await ex.unwind()
        signal = ex.signal
        if isinstance(signal, Interrupted):
            self._release(ex)
            raise _cause(signal, ex.run_id)
        if isinstance(signal, Cancelling):
            ex = await self._cancelled(ex)
            if isinstance(ex.signal, Interrupted):
                raise _cause(ex.signal, ex.run_id)
        else:
            _raise_own(ex.main)
        await ex.barrier()
        facts = ex.log.fold.facts
        if facts.ended:
            self._tell_parent(ex)
            if facts.status == "failed":
                self._release(ex)  # somebody may resume it; of others nobody wants the lease any more
            if facts.status == "completed":
                return Advanced(run=ex.run_id, status=facts.status, result=ex.result)
            return ended(self.engine, ex.run_id)
        self._release(ex)
        return standing(self.engine, ex)

    async def _cancelled(self, ex: Execution) -> Execution:
        """Carry a cancellation out, in a fresh execution that runs no agent code."""
        await ex.barrier()
        point = machine.Resumed()
        last = self._execution(ex.agent, ex.log, point)
        last.input = ex.input
        branch = Branch(last)
        branch.count = len(ex.log.fold.tops)
        context = copy_context()
        context.run(HERE.set, branch)
        last.branches.add(branch)
        last.busy = 1
        work = _to_its_end(ending.cancel(last, branch))
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

    # parking ----------------------------------------------------------------------------------

    def _release(self, ex: Execution) -> None:
        with contextlib.suppress(KedgeError):
            self.engine.log.store.release(ex.run_id, epoch=ex.log.epoch, holder=self.engine.holder)

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
                await self.advance(child, sit_out=True)
                return
            except RunBusy:
                await asyncio.sleep(POLL_SECONDS)
            except (KedgeError, asyncio.CancelledError) as error:
                logger.warning("%s: stopped being advanced here: %s", child, error)
                return

    def _child_done(self, child: str, task: asyncio.Task[Any]) -> None:
        self._children.pop(child, None)
        for parent in self._watchers.pop(child, set()):
            parent.stirred.set()

    def _children_of(self, ex: Execution) -> bool:
        """Whether something that is live here may wake the run."""
        return any(ex in self._watchers.get(child, ()) for child in self._children)

    def _tell_parent(self, ex: Execution) -> None:
        """A parent that sleeps is woken by a message; one that is live here is stirred."""
        facts = ex.log.fold.facts
        if facts.parent is None:
            return
        from kedge.runtime.steps import delivery

        message = delivery(
            facts.parent, waits.CHILD, None, id=waits.child_id(ex.run_id), by=ex.run_id, at_us=ex.now_us()
        )
        self.engine.log.store.deliver([message])
        self.notify(facts.parent)


# the agent's code -------------------------------------------------------------------------------------


def _raise_own(main: asyncio.Future[Any] | None) -> None:
    """An error that is neither the agent's nor a signal is our own, and nothing is to hide it."""
    if main is not None and main.done() and not main.cancelled():
        error = main.exception()
        if error is not None and not isinstance(error, Signal):
            raise error


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """A signal ends the code of a run; the execution knows it, and nobody else need be told."""
    with contextlib.suppress(Signal):
        await work


def _main_done(ex: Execution, main: asyncio.Future[Any]) -> None:
    if not main.cancelled():
        main.exception()  # looked at here, because nobody awaits the code of a run that was parked
    ex.stirred.set()


async def _main(ex: Execution, branch: Branch, point: machine.Resumed) -> None:
    """Run the agent's code to its end, and put that on record."""
    error: BaseException | None = None
    result: Any = None
    try:
        result = through_codec(await _code(ex, branch, point))
        if ex.agent.returns is not Any and not ex.agent.is_machine:
            convert(result, ex.agent.returns, at="result")
    except (Signal, GeneratorExit):
        raise
    except BaseException as raised:
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
    await ending.finish(ex, branch, result, error)


async def _code(ex: Execution, branch: Branch, point: machine.Resumed) -> Any:
    agent = ex.agent
    run: Any = Run(ex) if agent.is_async else SyncRun(ex)
    if agent.is_machine:
        return await machine.transitions(ex, branch, agent, point, lambda state: _called(ex, branch, agent, run, state))
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


# how runs stand ---------------------------------------------------------------------------------------


def ended(engine: Engine, run: str) -> Advanced:
    """How a run ended, from its record; RunBroken where that does not hold."""
    if (reason := engine.log.store.quarantined(run)) is not None:
        raise RunBroken(run, seq=engine.log.head(run).seq, reason=reason)
    state = engine.log.state(run)
    facts = state.fold.facts
    data = state.data(facts.ended)
    failure = data.get("failure")
    event = engine.log.event(run, facts.ended)
    return Advanced(
        run=run,
        status=facts.status,
        result=data.get("result"),
        failure=None if failure is None else convert(failure, Failure, at="failure"),
        step=getattr(event, "step", None),
        not_undone=tuple(data.get("not_undone") or ()),
    )


def standing(engine: Engine, ex: Execution) -> Advanced:
    """How a run stands that is not over."""
    fold = ex.log.fold
    diverged = ex.diverged if isinstance(ex.signal, Diverging) else None
    status = "paused" if isinstance(ex.signal, Paused) else fold.facts.status
    return Advanced(run=ex.run_id, status=status, wake_at_us=fold.wake_at, diverged=diverged)


def request_cancel(engine: Engine, run: str, *, compensate: bool, by: str | None, because: str | None = None) -> None:
    """Put a cancellation on record, through the inbox if somebody holds the run."""
    command(engine, run, {"command": "cancel", "compensate": compensate, "because": because}, by=by)


def command(engine: Engine, run: str, body: dict[str, Any], *, by: str | None) -> bool:
    """Append a command to a run that nobody holds, or deliver it to whoever does. True: it holds already."""
    from kedge.runtime.steps import delivery

    store = engine.log.store
    try:
        log = engine.log.open(run, holder=engine.ids.new("command"), seconds=30)
    except RunBusy:
        message = delivery(run, waits.COMMAND, body, id=engine.ids.new("command"), by=by, at_us=engine.clock.now_us())
        [outcome] = store.deliver([message])
        if isinstance(outcome, KedgeError):
            raise outcome from None
        return False
    try:
        version = log.fold.facts.context_version
        entries = waits.command_entries(body, by=by, at=engine.clock.now_us(), version=version)
        if not log.fold.facts.ended:
            log.append(*entries)
    except (HeadMoved, EpochStale):
        return command(engine, run, body, by=by)
    finally:
        with contextlib.suppress(KedgeError):
            store.release(run, epoch=log.epoch)
    return True


def _cause(signal: Interrupted, run: str) -> BaseException:
    cause = signal.cause
    if isinstance(cause, HandleClosed):
        cause = cause.cause
    return cause or KedgeError(f"{run}: was interrupted; run it again to go on")


def _document(agent: AnyAgent) -> dict[str, Any] | None:
    from kedge.runtime.context import initial_context

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


def _input(engine: Engine, agent: AnyAgent, run: str, seq: int) -> Any:
    return agent.checked(engine.log.data(run, seq).get("input"))


def _touch_after(ex: Execution, lease_until_us: int) -> int:
    """R16: where whoever began an attempt may be frozen rather than dead, it is left alone for a while."""
    grace = round(ex.engine.grace_seconds * 1_000_000)
    open_ones = [step for step in ex.record.steps.values() if step.attempts and not step.attempts[-1].ended]
    latest = 0
    for step in open_ones:
        if step.status in OVER:
            continue
        started: e.AttemptStarted = ex.record.event(step.attempts[-1].started)
        holder = ex.record.holder_of(started.epoch)
        if holder is not None and holder != ex.engine.holder and ex.engine.log.store.lives(holder):
            latest = max(latest, (started.deadline or lease_until_us) + grace)
    return latest
