"""Contract: run creation, once, with the creator's lease, or as a fork."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from killick.clock import ManualClock
from killick.errors import HeadMoved, RunBusy, RunExists, RunUnknown
from killick.model.hashing import genesis
from killick.store.protocol import Store
from killick.store.records import CreateRun
from store_contract.builders import SECOND_US, chain, creation, following, fork, moved
from store_contract.probes import commit, created, event, everything, refused


class Births:
    def test_a_birth_makes_a_free_run_at_epoch_0_whatever_epoch_it_names(self, store: Store) -> None:
        item = creation(store, "a", "one", "two", epoch=99)
        assert commit(store, item) == store.head("a") == replace(moved(item), epoch=0)

    def test_a_birth_with_a_holder_has_the_lease_at_epoch_1(self, store: Store, clock: ManualClock) -> None:
        head = created(store, "a", create=CreateRun(holder="w1", lease_seconds=30))
        assert (head.epoch, head.holder) == (1, "w1")
        assert head.lease_until_us == store.now_us() + 30 * SECOND_US
        with pytest.raises(RunBusy):
            store.lease("a", "w2", seconds=30)

    @pytest.mark.parametrize(("first", "second"), [(None, None), (None, "w1"), ("w1", None), ("w1", "w2")])
    def test_a_birth_under_a_taken_id_is_refused_even_if_it_says_the_same(
        self, store: Store, first: str | None, second: str | None
    ) -> None:
        created(store, "a", "one", holder=first)
        before = everything(store)
        refused(store, creation(store, "a", "one", holder=second), RunExists)
        refused(store, creation(store, "a", "other", holder=first), RunExists)
        assert everything(store) == before

    def test_a_birth_sent_again_is_acknowledged_while_its_holder_has_the_run(self, store: Store) -> None:
        item = creation(store, "a", "one", holder="w1")
        head = commit(store, item)
        before = everything(store)
        assert commit(store, item) == head
        assert everything(store) == before
        store.release("a", epoch=head.epoch)
        refused(store, item, RunExists)

    def test_a_birth_without_rows_stands_at_its_genesis(self, store: Store) -> None:
        head = commit(store, creation(store, "a"))
        assert (head.seq, head.hash) == (0, genesis(store.id, "a"))
        refused(store, creation(store, "a"), RunExists)
        assert commit(store, following(head, "one")).seq == 1

    def test_only_a_fork_is_born_later_than_after_0(self, store: Store) -> None:
        rows = chain(3, genesis(store.id, "a"), "four")
        refused(store, creation(store, "a", after=3, rows=rows), HeadMoved)
        assert store.head("a") is None

    def test_a_fork_starts_after_the_cut_and_has_only_its_own_rows(self, store: Store) -> None:
        parent = created(store, "a", "one", "two", "three")
        item = fork("a", "b", event(store, "a", 2), "other")
        child = commit(store, item)
        assert child == replace(moved(item), base=2, parent="a")
        items = [following(parent, "four"), following(child, "four")]
        assert store.append(items) == [store.head("a"), store.head("b")]
        assert (len(store.read("a")), store.row("b", 2)) == (4, None)
        assert store.read("b") == [*item.rows, *items[1].rows]

    def test_a_fork_may_be_born_without_rows_in_the_batch_of_its_parent(self, store: Store) -> None:
        parent = creation(store, "a", "one", "two")
        item = fork("a", "b", parent.rows[0])
        assert store.append([parent, item])[1] == replace(moved(item), base=1, parent="a")

    def test_a_fork_of_a_fork_may_cut_anywhere_in_its_own_lineage_only(self, store: Store) -> None:
        created(store, "a", "one", "two", "three")
        commit(store, fork("a", "b", event(store, "a", 2), "b-three", "b-four"))
        assert commit(store, fork("b", "c", event(store, "b", 3), "c-four")).base == 3
        assert commit(store, fork("b", "d", event(store, "a", 1), "d-two")).base == 1
        assert commit(store, fork("c", "e", event(store, "a", 2), "e-three")).base == 2
        refused(store, fork("b", "f", event(store, "a", 3), "f-four"), HeadMoved)

    def test_a_fork_must_leave_a_known_run_at_an_event_it_has(self, store: Store) -> None:
        created(store, "a", "one")
        at = event(store, "a", 1)
        assert refused(store, fork("nobody", "b", at, "two"), RunUnknown).run == "nobody"
        refused(store, fork("a", "b", replace(at, seq=2), "three"), HeadMoved)
        refused(store, fork("a", "b", replace(at, hash=bytes(32)), "two"), HeadMoved)
        assert store.head("b") is None
