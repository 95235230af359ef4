"""Contract: content-addressed values: shared, erased, swept when unused; and snapshots."""

from __future__ import annotations

from msgspec.structs import replace

from killick.store.protocol import Store
from killick.store.records import References, Snapshot
from store_contract.builders import blob, cached, creation, following, fork, letter
from store_contract.probes import chained, commit, created, deliver, event, found, repaired


def snapped(store: Store, *snapshots: Snapshot) -> list[Snapshot]:
    """Appends the snapshots to a new run "a"; returns them as the store should, without chunks."""
    head = created(store, "a")
    for snapshot in snapshots:
        head = commit(store, following(head, f"at {head.seq}", snapshot=snapshot))
    return [replace(snapshot, pieces=()) for snapshot in snapshots]


class Values:
    def test_a_piece_comes_back_by_its_hash_whether_rows_came_with_it_or_not(self, store: Store) -> None:
        one, late = blob("one"), blob("late")
        commit(store, following(created(store, "a", pieces=(one,)), pieces=(late,)))
        assert store.pieces([one.hash, late.hash, bytes(32)]) == {one.hash: one, late.hash: late}
        assert store.references("a") == References({one.hash, late.hash}, set())

    def test_many_pieces_can_be_asked_for_at_once(self, store: Store) -> None:
        values = {value.hash: value for value in (blob(str(number)) for number in range(3_000))}
        created(store, "a", pieces=tuple(values.values()))
        assert store.pieces(values.keys()) == values
        assert store.references("a").log == values.keys()

    def test_an_erased_piece_loses_its_body_for_all_until_it_is_given_again(self, store: Store) -> None:
        value = blob("secret")
        head = created(store, "a", pieces=(value,))
        created(store, "b", pieces=(value,))
        commit(store, following(head, "erased", erases_pieces=(value.hash, bytes(32))))
        assert store.sweep() == 0
        assert store.pieces([value.hash, bytes(32)]) == {value.hash: replace(value, body=None)}
        assert store.references("a").log == store.references("b").log == {value.hash}
        created(store, "c", pieces=(value,))
        assert store.pieces([value.hash]) == {value.hash: value}

    def test_a_piece_given_without_its_body_does_not_erase_it(self, store: Store) -> None:
        value = blob("value")
        created(store, "a", pieces=(value,))
        created(store, "b", pieces=(replace(value, body=None),))
        assert store.pieces([value.hash]) == {value.hash: value}

    def test_erasing_a_row_takes_its_data_alone_and_leaves_the_chain(self, store: Store) -> None:
        item = creation(store, "a", "one", "two")
        created(store, "b", "one")
        commit(store, following(commit(store, item), "erased", erases_rows=(1, 77)))
        assert store.read("a")[:2] == [replace(item.rows[0], data=None), item.rows[1]]
        assert event(store, "b", 1).data is not None
        chained(store, "a")

    def test_erasing_a_message_takes_its_body_alone(self, store: Store) -> None:
        head = created(store, "a")
        store.deliver([letter("a", "m1"), letter("a", "m2")])
        before, other = store.messages("a")
        commit(store, following(head, "erased", takes=(1,), erases_messages=(1, 77)))
        erased = replace(before, body=b'{"$erased":""}', taken=head.seq + 1)
        assert store.messages("a") == [erased, other]
        assert store.message("a", "m1") == erased
        assert store.inspect() == []
        assert store.purge()

    def test_erasing_a_row_also_empties_one_that_a_repair_set_aside(self, store: Store) -> None:
        item = creation(store, "a", "one", "two", "three")
        commit(store, item)
        head, _ = repaired(store, keep=1, seq=4)
        commit(store, following(head, "erased", erases_rows=(2,)))
        assert store.displaced("a") == [replace(item.rows[1], data=None), item.rows[2]]

    def test_the_references_of_a_log_can_be_written_anew(self, store: Store) -> None:
        wrong, lost = blob("wrong"), blob("lost")
        created(store, "a", pieces=(wrong,), snapshot=cached(1))
        created(store, "b", pieces=(lost,))
        assert not store.set_references("a", [lost.hash], at=2, delivered=0)
        assert not store.set_references("a", [lost.hash], at=1, delivered=1)
        assert not store.set_references("nobody", [lost.hash], at=1, delivered=0)
        assert store.references("a").log == {wrong.hash}
        for _ in range(2):
            assert store.set_references("a", [lost.hash], at=1, delivered=0)
        assert store.references("a") == References({lost.hash}, {blob("1/1").hash})
        store.remove("b")
        assert store.sweep() == 1
        assert store.pieces([lost.hash, wrong.hash]) == {lost.hash: lost}

    def test_a_sweep_spares_what_a_run_or_a_message_refers_to(self, store: Store) -> None:
        created(store, "a", pieces=(blob("a"), blob("both")))
        created(store, "b", pieces=(blob("b"), blob("both")))
        deliver(store, letter("b", "m", pieces=(blob("sent"),)))
        assert store.sweep() == 0
        store.remove("a")
        assert store.sweep() == 1
        kept = {blob(text).hash for text in ("b", "both", "sent")}
        assert store.pieces([blob("a").hash, *kept]).keys() == store.references("b").log == kept

    def test_a_sweep_deletes_no_more_than_its_limit(self, store: Store) -> None:
        created(store, "a", pieces=tuple(blob(str(number)) for number in range(5)))
        store.remove("a")
        assert [store.sweep(limit=2) for _ in range(4)] == [2, 2, 1, 0]

    # snapshots --------------------------------------------------------------------------------

    def test_the_newest_snapshot_of_a_fold_version_at_or_before_a_seq_is_found(self, store: Store) -> None:
        two, _, four = snapped(store, cached(2), cached(3, fold=2), cached(4))
        newest = [store.snapshot("a", fold=1, at=at) for at in (1, 2, 3, 4, 99)]
        assert newest == [None, two, two, four, four]
        assert store.snapshot("a", fold=3, at=99) is None
        commit(store, fork("a", "b", event(store, "a", 2), "other"))
        assert store.snapshot("b", fold=1, at=99) is None

    def test_snapshots_are_listed_whatever_their_fold_version(self, store: Store) -> None:
        given = snapped(store, cached(2, fold=1), cached(2, fold=2), cached(4, fold=1))
        listed = [replace(snapshot, pieces=()) for snapshot in store.snapshots("a")]
        assert sorted(listed, key=lambda one: (one.seq, one.fold)) == given

    def test_a_snapshot_given_again_replaces_the_old_one(self, store: Store) -> None:
        _, newer = snapped(store, cached(2, mark=b"x"), cached(2, mark=b"y"))
        assert store.snapshot("a", fold=1, at=2) == newer
        assert len(store.snapshots("a")) == 1

    def test_the_pieces_of_a_snapshot_are_kept_until_it_is_forgotten(self, store: Store) -> None:
        two, three, one, sent = (blob(text) for text in ("2/1", "3/1", "1/1", "sent"))
        snapped(store, cached(2), cached(3))
        commit(store, following(found(store, "a"), "log", pieces=(two,)))
        deliver(store, letter("a", "m", pieces=(sent,)))
        created(store, "b", snapshot=cached(1))
        assert store.references("a") == References({two.hash, sent.hash}, {two.hash, three.hash})
        assert (store.sweep(), store.pieces([three.hash])) == (0, {three.hash: three})
        store.forget_snapshots("a")
        assert (store.snapshots("a"), len(store.snapshots("b"))) == ([], 1)
        assert store.references("a") == References({two.hash, sent.hash}, set())
        assert (store.sweep(), store.pieces([three.hash, one.hash])) == (1, {one.hash: one})
