"""What only one may have: a lease on a run, and claims, which exist once in the whole store."""

from __future__ import annotations

from math import inf

import pytest
from msgspec.structs import replace

from kedge.clock import ManualClock
from kedge.errors import AlreadyClaimed, RunBusy, RunUnknown
from kedge.store.base import Claim, Owner, Store
from kedge.testing.contract.asking import absent, born, commit, found, refused
from kedge.testing.contract.making import SECOND_US, TOKEN, birth, following


class Rights:
    def test_a_lease_raises_the_epoch_and_names_the_holder(self, store: Store, clock: ManualClock) -> None:
        head, until = born(store, "a"), clock.now_us() + 30 * SECOND_US
        held = store.lease("a", "w1", seconds=30)
        assert held == store.head("a") == replace(head, epoch=1, holder="w1", lease_until_us=until)

    def test_an_unknown_run_cannot_be_leased_renewed_or_released(self, store: Store) -> None:
        with pytest.raises(RunUnknown):
            store.lease("a", "w1", seconds=30)
        assert not store.renew("a", epoch=0, seconds=30)
        store.release("a", epoch=0)
        absent(store, "a")

    @pytest.mark.parametrize("holder", ["w1", "w2"])
    def test_a_held_run_is_busy_for_everybody_even_its_holder(self, store: Store, holder: str) -> None:
        born(store, "a")
        held = store.lease("a", "w1", seconds=30)
        with pytest.raises(RunBusy) as caught:
            store.lease("a", holder, seconds=30)
        assert (caught.value.run, caught.value.holder) == ("a", "w1")
        assert store.head("a") == held

    def test_who_was_taken_over_can_neither_renew_nor_release(self, store: Store, clock: ManualClock) -> None:
        born(store, "a")
        old = store.lease("a", "w1", seconds=30)
        clock.advance(30)
        new = store.lease("a", "w2", seconds=30)
        assert (new.epoch, new.holder) == (2, "w2")
        assert not store.renew("a", epoch=old.epoch, seconds=300)
        store.release("a", epoch=old.epoch)
        assert store.head("a") == new

    def test_a_released_run_is_free_keeps_its_epoch_and_cannot_be_renewed(self, store: Store) -> None:
        head = born(store, "a")
        held = store.lease("a", "w1", seconds=30)
        store.release("a", epoch=held.epoch)
        assert not store.renew("a", epoch=held.epoch, seconds=30)
        assert store.head("a") == replace(head, epoch=1)
        assert store.lease("a", "w2", seconds=30).epoch == 2

    @pytest.mark.parametrize("renewed", [False, True])
    def test_an_endless_lease_lasts_until_released(self, store: Store, clock: ManualClock, renewed: bool) -> None:
        born(store, "a")
        held = store.lease("a", "w1", seconds=30 if renewed else inf)
        assert not renewed or store.renew("a", epoch=held.epoch, seconds=inf)
        assert found(store, "a") == replace(held, lease_until_us=None)
        clock.advance(10_000_000)
        with pytest.raises(RunBusy):
            store.lease("a", "w2", seconds=30)
        store.release("a", epoch=held.epoch)
        assert store.lease("a", "w2", seconds=30).epoch == 2

    def test_a_renewed_lease_lasts_longer(self, store: Store, clock: ManualClock) -> None:
        born(store, "a")
        held = store.lease("a", "w1", seconds=30)
        clock.advance(20)
        assert store.renew("a", epoch=held.epoch, seconds=30)
        assert found(store, "a") == replace(held, lease_until_us=clock.now_us() + 30 * SECOND_US)
        clock.advance(20)
        with pytest.raises(RunBusy):
            store.lease("a", "w2", seconds=30)

    # claims -----------------------------------------------------------------------------------

    def test_a_claim_names_its_owner_and_the_last_event_of_its_append(self, store: Store) -> None:
        head = born(store, "a")
        assert store.owner(TOKEN) is None
        commit(store, following(head, "two", "three", claims=(TOKEN,)))
        assert (store.owner(TOKEN), store.claimed("a")) == (Owner("a", 3), {TOKEN: 3})

    def test_a_used_claim_is_refused_even_to_its_owner_who_is_named(self, store: Store) -> None:
        head = born(store, "a", claims=(TOKEN,))
        error = refused(store, birth(store, "b", "one", claims=(TOKEN,)), AlreadyClaimed)
        assert (error.run, error.space, error.owner, error.seq) == ("b", "token", "a", 1)
        refused(store, following(head, "two", claims=(TOKEN,)), AlreadyClaimed)

    def test_claims_differ_by_space_and_by_key(self, store: Store) -> None:
        one, two, three = Claim("x", b"1"), Claim("y", b"1"), Claim("x", b"2")
        born(store, "a", claims=(one, two))
        head = born(store, "b", claims=(three,))
        assert (store.claimed("a"), store.claimed("b")) == ({one: 1, two: 1}, {three: 1})
        refused(store, following(head, "two", claims=(two,)), AlreadyClaimed)

    def test_a_released_claim_can_be_made_again_even_in_the_same_batch_or_append(self, store: Store) -> None:
        head = born(store, "a", claims=(TOKEN,))
        head = commit(store, following(head, "refused", "started", releases=(TOKEN,), claims=(TOKEN,)))
        assert store.owner(TOKEN) == Owner("a", 3)
        free = following(head, "refused", releases=(TOKEN,))
        store.append([free, birth(store, "b", "one", claims=(TOKEN,))])
        assert store.owner(TOKEN) == Owner("b", 1)
        commit(store, following(found(store, "b"), "refused", releases=(TOKEN,)))
        assert store.owner(TOKEN) is None

    def test_nobody_releases_or_gets_by_releasing_what_another_run_claimed(self, store: Store) -> None:
        born(store, "a", claims=(TOKEN,))
        head = born(store, "b", releases=(TOKEN,))
        refused(store, following(head, "two", releases=(TOKEN,), claims=(TOKEN,)), AlreadyClaimed)
        assert store.owner(TOKEN) == Owner("a", 1)
