"""Contract: run counts by status, agent and holder; and search by id."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from killick.clock import ManualClock
from killick.store.protocol import Store
from killick.store.records import RunQuery
from store_contract.builders import SECOND_US, following, indexed, letter
from store_contract.probes import commit, created, deliver


def names(store: Store, **fields: Any) -> list[str]:
    return [row.run for row in store.runs(RunQuery(**fields))]


class Counting:
    def test_runs_are_counted_by_status_whatever_statuses_the_query_names(self, store: Store) -> None:
        assert store.counts(RunQuery()) == {}
        for run, status in (("a", "running"), ("b", "failed"), ("c", "running"), ("d", "waiting")):
            created(store, run, index=indexed(status))
        created(store, "bare")
        everything = {"running": 2, "failed": 1, "waiting": 1}
        assert store.counts(RunQuery()) == store.counts(RunQuery(status=("failed",))) == everything

    def test_a_count_follows_a_run_from_one_status_to_the_next(self, store: Store) -> None:
        head = created(store, "a", index=indexed("running"))
        commit(store, following(head, "over", index=indexed("completed")))
        assert store.counts(RunQuery()) == {"completed": 1}
        store.remove("a")
        assert store.counts(RunQuery()) == {}

    def test_runs_in_quarantine_are_listed_and_counted_alone(self, store: Store) -> None:
        for run, agent in (("a", "x"), ("b", "x"), ("c", "y")):
            created(store, run, index=indexed("completed", agent=agent))
        assert store.counts(RunQuery(quarantined=True)) == {}
        for run in ("a", "c"):
            store.quarantine(run, "it is broken")
        assert names(store, quarantined=True) == ["c", "a"]
        assert names(store, quarantined=True, agent="x", status=("completed",)) == ["a"]
        assert store.counts(RunQuery(quarantined=True)) == {"completed": 2}
        assert store.counts(RunQuery(quarantined=True, agent="x", contains="A")) == {"completed": 1}
        store.quarantine("a", None)
        assert names(store, quarantined=True) == ["c"]
        assert store.counts(RunQuery()) == {"completed": 3}

    def test_only_runs_that_match_in_all_else_are_counted(self, store: Store) -> None:
        created(store, "a1", index=indexed("running", agent="x", tags=("t",), changed_at_us=10))
        created(store, "a2", index=indexed("failed", agent="x", changed_at_us=20))
        created(store, "b3", index=indexed("failed", agent="y", tags=("t",), changed_at_us=30))
        assert store.counts(RunQuery(agent="x")) == {"running": 1, "failed": 1}
        assert store.counts(RunQuery(agent="nobody")) == {}
        assert store.counts(RunQuery(tag="t")) == {"running": 1, "failed": 1}
        assert store.counts(RunQuery(tag="t", agent="y")) == {"failed": 1}
        assert store.counts(RunQuery(since_us=20)) == {"failed": 2}
        assert store.counts(RunQuery(since_us=10, until_us=20)) == {"running": 1}
        assert store.counts(RunQuery(contains="A")) == {"running": 1, "failed": 1}
        assert store.counts(RunQuery(contains="a", tag="t")) == {"running": 1}

    def test_what_killick_keeps_for_itself_is_counted_only_by_agent_or_tag(self, store: Store) -> None:
        for run, agent in (("a", "clerk"), ("b", "killick.hook:mail"), ("c", "killickling"), ("d", "killick.on:x")):
            created(store, run, index=indexed("waiting", agent=agent, tags=("t",)))
        assert store.counts(RunQuery()) == store.counts(RunQuery(since_us=0)) == {"waiting": 2}
        assert store.counts(RunQuery(contains="")) == {"waiting": 2}
        assert store.counts(RunQuery(agent="killick.hook:mail")) == {"waiting": 1}
        assert store.counts(RunQuery(tag="t")) == {"waiting": 4}
        assert store.agents() == ["clerk", "killickling"]

    def test_agents_are_named_once_and_in_order_while_they_have_runs(self, store: Store) -> None:
        assert store.agents() == []
        for number, agent in enumerate(("zoo", "b", "a", "b", "é", "Z")):
            created(store, f"r{number}", index=indexed(agent=agent))
        assert store.agents() == ["Z", "a", "b", "zoo", "é"]
        store.remove("r2")
        assert store.agents() == ["Z", "b", "zoo", "é"]

    def test_several_statuses_are_listed_as_one(self, store: Store) -> None:
        statuses = ("failed", "running", "paused", "failed", "running", "failed")
        for number, status in enumerate(statuses):
            created(store, f"r{number}", index=indexed(status, agent="y" if number == 3 else "x"))
        wanted = ("failed", "running")
        assert names(store, status=wanted) == ["r5", "r4", "r3", "r1", "r0"]
        page = store.runs(RunQuery(status=wanted), limit=2)
        assert [row.run for row in page] == ["r5", "r4"]
        rest = store.runs(RunQuery(status=wanted), before=page[-1].number, limit=2)
        assert [row.run for row in rest] == ["r3", "r1"]
        assert names(store, status=("failed", "failed"), agent="x") == ["r5", "r0"]

    def test_how_some_runs_stand_is_told_at_once(self, store: Store) -> None:
        heads = {run: created(store, run, index=indexed("running")) for run in "abc"}
        heads["bare"] = created(store, "bare")
        heads["b"] = store.lease("b", "w1", seconds=30)
        store.quarantine("c", "broken")
        store.remove("a")
        standing = store.statuses(["a", "b", "c", "bare", "nobody"])
        assert {run: one.head for run, one in standing.items()} == {run: heads[run] for run in ("b", "c", "bare")}
        assert [standing[run].status for run in ("b", "c", "bare")] == ["running", "running", None]
        assert [standing[run].quarantined for run in ("b", "c", "bare")] == [None, "broken", None]
        assert store.statuses([]) == {}

    def test_the_status_of_a_run_counts_its_messages_taken_or_not(self, store: Store) -> None:
        head = created(store, "a", index=indexed())
        assert store.statuses(["a"])["a"].delivered == 0
        deliver(store, letter("a", "m0"), letter("a", "m1"))
        commit(store, following(head, "two", takes=(2,)))
        assert store.statuses(["a"])["a"].delivered == 2

    def test_a_message_is_found_by_its_id_taken_or_not(self, store: Store) -> None:
        head = created(store, "a", index=indexed())
        deliver(store, letter("a", "m0"), letter("a", "m1"))
        assert store.message("a", "m1") == store.messages("a")[1]
        commit(store, following(head, "two", takes=(2,)))
        found = store.message("a", "m1")
        assert found is not None
        assert found.taken is not None
        assert (store.message("a", "m2"), store.message("b", "m1")) == (None, None)

    # parts of ids -----------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("part", "found"),
        [("claim", "ba"), ("CLAIM", "ba"), ("17", "cb"), ("_", "c"), ("%", "d"), ("\\", "e"), ("'", "e"), ("/", "c")],
    )
    def test_runs_are_found_by_a_part_of_their_id_in_any_case(self, store: Store, part: str, found: str) -> None:
        ids = {"a": "claim-16", "b": "my-Claim-17", "c": "tree/leaf_17", "d": "100%", "e": "it's\\x"}
        for run in ids.values():
            created(store, run, index=indexed("waiting"))
        assert names(store, contains=part) == [ids[each] for each in found]

    def test_only_letters_of_ascii_are_the_same_in_either_case(self, store: Store) -> None:
        created(store, "straße-É", index=indexed())
        assert names(store, contains="STRASSE") == names(store, contains="é") == []
        assert names(store, contains="STRAß") == names(store, contains="É") == ["straße-É"]

    def test_a_part_of_an_id_is_one_condition_among_others(self, store: Store) -> None:
        for number in range(6):
            created(store, f"r{number}", index=indexed(tags=("even",) if number % 2 == 0 else ()))
        created(store, "other", index=indexed("failed", tags=("even",)))
        assert names(store, contains="r", tag="even") == ["other", "r4", "r2", "r0"]
        assert names(store, contains="r", status=("failed", "paused")) == ["other"]
        found = store.runs(RunQuery(contains="r"), limit=3)
        assert [row.run for row in found] == ["other", "r5", "r4"]
        assert [row.run for row in store.runs(RunQuery(contains="r"), before=found[-1].number, limit=1)] == ["r3"]

    # who holds them ---------------------------------------------------------------------------

    def test_holders_are_named_with_what_they_hold_and_the_first_end_of_it(
        self, store: Store, clock: ManualClock
    ) -> None:
        assert store.holders() == []
        for run in "abcd":
            created(store, run, index=indexed("running"))
        store.lease("a", "w1", seconds=30)
        store.lease("b", "w1", seconds=10)
        store.lease("c", "w2", seconds=inf)
        first, second = store.holders()
        assert (first.holder, first.runs, first.lives) == ("w1", 2, True)
        assert first.until_us is not None
        assert 0 < first.until_us - store.now_us() <= 10 * SECOND_US
        assert (second.holder, second.runs, second.until_us, second.lives) == ("w2", 1, None, True)

    def test_runs_are_listed_and_counted_by_who_holds_them(self, store: Store) -> None:
        for number, status in enumerate(("running", "paused", "running", "running", "running")):
            created(store, f"r{number}", index=indexed(status, tags=("t",) if number else ()))
        for run, holder in (("r0", "w1"), ("r1", "w1"), ("r2", "w2"), ("r3", "w3")):
            store.lease(run, holder, seconds=30)
        assert names(store, holders=("w1", "w2")) == ["r2", "r1", "r0"]
        assert names(store, holders=("w1", "w2"), status=("running",)) == ["r2", "r0"]
        assert names(store, holders=("w1", "w3"), status=("running", "paused"), tag="t") == ["r3", "r1"]
        assert names(store, holders=("w1",), contains="R0") == ["r0"]
        assert names(store, holders=("nobody",)) == []
        assert store.counts(RunQuery(holders=("w1", "w2"))) == {"running": 2, "paused": 1}

    def test_a_holder_lives_until_the_last_of_its_leases_has_ended(self, store: Store, clock: ManualClock) -> None:
        for run in "ab":
            created(store, run, index=indexed("running"))
        store.lease("a", "w1", seconds=30)
        store.lease("b", "w1", seconds=10)
        clock.advance(10)
        assert [one.lives for one in store.holders()] == [True]
        clock.advance(20)
        [left] = store.holders()
        assert (left.runs, left.lives) == (2, False)

    def test_who_let_everything_go_is_no_holder_any_more(self, store: Store) -> None:
        created(store, "a", index=indexed("running"))
        store.release("a", epoch=store.lease("a", "w1", seconds=30).epoch)
        assert store.holders() == []
