"""A run and its forks in several processes at once, interleaved by a seed at every touch of the store and the far side.

Owns the turns: one process moves at a time, from one touch to the next, and chance says which. A seed tells the same
story each time, however slow the machine is: no timer of a loop goes off, no process has a second thread that works,
and when a process looks at its inbox meanwhile is drawn too.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from contextvars import Context, ContextVar
from random import Random
from typing import Any, Final

import killick
from killick.blocking import LoopThread
from killick.clock import ManualClock
from killick.engine.execution import Execution
from killick.engine.signals import Signal
from killick.engine.steps.attempt import LiveCall, Threads, Work
from killick.errors import EpochStale, KillickError, RunBusy
from killick.store import MemoryStore
from killick.store.records import ENDED, RunQuery
from simulation.random_agents import FarSide, Program
from simulation.travelling import HANG_SECONDS, Dead, Journey, Leap, Life, _advanced

ROUNDS_MAX: Final = 3_000
SLOW_MAX: Final = 12
"""How many touches of others an action may last, before and after it is done."""
LOOKS: Final = 0.5
"""How likely a process is to look at its inbox while it is inside an action."""

for _name in ("judge", "run_tree"):
    # Python 3.11 computes a cached property under one lock for all instances. Processes share no locks.
    if hasattr(found := vars(Execution)[_name], "lock"):
        found.lock = contextlib.nullcontext()


class Turns:
    """Whose turn it is among processes that are all at a touch, by chance."""

    def __init__(self, seed: int) -> None:
        self.chance = Random(seed)
        self._changed = threading.Condition()
        self._live: set[str] = set()
        self._ready: set[str] = set()
        self._moving: str | None = None
        self.is_over = False
        self.taken: list[tuple[str, str]] = []
        """Every turn so far: whose it was, and at what touch."""
        self.stall: Callable[[], object] = lambda: None
        """How long the machine takes over a turn."""

    def join(self, *names: str) -> None:
        self._live |= set(names)

    def wait(self, name: str, place: str) -> None:
        """Until it is this process's turn. Once the story is over everyone goes their way."""
        with self._changed:
            if self._moving == name:
                self._moving = None
            self._ready.add(name)
            self._choose()
            mine = self._changed.wait_for(lambda: self._moving == name or self.is_over, HANG_SECONDS * 3)
            self._ready.discard(name)
            self.taken.append((name, place))
        self.stall()
        if not mine:
            raise AssertionError(f"{name} has no turn: {self._moving} does not come to its next touch")

    def leave(self, name: str) -> None:
        with self._changed:
            self._live.discard(name)
            if self._moving == name:
                self._moving = None
            self._choose()

    def end(self) -> None:
        with self._changed:
            self.is_over = True
            self._changed.notify_all()

    def _choose(self) -> None:
        if self._moving is None and self._live and self._ready >= self._live:
            self._moving = self.chance.choice(sorted(self._live))
            self._changed.notify_all()


_HERE: ContextVar[_Mover | None] = ContextVar("process", default=None)


class _Mover(Life):
    """A process among others: it moves only when it is its turn, and dies where it is to."""

    def __init__(self, turns: Turns, name: str, kill_at: int = 0) -> None:
        super().__init__(kill_at)
        self._turns, self.name = turns, name
        self.is_moving = False

    def point(self, place: str) -> None:
        self._wait(place)
        super().point(place)

    def look(self, place: str) -> None:
        self._wait(place)
        super().look(place)

    def _wait(self, place: str) -> None:
        if self.is_moving:
            self._turns.wait(self.name, place)


class _InLine(Threads):
    """What blocks is called at once, by the loop itself."""

    def start(self, call: Callable[[], Any], context: Context, live: LiveCall | None = None) -> Work:
        work = Work(asyncio.get_running_loop(), context, call, live)
        work.run()
        return work


def _timeless(client: killick.Client) -> None:
    """Let no time that passes decide what a process does: its loop's clock stands still, and every commit is quick."""
    client.runtime.loop_thread = LoopThread()
    client.runtime.loop_thread.loop.time = lambda: 0.0  # type: ignore[method-assign]
    client.runtime.log.committer._clock = ManualClock()
    client.runtime.engine.threads = _InLine()


class Crowd(Journey):
    """Workers that share a store, and a person who forks and rewinds runs meanwhile."""

    def __init__(self, seed: int, far: FarSide, program: Program, *, workers: int = 2) -> None:
        self.turns = Turns(seed)
        self._wrong: list[BaseException] = []
        self._clients_of: dict[_Mover, killick.Client] = {}
        self._names = [f"worker {number}" for number in range(1, workers + 1)]
        clock = killick.clock.LeapingClock()
        super().__init__(MemoryStore(clock=clock), clock, far, "walks", program, behind=False)
        far.point = self._met

    def close(self) -> None:
        super().close()
        for client in self._clients_of.values():
            client.runtime.loop_thread.close()

    def _met(self, place: str) -> None:
        """The far side is slow: while one is inside, others come far."""
        here = _HERE.get()
        if here is not None:
            for _ in range(self.turns.chance.randrange(SLOW_MAX)):
                here.look(place)
            if self.turns.chance.random() < LOOKS:
                self._clients_of[here].runtime.executor().notify_all()
            here.point(place)

    def process(self, life: Life) -> killick.Client:
        before = self.kd if isinstance(life, _Mover) else None
        client = super().process(life)
        self.kd = before or client
        self.far.point = self._met
        return client

    def go(self, kills: Sequence[Sequence[int]], leaps: Sequence[tuple[int, Leap]]) -> list[str]:
        """Let everyone come to rest: each worker dies at its so-many-th touches, the person leaps after so many."""
        happened: list[str] = []
        self.turns.join("person", *self._names)
        self._is_done = not leaps
        person = self._seated("person")
        threads = [self._thread("person", self._leap, person, leaps, happened)]
        for number, name in enumerate(self._names):
            first, *more = (*(kills[number] if number < len(kills) else ()), 0)
            worker = self._seated(name, first)
            threads.append(self._thread(name, self._work, worker, more))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANG_SECONDS * 4)
        if self._wrong:
            raise self._wrong[0]
        assert not [thread.name for thread in threads if thread.is_alive()]
        self._take_over()
        self.process(Life())
        return happened

    def _seated(self, name: str, kill_at: int = 0) -> tuple[killick.Client, _Mover]:
        mover = _Mover(self.turns, name, kill_at)
        client = self._clients_of[mover] = self.process(mover)
        _timeless(client)
        mover.is_moving = True
        return client, mover

    def _thread(self, name: str, *act: Any) -> threading.Thread:
        return threading.Thread(target=self._guarded, args=(name, *act), name=name, daemon=True)

    def _guarded(self, name: str, act: Any, *args: Any) -> None:
        try:
            act(*args)
        except BaseException as error:
            self._wrong.append(error)
            self.turns.end()
        finally:
            self.turns.leave(name)

    def _leap(
        self, seat: tuple[killick.Client, _Mover], leaps: Sequence[tuple[int, Leap]], happened: list[str]
    ) -> None:
        client, mover = seat
        try:
            for touches, leap in leaps:
                for _ in range(touches):
                    mover.look("waits")
                try:
                    happened.append(self.travel(leap, client))
                except EpochStale as late:  # the clock leaps, so a command's lease may end before it is carried out
                    happened.append(str(late))
        finally:
            self._is_done = True

    def _work(self, seat: tuple[killick.Client, _Mover], kills: list[int]) -> None:
        while True:
            client, mover = seat
            try:
                self._served(client, mover)
                return
            except (KillickError, Dead, Signal):
                if not mover.dead:
                    raise
            finally:
                mover.dead = True
                with contextlib.suppress(KillickError, Dead):
                    client.close()
                client.runtime.loop_thread.close()
                self._buried(client)
            seat = self._seated(mover.name, kills.pop(0))

    def _served(self, client: killick.Client, mover: _Mover) -> None:
        for _ in range(ROUNDS_MAX):
            mover.look("looks for work")
            rows = self.store.runs(RunQuery(), limit=1_000)
            if self._is_done and all(row.status in ENDED for row in rows):
                return
            due = [row.run for row in self.store.due(self.clock.now_us(), limit=100)]
            for run in due:
                with contextlib.suppress(RunBusy, EpochStale):  # another has it, or has it by now
                    client.runtime.blocking(self._driven(client, mover, run))
                    break
            else:
                if not self._answered(self.kd) and (soonest := self.store.soonest_us()) is not None:
                    self.clock.advance(max(soonest - self.clock.now_us(), 1) / 1_000_000)
        raise AssertionError(f"comes to no rest: {[client.info(run) for run in self.runs()]}")

    async def _driven(self, client: killick.Client, mover: _Mover, run: str) -> None:
        _HERE.set(mover)
        await _advanced(client, run)

    def _buried(self, client: killick.Client) -> None:
        """A dead worker's leases end."""
        for _, head in self.store.heads():
            if head.holder == client.runtime.engine.holder:
                self.store.release(head.run, epoch=head.epoch, left=True)
