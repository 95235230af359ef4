"""Deliveries to a PostgreSQL store while other sessions renew the runs that they are for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import psycopg
import pytest

import servers
from killick.store.postgres.append import deliver as deliver_on
from killick.store.postgres.store import PostgresStore
from killick.store.records import Delivered, Delivery, Head, Message
from killick.store.slots import Slot
from store_contract.builders import blob, creation, following, indexed, letter
from store_contract.concurrency import in_threads
from store_contract.probes import commit, created, deliver, found
from store_contract.slots import ONE, renewal, vote

pytestmark = pytest.mark.slow

TIMES: Final = 40
DEADLOCKS: Final = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
WAITING: Final = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE %s"


@pytest.fixture
def url() -> str:
    return servers.postgres_store()


@pytest.fixture
def opened(url: str) -> Iterator[Callable[[], PostgresStore]]:
    """Opens the store again: each has sessions of its own."""
    with ExitStack() as stack:

        def store() -> PostgresStore:
            made = PostgresStore(url)
            stack.callback(made.close)
            return made

        yield store


@contextmanager
def renewing(store: PostgresStore, head: Head, to: str) -> Iterator[None]:
    """A transaction that has renewed a run, and commits at the end."""
    with store.transaction() as transaction:
        [result] = transaction.append([renewal(store, head, to, root="a")])
        assert isinstance(result, Head)
        yield


def ask(query: str, *values: str) -> Any:
    with psycopg.connect(servers.postgres(), autocommit=True) as sql:
        [(found,)] = sql.execute(query, values).fetchall()  # type: ignore[arg-type]
        return found


def until_waiting(url: str) -> None:
    """Returns when a statement on this store waits for a lock."""
    patience = threading.Event()
    while not ask(WAITING, f"%{servers.schema_of(url)}.%"):
        patience.wait(0.01)


def single(store: PostgresStore, run: str) -> list[Message]:
    return deliver(store, letter(run, "m"))


def several(store: PostgresStore, run: str) -> list[Message]:
    return deliver(store, letter("b", "m"), letter(run, "m"), letter("c", "m"))


def sent(store: PostgresStore, run: str) -> list[Message]:
    commit(store, following(found(store, "b"), "two", sends=(letter(run, "m"), letter("c", "m"))))
    return []


@pytest.mark.parametrize("way", [single, several, sent])
@pytest.mark.parametrize("number", [2, 9])
def test_a_message_that_waits_for_a_run_that_is_being_renewed_goes_to_the_renewal(
    url: str,
    opened: Callable[[], PostgresStore],
    way: Callable[[PostgresStore, str], list[Message]],
    number: int,
) -> None:
    store, run = opened(), f"a+{number}"  # a+10 sorts before a+9
    created(store, "b")
    head = created(store, run, index=indexed())
    with ThreadPoolExecutor(1) as pool:
        with renewing(opened(), head, f"a+{number + 1}"):
            created(store, "c")
            waiting = pool.submit(way, store, run)
            until_waiting(url)
        delivered = waiting.result()
    assert [message.id for message in store.inbox(f"a+{number + 1}")] == ["m"]
    assert len(store.inbox("c")) == (0 if way is single else 1)
    assert not delivered or f"a+{number + 1}" in {message.run for message in delivered}
    assert store.inbox(run) == store.inspect() == []


def test_a_message_in_a_callers_transaction_follows_a_renewal_by_another(
    url: str, opened: Callable[[], PostgresStore]
) -> None:
    store = opened()
    head = created(store, "a", index=indexed())
    created(store, "b")
    deliveries = [letter("b", "m"), letter("a", "m")]

    def work() -> list[object]:
        with store.transaction() as transaction:
            return [*transaction.deliver(deliveries[1:]), *transaction.deliver(deliveries)]

    with ThreadPoolExecutor(1) as pool:
        with renewing(opened(), head, "a+2"):
            waiting = pool.submit(work)
            until_waiting(url)
        first, _, again = waiting.result()
    assert isinstance(first, Delivered)
    assert (first.message.run, again) == ("a+2", Delivered(first.message, fresh=False))


def test_nothing_is_lost_or_out_of_order_while_sessions_deliver_to_runs_that_others_renew(
    opened: Callable[[], PostgresStore],
) -> None:
    store, before = opened(), ask(DEADLOCKS)
    created(store, "a", index=indexed())
    created(store, "b", index=indexed())
    ended = threading.Barrier(5)
    done = threading.Event()

    def send(name: str, runs: tuple[str, ...]) -> None:
        store = opened()
        own = created(store, name)
        for number in range(TIMES):
            letters = [letter(run, f"{name}/{number}", pieces=(blob(f"{name}{number}"),)) for run in runs]
            if number % 4:
                results = store.deliver(letters)
                assert [isinstance(result, Delivered) and result.fresh for result in results] == [True] * len(runs)
            else:
                own = commit(store, following(own, f"{number}", sends=tuple(letters)))
        if ended.wait() == 0:
            done.set()

    def renew(run: str) -> list[str]:
        store, count, seen, root = opened(), 1, list[str](), run
        finished = False
        while not finished:
            finished = done.is_set()  # looked at before the inbox
            messages = store.inbox(run)
            taken = messages if finished else messages[:3]
            count += 1
            numbers = tuple(message.number for message in taken)
            commit(store, renewal(store, found(store, run), f"{root}+{count}", root=root, takes=numbers))
            seen += [message.id for message in taken]
            assert {blob(message.id.replace("/", "")).hash for message in taken} <= store.references(run).log
            run = f"{root}+{count}"
        assert store.inbox(run) == []
        return seen

    receivers = [("a",), ("b",), ("a", "b"), ("b", "a"), ("b", "a")]
    with ThreadPoolExecutor(7) as pool:
        renewals = [pool.submit(renew, run) for run in ("a", "b")]
        sending = [pool.submit(send, f"s{number}", runs) for number, runs in enumerate(receivers)]
        try:
            for each in sending:
                each.result()
        finally:
            done.set()
            ended.abort()
        for run, renewed in zip(("a", "b"), renewals, strict=True):
            seen = renewed.result()
            for number, runs in enumerate(receivers):
                mine = [id_ for id_ in seen if id_.startswith(f"s{number}/")]
                assert mine == ([f"s{number}/{turn}" for turn in range(TIMES)] if run in runs else [])
    assert (ask(DEADLOCKS), store.inspect()) == (before, [])


def test_of_eight_sessions_that_vote_at_once_as_many_are_accepted_as_there_are_places(
    opened: Callable[[], PostgresStore],
) -> None:
    store = opened()
    stores = [opened() for _ in range(8)]
    for turn in range(10):
        commit(store, creation(store, f"a{turn}", "one", slots=(Slot("wait:4", "9", 3),)))
        results = in_threads(lambda thread, turn=turn: stores[thread].deliver([vote(f"a{turn}", f"p{thread}")])[0])
        assert sum(isinstance(result, Delivered) for result in results) == 3
        assert len(store.messages(f"a{turn}")) == 3
        assert [slot.places for slot in store.slots(f"a{turn}")] == [0]


def test_a_resent_message_that_took_the_last_place_and_was_moved_meanwhile_is_its_senders(
    opened: Callable[[], PostgresStore],
) -> None:
    store = opened()
    head = commit(store, creation(store, "a", "one", slots=(ONE,), index=indexed()))
    ann = vote("a", "ann")

    def send(delivery: Delivery, *, again: bool) -> Any:
        [result] = store._server.run(lambda session: deliver_on(session, store._q, [delivery], again=again))
        return result

    assert send(ann, again=False).fresh
    assert send(ann, again=True).fresh
    commit(store, renewal(store, head, "a+2"))
    resent, other = send(ann, again=True), send(vote("a", "ann", by="bob"), again=True)
    assert (resent.fresh, resent.message.run, other.fresh) == (True, "a+2", False)
