"""Publishes run events to registered observers: run spans, attempts, waits, rejections.

The source is the run's appends, so a replay publishes nothing. Decides nothing, writes nothing; an observer that fails
is logged and does not disturb the run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from killick.engine.failures import describe
from killick.engine.replay import OVER
from killick.errors import KillickError
from killick.log.writer import Entry
from killick.logger import get_logger
from killick.model import events as e
from killick.model.failure import Failure

if TYPE_CHECKING:
    from killick.definitions.markers import ToolStep
    from killick.engine.execution import Execution
    from killick.engine.outcome import RunOutcome
    from killick.engine.steps.intention import Intent

logger: Final = get_logger("killick")

_TRACE_WITHIN: Final = 8
"""Among how many of a run's first events the trace is looked for that it belongs to."""

_INTENDED_MAX: Final = 256
"""How many open intentions of a run are remembered."""

_ATTEMPTED: Final = frozenset({"tool", "model", "undo"})

# published records --------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class RunSpan:
    """The work on a run from its lease to its release: until it ends, waits, is paused or interrupted."""

    run: str
    agent: str
    began_us: int
    epoch: int
    build: e.Build
    parent: str | None = None
    """The run that spawned it."""
    trace: str | None = None
    """Its recorded trace context, in W3C's form."""
    replayed: int = 0
    """How many steps came from the record."""
    ended_us: int = 0
    status: str = "interrupted"
    """How it ended: completed, failed, cancelled, renewed, waiting, paused, diverged, left or interrupted."""
    failure: Failure | None = None
    kept: dict[object, Any] = field(default_factory=dict[object, Any])
    """Each observer's own data."""


@dataclass(slots=True, eq=False)
class Attempt:
    """One try of a tool or a model. `arguments` and `output` are as they are on record."""

    run: str
    agent: str
    run_span: RunSpan | None
    step: e.StepId
    number: int
    key: str
    began_us: int
    name: str = ""
    sort: e.Sort = "tool"
    effect: e.EffectClass | None = None
    verdict: e.Verdict | None = None
    asked: bool = False
    """Whether it needed an approval."""
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    fn: Callable[..., Any] | None = None
    """The called function, once called."""
    ended_us: int = 0
    outcome: e.Outcome | None = None
    """None where the run was released before the attempt ended."""
    limited: bool = False
    retry_at: int | None = None
    usage: e.Usage | None = None
    reply: str | None = None
    """The class of a model's reply, by its stored name."""
    output: Any = None
    failure: Failure | None = None
    kept: dict[object, Any] = field(default_factory=dict[object, Any])


@dataclass(slots=True, eq=False)
class Waited:
    """A wait that was opened, maybe by another process, and how it closed."""

    run: str
    agent: str
    run_span: RunSpan | None
    step: e.StepId
    opened_us: int
    waits_for: e.WaitFor
    name: str
    tool: str | None
    """The tool, where the question is an approval of a call."""
    rule: str | None
    closed_us: int = 0
    how: e.WaitEnd | None = None
    by: str | None = None
    answer: Any = None


class Observer:
    """An observer of runs. Every method does nothing by default, and must be quick: the run waits for it.

    They are called on the loop that advances the run; an attempt that commits with a transaction ends in a thread.
    """

    def trace(self) -> str | None:
        """The trace of the caller that starts a run here, in W3C's form, for the record."""
        return None

    def began(self, run_span: RunSpan) -> str | None:
        """A run was leased; returns the trace of this span, in W3C's form, for the record."""
        return None

    def ended(self, run_span: RunSpan) -> None:
        """A run was released."""

    def attempted(self, attempt: Attempt) -> None:
        """An attempt began."""

    def applying(self, attempt: Attempt) -> AbstractContextManager[Any]:
        """Entered around the call of an attempt, in its own context."""
        return nullcontext()

    def came(self, attempt: Attempt) -> None:
        """An attempt ended, with or without an outcome."""

    def waits(self, wait: Waited) -> None:
        """A wait was opened."""

    def waited(self, wait: Waited) -> None:
        """A wait closed."""

    def rejected(self, run: str, agent: str, name: str, verdict: e.Verdict, run_span: RunSpan | None) -> None:
        """A contract rejected an intention."""


_observers: list[Observer] = []


def observe(observer: Observer) -> Callable[[], None]:
    """Register an observer for every run that is advanced in this process; returns the function that removes it.

    Rehearsals and replays are not published.
    """
    _observers.append(observer)

    def stop() -> None:
        if observer in _observers:
            _observers.remove(observer)

    return stop


def trace_here() -> str | None:
    """The trace that the code is in that starts a run, where an observer knows of one."""
    for observer in _observers:
        with _harmless():
            if (trace := observer.trace()) is not None:
                return trace
    return None


@contextmanager
def _harmless() -> Generator[None]:
    """Suppresses and logs an observer's errors."""
    try:
        yield
    except Exception:
        logger.warning("an observer failed, and the run continues", exc_info=True)


# listening ------------------------------------------------------------------------------------------


def watch(ex: Execution) -> Watch | None:
    """Listens to the appends of an execution, if there are observers."""
    if not _observers or ex.engine.stand_in is not None:
        ex.log.listener = None
        return None
    known = ex.log.listener
    if not isinstance(known, Watch):
        known = ex.log.listener = Watch(ex)
    known.ex = ex
    return known


def taken(ex: Execution, event: e.RunTaken, *, started: e.RunStarted | None = None, warm: bool = False) -> e.RunTaken:
    """A run is taken: the event as it is to be written, with its worker, and the trace of its run span."""
    trace = None if (found := watch(ex)) is None else found.begin(event, started, warm=warm)
    return replace(event, trace=trace, host=ex.engine.host, slots=ex.engine.slots)


def end_span(ex: Execution | None, advanced: RunOutcome | None = None, *, error: BaseException | None = None) -> None:
    """A run is released. One that waits in memory is observed again when it is leased again."""
    if ex is not None and isinstance(ex.log.listener, Watch):
        ex.log.listener.end(advanced, error)


def applying(ex: Execution, place: ToolStep, intent: Intent) -> AbstractContextManager[Any]:
    """Surrounds the call of an attempt."""
    found = ex.log.listener
    attempt = found.attempts.get((place.id, place.attempt)) if isinstance(found, Watch) else None
    if attempt is None:
        return _NOWHERE
    attempt.fn = intent.fn
    around = [observer for observer in _observers if type(observer).applying is not Observer.applying]
    return _within(attempt, around) if around else _NOWHERE


_NOWHERE: Final = nullcontext()


@contextmanager
def _within(attempt: Attempt, observers: Sequence[Observer]) -> Generator[None]:
    with ExitStack() as within:
        for observer in observers:
            with _harmless():
                within.enter_context(observer.applying(attempt))
        yield


class Watch:
    """One observed run: turns its events into calls of the observers."""

    def __init__(self, ex: Execution) -> None:
        self.ex = ex
        self.run_span: RunSpan | None = None
        self.attempts: dict[tuple[e.StepId, int], Attempt] = {}
        self._intended: dict[e.StepId, tuple[e.StepIntended, Mapping[str, Any]]] = {}
        self._open: dict[e.StepId, Waited] = {}

    def begin(self, event: e.RunTaken, started: e.RunStarted | None, *, warm: bool) -> str | None:
        ex = self.ex
        if self.run_span is not None:
            self.end(None, None)
        facts = ex.log.fold.facts
        run_span = self.run_span = RunSpan(ex.run_id, ex.agent.name, event.at, event.epoch, event.build)
        if started is not None:
            run_span.parent, run_span.trace = started.parent, started.trace
        else:
            run_span.parent, run_span.trace = facts.parent, _trace_of(ex)
            run_span.replayed = 0 if warm else sum(step.status in OVER for step in ex.record.steps.values())
        for wait in facts.waits.values():
            self._open.setdefault(wait.step, self._waited(wait)).run_span = run_span
        traces: list[str] = []
        self._tell(lambda observer: traces.extend(filter(None, [observer.began(run_span)])))
        return traces[0] if traces else None

    def end(self, advanced: RunOutcome | None, error: BaseException | None) -> None:
        run_span, self.run_span = self.run_span, None
        now = self.ex.now_us()
        for attempt in self.attempts.values():
            attempt.ended_us = now
            self._tell(lambda observer, attempt=attempt: observer.came(attempt))  # type: ignore[misc]
        self.attempts.clear()
        if run_span is None:
            return
        run_span.ended_us = now
        if advanced is not None:
            run_span.status = _status(advanced)
            run_span.failure = run_span.failure or advanced.failure
        elif error is not None:
            run_span.failure = describe(error)
        self._tell(lambda observer: observer.ended(run_span))

    def _tell(self, tell: Callable[[Observer], object]) -> None:
        for observer in tuple(_observers):
            with _harmless():
                tell(observer)

    # appended events --------------------------------------------------------------------------

    def appended(self, entries: Sequence[Entry]) -> None:
        """Something was written, or is about to be committed."""
        with _harmless():
            for event, values in entries:
                hear = _HEARD.get(type(event))
                if hear is not None:
                    hear(self, event, values or {})

    def _intends(self, event: e.StepIntended, values: Mapping[str, Any]) -> None:
        if event.verdict is not None and event.verdict.ruling == "reject":
            self._reject(event.name, event.verdict)
        elif event.sort in _ATTEMPTED:
            self._intended[event.step] = event, values
            if len(self._intended) > _INTENDED_MAX:
                del self._intended[next(iter(self._intended))]  # the fold knows it too

    def _starts(self, event: e.StepStarted, values: Mapping[str, Any]) -> None:
        self._intends(event, values)
        self._attempted(event, values)

    def _edited(self, event: e.StepEdited, values: Mapping[str, Any]) -> None:
        if event.step in self._intended:
            intended, before = self._intended[event.step]
            self._intended[event.step] = intended, {**before, **values}

    def _step_ended(self, event: e.StepEnded, values: Mapping[str, Any]) -> None:
        if event.verdict is not None and event.verdict.ruling == "reject":
            self._reject(self._intention(event.step)[0], event.verdict)

    def _closed(self, event: e.WaitClosed, values: Mapping[str, Any]) -> None:
        wait = self._open.pop(event.step, None)
        if wait is not None:
            wait.closed_us, wait.how, wait.by, wait.answer = event.at, event.how, event.by, values.get("answer")
            self._tell(lambda observer: observer.waited(wait))

    def _failed(self, event: e.RunFailed, values: Mapping[str, Any]) -> None:
        failure = values.get("failure")
        if self.run_span is not None and isinstance(failure, Failure):
            self.run_span.failure = failure

    def _reject(self, name: str, verdict: e.Verdict) -> None:
        ex = self.ex
        self._tell(lambda observer: observer.rejected(ex.run_id, ex.agent.name, name, verdict, self.run_span))

    def _intention(self, step: e.StepId) -> tuple[str, e.Sort]:
        """The name and the sort of a step."""
        known = self._intended[step][0] if step in self._intended else self.ex.log.fold.step(step)
        return ("", "wait") if known is None else (known.name, known.sort)

    def _attempted(self, event: e.Started, _: Mapping[str, Any]) -> None:
        ex = self.ex
        started = event.step, event.attempt, event.key, event.at
        attempt = Attempt(ex.run_id, ex.agent.name, self.run_span, *started)
        if event.step in self._intended:
            intended, values = self._intended[event.step]
            attempt.name, attempt.sort, attempt.effect = intended.name, intended.sort, intended.effect
            attempt.verdict, attempt.arguments = intended.verdict, values.get("arguments") or {}
        elif (past := ex.log.fold.step(event.step)) is not None:
            # Another execution intended it, so that it holds.
            attempt.name, attempt.sort, attempt.effect, attempt.asked = past.name, past.sort, past.effect, past.asked
            with contextlib.suppress(KillickError):
                data = ex.engine.log.data(ex.run_id, past.edited or past.intended)
                attempt.arguments = data.get("arguments") or {}
        attempt.asked = attempt.asked or (attempt.verdict is not None and attempt.verdict.ruling == "ask")
        self.attempts[event.step, event.attempt] = attempt
        self._tell(lambda observer: observer.attempted(attempt))

    def _came(self, event: e.AttemptEnded, values: Mapping[str, Any]) -> None:
        attempt = self.attempts.pop((event.step, event.attempt), None)
        if event.retry_at is None and event.outcome != "unknown":
            self._intended.pop(event.step, None)
        if attempt is None:
            return
        attempt.ended_us, attempt.outcome, attempt.usage = event.at, event.outcome, event.usage
        attempt.limited, attempt.retry_at = event.limited, event.retry_at
        attempt.output, attempt.reply = values.get("output"), values.get("reply")
        attempt.failure = values.get("failure")
        self._tell(lambda observer: observer.came(attempt))

    def _waits(self, event: e.WaitOpened, _: Mapping[str, Any]) -> None:
        if event.step in self._open:
            return  # the same, asked of others or again
        wait = self._open[event.step] = self._waited(event)
        self._tell(lambda observer: observer.waits(wait))

    def _waited(self, opened: Any) -> Waited:
        """Of a wait that was opened now, or that is open on record."""
        name, sort = self._intention(opened.step)
        is_of_call = opened.waits_for in ("answer", "settlement") and sort != "wait"
        return Waited(
            self.ex.run_id, self.ex.agent.name, self.run_span, opened.step, opened.at, opened.waits_for,
            opened.name, tool=name or None if is_of_call else None, rule=opened.rule,
        )  # fmt: skip


_HEARD: Final[Mapping[type[e.Event], Callable[[Watch, Any, Mapping[str, Any]], None]]] = {
    e.StepIntended: Watch._intends,  # pyright: ignore[reportPrivateUsage]
    e.StepStarted: Watch._starts,  # pyright: ignore[reportPrivateUsage]
    e.StepEdited: Watch._edited,  # pyright: ignore[reportPrivateUsage]
    e.StepEnded: Watch._step_ended,  # pyright: ignore[reportPrivateUsage]
    e.AttemptStarted: Watch._attempted,  # pyright: ignore[reportPrivateUsage]
    e.AttemptEnded: Watch._came,  # pyright: ignore[reportPrivateUsage]
    e.WaitOpened: Watch._waits,  # pyright: ignore[reportPrivateUsage]
    e.WaitClosed: Watch._closed,  # pyright: ignore[reportPrivateUsage]
    e.RunFailed: Watch._failed,  # pyright: ignore[reportPrivateUsage]
}
"""The handler of each event."""


def _trace_of(ex: Execution) -> str | None:
    """The trace that a run belongs to: of its caller, or of its own first span."""
    for recorded in ex.engine.log.read(ex.run_id, limit=_TRACE_WITHIN):
        if isinstance(recorded.event, e.RunStarted | e.RunTaken) and recorded.event.trace is not None:
            return recorded.event.trace
    return None


def _status(advanced: RunOutcome) -> str:
    if advanced.left:
        return "left"
    if advanced.renewed_as is not None:
        return "renewed"
    return "diverged" if advanced.diverged is not None else advanced.status
