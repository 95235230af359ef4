"""The network between simulated processes and the store: latency, lost requests and answers, stalls, lost bells.

An operation is done at the store at one instant, whatever becomes of the process that asked for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from hashlib import blake2b
from typing import Any, Final

from cluster.fibers import Dead, Hub, Process
from cluster.invariants import Invariants
from killick.errors import KillickError, StoreUnavailable
from killick.store import MemoryStore
from killick.store.records import Append

LOCAL: Final = frozenset({"close", "lives", "watch"})
TAIL: Final = 40


class Link:
    """The connection of one process to the store. Faults change it for a while."""

    def __init__(self) -> None:
        self.lost_requests = 0.0
        self.lost_answers = 0.0
        self.lost_bells = 0.0
        self.stalled_until_us = 0


class Network:
    """All connections to one store."""

    def __init__(
        self, hub: Hub, store: MemoryStore, invariants: Invariants, *, latency_us: int, timeout_us: int
    ) -> None:
        self.hub = hub
        self.store = store
        self.invariants = invariants
        self.latency_us = latency_us
        self.timeout_us = timeout_us
        self.operations = 0
        self.links: dict[str, Link] = {}
        self.tail: deque[str] = deque(maxlen=TAIL)
        self._digest = blake2b(digest_size=16)
        self._watchers: list[tuple[Process, Callable[[str], None]]] = []
        store.watch(self._ring)

    @property
    def trace(self) -> str:
        """The hash of everything that happened at the store so far, with its times."""
        return self._digest.hexdigest()

    def link(self, name: str) -> Link:
        return self.links.setdefault(name, Link())

    def note(self, told: str) -> None:
        line = f"{self.hub.now_us / 1e6:12.6f} {told}"
        self.tail.append(line)
        self._digest.update(line.encode())

    def fail_over(self, replica: MemoryStore) -> None:
        """The replica is the store from now on. What it had not received is lost."""
        self.store = replica
        replica.watch(self._ring)
        self.invariants.failed_over(replica)

    # calls ----------------------------------------------------------------------------------------

    def call(self, process: Process, name: str, args: Any, options: Any) -> Any:
        """One operation, as a process that waits for its answer has it."""
        if process.is_dead:
            raise Dead
        hub, link, chance, fiber = self.hub, self.link(process.name), process.chance, self.hub.current
        if fiber is None:
            return _given(self._done(process, name, args, options))
        until = hub.now_us + self.timeout_us
        if link.lost_requests and chance.random() < link.lost_requests:
            while hub.now_us < until:
                fiber.park(until)
            raise self._unavailable()
        is_lost = bool(link.lost_answers) and chance.random() < link.lost_answers
        there, back = self._delay_us(process, link), self._delay_us(process, link)
        if not there and not back and not is_lost:
            return _given(self._done(process, name, args, options))
        answers: list[tuple[Any, BaseException | None]] = []

        def do() -> None:
            answer = self._done(process, name, args, options)
            if not is_lost:
                hub.at(max(hub.now_us + back, link.stalled_until_us), partial(arrive, answer))

        def arrive(answer: tuple[Any, BaseException | None]) -> None:
            answers.append(answer)
            fiber.wake()

        hub.after(there, do)
        while not answers and hub.now_us < until:
            fiber.park(until)
        if not answers:
            raise self._unavailable()
        return _given(answers[0])

    def _unavailable(self) -> StoreUnavailable:
        return StoreUnavailable(self.store.place, "no answer within the time limit")

    def _delay_us(self, process: Process, link: Link) -> int:
        wait = max(link.stalled_until_us - self.hub.now_us, 0)
        if not self.latency_us:
            return wait
        slow = 200 if process.chance.random() < 0.004 else 1
        return wait + round(self.latency_us * slow * process.chance.uniform(0.3, 2.0))

    def _done(self, process: Process, name: str, args: Any, options: Any) -> tuple[Any, BaseException | None]:
        self.operations += 1
        store, result, error = self.store, None, None
        try:
            result = getattr(store, name)(*args, **options)
        except (KillickError, ValueError) as refused:
            error = refused
        told = _told(name, args, result)
        self.note(f"{process.name} {name} {told}{f' {type(error).__name__}' if error is not None else ''}")
        try:
            self.invariants.check(process, store, name, args, options, result)
        except Exception as wrong:
            self.hub.fail(wrong)
        return result, error

    # notifications ----------------------------------------------------------------------------------

    def watch(self, process: Process, callback: Callable[[str], None]) -> Callable[[], None]:
        place = (process, callback)
        self._watchers.append(place)

        def stop() -> None:
            if place in self._watchers:
                self._watchers.remove(place)

        return stop

    def _ring(self, run: str) -> None:
        self._watchers = [place for place in self._watchers if not place[0].is_dead]
        for process, callback in self._watchers:
            link = self.link(process.name)
            if link.stalled_until_us > self.hub.now_us or process.chance.random() < max(
                link.lost_bells, link.lost_answers
            ):
                continue
            self.hub.after(self._delay_us(process, link), partial(_rung, process, callback, run))


def _rung(process: Process, callback: Callable[[str], None], run: str) -> None:
    if not process.is_dead:
        callback(run)


def _given(answer: tuple[Any, BaseException | None]) -> Any:
    result, error = answer
    if error is not None:
        raise error
    return result


def _told(name: str, args: Any, result: Any) -> str:
    """An operation in few words, the same in every process of the machine."""
    if name == "append":
        items: Collection[Append] = args[0]
        done = [type(each).__name__ if isinstance(each, Exception) else "" for each in result or ()]
        return " ".join(
            f"{one.run}@{one.epoch}:{one.after}+{len(one.rows)}" for item in items for one in item.group
        ) + (" ".join(done))
    if name == "claim":
        return " ".join(f"{each.head.run}@{each.head.epoch}" for each in result or ())
    if name == "renew":
        return " ".join(f"{run}@{epoch}" for run, epoch in (result or {}).items())
    if name == "deliver":
        return " ".join(f"{each.run}:{each.name}:{each.id}" for each in args[0])
    return args[0] if args and isinstance(args[0], str) else ""


class Remote:
    """The store as one process reaches it."""

    proves_life = False

    def __init__(self, network: Network, process: Process) -> None:
        self._network = network
        self._process = process
        self.place = network.store.place

    def lives(self, holder: str) -> bool:
        """Over a network no death can be proved."""
        return True

    def watch(self, callback: Callable[[str], None]) -> Callable[[], None]:
        return self._network.watch(self._process, callback)

    def close(self) -> None:
        """The store outlives the process."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._network.store, name)
        if not callable(found):
            return found
        operation = partial(self._operation, name)
        self.__dict__[name] = operation  # the next call is quicker
        return operation

    def _operation(self, called: str, /, *args: Any, **options: Any) -> Any:
        return self._network.call(self._process, called, args, options)
