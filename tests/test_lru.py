"""The cache that drops its least recently used items."""

from __future__ import annotations

from killick.lru import Lru


def test_the_least_recently_used_item_goes_first() -> None:
    cache: Lru[str, int] = Lru(2)
    cache.put("a", 1)
    cache.put("b", 2)
    assert cache.get("a") == 1
    cache.put("c", 3)
    assert [cache.get(key) for key in "abc"] == [1, None, 3]


def test_items_count_with_their_size_and_a_replaced_one_counts_once() -> None:
    cache: Lru[str, str] = Lru(10)
    cache.put("a", "first", 6)
    cache.put("a", "second", 6)
    cache.put("b", "other", 4)
    assert (cache.get("a"), cache.get("b")) == ("second", "other")
    cache.put("c", "large", 8)
    assert [cache.get(key) for key in "abc"] == [None, None, "large"]


def test_a_cleared_cache_has_its_whole_room_again() -> None:
    cache: Lru[str, int] = Lru(1)
    cache.put("a", 1)
    cache.clear()
    cache.put("b", 2)
    assert len(cache) == 1
    assert cache.get("b") == 2


def test_a_dropped_item_leaves_its_room_and_dropping_it_again_changes_nothing() -> None:
    cache: Lru[str, str] = Lru(10)
    cache.put("a", "first", 6)
    cache.pop("a")
    cache.pop("a")
    cache.put("b", "other", 10)
    assert (cache.get("a"), cache.get("b")) == (None, "other")
