"""Contract: search terms at events. Written terms are found, newest first."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from killick.store.protocol import Store
from killick.store.records import IndexQuery, TermBatch, TermPosition, TermRow
from store_contract.builders import following, fork
from store_contract.probes import Again, commit, created, repaired

RED, BLUE, ROUND = 7, -(1 << 63), (1 << 63) - 1


def batch(run: str, after: int, up_to: int, *terms: tuple[int, int, int], reset: bool = False) -> TermBatch:
    return TermBatch(run=run, after=after, up_to=up_to, terms=tuple(TermRow(*each) for each in terms), reset=reset)


def found(store: Store, *groups: Collection[int] | int, **within: Any) -> list[tuple[str, int]]:
    """Returns the events that match all groups; a single term is a group."""
    all_of = [[group] if isinstance(group, int) else group for group in groups]
    return [(place.run, place.seq) for place in store.search(IndexQuery(all_of, **within))]


def unindexed(store: Store, **within: Any) -> list[tuple[str, int]]:
    return [(each.run, each.indexed_to) for each in store.unindexed(**within)]


class SearchTerms:
    def test_a_run_is_unindexed_until_it_is_indexed_up_to_its_head(self, store: Store) -> None:
        head = created(store, "a", "one", "two", "three")
        created(store, "b")
        assert unindexed(store) == [("a", 0), ("b", 0)]
        store.index_terms([batch("a", 0, 2, (RED, 10, 1))])
        assert unindexed(store) == [("a", 2), ("b", 0)]
        store.index_terms([batch("a", 2, 3), batch("b", 0, 1)])
        assert unindexed(store) == []
        commit(store, following(head, "four"))
        assert unindexed(store) == [("a", 3)]

    def test_runs_behind_come_in_order_of_creation_above_a_cursor(self, store: Store) -> None:
        for run in "abc":
            created(store, run)
        first, *rest = store.unindexed()
        assert store.unindexed(limit=1) == [first]
        assert store.unindexed(after=first.number) == rest
        assert [(number, head.run) for number, head in store.heads()] == [(e.number, e.run) for e in (first, *rest)]

    def test_a_fork_is_indexed_from_its_cut_on(self, store: Store) -> None:
        created(store, "a", "one", "two")
        commit(store, fork("a", "b", store.read("a")[0], "other"))
        assert [(each.run, each.base, each.indexed_to) for each in store.unindexed()] == [("a", 0, 0), ("b", 1, 1)]
        store.index_terms([batch("b", 1, 2, (RED, 10, 2))])
        assert (unindexed(store), found(store, RED)) == ([("a", 0)], [("b", 2)])

    def test_places_come_newest_first_and_by_number_and_seq_in_the_same_instant(self, store: Store) -> None:
        for run in "ab":
            created(store, run, "one", "two")
        store.index_terms([batch("b", 0, 2, (RED, 5, 1), (RED, 5, 2)), batch("a", 0, 2, (RED, 5, 1), (RED, 9, 2))])
        assert found(store, RED) == [("a", 2), ("b", 2), ("b", 1), ("a", 1)]
        assert store.search(IndexQuery([[RED]])) == sorted(store.search(IndexQuery([[RED]])), reverse=True)

    def test_every_group_must_meet_and_one_term_of_each_is_enough(self, store: Store) -> None:
        created(store, "a", "one", "two", "three", "four")
        terms = [(RED, 1, 1), (ROUND, 1, 1), (BLUE, 2, 2), (ROUND, 2, 2), (RED, 3, 3), (BLUE, 3, 3), (ROUND, 4, 4)]
        store.index_terms([batch("a", 0, 4, *terms)])
        assert found(store, RED, ROUND) == [("a", 1)]
        assert found(store, [RED, BLUE], ROUND) == [("a", 2), ("a", 1)]
        assert found(store, ROUND, [BLUE, RED], [RED, 1234]) == [("a", 1)]
        assert found(store, [RED, BLUE]) == [("a", 3), ("a", 2), ("a", 1)]
        assert found(store, RED, BLUE, ROUND) == found(store, 1234) == found(store, []) == []

    def test_a_question_may_name_a_span_of_time_a_cursor_and_a_limit(self, store: Store) -> None:
        created(store, "a", *"12345")
        store.index_terms([batch("a", 0, 5, *((RED, at, at) for at in (1, 2, 3, 4, 5)))])
        assert found(store, RED, since_us=2, until_us=4) == [("a", 3), ("a", 2)]
        assert found(store, RED, since_us=6) == found(store, RED, until_us=1) == []
        first = store.search(IndexQuery([[RED]], limit=2))
        assert [place.seq for place in first] == [5, 4]
        assert found(store, RED, before=first[-1], limit=2) == [("a", 3), ("a", 2)]
        assert found(store, RED, before=first[-1], until_us=3) == [("a", 2), ("a", 1)]
        assert found(store, RED, before=TermPosition(1, 1, 1)) == []

    def test_of_two_who_mark_the_same_run_the_second_is_passed_over(self, store: Store) -> None:
        created(store, "a", "one", "two")
        store.index_terms([batch("a", 0, 1, (RED, 1, 1))])
        store.index_terms([batch("a", 0, 2, (BLUE, 1, 1), (BLUE, 2, 2))])
        assert (unindexed(store), found(store, RED), found(store, BLUE)) == ([("a", 1)], [("a", 1)], [])
        store.index_terms([batch("a", 1, 2, (BLUE, 2, 2)), batch("nobody", 0, 1, (RED, 1, 1))])
        assert (unindexed(store), found(store, BLUE), found(store, RED)) == ([], [("a", 2)], [("a", 1)])

    def test_a_mark_that_is_made_twice_is_there_once(self, store: Store) -> None:
        created(store, "a", "one", "two")
        store.index_terms([batch("a", 0, 1, (RED, 1, 1), (RED, 1, 1))])
        store.index_terms([batch("a", 1, 2, (RED, 1, 1))])
        assert found(store, RED) == [("a", 1)]
        assert store.inspect() == []

    def test_marking_anew_drops_what_was_there_of_that_run_alone(self, store: Store) -> None:
        for run in "ab":
            created(store, run, "one", "two")
        store.index_terms([batch(run, 0, 2, (RED, 1, 1), (BLUE, 2, 2)) for run in "ab"])
        store.index_terms([batch("a", 0, 1, (ROUND, 1, 1), reset=True)])
        assert found(store, RED) == [("b", 1)]
        assert (found(store, ROUND), unindexed(store)) == ([("a", 1)], [("a", 1)])
        assert store.inspect() == []

    def test_a_repaired_run_is_to_be_indexed_again(self, store: Store) -> None:
        created(store, "a", "one", "two")
        store.index_terms([batch("a", 0, 2, (RED, 1, 1), (RED, 2, 2))])
        repaired(store, keep=1, seq=3)
        assert (found(store, RED), unindexed(store)) == ([], [("a", 0)])

    def test_a_removed_run_is_found_no_more_and_never_behind(self, store: Store) -> None:
        for run in "ab":
            created(store, run)
            store.index_terms([batch(run, 0, 1, (RED, 1, 1))])
        store.remove("a")
        assert (found(store, RED), unindexed(store), store.inspect()) == ([("b", 1)], [], [])
        store.sweep()
        store.index_terms([batch("a", 0, 1, (RED, 1, 1))])
        assert (found(store, RED), unindexed(store), store.inspect()) == ([("b", 1)], [], [])

    def test_search_terms_outlive_the_process(self, store: Store, again: Again) -> None:
        created(store, "a")
        store.index_terms([batch("a", 0, 1, (RED, 1, 1))])
        other = again()
        assert (found(other, RED), unindexed(other)) == ([("a", 1)], [])
