"""Contract: application rows commit atomically with the store's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from killick.errors import HeadMoved, RunExists, StoreClosed, StoreError
from killick.store.protocol import Store, Transaction
from killick.store.records import Delivered, Head
from store_contract.builders import blob, creation, following, indexed, letter, moved
from store_contract.probes import Again, chained, commit, created, found


def appended(transaction: Transaction, item: Any) -> Head:
    [result] = transaction.append([item])
    assert isinstance(result, Head), result
    return result


class Transacting:
    placeholder = "?"
    """The database's parameter placeholder."""

    def connect(self, store: Store) -> Any:
        """Returns an application's connection to the store's database, without autocommit.

        None: this store does not support shared transactions.
        """
        return None

    @pytest.fixture
    def theirs(self, store: Store) -> Iterator[Any]:
        """An application's connection, with its own table."""
        connection = self.connect(store)
        if connection is None:
            pytest.skip("this store has no transactions of others")
        connection.execute("DROP TABLE IF EXISTS ledger")
        connection.execute("CREATE TABLE ledger (entry INTEGER PRIMARY KEY)")
        yield connection
        connection.close()

    def enter(self, connection: Any, *entries: int) -> None:
        for entry in entries:
            connection.execute(f"INSERT INTO ledger VALUES ({self.placeholder})", (entry,))

    def entered(self, connection: Any) -> list[int]:
        return sorted(int(row[0]) for row in connection.execute("SELECT entry FROM ledger").fetchall())

    def test_a_store_without_transactions_says_so(self, store: Store) -> None:
        if (connection := self.connect(store)) is not None:
            connection.close()
            pytest.skip("this store has transactions")
        with pytest.raises(StoreError), store.transaction():
            pytest.fail("a transaction began")
        with pytest.raises(StoreError):
            store.join(None)

    # transactions of the store's own ----------------------------------------------------------

    def test_rows_of_an_application_and_events_commit_together(self, store: Store, theirs: Any, again: Again) -> None:
        created(store, "a")
        with store.transaction() as transaction:
            assert transaction.is_open
            self.enter(transaction.connection, 1, 2)
            head = appended(transaction, following(found(store, "a"), "two", "three", pieces=(blob("v"),)))
            [told] = transaction.deliver([letter("a", "m")])
        assert isinstance(told, Delivered)
        assert told.fresh
        for each in (store, again()):
            assert found(each, "a") == head
            chained(each, "a")
            assert [message.id for message in each.inbox("a")] == ["m"]
            assert each.pieces([blob("v").hash])
        assert self.entered(theirs) == [1, 2]

    def test_nothing_is_to_be_seen_before_it_is_committed(self, store: Store, theirs: Any) -> None:
        before = created(store, "a")
        with store.transaction() as transaction:
            self.enter(transaction.connection, 1)
            appended(transaction, following(before, "two"))
            transaction.deliver([letter("a", "m")])
            assert (found(store, "a"), store.inbox("a"), self.entered(theirs)) == (before, [], [])

    def test_an_exception_takes_all_of_it_back_and_comes_out_as_it_is(self, store: Store, theirs: Any) -> None:
        before = created(store, "a")
        wrong = RuntimeError("out of paper")

        def fails() -> None:
            with store.transaction() as transaction:
                self.enter(transaction.connection, 1)
                appended(transaction, following(before, "two"))
                transaction.deliver([letter("a", "m")])
                raise wrong

        with pytest.raises(RuntimeError) as info:
            fails()
        assert info.value is wrong
        assert (found(store, "a"), store.inbox("a"), self.entered(theirs)) == (before, [], [])
        commit(store, following(before, "another two"))
        chained(store, "a")

    def test_what_the_database_refuses_to_an_application_is_the_applications_own(
        self, store: Store, theirs: Any
    ) -> None:
        with pytest.raises(Exception, match=r"(?i)unique") as info, store.transaction() as transaction:
            self.enter(transaction.connection, 1, 1)
        assert not isinstance(info.value, StoreError)
        assert self.entered(theirs) == []

    def test_a_statement_that_fails_ends_nothing_and_what_follows_is_never_the_stores_own_error(
        self, store: Store, theirs: Any
    ) -> None:
        before = created(store, "a")

        def goes_on() -> None:
            with store.transaction() as transaction:
                with pytest.raises(Exception, match=r"(?i)unique"):
                    self.enter(transaction.connection, 1, 1)
                assert transaction.is_open
                appended(transaction, following(before, "two"))

        try:
            goes_on()
        except AssertionError:
            raise
        except StoreError as error:
            pytest.fail(f"an application's mistake is reported as {error!r}")
        except Exception:
            expected: tuple[int, list[int]] = (1, [])
        else:
            expected = (2, [1])
        assert (found(store, "a").seq, self.entered(theirs)) == expected

    def test_a_refused_append_is_told_and_the_transaction_goes_on(self, store: Store, theirs: Any) -> None:
        before = created(store, "a")
        commit(store, following(before, "two"))
        with store.transaction() as transaction:
            self.enter(transaction.connection, 1)
            stale, fresh = transaction.append([following(before, "late"), creation(store, "b", "one")])
        assert isinstance(stale, HeadMoved)
        assert isinstance(fresh, Head)
        assert (found(store, "a").seq, found(store, "b"), self.entered(theirs)) == (2, fresh, [1])

    def test_the_next_append_goes_on_from_what_was_committed(self, store: Store, theirs: Any) -> None:
        head = commit(store, following(created(store, "a"), "two"))
        for turn in range(3):
            with store.transaction() as transaction:
                first = following(head, f"{turn} in it")
                results = transaction.append([first, following(moved(first), f"{turn} in it too")])
            head = commit(store, following(found(store, "a"), f"{turn} after it"))
            assert results[-1] != head
        chained(store, "a")

    def test_an_application_that_ends_the_transaction_is_refused_or_found_out(self, store: Store, theirs: Any) -> None:
        before = created(store, "a")

        def ends_it() -> None:
            with store.transaction() as transaction:
                self.enter(transaction.connection, 1)
                transaction.connection.execute("COMMIT")
                assert not transaction.is_open
                raise EOFError("found out")

        with pytest.raises((StoreError, EOFError)) as info:
            ends_it()
        if not isinstance(info.value, EOFError):
            assert self.entered(theirs) == []
        assert found(store, "a") == before

    def test_transactions_of_two_threads_both_happen(self, store: Store, theirs: Any) -> None:
        for run in ("a", "b"):
            created(store, run)

        def work(run: str, first: int) -> None:
            for entry in range(first, first + 10):
                with store.transaction() as transaction:
                    self.enter(transaction.connection, entry)
                    appended(transaction, following(found(store, run), str(entry)))

        threads = [threading.Thread(target=work, args=each) for each in (("a", 0), ("b", 100))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert self.entered(theirs) == [*range(10), *range(100, 110)]
        for run in ("a", "b"):
            chained(store, run)
            assert found(store, run).seq == 11

    def test_a_closed_store_begins_no_transaction(self, store: Store, theirs: Any) -> None:
        store.close()
        with pytest.raises(StoreClosed), store.transaction():
            pytest.fail("a transaction began")

    # transactions of others -------------------------------------------------------------------

    def test_what_is_joined_to_somebodys_transaction_happens_when_they_commit(self, store: Store, theirs: Any) -> None:
        before = created(store, "a", index=indexed("waiting"))
        theirs.execute("BEGIN")
        self.enter(theirs, 1)
        joined = store.join(theirs)
        assert joined.is_open
        head = appended(joined, following(before, "two"))
        appended(joined, creation(store, "b", "one", index=indexed("queued", wake_at_us=5)))
        [told, other] = joined.deliver([letter("a", "m"), letter("b", "to one that is being born")])
        assert isinstance(told, Delivered)
        assert isinstance(other, Delivered)
        assert (found(store, "a"), store.head("b"), store.inbox("a")) == (before, None, [])
        theirs.execute("COMMIT")
        assert (found(store, "a"), self.entered(theirs)) == (head, [1])
        assert [message.id for run in ("a", "b") for message in store.inbox(run)] == ["m", "to one that is being born"]
        assert {row.run for row in store.due(10)} == {"a", "b"}
        chained(store, "a")
        commit(store, following(head, "three"))

    def test_what_is_joined_goes_when_they_roll_back(self, store: Store, theirs: Any) -> None:
        before = created(store, "a")
        theirs.execute("BEGIN")
        self.enter(theirs, 1)
        joined = store.join(theirs)
        appended(joined, following(before, "two"))
        appended(joined, creation(store, "b", "one"))
        joined.deliver([letter("a", "m")])
        theirs.execute("ROLLBACK")
        assert not joined.is_open
        assert (found(store, "a"), store.head("b"), store.inbox("a"), self.entered(theirs)) == (before, None, [], [])
        commit(store, following(before, "another two"))
        created(store, "b", "another one")
        chained(store, "a")

    def test_a_refusal_leaves_their_transaction_as_it_was(self, store: Store, theirs: Any) -> None:
        created(store, "a")
        theirs.execute("BEGIN")
        self.enter(theirs, 1)
        [refused] = store.join(theirs).append([creation(store, "a", "again")])
        [unknown] = store.join(theirs).deliver([letter("nobody", "m")])
        theirs.execute("COMMIT")
        assert isinstance(refused, RunExists)
        assert not isinstance(unknown, Delivered)
        assert self.entered(theirs) == [1]

    def test_a_connection_without_a_transaction_is_refused(self, store: Store, theirs: Any) -> None:
        with pytest.raises(StoreError, match="no transaction is open"):
            store.join(theirs)

    @pytest.mark.parametrize("stranger", [None, "a place", object()])
    def test_what_is_no_connection_is_refused_and_named(self, store: Store, theirs: Any, stranger: Any) -> None:
        with pytest.raises(StoreError, match=type(stranger).__name__):
            store.join(stranger)
