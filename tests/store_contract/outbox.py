"""Contract: an append's companions: atomic writes to other runs, messages, and the outbox."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from killick.errors import AlreadyClaimed, EpochStale, HeadMoved, LogError, MessageGone, RunExists, RunUnknown
from killick.store.protocol import Store
from killick.store.records import READ_LIMIT, CreateRun, Head, OutboxItem, OutboxRow, Owner
from store_contract.builders import TOKEN, blob, cached, creation, following, fork, indexed, letter, moved
from store_contract.concurrency import in_threads
from store_contract.probes import chained, commit, created, deliver, everything, found, line, owner, refused


def outbox_rows(*kinds: str, after: int = 0) -> tuple[OutboxRow, ...]:
    return tuple(OutboxRow(seq, kind) for seq, kind in enumerate(kinds, after + 1))


class Feeding:
    def test_appends_to_other_runs_and_messages_happen_with_an_append(self, store: Store) -> None:
        head, other = created(store, "a"), created(store, "b", holder="w1")
        child = creation(
            store, "c", "born", holder="w2", pieces=(blob("v"),), index=indexed(tags=("t",)), claims=(TOKEN,),
            outbox=outbox_rows("run.started"), sends=(letter("a", "hello"),),
        )  # fmt: skip
        more = following(other, "more", "and more", snapshot=cached(2), outbox=outbox_rows("more", after=1))
        sends = (letter("b", "m1", pieces=(blob("sent"),)), letter("c", "m2"))
        item = following(head, "two", also=(child, more), sends=sends, outbox=outbox_rows("two", after=1))
        assert commit(store, item) == moved(item)
        for run in "abc":
            chained(store, run)
        assert (found(store, "b").holder, found(store, "b").epoch) == ("w1", 1)
        assert (found(store, "c").holder, found(store, "c").epoch) == ("w2", 1)
        assert (owner(store, TOKEN), store.tags("c")) == (Owner("c", 1), {"t"})
        assert store.pieces([blob("v").hash, blob("sent").hash]).keys() == {blob("v").hash, blob("sent").hash}
        assert len(store.snapshots("b")) == 1
        assert [[one.id for one in store.inbox(run)] for run in "abc"] == [["hello"], ["m1"], ["m2"]]
        assert line(store, "c").delivered == 1
        assert [(one.run, one.kind) for one in store.outbox()] == [("a", "two"), ("c", "run.started"), ("b", "more")]
        before = everything(store)
        assert commit(store, item) == moved(item)
        assert (everything(store), len(store.outbox()), store.inspect()) == (before, 3, [])

    @pytest.mark.parametrize("reason", [RunExists, RunUnknown, EpochStale, HeadMoved, AlreadyClaimed, MessageGone])
    @pytest.mark.parametrize("born_too", [False, True])
    def test_if_one_of_them_is_refused_nothing_of_all_happens(
        self, store: Store, reason: type[LogError], born_too: bool
    ) -> None:
        head, other, third = created(store, "a"), created(store, "b", claims=(TOKEN,)), created(store, "d")
        good = creation(store, "c", "born", holder="w1", pieces=(blob("v"),), index=indexed(), outbox=outbox_rows("x"))
        wrong: dict[type[LogError], Any] = {
            RunExists: creation(store, "b", "again"),
            RunUnknown: following(replace(other, run="nobody"), "two"),
            EpochStale: following(other, "two", epoch=4),
            HeadMoved: following(replace(other, seq=5), "six"),
            AlreadyClaimed: following(other, "two", claims=(TOKEN,)),
            MessageGone: following(other, "two", takes=(1,)),
        }
        item = following(head, "two", pieces=(blob("w"),), sends=(letter("b", "m"),), outbox=outbox_rows("y", after=1))
        item = replace(item, also=(good, wrong[reason]) if born_too else (wrong[reason],), index=indexed())
        before = everything(store)
        refused(store, item, reason)
        assert (everything(store), store.outbox(), store.outbox_end()) == (before, [], 0)
        assert store.pieces([blob("v").hash, blob("w").hash]) == {}
        results = store.append([following(third, "two"), item, following(head, "two")])
        assert [type(result) for result in results] == [Head, reason, Head]
        assert (store.head("c"), store.inbox("b"), store.inspect()) == (None, [], [])

    def test_an_append_that_is_refused_takes_those_with_it(self, store: Store) -> None:
        behind = created(store, "a")
        commit(store, following(behind, "two"))
        item = following(behind, "late", also=(creation(store, "b", "born"),), sends=(letter("a", "m"),))
        refused(store, item, HeadMoved)
        assert (store.head("b"), store.inbox("a")) == (None, [])

    def test_no_two_of_them_get_the_same_claim(self, store: Store) -> None:
        head = created(store, "a")
        item = following(head, "two", claims=(TOKEN,), also=(creation(store, "b", "born", claims=(TOKEN,)),))
        error = refused(store, item, AlreadyClaimed)
        assert (error.run, error.owner, error.seq) == ("b", "a", 2)
        assert (owner(store, TOKEN), store.head("b"), store.head("a")) == (None, None, head)

    def test_each_must_fit_what_was_there_before_any_of_them(self, store: Store) -> None:
        first = following(created(store, "a", claims=(TOKEN,)), "two", releases=(TOKEN,))
        refused(store, replace(first, also=(creation(store, "b", "born", claims=(TOKEN,)),)), AlreadyClaimed)
        refused(store, replace(first, also=(fork("a", "b", first.rows[0], "three"),)), HeadMoved)

    def test_one_that_has_others_with_itself_or_two_to_one_run_stop_the_batch(self, store: Store) -> None:
        head, other = created(store, "a"), created(store, "b")
        nested = following(other, "two", also=(creation(store, "c", "born"),))
        twice = following(other, "two")
        before = everything(store)
        for also in ((nested,), (twice, twice), (following(head, "twin"),)):
            with pytest.raises(ValueError, match="a"):
                store.append([creation(store, "d", "born"), following(head, "two", also=also)])
        wrong = replace(twice, rows=tuple(replace(row, seq=7) for row in twice.rows))
        with pytest.raises(ValueError, match="b"):
            store.append([creation(store, "d", "born"), following(head, "two", also=(wrong,))])
        assert everything(store) == before

    def test_a_message_to_nobody_or_with_a_known_id_is_passed_over(self, store: Store) -> None:
        head = created(store, "a", index=indexed("waiting"))
        created(store, "gone")
        store.remove("gone")
        deliver(store, letter("a", "known", by="ann"))
        sends = (
            letter("nobody", "m", pieces=(blob("lost"),)), letter("gone", "m"),
            letter("a", "known", by="bob"), letter("a", "new"),
        )  # fmt: skip
        head = commit(store, following(head, "two", sends=sends))
        assert [(one.id, one.by) for one in store.inbox("a")] == [("known", "ann"), ("new", "ann")]
        assert (store.head("nobody"), store.pieces([blob("lost").hash])) == (None, {})
        assert (line(store, "a").delivered, store.inspect()) == (2, [])

    def test_a_message_sent_with_an_append_wakes_who_gets_it(self, store: Store) -> None:
        head = created(store, "a")
        created(store, "b", index=indexed("waiting", wake_at_us=90))
        child = creation(store, "c", "born", index=indexed("waiting"))
        commit(
            store, following(head, "two", also=(child,), sends=(letter("b", "m", at_us=7), letter("c", "m", at_us=8)))
        )
        assert [line(store, run).wake_at_us for run in "bc"] == [7, 8]

    def test_an_ended_index_lets_the_lease_of_every_one_of_them_go(self, store: Store) -> None:
        head, other = created(store, "a", holder="w1"), created(store, "b", holder="w1")
        also = (following(other, "ended", index=indexed("cancelled")),)
        commit(store, following(head, "ended", index=indexed("completed"), also=also))
        assert [found(store, run).holder for run in "ab"] == [None, None]
        assert (store.renew("w1", "abcde", seconds=30), store.inspect()) == ({}, [])

    def test_one_of_many_threads_makes_a_run_with_its_append(self, store: Store) -> None:
        heads = [created(store, f"parent-{thread}") for thread in range(8)]
        child = creation(store, "child", "born")
        results = in_threads(lambda thread: store.append([following(heads[thread], "two", also=(child,))])[0])
        assert sorted(type(result).__name__ for result in results) == ["Head"] + ["RunExists"] * 7
        assert sorted(found(store, head.run).seq for head in heads) == [1] * 7 + [2]

    # the feed ---------------------------------------------------------------------------------

    def test_what_was_told_comes_in_order_after_a_position_by_kind_up_to_a_limit(self, store: Store) -> None:
        assert (store.outbox(), store.outbox_end()) == ([], 0)
        head = created(store, "a", "one", "two", outbox=outbox_rows("run.started", "wait.opened"))
        created(store, "b", "one", outbox=outbox_rows("run.started"))
        commit(store, following(head, "three", outbox=outbox_rows("run.ended", after=2)))
        told = store.outbox()
        wanted = [("a", 1, "run.started"), ("a", 2, "wait.opened"), ("b", 1, "run.started"), ("a", 3, "run.ended")]
        assert [(one.run, one.seq, one.kind) for one in told] == wanted
        positions = [one.position for one in told]
        assert positions == sorted(set(positions))
        assert store.outbox_end() == positions[-1] > 0
        assert store.outbox(after=positions[1]) == told[2:]
        assert (store.outbox(limit=3), store.outbox(after=positions[0], limit=1)) == (told[:3], told[1:2])
        assert store.outbox(kinds=["run.started"]) == [told[0], told[2]]
        assert store.outbox(kinds={"run.ended", "wait.opened"}, after=positions[1]) == told[3:]
        assert (store.outbox(kinds=[]), store.outbox(kinds=["nothing"])) == ([], [])
        assert store.inspect() == []

    def test_what_everybody_heard_is_forgotten_and_its_places_are_not_given_again(self, store: Store) -> None:
        head = created(store, "a", "one", "two", "three", outbox=outbox_rows("x", "y", "z"))
        first, second, third = store.outbox()
        assert store.trim_outbox(second.position) == 2
        assert (store.outbox(), store.trim_outbox(second.position)) == ([third], 0)
        assert store.trim_outbox(third.position) == 1
        assert (store.outbox(), store.outbox_end()) == ([], third.position)
        commit(store, following(head, "four", outbox=outbox_rows("w", after=3)))
        [told] = store.outbox(after=third.position)
        assert told == OutboxItem(position=store.outbox_end(), run="a", seq=4, kind="w")
        assert told.position > third.position > first.position

    def test_what_a_removed_run_told_is_gone_from_the_feed(self, store: Store) -> None:
        created(store, "a", outbox=outbox_rows("x"))
        created(store, "b", outbox=outbox_rows("x"))
        end = store.outbox_end()
        store.remove("b")
        assert ([one.run for one in store.outbox()], store.outbox_end(), store.inspect()) == (["a"], end, [])

    def test_one_reading_of_the_feed_returns_at_most_the_read_limit(self, store: Store) -> None:
        created(store, "a", outbox=tuple(OutboxRow(1, str(number)) for number in range(READ_LIMIT + 1)))
        told = store.outbox()
        assert len(told) == len(store.outbox(limit=READ_LIMIT + 1)) == READ_LIMIT
        assert [one.kind for one in store.outbox(after=told[-1].position)] == [str(READ_LIMIT)]

    def test_nothing_slips_into_the_feed_behind_who_reads_it(self, store: Store) -> None:
        seen: list[OutboxItem] = []

        def work(thread: int) -> None:
            for turn in range(20):
                if thread:
                    created(store, f"{thread}-{turn}", outbox=outbox_rows("x"), create=CreateRun())
                else:
                    seen.extend(store.outbox(after=seen[-1].position if seen else 0))

        in_threads(work, threads=4)
        seen += store.outbox(after=seen[-1].position if seen else 0)
        assert len(seen) == 60
        assert seen == store.outbox()
