"""Contract: opening, closing and reopening a store."""

from __future__ import annotations

from functools import partial
from typing import Final

import pytest

from killick.clock import ManualClock
from killick.errors import HeadMoved, RunBusy, RunExists, StoreClosed
from killick.store.protocol import Store
from killick.store.records import READ_LIMIT, RunQuery
from killick.store.records import Opening as Opened
from store_contract.builders import SECOND_US, TOKEN, blob, cached, creation, following, fork, indexed, letter
from store_contract.probes import Again, absent, commit, created, deliver, everything, refused, repaired

OPERATIONS: Final[tuple[tuple[str, tuple[object, ...]], ...]] = (
    ("heads sweep soonest_us inspect outbox outbox_end", ()),
    ("head read references snapshots forget_snapshots inbox messages", ("a",)),
    ("claimed index tags quarantined displaced remove", ("a",)),
    ("append deliver pieces", ([],)),
    ("row", ("a", 1)),
    ("quarantine", ("a", None)),
    ("owned", (TOKEN.space, TOKEN.key)),
    ("runs", (RunQuery(),)),
    ("due trim_outbox", (1,)),
)


def filled(store: Store) -> dict[str, tuple[object, ...]]:
    """Puts one of everything into a store; returns its contents."""
    head = created(store, "a", "one", "two", pieces=(blob("v"),), claims=(TOKEN,))
    deliver(store, letter("a", "m1", pieces=(blob("sent"),)), letter("a", "m2"))
    index = indexed(tags=("t",), wake_at_us=7)
    commit(store, following(head, "three", takes=(1,), snapshot=cached(2), index=index))
    commit(store, fork("a", "b", store.read("a")[1], "other"))
    created(store, "c", index=indexed("waiting", priority=2, wake_at_us=5, started_at_us=1, changed_at_us=2))
    store.lease("c", "w1", seconds=30)
    created(store, "d")
    store.remove("d")
    store.quarantine("b", "broken")
    repaired(store, keep=2, seq=6)
    return everything(store)


class Opening:
    def test_a_new_store_has_a_place_an_id_a_key_and_no_runs(self, store: Store) -> None:
        assert store.place
        assert store.id
        assert len(store.secret_key) == 32
        absent(store, "a")
        assert store.heads() == []

    def test_a_closed_store_says_so_and_can_be_closed_again(self, store: Store) -> None:
        created(store, "a")
        store.close()
        for names, arguments in OPERATIONS:
            for name in names.split():
                with pytest.raises(StoreClosed):
                    getattr(store, name)(*arguments)
        for operation in (
            partial(store.lease, "a", "w1", seconds=30),
            partial(store.claim, "w1", now_us=1, seconds=30, limit=1),
            partial(store.renew, "w1", ["a"], seconds=30),
            partial(store.release, "a", epoch=0),
            partial(store.opening, "a", fold=1),
            partial(store.watch, list[str]().append),
            partial(store.set_references, "a", [], at=1, delivered=0),
            partial(store.reindex, "a", indexed(), at=1),
        ):
            with pytest.raises(StoreClosed):
                operation()
        store.close()

    def test_everything_is_still_there_after_reopening(self, store: Store, again: Again) -> None:
        before, identity, listed = filled(store), (store.id, store.secret_key), store.runs(RunQuery())
        store.close()
        opened = again()
        assert everything(opened) == before
        assert ((opened.id, opened.secret_key), opened.runs(RunQuery())) == (identity, listed)
        assert opened.inspect() == []
        refused(opened, creation(opened, "d", "other"), RunExists)
        [message] = deliver(opened, letter("a", "m3"))
        assert message.number == 3
        created(opened, "e")
        assert [head.run for _, head in opened.heads()] == ["a", "b", "c", "e"]

    # going on with a run ----------------------------------------------------------------------

    def test_what_is_needed_to_go_on_with_a_run_comes_in_one_reading(self, store: Store) -> None:
        head = created(store, "a", "one", "two", holder="w1")
        rows = store.read("a")
        assert store.opening("a", fold=1) == Opened(head=head, quarantined=None, snapshot=None, rows=rows)
        for seq in (2, 3):
            head = commit(store, following(head, f"after {seq}", snapshot=cached(seq)))
        head = commit(store, following(head, "five", snapshot=cached(4, fold=2)))
        store.quarantine("a", "broken")
        newest, last = store.snapshot("a", fold=1, at=9), store.read("a", after=3)
        assert newest is not None
        assert (newest.seq, len(last)) == (3, 2)
        opened = Opened(head=head, quarantined="broken", snapshot=newest, rows=last)
        assert store.opening("a", fold=1) == opened
        opening = store.opening("a", fold=3)
        assert opening is not None
        assert (opening.snapshot, opening.rows) == (None, store.read("a"))

    def test_an_unknown_or_removed_run_cannot_be_gone_on_with(self, store: Store) -> None:
        created(store, "a")
        store.remove("a")
        assert (store.opening("a", fold=1), store.opening("b", fold=1)) == (None, None)
        absent(store, "b")

    def test_a_fork_is_gone_on_with_by_its_own_rows(self, store: Store) -> None:
        created(store, "a", "one", "two", "three", snapshot=cached(1))
        commit(store, fork("a", "b", store.read("a")[1], "other", "more"))
        opening = store.opening("b", fold=1)
        assert opening is not None
        assert (opening.head, opening.snapshot, opening.rows) == (store.head("b"), None, store.read("b"))

    def test_a_long_run_is_opened_whole(self, store: Store) -> None:
        created(store, "a", *map(str, range(READ_LIMIT + 2)))
        opening = store.opening("a", fold=1)
        assert opening is not None
        assert [row.seq for row in opening.rows] == list(range(1, READ_LIMIT + 3))

    def test_time_is_that_of_the_clock_and_life_is_known_or_not(self, store: Store, clock: ManualClock) -> None:
        before = store.now_us()
        clock.advance(3)
        assert store.now_us() == before + 3 * SECOND_US
        assert store.proves_life in (True, False)
        assert all(condition.name and condition.value for condition in store.conditions())

    def test_opening_again_and_again_changes_nothing(self, store: Store, again: Again) -> None:
        before = filled(store)
        for _ in range(2):
            assert everything(again()) == before
        assert everything(store) == before

    def test_two_that_have_the_store_open_see_each_others_commits(self, store: Store, again: Again) -> None:
        other = again()
        head = created(store, "a")
        assert other.head("a") == head
        assert commit(other, following(head, "two")) == store.head("a")
        refused(store, following(head, "mine"), HeadMoved)
        deliver(other, letter("a", "m"))
        assert len(store.inbox("a")) == 1
        held = store.lease("a", "w1", seconds=30)
        with pytest.raises(RunBusy):
            other.lease("a", "w2", seconds=30)
        store.release("a", epoch=held.epoch)
        assert other.lease("a", "w2", seconds=30).epoch == 2
