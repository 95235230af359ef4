"""One story of a cluster: a seed draws its size, its work and its faults, and the same seed tells it again.

`Story.tell` raises the broken invariant. `shrunk` leaves out the faults that it does not need.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any, Final

from cluster import fibers, workload
from cluster.callers import NOTHING, drawn_callers, lost, outrun
from cluster.fibers import Hub, Process, ProcessClock
from cluster.invariants import Books, Broken, Invariants
from cluster.network import Network, Remote
from killick.client.client import AsyncClient
from killick.client.external_runs import ClientRuntime
from killick.ids import SeededIds
from killick.log import Log
from killick.model.events import Build
from killick.model.facts import PERMIT
from killick.store import MemoryStore
from killick.store.records import ENDED, RunQuery
from killick.workers.worker import Worker

THREADED: Final = [
    "killick.log.group_commit", "killick.lru", "killick.threads", "killick.log.append_groups", "killick.engine.leases",
    "killick.engine.engine", "killick.engine.steps.attempt",
    "killick.client.answers", "killick.client.external_runs",
]  # fmt: skip
RESOLVING: Final = (
    "killick.engine.control.commands:latest", "killick.engine.steps.children:latest", "killick.engine.renewals:latest",
)  # fmt: skip
"""Where a caller looks up the last renewal of a run, before it delivers something to it."""

TIMED: Final = ["killick.log.group_commit", "killick.engine.control.commands", "killick.client.time_travel"]

CALM_SECONDS_MAX: Final = 2_400
"""Once the network is calm, every run ends within this time: back-off, wrong clocks, then its own waits."""

SILENT_SECONDS_MAX: Final = 2_400
"""No trigger of a story is due less often, and no clock is wrong by more for good."""

DUE_SECONDS_MAX: Final = 60.0
"""Once the network is calm, no due run waits longer than this, a poll, and the most that a clock is wrong."""

QUIET_SECONDS: Final = 400
"""Longer than any back-off, sleep or retry: a cluster in which nothing moves for so long has come to rest."""

LEAPS: Final = (3_600.0, -3_600.0, 315_360_000.0)
"""By how many seconds a wall clock is wrong for a moment."""

Due = dict[tuple[str, int], int]

KINDS: Final = ("crash", "pause", "cut", "deaf", "mute", "flaky", "stall", "clock", "bells", "upgrade")


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong for a while, to one process or to all (`*`)."""

    at: float
    kind: str
    who: str
    seconds: float
    amount: float = 0.0

    def __str__(self) -> str:
        more = {
            "crash": f"is killed, and is back after {self.seconds:.1f} s",
            "pause": f"is frozen for {self.seconds:.1f} s",
            "cut": f"is cut off from the store for {self.seconds:.1f} s",
            "deaf": f"gets no answers for {self.seconds:.1f} s",
            "mute": f"sends nothing for {self.seconds:.1f} s, but hears bells",
            "flaky": f"loses {self.amount:.0%} of requests and answers for {self.seconds:.1f} s",
            "stall": f"has a connection that hangs for {self.seconds:.1f} s",
            "clock": f"has a wall clock that jumps by {self.amount:+.1f} s",
            "leap": f"has a wall clock that is wrong by {self.amount:+.0f} s for {self.seconds:.1f} s",
            "bells": f"hears no bells for {self.seconds:.1f} s",
            "upgrade": f"is drained and comes back with version 2 after {self.seconds:.1f} s",
            "failover": f"fails over to a replica that is {self.seconds:.3f} s behind",
        }
        return f"{self.at:10.3f} s  {self.who} {more[self.kind]}"


@dataclass(frozen=True)
class Plan:
    """Everything that chance decides before a story begins."""

    seed: int
    workers: int
    runs: int
    events: int
    minutes: float
    lease_seconds: float
    poll_seconds: float
    latency_us: int
    timeout_us: int
    lost_effects: float
    faults: tuple[Fault, ...] = ()
    tick_minutes: int = 1
    """How often the triggers by the clock fire."""
    is_called: bool = False
    """Whether runs renew while callers send to them and command them, and three people answer one question."""

    @property
    def calm_at(self) -> float:
        return max((fault.at + fault.seconds for fault in self.faults), default=0.0)


def drawn_plan(
    seed: int,
    *,
    workers: int | None = None,
    minutes: float | None = None,
    failover: bool = False,
    called: bool = False,
    leaps: bool = False,
) -> Plan:
    """The plan of a seed. A story is small, so that a machine tells many of them."""
    chance = Random(f"plan {seed}")
    count = workers or chance.choice((1, 2, 3, 3, 5, 8))
    length = minutes or chance.choice((2.0, 4.0, 8.0))
    plan = Plan(
        seed=seed, workers=count, runs=chance.randint(4, 6 + 2 * count), events=chance.randint(0, 12), minutes=length,
        lease_seconds=chance.choice((5.0, 15.0, 30.0)), poll_seconds=chance.choice((2.0, 10.0, 30.0)),
        latency_us=chance.choice((0, 300, 3_000)), timeout_us=chance.choice((2_000_000, 10_000_000, 40_000_000)),
        lost_effects=chance.choice((0.0, 0.0, 0.1)), is_called=called,
    )  # fmt: skip
    if called:  # callers are the work
        latency = chance.choice((300, 3_000, 30_000))
        plan = replace(plan, workers=min(count, 3), runs=2, events=2, minutes=minutes or 2.0, latency_us=latency)
    faults = _faults(chance, plan, chance.randint(0, 6 + 4 * plan.workers))
    if failover:
        faults.append(Fault(chance.uniform(length * 6, length * 54), "failover", "the store", chance.uniform(0.0, 3.0)))
    if leaps:
        names = ["people", *(f"w{number}" for number in range(plan.workers))]
        faults += [
            Fault(
                chance.uniform(0, length * 60),
                "leap",
                chance.choice(names),
                chance.uniform(0.5, 5),
                chance.choice(LEAPS),
            )
            for _ in range(3)
        ]
    return replace(plan, faults=tuple(sorted(faults, key=lambda fault: fault.at)))


def drawn_fleet(seed: int) -> Plan:
    """Many workers and little work for two hours: what a cluster does for most of its life."""
    chance = Random(f"fleet {seed}")
    plan = Plan(
        seed=seed, workers=200, runs=20, events=10, minutes=120.0, lease_seconds=30.0, poll_seconds=60.0, latency_us=0,
        timeout_us=10_000_000, lost_effects=0.02, tick_minutes=30,
    )  # fmt: skip
    return replace(plan, faults=tuple(_faults(chance, plan, 60)))


def _faults(chance: Random, plan: Plan, count: int) -> list[Fault]:
    names, end = [*(f"w{number}" for number in range(plan.workers)), "people"], plan.minutes * 60
    faults = [_fault(chance, names, end, plan.lease_seconds) for _ in range(count)]
    if chance.random() < 0.5:
        start = chance.uniform(0, end)
        rolling = enumerate(names[:-1])
        faults += [Fault(start + 20.0 * at, "upgrade", name, chance.uniform(1, 30)) for at, name in rolling]
    return sorted(faults, key=lambda fault: fault.at)


def _fault(chance: Random, names: Sequence[str], end: float, lease: float) -> Fault:
    kind = chance.choice((*KINDS[:-1], "flaky", "flaky"))
    who = chance.choice((*names, "people")) if kind != "flaky" or chance.random() < 0.7 else "*"
    seconds = chance.choice((0.5, 4.0, lease, lease * 1.2, 60.0)) * chance.uniform(0.7, 1.4)
    amount = {"clock": chance.choice((-120.0, -20.0, 3.0, 40.0, 120.0)), "flaky": chance.uniform(0.05, 0.5)}.get(
        kind, 0.0
    )
    return Fault(chance.uniform(0, end), kind, who, 0.0 if kind == "clock" else seconds, amount)


class Member(Process):
    """A process of the cluster: a worker, or the people's client."""

    version = 1
    worker: Worker | None = None


@dataclass
class Told:
    """What a story came to."""

    trace: str
    operations: int
    checks: int
    switches: int
    effects: int
    runs: int
    virtual_seconds: float
    worker_hours: float
    cpu_seconds: float
    tail: list[str] = field(default_factory=list)


class Story:
    """A cluster for one plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.network: Network | None = None
        self._members: dict[str, Member] = {}
        self._graves: list[Member] = []
        self._births: dict[str, int] = {}
        self._people: workload.People | None = None

    def tell(self) -> Told:
        """Tells the story to its end. Raises the first invariant that does not hold."""
        began, plan = time.process_time(), self.plan
        with _quiet(), fibers.virtual_time(plan.seed, THREADED, TIMED, **_substitutes(plan)) as hub:
            invariants = Invariants(hub.fail)
            books = Books(invariants)
            self.world = workload.World(books, Random(f"world {plan.seed}"), lost_answers=plan.lost_effects)
            store = MemoryStore(clock=ProcessClock(), ids=SeededIds(plan.seed))
            self.network = Network(hub, store, invariants, latency_us=plan.latency_us, timeout_us=plan.timeout_us)
            with workload.declared(self.world, plan.tick_minutes):
                try:
                    self._play(hub, invariants)
                    self._judge(invariants)
                    if hub.wrong is not None:
                        raise hub.wrong
                    return Told(
                        self.network.trace, self.network.operations, invariants.checks, hub.switches, books.requests,
                        len(store.runs(RunQuery(), limit=10**6)), hub.now_us / 1e6,
                        plan.workers * hub.now_us / 3.6e9, time.process_time() - began, list(self.network.tail),
                    )  # fmt: skip
                finally:
                    for member in [*self._graves, *self._members.values()]:
                        member.bury()

    # the course of things -------------------------------------------------------------------------

    def _play(self, hub: Hub, invariants: Invariants) -> None:
        plan, chance = self.plan, Random(f"work {self.plan.seed}")
        for number in range(plan.workers):
            self._begin(f"w{number}")
        starts = {
            f"r{number}": (chance.uniform(0, plan.minutes * 60), workload.drawn(chance, f"r{number}"))
            for number in range(plan.runs)
        }
        events = {f"order-{number}": chance.uniform(0, plan.minutes * 60) for number in range(plan.events)}
        asked = drawn_callers(Random(f"callers {plan.seed}"), plan.minutes * 60) if plan.is_called else NOTHING
        self._begin("people", lambda people: people.live(starts, events, asked), invariants)
        for fault in plan.faults:
            hub.at(round(fault.at * 1e6), partial(self._strike, fault), first=True)
        hub.run(round(max(plan.minutes * 60, plan.calm_at) * 1e6))
        until, due = hub.now_us + CALM_SECONDS_MAX * 10**6, Due()
        limit_us = self._due_limit_us()
        least = hub.now_us + limit_us + 60 * 10**6
        moved = (0, hub.now_us)
        while hub.wrong is None and hub.now_us < until and (hub.now_us < least or not self._is_done()):
            hub.run(min(hub.now_us + 10 * 10**6, until))
            due = self._still_due(due, hub.now_us, invariants, limit_us)
            length = self._length()
            moved = moved if length == moved[0] else (length, hub.now_us)
            if hub.now_us - moved[1] > QUIET_SECONDS * 10**6 + limit_us:
                return  # nothing will come any more

    def _length(self) -> int:
        """How many events all runs have that have not ended."""
        assert self.network is not None
        store = self.network.store
        rows = [row for row in store.runs(RunQuery(), limit=10**6) if row.status not in ENDED]
        heads = [store.head(row.run) for row in rows]
        return sum(head.seq for head in heads if head is not None)

    def _due_limit_us(self) -> int:
        wrong_us = max(abs(member.clock.skew_us) for member in self._members.values())
        return round((DUE_SECONDS_MAX + self.plan.poll_seconds) * 1e6) + 2 * wrong_us

    def _still_due(self, before: Due, now_us: int, invariants: Invariants, limit_us: int) -> Due:
        """The runs that are due, by the length of their logs, and since when they have been. A schedule may be due
        again at once where a clock is behind: only a log that does not grow is stuck."""
        assert self.network is not None
        store = self.network.store
        heads = [store.head(row.run) for row in store.due(fibers.START_US + now_us, limit=10**6)]
        due = {(head.run, head.seq): before.get((head.run, head.seq), now_us) for head in heads if head is not None}
        for (run, _), since_us in due.items():
            if now_us - since_us > limit_us:
                told = f"{run} has been due for {(now_us - since_us) / 1e6:.0f} s; {store.head(run)}"
                invariants.broken("no run is stuck while a worker is free", told)
        return due

    def _is_done(self) -> bool:
        assert self.network is not None
        rows = self.network.store.runs(RunQuery(), limit=10**6)
        heard = len(self.world.heard) >= len(self.network.invariants.completed)
        idle = self._people is not None and not self._people.busy
        return idle and heard and all(row.status in ENDED for row in rows)

    def _begin(self, name: str, live: Callable[[workload.People], Any] | None = None, *given: Any) -> None:
        """Starts a process, again under the same name where it died."""
        assert self.network is not None
        birth = self._births[name] = self._births.get(name, 0) + 1
        chance = Random(f"{name} {birth} {self.plan.seed}")
        before = self._members.get(name)
        skew = before.clock.skew_us if before is not None else chance.choice((0, 0, -2_000_000, 5_000_000, 20_000_000))
        member = Member(name, chance, ProcessClock(skew, chance.uniform(0, 1e5)))
        member.version = before.version if before is not None else 1
        self._members[name] = member
        member.serve(partial(self._main, member, live, given))

    async def _main(self, member: Member, live: Callable[[workload.People], Any] | None, given: Any) -> None:
        assert self.network is not None
        store: Any = Remote(self.network, member)
        ids = SeededIds(member.chance.getrandbits(60))
        runtime = ClientRuntime(
            store, clock=member.clock, ids=ids, build=lambda agent: Build(version=f"v{member.version}"),
            lease_seconds=self.plan.lease_seconds,
        )  # fmt: skip
        if live is not None:
            self._people = workload.People(AsyncClient(runtime), member, *given)
            await live(self._people)
            return
        member.worker = Worker(
            runtime, agents=workload.AGENTS, lease_seconds=self.plan.lease_seconds,
            poll_seconds=self.plan.poll_seconds, concurrency=4,
        )  # fmt: skip
        await member.worker.serve()

    # faults ---------------------------------------------------------------------------------------

    def _strike(self, fault: Fault) -> None:
        assert self.network is not None
        self.network.note(f"FAULT {fault}")
        hub = self.network.hub
        over_us = round(fault.seconds * 1e6)
        if fault.kind == "failover":
            self._fail_over(hub, over_us)
            return
        if fault.kind in ("crash", "upgrade") and fault.who == "people":
            return  # people remember what they began
        for name in list(self._members) if fault.who == "*" else [fault.who]:
            member, link = self._members[name], self.network.link(name)
            match fault.kind:
                case "crash":
                    self._crash(member, over_us)
                case "pause":
                    member.paused_until_us = max(member.paused_until_us, hub.now_us + over_us)
                case "clock":
                    member.clock.skew_us += round(fault.amount * 1e6)
                case "leap":
                    member.clock.skew_us += round(fault.amount * 1e6)
                    hub.at(hub.now_us + over_us, partial(self._leap_back, name, fault.amount), first=True)
                case "stall":
                    link.stalled_until_us = max(link.stalled_until_us, hub.now_us + over_us)
                case "upgrade":
                    if member.worker is not None and not member.is_dead:
                        member.worker.drain()
                    hub.at(hub.now_us + over_us, partial(self._upgrade, name), first=True)
                case _:
                    before = (link.lost_requests, link.lost_answers, link.lost_bells)
                    lost = {"flaky": (fault.amount,) * 3, "cut": (1.0, 1.0, 1.0), "deaf": (0.0, 1.0, 1.0)}
                    lost |= {"mute": (1.0, 0.0, 0.0), "bells": (0.0, 0.0, 1.0)}
                    worst = tuple(map(max, before, lost[fault.kind]))
                    link.lost_requests, link.lost_answers, link.lost_bells = worst
                    hub.at(hub.now_us + over_us, partial(self._mend, name), first=True)

    def _leap_back(self, name: str, amount: float) -> None:
        self._members[name].clock.skew_us -= round(amount * 1e6)

    def _mend(self, name: str) -> None:
        """The end of one fault of a connection ends all of them."""
        assert self.network is not None
        link = self.network.link(name)
        link.lost_requests = link.lost_answers = link.lost_bells = 0.0

    def _crash(self, member: Member, over_us: int) -> None:
        assert self.network is not None
        if member.is_dead:
            return
        member.kill()
        self._graves.append(member)
        hub = self.network.hub
        hub.at(hub.now_us + over_us, partial(self._begin, member.name), first=True)

    def _upgrade(self, name: str) -> None:
        """What has not ended by now is killed."""
        member = self._members[name]
        was_dead = member.is_dead
        member.version = 2
        if not was_dead:
            member.kill()
            self._graves.append(member)
            self._begin(name)

    def _fail_over(self, hub: Hub, behind_us: int) -> None:
        assert self.network is not None
        network = self.network
        replica = network.store.copied(ProcessClock())

        def swap() -> None:
            network.note("FAULT the replica is the store now")
            self.world.books.tolerates_twice = True
            network.fail_over(replica)
            self.world.answered.clear()  # an answer that was lost is given again
            if self._people is not None:
                self._members["people"].loop.call_soon_threadsafe(self._people.repeat)

        hub.at(hub.now_us + behind_us, swap, first=True)

    # the end ----------------------------------------------------------------------------------------

    def _judge(self, invariants: Invariants) -> None:
        """What can only be said at the end: every run came to it, and nothing that was acknowledged is missing."""
        assert self.network is not None
        store, world, plan = self.network.store, self.world, self.plan
        rows = {row.run: row for row in store.runs(RunQuery(), limit=10**6)}
        lost_some = any(fault.kind == "failover" for fault in plan.faults)
        log = Log(store, clock=ProcessClock())
        for told in [] if self._people is None or lost_some else lost(self._people.callers.calls, store, log):
            invariants.broken("every call that was accepted is on record", told)
        for row in rows.values():
            silent_us = (row.wake_at_us or 0) - fibers.START_US - self.network.hub.now_us
            if row.agent.startswith("killick.trigger") and silent_us > SILENT_SECONDS_MAX * 10**6:
                told = f"{row.run} is next due in {silent_us / 3.6e9:.1f} hours"
                invariants.broken("a clock that was wrong for a moment silences no trigger", told)
            if row.status not in ENDED:
                told = (
                    f"{row.run} is {row.status} {CALM_SECONDS_MAX} s after the last fault; {store.head(row.run)}; {row}"
                )
                invariants.broken("no run is stuck while a worker is free", told)
            elif row.status != "completed" and not row.run.startswith(("poller", "refund")):
                invariants.broken("every run completes", f"{row.run} {row.status}")
        if self._people is not None and self._people.busy:
            invariants.broken("people are served", f"{self._people.busy} of their requests are open")
        if lost_some:
            return
        for run, program in world.starts.items():
            if run not in rows:
                invariants.broken("no acknowledged event is lost", f"{run} was started and is not there")
                continue
            for tool, label in workload.labels(program):
                if world.books.done[label] != 1:
                    invariants.broken(
                        "every effect happens", f"{tool} of {label} happened {world.books.done[label]} times"
                    )
        for event in world.published:
            if world.books.done[event] != 1:
                invariants.broken("every event starts one run", f"{event} was acted on {world.books.done[event]} times")
        for place, value in world.answered.items():
            run, _, step = place.rpartition(":")
            state = log.state(run)
            found = state.fold.step(step)
            if found is None or value not in str(state.data(found.ended)):
                invariants.broken("no acknowledged answer is lost", f"{place}: {value}")
        if left := store.owned(PERMIT):
            invariants.broken("an ended run holds no permit", f"{left}")
        missed = {f"{run}:{seq}:cluster-hook" for run, seq in invariants.completed} - set(world.heard)
        if missed:
            invariants.broken("every event reaches the hook", f"not told: {sorted(missed)}")


def _substitutes(plan: Plan) -> dict[str, Any]:
    salts = Random(f"salt {plan.seed}")
    late = dict.fromkeys(RESOLVING, outrun) if plan.is_called else {}
    return late | {
        "killick.log.group_commit:SystemClock": fibers.CallerClock,
        "killick.log.group_commit:_IDLE_ROUNDS": 4,  # polls of an idle thread and of an idle hook: fewer, to save time
        "killick.workers.hooks:LOOK_SECONDS": 10.0,
        "killick.engine.steps.attempt:SimpleQueue": fibers.VirtualQueue,
        "killick.log.writer:salt": lambda: bytes(salts.choices(b" \t", k=64)),
        "killick.agents.runtime:os": _Os(),
    }


class _Os:
    """Every process of a story has a number of the story's own."""

    @staticmethod
    def getpid() -> int:
        return 1

    def __getattr__(self, name: str) -> Any:
        import os

        return getattr(os, name)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Killed processes leave coroutines behind that were never awaited, and workers log what befalls them."""
    before, was_on = logging.root.manager.disable, gc.isenabled()
    gc.disable()  # a collection at a random moment would unwind the dead in the middle of the living
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            yield
    finally:
        logging.disable(before)
        if was_on:
            gc.enable()


def told(plan: Plan) -> Told | BaseException:
    """Tells a plan's story; returns what broke instead of raising it."""
    try:
        return Story(plan).tell()
    except Exception as error:
        return error


def shrunk(plan: Plan, rule: str, *, tries: int = 200) -> Plan:
    """Leaves out one fault after another while the story still breaks the same rule."""
    at = 0
    while at < len(plan.faults) and tries > 0:
        tries -= 1
        fewer = replace(plan, faults=plan.faults[:at] + plan.faults[at + 1 :])
        if rule_of(told(fewer)) == rule:
            plan = fewer
        else:
            at += 1
    return plan


def rule_of(outcome: object) -> str | None:
    """Which rule a story broke; an error that is no rule goes by its type."""
    if isinstance(outcome, Broken):
        return outcome.rule
    return type(outcome).__name__ if isinstance(outcome, BaseException) else None
