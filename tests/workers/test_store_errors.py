"""A store that fails at any operation loses no firing and no delivery, doubles none, and stops no worker."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import pytest

import killick
from faulty_store import faulty
from killick.definitions.agents import AGENTS
from killick.errors import StoreFull
from killick.model import system_events
from killick.store import MemoryStore, SqliteStore, Store
from killick.triggers import TRIGGERS
from killick.workers import hooks, trigger_runner, worker
from killick.workers.hooks import HOOKS, HookEvent
from killick.workers.worker import Worker
from seeds import repeats

BACKSTOP_SECONDS = 600.0
When = Literal["before", "after"]


class Shifted(killick.clock.SystemClock):
    """The machine's clock, which a test may put forward."""

    offset_us = 0

    def now_us(self) -> int:
        return super().now_us() + self.offset_us


@pytest.fixture(autouse=True)
def _declarations(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test declares is gone after it, and rests after an error are short."""
    triggers, agents, hooked = TRIGGERS.copy(), dict(AGENTS.declared), dict(HOOKS)
    TRIGGERS.clear()
    HOOKS.clear()
    monkeypatch.setattr(worker, "_REST_SECONDS", (0.02, 0.05))
    monkeypatch.setattr(trigger_runner, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(hooks, "LOOK_SECONDS", 0.02)
    yield
    TRIGGERS.clear()
    TRIGGERS.update(triggers)
    AGENTS.declared.clear()
    AGENTS.declared.update(agents)
    HOOKS.clear()
    HOOKS.update(hooked)


@killick.agent(name="faults_hourly")
async def hourly(run: killick.Run) -> str:
    return "done"


@killick.agent(name="faults_order")
async def order(run: killick.Run, number: int) -> int:
    return number


@killick.agent(name="faults_queued")
async def queued(run: killick.Run, number: int) -> int:
    return number


@killick.agent(name="faults_alarm")
async def alarm(run: killick.Run) -> str:
    return "rung"


FIRINGS = {"faults_hourly": 3, "faults_order": 2, "faults_queued": 2, "faults_alarm": 1}


def served(
    make: Callable[[Shifted], Store],
    prepare: Callable[[killick.Client, Shifted], None],
    is_done: Callable[[killick.Client], bool],
    check: Callable[[killick.Client], None],
    **fault: Any,
) -> int:
    """Lets a worker over a failing store serve until all is done; returns the number of operations."""
    clock = Shifted()
    inner = make(clock)
    store = faulty(inner, **fault)
    plain = killick.Client(inner, clock=clock)
    prepare(plain, clock)
    kd = killick.Client(store, clock=clock)

    async def serve() -> None:
        async with Worker(kd.runtime, lease_seconds=0.5, poll_seconds=0.02) as serving:
            try:
                async with asyncio.timeout(BACKSTOP_SECONDS):
                    while not is_done(plain):
                        await asyncio.sleep(0.01)
            except TimeoutError:
                raise AssertionError(f"hangs after {store.failed} failed: {fault}") from None
            assert not serving.stopping

    asyncio.run(serve())
    assert plain.store.verify().problems == []
    check(plain)
    kd.close()
    plain.close()
    return store.operations


def swept(scenario: Callable[..., int], *, every: int, first: int = 1, **fault: Any) -> None:
    for number in range(first, min(scenario(), 150) + 1, every):
        scenario(fail_at=number, error=StoreFull("killick.db"), **fault)


def at_any(scenario: Callable[..., int], *, disk: bool, times: int, when: When) -> None:
    """Fails every operation in one of eight ways: before or after its effect, once or often, in memory or on a disk; in
    `make soak`, in all of them."""
    first = repeats(1 + 4 * disk + 2 * (times > 1) + (when == "after"), 1)
    swept(scenario, every=repeats(8, 1), first=first, when=when, times=times)


def in_memory(clock: Shifted) -> Store:
    return MemoryStore(clock=clock)


def on_disk(folder: Path) -> Callable[[Shifted], Store]:
    number = iter(range(100_000))
    return lambda clock: SqliteStore(folder / f"{next(number)}.db", durability="process", clock=clock)


# triggers -----------------------------------------------------------------------------------------


def fired(make: Callable[[Shifted], Store], **fault: Any) -> int:
    """Three times of a schedule are due, four events are published, and a condition begins to hold."""

    def prepare(plain: killick.Client, clock: Shifted) -> None:
        TRIGGERS.clear()
        killick.triggers.every("1h", hourly, missed="all", overlap="allow")
        killick.triggers.on_event("faults.order", order)
        killick.triggers.on_event("faults.queued", queued, overlap="queue")
        trigger_runner.ensure(plain.runtime.engine)
        killick.triggers.when(lambda: True, alarm, every=0.1)
        for number in (1, 2):
            for name in ("faults.order", "faults.queued"):
                assert plain.triggers.publish(name, number) == 1
        clock.offset_us = round(3.5 * 3_600_000_000)

    def ran(plain: killick.Client) -> Counter[str]:
        return Counter(row.agent for row in plain.list(status="completed"))

    def check(plain: killick.Client) -> None:
        assert Counter(row.agent for row in plain.list() if row.agent in FIRINGS) == FIRINGS
        for agent, count in FIRINGS.items():
            events = [recorded.event for recorded in plain.events(f"trigger:{agent}")]
            firings = [event.run for event in events if isinstance(event, system_events.TriggerFired)]
            assert len(firings) == len(set(firings)) == count, (agent, fault)
            assert not any(isinstance(event, system_events.TriggerPassed) for event in events), (agent, fault)
        inputs = sorted(plain.state(row.id).input for row in plain.list(agent="faults_order"))
        assert inputs == [1, 2]

    return served(make, prepare, lambda plain: ran(plain) == FIRINGS, check, **fault)


@pytest.mark.gate(1)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_trigger_whose_store_fails_once_fires_each_time_once(when: When) -> None:
    swept(lambda **fault: fired(in_memory, **fault), every=17, when=when)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("times", [1, 8])
@pytest.mark.parametrize("disk", [False, True], ids=["memory", "sqlite"])
def test_a_trigger_whose_store_fails_at_any_operation_fires_each_time_once(
    when: When, times: int, disk: bool, tmp_path: Path
) -> None:
    make = on_disk(tmp_path) if disk else in_memory
    at_any(lambda **fault: fired(make, **fault), disk=disk, times=times, when=when)


# hooks --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def far() -> Iterator[tuple[str, list[str]]]:
    """A service that takes every webhook: its address, and the runs that it was told of."""
    taken: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            taken.append(json.loads(self.rfile.read(int(self.headers["content-length"])))["run"])
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/", taken
        server.shutdown()


def told(make: Callable[[Shifted], Store], far: tuple[str, list[str]], **fault: Any) -> int:
    """Three runs end; a webhook, a blocking hook, an async one and one that reads the event's values hear of each.

    Each allows one attempt: a store that fails must not use it up.
    """
    address, posted = far
    posted.clear()
    heard: dict[str, list[str]] = {"posted": posted, "plain": [], "awaited": [], "reading": []}

    def prepare(plain: killick.Client, clock: Shifted) -> None:
        HOOKS.clear()
        once: dict[str, Any] = {"agent": "faults_order", "retry": killick.Retry(attempts=1)}

        killick.webhook(address, "run.completed", secret="whsec_MfKQ9r8GKYqrTwjUPD8ILPZI", name="posted", **once)

        @killick.on("run.completed", name="plain", **once)
        def blocking(event: HookEvent) -> None:
            heard["plain"].append(event.run)

        @killick.on("run.completed", name="awaited", **once)
        async def awaited(event: HookEvent) -> None:
            heard["awaited"].append(event.run)

        @killick.on("run.completed", name="reading", **once)
        def reading(event: HookEvent) -> None:
            assert event.data["result"] == int(event.run)
            assert event.info().status == "completed"
            heard["reading"].append(event.run)

        hooks.ensure(plain.runtime.engine)
        for number in (1, 2, 3):
            plain.start(order, number, id=str(number))

    def called(plain: killick.Client) -> dict[str, list[str]]:
        return {
            name: [
                recorded.event.run for recorded in plain.events(f"hook:{name}")
                if isinstance(recorded.event, system_events.HookCalled | system_events.HookDropped)
            ]
            for name in heard
        }  # fmt: skip

    def check(plain: killick.Client) -> None:
        for name, runs in called(plain).items():
            kinds = {type(recorded.event) for recorded in plain.events(f"hook:{name}")}
            assert not kinds & {system_events.HookDropped, system_events.HookFailed}, (name, fault)
            assert sorted(runs) == ["1", "2", "3"], (name, fault)
            # At least once, in the order of the record.
            assert list(dict.fromkeys(heard[name])) == runs, (name, fault)

    return served(make, prepare, lambda plain: all(len(runs) == 3 for runs in called(plain).values()), check, **fault)


@pytest.mark.gate(1)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_hook_whose_store_fails_once_hears_every_event(when: When, far: Any) -> None:
    swept(lambda **fault: told(in_memory, far, **fault), every=17, when=when)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("times", [1, 8])
@pytest.mark.parametrize("disk", [False, True], ids=["memory", "sqlite"])
def test_a_hook_whose_store_fails_at_any_operation_hears_every_event(
    when: When, times: int, disk: bool, far: Any, tmp_path: Path
) -> None:
    make = on_disk(tmp_path) if disk else in_memory
    at_any(lambda **fault: told(make, far, **fault), disk=disk, times=times, when=when)


def test_a_disk_that_stays_full_is_logged_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker, "_BACKOFF_SECONDS_MAX", 0.001)
    polls = 0

    async def play() -> None:
        async with killick.open_async("memory:") as kd:

            def claim(*_: Any, **__: Any) -> Any:
                nonlocal polls
                polls += 1
                if polls <= 100:
                    raise StoreFull("memory:")
                return []

            monkeypatch.setattr(kd.runtime.store, "claim", claim)
            async with kd.worker() as serving:
                await asyncio.wait_for(serving.until_idle(), 600)

    asyncio.run(play())
    told = [record for record in caplog.records if record.getMessage().startswith("store ")]
    assert (polls, len(told)) == (101, 7)
