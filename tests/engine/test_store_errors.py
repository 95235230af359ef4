"""A store that fails at any operation, for a moment or for a while, hangs nothing: errors travel, and runs go on."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

import killick
from faulty_store import faulty
from killick.clock import ManualClock
from killick.engine.control.commands import COMMAND_SECONDS
from killick.errors import KillickError, StoreFull, StoreUnavailable
from killick.log.writer import Entry
from killick.model import events as e
from killick.store import MemoryStore, SqliteStore, Store
from killick.workers.worker import Worker
from leasing import leased_by
from seeds import repeats

BACKSTOP_SECONDS = 300.0


@killick.tool(name="errors_pay", effect="idempotent")
async def pay(who: str) -> str:
    return f"paid {who}"


@killick.agent(name="errors_child")
async def child(run: killick.Run, who: str) -> str:
    return await run.call(pay, who)


@killick.agent(name="errors_parent")
async def parent(run: killick.Run) -> list[str]:
    first = await run.spawn(child, "ann")
    second = await run.spawn(child, "bob")
    paid = await run.gather(first.result(), run.call(pay, "cid"), second.result())
    return [*paid]


@killick.agent(name="errors_blocking")
def blocking(run: killick.SyncRun) -> list[str]:
    first = run.spawn(child, "ann")
    return [run.result(first), run.call(pay, "cid")]


WANTED: dict[Any, list[str]] = {
    parent: ["paid ann", "paid cid", "paid bob"],
    blocking: ["paid ann", "paid cid"],
}


def within(seconds: float, work: Callable[[], Any]) -> Any:
    """What some work returns; the test fails where it hangs."""
    found: list[Any] = []

    def to_its_end() -> None:
        try:
            found.append(work())
        except KillickError as error:
            found.append(error)

    thread = threading.Thread(target=to_its_end, daemon=True)
    thread.start()
    thread.join(seconds)
    assert found, "it hangs"
    return found[0]


def goes_on(kd: killick.Client, agent: Any) -> Any:
    """Run it with the same client until the store does its part again."""
    for _ in range(40):
        result = within(BACKSTOP_SECONDS, lambda: kd.run(agent, id="r"))
        if not isinstance(result, KillickError):
            return result
    raise AssertionError(f"it never went on: {result}")


def tried(agent: Any, inner: Store, **fault: Any) -> int:
    """Run an agent to its end over a store that fails; how many operations that took."""
    store = faulty(inner, **fault)
    kd, plain = killick.Client(store), killick.Client(inner)
    try:
        assert goes_on(kd, agent) == WANTED[agent], store.failed
        count = store.operations
        assert plain.store.verify().problems == []
        for run in ("r", "r/1", "r/2"):
            within(BACKSTOP_SECONDS, lambda run=run: until_free(inner, run))
    finally:
        within(BACKSTOP_SECONDS, lambda: (kd.close(), plain.close()))
    return count


def until_free(store: Store, run: str) -> bool:
    while (head := store.head(run)) is not None and head.holder is not None:
        time.sleep(0.005)
    return True


def swept(
    agent: Any, make: Callable[[], Store], *, when: Literal["before", "after"], times: int, every: int, first: int
) -> None:
    """Fail each of the operations that are so far apart."""
    for number in range(first, tried(agent, make()) + 1, every):
        tried(agent, make(), fail_at=number, times=times, when=when, error=StoreFull("killick.db"))


@pytest.mark.gate(1)
@pytest.mark.parametrize("agent", [parent, blocking], ids=["async", "blocking"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_no_operation_that_fails_once_hangs_a_parent_or_its_children(
    agent: Any, when: Literal["before", "after"]
) -> None:
    swept(agent, MemoryStore, when=when, times=1, every=3, first=1 if when == "before" else 3)


@pytest.mark.slow
@pytest.mark.parametrize("agent", [parent, blocking], ids=["async", "blocking"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("times", [1, 12])
def test_a_disk_that_is_full_for_a_while_hangs_nothing_at_any_operation(
    agent: Any, when: Literal["before", "after"], times: int, tmp_path: Path
) -> None:
    """Before or after its effect, once or twelve times goes in turn from one operation to the next; in `make soak` it
    is all of them."""
    number = iter(range(10_000))
    swept(
        agent, lambda: SqliteStore(tmp_path / f"{next(number)}.db", durability="process"),
        when=when, times=times, every=repeats(4, 1), first=repeats(1 + 2 * (times > 1) + (when == "after"), 1),
    )  # fmt: skip


def test_a_parent_raises_what_its_child_met(monkeypatch: pytest.MonkeyPatch) -> None:
    kd = killick.Client(MemoryStore())
    lease, full = kd.runtime.store.lease, StoreFull("killick.db")

    def failing(run: str, *args: Any, **options: Any) -> Any:
        if run != "r":
            raise full
        return lease(run, *args, **options)

    monkeypatch.setattr(kd.runtime.store, "lease", failing)
    assert within(BACKSTOP_SECONDS, lambda: kd.run(parent, id="r")) is full
    monkeypatch.undo()
    assert goes_on(kd, parent) == WANTED[parent]
    kd.close()


def test_a_run_that_could_not_be_let_go_is_let_go_when_the_store_can() -> None:
    """Also for another process, which waits for it."""
    store = MemoryStore()
    kd, other = killick.Client(faulty(store)), killick.Client(store)
    release, failing = kd.runtime.store.release, threading.Event()
    failing.set()

    def released(*args: Any, **options: Any) -> None:
        if failing.is_set():
            raise StoreFull("killick.db")
        release(*args, **options)

    kd.runtime.engine.leases._store = _With(store, released)  # type: ignore[assignment]
    kd.start(child, "ann", id="r")
    assert kd.advance("r").result == "paid ann"
    kd.start(waiting, id="w")
    kd.advance("w")
    with pytest.raises(killick.errors.RunBusy):
        other.advance("w")
    failing.clear()
    kd.runtime.engine.leases.look()
    assert other.advance("w").status == "waiting"
    kd.close()
    other.close()


def test_a_command_that_fails_leaves_a_run_whose_worker_died_to_the_next_worker() -> None:
    """Whichever access of the command fails, and whether or not the store did it."""
    counted = 0
    while (found := _commanded(counted, "before")) is not None:
        assert _commanded(counted, "after") == found
        counted += 1
    assert counted > 4


def _commanded(fail_at: int, when: Literal["before", "after"]) -> str | None:
    """The access of a command that failed; None: there is none by that number."""
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    with killick.Client(store, clock=clock) as kd:
        kd.start(child, "ann", id="r")
        _died_with("r", kd, clock)
        failing = faulty(store, fail_at=fail_at + 1, when=when)
        with contextlib.suppress(StoreUnavailable):
            killick.Client(failing, clock=clock).edit.note("r", "looked at it", by="ann")
        clock.advance(COMMAND_SECONDS + 1)
        assert [row.run for row in store.due(clock.now_us())] == ["r"], failing.failed
        return failing.failed


def test_a_command_that_read_a_run_before_a_worker_died_with_it_leaves_it_to_the_next_worker() -> None:
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    with killick.Client(store, clock=clock) as kd:
        kd.start(child, "ann", id="r")
        read = kd.log.head("r")
        _died_with("r", kd, clock)
        leased = kd.log.lease("r", "command", seconds=30, known=read)
        assert leased.left is not None
        store.release("r", epoch=leased.head.epoch, left=leased.left is not None)
        assert [row.run for row in store.due(clock.now_us())] == ["r"]


def _died_with(run: str, kd: killick.Client, clock: ManualClock) -> None:
    """A worker took a run and died."""
    leased_by("w", kd.log, run, seconds=30).append(Entry(e.RunTaken(at=clock.now_us(), epoch=1, holder="w")))
    clock.advance(31)


@killick.agent(name="errors_waiting")
async def waiting(run: killick.Run) -> Any:
    return await run.wait("something")


class _With:
    """A store with another `release`."""

    def __init__(self, store: Store, release: Callable[..., None]) -> None:
        self._store, self.release = store, release

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@killick.agent(name="errors_started")
async def started(run: killick.Run) -> list[str]:
    one = await run.spawn(child, "ann")
    return [await one.result(), await run.call(pay, "dan")]


def served(**fault: Any) -> int:
    """A worker, whose store fails somewhere, brings every run to its end; how many operations that took."""
    inner = MemoryStore()
    store = faulty(inner, **fault)
    kd, plain = killick.Client(store), killick.Client(inner)

    async def serve() -> None:
        serving = Worker(kd.runtime, lease_seconds=1, poll_seconds=0.05, agents=["errors_started", "errors_child"])
        async with serving as worker:
            async with asyncio.timeout(BACKSTOP_SECONDS):
                while not all(plain.info(run).status == "completed" for run in ("one", "two")):
                    await asyncio.sleep(0.01)
            assert not worker.stopping

    try:
        for run in ("one", "two"):
            plain.start(started, id=run)
        asyncio.run(serve())
        assert [plain.info(run).status for run in ("one", "two")] == ["completed"] * 2, store.failed
    finally:
        within(BACKSTOP_SECONDS, lambda: (kd.close(), plain.close()))
    return store.operations


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("times", [1, 4])
def test_a_worker_whose_store_fails_at_any_operation_brings_every_run_to_its_end(
    when: Literal["before", "after"], times: int
) -> None:
    for number in range(1, min(served(), 120) + 1, 3):
        served(fail_at=number, times=times, when=when, error=StoreFull("killick.db"))
