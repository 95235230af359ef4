"""Virtual time: processes, their threads and event loops as fibers of one real thread, scheduled by a seed.

A fiber gives up control where a thread would block: in a store call, a sleep, a contended lock, an idle loop. Nothing
else interleaves, so a seed decides everything. Knows nothing of stores and runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
import threading
import time
from asyncio import events
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from heapq import heappop, heappush
from random import Random
from typing import Any, Final

import greenlet

from killick.clock import ClockWatch, SystemClock

SPINS_MAX: Final = 200_000
"""How many actions one instant may have. More of them is code that spins without waiting."""

START_US: Final = 1_750_000_000_000_000

Action = Callable[[], object]

_swap_current_task: Callable[..., Any] = getattr(asyncio.tasks, "_swap_current_task", lambda *_: None)


class Dead(BaseException):
    """The process was killed: nothing that its leftover code does has an effect."""


class Stuck(AssertionError):
    """Virtual time does not go on."""


class Hub:
    """The scheduler: runs the earliest action, and by chance one of those that are due at the same instant."""

    def __init__(self, seed: int) -> None:
        self.now_us = 0
        self.chance = Random(seed)
        self.current: Fiber | None = None
        self.wrong: BaseException | None = None
        self.switches = 0
        self.numbers = 0
        self.main = greenlet.getcurrent()
        self._actions: list[tuple[int, int, int, Action]] = []
        self._count = 0

    def at(self, when_us: int, action: Action, *, first: bool = False) -> None:
        """Runs an action at a moment. One that comes first draws no chance, so that leaving it out changes no other."""
        self._count += 1
        tie = 0 if first else self.chance.getrandbits(16)
        heappush(self._actions, (max(when_us, self.now_us), tie, self._count, action))

    def after(self, delay_us: int, action: Action) -> None:
        self.at(self.now_us + delay_us, action)

    def run(self, until_us: int, *, stop: Callable[[], bool] = lambda: False) -> None:
        """Lets time pass until a moment, or until `stop` says so; raises what was found wrong."""
        spins = 0
        while self._actions and self._actions[0][0] <= until_us and not stop():
            when_us, _, _, action = heappop(self._actions)
            spins = spins + 1 if when_us == self.now_us else 0
            if spins > SPINS_MAX:
                raise Stuck(f"{spins} actions at {self.now_us / 1e6:.3f} s: code spins without waiting")
            self.now_us = when_us
            action()
            if self.wrong is not None:
                raise self.wrong
        if not stop():
            self.now_us = max(self.now_us, until_us)

    def fail(self, error: BaseException) -> None:
        """Ends the story. An error that is only raised in a fiber may be caught there."""
        self.wrong = self.wrong or error


_hub: Hub | None = None


def hub() -> Hub:
    """The scheduler of the story that is told now."""
    assert _hub is not None
    return _hub


def here() -> Process:
    """The process whose code runs now."""
    fiber = hub().current
    assert fiber is not None
    return fiber.process


class ProcessClock(SystemClock):
    """A process's own clock: its wall time may be wrong and may jump; its monotonic time has a start of its own."""

    def __init__(self, skew_us: int = 0, base: float = 0.0) -> None:
        self.skew_us = skew_us
        self.watch = ClockWatch()
        self.base = base

    def now_us(self) -> int:
        return START_US + hub().now_us + self.skew_us

    def monotonic(self) -> float:  # type: ignore[override]
        return self.base + hub().now_us / 1e6

    def thread_seconds(self) -> float:  # type: ignore[override]
        return 0.0


class Process:
    """A simulated operating-system process: its fibers, its clock, and whether it runs."""

    def __init__(self, name: str, chance: Random, clock: ProcessClock) -> None:
        self.name = name
        self.chance = chance
        self.clock = clock
        self.is_dead = False
        self.paused_until_us = 0
        self.fibers: list[Fiber] = []
        self.loop = VirtualLoop(self)

    def start(self, work: Callable[[], Any]) -> Fiber:
        """Begins a thread."""
        fiber = Fiber(self, work)
        hub().after(0, fiber.begin)
        return fiber

    def serve(self, main: Callable[[], Any]) -> None:
        """Begins the thread that serves the loop, with one coroutine to start with."""

        def serve() -> None:
            self.loop.create_task(main(), name=self.name)
            while not self.is_dead:
                self.loop._run_once()

        fiber = Fiber(self, serve, self.loop)
        self.loop.fiber = fiber
        hub().after(0, fiber.begin)

    def kill(self) -> None:
        """No fiber of it runs again."""
        self.is_dead = True

    def bury(self) -> None:
        """Unwinds what is left of its stacks, when the story is over: its code can touch nothing any more."""
        self.is_dead = True
        for fiber in self.fibers:
            fiber.bury()
        for task in asyncio.all_tasks(self.loop):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            with contextlib.suppress(BaseException):
                task.get_coro().close()  # type: ignore[union-attr]
        self.loop._ready.clear()
        self.loop._scheduled.clear()


class Fiber:
    """A thread of a simulated process."""

    def __init__(self, process: Process, work: Callable[[], Any], loop: VirtualLoop | None = None) -> None:
        self.process = process
        self.loop = loop
        self.thread: VirtualThread | None = None
        self.is_over = False
        self._work = work
        self._parkings = 0
        self._is_parked = False
        hub().numbers += 1
        self.number = hub().numbers
        self._stack = greenlet.greenlet(self._run, hub().main)
        process.fibers.append(self)

    def begin(self) -> None:
        self._is_parked = True
        self._resume(self._parkings)

    def park(self, until_us: int | None = None) -> None:
        """Gives up control until it is woken, or until a moment."""
        if self.process.is_dead:
            raise Dead
        self._parkings += 1
        self._is_parked = True
        if until_us is not None:
            hub().at(until_us, partial(self._resume, self._parkings))
        # A thread has one current task from Python 3.14 on. Here it is that of the fiber.
        has_task = self.loop is not None and asyncio.current_task(self.loop) is not None  # 3.12.1 swaps no other
        task = _swap_current_task(self.loop, None) if has_task else None
        hub().main.switch()
        if task is not None:
            _swap_current_task(self.loop, task)
        if self.process.is_dead:
            raise Dead

    def wake(self) -> None:
        hub().after(0, partial(self._resume, self._parkings))

    def bury(self) -> None:
        if self._stack and not self._stack.dead:
            with contextlib.suppress(BaseException):
                self._stack.throw(greenlet.GreenletExit)
        self.is_over = True

    def _resume(self, parking: int) -> None:
        process, now = self.process, hub()
        if process.is_dead or not self._is_parked or parking != self._parkings:
            return
        if process.paused_until_us > now.now_us:
            now.at(process.paused_until_us, partial(self._resume, parking))
            return
        self._is_parked = False
        now.current = self
        now.switches += 1
        events._set_running_loop(self.loop)
        try:
            self._stack.switch()
        finally:
            events._set_running_loop(None)
            now.current = None

    def _run(self) -> None:
        try:
            self._work()
        except (Dead, greenlet.GreenletExit):
            pass
        except BaseException as error:
            hub().fail(error)
        self.is_over = True
        self.process.fibers.remove(self)
        if self.thread is not None:
            self.thread.ended.set()


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop by virtual time. Its ready callbacks run in the order that asyncio promises."""

    def __init__(self, process: Process) -> None:
        super().__init__()
        self._process = process
        self._selector = self
        self._clock_resolution = 1e-6
        self._is_woken = False
        self.fiber: Fiber | None = None

    def time(self) -> float:
        return hub().now_us / 1e6

    def select(self, timeout: float | None) -> list[Any]:
        assert self.fiber is not None
        if not self._is_woken and (timeout is None or timeout > 0):
            self.fiber.park(None if timeout is None else hub().now_us + max(math.ceil(timeout * 1e6), 1))
        self._is_woken = False
        return []

    def _process_events(self, event_list: list[Any]) -> None:
        """There are none: nothing here has a file descriptor."""

    def _write_to_self(self) -> None:
        self._is_woken = True
        if self.fiber is not None:
            self.fiber.wake()

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        future = self.create_future()

        def work() -> None:
            try:
                result, error = func(*args), None
            except Dead:
                raise
            except BaseException as raised:
                result, error = None, raised
            self.call_soon_threadsafe(_settle, future, result, error)

        self._process.start(work)
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is not None and not isinstance(error, Dead | greenlet.GreenletExit) and not self._process.is_dead:
            hub().fail(error)


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


# what `threading`, `queue` and `time` are to fibers -------------------------------------------------


def _fiber() -> Fiber:
    fiber = hub().current
    if fiber is None:
        raise Stuck("the scheduler itself would block")
    return fiber


class VirtualLock:
    def __init__(self) -> None:
        self._is_held = False
        self._waiting: deque[Fiber] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        while self._is_held:
            if not blocking:
                return False
            self._waiting.append(fiber := _fiber())
            fiber.park()
        self._is_held = True
        return True

    def release(self) -> None:
        self._is_held = False
        if self._waiting:
            self._waiting.popleft().wake()

    def locked(self) -> bool:
        return self._is_held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class VirtualRLock(VirtualLock):
    def __init__(self) -> None:
        super().__init__()
        self._owner: Fiber | None = None
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if not (self._is_held and self._owner is hub().current):
            if not super().acquire(blocking, timeout):
                return False
            self._owner = hub().current
        self._depth += 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            super().release()


class VirtualEvent:
    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[Fiber] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        waiting, self._waiting = self._waiting, []
        for fiber in waiting:
            fiber.wake()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        until = None if timeout is None else hub().now_us + max(math.ceil(timeout * 1e6), 1)
        while not self._is_set and (until is None or hub().now_us < until):
            self._waiting.append(fiber := _fiber())
            fiber.park(until)
        return self._is_set


class VirtualCondition:
    def __init__(self, lock: VirtualRLock | None = None) -> None:
        self._lock = lock or VirtualRLock()
        self._changed = VirtualEvent()

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        until = math.inf if timeout is None else hub().now_us + timeout * 1e6
        while not (found := predicate()) and hub().now_us < until:
            self._changed.clear()
            self._lock.release()
            try:
                self._changed.wait(None if timeout is None else (until - hub().now_us) / 1e6)
            finally:
                self._lock.acquire()
        return found

    def notify_all(self) -> None:
        self._changed.set()


class VirtualThread:
    def __init__(self, target: Callable[..., Any], args: tuple[Any, ...] = (), name: str = "", daemon: bool = True):
        self.name = name
        self.ended = VirtualEvent()
        self._work = partial(target, *args)
        self._process = here()

    def start(self) -> None:
        self._process.start(self._work).thread = self

    def is_alive(self) -> bool:
        return not self.ended.is_set()

    def join(self, timeout: float | None = None) -> None:
        self.ended.wait(timeout)


class VirtualQueue:
    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._waiting: deque[Fiber] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)
        if self._waiting:
            self._waiting.popleft().wake()

    def get(self) -> Any:
        while not self._items:
            self._waiting.append(fiber := _fiber())
            fiber.park()
        return self._items.popleft()


class _Threading:
    """Stands for the module `threading` in the modules that a story patches."""

    Lock = VirtualLock
    RLock = VirtualRLock
    Event = VirtualEvent
    Condition = VirtualCondition
    Thread = VirtualThread

    @staticmethod
    def current_thread() -> Any:
        fiber = hub().current
        return fiber and (fiber.thread or fiber)

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)


class _Time:
    """Stands for the module `time`."""

    @staticmethod
    def sleep(seconds: float) -> None:
        _fiber().park(hub().now_us + max(math.ceil(seconds * 1e6), 1))

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


class CallerClock:
    """Stands for `SystemClock` where code asks it for the machine's own time."""

    @staticmethod
    def monotonic() -> float:
        return hub().now_us / 1e6


_THREADING: Final = _Threading()
_TIME: Final = _Time()


@contextlib.contextmanager
def virtual_time(seed: int, threaded: list[str], timed: list[str], **others: Any) -> Iterator[Hub]:
    """Runs a story: the threads, locks and sleeps of some modules become those of fibers.

    others  attributes of modules by `module:name`, dots as they are
    """
    global _hub
    changes: dict[tuple[str, str], Any] = {(module, "threading"): _THREADING for module in threaded}
    changes |= {(module, "time"): _TIME for module in timed}
    changes |= {tuple(place.split(":")): value for place, value in others.items()}  # type: ignore[misc]
    before = {place: getattr(sys.modules[place[0]], place[1]) for place in changes}
    _hub = made = Hub(seed)
    for (module, name), value in changes.items():
        setattr(sys.modules[module], name, value)
    try:
        yield made
    finally:
        for (module, name), value in before.items():
            setattr(sys.modules[module], name, value)
        _hub = None
