"""Contract: quarantine, repair, removal and inspection."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from killick.clock import ManualClock
from killick.errors import AlreadyClaimed, KillickError, RunExists, RunUnknown, StoreError
from killick.store.protocol import Store
from killick.store.records import ERASED_BODY, Head, InboxRow, Owner, Row, RunQuery
from store_contract.builders import TOKEN, blob, cached, chain, creation, following, fork, indexed, letter
from store_contract.probes import absent, commit, created, deliver, everything, owner, refused, repaired


class Keeping:
    def test_a_quarantined_run_is_set_apart_alone_until_it_is_let_back(self, store: Store) -> None:
        head = created(store, "a")
        created(store, "b")
        for reason in ("broken at event 1", "worse", None):
            store.quarantine("a", reason)
            # The log, not the store, refuses a quarantined run.
            head = commit(store, following(head, "more"))
            assert (store.quarantined("a"), store.quarantined("b")) == (reason, None)

    def test_a_repair_sets_rows_aside_and_goes_on_after_the_old_head(self, store: Store) -> None:
        item = creation(store, "a", "one", "two", "three")
        commit(store, item)
        [(number, _)] = store.heads()
        head, rows = repaired(store, keep=1, seq=4)
        assert store.heads() == [(number, head)]
        assert store.read("a") == [item.rows[0], *rows]
        assert (store.displaced("a"), store.row("a", 2)) == (list(item.rows[1:]), None)

    def test_a_repair_may_leave_a_gap_be_followed_and_be_repaired(self, store: Store) -> None:
        item = creation(store, "a", "one", "two")
        commit(store, item)
        head, rows = repaired(store, keep=1, seq=7)
        assert store.read("a", after=1, limit=1) == [rows[0]]
        last = following(head, "nine")
        commit(store, last)
        assert [row.seq for row in store.read("a")] == [1, 7, 8, 9]
        repaired(store, keep=7, seq=10)
        assert store.displaced("a") == [item.rows[1], rows[1], *last.rows]

    @pytest.mark.parametrize("seq", [1, 2, 3, 4])
    def test_a_repair_writes_only_after_the_old_head(self, store: Store, seq: int) -> None:
        created(store, "a", "one", "two", "three", "four")
        before = everything(store)
        with pytest.raises((ValueError, KillickError)):
            repaired(store, keep=1, seq=seq)
        assert everything(store) == before

    def test_what_is_restored_takes_its_place_and_moves_no_head(self, store: Store) -> None:
        item = creation(store, "a", "one", "two", "three", pieces=(blob("kept"),))
        commit(store, item)
        created(store, "b", "other")
        head, others = store.head("a"), store.read("b")
        again = Row(2, item.rows[1].body, b'{"restored":1}', item.rows[1].hash)
        store.restore("a", [again], [blob("kept"), blob("lost")])
        assert (store.read("a"), store.head("a")) == ([item.rows[0], again, item.rows[2]], head)
        assert store.pieces([blob("kept").hash, blob("lost").hash]).keys() == {blob("kept").hash, blob("lost").hash}
        assert store.read("b") == others
        commit(store, following(head, "four"))
        assert [row.seq for row in store.read("a")] == [1, 2, 3, 4]
        with pytest.raises(RunUnknown):
            store.restore("nobody", [again], [])

    def test_restored_messages_keep_their_numbers(self, store: Store) -> None:
        created(store, "a")
        deliver(store, letter("a", "m1"))
        deliver(store, letter("a", "m2"))
        first, second = store.messages("a")
        lost, moved = replace(first, body=ERASED_BODY, id="lost:1", taken=1), replace(second, number=4, id="m4")
        store.restore("a", [], [], [InboxRow(lost, None), InboxRow(moved, None, (b"x" * 32,))])
        assert store.messages("a") == [lost, second, moved]
        assert store.inbox("a") == [second, moved]
        assert store.message("a", "m4") == moved

    def test_a_repair_gives_a_head_to_a_run_that_lost_it(self, store: Store) -> None:
        rows = chain(4, bytes(32), "repaired")
        head = Head(run="a", seq=5, hash=rows[0].hash, epoch=3)
        store.repair(head, keep=0, rows=rows)
        assert store.head("a") == head
        assert [one for _, one in store.heads()] == [head]
        assert store.read("a") == list(rows)

    # removal ----------------------------------------------------------------------------------

    def test_a_removed_run_is_gone(self, store: Store, clock: ManualClock) -> None:
        index = indexed(tags=("t",), wake_at_us=1)
        created(store, "a", "one", "two", pieces=(blob("v"),), index=index, snapshot=cached(1))
        deliver(store, letter("a", "m"))
        repaired(store, keep=1, seq=3)
        store.remove("a")
        absent(store, "a")
        assert store.runs(RunQuery()) == store.runs(RunQuery(tag="t")) == store.due(clock.now_us()) == []

    def test_the_id_the_number_and_the_claims_of_a_removed_run_stay_taken(self, store: Store) -> None:
        item = creation(store, "a", "one", holder="w1", claims=(TOKEN,))
        commit(store, item)
        [(number, _)] = store.heads()
        store.quarantine("a", "broken")
        store.remove("a")
        for again in (item, creation(store, "a", "other")):
            refused(store, again, RunExists)
        refused(store, creation(store, "b", "one", claims=(TOKEN,)), AlreadyClaimed)
        assert owner(store, TOKEN) == Owner("a", 1)
        absent(store, "a")
        created(store, "b")
        assert store.heads()[0][0] > number

    def test_a_removed_run_takes_no_appends_messages_leases_or_forks(self, store: Store) -> None:
        item = following(created(store, "a"), "two")
        head = commit(store, item)
        child = fork("a", "b", item.rows[0], "three")
        store.remove("a")
        for late in (item, following(head, "three"), child):
            refused(store, late, RunUnknown)
        assert isinstance(store.deliver([letter("a", "m")])[0], RunUnknown)
        with pytest.raises(RunUnknown):
            store.lease("a", "w1", seconds=30)
        with pytest.raises(RunUnknown):
            store.remove("a")

    def test_a_run_is_not_removed_while_a_fork_stands_on_it(self, store: Store) -> None:
        parent = creation(store, "a", "one", "two")
        store.append([parent, fork("a", "b", parent.rows[0], "other")])
        before = everything(store)
        with pytest.raises(StoreError):
            store.remove("a")
        assert everything(store) == before
        store.remove("b")
        store.remove("a")
        assert store.heads() == []

    def test_a_run_is_removed_only_as_its_remover_saw_it(self, store: Store) -> None:
        head = created(store, "a", "one", index=indexed("completed"))
        deliver(store, letter("a", "m1"))
        before = everything(store)
        assert not store.remove("a", at=2, delivered=1)
        assert not store.remove("a", at=1, delivered=0)
        assert everything(store) == before
        commit(store, following(head, "two", takes=(1,)))
        before = everything(store)
        assert not store.remove("a", at=1)
        assert not store.remove("a", delivered=0)
        assert everything(store) == before
        assert store.remove("a", at=2, delivered=1)
        absent(store, "a")

    # inspection -------------------------------------------------------------------------------

    def test_a_sound_store_has_no_problems(self, store: Store) -> None:
        index = indexed(tags=("t",))
        head = created(store, "a", "one", "two", pieces=(blob("v"),), claims=(TOKEN,), index=index)
        deliver(store, letter("a", "m1"), letter("a", "m2"))
        more = {"takes": (1,), "snapshot": cached(2), "erases_rows": (1,), "index": indexed()}
        head = commit(store, following(head, "three", **more))
        commit(store, following(head, "four", returns=(1,), erases_pieces=(blob("v").hash,)))
        commit(store, fork("a", "b", store.read("a")[1], "other"))
        head, _ = repaired(store, keep=3, seq=7)
        commit(store, following(head, "nine", erases_rows=(4,)))
        store.lease("a", "w1", seconds=30)
        created(store, "c")
        store.remove("c")
        before = everything(store)
        assert store.inspect() == store.inspect(heal=True) == []
        assert everything(store) == before
