"""`kd.run` and `kd.start`: a run from its id and input to its outcome, or to a handle."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Concatenate, Final, Generic, ParamSpec, Protocol, TypedDict, TypeVar, Unpack, cast, overload

import msgspec

from killick.agents.runtime import Runtime
from killick.blocking import Awaits, Blocks, InThread, OnLoop, Twin
from killick.definitions.agents import AGENTS, Agent, AnyAgent
from killick.engine import renewals
from killick.engine.claims import ReadRun, Start
from killick.engine.engine import Engine
from killick.engine.observers import trace_here
from killick.engine.outcome import RunOutcome, ended
from killick.engine.steps.children import first_entries
from killick.engine.steps.transaction import joining
from killick.engine.steps.workspace_folders import refuse_shared
from killick.engine.views import RunInfo, Wait
from killick.engine.waits import waits
from killick.errors import (
    DeclarationRefused,
    HeadMoved,
    KeyRefused,
    KillickError,
    LogError,
    RunCancelled,
    RunDiverged,
    RunExists,
    RunFailed,
    RunMismatch,
    RunPaused,
    RunWaiting,
)
from killick.history.run_info import info, paused_because, waits_of
from killick.log import Recorded
from killick.logger import get_logger
from killick.model import events as e
from killick.model.chunks import through_codec, unpack
from killick.model.facts import LIVE
from killick.model.fold import FOLD
from killick.model.state import State
from killick.model.typed import convert
from killick.store.protocol import is_held
from killick.store.records import ENDED, Opening, RunQuery

P = ParamSpec("P")
R = TypeVar("R")
I = TypeVar("I")  # noqa: E741
O = TypeVar("O")  # noqa: E741

logger: Final = get_logger("killick")
_FOLLOW_SECONDS: Final = 0.1


class RunOptions(TypedDict, total=False):
    """The options of `kd.run`."""

    id: str | None
    priority: int | None
    tags: Sequence[str]
    resume: bool
    subject: str | None
    by: str | None


class StartOptions(TypedDict, total=False):
    """The options of `kd.start`."""

    id: str | None
    priority: int | None
    tags: Sequence[str]
    by: str | None
    tx: Any
    subject: str | None


class RunMethod(Protocol):
    """`kd.run` of a blocking client."""

    @overload
    def __call__(self, agent: Agent[None, O], **options: Unpack[RunOptions]) -> O: ...
    @overload
    def __call__(self, agent: Agent[I, O], input: I, **options: Unpack[RunOptions]) -> O: ...
    @overload
    def __call__(self, agent: Agent[Any, O], *, id: str) -> O: ...


class AsyncRunMethod(Protocol):
    """`kd.run` of an async client."""

    @overload
    async def __call__(self, agent: Agent[None, O], **options: Unpack[RunOptions]) -> O: ...
    @overload
    async def __call__(self, agent: Agent[I, O], input: I, **options: Unpack[RunOptions]) -> O: ...
    @overload
    async def __call__(self, agent: Agent[Any, O], *, id: str) -> O: ...


class StartMethod(Protocol):
    """`kd.start` of a blocking client."""

    @overload
    def __call__(self, agent: Agent[None, O], **options: Unpack[StartOptions]) -> Handle[O]: ...
    @overload
    def __call__(self, agent: Agent[I, O], input: I, **options: Unpack[StartOptions]) -> Handle[O]: ...


class AsyncStartMethod(Protocol):
    """`kd.start` of an async client."""

    @overload
    async def __call__(self, agent: Agent[None, O], **options: Unpack[StartOptions]) -> AsyncHandle[O]: ...
    @overload
    async def __call__(self, agent: Agent[I, O], input: I, **options: Unpack[StartOptions]) -> AsyncHandle[O]: ...


def run_method(body: Callable[..., Coroutine[Any, Any, Any]]) -> Twin[RunMethod, AsyncRunMethod]:
    """Types the method that runs an agent by its input and result."""
    return cast("Twin[RunMethod, AsyncRunMethod]", OnLoop(body))


def start_method(body: Callable[..., Any]) -> Twin[StartMethod, AsyncStartMethod]:
    """Types the method that starts an agent by its input and result."""
    return cast("Twin[StartMethod, AsyncStartMethod]", InThread(body))


def handle_method(
    body: Callable[Concatenate[Any, P], AnyHandle[Any]],
) -> Twin[Callable[P, Handle[Any]], Callable[P, Coroutine[Any, Any, AsyncHandle[Any]]]]:
    """Types a method whose handle is of the client's kind."""
    method: Any = InThread(body)
    return method  # type: ignore[no-any-return]


async def run_to_outcome(
    runtime: Runtime, agent: AnyAgent, input: Any, id: str | None, priority: int | None, tags: Sequence[str],  # noqa: A002
    resume: bool, subject: str | None, by: str | None = None,
) -> Any:  # fmt: skip
    """Runs an agent on the running loop; returns its result."""
    agent = named(agent)
    engine, executor = runtime.engine, runtime.executor()
    looks = id is not None and id not in executor.warm
    opening = runtime.store.opening(id, fold=FOLD) if id is not None and looks else None
    run, start, read = id or "", None, _read(engine, agent, input, opening)
    if read is None:
        is_new = looks and opening is None
        begun = begin(engine, agent, input, id, priority, tags, resume=resume, is_new=is_new, by=by, subject=subject)
        run, start = begun
        row = runtime.store.index(run) if start is None else None
        if row is not None and row.status in ENDED:
            logger.warning("%s: %s earlier; this is its recorded outcome", run, row.status)
            return outcome(engine, agent, ended(engine, run))
    try:
        advanced = await executor.advance(run, start=start, agent=agent, sit_out=True, read=read)
    except HeadMoved as moved:
        raise _key_changed(run, moved) from moved
    while advanced.renewed_as is not None:
        advanced = await executor.advance(advanced.renewed_as, agent=agent, sit_out=True)
    return outcome(runtime.engine, agent, advanced)


def _key_changed(run: str, moved: HeadMoved) -> KillickError:
    """The refusal of a start whose data subject's key was changed or destroyed at that moment."""
    if moved.run == run:
        return moved
    return KeyRefused(run, "the key of its data subject was changed at this moment; start it again")


def create_run(
    runtime: Runtime, agent: AnyAgent, input: Any, id: str | None, priority: int | None, tags: Sequence[str],  # noqa: A002
    by: str | None, tx: Any, subject: str | None,
) -> str:  # fmt: skip
    """Creates a run, durably, and returns its id."""
    run, start = begin(runtime.engine, agent, input, id, priority, tags, by=by, subject=subject)
    if start is not None:
        log = runtime.log.begin(run)
        if tx is None:
            try:
                log.append(*first_entries(*start))
            except HeadMoved as moved:
                raise _key_changed(run, moved) from moved
            except RunExists:
                # Another caller was faster, or our own append succeeded unseen: the same input is the same run.
                run, start = begin(runtime.engine, agent, input, run, priority, tags, by=by)
                if start is not None:
                    raise  # its log was pruned; an id is never used again
        else:
            [made] = joining(runtime.store, tx).append([log.built(first_entries(*start))])
            if isinstance(made, LogError):
                raise made
    return run


class AnyHandle(Generic[O]):
    """A started run: its id, state, events and result."""

    def __init__(self, runtime: Runtime, agent: AnyAgent | str, run: str) -> None:
        self._runtime = runtime
        self._agent = agent
        self.id = run

    def __repr__(self) -> str:
        return f"<killick.{type(self).__name__} of run {self.id}>"

    def _blocking(self, work: Coroutine[Any, Any, R]) -> R:
        return self._runtime.blocking(work)

    @InThread
    def info(self) -> RunInfo:
        """Returns the current state of the run, in short."""
        return info(self._runtime.log, self.id)

    @InThread
    def state(self) -> State:
        """Returns the complete state of the run."""
        return self._runtime.log.state(self.id)

    @OnLoop
    async def result(self, timeout: float | None = None) -> O:
        """Waits for the run's result, which a worker produces. Raises TimeoutError when the time is up, RunFailed,
        RunCancelled."""
        clock = self._runtime.clock
        until = None if timeout is None else clock.monotonic() + timeout
        while True:
            status, advanced = await asyncio.to_thread(self._ended)
            if advanced is not None:
                result: O = outcome(self._runtime.engine, named(self._agent), advanced)
                return result
            if until is not None and clock.monotonic() >= until:
                raise TimeoutError(f"{self.id}: still {status} after {timeout:g} s; see `killick show {self.id}`")
            await asyncio.sleep(self._nap_seconds)

    def _ended(self) -> tuple[str | None, RunOutcome | None]:
        """The status of its latest renewal, and the outcome if that has ended."""
        runtime = self._runtime
        run = renewals.latest(runtime.log, self.id)
        row = runtime.store.index(run)
        advanced = ended(runtime.engine, run) if row is not None and row.status in ENDED else None
        is_over = advanced is not None and advanced.renewed_as is None
        return None if row is None else row.status, advanced if is_over else None

    def _recorded(self, after: int) -> tuple[Sequence[Recorded], bool]:
        """Its next events, and whether there will be no others."""
        row = self._runtime.store.index(self.id)
        recorded = self._runtime.log.read(self.id, after=after)
        return recorded, not recorded and row is not None and row.status in ENDED

    @property
    def _nap_seconds(self) -> float:
        return self._runtime.clock.nap_seconds(_FOLLOW_SECONDS)


class Handle(AnyHandle[O], Blocks):
    """A started run of a blocking client: its id, state, events and result."""

    def follow(self, after: int = 0) -> Iterator[Recorded]:
        """Yields the events of the run as they are committed, until it has ended."""
        is_over = False
        while not is_over:
            recorded, is_over = self._recorded(after)
            yield from recorded
            after = recorded[-1].seq if recorded else after
            if not recorded and not is_over:
                time.sleep(self._nap_seconds)


class AsyncHandle(AnyHandle[O], Awaits):
    """A started run of an async client: its id, state, events and result."""

    async def follow(self, after: int = 0) -> AsyncIterator[Recorded]:
        """Yields the events of the run as they are committed, until it has ended."""
        is_over = False
        while not is_over:
            recorded, is_over = await asyncio.to_thread(self._recorded, after)
            for each in recorded:
                yield each
            after = recorded[-1].seq if recorded else after
            if not recorded and not is_over:
                await asyncio.sleep(self._nap_seconds)


# beginning and ending -----------------------------------------------------------------------------


def named(agent: AnyAgent | str) -> AnyAgent:
    """Returns an agent, given itself or its name."""
    if not isinstance(agent, str | Agent):  # pyright: ignore[reportUnnecessaryIsInstance]
        what = getattr(agent, "__name__", repr(agent))
        raise DeclarationRefused(what, "is not an agent; declare it with @killick.agent, or give the name of one")
    return AGENTS.get(agent) if isinstance(agent, str) else agent


def begin(
    engine: Engine,
    agent: AnyAgent,
    input: Any,  # noqa: A002
    id: str | None,  # noqa: A002
    priority: int | None,
    tags: Sequence[str],
    *,
    resume: bool = False,
    by: str | None = None,
    is_new: bool = False,
    subject: str | None = None,
) -> tuple[str, Start | None]:
    """The run's id, and how to create the run if the store does not have it. `is_new`: the caller has looked."""
    waits.refuse_own(id)
    refuse_shared(agent.options.workspace, subject)
    if id is not None and not is_new and engine.store.head(id) is not None:
        _refuse_mismatch(engine, id, agent, input)
        return renewals.latest(engine.log, id), None
    value = agent.checked(through_codec(input, at="input"))  # as the agent sees it, now and on replay
    tag = _input_tag(engine, agent, value, subject) if id is None else None
    if tag is not None and resume and (found := _unfinished(engine, agent, tag)) is not None:
        return renewals.latest(engine.log, found), None
    run = id or engine.ids.new(agent.name)
    if id is not None and (found := renewals.archived(engine.log, run)) is not None:
        _refuse_mismatch(engine, found, agent, None)
        return found, None  # its first logs are archived
    started = e.RunStarted(
        at=engine.clock.now_us(),
        run=run,
        agent=agent.name,
        build=engine.build(agent),
        priority=agent.options.priority if priority is None else priority,
        tags=tuple(tags) if id is not None or tag is None else (*tags, tag),
        by=waits.who(by, run),
        trace=trace_here(),
        key=None if subject is None else engine.log.key_for(subject, run),
    )
    return run, Start(started, agent, value)


def _read(engine: Engine, agent: AnyAgent, input: Any, opening: Opening | None) -> ReadRun | None:  # noqa: A002
    """A run that has not ended, from one read of its whole log; None for any other."""
    if opening is None or opening.snapshot is not None:
        return None
    waits.refuse_own(run := opening.head.run)
    log = engine.log.opened(opening)
    facts, rows = log.fold.facts, log.rows
    row = rows[facts.input - 1] if rows is not None and facts.input <= len(rows) else None
    if facts.ended or row is None or row.data is None:
        return None
    _refuse_other(run, agent, input, facts.agent, unpack(row.data, engine.store.pieces))
    return opening.head, log


def _refuse_mismatch(engine: Engine, run: str, agent: AnyAgent, input: Any) -> None:  # noqa: A002
    """Raises RunMismatch if a known run has another agent or input."""
    log = engine.log
    first = log.event(run, 1)
    recorded = first.agent if isinstance(first, e.RunStarted) else ""
    forked = log.head(run).parent is not None
    seq = log.state(run).fold.facts.input if forked else 1  # a fork may have an input of its own
    _refuse_other(run, agent, input, recorded, log.data(run, seq))


def _refuse_other(run: str, agent: AnyAgent, input: Any, recorded: str, data: Mapping[str, Any]) -> None:  # noqa: A002
    if recorded != agent.name and recorded not in agent.options.aliases:
        raise RunMismatch(run, f"agent ({recorded})")
    if input is None:
        return  # the recorded one
    value = agent.checked(through_codec(input, at="input"))
    if agent.digest_of(agent.checked(data.get("input"))) != agent.digest_of(value):
        raise RunMismatch(run, "input")


def _unfinished(engine: Engine, agent: AnyAgent, tag: str) -> str | None:
    """A run of the same agent and input that has not ended and that no process holds."""
    query = RunQuery(agent=agent.name, tag=tag, status=LIVE)
    for row in engine.store.runs(query, limit=10):
        head = engine.store.head(row.run)
        if head is not None and not is_held(engine.store, head):
            return row.run
    return None


def _input_tag(engine: Engine, agent: AnyAgent, value: Any, subject: str | None) -> str:
    """The tag that identifies an unfinished run of the same input and the same data subject."""
    key = engine.store.secret_key
    if subject is not None:
        name = engine.log.key_for(subject, "")
        assert engine.log.keys is not None
        key = engine.log.keys.cipher(name).digest_key
    return f"input:{agent.digest_of(value, key).hex()[:16]}"


def outcome(engine: Engine, agent: AnyAgent, advanced: RunOutcome) -> Any:
    """Returns the result of an outcome as `run` does, or raises its error."""
    run, log = advanced.run, engine.log
    if advanced.status == "completed":
        returns = Any if agent.is_machine else agent.returns
        return advanced.result if returns is Any else convert(advanced.result, returns, at="result")
    if advanced.status == "failed":
        error = RunFailed(run, advanced.failure, step=advanced.step, not_undone=advanced.not_undone)
        raise error from advanced.failure.error()
    if advanced.status == "cancelled":
        raise RunCancelled(run, not_undone=advanced.not_undone)
    if advanced.status == "paused":
        raise RunPaused(run, because=paused_because(log, run))
    if advanced.diverged is not None:
        step, recorded, found, builds = advanced.diverged
        raise RunDiverged(run, step, recorded=recorded, found=found, builds=builds)
    state = log.state(run)
    if (crashes := state.fold.facts.crashes) is not None and crashes.quarantined:
        died = f"quarantined after its process died {crashes.deaths} times in a row"
        raise RunWaiting(run, (), why=f"a person: {died}; `killick show {run}`, then `killick resume {run}`")
    raise RunWaiting(run, _waits_below(engine, state))


def _waits_below(engine: Engine, state: State) -> Sequence[Wait]:
    """The waits of a run; in place of a child, the waits of that child."""
    found: list[Wait] = []
    for wait in waits_of(engine.store, state):
        child = engine.log.state(wait.name) if wait.waits_for == "child" else None
        if child is not None and child.fold.facts.paused:
            why = paused_because(engine.log, wait.name)
            prompt = f"{wait.name}, which is paused{f' ({why})' if why else ''}; resume it"
            wait = msgspec.structs.replace(wait, prompt=prompt)
        found += ([] if child is None else _waits_below(engine, child)) or [wait]
    return found
