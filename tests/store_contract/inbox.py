"""Contract: messages, numbered within a run, deduplicated by id, consumed once, and returned to their position."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from killick.errors import MessageGone, RunUnknown
from killick.store.protocol import Store
from killick.store.records import Delivered, Message
from store_contract.builders import blob, creation, following, indexed, letter
from store_contract.probes import commit, created, deliver, refused


class Inbox:
    def test_a_message_comes_back_as_it_was_delivered_numbered_per_run(self, store: Store) -> None:
        created(store, "a")
        created(store, "b")
        first = letter("a", "m1", "note", by=None, at_us=5)
        one, other, two = deliver(store, first, letter("b", "m1"), letter("a", "m2"))
        assert one == Message(run="a", number=1, id="m1", name="note", body=b"m1", by=None, at_us=5)
        assert (other.number, two.number) == (1, 2)
        assert store.inbox("a") == store.messages("a") == [one, two]

    def test_the_first_of_an_id_wins_and_the_others_are_told_of_it(self, store: Store) -> None:
        head = created(store, "a")
        told = store.deliver([letter("a", "m", by="ann"), letter("a", "m", by="bob")])
        [message] = store.messages("a")
        assert message.by == "ann"
        assert told == [Delivered(message, fresh=True), Delivered(message, fresh=False)]
        commit(store, following(head, "two", takes=(1,)))
        late = letter("a", "m", by="cleo", pieces=(blob("late"),))
        assert store.deliver([late]) == [Delivered(replace(message, taken=2), fresh=False)]
        assert store.messages("a") == [replace(message, taken=2)]
        assert store.pieces([blob("late").hash]) == {}

    @pytest.mark.parametrize("is_seen", [False, True])
    def test_a_sender_whose_clock_is_ahead_makes_a_run_due_since_its_last_change(
        self, store: Store, is_seen: bool
    ) -> None:
        head = created(store, "a", index=indexed("waiting", changed_at_us=40))
        deliver(store, letter("a", "m", at_us=9_000))
        commit(store, following(head, "two", index=indexed("waiting", changed_at_us=50, seen=int(is_seen))))
        row = store.index("a")
        assert row is not None
        assert row.wake_at_us == (None if is_seen else 50)
        deliver(store, letter("a", "m2", at_us=9_000))
        row = store.index("a")
        assert row is not None
        assert row.wake_at_us == 50

    def test_a_delivery_to_an_unknown_run_is_refused_alone(self, store: Store) -> None:
        created(store, "a")
        results = store.deliver([letter("a", "m1"), letter("b", "m", pieces=(blob("v"),)), letter("a", "m2")])
        assert [type(result) for result in results] == [Delivered, RunUnknown, Delivered]
        assert (len(store.inbox("a")), store.pieces([blob("v").hash])) == (2, {})

    def test_a_taken_message_names_the_last_event_of_its_append(self, store: Store) -> None:
        head = created(store, "a")
        one, two = deliver(store, letter("a", "m1"), letter("a", "m2"))
        commit(store, following(head, "two", "three", takes=(1,)))
        assert store.inbox("a") == [two]
        assert store.messages("a") == [replace(one, taken=3), two]

    @pytest.mark.parametrize("number", [0, 1, 3])
    def test_a_message_that_is_gone_or_never_was_cannot_be_taken(self, store: Store, number: int) -> None:
        head = created(store, "a")
        deliver(store, letter("a", "m1"), letter("a", "m2"))
        head = commit(store, following(head, "two", takes=(1,)))
        error = refused(store, following(head, "three", takes=(number,)), MessageGone)
        assert (error.run, error.number) == ("a", number)

    def test_a_run_takes_no_message_of_another_or_at_its_birth(self, store: Store) -> None:
        created(store, "a")
        deliver(store, letter("a", "m"))
        refused(store, creation(store, "b", "one", takes=(1,)), MessageGone)
        refused(store, following(created(store, "b"), "two", takes=(1,)), MessageGone)

    def test_a_returned_message_is_in_the_inbox_again_in_its_old_place(self, store: Store) -> None:
        head = created(store, "a")
        messages = deliver(store, letter("a", "m1"), letter("a", "m2"))
        head = commit(store, following(head, "two", takes=(1,)))
        # 2 is unconsumed and 9 does not exist: returning them does nothing.
        head = commit(store, following(head, "rewound", returns=(1, 2, 9)))
        assert store.inbox("a") == store.messages("a") == messages
        head = commit(store, following(head, "four", takes=(1,)))
        commit(store, following(head, "rewound", "six", returns=(1,), takes=(1,)))
        assert [one.taken for one in store.messages("a")] == [6, None]

    def test_the_inbox_can_be_read_by_name_after_a_cursor_up_to_a_limit(self, store: Store) -> None:
        created(store, "a")
        deliver(store, *(letter("a", f"m{n}", name="odd" if n % 2 else "even") for n in range(1, 8)))
        assert [one.number for one in store.inbox("a", name="odd")] == [1, 3, 5, 7]
        assert [one.number for one in store.inbox("a", name="odd", limit=2)] == [1, 3]
        assert [one.number for one in store.inbox("a", name="odd", after=3)] == [5, 7]
        assert [one.number for one in store.inbox("a", after=5, limit=1)] == [6]
        assert store.inbox("a", name="none") == []
