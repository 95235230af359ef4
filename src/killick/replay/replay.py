"""Replays an agent's code against a run's log, without I/O, and reports the first divergence.

Works on a copy in memory: the store of the run is only read. No tool is called, no person is asked, no time passes.
Random draws and notes between steps may change. A step that is not in the log is refused; a different end is an error.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import msgspec

from killick.agents.run import run_of
from killick.agents.runtime import Runtime
from killick.archive.export import Export, export, read
from killick.blocking import run_in_own_loop
from killick.clock import ManualClock
from killick.definitions.agents import AGENTS, AnyAgent
from killick.definitions.current import UnrecordedIO, watch_io
from killick.engine.executor import Executor
from killick.engine.outcome import RunOutcome
from killick.engine.replay import TracedExecution
from killick.engine.signals import Interrupted
from killick.errors import BoundaryUnknown, KillickError, NotOnRecord, ReplayDiverged, RunDiverged, RunMismatch
from killick.history.diff import shown, values
from killick.log import boundaries
from killick.log.group_commit import current_loop
from killick.log.log import Log
from killick.model import event_codec
from killick.model.codec import Erased, plain
from killick.model.facts import Step
from killick.model.failure import Failure
from killick.model.state import State
from killick.model.typed import convert
from killick.replay.debugger import frame_here, stop_in
from killick.replay.result import Played, Replayed, ReplayRequest
from killick.replay.sandbox import Drift, RefusingInterceptor, SandboxStore

_SHOWN: Final = 200


class _StoppedAtStep(KillickError):
    """The replay reached the step at which the caller asked it to stop."""


class Replay:
    """The replay of an exported run, with one agent."""

    def __init__(
        self,
        export: Export,
        agent: AnyAgent,
        *,
        secret_key: bytes | None = None,
        asked: ReplayRequest | None = None,
        tell: Callable[[Played], None] = lambda played: None,
    ) -> None:
        self.export = export
        self.agent = agent
        self.run = export.header.run
        self.secret_key = secret_key = secret_key or export.secret_key
        self.asked_for = asked or ReplayRequest()
        self._tell = tell
        sandbox = export.store(SandboxStore, secret_key=secret_key)
        export.verify(sandbox)
        self.log = Log(sandbox)
        self.state: State = self.log.state(self.run)
        if self.state.agent != agent.name and self.state.agent not in agent.options.aliases:
            raise RunMismatch(self.run, f"agent ({self.state.agent})")
        self.scopes = {step.id for step in self.state.fold.steps if step.sort == "scope"}
        self.drifts: list[Drift] = []
        self.strays: list[UnrecordedIO] = []
        self.played: list[Played] = []
        self.stopped: str | None = None
        self._to, _, self._side = (self.asked_for.to or "").partition(":")
        self._sandbox = sandbox
        self._reached: State | None = None
        self._until: str | None = None
        self._traced: TracedExecution | None = None
        self._ends: dict[int, Step] = {}
        """By last event: each step whose recorded outcome the traced code has not received yet."""
        self._debugging = False
        self.missed = self.asked_for.stop_at
        """The step where the debugger should stop, until it does."""
        for place in (self.asked_for.to, self.asked_for.stop_at):
            if place is not None and place != str(len(self.state.fold.tops) + 1):
                self._refuse_unknown(place)

    def _refuse_unknown(self, place: str) -> None:
        """Refuses a position that is not in the log: the code would never reach it."""
        boundaries.at(self.log, self.run, place)
        if not place[:1].isdigit() or "~" in place:
            reason = f"{place!r} names no step of the current timeline; write 6, 6:before or 6:after"
            raise BoundaryUnknown(self.run, place, reason)

    def outcome(self, check: bool = False) -> Replayed:
        """The result of the replay. With `check`, raises ReplayDiverged where the code diverges from the log."""
        advanced, refused, divergence = None, None, None
        try:
            advanced, refused = self._all()
        except ReplayDiverged as found:
            divergence = found
        if divergence is not None and check:
            raise divergence
        status: str = self.state.status
        result = None
        if advanced is not None and advanced.has_ended:
            status = advanced.status
            typed = self.agent.returns is not Any and not self.agent.is_machine and advanced.result is not None
            result = convert(advanced.result, self.agent.returns, at="result") if typed else advanced.result
        return Replayed(
            run=self.run,
            agent=self.agent.name,
            status=status,
            result=result,
            failure=None if advanced is None else advanced.failure,
            steps=len(self.state.fold.steps),
            drifts=tuple(self.drifts),
            strays=tuple(self.strays),
            beyond=None if refused is None else f"step {refused.step}: {refused.call}",
            divergence=divergence,
            played=tuple(self.played),
            state=self._reached,
            stopped=self.stopped,
        )

    # the replayed run -------------------------------------------------------------------------

    def _all(self) -> tuple[RunOutcome | None, NotOnRecord | None]:
        for step in self._transitions():
            self._again(step)
            if self.stopped is not None:
                return None, None
        return self._to_its_end()

    def _to_its_end(self) -> tuple[RunOutcome | None, NotOnRecord | None]:
        """Replays the code to the end of the log; if the run has ended, the code must reach the same end."""
        facts = self.state.fold.facts
        if facts.ended_as not in ("completed", "failed"):
            advanced, sandbox = self._advanced(self._cancelled_at())
            if facts.ended_as == "cancelled" and sandbox.refused is None and self.stopped is None:
                # The code is done; the events by which the engine ended the run are in the log, too.
                return self._advanced(facts.ended, has_ended=True)[0], None
            return advanced, sandbox.refused
        advanced, sandbox = self._advanced(facts.ended, has_ended=True)
        if self.stopped is not None:
            return None, None
        if sandbox.refused is not None:
            raise sandbox.refused
        if advanced is not None:
            self._compare(advanced)
        return advanced, None

    def _transitions(self) -> Iterator[Step]:
        """Replays the transitions of a state machine, which the engine itself would not execute again."""
        base = self.export.header.lineage[-1].base
        for index in self.state.fold.tops if self.agent.is_machine else ():
            step = self.state.fold.steps[index]
            if step.sort == "scope" and step.name == "transition" and step.status == "done" and step.ended > base:
                yield step

    def _again(self, step: Step) -> None:
        """One transition: it must lead to the same state."""
        _, sandbox = self._advanced(step.ended, until=step.id)
        if self.stopped is not None:
            return
        if sandbox.reached is None:
            raise sandbox.refused or ReplayDiverged(self.run, f"transition {step.id} never ends", step=step.id)
        self._same(f"transition {step.id} led to", sandbox.reached.get("output"), self.state.output_of(step))
        self._given_one(step)
        if step.id == self._to and self._side != "before":
            self.stopped = f"after step {step.id}"

    def _cancelled_at(self) -> int | None:
        """Returns the seq of the request that cancelled the run: the replay ends there."""
        for row in reversed(self.log.rows(self.run)):
            if row.body.startswith(b'{"kind":"run.rewound"'):
                return None
            if row.body.startswith(b'{"kind":"cancel.requested"'):
                return row.seq
        return None

    def _advanced(
        self, before: int | None, *, until: str | None = None, has_ended: bool = False
    ) -> tuple[RunOutcome | None, SandboxStore]:
        sandbox = self.export.store(SandboxStore, before=before, secret_key=self.secret_key)
        clock = ManualClock(sandbox.prepare(self.run, has_ended=has_ended))
        sandbox.restrict_to(self.run, until=until, scopes=self.scopes)
        self._sandbox, self._until = sandbox, until
        runtime = Runtime(sandbox, clock=clock, behind=False, stand_in=RefusingInterceptor(sandbox), tracer=self)
        unwatch = watch_io(self._strayed)
        strays = len(self.strays)
        advanced: RunOutcome | None = None
        try:
            advanced = self._driven(runtime)
        except TimeoutError:
            reason = f"the code did not end within {self.asked_for.seconds:g} s"
            raise ReplayDiverged(self.run, reason) from None
        except _StoppedAtStep:
            pass
        except KillickError as error:
            if sandbox.refused is None and sandbox.reached is None and self.stopped is None:
                raise ReplayDiverged(self.run, f"the code cannot replay this log: {error}") from error
        finally:
            unwatch()
            runtime.close()
            self.drifts += sandbox.drifts.values()
        if touched := next((stray for stray in self.strays[strays:] if not stray.reads), None):
            raise ReplayDiverged(self.run, f"the code does unrecorded I/O: {touched}")
        if advanced is not None and advanced.failure is not None and advanced.failure.type == "bdb.BdbQuit":
            self.stopped, advanced = "the debugger was quit", None
        if advanced is not None and advanced.diverged is not None:
            step, recorded, found, builds = advanced.diverged
            diverged = RunDiverged(self.run, step, recorded=recorded, found=found, builds=builds)
            reason = f"at step {step} the log has {recorded}, the code has {found}"
            raise ReplayDiverged(self.run, reason, step=step) from diverged
        self._reached = Log(sandbox).state(self.run)
        return advanced, sandbox

    def _driven(self, runtime: Runtime) -> RunOutcome:
        """Executes the code: in its own thread, or in this one, which a debugger may need."""
        if not self.asked_for.here:
            return run_in_own_loop(self._drive(runtime))
        loop = asyncio.new_event_loop()
        try:
            return loop.run_until_complete(self._drive(runtime))
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

    async def _drive(self, runtime: Runtime) -> RunOutcome:
        executor = Executor(runtime.engine, run_of)
        try:
            async with asyncio.timeout(self.asked_for.seconds):
                return await executor.advance(self.run, agent=self.agent)
        finally:
            await executor.close()
            await runtime.engine.resources.close()

    # steps of the code ------------------------------------------------------------------------

    def asked(self, ex: TracedExecution, step: str) -> None:
        """The code calls a step."""
        if self._until is not None and int(step.partition(".")[0]) > int(self._until):
            return  # that transition is replayed separately
        if step == self._to and self._side == "before":
            self._stop(ex, f"before step {step}")
            assert ex.signal is not None
            raise ex.signal
        if ex.agent.is_async:
            self._break(ex, step)

    def called(self, ex: TracedExecution, step: str) -> None:
        """Blocking code calls a step in its own thread, where the debugger can stop it."""
        self._break(ex, step)

    def given(self, ex: TracedExecution, seq: int) -> None:
        """The code receives a recorded outcome."""
        if self._traced is not ex:
            self._traced, self._ends = ex, {step.ended: step for step in ex.record.steps.values() if step.ended}
        step = self._ends.pop(seq, None)
        if step is None:
            return
        self._given_one(step)
        if step.id == self._to and self._side != "before":
            self._stop(ex, f"after step {step.id}")

    def _given_one(self, step: Step) -> None:
        if self.stopped is not None:
            return
        state = self.state
        data: Mapping[str, Any] = state.data(step.output) if step.output else {}
        failure = data.get("failure") if step.status != "done" else None
        played = Played(
            step=step.id,
            sort=step.sort,
            name=step.name,
            status=step.status,
            output=state.output_of(step) if step.status == "done" else None,
            failure=convert(failure, Failure, at="failure") if isinstance(failure, dict) else None,
            drift=self._sandbox.drifts.get(step.id),
        )
        self.played.append(played)
        self._tell(played)

    def _break(self, ex: TracedExecution, step: str) -> None:
        frame = frame_here() if step == self.missed and self.stopped is None else None
        if frame is None:
            return
        self.missed = None
        self._debugging = True
        try:
            stays = stop_in(frame)
        finally:
            self._debugging = False
        if not stays:
            self._stop(ex, f"the debugger was quit at step {step}")
            raise ex.signal or _StoppedAtStep(self.run)

    def _stop(self, ex: TracedExecution, reason: str) -> None:
        """Stops the replay: the next step of the code raises a signal."""
        self.stopped = reason
        signal = Interrupted(_StoppedAtStep(f"{self.run}: stopped {reason}"))
        if ex.loop is current_loop():
            ex.close(signal, cut=True)
        else:
            ex.signal = signal
            ex.loop.call_soon_threadsafe(lambda: ex.close(signal, cut=True))

    def _strayed(self, stray: UnrecordedIO) -> None:
        if self._debugging:
            return  # the user at the debugger's prompt may do I/O
        self.strays.append(stray)
        if not stray.reads:
            raise ReplayDiverged(self.run, f"the code does unrecorded I/O: {stray}")

    # the outcome ------------------------------------------------------------------------------

    def _compare(self, found: RunOutcome) -> None:
        data = self.state.data(self.state.fold.facts.ended)
        failure = data.get("failure")
        if isinstance(failure, Erased):
            return  # the recorded end was erased
        recorded = None if failure is None else convert(failure, Failure, at="failure")
        renewed = self.state.fold.facts.renewed_as
        if renewed != found.renewed_as:
            was, now = (f"renews it as {run}" if run else "does not renew it" for run in (renewed, found.renewed_as))
            raise ReplayDiverged(self.run, f"the log {was}, the code {now}")
        if renewed is not None and self._reached is not None:
            again = self._reached.data(self._reached.fold.facts.ended)
            self._same("the log continues with", again.get("input"), data.get("input"))
        elif self.state.status == found.status == "completed":
            self._same("the record returned", found.result, data.get("result"))
        elif _known_by(recorded) != _known_by(found.failure):
            was = f"failed with {recorded}" if recorded else f"returned {_brief(data.get('result'))}"
            now = f"fails with {found.failure}" if found.failure else f"returns {_brief(found.result)}"
            raise ReplayDiverged(self.run, f"the record {was}, the code {now}", step=found.step)

    def _same(self, lead: str, found: Any, recorded: Any) -> None:
        was, now = _json(recorded), _json(found)
        changes = values(was, now)
        if not changes:
            return
        first = changes[0]
        where = ""
        if first.path:
            half = (shown(first.before, _SHOWN // 4), shown(first.after, _SHOWN // 4))
            where = f" ({first.path}: {half[0]} is now {half[1]})"
        raise ReplayDiverged(self.run, f"{lead} {_brief(was)}, the code gives {_brief(now)}{where}")


def replayed(
    log: Log, source: str | os.PathLike[str], agent: AnyAgent | str | None, asked: ReplayRequest, *, check: bool
) -> Replayed:
    """Replays a run of a store, or of an export, with the given code or the agent of that name."""
    if isinstance(source, str) and log.store.head(source) is not None:
        found, key = read(export(log, source)), log.store.secret_key
    else:
        found, key = read(source), None
    if agent is None:
        agent = str(event_codec.decode(found.rows[found.header.lineage[0].run][0].body).agent)  # type: ignore[attr-defined]
    code = AGENTS.get(agent) if isinstance(agent, str) else agent
    found.decrypt(log.store)
    return Replay(found, code, secret_key=found.secret_key or key, asked=asked).outcome(check)


def _known_by(failure: Failure | None) -> tuple[str, str] | None:
    return None if failure is None else (failure.type, failure.message)


def _json(value: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(plain(value)))


def _brief(value: Any) -> str:
    return shown(_json(value), _SHOWN)
