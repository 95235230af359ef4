"""Contract: appends, single or batched, each atomic or refused; and reads."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from killick.clock import ManualClock
from killick.errors import AlreadyClaimed, EpochStale, HeadMoved, LogError, MessageGone, RunExists, RunUnknown
from killick.model.hashing import genesis
from killick.store.protocol import Store
from killick.store.records import READ_LIMIT, CreateRun, Head, UniqueRight
from store_contract.builders import TOKEN, blob, cached, chain, creation, following, indexed, letter, moved
from store_contract.probes import chained, commit, created, deliver, event, everything, owner, refused


class Appending:
    def test_an_append_moves_the_head_and_nothing_else_of_it(self, store: Store) -> None:
        head = created(store, "a", holder="w1")
        item = following(head, "two", "three")
        assert commit(store, item) == store.head("a") == replace(head, seq=3, hash=item.rows[-1].hash)

    def test_an_append_must_name_a_known_run_its_epoch_and_its_head(self, store: Store) -> None:
        assert refused(store, creation(store, "a", "one", create=None), RunUnknown).run == "a"
        behind = created(store, "a", holder="w1")
        head = commit(store, following(behind, "two"))
        for epoch in (0, 2):
            stale = refused(store, following(head, "three", epoch=epoch), EpochStale)
            assert (stale.run, stale.held, stale.actual) == ("a", epoch, 1)
        error = refused(store, following(behind, "other"), HeadMoved)
        assert (error.run, error.expected, error.actual) == ("a", 1, 2)
        refused(store, following(replace(head, seq=5), "six"), HeadMoved)
        refused(store, following(replace(head, hash=bytes(32)), "three"), HeadMoved)
        refused(store, following(behind, index=indexed()), HeadMoved)

    def test_a_stale_epoch_is_told_first_then_a_moved_head_then_a_used_claim(self, store: Store) -> None:
        behind = created(store, "a", claims=(TOKEN,))
        commit(store, following(behind, "two"))
        head = store.lease("a", "w1", seconds=30)
        item = following(behind, "other", claims=(TOKEN,), takes=(9,))
        refused(store, item, EpochStale)
        refused(store, replace(item, epoch=head.epoch), HeadMoved)
        refused(store, following(head, "three", claims=(TOKEN,), takes=(9,)), AlreadyClaimed)

    def test_an_append_needs_only_the_epoch_not_a_lease(self, store: Store, clock: ManualClock) -> None:
        head = created(store, "a", create=CreateRun(holder="w1", lease_seconds=30))
        clock.advance(60)
        head = commit(store, following(head, "two"))
        store.release("a", epoch=head.epoch)
        head = commit(store, following(head, "three"))
        assert head.holder is None
        store.lease("a", "w2", seconds=30)
        refused(store, following(head, "four"), EpochStale)

    def test_an_append_sent_again_is_acknowledged_even_after_a_takeover(self, store: Store) -> None:
        head = created(store, "a")
        deliver(store, letter("a", "m"))
        item = following(head, "two", claims=(TOKEN,), takes=(1,), pieces=(blob("v"),), index=indexed(seen=1))
        after = commit(store, item)
        before = everything(store)
        assert commit(store, item) == after
        assert everything(store) == before
        taken = store.lease("a", "w2", seconds=30)
        assert commit(store, item) == taken

    def test_an_append_that_was_followed_is_not_acknowledged_again(self, store: Store) -> None:
        item = following(created(store, "a"), "two")
        commit(store, following(commit(store, item), "three"))
        refused(store, item, HeadMoved)

    def test_an_append_without_rows_is_done_each_time(self, store: Store) -> None:
        head = created(store, "a")
        item = following(head, claims=(TOKEN,))
        assert commit(store, item) == head
        refused(store, item, AlreadyClaimed)

    @pytest.mark.parametrize("reason", [RunExists, RunUnknown, EpochStale, HeadMoved, AlreadyClaimed, MessageGone])
    def test_a_refused_append_writes_nothing(self, store: Store, reason: type[LogError]) -> None:
        new, used, start = UniqueRight("token", b"new"), UniqueRight("token", b"used"), genesis(store.id, "a")
        head = created(store, "a", "one", claims=(TOKEN,), pieces=(blob("old"),), index=indexed())
        deliver(store, letter("a", "m1"), letter("a", "m2"), letter("a", "m3"))
        head = commit(store, following(head, "two", takes=(1,), index=indexed(tags=("t",), seen=3)))
        other, first = created(store, "other", claims=(used,)), event(store, "a", 1)
        rights = {"takes": (2,), "returns": (1,), "claims": (new,), "releases": (TOKEN,)}
        erases = {"erases_rows": (1,), "erases_pieces": (blob("old").hash,)}
        brings = {"pieces": (blob("new"), blob("old")), "index": indexed("completed"), "snapshot": cached(3)}
        item = following(head, "three", **rights, **erases, **brings)
        wrong: dict[type[LogError], dict[str, Any]] = {
            RunExists: {"create": CreateRun(), "after": 0, "before": start, "rows": chain(0, start, "new")},
            RunUnknown: {"run": "nobody"},
            EpochStale: {"epoch": 7},
            HeadMoved: {"after": 1, "before": first.hash, "rows": chain(1, first.hash, "new")},
            AlreadyClaimed: {"claims": (new, used)},
            MessageGone: {"takes": (2, 9)},
        }
        item = replace(item, **wrong[reason])
        before = everything(store)
        refused(store, item, reason)
        assert everything(store) == before
        good = following(other, "two")
        results = store.append([good, item, following(moved(good), "three")])
        assert [type(result) for result in results] == [Head, reason, Head]
        assert {**everything(store), "other": ()} == {**before, "other": ()}
        assert store.pieces([blob("new").hash, blob("3/1").hash]) == {}
        assert owner(store, new) is None

    # batches ----------------------------------------------------------------------------------

    def test_one_batch_may_append_to_one_run_many_times_and_the_same_twice(self, store: Store) -> None:
        one = creation(store, "a", "one")
        two = following(moved(one), "two", claims=(TOKEN,))
        items = [one, two, two, following(moved(two), "three")]
        assert store.append(items) == [moved(item) for item in items]
        chained(store, "a")
        assert store.append([]) == []

    def test_of_two_in_a_batch_that_want_the_same_the_first_wins(self, store: Store) -> None:
        head = created(store, "a")
        deliver(store, letter("a", "m"))
        first = following(head, "mine", claims=(TOKEN,), takes=(1,))
        after = moved(first)
        wants = [following(head, "yours")]
        wants += [following(after, "two", claims=(TOKEN,)), following(after, "two", takes=(1,))]
        results = store.append([first, *wants, creation(store, "b", "one"), creation(store, "b", "one")])
        kinds = [Head, HeadMoved, AlreadyClaimed, MessageGone, Head, RunExists]
        assert [type(result) for result in results] == kinds
        assert store.head("a") == after

    @pytest.mark.parametrize("seqs", [(3,), (1,), (2, 4), (2, 2), (3, 2)])
    def test_rows_not_numbered_one_by_one_stop_the_batch(self, store: Store, seqs: tuple[int, ...]) -> None:
        good = following(created(store, "a"), *("text" for _ in seqs))
        rows = tuple(replace(row, seq=seq) for row, seq in zip(good.rows, seqs, strict=True))
        before = everything(store)
        with pytest.raises(ValueError, match="a"):
            store.append([creation(store, "b", "one"), replace(good, rows=rows)])
        assert everything(store) == before

    # reading ----------------------------------------------------------------------------------

    def test_rows_come_back_as_they_were_written_after_a_cursor_up_to_a_limit(self, store: Store) -> None:
        first, *others = creation(store, "a", *"abcdefg").rows
        rows = [replace(first, data=None), *others]
        created(store, "a", rows=tuple(rows))
        assert [store.row("a", seq) for seq in range(9)] == [None, *rows, None]
        pages = [store.read("a", after=after, limit=3) for after in (0, 3, 6, 7)]
        assert pages == [rows[:3], rows[3:6], rows[6:], []]
        assert store.read("a", data=False) == [replace(row, data=None) for row in rows]

    def test_one_read_returns_at_most_the_read_limit(self, store: Store) -> None:
        item = creation(store, "a", *map(str, range(READ_LIMIT + 1)))
        commit(store, item)
        assert len(store.read("a")) == len(store.read("a", limit=READ_LIMIT + 1)) == READ_LIMIT
        assert store.read("a", after=READ_LIMIT) == [item.rows[-1]]

    def test_heads_come_in_order_of_creation_after_a_cursor(self, store: Store) -> None:
        first, *_ = [created(store, run) for run in "cadb"]
        commit(store, following(first, "two"))
        numbered = store.heads()
        assert [head for _, head in numbered] == [store.head(run) for run in "cadb"]
        assert store.heads(limit=2) == numbered[:2]
        assert store.heads(after=numbered[1][0], limit=1) == numbered[2:3]
        assert store.heads(after=numbered[3][0]) == []
