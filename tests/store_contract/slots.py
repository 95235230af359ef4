"""Contract: a delivery names what it expects of a run, and the store decides in the transaction of the delivery.

Messages go to the last renewal of a run and count once in the whole chain; an ended run takes none.
"""

from __future__ import annotations

import threading
from typing import Any

from msgspec.structs import replace

from killick.errors import DeliveryRefused, InboxMoved, RunUnknown
from killick.store.protocol import Store
from killick.store.records import Append, Delivered, Delivery, Head, InboxRead
from killick.store.slots import ALL_PLACES, ENDED_SLOT, NO_SLOT, RENEWED_SLOT, ROOT_SLOT, Slot
from store_contract.builders import blob, creation, following, indexed, letter
from store_contract.probes import Again, commit, created, deliver, everything, found, refused

TWO = Slot("wait:4", "9", 2)
ONE = replace(TWO, places=1)
ALL = replace(TWO, places=ALL_PLACES)


def vote(run: str, id: str, slot: Slot = ONE, **fields: Any) -> Delivery:  # noqa: A002
    return letter(run, id, slot=slot, **fields)


def renewal(store: Store, head: Head, to: str, *texts: str, root: str | None = None, **fields: Any) -> Append:
    """Returns the append by which a run continues in another one."""
    born = creation(store, to, "one", slots=(Slot(ROOT_SLOT, root or head.run),), index=indexed())
    ended = indexed("completed")
    return following(
        head, *(texts or ("renewed",)), also=(born,), slots=(Slot(RENEWED_SLOT, to),), index=ended, **fields
    )


class Conditions:
    def test_an_append_is_refused_if_a_message_came_that_its_writer_did_not_read(self, store: Store) -> None:
        head = created(store, "a")
        deliver(store, letter("a", "m1", "word"), letter("a", "m2", "order"), letter("a", "m3", "note"))
        before = everything(store)
        read = InboxRead(1, ("word", "order"))
        moved = refused(store, following(head, "two", takes=(1,), inbox_read=read), InboxMoved)
        assert (moved.run, moved.number) == ("a", 2)
        assert everything(store) == before
        head = commit(store, following(head, "two", takes=(1,), inbox_read=replace(read, number=2)))
        deliver(store, letter("a", "m4", "word"))
        refused(store, following(head, "three", inbox_read=replace(read, number=3)), InboxMoved)
        commit(store, following(head, "three", inbox_read=replace(read, number=4)))

    def test_a_message_to_another_run_refuses_no_append(self, store: Store) -> None:
        created(store, "b")
        deliver(store, letter("b", "m1"))
        head = commit(store, creation(store, "a", "one", inbox_read=InboxRead(0, ("note",))))
        commit(store, following(head, "two", inbox_read=InboxRead(0, ("note",))))

    def test_slots_are_written_changed_and_removed_with_an_append(self, store: Store) -> None:
        head = commit(store, creation(store, "a", "one", slots=(TWO, Slot("b", "x", 1))))
        assert store.slots("a") == [Slot("b", "x", 1), TWO]
        other = Slot("wait:4", "12", 3)
        commit(store, following(head, "two", slots=(Slot("b", "", NO_SLOT), other)))
        assert store.slots("a") == [other]
        assert store.slots("unknown") == []

    def test_a_refused_append_changes_no_slot(self, store: Store) -> None:
        head = commit(store, creation(store, "a", "one", slots=(TWO,)))
        stale = replace(following(head, "two", slots=(Slot("wait:4", "", NO_SLOT),)), epoch=7)
        store.append([stale])
        assert store.slots("a") == [TWO]

    def test_a_delivery_takes_places_until_none_is_left(self, store: Store) -> None:
        commit(store, creation(store, "a", "one", slots=(TWO,)))
        deliver(store, vote("a", "ann"), vote("a", "bob"))
        assert store.slots("a") == [replace(TWO, places=0)]
        [refused] = store.deliver([vote("a", "cyd", ALL)])
        assert isinstance(refused, DeliveryRefused)
        assert (refused.run, refused.slot, refused.found) == ("a", "wait:4", "9")
        assert [message.id for message in store.messages("a")] == ["ann", "bob"]

    def test_one_delivery_closes_a_slot_for_all_others(self, store: Store) -> None:
        commit(store, creation(store, "a", "one", slots=(TWO,)))
        first, second = store.deliver([vote("a", "cyd", ALL), vote("a", "ann", pieces=(blob("late"),))])
        assert isinstance(first, Delivered)
        assert isinstance(second, DeliveryRefused)
        assert store.pieces([blob("late").hash]) == {}
        assert store.slots("a") == [replace(TWO, places=0)]

    def test_a_message_that_was_delivered_before_takes_no_place_and_is_not_refused(self, store: Store) -> None:
        commit(store, creation(store, "a", "one", slots=(TWO,)))
        first, again = store.deliver([vote("a", "ann"), vote("a", "ann")])
        assert isinstance(first, Delivered)
        assert again == Delivered(first.message, fresh=False)
        assert store.slots("a") == [ONE]

    def test_another_token_or_no_slot_refuses_a_delivery(self, store: Store) -> None:
        head = commit(store, creation(store, "a", "one", slots=(TWO,)))
        [other] = store.deliver([vote("a", "ann", Slot("wait:4", "8", 1))])
        assert isinstance(other, DeliveryRefused)
        commit(store, following(head, "two", slots=(Slot("wait:4", "", NO_SLOT),)))
        [gone] = store.deliver([vote("a", "ann")])
        assert isinstance(gone, DeliveryRefused)
        assert (gone.found, store.messages("a")) == (None, [])

    def test_a_slot_that_is_only_looked_at_keeps_its_places(self, store: Store) -> None:
        commit(store, creation(store, "a", "one", slots=(ONE,)))
        deliver(store, vote("a", "m1", replace(ONE, places=0)), vote("a", "m2", replace(ONE, places=0)))
        assert store.slots("a") == [ONE]

    def test_places_are_given_back_to_the_slot_that_they_came_from(self, store: Store) -> None:
        head = commit(store, creation(store, "a", "one", slots=(TWO,)))
        deliver(store, vote("a", "ann"))
        head = commit(store, following(head, "two", takes=(1,), gives=(ONE,)))
        assert store.slots("a") == [TWO]
        head = commit(store, following(head, "three", slots=(Slot("wait:4", "11", 1),)))
        commit(store, following(head, "four", gives=(ONE,)))  # of the question before
        assert store.slots("a") == [Slot("wait:4", "11", 1)]

    def test_an_ended_run_takes_no_message_until_it_is_open_again(self, store: Store) -> None:
        head = commit(store, creation(store, "a", "one", slots=(Slot(ENDED_SLOT, "failed"),)))
        [refused] = store.deliver([letter("a", "m1", pieces=(blob("v"),))])
        assert isinstance(refused, DeliveryRefused)
        assert (refused.slot, refused.found) == (ENDED_SLOT, "failed")
        assert "failed" in str(refused)
        [exact] = deliver(store, letter("a", "m2", exact=True))
        commit(store, following(head, "resumed", slots=(Slot(ENDED_SLOT, "", NO_SLOT),)))
        [message] = deliver(store, letter("a", "m1"))
        assert [one.id for one in store.messages("a")] == [exact.id, message.id] == ["m2", "m1"]

    def test_a_message_in_an_append_is_skipped_if_its_run_has_ended(self, store: Store) -> None:
        commit(store, creation(store, "a", "one", slots=(Slot(ENDED_SLOT, "completed"),)))
        commit(store, creation(store, "b", "one", sends=(letter("a", "m", pieces=(blob("v"),)),)))
        assert store.messages("a") == []
        assert store.pieces([blob("v").hash]) == {}

    def test_a_removed_run_has_no_slots(self, store: Store) -> None:
        commit(store, creation(store, "a", "one", slots=(TWO,)))
        store.remove("a")
        assert store.slots("a") == []
        assert store.inspect() == []

    def test_slots_survive_closing(self, store: Store, again: Again) -> None:
        commit(store, creation(store, "a", "one", slots=(TWO,)))
        deliver(store, vote("a", "ann"))
        store.close()
        assert again().slots("a") == [ONE]

    def test_slots_are_rewritten_with_the_index(self, store: Store) -> None:
        head = commit(store, creation(store, "a", "one", index=indexed(), slots=(TWO,)))
        assert store.reindex("a", indexed(), at=head.seq, slots=[Slot("c", "1", 1)])
        assert store.slots("a") == [Slot("c", "1", 1)]
        assert store.reindex("a", indexed(), at=head.seq)
        assert store.slots("a") == [Slot("c", "1", 1)]
        assert not store.reindex("a", indexed(), at=head.seq + 1, slots=[])
        assert not store.reindex("a", indexed(), at=head.seq, slots=[], delivered=1)
        assert store.slots("a") == [Slot("c", "1", 1)]

    def test_of_many_at_once_no_more_are_accepted_than_there_are_places(self, store: Store) -> None:
        commit(store, creation(store, "a", "one", slots=(Slot("wait:4", "9", 3),)))
        results: list[object] = []
        start = threading.Barrier(8)

        def answer(name: str) -> None:
            start.wait()
            results.extend(store.deliver([vote("a", name)]))

        threads = [threading.Thread(target=answer, args=(f"p{n}",)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(isinstance(result, Delivered) for result in results) == 3
        assert len(store.messages("a")) == 3


class Renewals:
    def test_what_is_in_the_inbox_moves_to_the_run_that_continues_in_the_same_write(self, store: Store) -> None:
        head = commit(store, creation(store, "a", "one", index=indexed()))
        one, two, three = deliver(store, letter("a", "m1"), letter("a", "m2", pieces=(blob("v"),)), letter("a", "m3"))
        commit(store, renewal(store, head, "a+2", takes=(1,)))
        assert store.inbox("a") == []
        assert [message.taken for message in store.messages("a")] == [2, 2, 2]
        moved = [replace(two, run="a+2", number=1), replace(three, run="a+2", number=2)]
        assert store.inbox("a+2") == store.messages("a+2") == moved
        assert blob("v").hash in store.references("a+2").log
        store.remove("a")
        store.sweep()
        assert store.pieces([blob("v").hash]) == {blob("v").hash: blob("v")}
        assert one.id == "m1"

    def test_a_message_to_a_renewed_run_goes_to_the_last_one(self, store: Store) -> None:
        head = commit(store, creation(store, "a", "one", index=indexed()))
        commit(store, renewal(store, head, "a+2"))
        head = store.head("a+2")
        assert head is not None
        commit(store, renewal(store, head, "a+3", root="a"))
        [to_first, to_second] = deliver(store, letter("a", "m1"), letter("a+2", "m2"))
        assert [to_first.run, to_second.run] == ["a+3", "a+3"]
        assert store.messages("a") == store.messages("a+2") == []
        assert [message.id for message in store.inbox("a+3")] == ["m1", "m2"]
        row = store.index("a+3")
        assert row is not None
        assert (row.delivered, row.wake_at_us) == (2, 1)

    def test_a_message_counts_once_in_the_whole_chain(self, store: Store) -> None:
        head = commit(store, creation(store, "a", "one", index=indexed()))
        deliver(store, letter("a", "taken"), letter("a", "moved"))
        commit(store, renewal(store, head, "a+2", takes=(1,)))
        deliver(store, letter("a", "late"))
        head = store.head("a+2")
        assert head is not None
        commit(store, renewal(store, head, "a+3", root="a", takes=(2,)))
        for id_ in ("taken", "moved", "late"):
            for run in ("a", "a+2", "a+3"):
                [told] = store.deliver([letter(run, id_)])
                assert isinstance(told, Delivered)
                assert (told.fresh, told.message.id) == (False, id_)
        assert [message.id for message in store.inbox("a+3")] == ["moved"]

    def test_a_message_still_counts_in_the_chain_when_a_later_log_that_had_it_is_removed(self, store: Store) -> None:
        head = commit(store, creation(store, "a", "one", index=indexed()))
        for number, takes in ((2, ()), (3, ()), (4, (1,))):
            commit(store, renewal(store, head, f"a+{number}", root="a", takes=takes))
            head = found(store, f"a+{number}")
            if number == 2:
                deliver(store, letter("a", "m", pieces=(blob("v"),)))
        store.remove("a+3")
        assert store.inspect() == []
        [again] = store.deliver([letter("a+4", "m", pieces=(blob("w"),))])
        assert isinstance(again, Delivered)
        assert (again.fresh, again.message.run, again.message.taken) == (False, "a+2", 2)
        assert store.pieces([blob("v").hash, blob("w").hash]).keys() == {blob("v").hash}
        store.remove("a+2")
        [fresh] = store.deliver([letter("a+4", "m")])
        assert isinstance(fresh, Delivered)
        assert (fresh.fresh, fresh.message.run) == (True, "a+4")

    def test_chunks_of_a_forwarded_message_are_kept_and_those_of_its_repetition_dropped(self, store: Store) -> None:
        head = commit(store, creation(store, "a", "one", index=indexed()))
        commit(store, renewal(store, head, "a+2"))
        first, again = store.deliver([letter("a", "m", pieces=(blob("v"),)), letter("a", "m", pieces=(blob("w"),))])
        assert [isinstance(result, Delivered) and result.fresh for result in (first, again)] == [True, False]
        assert store.pieces([blob("v").hash, blob("w").hash]).keys() == {blob("v").hash}

    def test_a_message_in_an_append_is_forwarded_too(self, store: Store) -> None:
        head = commit(store, creation(store, "a", "one", index=indexed()))
        commit(store, renewal(store, head, "a+2"))
        commit(store, creation(store, "b", "one", sends=(letter("a", "m"),)))
        assert [message.id for message in store.inbox("a+2")] == ["m"]

    def test_an_exact_message_stays_with_its_log(self, store: Store) -> None:
        head = commit(store, creation(store, "a", "one", index=indexed()))
        commit(store, renewal(store, head, "a+2"))
        [message] = deliver(store, letter("a", "m", exact=True))
        assert (message.run, store.inbox("a+2")) == ("a", [])

    def test_a_chain_that_has_ended_takes_no_message(self, store: Store) -> None:
        head = commit(store, creation(store, "a", "one", index=indexed()))
        commit(store, renewal(store, head, "a+2"))
        head = store.head("a+2")
        assert head is not None
        commit(store, following(head, "two", slots=(Slot(ENDED_SLOT, "completed"),), index=indexed("completed")))
        [refused] = store.deliver([letter("a", "m")])
        assert isinstance(refused, DeliveryRefused)
        assert (refused.run, store.messages("a+2")) == ("a+2", [])

    def test_a_chain_whose_last_log_was_removed_is_unknown(self, store: Store) -> None:
        head = commit(store, creation(store, "a", "one", index=indexed()))
        commit(store, renewal(store, head, "a+2"))
        store.remove("a+2")
        [refused] = store.deliver([letter("a", "m")])
        assert isinstance(refused, RunUnknown)

    def test_no_message_is_lost_or_comes_out_of_order_while_a_run_renews_again_and_again(self, store: Store) -> None:
        created(store, "a")
        sent: list[str] = []
        stop = threading.Event()

        def send() -> None:
            for number in range(60):
                [told] = store.deliver([letter("a", f"m{number}")])
                assert isinstance(told, Delivered)
                sent.append(f"m{number}")
            stop.set()

        thread = threading.Thread(target=send)
        thread.start()
        run, count, seen = "a", 1, list[str]()
        while not stop.is_set() or store.inbox(run):
            head = store.head(run)
            assert head is not None
            taken = store.inbox(run)[:2]
            count += 1
            commit(store, renewal(store, head, f"a+{count}", root="a", takes=tuple(each.number for each in taken)))
            seen += [each.id for each in taken]
            run = f"a+{count}"
        thread.join()
        assert seen == sent
