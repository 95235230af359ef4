"""`kd.run` and `kd.start`: a run from its id and input to its outcome, or to a handle."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterator, Sequence
from typing import Any, Final, Generic, TypeVar, overload

import msgspec

from killick.agents.runtime import Runtime
from killick.definitions.agents import AGENTS, Agent, AnyAgent
from killick.engine import renewals
from killick.engine.claims import Start
from killick.engine.engine import Engine
from killick.engine.observers import trace_here
from killick.engine.outcome import RunOutcome, ended, paused_because
from killick.engine.steps import waits
from killick.engine.steps.children import first_entries
from killick.engine.steps.transaction import joining
from killick.engine.views import RunInfo, Wait
from killick.errors import (
    DeclarationRefused,
    LogError,
    RunCancelled,
    RunDiverged,
    RunExists,
    RunFailed,
    RunMismatch,
    RunPaused,
    RunWaiting,
)
from killick.history.run_info import info, waits_of
from killick.log import Recorded
from killick.logger import get_logger
from killick.model import events as e
from killick.model.chunks import through_codec
from killick.model.state import State
from killick.model.typed import convert
from killick.store.protocol import is_held
from killick.store.records import ENDED, RunQuery

I = TypeVar("I")  # noqa: E741
O = TypeVar("O")  # noqa: E741

logger: Final = get_logger("killick")
_FOLLOW_SECONDS: Final = 0.1


class RunMethod:
    """`kd.run(agent, input, id=…)` and `await kd.run.soon(…)`."""

    __slots__ = ("_runtime",)

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    @overload
    def __call__(
        self, agent: Agent[None, O], *, id: str | None = None, priority: int | None = None, tags: Sequence[str] = (),
        fresh: bool = False,
    ) -> O: ...  # fmt: skip
    @overload
    def __call__(
        self, agent: Agent[I, O], input: I, *, id: str | None = None, priority: int | None = None,
        tags: Sequence[str] = (), fresh: bool = False,
    ) -> O: ...  # fmt: skip
    def __call__(self, agent: AnyAgent, input: Any = None, **options: Any) -> Any:  # noqa: A002
        """Run an agent here and now, and return its result.

        A known id resumes that run; one that has ended returns its recorded result. Timers, backoffs and rate limits
        are waited out. Raises RunWaiting when only a person or an outside event can wake it, RunFailed with the
        failure.
        """
        return self._runtime.blocking(self._soon(agent, input, **options))

    @overload
    def soon(
        self, agent: Agent[None, O], *, id: str | None = None, priority: int | None = None, tags: Sequence[str] = (),
        fresh: bool = False,
    ) -> Awaitable[O]: ...  # fmt: skip
    @overload
    def soon(
        self, agent: Agent[I, O], input: I, *, id: str | None = None, priority: int | None = None,
        tags: Sequence[str] = (), fresh: bool = False,
    ) -> Awaitable[O]: ...  # fmt: skip
    def soon(self, agent: AnyAgent, input: Any = None, **options: Any) -> Awaitable[Any]:  # noqa: A002
        """The same, on the caller's own loop."""
        return self._soon(agent, input, **options)

    async def _soon(
        self, agent: AnyAgent, input: Any, *, id: str | None = None, priority: int | None = None,  # noqa: A002
        tags: Sequence[str] = (), fresh: bool = False,
    ) -> Any:  # fmt: skip
        runtime = self._runtime
        agent = named(agent)
        run, start = begin(runtime.engine, agent, input, id, priority, tags, fresh)
        if start is None:
            row = runtime.store.index(run)
            if row is not None and row.status in ENDED:
                logger.warning("%s: %s earlier; this is its recorded outcome", run, row.status)
                return outcome(runtime.engine, agent, ended(runtime.engine, run))
        executor = runtime.executor()
        advanced = await executor.advance(run, start=start, agent=agent, sit_out=True)
        while advanced.renewed_as is not None:
            advanced = await executor.advance(advanced.renewed_as, agent=agent, sit_out=True)
        return outcome(runtime.engine, agent, advanced)


class StartMethod:
    """`kd.start(agent, input, id=…)` and `await kd.start.soon(…)`."""

    __slots__ = ("_runtime",)

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    @overload
    def __call__(
        self, agent: Agent[None, O], *, id: str | None = None, priority: int | None = None, tags: Sequence[str] = (),
        by: str | None = None, tx: Any = None,
    ) -> Handle[O]: ...  # fmt: skip
    @overload
    def __call__(
        self, agent: Agent[I, O], input: I, *, id: str | None = None, priority: int | None = None,
        tags: Sequence[str] = (), by: str | None = None, tx: Any = None,
    ) -> Handle[O]: ...  # fmt: skip
    def __call__(
        self, agent: AnyAgent, input: Any = None, *, id: str | None = None, priority: int | None = None,  # noqa: A002
        tags: Sequence[str] = (), by: str | None = None, tx: Any = None,
    ) -> Handle[Any]:  # fmt: skip
        """Create a run, durably, for a worker or a later `advance`; the same id again gives the same run.

        `by` names the caller, for the record. With `tx`, the caller's own connection to the store's database, the run
        is created when the caller commits.
        """
        runtime = self._runtime
        agent = named(agent)
        run, start = begin(runtime.engine, agent, input, id, priority, tags, True, by)
        if start is not None:
            log = runtime.log.begin(run)
            if tx is None:
                try:
                    log.append(*first_entries(*start))
                except RunExists:
                    # Another caller was faster, or our own append succeeded unseen: the same input is the same run.
                    run, _ = begin(runtime.engine, agent, input, run, priority, tags, True, by)
            else:
                [made] = joining(runtime.store, tx).append([log.built(*first_entries(*start))])
                if isinstance(made, LogError):
                    raise made
        return Handle(runtime, agent, run)

    @overload
    def soon(
        self, agent: Agent[None, O], *, id: str | None = None, priority: int | None = None, tags: Sequence[str] = (),
        by: str | None = None, tx: Any = None,
    ) -> Awaitable[Handle[O]]: ...  # fmt: skip
    @overload
    def soon(
        self, agent: Agent[I, O], input: I, *, id: str | None = None, priority: int | None = None,
        tags: Sequence[str] = (), by: str | None = None, tx: Any = None,
    ) -> Awaitable[Handle[O]]: ...  # fmt: skip
    def soon(self, agent: AnyAgent, input: Any = None, **options: Any) -> Awaitable[Handle[Any]]:  # noqa: A002
        """The same, without blocking the loop."""
        return asyncio.to_thread(lambda: self(agent, input, **options))


class Handle(Generic[O]):
    """A started run: its state, its events and its result."""

    def __init__(self, runtime: Runtime, agent: AnyAgent | str, run: str) -> None:
        self._runtime = runtime
        self._agent = agent
        self.id = run

    def info(self) -> RunInfo:
        """The current state of the run, in short."""
        return info(self._runtime.log, self.id)

    def state(self) -> State:
        """Its state."""
        return self._runtime.log.state(self.id)

    def result(self, timeout: float | None = None) -> O:
        """Waits for the run's result, which a worker produces. Raises TimeoutError when the time is up."""
        runtime = self._runtime
        until = None if timeout is None else runtime.clock.monotonic() + timeout
        while True:
            run = renewals.latest(runtime.log, self.id)
            row = runtime.store.index(run)
            if row is not None and row.status in ENDED and (advanced := ended(runtime.engine, run)).renewed_as is None:
                result: O = outcome(runtime.engine, named(self._agent), advanced)
                return result
            if until is not None and runtime.clock.monotonic() >= until:
                raise TimeoutError(f"{self.id}: has not ended within {timeout:g} s; it is {row and row.status}")
            time.sleep(runtime.clock.nap_seconds(_FOLLOW_SECONDS))

    def follow(self, after: int = 0) -> Iterator[Recorded]:
        """Its events as they are committed, until it has ended."""
        runtime = self._runtime
        while True:
            row = runtime.store.index(self.id)
            recorded = runtime.log.read(self.id, after=after)
            yield from recorded
            after = recorded[-1].seq if recorded else after
            if not recorded:
                if row is not None and row.status in ENDED:
                    return
                time.sleep(runtime.clock.nap_seconds(_FOLLOW_SECONDS))


# beginning and ending -----------------------------------------------------------------------------


def named(agent: AnyAgent | str) -> AnyAgent:
    """An agent, by itself or by its name."""
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
    fresh: bool,
    by: str | None = None,
) -> tuple[str, Start | None]:
    """The run's id, and how to create the run if the store does not have it."""
    waits.refuse_own(id)
    value = agent.checked(through_codec(input, at="input"))  # as the agent sees it, now and on replay
    if id is None and not fresh:
        id = _unfinished(engine, agent, value)  # noqa: A001
    run = id or engine.ids.new(agent.name)
    if engine.store.head(run) is not None:
        _refuse_mismatch(engine, run, agent, value)
        return renewals.latest(engine.log, run), None
    if id is not None and (latest := renewals.latest(engine.log, run)) != run:
        return latest, None  # its first logs are archived
    started = e.RunStarted(
        at=engine.clock.now_us(),
        run=run,
        agent=agent.name,
        build=engine.build(agent),
        priority=agent.options.priority if priority is None else priority,
        tags=tuple(tags) if id is not None else (*tags, _input_tag(agent, value)),
        by=waits.who(by, run),
        trace=trace_here(),
    )
    return run, Start(started, agent, value)


def _refuse_mismatch(engine: Engine, run: str, agent: AnyAgent, value: Any) -> None:
    """RunMismatch where a known run has another agent or another input."""
    log = engine.log
    first = log.event(run, 1)
    recorded = first.agent if isinstance(first, e.RunStarted) else ""
    if recorded != agent.name and recorded not in agent.options.aliases:
        raise RunMismatch(run, f"agent ({recorded})")
    forked = log.head(run).parent is not None
    seq = log.state(run).fold.facts.input if forked else 1  # a fork may have an input of its own
    if agent.digest_of(agent.checked(log.data(run, seq).get("input"))) != agent.digest_of(value):
        raise RunMismatch(run, "input")


def _unfinished(engine: Engine, agent: AnyAgent, value: Any) -> str | None:
    """A run of the same agent and input that has not ended and that no process holds."""
    query = RunQuery(
        agent=agent.name, tag=_input_tag(agent, value), status=("queued", "running", "waiting", "paused")
    )  # fmt: skip
    for row in engine.store.runs(query, limit=10):
        head = engine.store.head(row.run)
        if head is not None and not is_held(engine.store, head):
            logger.warning("%s: resumes this unfinished run (fresh=True starts another)", row.run)
            return row.run
    return None


def _input_tag(agent: AnyAgent, value: Any) -> str:
    """The tag by which an unfinished run of the same input is found again."""
    return f"input:{agent.digest_of(value).hex()[:16]}"


def outcome(engine: Engine, agent: AnyAgent, advanced: RunOutcome) -> Any:
    """What `run` returns or raises for the outcome of a run."""
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
    crashes = log.state(run).fold.facts.crashes
    if crashes is not None and crashes.quarantined:
        died = f"quarantined, for its process died {crashes.deaths} times in a row"
        raise RunWaiting(run, (), why=f"a person; it is {died}: `killick show {run}`, then `killick resume {run}`")
    raise RunWaiting(run, _waits_below(engine, run))


def _waits_below(engine: Engine, run: str) -> Sequence[Wait]:
    """The waits of a run; in place of a child, the waits of that child."""
    found: list[Wait] = []
    for wait in waits_of(engine.store, engine.log.state(run)):
        below: Sequence[Wait] = _waits_below(engine, wait.name) if wait.waits_for == "child" else ()
        if wait.waits_for == "child" and engine.log.state(wait.name).fold.facts.paused:
            why = paused_because(engine.log, wait.name)
            prompt = f"{wait.name}, which is paused{f' ({why})' if why else ''}; resume it"
            wait = msgspec.structs.replace(wait, prompt=prompt)
        found += below or [wait]
    return found
