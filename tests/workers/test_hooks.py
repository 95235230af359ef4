"""Hooks hear each event at least once and in order, from a cursor that survives whoever attends to them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

import killick
from killick.archive import prune
from killick.errors import DeclarationRefused, EpochStale, HandleClosed, RunBroken, StoreUnavailable
from killick.ids import SeededIds
from killick.log import Entry
from killick.model import events as e
from killick.model import system_events
from killick.model.facts import Hook as Cursor
from killick.store import MemoryStore, SqliteStore, Store
from killick.workers import hooks
from killick.workers.hooks import HOOKS, HookEvent, attend, ensure, trim


@pytest.fixture(autouse=True)
def declared() -> Iterator[None]:
    """Hooks that a test declares are forgotten when it ends."""
    before = dict(HOOKS)
    yield
    HOOKS.clear()
    HOOKS.update(before)


class Line:
    """The way from one process to the store: it is cut at its so-many-th append, before it is made or after."""

    def __init__(self, store: Store, cut_at: int = 0, when: str = "") -> None:
        self._store, self.cut_at, self.when = store, cut_at, when
        self.appends = 0
        self.is_cut = False

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if not callable(found):
            return found

        def passed(*args: Any, **kwargs: Any) -> Any:
            if name == "close":
                return None
            dead = StoreUnavailable(self._store.place, "this process is dead")
            if self.is_cut:
                raise dead
            self.appends += name == "append"
            self.is_cut = name == "append" and self.appends == self.cut_at
            if self.is_cut and self.when == "before":
                raise dead
            done = found(*args, **kwargs)
            if self.is_cut:
                raise dead
            return done

        return passed


class World:
    """A store, a clock that stands still, and clients as processes that come and go."""

    def __init__(self, store: Store, clock: killick.clock.ManualClock) -> None:
        self.store, self.clock = store, clock
        self._clients: list[killick.Client] = []

    def process(self, **cut: Any) -> killick.Client:
        line = cast("Store", Line(self.store, **cut))
        made = killick.Client(line, clock=self.clock, ids=SeededIds(len(self._clients)), behind=False)
        self._clients.append(made)
        return made

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self.store.close()


@pytest.fixture(params=["memory", "sqlite"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    clock = killick.clock.ManualClock()
    path = tmp_path / "killick.db"
    made = World(MemoryStore(clock=clock) if request.param == "memory" else SqliteStore(path, clock=clock), clock)
    yield made
    made.close()


@pytest.fixture
def kd(world: World) -> killick.Client:
    return world.process()


class Patience:
    """A worker that stops after so many rests without anything to do; a rest for a backoff moves the clock."""

    def __init__(self, clock: killick.clock.ManualClock, *, rests: int = 1, leaps: bool = False) -> None:
        self.clock, self.rests, self.leaps = clock, rests, leaps
        self.rested: list[float] = []

    @property
    def stopping(self) -> bool:
        return len(self.rested) >= self.rests

    async def rest(self, seconds: float) -> None:
        self.rested.append(seconds)
        if self.leaps:
            self.clock.advance(seconds)


def attended(kd: killick.Client, name: str, *, rests: int = 1, leaps: bool = False) -> Patience:
    """Attend to a hook as a worker would, until it has rested so often."""
    clock = cast("killick.clock.ManualClock", kd.runtime.clock)
    duty = Patience(clock, rests=rests, leaps=leaps)
    run = f"hook:{name}"
    head = kd.runtime.store.lease(run, kd.runtime.engine.holder, seconds=60)
    try:
        asyncio.run(attend(kd.runtime.engine, kd.runtime.log.open(run), duty))
    finally:
        if not cast("Any", kd.runtime.store).is_cut:
            kd.runtime.store.release(run, epoch=head.epoch)
    return duty


def kinds_of(kd: killick.Client, run: str) -> list[str]:
    return [str(recorded.event.__struct_config__.tag) for recorded in kd.events(run)]


def cursor_of(kd: killick.Client, name: str) -> Cursor:
    found = kd.state(f"hook:{name}").fold.facts.hook
    assert found is not None
    return found


@killick.agent(name="hooked_ok")
async def works(run: killick.Run, number: int) -> int:
    return number


@killick.agent(name="hooked_bad")
async def fails(run: killick.Run, number: int) -> int:
    raise ValueError(f"no {number}")


@killick.agent(name="hooked_asks")
async def asks(run: killick.Run) -> str:
    return (await run.ask("Pay?", to="managers")).kind


@killick.agent(name="hooked_waits")
async def waits(run: killick.Run) -> Any:
    return await run.wait("paid")


def some_runs(kd: killick.Client, *numbers: int) -> None:
    for number in numbers:
        kd.run(works, number, id=f"run-{number}")


class Heard(list[str]):
    """What a hook heard, by key."""

    def __call__(self, event: HookEvent) -> None:
        self.append(event.key)


def listening(name: str = "tell", *kinds: str, **options: Any) -> Heard:
    heard = Heard()

    @killick.on(*kinds or ("run.completed",), name=name, **options)
    def tell(event: HookEvent) -> None:
        heard(event)

    return heard


# hearing ------------------------------------------------------------------------------------------


def test_a_hook_hears_each_event_of_its_kinds_once_and_in_order(kd: killick.Client) -> None:
    heard = listening("tell", "run.started", "run.completed")
    assert ensure(kd.runtime.engine) == ["killick.hook:tell"]
    some_runs(kd, 1, 2)
    attended(kd, "tell")
    assert heard == ["run-1:1:tell", "run-1:3:tell", "run-2:1:tell", "run-2:3:tell"]
    some_runs(kd, 3)
    attended(kd, "tell")
    assert heard[4:] == ["run-3:1:tell", "run-3:3:tell"]
    assert kinds_of(kd, "hook:tell") == ["run.started", "hook.set", *["hook.called"] * 6]
    assert kd.store.verify().problems == []


def test_a_new_hook_hears_nothing_of_the_past(kd: killick.Client) -> None:
    some_runs(kd, 1)
    heard = listening()
    ensure(kd.runtime.engine)
    attended(kd, "tell")
    some_runs(kd, 2)
    attended(kd, "tell")
    assert heard == ["run-2:3:tell"]


def test_an_async_hook_is_told_with_everything_that_can_be_known(kd: killick.Client) -> None:
    seen: list[HookEvent] = []

    @killick.on("run.failed", "wait.opened", agent=[fails, "hooked_asks"])
    async def tell(event: HookEvent) -> None:
        await asyncio.sleep(0)
        seen.append(event)

    ensure(kd.runtime.engine)
    with pytest.raises(killick.RunFailed):
        kd.run(fails, 7, id="bad")
    with pytest.raises(killick.RunWaiting):
        kd.run(asks, id="open")
    some_runs(kd, 1)
    attended(kd, "tell")
    failed, opened = seen
    assert (failed.kind, failed.run, failed.agent, failed.attempt) == ("run.failed", "bad", "hooked_bad", 1)
    assert failed.key == f"bad:{failed.seq}:tell"
    assert "no 7" in failed.data["failure"]["message"]
    assert isinstance(failed.event, e.RunFailed)
    assert failed.at == failed.event.at == kd.runtime.clock.now_us()
    assert (failed.info().status, opened.info().waits[0].prompt) == ("failed", "Pay?")
    assert (opened.event.to, opened.data["prompt"]) == (("managers",), "Pay?")
    assert repr(opened) == f"<wait.opened open:{opened.seq}:tell>"


def test_only_waits_of_the_kinds_that_were_named_are_told(kd: killick.Client) -> None:
    heard = listening("people", "wait.opened", "run.completed", waits_for=("answer", "settlement"))
    ensure(kd.runtime.engine)
    for agent in (waits, asks):
        with pytest.raises(killick.RunWaiting):
            kd.run(agent, id=agent.name)
    some_runs(kd, 1)
    attended(kd, "people")
    assert [key.partition(":")[0] for key in heard] == ["hooked_asks", "run-1"]


def test_a_run_whose_record_is_broken_holds_up_no_hook_for_ever(kd: killick.Client) -> None:
    heard = listening("tell", retry=killick.Retry(attempts=2, first=1))
    ensure(kd.runtime.engine)
    some_runs(kd, 1, 2)
    fine = kd.runtime.log.event

    def broken(run: str, seq: int) -> e.Event:
        if run == "run-1":
            raise RunBroken(run, seq=seq, reason="on purpose")
        return fine(run, seq)

    kd.runtime.log.event = broken  # type: ignore[method-assign]
    attended(kd, "tell", rests=3, leaps=True)
    assert (heard, kinds_of(kd, "hook:tell")[2:]) == (
        ["run-2:3:tell"],
        ["hook.failed", "hook.dropped", "hook.called"],
    )


def test_killicks_own_logs_are_told_only_to_who_asks_for_them(kd: killick.Client) -> None:
    everything = listening("all", "run.started")
    ensure(kd.runtime.engine)
    about_hooks = listening("meta", "run.started", agent="killick.hook:later")
    ensure(kd.runtime.engine)
    listening("later")
    ensure(kd.runtime.engine)
    attended(kd, "all")
    attended(kd, "meta")
    assert (everything, about_hooks) == ([], ["hook:later:1:meta"])


def test_what_happened_to_a_run_that_is_gone_is_passed_over(kd: killick.Client) -> None:
    heard = listening()
    ensure(kd.runtime.engine)
    some_runs(kd, 1, 2)
    kd.runtime.store.remove("run-1")
    attended(kd, "tell")
    assert heard == ["run-2:3:tell"]


# failing ------------------------------------------------------------------------------------------


def test_a_failing_hook_backs_off_by_the_clock_and_delays_only_itself(kd: killick.Client) -> None:
    tried: list[tuple[str, int, int]] = []
    start = kd.runtime.clock.now_us()

    @killick.on("run.completed", retry=killick.Retry(attempts=5, first=10, factor=3, max="1h", jitter=0))
    def flaky(event: HookEvent) -> None:
        tried.append((event.run, event.attempt, (event.sent_at - start) // 1_000_000))
        if event.run == "run-1" and event.attempt < 4:
            raise ConnectionError("not now")

    heard = listening()
    ensure(kd.runtime.engine)
    some_runs(kd, 1, 2)
    duty = attended(kd, "flaky", rests=30, leaps=True)
    assert tried == [("run-1", 1, 0), ("run-1", 2, 10), ("run-1", 3, 40), ("run-1", 4, 130), ("run-2", 1, 130)]
    assert max(duty.rested) == hooks.OBEY_SECONDS
    assert kinds_of(kd, "hook:flaky")[2:] == [*["hook.failed"] * 3, "hook.called", "hook.called"]
    failed = next(
        recorded for recorded in kd.events("hook:flaky") if isinstance(recorded.event, system_events.HookFailed)
    )
    assert "not now" in kd.runtime.log.data("hook:flaky", failed.seq)["failure"]["message"]
    attended(kd, "tell")
    assert heard == ["run-1:3:tell", "run-2:3:tell"]


def test_a_backoff_survives_who_waits_for_it(world: World) -> None:
    attempts: list[int] = []

    @killick.on("run.completed", retry=killick.Retry(first=100, max="1h", jitter=0))
    def flaky(event: HookEvent) -> None:
        attempts.append(event.attempt)
        raise ConnectionError

    first = world.process()
    ensure(first.runtime.engine)
    some_runs(first, 1)
    attended(first, "flaky")
    second = world.process()
    attended(second, "flaky")
    assert attempts == [1]
    world.clock.advance(100)
    attended(second, "flaky")
    assert attempts == [1, 2]
    assert cursor_of(second, "flaky").retry_at == world.clock.now_us() + 200_000_000


def test_what_a_hook_never_takes_is_dropped_and_the_next_is_told(kd: killick.Client) -> None:
    taken: list[str] = []

    @killick.on("run.completed", retry=killick.Retry(attempts=2, first=1))
    async def picky(event: HookEvent) -> None:
        if event.run == "run-1":
            raise ValueError("never")
        taken.append(event.key)

    ensure(kd.runtime.engine)
    some_runs(kd, 1, 2)
    attended(kd, "picky", rests=3, leaps=True)
    assert (kinds_of(kd, "hook:picky")[2:], taken) == (
        ["hook.failed", "hook.dropped", "hook.called"],
        ["run-2:3:picky"],
    )


def test_who_is_asked_for_patience_has_it(kd: killick.Client) -> None:
    @killick.on("run.completed", retry=killick.Retry(first=1))
    def limited(event: HookEvent) -> None:
        raise killick.RateLimited(retry_after=500)

    ensure(kd.runtime.engine)
    some_runs(kd, 1)
    attended(kd, "limited")
    assert cursor_of(kd, "limited").retry_at == kd.runtime.clock.now_us() + 500_000_000


@pytest.mark.parametrize("is_async", [True, False])
def test_a_hook_that_hangs_is_given_up_after_its_time(kd: killick.Client, is_async: bool) -> None:
    done = threading.Event()

    async def soon(event: HookEvent) -> None:
        await asyncio.sleep(60)

    def at_once(event: HookEvent) -> None:
        done.wait(300)

    killick.on("run.completed", name="slow", timeout=0.02)(soon if is_async else at_once)
    ensure(kd.runtime.engine)
    some_runs(kd, 1)
    attended(kd, "slow")
    done.set()
    failed = next(
        recorded for recorded in kd.events("hook:slow") if isinstance(recorded.event, system_events.HookFailed)
    )
    assert kd.runtime.log.data("hook:slow", failed.seq)["failure"]["kind"] == "timeout"


@pytest.mark.parametrize("raised", [SystemExit, asyncio.CancelledError])
@pytest.mark.parametrize("is_async", [True, False])
def test_a_hook_that_raises_what_ends_others_only_fails(kd: killick.Client, raised: Any, is_async: bool) -> None:
    async def soon(event: HookEvent) -> None:
        raise raised

    def at_once(event: HookEvent) -> None:
        raise raised

    killick.on("run.completed", name="rude")(soon if is_async else at_once)
    ensure(kd.runtime.engine)
    some_runs(kd, 1)
    attended(kd, "rude")
    assert kinds_of(kd, "hook:rude")[-1] == "hook.failed"


def test_whoever_is_cancelled_in_a_call_records_nothing(kd: killick.Client) -> None:
    started = asyncio.Event()

    @killick.on("run.completed")
    async def slow(event: HookEvent) -> None:
        started.set()
        await asyncio.sleep(60)

    async def cut_off() -> None:
        task = asyncio.create_task(
            attend(kd.runtime.engine, kd.runtime.log.open("hook:slow"), Patience(cast("Any", kd.runtime.clock)))
        )
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    ensure(kd.runtime.engine)
    some_runs(kd, 1)
    asyncio.run(cut_off())
    assert kinds_of(kd, "hook:slow") == ["run.started", "hook.set"]


# dying --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_at_each_append_nothing_is_lost_nor_out_of_order(world: World, when: str) -> None:
    heard: list[tuple[str, str]] = []

    @killick.on("run.completed", retry=killick.Retry(attempts=2, first=1))
    def tell(event: HookEvent) -> None:
        heard.append((event.run, event.key))
        if event.run in ("run-2", "run-4") and (event.run == "run-4" or event.attempt == 1):
            raise ConnectionError

    ensure(world.process().runtime.engine)
    some_runs(world.process(), *range(1, 7))
    deaths = 0
    while True:
        mortal = world.process(cut_at=1 + deaths % 2, when=when)
        try:
            attended(mortal, "tell", rests=4, leaps=True)
            break
        except (StoreUnavailable, HandleClosed):
            deaths += 1
            head = world.store.head("hook:tell")
            assert head is not None
            world.store.release("hook:tell", epoch=head.epoch)
    assert deaths >= 4
    first_heard = list(dict.fromkeys(run for run, _ in heard))
    assert first_heard == [f"run-{number}" for number in range(1, 7)]
    assert [run for run, _ in heard] == sorted(run for run, _ in heard)
    assert len(heard) <= 6 + 2 + deaths
    assert {key for _, key in heard} == {f"run-{number}:3:tell" for number in range(1, 7)}
    last = world.process()
    called = [
        recorded.event for recorded in last.events("hook:tell") if isinstance(recorded.event, system_events.HookCalled)
    ]
    assert [event.run for event in called] == ["run-1", "run-2", "run-3", "run-5", "run-6"]
    assert kinds_of(last, "hook:tell").count("hook.dropped") == 1
    assert last.store.verify().problems == []


def test_two_that_attend_in_turn_share_one_cursor(world: World) -> None:
    heard = listening()
    one, other = world.process(), world.process()
    ensure(one.runtime.engine)
    ensure(other.runtime.engine)
    for number in range(1, 7):
        some_runs(one, number)
        attended((one, other)[number % 2], "tell")
    assert heard == [f"run-{number}:3:tell" for number in range(1, 7)]


def test_who_lost_the_lease_records_nothing_more(world: World) -> None:
    late, next_one = world.process(), world.process()

    @killick.on("run.completed")
    def tell(event: HookEvent) -> None:
        if event.attempt == 1 and not taken:
            head = world.store.head("hook:tell")
            assert head is not None
            world.store.release("hook:tell", epoch=head.epoch)
            taken.append(world.store.lease("hook:tell", "another", seconds=60).epoch)

    taken: list[int] = []
    ensure(late.runtime.engine)
    some_runs(late, 1)
    with pytest.raises((EpochStale, HandleClosed)):
        attended(late, "tell")
    assert kinds_of(next_one, "hook:tell") == ["run.started", "hook.set"]


def test_one_worker_after_another_tells_a_hook_while_runs_go_on(tmp_path: Path) -> None:
    heard = listening("tell", "run.completed")

    async def served(kd: killick.Client, *numbers: int) -> None:
        async with asyncio.timeout(300), kd.worker():
            for number in numbers:
                await kd.as_async().start(works, number, id=f"run-{number}")
            while not {f"run-{number}:3:tell" for number in numbers} <= set(heard):
                await asyncio.sleep(0.01)

    for numbers in ((1, 2), (3, 4)):
        with killick.open(str(tmp_path / "killick.db")) as kd:
            asyncio.run(served(kd, *numbers))
            assert kd.store.verify().problems == []
    assert sorted(heard) == [f"run-{number}:3:tell" for number in (1, 2, 3, 4)]
    assert {key.partition(":")[0] for key in heard[:2]} == {"run-1", "run-2"}


# declarations and their logs ----------------------------------------------------------------------


def test_several_workers_make_one_log(world: World) -> None:
    listening()
    clients = [world.process() for _ in range(4)]
    threads = [threading.Thread(target=ensure, args=(client.runtime.engine,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kinds_of(clients[0], "hook:tell") == ["run.started", "hook.set"]


def test_a_changed_declaration_is_recorded_and_keeps_its_cursor(kd: killick.Client) -> None:
    listening("tell", "run.completed")
    ensure(kd.runtime.engine)
    some_runs(kd, 1)
    attended(kd, "tell")
    at = cursor_of(kd, "tell").cursor
    some_runs(kd, 2)
    HOOKS.clear()
    heard = listening("tell", "run.started")
    ensure(kd.runtime.engine)
    attended(kd, "tell")
    assert heard == ["run-2:1:tell"]
    assert kinds_of(kd, "hook:tell")[2:] == ["hook.called", "hook.set", "hook.called"]
    assert kd.runtime.log.data("hook:tell", 4)["spec"]["kinds"] == ["run.started"]
    assert cast("system_events.HookSet", kd.runtime.log.event("hook:tell", 4)).position == at
    attended(kd, "tell")
    assert kinds_of(kd, "hook:tell").count("hook.set") == 2


def test_a_hook_that_is_not_declared_here_is_left_alone(kd: killick.Client) -> None:
    listening()
    ensure(kd.runtime.engine)
    HOOKS.clear()
    some_runs(kd, 1)
    assert attended(kd, "tell").rested == []
    assert ensure(kd.runtime.engine) == []


def test_a_hook_is_always_due_so_that_somebody_follows_the_feed(kd: killick.Client) -> None:
    listening()
    agents = ensure(kd.runtime.engine)
    assert [row.run for row in kd.runtime.store.due(kd.runtime.clock.now_us(), agents=agents)] == ["hook:tell"]
    some_runs(kd, 1)
    attended(kd, "tell")
    assert [row.run for row in kd.runtime.store.due(kd.runtime.clock.now_us(), agents=agents)] == ["hook:tell"]
    assert [listed.id for listed in kd.list()] == ["run-1"]
    assert [listed.id for listed in kd.list(agent="killick.hook:tell")] == ["hook:tell"]


def test_a_paused_hook_hears_what_it_missed_when_it_is_resumed(kd: killick.Client) -> None:
    heard = listening()
    agents = ensure(kd.runtime.engine)
    kd.pause("hook:tell", by="ann")
    some_runs(kd, 1)
    assert kd.runtime.store.due(kd.runtime.clock.now_us(), agents=agents) == []
    kd.resume("hook:tell", by="ann")
    assert len(kd.runtime.store.due(kd.runtime.clock.now_us(), agents=agents)) == 1
    attended(kd, "tell")
    assert heard == ["run-1:3:tell"]


def test_a_hook_obeys_while_it_is_attended_to(world: World) -> None:
    kd, person = world.process(), world.process()

    @killick.on("run.completed")
    def tell(event: HookEvent) -> None:
        if event.run == "run-1":
            person.pause("hook:tell", by="ann")

    ensure(kd.runtime.engine)
    some_runs(kd, 1, 2)
    attended(kd, "tell")
    assert kinds_of(kd, "hook:tell")[2:] == ["hook.called", "message.taken", "run.paused"]
    person.resume("hook:tell")
    attended(kd, "tell")
    assert kinds_of(kd, "hook:tell")[5:] == ["run.resumed", "hook.called"]


def test_a_hook_that_somebody_ended_is_over_until_it_is_declared_again(kd: killick.Client) -> None:
    heard = listening()
    agents = ensure(kd.runtime.engine)
    some_runs(kd, 1)
    kd.cancel("hook:tell", by="ann")
    assert (kd.info("hook:tell").status, kd.runtime.store.due(kd.runtime.clock.now_us(), agents=agents)) == (
        "cancelled",
        [],
    )
    attended(kd, "tell")
    assert heard == []
    assert trim(kd.runtime.engine) > 0
    assert kd.runtime.store.outbox() == []
    ensure(kd.runtime.engine)
    ensure(kd.runtime.engine)
    some_runs(kd, 2)
    attended(kd, "tell")
    assert heard == ["run-2:3:tell"]
    assert kinds_of(kd, "hook:tell")[2:] == ["cancel.requested", "run.resumed", "hook.called"]


# no run leaves the store before its events are received -------------------------------------------


def pruned(kd: killick.Client, tmp_path: Path) -> prune.Pruned:
    cast("killick.clock.ManualClock", kd.runtime.clock).advance(1)
    return kd.store.prune(older=0, to=tmp_path / f"{kd.runtime.clock.now_us()}.gz")


def test_a_run_stays_until_every_hook_has_received_its_events(kd: killick.Client, tmp_path: Path) -> None:
    heard = listening()
    ensure(kd.runtime.engine)
    kd.pause("hook:tell", by="ann")
    some_runs(kd, 1, 2)
    # Another app's hook counts too, although it is not declared here.
    hook = HOOKS.pop("tell")
    kept = pruned(kd, tmp_path).kept
    assert set(kept) == {"run-1", "run-2"}
    assert "hook tell" in kept["run-1"]
    assert "`killick cancel hook:tell`" in kept["run-1"]
    HOOKS["tell"] = hook
    kd.resume("hook:tell", by="ann")
    attended(kd, "tell")
    assert heard == ["run-1:3:tell", "run-2:3:tell"]
    assert set(pruned(kd, tmp_path).runs) == {"run-1", "run-2"}


def test_an_event_on_which_a_hook_fails_keeps_its_run_and_those_after_it(kd: killick.Client, tmp_path: Path) -> None:
    down = True

    @killick.on("run.completed")
    def tell(event: HookEvent) -> None:
        if down and event.run == "run-2":
            raise ConnectionError("not now")

    ensure(kd.runtime.engine)
    some_runs(kd, 1, 2, 3)
    attended(kd, "tell")
    assert set(pruned(kd, tmp_path).kept) == {"run-2", "run-3"}
    down = False
    attended(kd, "tell", rests=2, leaps=True)
    assert set(pruned(kd, tmp_path).runs) == {"run-2", "run-3"}


def test_an_ended_hook_keeps_no_run(kd: killick.Client, tmp_path: Path) -> None:
    listening()
    ensure(kd.runtime.engine)
    some_runs(kd, 1)
    kd.cancel("hook:tell", by="ann")
    assert pruned(kd, tmp_path).runs == ("run-1",)


def test_events_that_no_hook_listens_to_keep_no_run(kd: killick.Client, tmp_path: Path) -> None:
    listening("failures", "run.failed")
    listening("others", "run.completed", agent="hooked_bad")
    listening("askers", "wait.opened", waits_for="answer")
    ensure(kd.runtime.engine)
    some_runs(kd, 1)
    for agent, run in ((waits, "waited"), (asks, "asked")):
        kd.start(agent, id=run)
        kd.advance(run)
        kd.cancel(run, by="ann")
        kd.advance(run)
    done = pruned(kd, tmp_path)
    assert (set(done.runs), set(done.kept)) == ({"run-1", "waited"}, {"asked"})


def test_a_run_with_a_new_event_for_a_hook_is_not_removed(kd: killick.Client, tmp_path: Path) -> None:
    heard = listening("tell", "run.resumed")
    ensure(kd.runtime.engine)
    some_runs(kd, 1)
    cast("killick.clock.ManualClock", kd.runtime.clock).advance(1)
    chosen = prune.choose(kd.runtime.log, until_us=kd.runtime.clock.now_us())
    assert [row.run for row in chosen.going] == ["run-1"]

    def meanwhile(what: str, at: int, total: int) -> None:
        if what == "writing":
            kd.runtime.log.open("run-1").append(Entry(e.RunResumed(at=kd.runtime.clock.now_us(), by="ann")))

    done = prune.prune(kd.runtime.log, chosen, tmp_path / "a.gz", holder="me", now_us=1, progress=meanwhile)
    assert (done.runs, set(done.kept)) == ((), {"run-1"})
    attended(kd, "tell")
    assert heard == ["run-1:4:tell"]


# the feed is not kept for ever --------------------------------------------------------------------


def test_what_all_hooks_have_passed_is_forgotten(world: World) -> None:
    kd = world.process()
    listening("quick")
    ensure(kd.runtime.engine)
    quick = HOOKS.pop("quick")
    listening("slow")
    ensure(kd.runtime.engine)
    HOOKS["quick"] = quick
    some_runs(kd, 1, 2)
    attended(kd, "quick")
    # Another app's hook counts too, although it is not declared here.
    HOOKS.pop("slow")
    assert trim(world.process().runtime.engine) == 1
    assert [told.run for told in kd.runtime.store.outbox()] == ["hook:slow", "run-1", "run-1", "run-2", "run-2"]
    listening("slow")
    attended(kd, "slow")
    trim(kd.runtime.engine)
    assert kd.runtime.store.outbox() == []
    some_runs(kd, 3)
    heard = listening("later")
    ensure(kd.runtime.engine)
    some_runs(kd, 4)
    attended(kd, "later")
    assert heard == ["run-4:3:later"]


def test_without_hooks_nothing_is_kept(kd: killick.Client) -> None:
    some_runs(kd, 1)
    assert trim(kd.runtime.engine) == 2
    assert trim(kd.runtime.engine) == 0


def test_the_cursor_passes_what_it_does_not_listen_to_without_an_event_for_each(
    kd: killick.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "PASSED_MAX", 6)
    monkeypatch.setattr(hooks, "PASSED_IDLE_MAX", 3)
    heard = listening("tell", "run.failed")
    ensure(kd.runtime.engine)
    some_runs(kd, *range(10))
    attended(kd, "tell")
    moved = [
        recorded.event for recorded in kd.events("hook:tell") if isinstance(recorded.event, system_events.HookMoved)
    ]
    assert 1 < len(moved) <= 4
    assert kd.runtime.store.outbox_end() - cursor_of(kd, "tell").cursor < 3
    assert heard == []


# what is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kinds", "options", "told"),
    [
        (("run.taken",), {}, "hooks cannot listen to 'run.taken'; give some of attempt.settled, cancel.requested"),
        (("run.finished",), {}, "hooks cannot listen to 'run.finished'"),
        ((), {}, "a hook needs the event kinds it listens to"),
        (("run.failed",), {"waits_for": "answer"}, "waits_for= is about 'wait.opened'"),
        (("wait.opened",), {"waits_for": ("answers",)}, "waits_for='answers'; give some of answer, event"),
        (("run.failed",), {"name": "to whom"}, "is not a valid hook name"),
        (("run.failed",), {"timeout": 0}, "timeout=0 leaves no time"),
    ],
)
def test_a_declaration_that_cannot_work_is_refused_in_one_line(
    kinds: tuple[str, ...], options: dict[str, Any], told: str
) -> None:
    def tell(event: HookEvent) -> None: ...

    with pytest.raises(DeclarationRefused) as refused:
        killick.on(*kinds, **options)(tell)
    assert HOOKS == {}
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_hook_takes_one_argument() -> None:
    def two(event: HookEvent, more: int) -> None: ...

    with pytest.raises(DeclarationRefused, match=r"two: a hook takes one argument, the HookEvent"):
        killick.on("run.failed")(cast("Any", two))


def first_hook(event: HookEvent) -> None: ...


def second_hook(event: HookEvent) -> None: ...


def test_two_hooks_of_one_name_are_refused_and_one_that_is_declared_again_is_not() -> None:
    assert killick.on("run.failed", name="one")(first_hook) is first_hook
    killick.on("run.failed", "run.completed", name="one")(first_hook)
    assert HOOKS["one"].kinds == {"run.failed", "run.completed"}
    with pytest.raises(DeclarationRefused, match="give one of them another name="):
        killick.on("run.failed", name="one")(second_hook)
    listening("two")
    assert listening("two") is not None


def test_a_store_that_fails_while_a_hook_reads_its_event_uses_up_no_attempt(
    kd: killick.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[Any] = []

    @killick.on("run.completed", name="reads", retry=killick.Retry(attempts=1))
    def reads(event: HookEvent) -> None:
        heard.append(event.data["result"])

    ensure(kd.runtime.engine)
    kd.run(works, 7, id="run-7")
    failing = StoreUnavailable(kd.runtime.store.place, "failed on purpose")
    data = kd.runtime.log.data

    def broken(run: str, seq: int) -> Any:
        if run == "run-7":
            raise failing
        return data(run, seq)

    monkeypatch.setattr(kd.runtime.log, "data", broken)
    with pytest.raises(StoreUnavailable):
        attended(kd, "reads")
    monkeypatch.undo()
    attended(kd, "reads")
    assert heard == [7]
    assert kinds_of(kd, "hook:reads")[2:] == ["hook.called"]
