"""A tool with `effect="transaction"`: its rows and the record of its outcome are one."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import killick
from killick.check.checker import check
from killick.errors import (
    DeclarationRefused,
    EpochStale,
    FakeRefused,
    LeaseLost,
    StoreBusy,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from killick.log import Entry
from killick.model import events as e
from killick.store import MemoryStore, SqliteStore
from leasing import leased_by

SLOWLY = killick.Retry(attempts=3, first=0.001, max=0.001)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store's file with a table of an application in it."""
    path = tmp_path / "killick.db"
    SqliteStore(path).close()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE paid (who TEXT NOT NULL, amount INTEGER NOT NULL, step TEXT)")
        connection.execute("CREATE TABLE people (name TEXT PRIMARY KEY)")
        connection.execute("CREATE TABLE checked (who TEXT REFERENCES people (name) DEFERRABLE INITIALLY DEFERRED)")
    return path


@pytest.fixture
def kd(path: Path) -> Iterator[killick.Client]:
    with killick.open(str(path)) as kd:
        yield kd


def rows(path: Path, sql: str = "SELECT who, amount FROM paid ORDER BY rowid") -> list[Any]:
    connection = sqlite3.connect(path)
    try:
        return connection.execute(sql).fetchall()
    finally:
        connection.close()


def outcomes(kd: killick.Client, run: str) -> list[tuple[str, str]]:
    """How the attempts ended, by step, in the order of the record."""
    ended = [recorded.event for recorded in kd.events(run) if isinstance(recorded.event, e.AttemptEnded)]
    return [(event.step, event.outcome) for event in ended]


@killick.tool(effect="transaction", retry=SLOWLY)
def pay(who: str, amount: int, tx: killick.Tx = killick.TX, step: killick.ToolStep = killick.STEP) -> int:
    tx.execute("INSERT INTO paid VALUES (?, ?, ?)", (who, amount, step.id))
    return amount


@killick.agent
async def payer(run: killick.Run, who: str) -> int:
    return await run.call(pay, who, 1) + await run.call(pay, who, 2)


# together -----------------------------------------------------------------------------------------


def test_rows_and_outcomes_are_there_and_replay_gives_the_recorded_ones(kd: killick.Client, path: Path) -> None:
    assert kd.run(payer, "ann", id="a") == 3
    assert rows(path) == [("ann", 1), ("ann", 2)]
    assert outcomes(kd, "a") == [("1", "returned"), ("2", "returned")]
    assert kd.run(payer, "ann", id="a") == 3
    assert rows(path) == [("ann", 1), ("ann", 2)]
    assert kd.store.verify().holds
    effects = kd.runtime.log.ledger("a").effects
    assert [(effect.effect, effect.status) for effect in effects] == [("transaction", "happened")] * 2


def test_many_rows_are_written_at_once_and_read_in_the_same_transaction(kd: killick.Client, path: Path) -> None:
    @killick.tool(effect="transaction")
    def all_of(names: list[str], tx: killick.Tx = killick.TX) -> int:
        tx.executemany("INSERT INTO people VALUES (?)", [(name,) for name in names])
        return int(tx.connection.execute("SELECT count(*) FROM people").fetchone()[0])

    @killick.agent
    async def enlister(run: killick.Run) -> int:
        return await run.call(all_of, ["ann", "bob"])

    assert kd.run(enlister) == 2
    assert rows(path, "SELECT name FROM people") == [("ann",), ("bob",)]


def test_a_blocking_agent_has_transactions_too(kd: killick.Client, path: Path) -> None:
    @killick.agent
    def blocking(run: killick.SyncRun, who: str) -> list[int]:
        first = run.call(pay, who, 1)
        return [first, *run.gather(lambda: run.call(pay, who, 2), lambda: run.call(pay, who, 3))]

    assert kd.run(blocking, "ann", id="a") == [1, 2, 3]
    assert sorted(rows(path)) == [("ann", 1), ("ann", 2), ("ann", 3)]
    assert kd.store.verify().holds


def test_outside_of_an_agent_it_is_the_plain_function_with_any_connection(path: Path) -> None:
    connection = sqlite3.connect(path)
    assert pay("ann", 5, killick.Tx(connection)) == 5
    connection.rollback()
    connection.close()
    with pytest.raises(killick.NotDone, match="no transaction is open here"):
        pay("ann", 5)


# nothing happened ---------------------------------------------------------------------------------


def test_whatever_it_raises_takes_its_rows_back_and_the_step_fails(kd: killick.Client, path: Path) -> None:
    @killick.tool(effect="transaction")
    def fails(tx: killick.Tx = killick.TX) -> None:
        tx.execute("INSERT INTO paid VALUES ('ann', 1, '')")
        raise ZeroDivisionError

    @killick.agent
    async def failing(run: killick.Run) -> None:
        await run.call(fails)

    with pytest.raises(killick.RunFailed, match="ZeroDivisionError"):
        kd.run(failing, id="a")
    assert rows(path) == []
    assert outcomes(kd, "a") == [("1", "refused")]
    assert [effect.status for effect in kd.runtime.log.ledger("a").effects] == ["did_not_happen"]


@pytest.mark.parametrize("error", [TimeoutError("slow"), killick.NotDone("not now"), ConnectionError("gone")])
def test_what_may_go_well_later_is_tried_again_and_counts_once(
    kd: killick.Client, path: Path, error: Exception
) -> None:
    tried: list[int] = []

    @killick.tool(effect="transaction", retry=SLOWLY)
    def flaky(tx: killick.Tx = killick.TX, step: killick.ToolStep = killick.STEP) -> int:
        tx.execute("INSERT INTO paid VALUES ('ann', ?, '')", (step.attempt,))
        tried.append(step.attempt)
        if step.attempt < 3:
            raise error
        return step.attempt

    @killick.agent
    async def patient(run: killick.Run) -> int:
        return await run.call(flaky)

    assert kd.run(patient, id="a") == 3
    assert (tried, rows(path)) == ([1, 2, 3], [("ann", 3)])
    assert outcomes(kd, "a") == [("1", "refused"), ("1", "refused"), ("1", "returned")]


@pytest.mark.parametrize("value", [object(), "twelve"])
def test_a_result_that_cannot_be_kept_takes_the_rows_back(kd: killick.Client, path: Path, value: Any) -> None:
    @killick.tool(effect="transaction")
    def odd(tx: killick.Tx = killick.TX) -> int:
        tx.execute("INSERT INTO paid VALUES ('ann', 1, '')")
        odd_one: int = value
        return odd_one

    @killick.agent
    async def oddly(run: killick.Run) -> int:
        return await run.call(odd)

    with pytest.raises(killick.RunFailed, match="odd"):
        kd.run(oddly, id="a")
    assert (rows(path), outcomes(kd, "a")) == ([], [("1", "refused")])


def test_a_constraint_that_is_checked_at_the_commit_fails_the_step_and_not_the_run_of_the_store(
    kd: killick.Client, path: Path
) -> None:
    @killick.tool(effect="transaction")
    def check_in(who: str, tx: killick.Tx = killick.TX) -> str:
        tx.execute("PRAGMA defer_foreign_keys = ON")
        tx.execute("INSERT INTO checked VALUES (?)", (who,))
        return who

    @killick.agent
    async def checker(run: killick.Run) -> str:
        try:
            return await run.call(check_in, "nobody")
        except killick.StepFailed as failed:
            return str(failed.failure)

    killick_of = SqliteStore.transaction

    def strict(store: SqliteStore) -> Any:
        return _with_foreign_keys(killick_of(store))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SqliteStore, "transaction", strict)
        told = kd.run(checker, id="a")
    assert "FOREIGN KEY constraint failed" in told
    assert rows(path, "SELECT * FROM checked") == []
    assert outcomes(kd, "a") == [("1", "refused")]
    assert kd.store.verify().holds


class _with_foreign_keys:  # noqa: N801
    """SQLite lets nobody turn these on inside a transaction, so that it is committed, and begun anew, by the test."""

    def __init__(self, within: Any) -> None:
        self.within = within

    def __enter__(self) -> Any:
        transaction = self.within.__enter__()
        connection = transaction.connection
        connection.set_authorizer(None)
        connection.execute("COMMIT")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("BEGIN IMMEDIATE")
        return transaction

    def __exit__(self, *told: Any) -> Any:
        return self.within.__exit__(*told)


def test_a_tool_whose_time_is_up_commits_nothing_however_late_it_comes_back(kd: killick.Client, path: Path) -> None:
    seen: list[BaseException] = []

    @killick.tool(effect="transaction", timeout=0.5, retry=killick.Retry(attempts=99, first=0.001, max=0.001))
    def slow(tx: killick.Tx = killick.TX, step: killick.ToolStep = killick.STEP) -> int:
        tx.execute("INSERT INTO paid VALUES ('ann', ?, '')", (step.attempt,))
        while step.attempt == 1 and not seen:
            try:
                tx.execute("INSERT INTO paid VALUES ('late', 0, '')")
                time.sleep(0.01)
            except killick.NotDone as told:
                seen.append(told)
        return step.attempt

    @killick.agent
    async def waiting(run: killick.Run) -> int:
        return await run.call(slow)

    last = kd.run(waiting, id="a")  # on a busy machine the second attempt may be too late as well
    assert last > 1
    assert rows(path) == [("ann", last)]
    assert outcomes(kd, "a") == [*[("1", "refused")] * (last - 1), ("1", "returned")]
    assert "was abandoned" in str(seen[0])
    assert kd.store.verify().holds


def test_a_long_statement_is_cut_short_when_its_time_is_up(kd: killick.Client, path: Path) -> None:
    endless = "WITH RECURSIVE n (x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n"

    @killick.tool(effect="transaction", timeout=0.05, retry=killick.Retry(attempts=1))
    def counts(tx: killick.Tx = killick.TX) -> int:
        return int(tx.execute(endless).fetchone()[0])

    @killick.agent
    async def counting(run: killick.Run) -> int:
        return await run.call(counts)

    with pytest.raises(killick.RunFailed, match="still running"):
        kd.run(counting, id="a")
    assert kd.run(payer, "ann", id="b") == 3


def test_a_cancelled_step_did_not_happen_or_did_and_is_on_record(kd: killick.Client, path: Path) -> None:
    give_up: list[Callable[[], object]] = []
    go = threading.Event()

    @killick.tool(effect="transaction")
    def slow(tx: killick.Tx = killick.TX) -> int:
        tx.execute("INSERT INTO paid VALUES ('ann', 1, '')")
        give_up[0]()
        go.wait(300)
        return 1

    @killick.agent
    async def hasty(run: killick.Run) -> str:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as limit:
                give_up.append(lambda: loop.call_soon_threadsafe(limit.reschedule, 0.0))
                await run.call(slow)
        except TimeoutError:
            go.set()
            return "gave up"
        return "done"

    assert kd.run(hasty, id="a") == "gave up"
    assert rows(path) == []
    assert outcomes(kd, "a") == [("1", "refused")]


# who ends it --------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["commit", "rollback", "with", "BEGIN", "COMMIT"])
def test_a_tool_that_would_end_its_transaction_is_stopped_and_nothing_happened(
    kd: killick.Client, path: Path, end: str
) -> None:
    @killick.tool(effect="transaction")
    def meddles(tx: killick.Tx = killick.TX) -> None:
        tx.execute("INSERT INTO paid VALUES ('ann', 1, '')")
        if end == "with":
            with tx.connection:
                pass
        elif end.isupper():
            tx.execute(end)
        else:
            getattr(tx.connection, end)()

    @killick.agent
    async def meddling(run: killick.Run) -> None:
        await run.call(meddles)

    with pytest.raises(killick.RunFailed, match="committed when the tool returns"):
        kd.run(meddling, id="a")
    assert (rows(path), outcomes(kd, "a")) == ([], [("1", "refused")])


@pytest.mark.parametrize("raises", [False, True])
def test_a_tool_that_ended_it_all_the_same_is_in_doubt_and_a_person_is_asked(
    kd: killick.Client, path: Path, raises: bool
) -> None:
    @killick.tool(effect="transaction")
    def breaks_out(tx: killick.Tx = killick.TX) -> int:
        tx.execute("INSERT INTO paid VALUES ('ann', 1, '')")
        tx.connection.set_authorizer(None)
        tx.connection.commit()
        if raises:
            raise TimeoutError
        return 1

    @killick.agent
    async def breaking(run: killick.Run) -> int:
        return await run.call(breaks_out)

    with pytest.raises(killick.RunWaiting) as waiting:
        kd.run(breaking, id="a")
    [wait] = waiting.value.waits
    assert wait.waits_for == "settlement"
    assert "ended its transaction itself" in str(wait.prompt)
    assert outcomes(kd, "a") == [("1", "unknown")]
    assert kd.state("a").fold.steps[0].status in ("in_doubt", "waiting")
    with killick.open(str(path)) as other:
        with pytest.raises(killick.RunWaiting):
            other.run(breaking, id="a")
        other.answer("a", "happened", value=1, by="ann")
        assert other.run(breaking, id="a") == 1
        assert other.store.verify().holds
    assert rows(path) == [("ann", 1)]


# beside others ------------------------------------------------------------------------------------


@killick.tool
async def mail(who: str) -> str:
    await asyncio.sleep(0.001)
    return who


@killick.tool(effect="reads")
def look(who: str) -> str:
    return who


def test_branches_with_and_without_transactions_make_one_record(kd: killick.Client, path: Path) -> None:
    order: list[str] = []

    @killick.agent
    async def busy(run: killick.Run, names: list[str]) -> list[str]:
        async def one(name: str) -> None:
            await run.call(look, name)
            await run.call(pay, name, 1)
            order.append(f"paid {name}")
            await run.call(mail, name)
            order.append(f"mailed {name}")
            await run.note(name)
            await run.call(pay, name, 2)
            order.append(f"paid {name} again")

        await run.gather(*(one(name) for name in names))
        return list(order)

    names = [f"n{number}" for number in range(8)]
    first = kd.run(busy, names, id="a")
    assert sorted(rows(path)) == sorted([(name, amount) for name in names for amount in (1, 2)])
    assert kd.store.verify().holds
    returned = [step for step, outcome in outcomes(kd, "a") if outcome == "returned"]
    written = [row[0] for row in rows(path, "SELECT step FROM paid ORDER BY rowid")]
    assert [step for step in returned if step in written] == written
    # Another process plays the record: the branches go on in the same order, and nothing is done again.
    order.clear()
    log = leased_by("somebody", kd.runtime.log, "a", seconds=30)
    log.append(Entry(e.RunRewound(at=kd.runtime.clock.now_us(), cut=log.seq - 1, generation=1)))
    kd.runtime.store.release("a", epoch=log.epoch)
    with killick.open(str(path)) as other:
        assert other.run(busy, names, id="a") == first
    assert len(rows(path)) == 16


def test_many_runs_at_once_each_have_theirs(kd: killick.Client, path: Path) -> None:
    async def all_of_them() -> list[int]:
        return await asyncio.gather(*(kd.as_async().run(payer, f"p{number}", id=f"r{number}") for number in range(12)))

    assert asyncio.run(all_of_them()) == [3] * 12
    assert sorted(rows(path)) == sorted([(f"p{number}", amount) for number in range(12) for amount in (1, 2)])
    assert kd.store.verify().holds


def test_what_other_branches_write_meanwhile_waits_for_the_transaction_and_is_kept(
    kd: killick.Client, path: Path
) -> None:
    inside, mailed = threading.Event(), threading.Event()

    @killick.tool(effect="transaction")
    def holds(tx: killick.Tx = killick.TX) -> str:
        tx.execute("INSERT INTO paid VALUES ('ann', 1, '')")
        inside.set()
        assert mailed.wait(300)
        return "held"

    @killick.tool(effect="at_most_once")
    async def sends() -> str:
        while not inside.is_set():
            await asyncio.sleep(0.001)
        return "sent"

    @killick.agent
    async def both(run: killick.Run, fails: bool) -> list[str]:
        async def other() -> str:
            told = await run.call(sends)
            for number in range(40):
                await run.note(number)
            await run.decided("Which?", "this", options=["this", "that"])
            mailed.set()
            return told

        # The mail first: its start would wait for a transaction that has begun.
        return list(await run.gather(other(), run.call(holds)))

    assert kd.run(both, False, id="a") == ["sent", "held"]
    assert [step for step, _ in outcomes(kd, "a")] == ["1.1.1", "1.2.1"]
    assert kd.store.verify().holds


def test_what_was_held_back_is_written_when_the_tool_fails(kd: killick.Client, path: Path) -> None:
    noted = threading.Event()

    @killick.tool(effect="transaction")
    def fails(tx: killick.Tx = killick.TX) -> None:
        tx.execute("INSERT INTO paid VALUES ('ann', 1, '')")
        assert noted.wait(300)
        raise ZeroDivisionError

    @killick.agent
    async def both(run: killick.Run) -> str:
        async def other() -> str:
            await run.note("written meanwhile")
            noted.set()
            return await run.call(mail, "bob")

        async def failing() -> str:
            try:
                await run.call(fails)
            except killick.StepFailed as failed:
                return failed.failure.type if failed.failure else ""
            return ""

        return " ".join(await run.gather(failing(), other()))

    assert kd.run(both, id="a") == "ZeroDivisionError bob"
    assert rows(path) == []
    assert kd.store.verify().holds


def test_a_run_that_waits_in_another_branch_is_found_by_what_it_waits_for(kd: killick.Client, path: Path) -> None:
    """The step's end makes the run wait: its index says so, in the transaction that ends it."""

    @killick.agent
    async def both(run: killick.Run) -> Any:
        return await run.gather(run.ask("Go on?"), run.call(pay, "ann", 1))

    with pytest.raises(killick.RunWaiting):
        kd.run(both, id="a")
    assert kd.info("a").status == "waiting"
    assert kd.store.verify().holds
    kd.answer("a", "approve")
    kd.run(both, id="a")
    assert rows(path) == [("ann", 1)]


def test_a_writer_that_keeps_the_file_is_waited_for(kd: killick.Client, path: Path) -> None:
    blocker = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    blocker.execute("BEGIN IMMEDIATE")
    threading.Timer(0.2, lambda: blocker.execute("ROLLBACK")).start()
    assert kd.run(payer, "ann", id="a") == 3
    blocker.close()


def test_a_writer_that_keeps_the_file_too_long_fails_no_step(path: Path) -> None:
    blocker = sqlite3.connect(path, isolation_level=None, check_same_thread=False)

    @killick.agent
    async def blocked(run: killick.Run) -> int:
        first = await run.call(pay, "ann", 1)
        return first + await run.call(pay, "ann", 2)

    class Blocking(SqliteStore):
        def transaction(self) -> Any:
            if rows(path):
                blocker.execute("BEGIN IMMEDIATE")
            return super().transaction()

    with killick.Client(Blocking(path, busy_seconds=0.05)) as kd:
        with pytest.raises(StoreBusy):
            kd.run(blocked, id="a")
        blocker.execute("ROLLBACK")
    with killick.open(str(path)) as kd:
        assert kd.run(blocked, id="a") == 3
        assert rows(path) == [("ann", 1), ("ann", 2)]
    blocker.close()


# when the store fails -----------------------------------------------------------------------------


class Failing(SqliteStore):
    """Fails at the commit of a transaction: nothing was written, or all was and the answer is lost."""

    made = False
    error: Callable[[str], StoreError] = StoreFull

    def transaction(self) -> Any:
        return _Failing(super().transaction(), self)


class _Failing:
    def __init__(self, within: Any, store: Failing) -> None:
        self.within, self.store = within, store

    def __enter__(self) -> Any:
        return self.within.__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> Any:
        lost = error or (None if self.store.made else ConnectionError("the commit fails"))
        done = self.within.__exit__(None if lost is None else type(lost), lost, trace)
        if error is None:
            raise self.store.error(self.store.place)
        return done


def test_a_commit_whose_answer_is_lost_counts_as_made(path: Path) -> None:
    store = Failing(path)
    store.made = True
    with killick.Client(store) as kd:
        assert kd.run(payer, "ann", id="a") == 3
        assert rows(path) == [("ann", 1), ("ann", 2)]
        assert kd.store.verify().holds


def test_a_commit_that_was_not_made_interrupts_the_run_which_goes_on_later(path: Path) -> None:
    store = Failing(path)
    with killick.Client(store) as kd:
        with pytest.raises(StoreFull):
            kd.run(payer, "ann", id="a")
        assert rows(path) == []
    with killick.open(str(path)) as kd:
        assert kd.run(payer, "ann", id="a") == 3
        assert rows(path) == [("ann", 1), ("ann", 2)]
        assert [event.event.attempt for event in kd.events("a") if isinstance(event.event, e.Started)] == [
            1,
            2,
            1,
        ]
        assert kd.store.verify().holds


def test_a_holder_whose_lease_was_taken_commits_nothing(path: Path) -> None:
    @killick.tool(effect="transaction")
    def robbed(tx: killick.Tx = killick.TX) -> int:
        tx.execute("INSERT INTO paid VALUES ('ann', 1, '')")
        # Another holder, as it would be found: on SQLite nobody can write while this is open, so it is written here.
        tx.execute("UPDATE heads SET epoch = epoch + 1 WHERE run = 'a'")
        return 1

    @killick.agent
    async def victim(run: killick.Run) -> int:
        return await run.call(robbed)

    with killick.open(str(path)) as kd:
        with pytest.raises((EpochStale, LeaseLost)):
            kd.run(victim, id="a")
        assert rows(path) == []


def _ended_by_another(path: Path, agent: Any) -> Any:
    """What a run comes to when another process goes on with it, without anybody's help."""

    async def whole() -> Any:
        async with killick.open_async(str(path)) as other:
            return await asyncio.wait_for(other.run(agent, id="a"), 300)

    return asyncio.run(whole())


def test_a_transaction_that_is_about_to_begin_when_its_run_is_to_leave_ends_first(
    kd: killick.Client, path: Path
) -> None:
    left: list[bool] = []

    async def leaves() -> str:
        if not left:
            left.append(kd.runtime.executor().leave("a"))
        return "link"

    link: Any = killick.Resource(leaves)

    @killick.tool(effect="transaction")
    def enters(who: str, link: str = link.inject(), tx: killick.Tx = killick.TX) -> int:
        tx.execute("INSERT INTO paid VALUES (?, 1, '')", (who,))
        return 1

    @killick.agent
    async def entering(run: killick.Run) -> int:
        return await run.call(enters, "ann") + await run.call(enters, "bob")

    async def whole() -> None:
        await kd.as_async().start(entering, id="a")
        advanced = await kd.as_async().advance("a")
        assert (left, advanced.left, advanced.status) == ([True], True, "running")

    asyncio.run(whole())
    assert rows(path) == [("ann", 1)]
    assert _ended_by_another(path, entering) == 2
    assert rows(path) == [("ann", 1), ("bob", 1)]
    assert outcomes(kd, "a") == [("1", "returned"), ("2", "returned")]


def test_a_transaction_that_waits_for_its_turn_when_its_run_is_to_leave_is_made_once(
    kd: killick.Client, path: Path
) -> None:
    in_tool, told = threading.Event(), threading.Event()

    @killick.tool(effect="transaction")
    def enters(who: str, tx: killick.Tx = killick.TX) -> int:
        in_tool.set()
        assert told.wait(300)
        tx.execute("INSERT INTO paid VALUES (?, 1, '')", (who,))
        return 1

    @killick.agent
    async def entering(run: killick.Run) -> list[int]:
        return list(await run.gather(*(run.call(enters, who) for who in ("ann", "bob", "cid"))))

    async def whole() -> None:
        await kd.as_async().start(entering, id="a")
        advancing = asyncio.ensure_future(kd.as_async().advance("a"))
        assert await asyncio.to_thread(in_tool.wait, 300)
        assert kd.runtime.executor().leave("a")
        told.set()
        assert (await asyncio.wait_for(advancing, 300)).left

    asyncio.run(whole())
    assert _ended_by_another(path, entering) == [1, 1, 1]
    assert sorted(rows(path)) == [("ann", 1), ("bob", 1), ("cid", 1)]
    assert [outcome for _, outcome in outcomes(kd, "a")] == ["returned"] * 3
    assert kd.store.verify().holds


@pytest.mark.slow
def test_a_transaction_that_waits_for_its_turn_when_its_loop_ends_is_made_another_time(
    kd: killick.Client, path: Path
) -> None:
    in_tool, told = threading.Event(), threading.Event()

    @killick.tool(effect="transaction")
    def enters(who: str, tx: killick.Tx = killick.TX) -> int:
        in_tool.set()
        assert told.wait(10)  # it comes when the loop is gone, or not at all
        tx.execute("INSERT INTO paid VALUES (?, 1, '')", (who,))
        return 1

    @killick.agent
    async def entering(run: killick.Run) -> list[int]:
        return list(await run.gather(*(run.call(enters, who) for who in ("ann", "bob", "cid"))))

    async def whole() -> None:
        running = asyncio.ensure_future(kd.as_async().run(entering, id="a"))
        assert await asyncio.to_thread(in_tool.wait, 300)
        # As a loop does that ends: all are cancelled at once, and who drives the run may well be the last to hear it.
        for task in sorted(asyncio.all_tasks() - {asyncio.current_task()}, key=lambda task: task is running):
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(whole())
    told.set()
    kd.close()
    assert _ended_by_another(path, entering) == [1, 1, 1]
    assert sorted(rows(path)) == [("ann", 1), ("bob", 1), ("cid", 1)]


def test_a_store_that_has_no_transactions_says_so() -> None:
    with killick.Client(MemoryStore()) as kd, pytest.raises(StoreError, match="cannot join a transaction"):
        kd.run(payer, "ann")


def test_an_attempt_that_a_dead_process_left_open_is_made_again_without_asking_anybody(path: Path) -> None:
    made: list[int] = []

    @killick.tool(effect="transaction", retry=SLOWLY)
    def once(tx: killick.Tx = killick.TX, step: killick.ToolStep = killick.STEP) -> int:
        tx.execute("INSERT INTO paid VALUES ('ann', ?, '')", (step.attempt,))
        made.append(step.attempt)
        return step.attempt

    @killick.agent
    async def dying(run: killick.Run) -> int:
        return await run.call(once)

    class Dying(SqliteStore):
        def transaction(self) -> Any:
            raise StoreUnavailable(self.place, "its process is dead")

    dead = killick.Client(Dying(path))
    with pytest.raises(StoreUnavailable):
        dead.run(dying, id="a")
    dead.close()
    with killick.open(str(path)) as kd:
        assert kd.run(dying, id="a") == 2
        assert (made, rows(path)) == ([2], [("ann", 2)])
        [effect] = kd.runtime.log.ledger("a").effects
        assert (effect.attempts, effect.status) == (2, "happened")


# declaring and rehearsing -------------------------------------------------------------------------


def test_declarations_that_cannot_work_are_refused_with_a_line() -> None:
    with pytest.raises(DeclarationRefused, match="needs a plain def tool"):

        @killick.tool(effect="transaction")
        async def one(tx: killick.Tx = killick.TX) -> None: ...

    with pytest.raises(DeclarationRefused, match=r"needs a parameter `tx: killick\.Tx"):

        @killick.tool(effect="transaction")
        def two(who: str) -> None: ...

    with pytest.raises(DeclarationRefused, match="give effect='transaction'"):

        @killick.tool
        def three(tx: killick.Tx = killick.TX) -> None: ...

    with pytest.raises(DeclarationRefused, match="cannot span processes"):

        @killick.tool(effect="transaction", isolate="process")
        def four(tx: killick.Tx = killick.TX) -> None: ...


def test_an_effect_that_is_a_function_says_transaction_for_those_that_take_one(kd: killick.Client, path: Path) -> None:
    @killick.tool(effect=lambda who: "transaction" if who == "ann" else "reads")
    def chosen(who: str, tx: killick.Tx = killick.TX) -> str:
        tx.execute("INSERT INTO paid VALUES (?, 1, '')", (who,))
        return who

    @killick.agent
    async def choosing(run: killick.Run, who: str) -> str:
        return await run.call(chosen, who)

    assert kd.run(choosing, "ann") == "ann"
    with pytest.raises(killick.RunFailed, match="give effect='transaction'"):
        kd.run(choosing, "bob")


def test_a_compensation_may_be_a_transaction(kd: killick.Client, path: Path) -> None:
    @killick.tool(effect="transaction")
    def take_back(effect: killick.Effect, tx: killick.Tx = killick.TX) -> None:
        tx.execute("DELETE FROM paid WHERE who = ?", (effect.arguments["who"],))

    @killick.tool(effect="transaction", compensate=take_back)
    def lend(who: str, tx: killick.Tx = killick.TX) -> None:
        tx.execute("INSERT INTO paid VALUES (?, 1, '')", (who,))

    @killick.agent(on_failure="compensate")
    async def lender(run: killick.Run) -> None:
        await run.call(lend, "ann")
        raise ZeroDivisionError

    with pytest.raises(killick.RunFailed) as failed:
        kd.run(lender, id="a")
    assert (failed.value.not_undone, rows(path)) == ((), [])


def test_check_rehearses_it_without_a_transaction_and_finds_nothing() -> None:
    report = check(payer, input="ann")
    assert not report.findings, str(report)
    assert report.left_alone == "completed"


def test_a_fake_is_given_no_transaction() -> None:
    with pytest.raises(FakeRefused, match="takes 'tx'"):
        check(payer, input="ann", fakes={pay: lambda who, tx: 1})


def test_what_a_dead_process_left_open_is_neither_undone_nor_listed_when_the_run_is_cancelled(path: Path) -> None:
    undone: list[str] = []

    @killick.tool(effect="transaction", compensate=lambda effect: undone.append(effect.key))
    def lend(tx: killick.Tx = killick.TX) -> None:
        tx.execute("INSERT INTO paid VALUES ('ann', 1, '')")

    @killick.agent
    async def lender(run: killick.Run) -> None:
        await run.call(lend)

    class Dying(SqliteStore):
        def transaction(self) -> Any:
            raise StoreUnavailable(self.place, "its process is dead")

    with killick.Client(Dying(path)) as dead, pytest.raises(StoreUnavailable):
        dead.run(lender, id="a")
    with killick.open(str(path)) as kd:
        kd.cancel("a", compensate=True)
        with pytest.raises(killick.errors.RunCancelled) as cancelled:
            kd.run(lender, id="a")
        assert (undone, cancelled.value.not_undone, rows(path)) == ([], (), [])
        assert kd.runtime.log.ledger("a").in_doubt() == []
