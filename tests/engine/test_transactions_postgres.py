"""Transactions of tools, and `tx=`, on PostgreSQL: where others write meanwhile, and a connection may be lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

import killick
import servers
from killick.errors import AlreadyAnswered, StoreError, StoreUnavailable
from killick.model import events as e

pytestmark = pytest.mark.slow

SLOWLY = killick.Retry(attempts=3, first=0.001, max=0.001)
Own = psycopg.Connection[tuple[Any, ...]]


@pytest.fixture
def url() -> str:
    return servers.postgres_store()


@pytest.fixture
def own() -> Iterator[Own]:
    """An application's connection, and its tables."""
    with psycopg.connect(servers.postgres(), autocommit=True) as connection:
        connection.execute("SET client_min_messages = warning")
        connection.execute("DROP TABLE IF EXISTS paid, visits, people CASCADE")
        connection.execute("CREATE TABLE paid (who TEXT NOT NULL, amount INTEGER NOT NULL)")
        connection.execute("CREATE TABLE people (name TEXT PRIMARY KEY)")
        connection.execute(
            "CREATE TABLE visits (who TEXT REFERENCES people (name) DEFERRABLE INITIALLY DEFERRED, amount INTEGER)"
        )
        yield connection


@pytest.fixture
def kd(url: str, own: Own) -> Iterator[killick.Client]:
    with killick.open(url) as kd:
        yield kd


def paid(own: Own) -> list[Any]:
    return own.execute("SELECT who, amount FROM paid ORDER BY who, amount").fetchall()


def outcomes(kd: killick.Client, run: str) -> list[str]:
    ended = [recorded.event for recorded in kd.events(run) if isinstance(recorded.event, e.AttemptEnded)]
    return [event.outcome for event in ended]


@killick.tool(effect="transaction", retry=SLOWLY)
def pay(who: str, amount: int, tx: killick.Tx = killick.TX) -> int:
    tx.execute("INSERT INTO paid VALUES (%s, %s)", (who, amount))
    return amount


@killick.tool
async def mail(who: str) -> str:
    await asyncio.sleep(0.001)
    return who


@killick.agent
async def payer(run: killick.Run, who: str) -> int:
    first = await run.call(pay, who, 1)
    others = await run.gather(run.call(pay, who, 2), run.call(mail, who), run.call(pay, who, 3))
    return first + others[0] + others[2]


def test_rows_and_outcomes_commit_together(kd: killick.Client, own: Own) -> None:
    assert kd.run(payer, "ann", id="a") == 6
    assert kd.run(payer, "ann", id="a") == 6
    assert paid(own) == [("ann", 1), ("ann", 2), ("ann", 3)]
    assert kd.store.verify().holds


def test_many_runs_at_once_each_have_theirs(kd: killick.Client, own: Own) -> None:
    async def all_of_them() -> list[int]:
        return await asyncio.gather(*(kd.as_async().run(payer, f"p{number}", id=f"r{number}") for number in range(8)))

    assert asyncio.run(all_of_them()) == [6] * 8
    assert len(paid(own)) == 24
    assert kd.store.verify().holds


def test_other_runs_go_on_while_a_transaction_is_open(kd: killick.Client, own: Own) -> None:
    go = threading.Event()

    @killick.tool(effect="transaction")
    def holds(tx: killick.Tx = killick.TX) -> str:
        tx.execute("INSERT INTO paid VALUES ('held', 0)")
        assert go.wait(300)
        return "held"

    @killick.agent
    async def holding(run: killick.Run) -> str:
        return await run.call(holds)

    async def both() -> str:
        held = asyncio.ensure_future(kd.as_async().run(holding, id="a"))
        assert await kd.as_async().run(payer, "ann", id="b") == 6
        go.set()
        return await held

    assert asyncio.run(both()) == "held"
    assert paid(own) == [("ann", 1), ("ann", 2), ("ann", 3), ("held", 0)]


@pytest.mark.parametrize("end", ["raises", "refused", "swallowed", "deferred"])
def test_what_a_tool_or_its_database_refuses_takes_everything_back(kd: killick.Client, own: Own, end: str) -> None:
    @killick.tool(effect="transaction")
    def fails(tx: killick.Tx = killick.TX) -> int:
        tx.execute("INSERT INTO paid VALUES ('ann', 1)")
        if end == "raises":
            raise ZeroDivisionError
        if end == "deferred":
            tx.execute("INSERT INTO visits VALUES ('nobody', 1)")
            return 1
        try:
            tx.execute("INSERT INTO paid VALUES (NULL, 1)")
        except psycopg.IntegrityError:
            if end == "refused":
                raise
        return 1

    @killick.agent
    async def failing(run: killick.Run) -> int:
        return await run.call(fails)

    with pytest.raises(killick.RunFailed):
        kd.run(failing, id="a")
    assert (paid(own), outcomes(kd, "a")) == ([], ["refused"])
    assert kd.store.verify().holds


def test_a_conflict_with_another_transaction_is_tried_again(kd: killick.Client, own: Own) -> None:
    own.execute("INSERT INTO paid VALUES ('ann', 0)")

    @killick.tool(effect="transaction", retry=SLOWLY)
    def adds(tx: killick.Tx = killick.TX, step: killick.ToolStep = killick.STEP) -> int:
        tx.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        found = tx.execute("SELECT amount FROM paid").fetchone()[0]
        if step.attempt == 1:
            own.execute("UPDATE paid SET amount = 10")
        tx.execute("UPDATE paid SET amount = %s", (found + 1,))
        return step.attempt

    @killick.agent
    async def adding(run: killick.Run) -> int:
        return await run.call(adds)

    assert kd.run(adding, id="a") == 2
    assert (paid(own), outcomes(kd, "a")) == ([("ann", 11)], ["refused", "returned"])


def test_a_connection_that_is_lost_within_a_tool_leaves_nothing_and_nobody_is_asked(
    kd: killick.Client, url: str, own: Own
) -> None:
    dies = [True]

    @killick.tool(effect="transaction", retry=SLOWLY)
    def cut_off(tx: killick.Tx = killick.TX) -> int:
        tx.execute("INSERT INTO paid VALUES ('ann', 1)")
        if dies.pop() if dies else False:
            own.execute("SELECT pg_terminate_backend(%s)", (tx.connection.info.backend_pid,))
            tx.execute("INSERT INTO paid VALUES ('ann', 2)")
        return 1

    @killick.agent
    async def cut(run: killick.Run) -> int:
        return await run.call(cut_off)

    assert kd.run(cut, id="a") == 1
    assert (paid(own), outcomes(kd, "a")) == ([("ann", 1)], ["refused", "returned"])


def test_a_connection_that_is_lost_before_the_commit_interrupts_the_run_which_goes_on_later(
    kd: killick.Client, own: Own
) -> None:
    dies = [True]

    @killick.tool(effect="transaction", retry=SLOWLY)
    def cut_off(tx: killick.Tx = killick.TX) -> int:
        tx.execute("INSERT INTO paid VALUES ('ann', 1)")
        if dies.pop() if dies else False:
            own.execute("SELECT pg_terminate_backend(%s)", (tx.connection.info.backend_pid,))
        return 1

    @killick.agent
    async def cut(run: killick.Run) -> int:
        return await run.call(cut_off)

    with pytest.raises(StoreUnavailable):
        kd.run(cut, id="a")
    assert paid(own) == []
    assert kd.run(cut, id="a") == 1
    assert paid(own) == [("ann", 1)]
    assert kd.store.verify().holds


def test_a_tool_that_ends_its_transaction_is_in_doubt_and_a_person_is_asked(kd: killick.Client, own: Own) -> None:
    @killick.tool(effect="transaction")
    def breaks_out(tx: killick.Tx = killick.TX) -> int:
        tx.execute("INSERT INTO paid VALUES ('ann', 1)")
        tx.execute("COMMIT")
        return 1

    @killick.agent
    async def breaking(run: killick.Run) -> int:
        return await run.call(breaks_out)

    with pytest.raises(killick.RunWaiting) as waiting:
        kd.run(breaking, id="a")
    assert "ended its transaction itself" in str(waiting.value.waits[0].prompt)
    kd.answer("a", "happened", value=1)
    assert kd.run(breaking, id="a") == 1
    assert paid(own) == [("ann", 1)]


# tx= ----------------------------------------------------------------------------------------------


@killick.agent
async def asks(run: killick.Run, who: str) -> str:
    news: str = await run.wait("news", returns=str)
    answer = await run.ask(f"Pay {who}?")
    return f"{news} {answer.kind}"


def parked(kd: killick.Client, run: str) -> None:
    with pytest.raises(killick.RunWaiting):
        kd.run(asks, "ann", id=run)


def test_start_send_and_answer_happen_with_the_callers_own_rows(kd: killick.Client, own: Own) -> None:
    with own.transaction():
        own.execute("INSERT INTO paid VALUES ('ann', 1)")
        handle = kd.start(asks, "ann", id="a", tx=own)
        kd.send("a", "news", "good", tx=own)
        assert kd.runtime.store.head("a") is None
    assert (handle.info().status, paid(own)) == ("queued", [("ann", 1)])
    parked(kd, "a")
    with own.transaction():
        kd.answer("a", "approve", by="bob", tx=own)
        with pytest.raises(AlreadyAnswered, match="bob"):
            kd.answer("a", "reject", by="cyd", tx=own)
    assert kd.run(asks, "ann", id="a") == "good approve"
    assert kd.store.verify().holds


def test_what_was_started_sent_and_answered_goes_with_a_rollback(kd: killick.Client, own: Own) -> None:
    kd.start(asks, "ann", id="a")
    kd.send("a", "news", "good")
    parked(kd, "a")
    with own.transaction(force_rollback=True):
        kd.start(asks, "bob", id="b", tx=own)
        kd.send("a", "news", "more", tx=own)
        kd.answer("a", "approve", tx=own)
    assert (kd.runtime.store.head("b"), kd.runtime.store.inbox("a")) == (None, [])
    kd.answer("a", "reject")
    assert kd.run(asks, "ann", id="a") == "good reject"


def test_a_connection_that_cannot_be_joined_is_refused_with_a_line(kd: killick.Client, own: Own) -> None:
    kd.start(asks, "ann", id="a")
    own.execute("DROP DATABASE IF EXISTS elsewhere")
    own.execute("CREATE DATABASE elsewhere")
    other = psycopg.connect(servers.postgres().removesuffix("/postgres") + "/elsewhere")
    other.execute("SELECT 1")
    for tx, told in ((other, "another database"), (own, "no transaction is open"), ("postgres", "not a str")):
        with pytest.raises(StoreError, match=told):
            kd.send("a", "news", "good", tx=tx)
    other.close()
    own.execute("DROP DATABASE elsewhere")
    assert kd.runtime.store.inbox("a") == []


def test_a_server_that_goes_down_within_a_tool_leaves_nothing_and_nobody_is_asked() -> None:
    with servers.own_server() as server, psycopg.connect(server.url, autocommit=True) as own:
        own.execute("CREATE TABLE paid (who text, amount int)")
        dies = [True]

        @killick.tool(effect="transaction", retry=SLOWLY)
        def cut_off(tx: killick.Tx = killick.TX) -> int:
            tx.execute("INSERT INTO paid VALUES ('ann', 1)")
            if dies.pop() if dies else False:
                server.restart(immediate=True)
                tx.execute("INSERT INTO paid VALUES ('ann', 2)")
            return 1

        @killick.agent
        async def cut(run: killick.Run) -> int:
            return await run.call(cut_off)

        with killick.open(server.url) as kd:
            assert kd.run(cut, id="a") == 1
            assert outcomes(kd, "a") == ["refused", "returned"]
        with psycopg.connect(server.url) as later:
            assert later.execute("SELECT who, amount FROM paid").fetchall() == [("ann", 1)]
