"""Plays a run in a test: on an in-memory store, with a clock that only the test moves, and with fakes.

Owns where a run under test stops: when it waits, at a step, or dead. Only clock, store and tools are replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import math
import os
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Generic, Literal, TypeAlias, TypeVar, overload

from killick.archive.export import read
from killick.blocking import Awaits, Blocks, OnLoop
from killick.check.fakes import Fakes, called_for
from killick.check.samples import shown
from killick.client.client import Client
from killick.client.start import outcome
from killick.definitions.agents import Agent, AnyAgent
from killick.definitions.current import refuse_io
from killick.definitions.markers import ToolStep
from killick.definitions.policy import Duration
from killick.engine.control.inbox import Verb
from killick.engine.outcome import RunOutcome, ended
from killick.engine.steps.attempt import Applied
from killick.engine.steps.intention import Intent
from killick.engine.views import RunInfo, Wait
from killick.errors import KillickError, RunElsewhere, RunError
from killick.ids import Ids, SeededIds
from killick.log import Log
from killick.model.retry import seconds
from killick.model.state import State
from killick.replay.replay import Replay
from killick.replay.result import SECONDS, Replayed, ReplayRequest
from killick.store.memory import MemoryStore
from killick.store.protocol import Store
from killick.store.records import ENDED
from killick.testing.simulated_process import Halt, Named, PlayClock, Process

I = TypeVar("I")  # noqa: E741
O = TypeVar("O")  # noqa: E741
T = TypeVar("T")

WaitsFor: TypeAlias = Literal["person", "event", "time"]
_KINDS: Final[Mapping[str, WaitsFor]] = {
    "answer": "person", "settlement": "person", "event": "event", "time": "time",
}  # fmt: skip

LEAPS_MAX: Final = 5_000
"""The maximum number of skipped sleeps, before a run counts as endless."""


@overload
def play(
    agent: Agent[None, O], *, fakes: Mapping[Any, Any] | None = None, id: str = "run", now: datetime | None = None
) -> Playing[O]: ...
@overload
def play(
    agent: Agent[I, O], input: I, *, fakes: Mapping[Any, Any] | None = None, id: str = "run",
    now: datetime | None = None,
) -> Playing[O]: ...  # fmt: skip
def play(
    agent: AnyAgent, input: Any = None, *, fakes: Mapping[Any, Any] | None = None, id: str = "run",  # noqa: A002
    now: datetime | None = None,
) -> Playing[Any]:  # fmt: skip
    """Plays a run of an agent in a test: `async with play(…) as t`, or `with play(…) as t` without an event loop.

    fakes  by tool, model function or name: a value, a list of values in order, a function of the arguments, or an
           exception; other tools run for real. Agent code's I/O outside a step is refused
    id     the run's id, which is in its tools' idempotency keys
    now    the start time; the clock moves only by `t.advance` and by the sleeps that `t.result` skips

        with killick.testing.play(settle, claim, fakes={charge: "ok"}) as t:
            t.until_waiting()
            t.answer("approve", by="ada")
            assert t.result() == "paid"
    """
    return Playing(agent, input, Fakes(fakes), id, now)


class Playing(Generic[O]):
    """A run to be played: enter it with `async with`, or with `with`."""

    def __init__(self, agent: AnyAgent, input: Any, fakes: Fakes, run: str, now: datetime | None) -> None:  # noqa: A002
        self._given = agent, input, fakes, run, now
        self._play: _Played[O] | None = None

    async def __aenter__(self) -> Play[O]:
        self._play = Play(*self._given)
        return self._play

    async def __aexit__(self, *_: object) -> None:
        assert self._play is not None
        await self._play.end()

    def __enter__(self) -> BlockingPlay[O]:
        self._play = BlockingPlay(*self._given)
        return self._play

    def __exit__(self, *_: object) -> None:
        assert isinstance(self._play, BlockingPlay)
        self._play.close()


# the run --------------------------------------------------------------------------------------------


class _Played(Generic[O]):
    """The common part of both kinds of play."""

    def __init__(self, agent: AnyAgent, input: Any, fakes: Fakes, run: str, now: datetime | None) -> None:  # noqa: A002
        self.agent = agent
        self.fakes = fakes
        self.clock = PlayClock(None if now is None else round(now.timestamp() * 1_000_000))
        self.clock.on_nap = self._stir
        self.ids: Ids = SeededIds(7)
        self.store: Store = MemoryStore(clock=self.clock, ids=self.ids)
        self._unwatch = refuse_io()
        self._process = Process(self)
        self._dead: list[Process] = []
        self._called: list[tuple[Intent, dict[str, Any]]] = []
        self._halt: Halt | None = None
        self._held: asyncio.Future[None] | None = None
        self._stirred: asyncio.Future[None] | None = None
        self._fault: BaseException | None = None
        self.run = self._process.client.start(agent, input, id=run).id
        """The run's id."""

    # reading ----------------------------------------------------------------------------------

    @property
    def client(self) -> Client:
        """The client of the current process, for all other operations. A crash replaces it."""
        return self._process.client

    @property
    def log(self) -> Log:
        return self.client.runtime.log

    @property
    def info(self) -> RunInfo:
        """The run's info."""
        return self.client.info(self.run)

    @property
    def state(self) -> State:
        """The run's state."""
        return self.client.state(self.run)

    @property
    def waits(self) -> Sequence[Wait]:
        """The open waits of the run and of its children."""
        return [*self._waits_of(self.run)]

    def _waits_of(self, run: str) -> Iterator[Wait]:
        for wait in self.client.info(run).waits:
            below = [*self._waits_of(wait.name)] if wait.waits_for == "child" else []
            yield from below or [wait]

    @property
    def wait(self) -> Wait:
        """The only open question or message wait. Raises RunElsewhere if there is none, or several."""
        found = [wait for wait in self.waits if _KINDS.get(wait.waits_for) in ("person", "event")] or self.waits
        if len(found) != 1:
            listed = "; ".join(map(str, found))
            standing = f"has {len(found)}: {listed}" if found else self._standing()
            raise RunElsewhere(self.run, expected="one wait should be open", found=standing)
        return found[0]

    @property
    def waits_for(self) -> frozenset[WaitsFor]:
        """Who or what can wake the run: a person, an event, time. Empty if it does not wait.

        Time is a sleep, a backoff or a rate limit; a question's deadline is `t.wait.deadline_us`.
        """
        found: set[WaitsFor] = {_KINDS[wait.waits_for] for wait in self.waits if wait.waits_for in _KINDS}
        if any(self._is_delayed(listed.id) for listed in self.client.list(status="waiting")):
            found.add("time")
        return frozenset(found)

    def _is_delayed(self, run: str) -> bool:
        fold = self.client.state(run).fold
        steps = (fold.steps[index] for index in fold.facts.pending.values())
        return any((step.delayed_until or 0) > self.clock.now_us() for step in steps)

    def calls(self, of: Named) -> list[dict[str, Any]]:
        """Returns the arguments of every call of a tool or a model, in order, including failed attempts.

        of  the tool, the model function, or a name
        """
        return [arguments for intent, arguments in self._called if called_for(of, intent)]

    def _standing(self) -> str:
        """The run's position, in words."""
        info = self.info
        match info.status:
            case "completed":
                return f"has completed with {shown(self.state.result)}"
            case "waiting":
                listed = "; ".join(map(str, self.waits))
                return f"waits for {listed or ' and '.join(sorted(self.waits_for)) or 'an outside event'}"
            case status:
                return f"is {status}, at step {info.step}" if info.step else f"is {status}"

    # acting -----------------------------------------------------------------------------------

    def advance(self, duration: Duration) -> None:
        """Moves the clock. Due events happen when the run is driven next."""
        self.clock.advance(seconds(duration))

    def answer(
        self, verb: Verb, value: Any = None, *, by: str | None = None, comment: str | None = None,
        wait: Wait | str | None = None,
    ) -> None:  # fmt: skip
        """Answers a wait of the run or of a child. Raises AnswerRefused if the answer does not fit.

        verb     one of the wait's `verbs`
        value    the response, or the edited arguments
        comment  text for the record
        wait     the Wait or its id; needed if several are open
        """
        asked = [each for each in self.waits if each.verbs]
        target = asked[0].id if wait is None and len(asked) == 1 else self.run if wait is None else wait
        self.client.answer(target if isinstance(target, str) else target.id, verb, value=value, by=by, comment=comment)

    def crash(self) -> None:
        """Crashes the process: its memory is lost, and the run recovers from the store when it is driven."""
        dying = self._process
        dying.die()
        self._dead.append(dying)
        for _, head in self.store.heads():
            self.store.release(head.run, epoch=head.epoch)
        self._held = None
        self._process = Process(self)
        self._stir()

    # reports of the process -------------------------------------------------------------------

    def note(self, intent: Intent) -> None:
        """Records a call of a tool or a model."""
        try:
            arguments = copy.deepcopy(dict(intent.arguments))
        except Exception:
            arguments = dict(intent.arguments)  # a live object among the arguments; it is shown as it is
        self._called.append((intent, arguments))

    async def held(self, intent: Intent, place: ToolStep, *, returned: bool) -> None:
        """Stops here, if the test asked for it."""
        if self._halt is not None and self._halt.is_at(intent, place, returned):
            self._halt = None
            self._held = asyncio.get_running_loop().create_future()
            self._stir()
            await self._held

    async def fail(self, fault: BaseException) -> Applied:
        """Reports an error of the test itself: the run stops, and the test raises it."""
        self._fault = self._fault or fault
        self.crash()
        never: asyncio.Future[Applied] = asyncio.get_running_loop().create_future()
        return await never

    def _stir(self) -> None:
        if self._stirred is not None and not self._stirred.done():
            self._stirred.set_result(None)

    # driving ----------------------------------------------------------------------------------

    async def _drive(self, *, leaps: bool, halt: Halt | None = None) -> RunOutcome | None:
        """Drives the run until it ends or waits. None: it reached the stop, or sleeps and may not skip."""
        self.clock.leaps, self._halt, slept = leaps, halt, 0
        held, self._held = self._held, None
        if held is not None and not held.done():
            held.set_result(None)
        try:
            while True:
                process = self._process
                if (done := await self._turn(process, leaps)) is not None:
                    return done
                if process is not self._process:
                    self._halt = halt  # a step held there ended with its process
                    continue
                if halt is not None and self._halt is None:
                    return None
                if process.is_asleep:
                    if not leaps:
                        return None
                    slept += 1
                    if slept > LEAPS_MAX:
                        found = f"slept {LEAPS_MAX} times and sleeps again"
                        raise RunElsewhere(self.run, expected="should end", found=found)
                    self.clock.leap()
        finally:
            self._halt = None
            self._stirred = None

    async def _turn(self, process: Process, leaps: bool) -> RunOutcome | None:
        """Continues until something happens; returns the run's outcome, if known."""
        await self._reap()
        if process.task is None and self.info.status in ENDED:
            return ended(self.client.runtime.engine, self.run)
        if process.task is None:
            executor = process.client.runtime.executor()
            process.sits = leaps
            process.task = asyncio.get_running_loop().create_task(
                executor.advance(self.run, agent=self.agent, sit_out=leaps)
            )
        self.clock.wake_us = math.inf
        stirred = self._stirred = asyncio.get_running_loop().create_future()
        await asyncio.wait({process.task, stirred}, return_when=asyncio.FIRST_COMPLETED)
        if process is not self._process:
            await self._reap()
            if self._fault is not None:
                fault, self._fault = self._fault, None
                raise fault
            return None
        if not process.task.done():
            return None
        task, process.task = process.task, None
        advanced = task.result()
        return None if leaps and not process.sits and advanced.status == "waiting" else advanced

    async def _reap(self) -> None:
        while self._dead:
            await self._dead.pop().reap()

    async def end(self) -> None:
        """Closes everything."""
        self._held = None
        self._unwatch()
        await self._reap()
        await self._process.reap()
        self.store.close()

    @OnLoop
    async def until_waiting(self, *, leap: bool = False) -> None:
        """Drives the run until only a person, an event or time can wake it; `waits_for` says which. Raises RunElsewhere
        if it completed, and the error of `kd.run` if it ended in another way.

        leap  skip sleeps and backoffs, so that only a person or an event stops the run
        """
        advanced = await self._drive(leaps=leap)
        if advanced is None or (advanced.status == "waiting" and advanced.diverged is None):
            return
        if advanced.status == "completed":
            raise RunElsewhere(self.run, expected="should wait", found=self._standing())
        outcome(self.client.runtime.engine, self.agent, advanced)

    @OnLoop
    async def until(self, step: Named, *, returned: bool = False) -> None:
        """Drives the run until it is about to call a tool or a model. Sleeps and backoffs are skipped. The attempt is
        recorded, and nothing was called. Raises RunElsewhere if the run does not reach it.

        step      the tool, the model function, a name, or the number of a step
        returned  stop after the call instead, before its outcome is recorded: a crash there leaves an unknown outcome
        """
        halt = Halt(step, returned)
        advanced = await self._drive(leaps=True, halt=halt)
        if advanced is None:
            return
        try:
            outcome(self.client.runtime.engine, self.agent, advanced)
        except RunError as why:
            raise RunElsewhere(self.run, expected=f"should reach {halt}", found=self._standing()) from why
        raise RunElsewhere(self.run, expected=f"should reach {halt}", found=self._standing())

    @OnLoop
    async def result(self) -> O:
        """Drives the run to its end and returns its result. Sleeps, backoffs and rate limits are skipped. Raises
        RunWaiting if it waits for a person or an event, and the other errors of `kd.run`."""
        advanced = await self._drive(leaps=True)
        assert advanced is not None
        result: O = outcome(self.client.runtime.engine, self.agent, advanced)
        return result


class Play(_Played[O], Awaits):
    """A run under test. Awaiting its methods drives the run."""


class BlockingPlay(_Played[O], Blocks):
    """A run under test, without await."""

    def __init__(self, *given: Any) -> None:
        _refuse_running()
        self._runner = asyncio.Runner()
        super().__init__(*given)

    def close(self) -> None:
        """Closes everything."""
        with self._runner:
            self._blocking(self.end())

    def _blocking(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)


def _refuse_running() -> None:
    with contextlib.suppress(RuntimeError):
        asyncio.get_running_loop()
        raise KillickError("an event loop is running here; write `async with play(…)`, and await what drives the run")


# a run of production as a test --------------------------------------------------------------------


def replay(
    source: str | os.PathLike[str] | bytes,
    agent: AnyAgent,
    *,
    check: bool = True,
    secret_key: bytes | None = None,
    seconds: float = SECONDS,
) -> Replayed:
    """Replays an agent's code against an exported run. Raises ReplayDiverged if the code diverges from the log and
    `check` is set.

    source      the export: a path, or bytes
    agent       the agent whose code is replayed
    check       raise at a divergence; otherwise return it
    secret_key  the key of the original store, if arguments are Secrets
    seconds     the time limit
    """
    return Replay(read(source), agent, secret_key=secret_key, asked=ReplayRequest(seconds=seconds)).outcome(check)
