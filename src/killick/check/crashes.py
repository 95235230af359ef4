"""Crashes a simulated process at every point in turn, and lets the next one recover: no loss and no duplicates allowed.

Owns the crash points and the world that tools act on. Everything runs on an in-memory store, one process after the
other; a dead process's accesses are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Final, Literal, NamedTuple, Self, TypeVar, cast

import msgspec

from killick.client.client import Client, SimulatedClient
from killick.client.external_runs import ClientRuntime
from killick.clock import LeapingClock
from killick.definitions.agents import AnyAgent
from killick.engine.steps.attempt import ToolInterceptor
from killick.engine.views import Wait
from killick.errors import RunCancelled, RunDiverged, RunFailed, RunPaused, RunWaiting
from killick.ids import SeededIds
from killick.log import Log
from killick.model import hashing
from killick.model.codec import plain
from killick.model.event_codec import decode
from killick.model.events import Build
from killick.model.failure import Failure
from killick.store.memory import MemoryStore
from killick.store.protocol import Store
from killick.store.records import Append, RunQuery

T = TypeVar("T")

RUN: Final = "run"
"""The id of the simulated run."""

WRITES: Final = frozenset({"append", "deliver", "lease", "refer", "reindex", "release", "remove", "renew", "repair"})
"""The store operations before and after which a process may die."""

HANG_SECONDS: Final = 4.0
"""The time limit of a process that was not killed; most take some milliseconds."""
LEASE_SECONDS: Final = 30.0
_LEAPS_MAX: Final = 40_000
"""The maximum number of timers that may fire in one process without other events: then it hangs."""
_FOLDS_KEPT: Final = 8
_TURNS_A_LOOK: Final = 4_096
_TICK_SECONDS: Final = 0.2
"""How often a loop checks for a running thread that it waits for."""
_TURNS_MAX: Final = 10_000
_TURNS_TO_LEAVE: Final = 16
"""The loop turns that a cancelled task gets to leave its blocks before it is cancelled again."""

Takeover = Literal["lock", "expiry"]
"""How the next process gets a dead one's runs: its lock is free at once, or its leases expire."""


class Killed(BaseException):
    """The process is dead. Its remaining code stops at its next access."""


class Life:
    """One process: counts its crash points, and dies at one of them."""

    def __init__(self, world: World, kill_at: int = 0) -> None:
        self.world = world
        self.points = 0
        self.place = ""
        self.dead = False
        self.on_death: Callable[[], object] = lambda: None
        self.on_point: Callable[[int, str], object] | None = None
        self._kill_at = kill_at
        self._lock = threading.Lock()

    def point(self, place: str) -> None:
        """A crash point."""
        with self._lock:
            self._refuse()
            self.points += 1
            if self.on_point is not None:
                self.on_point(self.points, place)
            if self.points == self._kill_at:
                self.place = place
                self._die()
                raise Killed(place)

    def touch(self, act: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Performs an access that a dead process cannot perform."""
        with self._lock:
            self._refuse()
            return act(*args, **kwargs)

    def write(self, what: str, act: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """The same, with a crash point before and after it."""
        with self._lock:  # for the count as well: two threads at once would pass over the point of death
            self._refuse()
            if self.on_point is None and not self.points < self._kill_at <= self.points + 2:
                done = act(*args, **kwargs)
                self.world.changes += 1
                self.points += 2  # passed, and most are: they need no description
                return done
        about = f"{what} {_last(args[0]) if what == 'append' else ''}".rstrip()
        self.point(f"before {about}")
        done = self.touch(act, *args, **kwargs)
        self.world.changes += 1
        self.point(f"after {about}")
        return done

    def end(self) -> None:
        with self._lock:
            if not self.dead:
                self._die()

    def _refuse(self) -> None:
        if self.dead:
            raise Killed("the process is dead")

    def _die(self) -> None:
        self.dead = True
        self.on_death()


_LIFE: Final[ContextVar[Life | None]] = ContextVar("killick_life", default=None)


class World:
    """The world that tools act on, which survives crashes: effects by name, counted."""

    def __init__(self) -> None:
        self.effects: Counter[str] = Counter()
        self.stand_in: ToolInterceptor | None = None
        """Intercepts steps before this world; without one, tools act on it themselves."""
        self.client: Client | None = None
        """The live process's client."""
        self.changes = 0
        """The number of changes that survive a process."""

    def unpaused(self, client: Client) -> bool:
        """Whether a person resumed a paused run."""
        return False

    def copied(self) -> Self:
        """Returns an independent copy."""
        twin = object.__new__(type(self))
        for name, value in vars(self).items():
            vars(twin)[name] = value.copy() if isinstance(value, (dict, list, set)) else value
        if self.stand_in is not None:
            twin.stand_in = cast("ToolInterceptor", twin)
        return twin


def current_process() -> Life:
    """Returns the current process."""
    life = _LIFE.get()
    if life is None:
        raise LookupError("there is no simulated process here; run the agent by killick.check.crashes")
    return life


class _ProcessStore:
    """A store as one process reaches it."""

    def __init__(self, store: Store, life: Life) -> None:
        self._store, self._life = store, life

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if not callable(found):
            return found
        life = self._life
        made = partial(life.write, name, found) if name in WRITES else partial(life.touch, found)
        vars(self)[name] = made
        return made

    def close(self) -> None:
        """The store outlives the process."""


def _last(items: Sequence[Append]) -> str:
    """Returns the last written event kind, and its step."""
    rows = [row for item in items for row in item.rows]
    if not rows:
        return ""
    event = decode(rows[-1].body)
    return f"{event.__struct_config__.tag} {getattr(event, 'step', None) or ''}".rstrip()


# simulation ---------------------------------------------------------------------------------------

Outside = Callable[[Client, Sequence[Wait], World], bool]
"""The actions of people and other programs when the run waits; False if there is none."""


@dataclass(frozen=True)
class Ended:
    """How a run failed."""

    type: str
    message: str
    step: str | None
    not_undone: tuple[str, ...]
    failure: Failure = field(compare=False, repr=False)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """An agent, its input, and its environment."""

    agent: AnyAgent
    input: Any = None
    outside: Outside = lambda client, waits, world: False
    warm: bool = True
    """Whether the waiting process itself continues when woken; else another one does."""
    behind: bool = False
    """Whether invisible steps are written behind, and lost with a process."""
    takeover: Takeover = "lock"
    verified: bool = True
    """Whether the log is verified at the end."""
    hang_seconds: float = HANG_SECONDS
    world: Callable[[], World] = World


@dataclass(kw_only=True)
class Story:
    """A run's outcome, and where its processes were killed."""

    kills: tuple[int, ...]
    places: list[str] = field(default_factory=list[str])
    points: list[int] = field(default_factory=list[int])
    status: str = ""
    outcome: Any = None
    world: World = field(default_factory=World)
    troubles: list[str] = field(default_factory=list[str])
    store: MemoryStore = field(default_factory=MemoryStore, repr=False)

    @cached_property
    def marks(self) -> dict[str, tuple[Any, ...]]:
        """The lasting state of each run, with its values as bytes: equal marks mean equal states."""
        log = Log(self.store)
        return {row.run: _marks(log, row.run) for row in self.store.runs(RunQuery(), limit=10_000)}

    @cached_property
    def states(self) -> dict[str, dict[str, Any]]:
        """The lasting state of each run."""
        log = Log(self.store)
        rows = self.store.runs(RunQuery(), limit=10_000) if self.status else ()
        return {row.run: _lasting(log.state(row.run).to_json()) for row in rows}

    def __str__(self) -> str:
        places = ", then ".join(f"{n} ({place})" for n, place in zip(self.kills, self.places, strict=False))
        return f"killed at {places}" if places else "not killed"


class Saved(NamedTuple):
    """The data that survives a process that dies at a point."""

    point: int
    place: str
    store: MemoryStore
    world: World
    now_us: int


def simulate(
    scenario: Scenario, *kills: int, seed: int = 7, saved: Saved | None = None, saving: list[Saved] | None = None
) -> Story:
    """Runs a scenario to its end: each process dies at its point; the last one survives.

    With `saved`, the first process has already died, and this is its saved state. With `saving`, the first process's
    state is saved at every point at which it changed.
    """
    clock = LeapingClock() if saved is None else LeapingClock(saved.now_us)
    ids = SeededIds(seed if saved is None else seed + saved.point)
    if saved is None:
        story = Story(kills=kills, world=scenario.world(), store=MemoryStore(clock=clock, ids=ids))
    else:
        world, store = saved.world.copied(), saved.store.copied(clock)
        story = Story(kills=(saved.point, *kills), places=[saved.place], points=[saved.point], world=world, store=store)
        _take_over(scenario, clock, store)
    for number, kill_at in enumerate((*kills, 0), 1 if saved is None else 2):
        life = Life(story.world, kill_at)
        if number == 1 and saving is not None:
            life.on_point = partial(_save, saving, story, clock)
        _live(partial(_opened, scenario, story, life, number, clock, ids), life, scenario, story)
        story.points.append(life.points)
        if not life.place:
            break
        story.places.append(life.place)
        _take_over(scenario, clock, story.store)
    return story


def _opened(scenario: Scenario, story: Story, life: Life, number: int, clock: LeapingClock, ids: SeededIds) -> Client:
    runtime = ClientRuntime(
        cast("Store", _ProcessStore(story.store, life)), clock=clock, ids=SeededIds(int.from_bytes(ids.key())),
        build=lambda agent: Build(version=f"simulated {number}"),
        lease_seconds=float("inf") if scenario.takeover == "lock" else LEASE_SECONDS,
        behind=scenario.behind, stand_in=story.world.stand_in,
    )  # fmt: skip
    runtime.log.keep_folds(_FOLDS_KEPT)
    story.world.client = SimulatedClient(runtime)
    return story.world.client


def _take_over(scenario: Scenario, clock: LeapingClock, store: MemoryStore) -> None:
    """Frees a dead process's runs: its lock at once, its leases when they expire."""
    if scenario.takeover == "expiry":
        clock.advance(LEASE_SECONDS + 1)
        return
    for _, head in store.heads():
        store.release(head.run, epoch=head.epoch)


def _save(saving: list[Saved], story: Story, clock: LeapingClock, point: int, place: str) -> None:
    last = saving[-1] if saving else None
    if last is None or (last.world.changes, last.now_us) != (story.world.changes, clock.now_us()):
        saving.append(Saved(point, place, story.store.copied(clock), story.world.copied(), clock.now_us()))


# one process --------------------------------------------------------------------------------------


class _LeapingLoop(asyncio.SelectorEventLoop):
    """A loop with simulated time: when nothing else can happen, it jumps to the next timer.

    So sleeps take no time, and the machine's speed has no influence. While threads or connections are active, real time
    passes, up to a limit. When nothing can happen any more, the waiting task hangs.
    """

    def __init__(self, threads: set[threading.Thread], seconds_max: float) -> None:
        super().__init__()
        self._threads = threads
        self._now = 0.0
        self._leaps = self._turns = 0
        self._until = super().time() + seconds_max
        self._tick: asyncio.TimerHandle | None = None
        self.on_hang: Callable[[], object] | None = None

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        loop: Any = self
        self._turns += 1
        before = super().time()
        waits = False
        if self.on_hang is not None:
            if self._turns % _TURNS_A_LOOK == 0 and before > self._until:
                self.on_hang()
            elif not loop._ready and not loop._stopping:
                waits = self._waits(loop, self.on_hang)
        super()._run_once()  # type: ignore[misc]  # pyright: ignore
        if waits:
            self._now += super().time() - before

    def _waits(self, loop: Any, on_hang: Callable[[], object]) -> bool:
        """Jumps to the next timer, or detects a hang; True if an outside event may occur."""
        alone = len(loop._selector.get_map()) <= 1 and _threads() <= self._threads
        timers: list[asyncio.TimerHandle] = loop._scheduled
        times = [timer.when() for timer in timers if timer is not self._tick and not timer.cancelled()]
        if not alone and super().time() < self._until:
            if self._tick is None or self._tick.when() <= self._now:
                self._tick = self.call_later(_TICK_SECONDS, lambda: None)
            return True
        if times and self._leaps < _LEAPS_MAX:
            self._leaps += 1
            self._now = max(self._now, min(times))
        else:
            on_hang()
        return False


def _threads() -> set[threading.Thread]:
    """The threads that can be waited for: those of `_thread` have a stand-in, which stays after their end."""
    return {each for each in threading.enumerate() if not isinstance(each, threading._DummyThread)}  # pyright: ignore[reportPrivateUsage]


class _Process:
    """The clients of one process, and their loop."""

    def __init__(self, opened: Callable[[], Client], life: Life, hang_seconds: float) -> None:
        self.life = life
        self._before = _threads()
        self.loop = _LeapingLoop(self._before, hang_seconds)
        self._opened = opened
        self._clients: list[Client] = []

    def client(self) -> Client:
        """Returns the client, or a new one without state."""
        self._clients.append(self._opened())
        return self._clients[-1]

    def reap(self) -> None:
        """Lets leftover tasks run into their next access, so that nothing stays in memory."""
        self.life.end()
        loop = self.loop
        for client in self._clients:
            client.runtime.engine.threads.close()
        for turn in range(_TURNS_MAX):
            tasks, threads = asyncio.all_tasks(loop), _threads() - self._before
            if not tasks and not threads:
                break
            for task in tasks if turn % _TURNS_TO_LEAVE == 0 else ():
                task.cancel()
            loop.call_soon(loop.stop)
            loop.run_forever()
            if not tasks:
                self._close()
            for thread in threads:
                thread.join(0.001)
        if loop._ready:  # type: ignore[attr-defined]  # callbacks of tasks that just ended
            loop.call_soon(loop.stop)
            loop.run_forever()
        if loop._asyncgens:  # type: ignore[attr-defined]
            loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()

    def _close(self) -> None:
        for client in self._clients:
            with contextlib.suppress(Killed):
                client.runtime.log.close()
        self.loop.call_soon(self.loop.stop)
        self.loop.run_forever()
        self.loop.run_until_complete(self.loop.shutdown_default_executor())


def _live(opened: Callable[[], Client], life: Life, scenario: Scenario, story: Story) -> None:
    """Runs a process from start to end."""
    process = _Process(opened, life, scenario.hang_seconds)
    loop = process.loop
    loop.set_exception_handler(lambda _, details: None if life.dead else story.troubles.append(str(details)))
    life.on_death = lambda: loop.call_soon_threadsafe(loop.stop)
    context = copy_context()
    context.run(_LIFE.set, life)
    with _silent_threads():
        main = loop.create_task(_until_ended(process, scenario, story), context=context)
        main.add_done_callback(lambda _: loop.stop())
        loop.on_hang = life.end
        loop.run_forever()
        loop.on_hang = None
        if life.dead:
            story.troubles += [] if life.place else ["hung"]
        elif (error := main.exception()) is not None:
            story.troubles.append(f"{type(error).__name__}: {error}")
        process.reap()


async def _until_ended(process: _Process, scenario: Scenario, story: Story) -> None:
    client = process.client()
    status, outcome, waits = await _advanced(client, scenario)
    while (status == "waiting" and scenario.outside(client, waits, story.world)) or (
        status == "RunPaused" and story.world.unpaused(client)
    ):
        if not scenario.warm:
            await client.as_async().close()
            client = process.client()
        status, outcome, waits = await _advanced(client, scenario)
    story.status, story.outcome = status, outcome
    if scenario.verified:
        story.troubles += map(str, client.store.verify().problems)


async def _advanced(client: Client, scenario: Scenario) -> tuple[str, Any, Sequence[Wait]]:
    try:
        return "completed", plain(await client.as_async().run(scenario.agent, scenario.input, id=RUN)), ()
    except (RunDiverged, RunPaused) as stopped:
        return type(stopped).__name__, str(stopped), ()
    except RunWaiting as waiting:
        return "waiting", str(waiting), waiting.waits
    except RunFailed as failed:
        return (
            "failed",
            Ended(failed.failure.type, failed.failure.message, failed.step, failed.not_undone, failed.failure),
            (),
        )
    except RunCancelled as cancelled:
        return "cancelled", cancelled.not_undone, ()


def _marks(log: Log, run: str) -> tuple[Any, ...]:
    state = log.state(run)
    facts = state.fold.facts
    rows = {row.seq: row for row in log.rows(run)}

    def value(seq: int) -> bytes | None:
        data = rows[seq].data if seq else None
        return None if data is None else hashing.unsalted(data)

    steps: list[tuple[Any, ...]] = [
        (step.id, step.sort, step.name, step.status, step.effect, step.undone, step.undoes, value(step.intended))
        + ((value(step.output),) if step.status == "done" else ())
        for step in state.fold.steps
    ]
    context = tuple(map(value, facts.context_parts))
    waits = tuple((wait.step, wait.waits_for, wait.name, wait.to, value(wait.opened)) for wait in facts.waits.values())
    own = (facts.status, facts.generation, facts.plan, facts.stage, facts.priority, facts.tags, facts.parent)
    return (*own, tuple(sorted(steps, key=lambda step: _numbers(step[0]))), context, waits)


_PASSING: Final = frozenset({"at", "attempts", "deadline", "since", "usage"})


def _lasting(state: bytes) -> dict[str, Any]:
    """Returns the part of a state that crashes do not change: no times, attempts or branch order."""
    document: dict[str, Any] = msgspec.json.decode(state)
    for part in ("seq", "retries", "failures"):
        del document[part]
    for part in ("outputs", "decisions", "pending", "trace", "effects"):
        items: list[Mapping[str, Any]] = document[part]
        lasting = [{name: value for name, value in item.items() if name not in _PASSING} for item in items]
        document[part] = sorted(lasting, key=lambda item: _numbers(item["step"]))
    document["position"]["committed"].sort(key=_numbers)
    del document["position"]["step"]
    return document


def _numbers(step: str) -> list[int]:
    return [int(number) for number in step.split(".")]


@contextmanager
def _silent_threads() -> Generator[None]:
    """Silences the threads of a dead process."""
    original = threading.excepthook

    def tell(args: Any) -> None:
        if not isinstance(args.exc_value, Killed):
            original(args)

    threading.excepthook = tell
    try:
        yield
    finally:
        threading.excepthook = original
