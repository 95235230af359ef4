"""Kills a simulated process at every point in turn, and lets the next one go on: nothing may be lost or done twice.

Owns the points at which a process can die and the world that its tools act on. Everything runs on a store in memory,
one process after the other; what a dead one still tries is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar, cast

import msgspec

from kedge.clock import LeapingClock
from kedge.errors import RunCancelled, RunDiverged, RunFailed, RunPaused, RunWaiting
from kedge.ids import SeededIds
from kedge.model.events import Build
from kedge.runtime.client import Client
from kedge.runtime.registry import AnyAgent
from kedge.runtime.views import Wait
from kedge.store.base import Store
from kedge.store.memory import MemoryStore

T = TypeVar("T")

RUN: Final = "run"
"""The id of the run that is simulated."""

WRITES: Final = frozenset({"append", "deliver", "lease", "refer", "reindex", "release", "remove", "renew", "repair"})
"""The operations of a store before and after which a process may die."""

HANG_SECONDS: Final = 4.0
"""How long a process may take that was not killed; most take some milliseconds."""
LEASE_SECONDS: Final = 30.0
_TURNS_MAX: Final = 10_000
_TURNS_TO_LEAVE: Final = 16
"""Turns of the loop that a cancelled task has for leaving its blocks, before it is cancelled again."""

Takeover = Literal["lock", "expiry"]
"""How the next process gets the runs of a dead one: its lock is free at once, or its leases run out."""


class Killed(BaseException):
    """The process is dead. Whatever of it still runs gets no further than the next thing it touches."""


class Life:
    """One process: counts the points at which it can die, and dies at one of them."""

    def __init__(self, world: World, kill_at: int = 0) -> None:
        self.world = world
        self.points = 0
        self.place = ""
        self.dead = False
        self.on_death: Callable[[], object] = lambda: None
        self._kill_at = kill_at
        self._lock = threading.Lock()

    def point(self, place: str) -> None:
        """Here the process can die."""
        with self._lock:
            self._refuse()
            self.points += 1
            if self.points == self._kill_at:
                self.place = place
                self._die()
                raise Killed(place)

    def touch(self, act: Callable[[], T]) -> T:
        """Do something that a dead process cannot do any more."""
        with self._lock:
            self._refuse()
            return act()

    def write(self, what: str, act: Callable[[], T]) -> T:
        """The same, with a point before and one after."""
        self.point(f"before {what}")
        done = self.touch(act)
        self.point(f"after {what}")
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


_LIFE: Final[ContextVar[Life | None]] = ContextVar("kedge_life", default=None)


def tick() -> None:
    """A point in agent code, between steps. Outside of a simulation it does nothing."""
    life = _LIFE.get()
    if life is not None:
        life.point("agent code")


def world() -> World:
    """The world of the simulation in which this code runs."""
    life = _LIFE.get()
    if life is None:
        raise LookupError("there is no simulated world here; run the agent by kedge.testing.crashes")
    return life.world


class World:
    """What tools act on, and what no death undoes: effects by name, each counted, and what they returned."""

    def __init__(self) -> None:
        self.effects: Counter[str] = Counter()
        self.visits: Counter[str] = Counter()
        self.results: dict[str, Any] = {}
        self._keys: dict[str, Any] = {}

    def do(self, effect: str, result: Any = None, *, key: str | None = None) -> Any:
        """An effect happens. Given a key, the world honours it: the second time it only tells the result again."""

        def act() -> Any:
            if key is not None and key in self._keys:
                return self._keys[key]
            self.effects[effect] += 1
            self.results[effect] = result
            if key is not None:
                self._keys[key] = result
            return result

        return _living().write(effect, act)

    def visit(self, place: str) -> int:
        """How often somebody came here, this time included. Looking is no effect."""

        def act() -> int:
            self.visits[place] += 1
            return self.visits[place]

        return _living().write(place, act)

    def happened(self, effect: str) -> bool:
        return bool(self.effects[effect])


def _living() -> Life:
    life = _LIFE.get()
    if life is None:
        raise LookupError("there is no simulated process here; run the agent by kedge.testing.crashes")
    return life


class _Mortal:
    """A store as one process reaches it."""

    def __init__(self, store: Store, life: Life) -> None:
        self._store, self._life = store, life

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        return self._mortal(name, found) if callable(found) else found

    def _mortal(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        life = self._life

        def mortal(*args: Any, **kwargs: Any) -> Any:
            if name in WRITES:
                return life.write(name, lambda: operation(*args, **kwargs))
            return life.touch(lambda: operation(*args, **kwargs))

        return mortal

    def close(self) -> None:
        """The store outlives the process."""


# what is simulated --------------------------------------------------------------------------------

Outside = Callable[[Client, Sequence[Wait], World], bool]
"""What people and other programs do when the run waits for them; False when they can do nothing for it."""


def nobody(client: Client, waits: Sequence[Wait], world: World) -> bool:
    """There is nobody outside."""
    return False


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """An agent, its input, and what is around it."""

    agent: AnyAgent
    input: Any = None
    outside: Outside = nobody
    exact: bool = True
    """False where chance or a race decides on states and on which effects happen; none may happen more often."""
    warm: bool = True
    """Whether the process that waited goes on by itself when it is woken; otherwise another one does."""
    behind: bool = False
    """Whether what the world cannot see is written behind, and lost with a process."""
    takeover: Takeover = "lock"


@dataclass(kw_only=True)
class Story:
    """What became of a run whose processes were killed, and where they were."""

    kills: tuple[int, ...]
    places: list[str] = field(default_factory=list[str])
    points: list[int] = field(default_factory=list[int])
    status: str = ""
    outcome: Any = None
    states: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    world: World = field(default_factory=World)
    troubles: list[str] = field(default_factory=list[str])

    def __str__(self) -> str:
        places = ", then ".join(f"{n} ({place})" for n, place in zip(self.kills, self.places, strict=False))
        return f"killed at {places}" if places else "not killed"


def simulate(scenario: Scenario, *kills: int, seed: int = 7) -> Story:
    """Run a scenario to its end: each process dies at the point that is its own; after them comes one that lives."""
    clock, ids = LeapingClock(), SeededIds(seed)
    store = MemoryStore(clock=clock, ids=ids)
    story = Story(kills=kills)
    for kill_at in (*kills, 0):
        life = Life(story.world, kill_at)

        def opened(life: Life = life) -> Client:
            return Client(
                cast("Store", _Mortal(store, life)),
                clock=clock,
                ids=SeededIds(int.from_bytes(ids.key())),
                build=lambda agent: Build(version="simulated"),
                lease_seconds=float("inf") if scenario.takeover == "lock" else LEASE_SECONDS,
                behind=scenario.behind,
            )

        _live(opened, life, scenario, story)
        story.points.append(life.points)
        if not life.place:
            break
        story.places.append(life.place)
        if scenario.takeover == "expiry":
            clock.advance(LEASE_SECONDS + 1)
        else:
            for _, head in store.heads():
                store.release(head.run, epoch=head.epoch)
    return story


def killed_everywhere(scenario: Scenario, *, seed: int = 7) -> Iterator[Story]:
    """The story of every point in turn, until there are no more."""
    kill_at = 1
    while (story := simulate(scenario, kill_at, seed=seed)).places:
        yield story
        kill_at += 1


def differences(undisturbed: Story, story: Story, *, exact: bool = True) -> list[str]:
    """In what a story ends otherwise than it would have without a death; nothing, if all is well."""
    found = list(story.troubles)
    if not story.status:
        return found
    for name in ("status", "outcome"):
        told, expected = getattr(story, name), getattr(undisturbed, name)
        if told != expected:
            found.append(f"{name} {told!r} instead of {expected!r}")
    happened, expected = story.world.effects, undisturbed.world.effects
    found += [f"{effect} once too often" for effect in (happened - expected).elements()]
    if exact:
        found += [f"{effect} once too little" for effect in (expected - happened).elements()]
        for run in sorted(undisturbed.states.keys() | story.states.keys()):
            found += _parts_differing(run, story.states.get(run, {}), undisturbed.states.get(run, {}))
    return found


def _parts_differing(run: str, told: Mapping[str, Any], expected: Mapping[str, Any]) -> Iterator[str]:
    for part in sorted(expected.keys() | told.keys()):
        if told.get(part) != expected.get(part):
            yield f"{run}: {part} {told.get(part)!r} instead of {expected.get(part)!r}"


# one process --------------------------------------------------------------------------------------


class _Process:
    """The clients of one process, and the loop that they run on."""

    def __init__(self, opened: Callable[[], Client], life: Life) -> None:
        self.life = life
        self.loop = asyncio.new_event_loop()
        self._opened = opened
        self._clients: list[Client] = []
        self._before = set(threading.enumerate())

    def client(self) -> Client:
        """The client, or another one that knows nothing of those before."""
        self._clients.append(self._opened())
        return self._clients[-1]

    def bury(self) -> None:
        """Let what is left run into the next thing it touches, so that nothing of it stays in memory."""
        self.life.end()
        loop = self.loop
        for client in self._clients:
            client.engine.threads.close()
        for turn in range(_TURNS_MAX):
            tasks, threads = asyncio.all_tasks(loop), set(threading.enumerate()) - self._before
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
        loop.call_soon(loop.stop)
        loop.run_forever()
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()

    def _close(self) -> None:
        for client in self._clients:
            with contextlib.suppress(Killed):
                client.log.close()
        self.loop.call_soon(self.loop.stop)
        self.loop.run_forever()
        self.loop.run_until_complete(self.loop.shutdown_default_executor())


def _live(opened: Callable[[], Client], life: Life, scenario: Scenario, story: Story) -> None:
    """A process from its start to its end, whichever that is."""
    process = _Process(opened, life)
    loop = process.loop
    loop.set_exception_handler(lambda _, told: None if life.dead else story.troubles.append(str(told)))
    life.on_death = lambda: loop.call_soon_threadsafe(loop.stop)
    context = copy_context()
    context.run(_LIFE.set, life)
    with _silent_threads():
        main = loop.create_task(_until_ended(process, scenario, story), context=context)
        main.add_done_callback(lambda _: loop.stop())
        watch = loop.call_later(HANG_SECONDS, life.end)
        loop.run_forever()
        watch.cancel()
        if life.dead:
            story.troubles += [] if life.place else ["hung"]
        elif (error := main.exception()) is not None:
            story.troubles.append(f"{type(error).__name__}: {error}")
        process.bury()


async def _until_ended(process: _Process, scenario: Scenario, story: Story) -> None:
    client = process.client()
    status, outcome, waits = await _advanced(client, scenario)
    while status == "waiting" and scenario.outside(client, waits, story.world):
        if not scenario.warm:
            await client.__aexit__(None, None, None)
            client = process.client()
        status, outcome, waits = await _advanced(client, scenario)
    report = client.verify()
    story.status, story.outcome = status, outcome
    story.states = {listed.run: _lasting(client.state(listed.run).to_json()) for listed in client.list()}
    story.troubles += map(str, report.problems)


async def _advanced(client: Client, scenario: Scenario) -> tuple[str, Any, Sequence[Wait]]:
    try:
        return "completed", await client.run.soon(scenario.agent, scenario.input, id=RUN), ()
    except (RunDiverged, RunPaused) as stopped:
        return type(stopped).__name__, str(stopped), ()
    except RunWaiting as waiting:
        return "waiting", str(waiting), waiting.waits
    except RunFailed as failed:
        return "failed", (failed.failure.type, failed.failure.message), ()
    except RunCancelled as cancelled:
        return "cancelled", cancelled.not_undone, ()


_PASSING: Final = frozenset({"at", "attempts", "deadline", "since", "usage"})


def _lasting(state: bytes) -> dict[str, Any]:
    """What of a state is the same however often processes died: no times, no attempts, no order of branches."""
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
    """Threads of a dead process end without a word."""
    told = threading.excepthook

    def tell(args: Any) -> None:
        if not isinstance(args.exc_value, Killed):
            told(args)

    threading.excepthook = tell
    try:
        yield
    finally:
        threading.excepthook = told
