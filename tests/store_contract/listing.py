"""Contract: the index, wake-ups by messages, and due runs."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from killick.clock import ManualClock
from killick.store.protocol import Store, is_tagged
from killick.store.records import ASKS, ENDED, RunQuery, urgency_of
from store_contract.builders import SECOND_US, following, indexed, letter
from store_contract.probes import commit, created, deliver, line


def due(store: Store, now_us: int, limit: int = 100) -> list[str]:
    return [row.run for row in store.due(now_us, limit=limit)]


class Finding:
    def test_the_index_comes_back_as_it_was_written(self, store: Store) -> None:
        times = {"wake_at_us": 9, "started_at_us": 1, "changed_at_us": 2}
        created(store, "a", index=indexed("waiting", agent="x", priority=3, tags=("u", "v"), **times))
        row = line(store, "a")
        assert (row.run, row.agent, row.status, row.priority) == ("a", "x", "waiting", 3)
        assert (row.wake_at_us, row.started_at_us, row.changed_at_us) == (9, 1, 2)
        assert (row.tags, row.delivered) == (("u", "v"), 0)
        assert [(row.number, row.run)] == [(number, head.run) for number, head in store.heads()]

    def test_an_index_stays_until_another_replaces_it_whole(self, store: Store) -> None:
        head = created(store, "a", index=indexed(tags=("old", "both"), wake_at_us=7))
        before = line(store, "a")
        head = commit(store, following(head, "two"))
        assert (line(store, "a"), store.tags("a")) == (before, {"old", "both"})
        commit(store, following(head, "three", index=indexed("paused", tags=("both", "new"))))
        row = line(store, "a")
        assert (row.status, row.tags, row.wake_at_us) == ("paused", ("both", "new"), None)
        assert store.tags("a") == {"both", "new"}
        assert [store.runs(RunQuery(tag=tag)) for tag in ("old", "both", "new")] == [[], [row], [row]]
        assert [is_tagged(store, tag) for tag in ("old", "both", "new")] == [False, True, True]

    def test_runs_that_may_ask_come_by_urgency_after_a_sort_key(self, store: Store) -> None:
        for name, status, more in (
            ("no deadline", "waiting", {}),
            ("urgent", "waiting", {"priority": 5}),
            ("older", "waiting", {"changed_at_us": 1}),
            ("soon", "waiting", {"wake_at_us": 200}),
            ("late", "waiting", {"wake_at_us": 50}),
            ("executed", "running", {}),
            ("message", "waiting", {}),
            ("paused", "paused", {}),
        ):
            created(store, name, index=indexed(status, tags=(ASKS,), **{"changed_at_us": 2, **more}))
        created(store, "other", index=indexed("waiting"))
        deliver(store, letter("message", "m", at_us=50))
        rows = store.asking(100, limit=100)
        assert [row.run for row in rows] == ["executed", "message", "soon", "urgent", "older", "no deadline", "late"]
        assert rows == sorted(rows, key=lambda row: urgency_of(row, 100))
        assert rows == [line(store, row.run) for row in rows]
        for at, row in enumerate(rows):
            assert store.asking(100, after=urgency_of(row, 100), limit=2) == rows[at + 1 : at + 3]

    def test_reindexing_writes_the_index_anew_unless_the_log_went_on(self, store: Store) -> None:
        head = created(store, "a", index=indexed("running", tags=("old",)))
        deliver(store, letter("a", "m", at_us=50))
        before = line(store, "a")
        anew = indexed("paused", tags=("new",), wake_at_us=90)
        assert not store.reindex("a", anew, at=head.seq + 1)
        assert not store.reindex("nobody", anew, at=1)
        assert line(store, "a") == before
        assert store.reindex("a", anew, at=head.seq)
        row = line(store, "a")
        assert (row.status, row.tags, row.wake_at_us, row.delivered) == ("paused", ("new",), 50, 1)
        assert [store.runs(RunQuery(tag=tag)) for tag in ("old", "new")] == [[], [row]]

    def test_runs_are_listed_newest_first_below_a_cursor_if_they_have_an_index(self, store: Store) -> None:
        for number in range(6):
            created(store, f"r{number}", index=indexed(tags=("even",) if number % 2 == 0 else ()))
        created(store, "bare")
        listed = store.runs(RunQuery())
        assert [row.run for row in listed] == ["r5", "r4", "r3", "r2", "r1", "r0"]
        assert store.runs(RunQuery(), limit=2) == listed[:2]
        assert store.runs(RunQuery(), before=listed[0].number, limit=1) == listed[1:2]
        assert store.runs(RunQuery(), before=listed[5].number) == []
        assert store.runs(RunQuery(tag="even"), limit=2) == listed[1:4:2]
        assert store.runs(RunQuery(tag="even"), before=listed[3].number, limit=2) == listed[5:]

    def test_every_field_of_a_query_must_match(self, store: Store) -> None:
        created(store, "a", index=indexed("running", agent="x", tags=("t", "u")))
        created(store, "b", index=indexed("failed", agent="x", tags=("t",)))
        created(store, "c", index=indexed("paused", agent="y"))

        def names(**fields: Any) -> str:
            return "".join(sorted(row.run for row in store.runs(RunQuery(**fields))))

        assert names(status=("running", "paused")) == "ac"
        assert (names(agent="x"), names(tag="t"), names(tag="u")) == ("ab", "ab", "a")
        assert names(agent="x", status=("failed",), tag="t") == "b"
        assert names(agent="y", tag="t") == ""

    def test_a_listing_may_ask_for_runs_that_changed_in_a_span_of_time(self, store: Store) -> None:
        for run, at in (("a", 10), ("b", 20), ("c", 30)):
            created(store, run, index=indexed(started_at_us=1, changed_at_us=at))

        def names(**fields: Any) -> str:
            return "".join(row.run for row in store.runs(RunQuery(**fields)))

        assert (names(since_us=20), names(until_us=20), names(since_us=31)) == ("cb", "a", "")
        assert names(since_us=10, until_us=30) == "ba"
        assert [row.run for row in store.runs(RunQuery(since_us=10), limit=1)] == ["c"]

    def test_what_killick_keeps_for_itself_is_listed_only_by_agent_or_tag(self, store: Store) -> None:
        for run, agent in (
            ("a", "clerk"),
            ("b", "killick.hook:mail"),
            ("c", "killickling"),
            ("d", "killick.hook:page"),
        ):
            created(store, run, index=indexed("waiting", agent=agent, tags=("t",), changed_at_us=5))
        for query in (RunQuery(), RunQuery(status=("waiting",)), RunQuery(since_us=1)):
            assert [row.run for row in store.runs(query)] == ["c", "a"]
        assert [row.run for row in store.runs(RunQuery(), limit=2)] == ["c", "a"]
        assert [row.run for row in store.runs(RunQuery(agent="killick.hook:mail"))] == ["b"]
        assert [row.run for row in store.runs(RunQuery(tag="t"))] == ["d", "c", "b", "a"]

    # messages wake runs -----------------------------------------------------------------------

    def test_delivered_counts_every_message_ever_delivered(self, store: Store) -> None:
        head = created(store, "a")
        deliver(store, letter("a", "m0"))
        head = commit(store, following(head, "two", index=indexed()))
        deliver(store, letter("a", "m1"), letter("a", "m2"), letter("a", "m1"))
        assert line(store, "a").delivered == 3
        commit(store, following(head, "three", takes=(1, 2), index=indexed(seen=3)))
        assert line(store, "a").delivered == 3

    @pytest.mark.parametrize(("wake", "expected"), [(None, 50), (90, 50), (20, 20)])
    @pytest.mark.parametrize("status", ["waiting", *ENDED])
    def test_a_delivery_wakes_a_run_that_has_not_ended_and_does_not_wake_sooner(
        self, store: Store, status: str, wake: int | None, expected: int
    ) -> None:
        created(store, "a", index=indexed(status, wake_at_us=wake))
        deliver(store, letter("a", "m", at_us=50))
        row = line(store, "a")
        assert (row.wake_at_us, row.delivered) == (wake if status in ENDED else expected, 1)

    @pytest.mark.parametrize(
        ("seen", "takes", "wake", "expected"),
        [(1, (), None, 50), (1, (), 90, 50), (1, (), 20, 20), (3, (), 90, 90), (1, (2, 3), 90, 90)],
    )
    @pytest.mark.parametrize("status", ["waiting", *ENDED])
    def test_a_run_is_due_as_of_the_first_message_its_writer_had_neither_seen_nor_taken(
        self, store: Store, status: str, seen: int, takes: tuple[int, ...], wake: int | None, expected: int
    ) -> None:
        head = created(store, "a", index=indexed())
        deliver(store, *(letter("a", f"m{at}", at_us=at) for at in (40, 50, 60)))
        index = indexed(status, seen=seen, wake_at_us=wake)
        commit(store, following(head, "two", takes=takes, index=index))
        assert line(store, "a").wake_at_us == (wake if status in ENDED else expected)

    def test_a_message_that_was_taken_wakes_the_run_again_only_if_returned(self, store: Store) -> None:
        head = created(store, "a", index=indexed())
        deliver(store, letter("a", "m", at_us=50))
        head = commit(store, following(head, "two", takes=(1,), index=indexed(seen=1)))
        deliver(store, letter("a", "m", at_us=60))
        assert line(store, "a").wake_at_us is None
        commit(store, following(head, "rewound", returns=(1,), index=indexed("waiting", seen=0)))
        assert line(store, "a").wake_at_us == 50

    # what is due ------------------------------------------------------------------------------

    def test_due_runs_come_by_priority_wake_time_and_age(self, store: Store, clock: ManualClock) -> None:
        now = clock.now_us()
        wanted = {"low": (0, now - 9), "late": (5, now), "twin": (5, now - 2), "younger": (5, now - 2)}
        for run, (priority, wake) in {**wanted, "top": (9, now)}.items():
            created(store, run, index=indexed("waiting", priority=priority, wake_at_us=wake))
        order = ["top", "twin", "younger", "late", "low"]
        assert (due(store, now), due(store, now, limit=2)) == (order, order[:2])

    def test_a_run_is_due_when_its_wake_time_has_come(self, store: Store, clock: ManualClock) -> None:
        created(store, "a")
        created(store, "b", index=indexed("waiting"))
        assert (store.due(clock.now_us()), store.soonest_us()) == ([], None)
        for run, seconds in (("c", 9), ("d", 5)):
            created(store, run, index=indexed("waiting", wake_at_us=clock.now_us() + seconds * SECOND_US))
        assert (store.due(clock.now_us()), store.soonest_us()) == ([], clock.now_us() + 5 * SECOND_US)
        assert (store.soonest_us(agents=["clerk"]), store.soonest_us(agents=["other"])) == (store.soonest_us(), None)
        clock.advance(5)
        assert store.due(clock.now_us()) == [line(store, "d")]

    @pytest.mark.parametrize("status", ENDED)
    def test_a_run_that_ended_is_never_due(self, store: Store, clock: ManualClock, status: str) -> None:
        created(store, "a", index=indexed(status, wake_at_us=1))
        assert (store.due(clock.now_us()), store.soonest_us()) == ([], None)

    def test_a_quarantined_run_is_not_due_until_let_back(self, store: Store, clock: ManualClock) -> None:
        for run in "abc":
            created(store, run, index=indexed("waiting", wake_at_us=ord(run)))
        store.quarantine("a", "broken")
        assert (due(store, clock.now_us(), limit=2), store.soonest_us()) == (["b", "c"], ord("b"))
        store.quarantine("a", None)
        assert (due(store, clock.now_us(), limit=2), store.soonest_us()) == (["a", "b"], ord("a"))

    @pytest.mark.parametrize("seconds", [30, inf])
    def test_a_held_run_is_not_due(self, store: Store, clock: ManualClock, seconds: float) -> None:
        created(store, "a", index=indexed("waiting", wake_at_us=1, changed_at_us=1))
        held, soonest = store.lease("a", "w1", seconds=seconds), store.soonest_us()
        assert soonest is None or soonest > clock.now_us()
        for run in "bc":
            created(store, run, index=indexed("waiting", wake_at_us=2))
        assert (due(store, clock.now_us(), limit=2), store.soonest_us()) == (["b", "c"], 2)
        clock.advance(30)
        assert due(store, clock.now_us(), limit=1) == (["a"] if seconds == 30 else ["b"])
        store.release("a", epoch=held.epoch)
        assert due(store, clock.now_us()) == ["a", "b", "c"]
