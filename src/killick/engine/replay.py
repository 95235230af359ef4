"""The record of a run for replay: steps by id, and the events between them; and the hook by which a replay follows.

Loaded when the run is opened. Writes nothing; decides only whether code and record agree.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, Final, NamedTuple, Protocol

import msgspec
from msgspec.structs import replace

from killick.definitions.agents import AnyAgent
from killick.engine.signals import Signal
from killick.errors import ValueErased
from killick.log.log import Log
from killick.model import event_codec
from killick.model import events as e
from killick.model.facts import OUT_OF_BAND, Step
from killick.model.fold import Fold, timeline
from killick.store.records import Row

PAGES: Final = "page"
"""All that was decided of a window is one queue: it is applied in the order in which it was decided."""

_PAGES: Final = frozenset({"page.evicted", "page.faulted", "page.pinned"})
_BETWEEN: Final = _PAGES | {
    "fact.drawn", "note.made", "plan.made", "plan.reached", "message.taken", "context.changed", "context.refused"
}  # fmt: skip
_OF_STEPS: Final = frozenset({"wait.opened", "wait.closed", "attempt.settled", "effect.confirmed", "step.drifted",
                              "attempt.progressed", "step.edited", "wait.voted", "workspace.restored"})  # fmt: skip
_KIND_AT: Final = len(b'{"kind":"')
_ATTEMPT_ENDED: Final = b'{"kind":"attempt.ended"'
_RUN_TAKEN: Final = b'{"kind":"run.taken"'
_NOT_INDEXED: Final = (b'{"kind":"step.started"', _ATTEMPT_ENDED, b'{"kind":"step.intended"', b'{"kind":"run.')
"""How the most frequent events begin that are in neither of these sets."""

_HOSTS: Final = frozenset({"hosted", "guests"})
"""Scopes in which steps are found by their keys, in no order."""

OVER: Final = frozenset({"done", "failed", "cancelled"})


class Change(NamedTuple):
    """A change of the context from outside, which the code sees after a seq: fields to set and unset, or a whole
    document and its form."""

    seq: int
    version: int
    data: Mapping[str, Any]


class Record:
    """The steps of a run's timeline and the events between them. Does not grow once loaded."""

    def __init__(self, log: Log, run: str, fold: Fold, *, after: int = 0, rows: Sequence[Row] | None = None) -> None:
        self._log = log
        self._run = run
        self._rows: dict[int, Row] = {}
        self.steps: dict[e.StepId, Step] = {}
        self.last: dict[str, int] = {}
        self.unplayed = 0
        self.open: list[e.StepId] = []
        """Steps of which an attempt was left open."""
        self.outside: list[Change] = []
        self.ruled_out: dict[str, int] = {}
        """Keys of effects that were settled as not happened, with the last such attempt."""
        self.undoing: dict[int, e.StepId] = {}
        """By the seq at which an effect started, the step that compensates it at the end of the run."""
        self.undoing_beside: dict[int, e.StepId] = {}
        """The same, for effects that a person has undone out of band."""
        self._between: dict[tuple[str, str], deque[int]] = defaultdict(deque)
        self._of_step: dict[e.StepId, list[tuple[int, e.Event]]] = defaultdict(list)
        if fold.facts.seq:  # a new run has no record
            self._load(fold, after, rows)

    def _load(self, fold: Fold, after: int, rows: Sequence[Row] | None) -> None:
        """Load the record. Events that were read to open the run are not read again."""
        self._rows = {row.seq: row for row in _standing(self._log, self._run, after, rows)}
        for step in reversed(fold.steps):
            if step.intended <= after:
                break
            self.steps[step.id] = step if step.status in OVER else _as_it_is(step)
        hosts = tuple(f"{step.id}." for step in self.steps.values() if step.sort == "scope" and step.name in _HOSTS)
        for name, step in self.steps.items():
            path, _, text = name.rpartition(".")
            if (number := int(text)) > self.last.get(path, 0):
                self.last[path] = number
            if step.undoes is not None:
                undoing = self.undoing_beside if name.startswith(OUT_OF_BAND) else self.undoing
                undoing.setdefault(step.undoes_seq, name)  # the last one, for they come in that order
            if step.sort != "scope" and not name.startswith((OUT_OF_BAND, *hosts)):
                self.unplayed += step.status in OVER
                if step.attempts and not (step.attempts[-1].ended or step.ended):
                    self.open.append(name)
        for seq, row in self._rows.items():
            if row.body.startswith(_NOT_INDEXED):
                continue
            kind = row.body[_KIND_AT : row.body.index(b'"', _KIND_AT)].decode()
            if kind in _OF_STEPS:
                event: Any = event_codec.decode(row.body)
                self._of_step[event.step].append((seq, event))
                if isinstance(event, e.AttemptSettled) and event.settlement == "did_not_happen":
                    self.ruled_out[event.key] = event.attempt
            elif kind in _BETWEEN:
                event = event_codec.decode(row.body)
                if isinstance(event, e.ContextChanged) and event.step is None:
                    if event.by != "agent":
                        self.outside.append(Change(self._seen_from(seq), event.version, self.data(seq)))
                else:
                    queue = PAGES if kind in _PAGES else kind
                    if isinstance(event, e.FactDrawn | e.MessageTaken):
                        queue = f"{kind}:{event.name}"
                    self._between[event.step or "", queue].append(seq)

    def _seen_from(self, seq: int) -> int:
        """When code sees a change from outside: as of its next step that returns after it. What a fork was made with
        is there as soon as its last step before the cut has returned."""
        first = seq
        while (row := self._rows.get(first - 1)) is not None and not row.body.startswith(b'{"kind":"run.forked"'):
            if not row.body.startswith((b'{"kind":"step.overridden"', b'{"kind":"decision.made"')):
                return seq
            first -= 1
        if row is None:
            return seq
        return max((step.ended for step in self.steps.values() if step.ended <= seq), default=1) - 1

    # reading ----------------------------------------------------------------------------------

    def returned(self, step: e.StepId) -> tuple[Step, e.StepIntended, bytes] | None:
        """A tool's step that returned, its intention and its stored output; None if more than attempts is on record."""
        past = self.steps.get(step)
        if past is None or past.status != "done" or past.sort != "tool" or step in self._of_step:
            return None
        row = self._rows[past.output]
        if row.data is None or not row.body.startswith(_ATTEMPT_ENDED):
            return None
        return past, self.event(past.intended), row.data

    def has(self, seq: int) -> bool:
        return seq in self._rows

    def event(self, seq: int) -> Any:
        return event_codec.decode(self._rows[seq].body)

    def data(self, seq: int) -> dict[str, Any]:
        """The values of an event, verbatim. ValueErased when they were erased."""
        row = self._rows[seq]
        if row.data is not None:
            return dict(self._log.unpacked(self._run, row.data, at=seq))
        digest = event_codec.decode(row.body).data
        if digest is None:
            return {}
        raise ValueErased(e.from_text(digest))

    def of(self, step: e.StepId, kind: type[e.Event]) -> list[tuple[int, Any]]:
        """The events of a kind that belong to a step."""
        return [(seq, event) for seq, event in self._of_step.get(step, ()) if isinstance(event, kind)]

    def of_all(self, step: e.StepId) -> list[tuple[int, e.Event]]:
        """The events of a step between its intention and its end, in order."""
        return self._of_step.get(step, [])

    def was_taken_between(self, seq: int, step: e.StepId) -> bool:
        """Whether another holder took the run after an event, before a step that is on record."""
        last = self.steps[step].intended if step in self.steps else seq
        return any(self._rows[at].body.startswith(_RUN_TAKEN) for at in range(seq, last) if at in self._rows)

    def holder_of(self, epoch: int) -> str | None:
        """The holder of the run at an epoch."""
        for row in self._rows.values():
            if row.body.startswith(_RUN_TAKEN):
                event: Any = event_codec.decode(row.body)
                if event.epoch == epoch:
                    return str(event.holder)
        return None

    def take(self, position: str, *kinds: str) -> int | None:
        """The seq of the first thing of these kinds recorded before a step, and move past it. A kind may have a name:
        `fact.drawn:now`."""
        queues = [queue for kind in kinds if (queue := self._between.get((position, kind)))]
        return min(queues, key=lambda queue: queue[0]).popleft() if queues else None

    def ahead(self, position: str, kind: str) -> int | None:
        """The seq of the next event of `take`."""
        queue = self._between.get((position, kind))
        return queue[0] if queue else None

    def branches_beyond(self, step: e.StepId, count: int) -> int | None:
        """A branch of a gather that has steps on record and that the code does not have any more."""
        for path in self.last:
            parent, _, number = path.rpartition(".")
            if parent == step and int(number) > count:
                return int(number)
        return None

    def guests(self, scope: e.StepId) -> dict[str, int]:
        """The branches of a scope whose steps are found by their keys."""
        found: dict[str, int] = {}
        for name, step in self.steps.items():
            inside, _, number = name.rpartition(".")
            above, _, branch = inside.rpartition(".")
            if above == scope and number == "1" and step.intended in self._rows:
                key = getattr(self.event(step.intended), "guest", None)
                found[key or name] = int(branch)
        return found

    def learn(self, fold: Fold, name: e.StepId) -> None:
        """Add a step that was begun since this was loaded, as it is on record now."""
        step = fold.step(name)
        if step is None:
            return
        self.steps[name] = step if step.status in OVER else _as_it_is(step)
        path, _, number = name.rpartition(".")
        self.last[path] = max(self.last.get(path, 0), int(number))
        for row in self._log.rows(self._run, after=step.intended - 1):
            if row.seq not in self._rows:
                self._rows[row.seq] = row
                kind = row.body[_KIND_AT : row.body.index(b'"', _KIND_AT)].decode()
                event: Any = event_codec.decode(row.body)
                if kind in _OF_STEPS and event.step == name:
                    self._of_step[name].append((row.seq, event))

    def has_more(self, path: str, count: int) -> bool:
        """Whether more steps are on record in a scope after this many."""
        return self.last.get(path, 0) > count


def _as_it_is(step: Step) -> Step:
    """A copy of a step that is not over, as it is on record now: the fold changes its own."""
    return replace(step, attempts=list(map(copy, step.attempts)))


def _standing(log: Log, run: str, after: int, read: Sequence[Row] | None) -> Sequence[Row]:
    """A log's rows without rewound ones. The last of them may have been read already."""
    rows = [row for row in read or () if row.seq > after]
    first = rows[0].seq if rows else None
    if first == after + 1:
        return rows  # without a rewind, as they were read to open the run
    rows = log.rows(run, after=after, before=first) + rows
    if not any(row.body.startswith(b'{"kind":"run.rewound"') for row in rows):
        return rows
    standing = {seq for seq, _ in timeline([(row.seq, event_codec.decode(row.body)) for row in rows])}
    return [row for row in rows if row.seq in standing]


class RequestedStep(msgspec.Struct, frozen=True):
    """The step that code asks for, in the terms of the divergence check."""

    sort: e.Sort
    name: str
    digest: e.Digest | None = None
    identity: e.Digest | None = None
    binding: bool = False

    def __str__(self) -> str:
        return f"{self.sort} {self.name}" if self.sort != self.name else self.sort


def compare(step: Step, recorded: e.StepIntended | None, asked: RequestedStep) -> str:
    """'same', 'drift' (the record is used, the difference is noted) or 'diverged'."""
    if (step.sort, step.name) != (asked.sort, asked.name):
        return "diverged"
    if recorded is None:
        return "same"
    if asked.binding and (recorded.identity or recorded.digest) != (asked.identity or asked.digest):
        return "diverged"
    return "same" if recorded.digest == asked.digest else "drift"


def short(values: Any, length: int = 160) -> str:
    """Arguments as a person reads them in a message."""
    named: dict[Any, Any] = {**values} if isinstance(values, dict) else {"value": values}
    text = ", ".join(f"{name}={value!r}" for name, value in named.items())
    return text if len(text) <= length else text[: length - 1] + "…"


# the tracer hook ----------------------------------------------------------------------------------


class TracedExecution(Protocol):
    """A tracer's view of an execution. It may close it; the code then gets the signal at its next step."""

    agent: AnyAgent
    record: Record
    signal: Signal | None
    loop: asyncio.AbstractEventLoop

    def close(self, signal: Signal, *, cut: bool = False) -> None: ...


class Tracer(Protocol):
    """Follows the code of a run. It may raise the signal of an execution that it closed."""

    def asked(self, ex: TracedExecution, step: e.StepId) -> None:
        """The code asks for a step. Called on the loop."""
        ...

    def called(self, ex: TracedExecution, step: e.StepId) -> None:
        """Blocking code is about to ask for its next step. Called in the code's own thread."""
        ...

    def given(self, ex: TracedExecution, seq: int) -> None:
        """The code is given the outcome that was recorded at this event."""
        ...
