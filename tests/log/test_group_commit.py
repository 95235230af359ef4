"""The committer: groups what comes together, keeps order, and tells each append exactly its own fate."""

import asyncio
import threading
from collections.abc import Sequence

import pytest
from stories import START_US, started

from killick.clock import ManualClock, SystemClock
from killick.errors import HeadMoved, LogError, StoreFull
from killick.log import Committer, Entry, Log, RunLog, group_commit, verify
from killick.log.append_groups import Ticket
from killick.log.group_commit import BEHIND_SECONDS_MAX, TURN_SECONDS_MAX
from killick.model import events as e
from killick.store import MemoryStore
from killick.store.records import Append, Head


class Watched(MemoryStore):
    """A store that notes how many appends each commit carried, and can be held up or made to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.poison: str | None = None
        self.threads: set[str] = set()
        self.committers: list[str] = []

    def append(self, items: Sequence[Append]) -> list[Head | LogError]:
        self.gate.wait(300)
        self.groups.append(len(items))
        self.threads.add(threading.current_thread().name)
        self.committers.append(threading.current_thread().name)
        if self.poison is not None and any(item.run == self.poison for item in items):
            raise StoreFull("disk")
        return super().append(items)


class SlowClock(ManualClock):
    """Every commit seems to take ten milliseconds."""

    slow = True

    def monotonic(self) -> float:
        self.advance(0.01 if self.slow else 0.0)
        return super().monotonic()


def begin(log: Log, run: str) -> RunLog:
    first = started(run)
    return log.create(first.event, first.values or {})


def note(number: int) -> Entry:
    return Entry(e.NoteMade(at=START_US), {"note": number})


def test_tasks_of_one_turn_share_a_commit() -> None:
    store = Watched()
    log = Log(store, clock=ManualClock())
    handles = [begin(log, f"run_{number}") for number in range(32)]
    store.groups.clear()

    async def work(handle: RunLog) -> None:
        for number in range(20):
            await handle.append_soon(note(number))

    async def main() -> None:
        await asyncio.gather(*map(work, handles))

    asyncio.run(main())
    assert sum(store.groups) == 32 * 20
    assert max(store.groups) == 32
    assert len(store.groups) < 60
    assert verify(log).holds


def test_a_single_run_commits_in_line_without_waiting_for_company() -> None:
    store = Watched()
    log = Log(store, clock=ManualClock())  # by which every commit is quick
    handle = begin(log, "run_1")

    async def main() -> list[bool]:
        turns: list[bool] = []
        for number in range(30):
            turned = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_soon(lambda turned=turned: turned.done() or turned.set_result(None))
            await handle.append_soon(note(number))
            turns.append(turned.done())
            await turned
        return turns

    assert not any(asyncio.run(main())[-10:])
    assert store.threads == {threading.current_thread().name}


@pytest.mark.parametrize("live", [1, 2])
def test_the_ends_of_several_live_runs_share_a_commit_and_a_single_one_commits_in_line(live: int) -> None:
    log = Log(Watched())
    one, two = begin(log, "run_1"), begin(log, "run_2")
    log.committer.live = live

    async def end() -> list[bool]:
        tickets = [handle.append_begun(Entry(e.RunCompleted(at=START_US))) for handle in (one, two)]
        done = [ticket.done for ticket in tickets]
        await asyncio.gather(*map(RunLog.settled, (one, two), tickets))
        return done

    assert asyncio.run(end()) == [live == 1] * 2
    log.close()


def test_a_slow_disk_is_written_from_a_thread() -> None:
    store = Watched()
    log = Log(store, clock=SlowClock())
    handle = begin(log, "run_1")

    async def main() -> None:
        for number in range(30):
            await handle.append_soon(note(number))

    asyncio.run(main())
    assert "killick-committer" in store.threads
    assert log.head("run_1").seq == 31
    log.close()


def test_a_loop_commits_for_its_tasks_again_after_the_thread_wrote_behind() -> None:
    store = Watched()
    log = Log(store, clock=ManualClock())  # by which every commit is quick
    handles = [begin(log, f"run_{number}") for number in range(8)]
    store.committers.clear()

    async def main() -> None:
        store.gate.clear()
        handles[0].append_behind(note(0))
        while not log.committer._leading:
            await asyncio.sleep(0)
        tasks = [asyncio.ensure_future(handle.append_soon(note(1))) for handle in handles]
        while len(log.committer._queue) < 8:
            await asyncio.sleep(0)
        await asyncio.sleep(0)  # the turn's flush finds the thread at work
        store.gate.set()
        await asyncio.gather(*tasks)

    asyncio.run(main())
    assert store.committers == ["killick-committer", threading.current_thread().name]
    assert store.groups[-1] == 8


def test_a_disk_that_was_slow_is_tried_again() -> None:
    store = Watched()
    clock = SlowClock()
    log = Log(store, clock=clock)
    handle = begin(log, "run_1")

    async def main(events: int) -> None:
        for number in range(events):
            await handle.append_soon(note(number))

    asyncio.run(main(40))
    assert store.committers[-1] == "killick-committer"
    clock.slow = False
    asyncio.run(main(100))
    assert store.committers[-1] == threading.current_thread().name
    log.close()


def test_threads_that_wait_share_the_next_commit() -> None:
    store = Watched()
    log = Log(store)
    handles = [begin(log, f"run_{number}") for number in range(8)]
    store.groups.clear()
    store.gate.clear()
    threads = [threading.Thread(target=handle.append, args=(note(1),)) for handle in handles]
    for thread in threads:
        thread.start()
    while len(log.committer._queue) < 7:
        pass
    store.gate.set()
    for thread in threads:
        thread.join()
    assert store.groups == [1, 7]


def test_an_error_reaches_exactly_the_appends_it_concerns() -> None:
    store = Watched()
    log = Log(store, clock=ManualClock())
    handles = {run: begin(log, run) for run in ("good_1", "bad", "good_2", "moved")}
    log.open("moved").append(note(0))
    store.poison = "bad"
    store.groups.clear()

    async def main() -> list[object]:
        return await asyncio.gather(
            *(handle.append_soon(note(1)) for handle in handles.values()), return_exceptions=True
        )

    first, bad, second, moved = asyncio.run(main())
    assert isinstance(first, Head)
    assert isinstance(second, Head)
    assert isinstance(bad, StoreFull)
    assert isinstance(moved, HeadMoved)
    assert store.groups[0] == 4
    assert (log.head("good_1").seq, log.head("bad").seq) == (2, 1)


def test_appends_of_one_run_commit_in_order_and_after_a_failure_none_does() -> None:
    store = Watched()
    log = Log(store)
    handle = begin(log, "run_1")
    log.open("run_1").append(note(0))
    tickets = [Ticket(handle.built([note(number)])) for number in range(1, 6)]
    log.committer.submit(*tickets)
    for ticket in tickets:
        log.committer.wait(ticket)
    assert all(isinstance(ticket.error, HeadMoved) for ticket in tickets)
    assert log.head("run_1").seq == 2


def test_what_nobody_waits_for_is_committed_all_the_same() -> None:
    store = Watched()
    log = Log(store)
    handle = begin(log, "run_1")
    for number in range(3):
        seq = handle.append_behind(note(number))
        while log.head("run_1").seq < seq:
            pass
    assert log.head("run_1").seq == 4
    log.close()


def test_what_another_process_would_do_again_waits_longer_for_the_next_commit() -> None:
    log = Log(Watched())
    handle = begin(log, "run_1")
    committer = log.committer
    with committer._mutex:  # nobody can commit before all are queued
        committer._leading = True
    began = SystemClock.monotonic()
    handle.append_behind(Entry(e.RunTaken(at=START_US, epoch=1, holder="me")))
    handle.append_behind(Entry(e.RunPaused(at=START_US)))
    taken, paused = committer._queue
    assert taken.due >= began + TURN_SECONDS_MAX
    assert paused.due <= SystemClock.monotonic() + BEHIND_SECONDS_MAX
    with committer._mutex:
        committer._hand_on()
    log.close()


def test_an_outcome_is_not_held_up_by_what_another_process_would_do_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_commit, "AGAIN_SECONDS_MAX", 3_600.0)
    log = Log(Watched())
    one, two = begin(log, "run_1"), begin(log, "run_2")
    log.committer.submit(Ticket(one.built([note(1)])), happens_again=True)
    seq = two.append_behind(note(1))
    while log.head("run_2").seq < seq:
        pass
    assert log.head("run_1").seq == 2  # it went along
    log.close()


def test_what_waits_behind_shares_the_next_commit() -> None:
    store = Watched()
    store.gate.clear()
    log = Log(store, clock=ManualClock())
    store.gate.set()
    handle = begin(log, "run_1")
    store.groups.clear()
    committer = log.committer
    with committer._mutex:  # nobody can commit before both are queued
        committer._leading = True
    handle.append_behind(note(1))
    waiter = threading.Thread(target=handle.append, args=(note(2),))
    waiter.start()
    while not committer._queue or committer._queue[-1].gate is None:
        pass
    with committer._mutex:
        committer._hand_on()
    waiter.join()
    assert store.groups == [1]  # two appends of one run are one
    assert log.head("run_1").seq == 3


def test_a_full_queue_makes_the_submitter_commit_before_it_goes_on() -> None:
    store = Watched()
    committer = Committer(store, SystemClock(), queue_bytes_max=2_000)
    log = Log(store)
    log.committer = committer
    handle = begin(log, "run_1")
    committer._leading = True  # keep everybody from committing, to see the queue grow
    for number in range(20):
        handle.append_behind(Entry(e.NoteMade(at=1), {"note": "x" * 300 + str(number)}))
    committer._leading = False
    assert committer._behind_bytes > 2_000
    handle.append_behind(note(21))
    assert committer._behind_bytes < 2_000
    assert log.head("run_1").seq >= 21
    committer.close()


def test_many_tasks_wait_for_one_append_and_who_is_cancelled_takes_nobody_along() -> None:
    store = Watched()
    log = Log(store)
    handle = begin(log, "run_1")

    async def main() -> None:
        store.gate.clear()
        handle.append_behind(note(1))
        committing = asyncio.to_thread(handle.barrier)
        tasks = [asyncio.ensure_future(committing), *(asyncio.ensure_future(handle.barrier_soon()) for _ in range(3))]
        await asyncio.sleep(0.01)
        tasks[1].cancel()
        await asyncio.sleep(0)
        store.gate.set()
        done = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 300)
        assert [type(each) for each in done] == [type(None), asyncio.CancelledError, type(None), type(None)]

    asyncio.run(main())
    assert log.head("run_1").seq == 2
    log.close()


def test_closing_commits_what_waits_and_then_refuses() -> None:
    store = Watched()
    log = Log(store)
    handle = begin(log, "run_1")
    for number in range(10):
        handle.append_behind(note(number))
    log.close()
    assert log.head("run_1").seq == 11
    with pytest.raises(LogError, match="closed"):
        handle.append(note(11))


class Led(Watched):
    """A store that says when a commit has come to it."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()

    def append(self, items: Sequence[Append]) -> list[Head | LogError]:
        self.reached.set()
        return super().append(items)


def led_by_another_run(store: Led, log: Log) -> threading.Thread:
    """A thread that commits for another run, and stays at it until the store's gate is opened."""
    other = begin(log, "other")
    store.gate.clear()
    store.reached.clear()
    leader = threading.Thread(target=other.append, args=(note(0),))
    leader.start()
    assert store.reached.wait(300)
    return leader


def test_a_barrier_ends_though_a_later_append_took_along_what_it_waits_for() -> None:
    store = Led()
    log = Log(store)
    handle = begin(log, "run_1")
    leader = led_by_another_run(store, log)

    async def main() -> None:
        begun = asyncio.ensure_future(handle.append_soon(note(1)))
        await asyncio.sleep(0)
        handle.append_behind(note(2))
        barrier = asyncio.ensure_future(handle.barrier_soon())
        await asyncio.sleep(0)
        later = asyncio.ensure_future(handle.append_soon(note(3)))
        await asyncio.sleep(0)
        store.gate.set()
        await asyncio.wait_for(asyncio.gather(begun, later), 300)
        assert log.head("run_1").seq == 4
        await asyncio.wait_for(barrier, 300)

    asyncio.run(main())
    leader.join()
    log.close()


def test_a_committer_that_closes_commits_tails_too() -> None:
    store = Watched()
    log = Log(store)
    handle = begin(log, "run_1")
    log.committer._thread = threading.current_thread()  # no thread writes behind: closing must
    handle.append_behind(note(1))
    log.committer._thread = None
    log.committer.close()
    assert handle.seq == 2
    assert log.head("run_1").seq == 2


def test_hammering_from_threads_and_a_loop_together_loses_nothing() -> None:
    store = Watched()
    log = Log(store)
    handles = [begin(log, f"run_{number}") for number in range(12)]

    def block(handle: RunLog) -> None:
        for number in range(50):
            (handle.append if number % 3 else handle.append_behind)(note(number))
        handle.barrier()

    async def soon(handle: RunLog) -> None:
        for number in range(50):
            await handle.append_soon(note(number))

    async def main() -> None:
        await asyncio.gather(*map(soon, handles[6:]))

    threads = [threading.Thread(target=block, args=(handle,)) for handle in handles[:6]]
    for thread in threads:
        thread.start()
    asyncio.run(main())
    for thread in threads:
        thread.join()
    assert all(log.head(handle.run).seq == 51 for handle in handles)
    assert verify(log).holds
    log.close()


def test_an_interrupted_leader_lets_those_who_wait_go_on() -> None:
    class Interrupted(Watched):
        armed = False

        def append(self, items: Sequence[Append]) -> list[Head | LogError]:
            result = super().append(items)
            if self.armed:
                self.armed = False
                raise KeyboardInterrupt
            return result

    store = Interrupted()
    log = Log(store)
    first, others = begin(log, "interrupted"), [begin(log, f"run_{number}") for number in range(3)]
    store.armed = True
    store.gate.clear()
    raised: list[BaseException] = []

    def lead() -> None:
        try:
            ticket = Ticket(first.built([note(1)]))
            log.committer.submit(ticket)
            log.committer.wait(ticket)
        except KeyboardInterrupt as error:
            raised.append(error)

    committer = log.committer
    committer._thread = threading.current_thread()  # no thread writes behind: the leader must
    leader = threading.Thread(target=lead)
    leader.start()
    while not committer._leading:
        pass
    waiters = [threading.Thread(target=handle.append, args=(note(1),)) for handle in others]
    for waiter in waiters:
        waiter.start()
    while len(committer._queue) < 3:
        pass
    store.gate.set()
    for thread in (leader, *waiters):
        thread.join(300)
        assert not thread.is_alive()
    assert len(raised) == 1
    assert all(log.head(handle.run).seq == 2 for handle in others)
