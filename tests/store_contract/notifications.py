"""Contract: watchers are notified of due runs, by any writer, and only afterwards."""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, Queue

import pytest

from killick.store.protocol import Store
from killick.store.records import OUTBOX_CHANGED, OutboxRow
from store_contract.builders import creation, following, indexed, letter
from store_contract.probes import Again, commit, created, deliver

NOTIFIED_SECONDS = 300.0
"""How long a test waits for a notification."""


class Notifications:
    """The notifications received while a store was watched."""

    def __init__(self, store: Store) -> None:
        self._received: Queue[str] = Queue()
        self.stop = store.watch(self._received.put)

    def expect(self, run: str) -> None:
        """Waits for a notification of this run, or of none."""
        try:
            while self._received.get(timeout=NOTIFIED_SECONDS) not in (run, ""):
                pass
        except Empty:
            raise AssertionError(f"no notification for {run}") from None

    def forget(self) -> None:
        while not self._received.empty():
            self._received.get()

    @property
    def nothing(self) -> bool:
        return self._received.empty()


def sent(store: Store) -> None:
    deliver(store, letter("a", "m"))


def started(store: Store) -> None:
    created(store, "new", index=indexed("queued", wake_at_us=1))


def started_with_another(store: Store) -> None:
    head = store.head("free")
    assert head is not None
    commit(store, following(head, "two", also=(creation(store, "new", "born", index=indexed("queued", wake_at_us=1)),)))


def sent_with_another(store: Store) -> None:
    head = store.head("free")
    assert head is not None
    commit(store, following(head, "two", sends=(letter("a", "m"),)))


def left(store: Store) -> None:
    store.release("held", epoch=1, left=True)


def parked(store: Store) -> None:
    head = store.head("held")
    assert head is not None
    commit(store, following(head, "parked", index=indexed("waiting", wake_at_us=5)))
    store.release("held", epoch=1)


def sooner(store: Store) -> None:
    head = store.head("free")
    assert head is not None
    commit(store, following(head, "sooner", index=indexed("waiting", wake_at_us=5)))


def told(store: Store) -> None:
    head = store.head("free")
    assert head is not None
    commit(store, following(head, "two", outbox=(OutboxRow(2, "x"),)))


CAUSES: tuple[tuple[Callable[[Store], None], str], ...] = (
    (sent, "a"),
    (started, "new"),
    (started_with_another, "new"),
    (sent_with_another, "a"),
    (left, "held"),
    (parked, "held"),
    (sooner, "free"),
    (told, OUTBOX_CHANGED),
)


def prepared(store: Store) -> None:
    created(store, "a", index=indexed("waiting"))
    created(store, "free", index=indexed("waiting", wake_at_us=900))
    created(store, "held", holder="w1", index=indexed())


class Watching:
    @pytest.mark.parametrize("opened", [1, 2])
    @pytest.mark.parametrize(("cause", "run"), CAUSES, ids=[cause.__name__ for cause, _ in CAUSES])
    def test_whoever_watches_hears_of_what_may_be_due(
        self, store: Store, again: Again, cause: Callable[[Store], None], run: str, opened: int
    ) -> None:
        other = store if opened == 1 else again()
        prepared(store)
        notifications = [Notifications(store), Notifications(store)]
        cause(other)
        for one in notifications:
            one.expect(run)
            one.stop()

    def test_a_ring_comes_after_what_it_rings_for(self, store: Store) -> None:
        prepared(store)
        seen: Queue[tuple[str, int]] = Queue()
        stop = store.watch(lambda run: seen.put((run, len(store.inbox("a")))))
        sent(store)
        while (rung := seen.get(timeout=NOTIFIED_SECONDS)) != ("a", 1):
            # One without a run may concern an earlier change.
            assert rung[0] != "a"
            if rung == ("", 1):
                break
        stop()

    def test_who_stopped_watching_hears_nothing_more(self, store: Store) -> None:
        prepared(store)
        first, second = Notifications(store), Notifications(store)
        first.stop()
        first.stop()
        first.forget()
        sent(store)
        second.expect("a")
        assert first.nothing
        second.stop()

    def test_a_watched_store_can_be_closed_and_then_rings_no_more(self, store: Store, again: Again) -> None:
        other = again()
        prepared(store)
        notifications, rest = Notifications(store), Notifications(other)
        store.close()
        notifications.forget()
        sent(other)
        rest.expect("a")
        assert notifications.nothing
        notifications.stop()
