"""Contract: exclusive leases, and claims, which are unique in the store."""

from __future__ import annotations

from math import inf

import pytest
from msgspec.structs import replace

from killick.clock import ManualClock
from killick.errors import AlreadyClaimed, RunBusy, RunUnknown
from killick.store.protocol import Store, lease_all
from killick.store.records import ENDED, Head, Owner, UniqueRight
from store_contract.builders import SECOND_US, TOKEN, creation, following, indexed, moved
from store_contract.probes import absent, commit, created, found, owner, refused


class Rights:
    def test_a_lease_raises_the_epoch_and_names_the_holder(self, store: Store, clock: ManualClock) -> None:
        head, until = created(store, "a"), store.now_us() + 30 * SECOND_US
        held = store.lease("a", "w1", seconds=30)
        assert held == store.head("a") == replace(head, epoch=1, holder="w1", lease_until_us=until)

    def test_an_unknown_run_cannot_be_leased_kept_or_released(self, store: Store) -> None:
        with pytest.raises(RunUnknown):
            store.lease("a", "w1", seconds=30)
        assert store.renew("w1", "abcde", seconds=30) == {}
        store.release("a", epoch=0)
        store.release("a", epoch=0, left=True)
        absent(store, "a")

    def test_of_several_runs_each_is_leased_or_refused_by_itself(self, store: Store) -> None:
        for run in "abc":
            created(store, run)
        held = store.lease("b", "w2", seconds=30)
        leased = lease_all(store, ["a", "b", "unknown", "c"], "w1", seconds=30)
        assert leased[0] == store.head("a")
        assert leased[3] == store.head("c")
        assert [type(each) for each in leased] == [Head, RunBusy, RunUnknown, Head]
        assert [(head.epoch, head.holder) for head in leased if isinstance(head, Head)] == [(1, "w1")] * 2
        assert store.head("b") == held

    @pytest.mark.parametrize("holder", ["w1", "w2"])
    def test_a_held_run_is_busy_for_everybody_even_its_holder(self, store: Store, holder: str) -> None:
        created(store, "a")
        held = store.lease("a", "w1", seconds=30)
        with pytest.raises(RunBusy) as caught:
            store.lease("a", holder, seconds=30)
        assert (caught.value.run, caught.value.holder) == ("a", "w1")
        assert store.head("a") == held

    def test_a_holder_hands_a_run_over_by_its_epoch(self, store: Store) -> None:
        created(store, "a")
        held = store.lease("a", "w1", seconds=30)
        with pytest.raises(RunBusy):
            store.lease("a", "w2", seconds=30, handed=held.epoch - 1)
        taken = store.lease("a", "w2", seconds=30, handed=held.epoch)
        assert (taken.epoch, taken.holder) == (2, "w2")
        assert store.renew("w1", "a", seconds=30) == {}
        with pytest.raises(RunBusy):
            store.lease("a", "w3", seconds=30, handed=held.epoch)

    def test_who_was_taken_over_can_neither_keep_nor_release(self, store: Store, clock: ManualClock) -> None:
        created(store, "a")
        old = store.lease("a", "w1", seconds=30)
        clock.advance(30)
        new = store.lease("a", "w2", seconds=30)
        assert (new.epoch, new.holder) == (2, "w2")
        assert store.renew("w1", "abcde", seconds=300) == {}
        for left in (False, True):
            store.release("a", epoch=old.epoch, left=left)
            store.release("a", epoch=new.epoch, holder="w1", left=left)
        assert store.head("a") == new

    def test_a_released_run_is_free_keeps_its_epoch_and_cannot_be_kept(self, store: Store) -> None:
        head = created(store, "a")
        held = store.lease("a", "w1", seconds=30)
        store.release("a", epoch=held.epoch)
        assert store.renew("w1", "abcde", seconds=30) == {}
        store.release("a", epoch=held.epoch, left=True)
        assert store.head("a") == replace(head, epoch=1)
        assert store.lease("a", "w2", seconds=30).epoch == 2

    @pytest.mark.parametrize("kept", [False, True])
    def test_an_endless_lease_lasts_until_released(self, store: Store, clock: ManualClock, kept: bool) -> None:
        created(store, "a")
        held = store.lease("a", "w1", seconds=30 if kept else inf)
        assert not kept or store.renew("w1", "abcde", seconds=inf) == {"a": 1}
        assert found(store, "a") == replace(held, lease_until_us=None)
        clock.advance(10_000_000)
        with pytest.raises(RunBusy):
            store.lease("a", "w2", seconds=30)
        store.release("a", epoch=held.epoch)
        assert store.lease("a", "w2", seconds=30).epoch == 2

    @pytest.mark.parametrize("first", [30, inf])
    def test_a_kept_lease_lasts_longer(self, store: Store, clock: ManualClock, first: float) -> None:
        created(store, "a")
        held = store.lease("a", "w1", seconds=first)
        clock.advance(20)
        assert store.renew("w1", "abcde", seconds=30) == {"a": held.epoch}
        assert found(store, "a") == replace(held, lease_until_us=store.now_us() + 30 * SECOND_US)
        clock.advance(20)
        with pytest.raises(RunBusy):
            store.lease("a", "w2", seconds=30)
        clock.advance(10)
        assert store.lease("a", "w2", seconds=30).epoch == 2

    def test_keeping_keeps_what_is_named_and_held_and_nothing_whose_time_is_up(
        self, store: Store, clock: ManualClock
    ) -> None:
        for run in "abcde":
            created(store, run)
        held = {run: store.lease(run, "w1", seconds=seconds) for run, seconds in (("a", 10), ("b", 30), ("c", 30))}
        others = [store.lease("d", "w2", seconds=30), store.head("e")]
        store.release("b", epoch=1)
        held["b"] = store.lease("b", "w1", seconds=30)
        clock.advance(10)
        assert store.renew("w1", "ade", seconds=60) == {}
        assert store.renew("w1", "abcde", seconds=60) == {"b": 2, "c": 1}
        until = store.now_us() + 60 * SECOND_US
        kept = [replace(held[run], lease_until_us=until) for run in "bc"]
        assert [store.head(run) for run in "abcde"] == [held["a"], *kept, *others]

    def test_who_keeps_a_run_may_go_on_appending_to_it(self, store: Store, clock: ManualClock) -> None:
        head = created(store, "a", holder="w1")
        for text in ("two", "three", "four"):
            clock.advance(10)
            store.renew("w1", "abcde", seconds=60)
            head = commit(store, following(head, text))
            assert head.lease_until_us == store.now_us() + 60 * SECOND_US
        assert store.inspect() == []

    # the end of a run -------------------------------------------------------------------------

    @pytest.mark.parametrize("status", ENDED)
    @pytest.mark.parametrize("seconds", [30, inf])
    def test_an_ended_index_lets_the_lease_go(self, store: Store, status: str, seconds: float) -> None:
        created(store, "a", index=indexed())
        head = store.lease("a", "w1", seconds=seconds)
        ended = following(head, "ended", index=indexed(status))
        free = replace(moved(ended), epoch=head.epoch)
        assert commit(store, ended) == store.head("a") == free
        assert commit(store, ended) == free
        assert (store.renew("w1", "abcde", seconds=30), store.inspect()) == ({}, [])
        assert commit(store, following(free, "after", index=indexed(status))).seq == 3

    def test_a_run_may_be_born_ended_and_then_nobody_has_it(self, store: Store) -> None:
        head = created(store, "a", holder="w1", index=indexed("completed"))
        assert (head.epoch, head.holder, head.lease_until_us) == (1, None, None)
        assert (store.head("a"), store.inspect()) == (head, [])

    # claims -----------------------------------------------------------------------------------

    def test_a_claim_names_its_owner_and_the_last_event_of_its_append(self, store: Store) -> None:
        head = created(store, "a")
        assert owner(store, TOKEN) is None
        commit(store, following(head, "two", "three", claims=(TOKEN,)))
        assert (owner(store, TOKEN), store.claimed("a")) == (Owner("a", 3), {TOKEN: 3})

    def test_a_used_claim_is_refused_even_to_its_owner_who_is_named(self, store: Store) -> None:
        head = created(store, "a", claims=(TOKEN,))
        error = refused(store, creation(store, "b", "one", claims=(TOKEN,)), AlreadyClaimed)
        assert (error.run, error.space, error.owner, error.seq) == ("b", "token", "a", 1)
        refused(store, following(head, "two", claims=(TOKEN,)), AlreadyClaimed)

    def test_claims_differ_by_space_and_by_key(self, store: Store) -> None:
        one, two, three = UniqueRight("x", b"1"), UniqueRight("y", b"1"), UniqueRight("x", b"2")
        created(store, "a", claims=(one, two))
        head = created(store, "b", claims=(three,))
        assert (store.claimed("a"), store.claimed("b")) == ({one: 1, two: 1}, {three: 1})
        refused(store, following(head, "two", claims=(two,)), AlreadyClaimed)

    def test_a_released_claim_can_be_made_again_even_in_the_same_batch_or_append(self, store: Store) -> None:
        head = created(store, "a", claims=(TOKEN,))
        head = commit(store, following(head, "refused", "started", releases=(TOKEN,), claims=(TOKEN,)))
        assert owner(store, TOKEN) == Owner("a", 3)
        free = following(head, "refused", releases=(TOKEN,))
        store.append([free, creation(store, "b", "one", claims=(TOKEN,))])
        assert owner(store, TOKEN) == Owner("b", 1)
        commit(store, following(found(store, "b"), "refused", releases=(TOKEN,)))
        assert owner(store, TOKEN) is None

    def test_nobody_releases_or_gets_by_releasing_what_another_run_claimed(self, store: Store) -> None:
        created(store, "a", claims=(TOKEN,))
        head = created(store, "b", releases=(TOKEN,))
        refused(store, following(head, "two", releases=(TOKEN,), claims=(TOKEN,)), AlreadyClaimed)
        assert owner(store, TOKEN) == Owner("a", 1)
