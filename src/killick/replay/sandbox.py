"""The sandbox of a replayed run: its log as a store in memory, without access to anything else.

Code may repeat the log and end as it ended. Any other append is refused and closes the run: no tool is called, no
message is sent, no person is asked.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, Final, NoReturn

import msgspec

from killick.clock import Clock
from killick.definitions.markers import ToolStep
from killick.definitions.policy import Effect
from killick.engine.replay import short
from killick.engine.steps.attempt import Applied
from killick.engine.steps.intention import Intent
from killick.errors import LogError, NotOnRecord, RunUnknown, StoreUnavailable
from killick.history.diff import shown
from killick.ids import Ids
from killick.log.log import Log
from killick.log.writer import Entry
from killick.model import event_codec, page_events
from killick.model import events as e
from killick.model.chunks import unpack
from killick.model.codec import plain
from killick.store.memory import MemoryStore
from killick.store.records import READ_LIMIT, Append, Delivered, Delivery, Head, Message, Row

_BY: Final = "killick.replay"

_SAID_AGAIN: Final = (
    e.RunTaken, e.RunResumed, e.RunDiverged, e.StepDrifted, e.PlanMade, e.PlanReached, e.FactDrawn, e.ContextChanged,
    page_events.PageEvicted, page_events.PageFaulted, page_events.PagePinned,
    e.WorkspaceBound, e.WorkspaceCaptured, e.WorkspaceRestored,
    e.RunCompleted, e.RunFailed, e.RunCancelled, e.RunRenewed,
)  # fmt: skip
"""The events that code may append while it repeats a log: those without a step, and its end."""


class Drift(msgspec.Struct, frozen=True):
    """Arguments of a step that differ from the recorded ones without a change in effect."""

    step: str
    recorded: Any
    found: Any


class SandboxStore(MemoryStore):
    """The log as a store. After `restrict_to`, it accepts repeats of the log and refuses everything else."""

    def __init__(self, *, clock: Clock | None = None, ids: Ids | None = None) -> None:
        super().__init__(clock=clock, ids=ids)
        self.refused: NotOnRecord | None = None
        self.reached: dict[str, Any] | None = None
        self.drifts: dict[str, Drift] = {}
        self._run: str | None = None
        self._until: str | None = None
        self._scopes: Collection[str] = ()

    def prepare(self, run: str, *, has_ended: bool) -> int:
        """Prepares a run for execution: no pause holds it, and its children have ended. Returns the time of its end."""
        log = Log(self, behind=False)
        state = log.state(run)
        last = log.event(run, state.seq).at
        if state.fold.facts.paused or state.fold.facts.mend:
            log.open(run).append(Entry(e.RunResumed(at=last, by=_BY)))
        for child in log.ledger(run).children if has_ended else ():
            if self.head(child.run) is None:
                # The outcome of a child that the run did not wait for is not in this log, and has no influence on it.
                stub = log.create(e.RunStarted(at=last, run=child.run, agent=child.agent, parent=run), {"input": None})
                stub.append(Entry(e.RunCancelled(at=last)))
        log.close()
        return last

    def restrict_to(self, run: str, *, until: str | None, scopes: Collection[str]) -> None:
        """Closes the store: only this run may continue, as far as its record goes or to the end of that step.

        Scopes may end: the resumed code ends a scope that was open when the run failed or its process died.
        """
        self._run, self._until, self._scopes = run, until, scopes

    # the store --------------------------------------------------------------------------------

    def close(self) -> None:
        """Keeps the store readable, so that the caller can inspect the final state."""

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
        """Refuses an append. The failing store closes the run's handle, even if the code catches the error."""
        self.refused = self.refused or NotOnRecord(str(self._run), call, step=step)
        raise StoreUnavailable("the replay", f"calls nothing; {call} is not on record")

    def _look(self, item: Append, row: Row) -> None:
        event: Any = event_codec.decode(row.body)
        step = getattr(event, "step", None)
        if isinstance(event, e.ForkMade):
            return  # in this copy, the ancestors of a fork record it before it does anything
        if isinstance(event, e.StepEnded) and step == self._until and self.reached is None:
            self.reached = self._data(item, row)
            raise StoreUnavailable("the replay", f"ends after step {step}")
        if isinstance(event, e.StepDrifted):
            data = self._data(item, row)
            self.drifts[event.step] = Drift(event.step, data.get("recorded"), data.get("found"))
        free = isinstance(event, e.NoteMade) and event.by == "agent"
        free = free or (isinstance(event, e.StepEnded) and step in self._scopes)
        if item.run != self._run or not (free or isinstance(event, _SAID_AGAIN)):
            self.refuse(step or "?", self._call(item, row, event))

    def _call(self, item: Append, row: Row, event: Any) -> str:
        """The call of the code, in words."""
        match event:
            case e.StepIntended():
                arguments: Any = self._data(item, row).get("arguments")
                name = event.name if event.sort == event.name else f"{event.sort} {event.name}"
                return f"{name}({short(arguments)})" if arguments else name
            case e.DecisionMade():
                return f"decision {shown(plain(self._data(item, row).get('question')), 200)}"
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


class RefusingInterceptor:
    """A `ToolInterceptor` that refuses every call."""

    def __init__(self, world: SandboxStore) -> None:
        self._world = world

    async def apply(self, intent: Intent, place: ToolStep, real: Callable[[], Awaitable[Applied]]) -> Applied:
        self._world.refuse(place.id, f"{intent.sort} {intent.name}({short(intent.recording)})")

    async def call_hook(self, fn: Callable[..., Any], effect: Effect, real: Callable[[], Awaitable[Any]]) -> Any:
        self._world.refuse(effect.step, f"{getattr(fn, '__name__', 'a function')} about {effect.tool}")
