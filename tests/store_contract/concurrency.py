"""Contract: concurrent threads. Each right goes to one of them, and every log stays intact."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Final, TypeVar

import pytest

from killick.errors import AlreadyClaimed, HeadMoved, LogError, MessageGone, RunBusy, RunExists
from killick.store.protocol import Store
from killick.store.records import Delivered, Head
from store_contract.builders import TOKEN, blob, creation, following, indexed, letter
from store_contract.probes import Again, chained, commit, created, deliver, found, line

T = TypeVar("T")
THREADS: Final = 8


def in_threads(work: Callable[[int], T], *, threads: int = THREADS) -> list[T]:
    """Does the same work in several threads that start together and are interrupted often."""
    together, usual = Barrier(threads), sys.getswitchinterval()

    def start(number: int) -> T:
        together.wait()
        return work(number)

    sys.setswitchinterval(0.00001)
    try:
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(start, range(threads)))
    finally:
        sys.setswitchinterval(usual)


def race(work: Callable[[int], Head | LogError]) -> tuple[Head, list[LogError]]:
    """Lets threads compete; returns the winner, and the others' refusals."""
    results = in_threads(work)
    [winner] = [result for result in results if isinstance(result, Head)]
    return winner, [result for result in results if isinstance(result, LogError)]


class Together:
    @pytest.mark.parametrize("opened", [1, 2])
    def test_appends_of_many_threads_happen_once_or_not(self, store: Store, again: Again, opened: int) -> None:
        stores, runs = [store, *(again() for _ in range(1, opened))], ["a", "b", "c", "d"]
        for run in runs:
            created(store, run)

        def hammer(thread: int) -> list[tuple[str, bytes]]:
            mine, acknowledged = stores[thread % opened], list[tuple[str, bytes]]()
            for turn in range(20):
                some = [runs[(thread + turn + step) % len(runs)] for step in range(1 + turn % 3)]
                items = [following(found(mine, run), f"{thread}-{turn}", "more") for run in some]
                for item, result in zip(items, mine.append(items), strict=True):
                    assert isinstance(result, Head | HeadMoved)
                    if isinstance(result, Head):
                        assert (result.seq, result.hash) == item.last
                        acknowledged += [(item.run, row.body) for row in item.rows]
            return acknowledged

        acknowledged = [one for thread in in_threads(hammer) for one in thread]
        stored = [(run, row.body) for run in runs for row in store.read(run, after=1)]
        assert sorted(stored) == sorted(acknowledged) != []
        for one in stores:
            for run in runs:
                chained(one, run)

    @pytest.mark.parametrize("named", [True, False])
    def test_one_of_many_threads_with_the_same_birth_makes_the_run(self, store: Store, named: bool) -> None:
        births = [creation(store, "a", "one", holder=f"w{n}" if named else None) for n in range(THREADS)]
        winner, losers = race(lambda thread: store.append([births[thread]])[0])
        assert [type(loser) for loser in losers] == [RunExists] * (THREADS - 1)
        assert (store.head("a"), len(store.read("a"))) == (winner, 1)

    def test_one_of_many_threads_gets_a_claim(self, store: Store) -> None:
        items = [creation(store, f"run-{thread}", "one", claims=(TOKEN,)) for thread in range(THREADS)]
        winner, losers = race(lambda thread: store.append([items[thread]])[0])
        owners = [loser.owner for loser in losers if isinstance(loser, AlreadyClaimed)]
        assert owners == [winner.run] * (THREADS - 1)
        assert [head for _, head in store.heads()] == [winner]

    def test_one_of_many_threads_takes_a_message(self, store: Store) -> None:
        created(store, "a")
        deliver(store, letter("a", "m"))

        def take(thread: int) -> Head | LogError:
            while True:
                [result] = store.append([following(found(store, "a"), f"by {thread}", takes=(1,))])
                if not isinstance(result, HeadMoved):
                    return result

        winner, losers = race(take)
        assert [type(loser) for loser in losers] == [MessageGone] * (THREADS - 1)
        assert [one.taken for one in store.messages("a")] == [winner.seq]

    def test_one_of_many_threads_gets_a_lease(self, store: Store) -> None:
        created(store, "a")

        def lease(thread: int) -> Head | LogError:
            try:
                return store.lease("a", f"w{thread}", seconds=30)
            except RunBusy as busy:
                return busy

        winner, _ = race(lease)
        assert (store.head("a"), winner.epoch) == (winner, 1)

    def test_one_of_many_threads_gives_the_first_answer(self, store: Store) -> None:
        created(store, "a", index=indexed("waiting"))
        results = in_threads(lambda thread: store.deliver([letter("a", "wait-1", by=f"person {thread}")])[0])
        told = [result for result in results if isinstance(result, Delivered)]
        assert sum(one.fresh for one in told) == 1
        assert [one.message for one in told] == store.messages("a") * THREADS

    def test_messages_from_many_threads_are_all_kept_and_numbered_once(self, store: Store) -> None:
        created(store, "a", index=indexed("waiting"))
        in_threads(lambda thread: deliver(store, *(letter("a", f"{thread}-{turn}") for turn in range(10))))
        messages = store.inbox("a")
        assert [one.number for one in messages] == list(range(1, 10 * THREADS + 1))
        assert len({one.id for one in messages}) == line(store, "a").delivered == 10 * THREADS

    def test_a_sweep_never_deletes_what_another_thread_just_referred_to(self, store: Store) -> None:
        shared = blob("shared")

        def work(thread: int) -> None:
            for turn in range(15):
                if thread == 0:
                    store.sweep()
                    continue
                run = f"{thread}-{turn}"
                created(store, run, pieces=(shared,))
                assert store.pieces([shared.hash]) == {shared.hash: shared}
                store.remove(run)

        in_threads(work, threads=4)
        store.sweep()
        assert store.pieces([shared.hash]) == {}

    def test_readers_see_a_log_grow_only_by_whole_appends(self, store: Store) -> None:
        created(store, "a", "0a", "0b")

        def work(thread: int) -> None:
            for turn in range(1, 25):
                if thread == 0:
                    commit(store, following(found(store, "a"), f"{turn}a", f"{turn}b"))
                else:
                    assert len(store.read("a")) % 2 == found(store, "a").seq % 2 == 0

        in_threads(work, threads=4)
        chained(store, "a")
