"""Contract: due runs take turns by their fairness key; returned permits wake the oldest run that waits for one."""

from __future__ import annotations

from killick.clock import ManualClock
from killick.store.protocol import Store
from killick.store.records import Delivery, Owner, UniqueRight, lane_of
from store_contract.builders import SECOND_US, following, indexed
from store_contract.claims import claimed, due, left
from store_contract.probes import commit, created, found

TAG = "killick:permit:crm"
ONE, TWO, OTHER = (UniqueRight("permit", key) for key in (b"crm\x00\x01", b"crm\x00\x02", b"dwh\x00\x01"))


def waits_in_line(store: Store, run: str, key: str | None = None, **fields: object) -> None:
    tags = () if key is None else (f"fair:{key}",)
    created(store, run, index=indexed("waiting", **{"wake_at_us": 1, "tags": tags, **fields}))


def to_first(store: Store, at_us: int, *, id: str = "w", tag: str = TAG) -> Delivery:  # noqa: A002
    return Delivery(run="", id=id, name="free", body=b"1", by=None, at_us=at_us, waits_for=tag)


class Fairness:
    def test_a_backlog_of_one_key_does_not_hold_up_the_few_runs_of_another(
        self, store: Store, clock: ManualClock
    ) -> None:
        for number in range(60):
            waits_in_line(store, f"many{number:02}", "acme")
        for number in range(3):
            waits_in_line(store, f"few{number}", "zeta", wake_at_us=2)
        assert lane_of(("fair:acme",)) != lane_of(("fair:zeta",))
        served = [run for _ in range(6) for run in claimed(store, clock, limit=1)]
        assert [run for run in served if run.startswith("few")] == ["few0", "few1", "few2"]
        assert [run for run in served if run.startswith("many")] == ["many00", "many01", "many02"]
        assert len(claimed(store, clock, limit=57)) == 57
        assert store.inspect() == []

    def test_one_claim_of_several_runs_takes_from_each_key_in_turn(self, store: Store, clock: ManualClock) -> None:
        for key in ("acme", "zeta"):
            for number in range(4):
                waits_in_line(store, f"{key}{number}", key)
        first = claimed(store, clock, limit=4)
        assert sorted(first) == ["acme0", "acme1", "zeta0", "zeta1"]
        assert sorted(first[:2]) == ["acme0", "zeta0"]
        assert sorted(due(store, clock, limit=2)) == ["acme2", "zeta2"]

    def test_priority_goes_before_fairness_and_runs_without_a_key_are_one_more_in_turn(
        self, store: Store, clock: ManualClock
    ) -> None:
        for number in range(3):
            waits_in_line(store, f"acme{number}", "acme")
            waits_in_line(store, f"none{number}")
        waits_in_line(store, "top0", "acme", priority=5)
        waits_in_line(store, "top1", "acme", priority=5)
        assert claimed(store, clock, limit=2) == ["top0", "top1"]
        assert sorted(claimed(store, clock, limit=2)) == ["acme0", "none0"]
        assert sorted(claimed(store, clock, limit=2)) == ["acme1", "none1"]

    def test_the_room_of_an_agent_and_abandoned_runs_keep_to_the_turns(self, store: Store, clock: ManualClock) -> None:
        for number in range(3):
            left(store, f"acme{number}", tags=("fair:acme",))
        waits_in_line(store, "zeta", "zeta")
        assert sorted(claimed(store, clock, limit=9, room={"clerk": 2})) == ["acme0", "zeta"]

    def test_the_claimed_rights_of_a_space_are_listed_by_the_beginning_of_their_keys(self, store: Store) -> None:
        first = commit(store, following(created(store, "a"), "two", claims=(TWO, OTHER)))
        commit(store, following(created(store, "b"), "two", claims=(ONE,)))
        held = {ONE: Owner("b", 2), TWO: Owner("a", 2)}
        assert list(store.owned("permit", b"crm").items()) == list(held.items())
        assert store.owned("permit") == {**held, OTHER: Owner("a", 2)}
        assert (store.owned("permit", b"x"), store.owned("other")) == ({}, {})
        commit(store, following(first, "three", releases=(TWO,)))
        assert store.owned("permit", b"crm") == {ONE: Owner("b", 2)}
        assert store.inspect() == []

    def test_a_message_to_those_who_wait_goes_to_the_oldest_that_is_not_due(
        self, store: Store, clock: ManualClock
    ) -> None:
        now = clock.now_us()
        later = {"wake_at_us": now + SECOND_US, "tags": (TAG,)}
        for run in ("a", "b", "c"):
            created(store, run, index=indexed("waiting", **later))
        created(store, "other", index=indexed("waiting", wake_at_us=now + SECOND_US))
        store.quarantine("a", "damaged")
        head = created(store, "sender")
        for number, run in enumerate(("b", "c", None)):
            head = commit(store, following(head, "more", sends=(to_first(store, now, id=str(number)),)))
            assert [row for row in "abc" if [m for m in store.messages(row) if m.id == str(number)]] == [
                *([run] if run else [])
            ]
        assert (sorted(due(store, clock)), store.messages("other")) == (["b", "c"], [])
        assert found(store, "b").seq == 1
        assert store.inspect() == []
