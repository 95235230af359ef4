"""Contract: claiming due runs, each once; and abandoned runs."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
from msgspec.structs import replace

from killick.clock import ManualClock
from killick.errors import RunBusy
from killick.store.protocol import Store
from killick.store.records import ENDED, Claimed, CreateRun, Head
from store_contract.builders import SECOND_US, following, indexed, letter
from store_contract.concurrency import THREADS, in_threads
from store_contract.probes import Again, commit, created, deliver, found, line


def claim(store: Store, clock: ManualClock, holder: str = "w1", *, limit: int = 100, **fields: Any) -> list[Claimed]:
    wanted: dict[str, Any] = {"seconds": 30, **fields}
    return store.claim(holder, now_us=clock.now_us(), limit=limit, **wanted)


def claimed(store: Store, clock: ManualClock, holder: str = "w1", **fields: Any) -> list[str]:
    return [one.head.run for one in claim(store, clock, holder, **fields)]


def due(store: Store, clock: ManualClock, **fields: Any) -> list[str]:
    return [row.run for row in store.due(clock.now_us(), **fields)]


def left(store: Store, run: str, **fields: Any) -> Head:
    """Creates a run that its holder abandoned."""
    head = created(store, run, holder="gone", index=indexed(**{"changed_at_us": 0, **fields}))
    store.release(run, epoch=head.epoch, left=True)
    return found(store, run)


class Claiming:
    def test_a_claim_leases_what_is_due_and_tells_all_about_it(self, store: Store, clock: ManualClock) -> None:
        head = created(store, "a", index=indexed("waiting", priority=3, wake_at_us=1, tags=("t",)))
        created(store, "b", index=indexed("waiting", wake_at_us=clock.now_us() + 1))
        row, until = line(store, "a"), store.now_us() + 30 * SECOND_US
        held = replace(head, epoch=1, holder="w1", lease_until_us=until)
        assert claim(store, clock) == [Claimed(head=held, row=row)]
        assert store.head("a") == held
        assert (claim(store, clock), claim(store, clock, "w2"), due(store, clock)) == ([], [], [])
        with pytest.raises(RunBusy):
            store.lease("a", "w2", seconds=30)
        assert commit(store, following(held, "two")).seq == 2
        assert store.renew("w1", "abcde", seconds=30) == {"a": 1}
        store.release("a", epoch=1)
        [again] = claim(store, clock, "w2", seconds=inf)
        assert (again.head.epoch, again.head.lease_until_us, again.left) == (2, None, None)
        assert store.inspect() == []

    def test_the_first_that_are_due_are_claimed_up_to_a_limit(self, store: Store, clock: ManualClock) -> None:
        now = clock.now_us()
        for run, priority, wake in (("low", 0, 1), ("late", 5, now), ("early", 5, 2), ("top", 9, now)):
            created(store, run, index=indexed("waiting", priority=priority, wake_at_us=wake))
        assert claimed(store, clock, limit=0) == []
        assert claimed(store, clock, limit=3) == ["top", "early", "late"]
        assert claimed(store, clock, "w2", limit=3) == ["low"]

    def test_only_runs_of_the_agents_that_are_wanted_are_due_and_claimed(
        self, store: Store, clock: ManualClock
    ) -> None:
        for run, agent in (("a", "x"), ("b", "y"), ("c", "killick.hook:z"), ("d", "x")):
            created(store, run, index=indexed("waiting", agent=agent, wake_at_us=1))
        left(store, "e", agent="x")
        left(store, "f", agent="y")
        assert due(store, clock, agents=["x"]) == ["e", "a", "d"]
        assert due(store, clock, agents=["x"], limit=2) == ["e", "a"]
        assert due(store, clock, agents={"killick.hook:z", "y"}) == ["f", "b", "c"]
        assert (due(store, clock, agents=[]), claimed(store, clock, agents=[])) == ([], [])
        assert due(store, clock) == ["e", "f", "a", "b", "c", "d"]
        assert claimed(store, clock, agents=("x",)) == ["e", "a", "d"]
        assert claimed(store, clock) == ["f", "b", "c"]

    def test_no_more_runs_of_an_agent_are_claimed_than_there_is_room_for(
        self, store: Store, clock: ManualClock
    ) -> None:
        for number in range(4):
            for agent in "xyz":
                created(store, f"{agent}{number}", index=indexed("waiting", agent=agent, wake_at_us=1))
        assert claimed(store, clock, limit=6, room={"x": 1, "y": 0}) == ["x0", "z0", "z1", "z2", "z3"]
        assert claimed(store, clock, limit=2, room={"x": 9}) == ["y0", "x1"]
        assert claimed(store, clock, agents=["y"], room={"y": 2, "x": 5}) == ["y1", "y2"]

    @pytest.mark.parametrize("status", [*ENDED, "quarantined"])
    def test_nothing_that_is_over_or_set_apart_is_claimed(self, store: Store, clock: ManualClock, status: str) -> None:
        created(store, "a", index=indexed("waiting" if status == "quarantined" else status, wake_at_us=1))
        head = left(store, "b")
        if status == "quarantined":
            store.quarantine("a", "broken")
            store.quarantine("b", "broken")
        else:
            commit(store, following(head, "ended", index=indexed(status)))
        assert (due(store, clock), claimed(store, clock)) == ([], [])

    def test_a_message_makes_a_run_claimable(self, store: Store, clock: ManualClock) -> None:
        created(store, "a", index=indexed("waiting"))
        assert claimed(store, clock) == []
        deliver(store, letter("a", "m"))
        [taken] = claim(store, clock)
        assert (taken.row.delivered, taken.row.wake_at_us) == (1, 1)

    # what was left in the middle --------------------------------------------------------------

    @pytest.mark.parametrize("wake", [None, 10_000_000_000_000_000, 3])
    def test_a_run_that_was_left_is_due_at_once_and_names_who_left_it(
        self, store: Store, clock: ManualClock, wake: int | None
    ) -> None:
        head = created(store, "a", create=CreateRun(holder="w1", lease_seconds=60), index=indexed(wake_at_us=wake))
        assert (due(store, clock), claimed(store, clock, "w2")) == ([], [])
        clock.advance(1)
        store.release("a", epoch=1, holder="w1", left=True)
        up = replace(head, lease_until_us=0)
        assert (store.head("a"), store.renew("w1", "abcde", seconds=60)) == (up, {})
        assert due(store, clock) == ["a"]
        [taken] = claim(store, clock, "w2")
        assert (taken.head.epoch, taken.head.holder) == (2, "w2")
        assert (taken.left, taken.left_until_us) == ("w1", 0)
        assert store.inspect() == []

    def test_a_run_whose_time_is_up_was_left(self, store: Store, clock: ManualClock) -> None:
        head = created(store, "a", create=CreateRun(holder="w1", lease_seconds=30), index=indexed())
        clock.advance(29)
        assert due(store, clock) == []
        clock.advance(1)
        # Leases end by the store's clock, for any requested time.
        assert [row.run for row in store.due(1)] == ["a"]
        [taken] = claim(store, clock, "w2")
        assert (taken.left, taken.left_until_us) == ("w1", head.lease_until_us)
        assert store.renew("w1", "abcde", seconds=30) == {}

    def test_a_run_that_was_parked_or_ended_was_not_left(self, store: Store, clock: ManualClock) -> None:
        for run, status in (("a", "waiting"), ("b", "completed")):
            head = created(store, run, holder="w1", index=indexed())
            commit(store, following(head, "over", index=indexed(status)))
        store.release("a", epoch=1)
        clock.advance(1_000)
        assert due(store, clock) == []

    def test_a_paused_run_that_was_left_waits_for_its_time_to_wake(self, store: Store, clock: ManualClock) -> None:
        left(store, "a", status="paused")
        left(store, "b", status="paused", wake_at_us=clock.now_us() + 5 * SECOND_US)
        assert due(store, clock) == []
        deliver(store, letter("a", "resume", at_us=clock.now_us()))
        assert due(store, clock) == ["a"]
        clock.advance(5)
        assert [(one.head.run, one.left) for one in claim(store, clock)] == [("a", "gone"), ("b", "gone")]

    def test_what_was_left_has_its_place_by_priority_and_last_change(self, store: Store, clock: ManualClock) -> None:
        left(store, "late", changed_at_us=40)
        created(store, "third", index=indexed("waiting", wake_at_us=30, changed_at_us=1))
        left(store, "second", changed_at_us=20, wake_at_us=90)
        created(store, "first", index=indexed("waiting", wake_at_us=10, changed_at_us=99))
        left(store, "top", priority=1, changed_at_us=99)
        order = ["top", "first", "second", "third", "late"]
        assert due(store, clock) == order
        assert [due(store, clock, limit=limit) for limit in range(1, 5)] == [order[:limit] for limit in range(1, 5)]
        assert claimed(store, clock, limit=3) == order[:3]

    def test_the_soonest_wake_is_of_those_that_name_no_holder(self, store: Store, clock: ManualClock) -> None:
        left(store, "a", wake_at_us=5)
        created(store, "b", holder="w1", index=indexed(wake_at_us=6))
        assert store.soonest_us() is None
        created(store, "c", index=indexed("waiting", wake_at_us=7))
        assert store.soonest_us() == 7

    # many at once -----------------------------------------------------------------------------

    @pytest.mark.parametrize("opened", [1, 2])
    def test_of_many_that_claim_each_run_is_claimed_by_one(
        self, store: Store, clock: ManualClock, again: Again, opened: int
    ) -> None:
        stores = [store, *(again() for _ in range(1, opened))]
        runs = [f"r{number:03}" for number in range(90)]
        for number, run in enumerate(runs):
            if number % 3:
                created(store, run, index=indexed("waiting", wake_at_us=1, priority=number % 5))
            else:
                left(store, run)

        def work(thread: int) -> list[str]:
            mine, got = stores[thread % opened], list[str]()
            while some := claim(mine, clock, f"w{thread}", limit=4):
                for one in some:
                    commit(mine, following(one.head, f"by {thread}", index=indexed("completed")))
                    got.append(one.head.run)
            return got

        by_thread = in_threads(work)
        assert len(by_thread) == THREADS
        assert sorted(run for got in by_thread for run in got) == runs
        assert [head.seq for _, head in store.heads()] == [2] * len(runs)
        assert store.inspect() == []
