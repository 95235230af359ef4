"""What is appended while a step ends in a transaction is held back: it commits there, or goes the usual way."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from stories import START_US, started

from killick.errors import HandleClosed
from killick.log import Entry, Log, RunLog, verify
from killick.model import events as e
from killick.store import SqliteStore


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    store = SqliteStore(tmp_path / "killick.db")
    log = Log(store)
    yield log
    log.close()
    store.close()


def begun(log: Log) -> RunLog:
    first = started("a")
    return log.create(first.event, first.values or {})


def note(number: int) -> Entry:
    return Entry(e.NoteMade(at=START_US), {"note": f"{number} " * 200})


def notes(log: Log) -> list[int]:
    read = [recorded for recorded in log.read("a") if isinstance(recorded.event, e.NoteMade)]
    return [int(log.data("a", recorded.seq)["note"].split()[0]) for recorded in read]


def test_what_is_held_back_commits_in_the_transaction_and_whoever_waits_for_it_hears(log: Log) -> None:
    handle = begun(log)

    async def main() -> None:
        handle.append_behind(note(1))
        hold = handle.hold()
        assert not await handle.caught_up(hold)
        assert notes(log) == [1]
        handle.append_behind(note(2))
        waiting = asyncio.ensure_future(handle.append_soon(note(3)))
        barrier = asyncio.ensure_future(handle.barrier_soon())
        await asyncio.sleep(0.01)
        assert (notes(log), waiting.done(), barrier.done()) == ([1], False, False)

        # The block that ends the step is left after the commit, so that it is entered within the transaction.
        def committed() -> None:
            with ExitStack() as until_committed, log.store.transaction() as transaction:
                until_committed.enter_context(handle.ending(hold, note(4), transaction))

        await asyncio.to_thread(committed)
        assert (await waiting).seq == 4
        await barrier
        assert (hold.seq, handle.seq, notes(log)) == (5, 5, [1, 2, 3, 4])
        assert not handle.give_up(hold)
        assert handle.append_behind(note(5)) == 6

    asyncio.run(main())
    handle.barrier()
    assert notes(log) == [1, 2, 3, 4, 5]
    assert verify(log).holds


def test_what_is_held_back_is_submitted_when_the_transaction_is_given_up(log: Log) -> None:
    handle = begun(log)

    async def main() -> None:
        hold = handle.hold()
        handle.append_behind(note(1))
        waiting = asyncio.ensure_future(handle.append_soon(note(2)))
        await asyncio.sleep(0)
        assert handle.give_up(hold)
        assert (await waiting).seq == 3
        assert handle.give_up(hold)
        with log.store.transaction() as transaction, pytest.raises(HandleClosed, match="given up"):
            handle.ending(hold, note(3), transaction).__enter__()

    asyncio.run(main())
    assert notes(log) == [1, 2]
    assert handle.seq == 3
    assert verify(log).holds


def test_a_transaction_that_fails_leaves_the_handle_as_it_was(log: Log) -> None:
    handle = begun(log)
    hold = handle.hold()
    handle.append_behind(note(1))

    def fails() -> None:
        with log.store.transaction() as transaction, handle.ending(hold, note(2), transaction):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert (handle.seq, hold.seq, handle.failure) == (2, None, None)
    assert handle.give_up(hold)
    handle.append(note(3))
    assert notes(log) == [1, 3]
    assert verify(log).holds
