"""Contract: token buckets, which all processes of a store share."""

from __future__ import annotations

from killick.clock import ManualClock
from killick.store.limits import TokenBucket
from killick.store.protocol import Store
from store_contract.builders import SECOND_US
from store_contract.concurrency import in_threads
from store_contract.probes import Again

SLOW = TokenBucket(b"slow", 60 * SECOND_US, 60 * SECOND_US)
FAST = TokenBucket(b"fast", SECOND_US, 3 * SECOND_US)


def taken(store: Store, *buckets: TokenBucket) -> int:
    """How many tokens can be had at once."""
    count = 0
    while store.take_tokens(buckets) == 0:
        count += 1
    return count


class RateLimits:
    def test_a_bucket_gives_its_tokens_at_once_and_then_one_after_the_other(
        self, store: Store, clock: ManualClock
    ) -> None:
        assert taken(store, FAST) == 3
        assert store.take_tokens([FAST]) == SECOND_US
        clock.advance(0.25)
        assert store.take_tokens([FAST]) == 750_000
        clock.advance(1.75)
        assert taken(store, FAST) == 2

    def test_a_call_takes_a_token_of_each_bucket_or_none(self, store: Store, clock: ManualClock) -> None:
        assert store.take_tokens([FAST, SLOW]) == 0
        assert [store.take_tokens([FAST, SLOW]) for _ in range(5)] == [60 * SECOND_US] * 5
        assert taken(store, FAST) == 2
        clock.advance(60)
        assert store.take_tokens([SLOW, FAST]) == 0

    def test_a_bucket_that_is_named_twice_gives_one_token_and_none_needs_none(self, store: Store) -> None:
        assert taken(store, FAST, FAST) == 3
        assert store.take_tokens([]) == 0

    def test_a_full_bucket_is_swept_and_one_in_use_is_not(self, store: Store, clock: ManualClock) -> None:
        assert (store.take_tokens([SLOW]), taken(store, FAST)) == (0, 3)
        clock.advance(10)
        store.sweep()
        assert (store.take_tokens([SLOW]), taken(store, FAST)) == (50 * SECOND_US, 3)

    def test_all_who_open_a_store_share_its_buckets(self, store: Store, again: Again) -> None:
        assert store.take_tokens([FAST]) == 0
        assert (taken(again(), FAST), taken(store, FAST)) == (2, 0)

    def test_threads_get_no_more_tokens_than_one_of_them_alone(self, store: Store) -> None:
        many = TokenBucket(b"many", 10 * SECOND_US, 200 * SECOND_US)
        assert sum(in_threads(lambda _: taken(store, many))) == 20
