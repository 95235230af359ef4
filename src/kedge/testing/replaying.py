"""Runs an agent's code again against the record of a run, with the world shut off, and says where they part.

So a run of production becomes a test: nothing is called, nobody is asked, no time passes. What code draws and notes
between its steps may change; a step that is not on record is refused, and an end that is another is an error.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Final, NoReturn

import msgspec

from kedge.clock import Clock, ManualClock
from kedge.errors import (
    KedgeError,
    LogError,
    NotOnRecord,
    ReplayParted,
    RunDiverged,
    RunMismatch,
    RunUnknown,
    StoreUnavailable,
)
from kedge.history.diff import shown, values
from kedge.history.export import Export, read
from kedge.ids import Ids
from kedge.log.handle import Entry
from kedge.log.log import Log
from kedge.model import events as e
from kedge.model.codec import Erased, plain
from kedge.model.failure import Failure
from kedge.model.fold import Step
from kedge.model.state import State
from kedge.model.typed import convert
from kedge.model.values import unpack
from kedge.runtime.applying import Applied
from kedge.runtime.client import Client
from kedge.runtime.executor import Advanced
from kedge.runtime.here import Stray, watch_io
from kedge.runtime.intent import Intent
from kedge.runtime.registry import AnyAgent, Effect, ToolStep
from kedge.runtime.replay import short
from kedge.store.base import READ_LIMIT, Append, Delivered, Delivery, Head, Message, Row
from kedge.store.memory import MemoryStore

_BY: Final = "kedge.testing.replay"
_SHOWN: Final = 200

_SAID_AGAIN: Final = (
    e.RunTaken, e.RunResumed, e.RunDiverged, e.StepDrifted, e.PlanMade, e.PlanReached, e.FactDrawn, e.ContextChanged,
    e.RunCompleted, e.RunFailed, e.RunCancelled,
)  # fmt: skip
"""What code may add to a record that it follows: what takes no step, and its end."""


class Drift(msgspec.Struct, frozen=True):
    """Arguments of a step that are not those on record, in a way that changes nothing."""

    step: str
    recorded: Any
    found: Any


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a replay: how the run stands, by its record and by its code.

    `beyond` is what the code goes on with where the record of an unfinished run ends. `strays` are files that
    the code opened outside of a step. `parted` is where it parts from the record, if it was asked not to raise that.
    """

    run: str
    agent: str
    status: str
    result: Any = None
    failure: Failure | None = None
    steps: int = 0
    drifts: tuple[Drift, ...] = ()
    strays: tuple[Stray, ...] = ()
    beyond: str | None = None
    parted: ReplayParted | None = None


def replay(
    source: str | os.PathLike[str] | bytes,
    agent: AnyAgent,
    *,
    check: bool = True,
    secret_key: bytes | None = None,
    seconds: float = 60.0,
) -> Replayed:
    """Run an agent's code again against an exported run. ReplayParted, or with `check=False` in the outcome, if it
    does not do again what is on record.

    `secret_key` is that of the store it comes from, where arguments are Secrets; `seconds` is how long the code may
    take.
    """
    return _Replay(read(source), agent, secret_key, seconds).outcome(check)


class _Replay:
    """One run and one agent."""

    def __init__(self, export: Export, agent: AnyAgent, secret_key: bytes | None, seconds: float) -> None:
        self.export = export
        self.agent = agent
        self.run = export.header.run
        self.secret_key = secret_key
        self.seconds = seconds
        self.world = export.store(_Record, secret_key=secret_key)
        export.verify(self.world)
        self.log = Log(self.world)
        self.state: State = self.log.state(self.run)
        if self.state.agent != agent.name and self.state.agent not in agent.options.aliases:
            raise RunMismatch(self.run, f"agent ({self.state.agent})")
        self.drifts: list[Drift] = []
        self.strays: list[Stray] = []

    def outcome(self, check: bool) -> Replayed:
        advanced, refused, parted = None, None, None
        try:
            for step in self._transitions():
                self._again(step)
            advanced, refused = self._to_its_end()
        except ReplayParted as found:
            parted = found
        if parted is not None and check:
            raise parted
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
            parted=parted,
        )

    # what is replayed -------------------------------------------------------------------------

    def _to_its_end(self) -> tuple[Advanced | None, NotOnRecord | None]:
        """The code as far as the record goes; where the run has ended, to the same end."""
        facts = self.state.fold.facts
        if facts.ended_as not in ("completed", "failed"):
            advanced, world = self._advanced(self._cancelled_at())
            return advanced, world.refused
        advanced, world = self._advanced(facts.ended, has_ended=True)
        if world.refused is not None:
            raise world.refused
        if advanced is not None:
            self._compare(advanced)
        return advanced, None

    def _transitions(self) -> Iterator[Step]:
        """The transitions of a state machine, which the runtime itself would not run again."""
        base = self.log.head(self.run).base
        for index in self.state.fold.tops if self.agent.is_machine else ():
            step = self.state.fold.steps[index]
            if step.sort == "scope" and step.name == "transition" and step.status == "done" and step.ended > base:
                yield step

    def _again(self, step: Step) -> None:
        """One transition: it must lead to the same state."""
        _, world = self._advanced(step.ended, until=step.id)
        if world.reached is None:
            raise world.refused or ReplayParted(self.run, f"step {step.id}: the transition does not end", step=step.id)
        self._same(f"the transition at step {step.id} led to", world.reached.get("output"), self.state.output_of(step))

    def _cancelled_at(self) -> int | None:
        """A run that was cancelled is replayed up to where somebody asked for that."""
        for row in reversed(self.log.rows(self.run)):
            if row.body.startswith(b'{"kind":"run.rewound"'):
                return None
            if row.body.startswith(b'{"kind":"cancel.requested"'):
                return row.seq
        return None

    def _advanced(
        self, before: int | None, *, until: str | None = None, has_ended: bool = False
    ) -> tuple[Advanced | None, _Record]:
        world = self.export.store(_Record, before=before, secret_key=self.secret_key)
        clock = ManualClock(_prepared(world, self.run, has_ended=has_ended))
        world.shut(self.run, until, {step.id for step in self.state.fold.steps if step.sort == "scope"})
        client = Client(world, clock=clock, behind=False, stand_in=_Nothing(world))
        unwatch = watch_io(self._strayed)
        strays = len(self.strays)
        advanced: Advanced | None = None
        try:
            advanced = client.blocking(self._drive(client))
        except TimeoutError:
            raise ReplayParted(self.run, f"the code has not come to its end within {self.seconds:g} s") from None
        except KedgeError as error:
            if world.refused is None and world.reached is None:
                raise ReplayParted(self.run, f"the code cannot follow this record: {error}") from error
        finally:
            unwatch()
            client.close()
            self.drifts += world.drifts
        if touched := next((stray for stray in self.strays[strays:] if not _is_file(stray)), None):
            raise ReplayParted(self.run, f"the code touches the world: {touched}")
        if advanced is not None and advanced.diverged is not None:
            step, recorded, found, builds = advanced.diverged
            diverged = RunDiverged(self.run, step, recorded=recorded, found=found, builds=builds)
            told = f"at step {step} the record has {recorded}, the code asks for {found}"
            raise ReplayParted(self.run, told, step=step) from diverged
        return advanced, world

    async def _drive(self, client: Client) -> Advanced:
        async with asyncio.timeout(self.seconds):
            return await client.executor().advance(self.run, agent=self.agent)

    def _strayed(self, stray: Stray) -> None:
        self.strays.append(stray)
        if not _is_file(stray):
            raise ReplayParted(self.run, f"the code touches the world: {stray}")

    # what came of it --------------------------------------------------------------------------

    def _compare(self, found: Advanced) -> None:
        data = self.state.data(self.state.fold.facts.ended)
        failure = data.get("failure")
        if isinstance(failure, Erased):
            return  # how it ended was erased, and with it what to compare
        recorded = None if failure is None else convert(failure, Failure, at="failure")
        if self.state.status == found.status == "completed":
            self._same("the record returned", found.result, data.get("result"))
        elif (recorded and (recorded.type, recorded.message)) != (
            found.failure and (found.failure.type, found.failure.message)
        ):
            was = f"failed with {recorded}" if recorded else f"returned {_brief(data.get('result'))}"
            now = f"fails with {found.failure}" if found.failure else f"returns {_brief(found.result)}"
            raise ReplayParted(self.run, f"the record {was}, the code {now}", step=found.step)

    def _same(self, told: str, found: Any, recorded: Any) -> None:
        was, now = _json(recorded), _json(found)
        changes = values(was, now)
        if not changes:
            return
        first = changes[0]
        where = ""
        if first.path:
            half = (shown(first.before, _SHOWN // 4), shown(first.after, _SHOWN // 4))
            where = f" ({first.path}: {half[0]} is now {half[1]})"
        raise ReplayParted(self.run, f"{told} {_brief(was)}, the code gives {_brief(now)}{where}")


def _prepared(world: _Record, run: str, *, has_ended: bool) -> int:
    """Make a run ready to go on: nothing holds it back, and its children are over. Returns the time of its record."""
    log = Log(world, behind=False)
    state = log.state(run)
    last = log.event(run, state.seq).at
    if state.fold.facts.paused or state.fold.facts.mend:
        log.open(run).append(Entry(e.RunResumed(at=last, by=_BY)))
    for child in log.ledger(run).children if has_ended else ():
        if world.head(child.run) is None:
            # What became of a child that nobody waited for is not on this record, and changes nothing in it.
            stub = log.create(e.RunStarted(at=last, run=child.run, agent=child.agent, parent=run), {"input": None})
            stub.append(Entry(e.RunCancelled(at=last)))
    log.close()
    return last


def _is_file(stray: Stray) -> bool:
    return stray.what.startswith("open(")


def _json(value: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(plain(value)))


def _brief(value: Any) -> str:
    return shown(_json(value), _SHOWN)


# the world, shut off ------------------------------------------------------------------------------


class _Record(MemoryStore):
    """The record as a store that, once shut, lets code follow it and refuses everything that is not on it."""

    def __init__(self, *, clock: Clock | None = None, ids: Ids | None = None) -> None:
        super().__init__(clock=clock, ids=ids)
        self.refused: NotOnRecord | None = None
        self.reached: dict[str, Any] | None = None
        self.drifts: list[Drift] = []
        self._run: str | None = None
        self._until: str | None = None
        self._scopes: set[str] = set()

    def shut(self, run: str, until: str | None, scopes: set[str]) -> None:
        """From now on only this run goes on, and only as far as it is on record, or to the end of that step.

        Scopes may end: what is left open when a run fails or dies is ended by the code that goes past it.
        """
        self._run, self._until, self._scopes = run, until, scopes

    def append(self, items: Sequence[Append]) -> list[Head | LogError]:
        for item in items if self._run is not None else ():
            for row in item.rows:
                self._look(item, row)
        return super().append(items)

    def deliver(self, deliveries: Sequence[Delivery]) -> list[Delivered | LogError]:
        return [RunUnknown(each.run) for each in deliveries] if self._run is not None else super().deliver(deliveries)

    def inbox(self, run: str, *, name: str | None = None, after: int = 0, limit: int = READ_LIMIT) -> list[Message]:
        return [] if self._run is not None else super().inbox(run, name=name, after=after, limit=limit)

    def refuse(self, step: str, call: str) -> NoReturn:
        """Nothing goes out. A store that fails closes the run's handle, whatever its code does about that."""
        self.refused = self.refused or NotOnRecord(str(self._run), call, step=step)
        raise StoreUnavailable("the world", f"is shut off while a run is replayed; {call} is not on record")

    def _look(self, item: Append, row: Row) -> None:
        event: Any = e.decode(row.body)
        if isinstance(event, e.StepEnded) and event.step == self._until and self.reached is None:
            self.reached = self._data(item, row)
            raise StoreUnavailable("the record", f"step {event.step} has ended, and that is enough")
        if isinstance(event, e.StepDrifted):
            data = self._data(item, row)
            self.drifts.append(Drift(event.step, data.get("recorded"), data.get("found")))
        free = isinstance(event, e.NoteMade) and event.by == "agent"
        free = free or (isinstance(event, e.StepEnded) and event.step in self._scopes)
        if item.run != self._run or not (free or isinstance(event, _SAID_AGAIN)):
            self.refuse(getattr(event, "step", None) or "?", self._call(item, row, event))

    def _call(self, item: Append, row: Row, event: Any) -> str:
        """What code asks for, in the words of its own call."""
        match event:
            case e.StepIntended():
                arguments: Any = self._data(item, row).get("arguments")
                name = event.name if event.sort == event.name else f"{event.sort} {event.name}"
                return f"{name}({short(arguments)})" if arguments else name
            case e.DecisionMade():
                return f"decision {_brief(self._data(item, row).get('question'))}"
            case e.AttemptStarted():
                return f"attempt {event.attempt} ({event.key})"
            case _:
                return str(event.__struct_config__.tag)

    def _data(self, item: Append, row: Row) -> dict[str, Any]:
        if row.data is None:
            return {}
        with_it = {piece.hash: piece for piece in item.pieces}
        data: dict[str, Any] = unpack(row.data, lambda hashes: {**self.pieces(hashes), **with_it})
        return data


class _Nothing:
    """Stands between steps and the world, and lets nothing through."""

    def __init__(self, world: _Record) -> None:
        self._world = world

    async def apply(self, intent: Intent, place: ToolStep, real: Callable[[], Awaitable[Applied]]) -> Applied:
        self._world.refuse(place.id, f"{intent.sort} {intent.name}({short(intent.recording)})")

    async def aside(self, fn: Callable[..., Any], effect: Effect, real: Callable[[], Awaitable[Any]]) -> Any:
        self._world.refuse(effect.step, f"{getattr(fn, '__name__', 'a function')} about {effect.tool}")
