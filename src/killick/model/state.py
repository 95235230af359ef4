"""The user's view of a run: nine typed parts over a fold, and their versioned JSON form.

Parts are lazy: opening a state reads nothing, and accessing a value reads that value. `to_json` reads everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Generic, Protocol, TypeVar, overload

import msgspec

from killick.errors import ValueErased
from killick.model import events as e
from killick.model.codec import Erased, plain
from killick.model.facts import Status, Step, StepStatus, Wait
from killick.model.fold import Fold

STATE_VERSION: Final = 1
"""The version of the JSON form; docs/state.schema.json describes it."""

T = TypeVar("T")


class Reader(Protocol):
    """Reads events and their values by seq. The log is one."""

    def event(self, seq: int) -> e.Event: ...

    def data(self, seq: int) -> Mapping[str, Any]: ...


class Position(msgspec.Struct, frozen=True):
    """1. The run's position: current step, plan and stage, finished and open steps."""

    step: str | None
    stage: str | None
    plan: tuple[str, ...]
    committed: tuple[str, ...]
    pending: tuple[str, ...]


class Output(msgspec.Struct, frozen=True):
    """2. The output of a step, verbatim."""

    step: str
    name: str
    value: Any


class Decision(msgspec.Struct, frozen=True):
    """3. A decision: the options, the choice, its author and reason."""

    step: str
    at: int
    by: str
    question: Any
    options: Any
    choice: Any
    because: Any


class Retry(msgspec.Struct, frozen=True):
    """4. The attempts of a step, their errors, and the time of the next one."""

    step: str
    name: str
    attempts: int
    next_at: int | None
    errors: tuple[Any, ...]


class Failure(msgspec.Struct, frozen=True):
    """5. A failure: step, input, progress, and the error with its chain."""

    at: int
    step: str | None
    tool: str | None
    attempt: int | None
    input: Any
    progress: Any
    error: Any


class Context(msgspec.Struct, frozen=True):
    """6. The agent's context document, and its version."""

    version: int
    document: Any


class Pending(msgspec.Struct, frozen=True):
    """7. An open wait."""

    step: str
    waits_for: str
    name: str
    to: tuple[str, ...]
    since: int
    deadline: int | None
    prompt: Any
    schema: Any


class Traced(msgspec.Struct, frozen=True):
    """8. A model or tool call, in order: input, output and usage."""

    step: str
    sort: str
    name: str
    at: int
    status: StepStatus
    input: Any
    output: Any
    usage: e.Usage | None
    reasoning: str | None = None


class EffectSeen(msgspec.Struct, frozen=True):
    """9. An effect on the world, whether its outcome is known, and whether it was compensated."""

    step: str
    tool: str
    effect: str
    key: str
    status: StepStatus
    attempts: int
    undone: bool
    undoes: str | None = None


class StateDocument(msgspec.Struct, frozen=True):
    """A complete state as JSON."""

    version: int
    run: str
    agent: str
    status: Status
    seq: int
    generation: int
    priority: int
    tags: tuple[str, ...]
    parent: str | None
    forked_from: str | None
    position: Position
    outputs: tuple[Output, ...]
    decisions: tuple[Decision, ...]
    retries: tuple[Retry, ...]
    failures: tuple[Failure, ...]
    context: Context
    pending: tuple[Pending, ...]
    trace: tuple[Traced, ...]
    effects: tuple[EffectSeen, ...]


class Part(Sequence[T], Generic[T]):
    """A part of a state whose items are read on access."""

    def __init__(self, positions: Sequence[int], load: Callable[[int], T]) -> None:
        self._positions = positions
        self._load = load

    def __len__(self) -> int:
        return len(self._positions)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self._load(position) for position in self._positions[index]]
        return self._load(self._positions[index])


class Outputs(Mapping[str, Any]):
    """The outputs of finished steps, by step id."""

    def __init__(self, state: State) -> None:
        self._state = state

    def __getitem__(self, step: str) -> Any:
        found = self._state.fold.step(step)
        if found is None or found.status != "done" or not found.output:
            raise KeyError(step)
        return self._state.output_of(found)

    def __iter__(self) -> Iterator[str]:
        return (step.id for step in self._state.fold.steps if step.status == "done" and step.output)

    def __len__(self) -> int:
        return self._state.fold.facts.committed


class State:
    """The complete state of a run at one event of its log. Its nine parts are read on access.

    run, agent  the id of the run, and the name of its agent
    status      the status of the run
    seq         the number of the event
    generation  the number of rewinds before
    position    the current step, plan and stage, and the finished and open steps
    outputs     the outputs of finished steps, by step
    decisions   the decisions: question, options, choice, decider and reason
    retries     the attempts of steps, their errors, and the time of the next attempt
    failures    the failures: step, input, progress and error
    context     the agent's document, and its version
    pending     the open waits
    trace       the model and tool calls, in order: input, output and usage
    effects     the effects, whether their outcome is known, and whether they were compensated
    """

    def __init__(self, fold: Fold, reader: Reader) -> None:
        self.fold = fold
        self.event = reader.event
        self._reader = reader

    # the run ---------------------------------------------------------------------------------

    @property
    def run(self) -> str:
        return self.fold.facts.run

    @property
    def agent(self) -> str:
        return self.fold.facts.agent

    @property
    def status(self) -> Status:
        return self.fold.facts.status

    @property
    def seq(self) -> int:
        return self.fold.facts.seq

    @property
    def generation(self) -> int:
        return self.fold.facts.generation

    @property
    def input(self) -> Any:
        """The run's input."""
        return self.data(self.fold.facts.input).get("input")

    @property
    def result(self) -> Any:
        """The result of a completed run."""
        ended = self.fold.facts.ended
        return self.data(ended).get("result") if ended else None

    # the nine parts ---------------------------------------------------------------------------

    @property
    def position(self) -> Position:
        facts = self.fold.facts
        done = tuple(step.id for step in self.fold.steps if step.status == "done")
        return Position(facts.current, facts.stage, facts.plan, done, tuple(facts.pending))

    @property
    def outputs(self) -> Outputs:
        return Outputs(self)

    @property
    def decisions(self) -> Part[Decision]:
        return Part(self.fold.decisions, self._decision)

    @property
    def retries(self) -> Part[Retry]:
        return Part(self.fold.retried, self._retry)

    @property
    def failures(self) -> Part[Failure]:
        return Part(self.fold.failures, self._failure)

    @property
    def context(self) -> Context:
        facts = self.fold.facts
        document: Any = None
        for seq in facts.context_parts:
            data = self.data(seq)
            if "set" in data or "unset" in data:
                changed: dict[str, Any] = {**(document or {}), **data.get("set", {})}
                document = changed
                for name in data.get("unset", ()):
                    document.pop(name, None)
            else:
                document = data.get("document")
        return Context(facts.context_version, document)

    @property
    def pending(self) -> tuple[Pending, ...]:
        return tuple(self.waiting(wait) for wait in self.fold.facts.waits.values())

    @property
    def trace(self) -> Part[Traced]:
        return Part(self.fold.trace, self._traced)

    @property
    def effects(self) -> Part[EffectSeen]:
        return Part(self.fold.effects, self._effect)

    def document(self) -> StateDocument:
        """Returns the complete state. Its size grows with the run."""
        facts = self.fold.facts
        outputs = (
            Output(step.id, step.name, self.output_of(step)) for step in self.fold.steps if step.status == "done"
        )
        return StateDocument(
            version=STATE_VERSION,
            run=facts.run,
            agent=facts.agent,
            status=facts.status,
            seq=facts.seq,
            generation=facts.generation,
            priority=facts.priority,
            tags=facts.tags,
            parent=facts.parent,
            forked_from=facts.forked_from,
            position=self.position,
            outputs=tuple(outputs),
            decisions=tuple(self.decisions),
            retries=tuple(self.retries),
            failures=tuple(self.failures),
            context=self.context,
            pending=self.pending,
            trace=tuple(self.trace),
            effects=tuple(self.effects),
        )

    def to_json(self) -> bytes:
        """Returns the document as JSON. Values without a JSON form are tagged as in the log."""
        return msgspec.json.encode(self.as_written().document())

    def as_written(self) -> State:
        """Returns the same state with values in their stored form."""
        return State(self.fold, _Plain(self))

    # reading one item -------------------------------------------------------------------------

    def output_of(self, step: Step) -> Any:
        """Returns a step's output, for any way in which it ended."""
        data = self.data(step.output)
        return next((data[name] for name in ("output", "answer", "choice", "result") if name in data), None)

    def data(self, seq: int) -> Mapping[str, Any]:
        """Returns the values of an event; erased ones read as `Erased`."""
        if not seq:
            return {}
        try:
            return self._reader.data(seq)
        except ValueErased as erased:
            return _AllErased(Erased(erased.digest))

    def _decision(self, index: int) -> Decision:
        step = self.fold.steps[index]
        event, data = self.event(step.output), self.data(step.output)
        by = event.by if isinstance(event, e.DecisionMade) else "agent"
        asked = (data.get(name) for name in ("question", "options", "choice", "because"))
        return Decision(step.id, step.at, by, *asked)

    def _retry(self, index: int) -> Retry:
        step = self.fold.steps[index]
        failed = (attempt for attempt in step.attempts if attempt.outcome not in (None, "returned"))
        errors = tuple(self.data(attempt.ended).get("failure") for attempt in failed)
        return Retry(step.id, step.name, len(step.attempts), step.delayed_until, errors)

    def _failure(self, seq: int) -> Failure:
        event, data = self.event(seq), self.data(seq)
        named: str | None = getattr(event, "step", None)
        step = self.fold.step(named) if named else None
        arguments = self.data(step.edited or step.intended).get("arguments") if step else None
        tool, attempt = step.name if step else None, getattr(event, "attempt", None)
        return Failure(event.at, named, tool, attempt, arguments, data.get("progress"), data.get("failure"))

    def waiting(self, wait: Wait) -> Pending:
        """Returns one open wait in its public form."""
        data = self.data(wait.opened)
        asked = (data.get("prompt"), data.get("schema"))
        return Pending(wait.step, wait.waits_for, wait.name, wait.to, wait.at, wait.deadline, *asked)

    def _traced(self, index: int) -> Traced:
        step = self.fold.steps[index]
        event = self.event(step.output) if step.output else None
        usage = event.usage if isinstance(event, e.AttemptEnded) else None
        put_in = self.data(step.edited or step.intended).get("arguments")
        came_out = self.output_of(step) if step.status == "done" else None
        reasoning = self.data(step.output).get("reasoning") if usage is not None else None
        return Traced(step.id, step.sort, step.name, step.at, step.status, put_in, came_out, usage, reasoning)

    def _effect(self, index: int) -> EffectSeen:
        step = self.fold.steps[index]
        started = self.event(step.attempts[0].started)
        key = started.key if isinstance(started, e.Started) else ""
        attempts = len(step.attempts)
        return EffectSeen(step.id, step.name, str(step.effect), key, step.status, attempts, step.undone, step.undoes)


class _Plain:
    """Reads values in their stored form, with their tags."""

    def __init__(self, state: State) -> None:
        self.event = state.event
        self._state = state

    def data(self, seq: int) -> Mapping[str, Any]:
        data = self._state.data(seq)
        if isinstance(data, _AllErased):
            return _AllErased(plain(data.marker))
        return {name: plain(value) for name, value in data.items()}


class _AllErased(dict[str, Any]):
    """Replaces the data of an event whose values were erased: every key reads as `Erased`."""

    def __init__(self, marker: Any) -> None:
        super().__init__(output=marker)
        self.marker = marker

    def get(self, key: str, default: Any = None) -> Any:
        return self.marker
