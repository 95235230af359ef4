"""`tx=`: what a caller starts, sends and answers in a transaction of its own happens with its rows, or not at all."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import killick
from killick.errors import AlreadyAnswered, StoreError
from killick.store import SqliteStore


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store's file with a table of an application in it."""
    path = tmp_path / "killick.db"
    SqliteStore(path).close()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE paid (who TEXT NOT NULL, amount INTEGER NOT NULL)")
    return path


@pytest.fixture
def kd(path: Path) -> Iterator[killick.Client]:
    with killick.open(str(path)) as kd:
        yield kd


def rows(path: Path) -> list[Any]:
    connection = sqlite3.connect(path)
    try:
        return connection.execute("SELECT who, amount FROM paid").fetchall()
    finally:
        connection.close()


@killick.agent
async def asks(run: killick.Run, who: str) -> str:
    news: str = await run.wait("news", returns=str)
    answer = await run.ask(f"Pay {who}?")
    return f"{news} {answer.kind}"


@pytest.fixture
def own(path: Path) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.row_factory = lambda cursor, row: {column[0]: value for column, value in zip(cursor.description, row)}  # noqa: B905
    connection.text_factory = bytes
    yield connection
    connection.close()


def parked(kd: killick.Client, run: str) -> None:
    with pytest.raises(killick.RunWaiting):
        kd.run(asks, "ann", id=run)


def test_start_send_and_answer_happen_with_the_callers_own_rows(
    kd: killick.Client, path: Path, own: sqlite3.Connection
) -> None:
    own.execute("BEGIN IMMEDIATE")
    own.execute("INSERT INTO paid VALUES ('ann', 1)")
    handle = kd.start(asks, "ann", id="a", tx=own)
    kd.send("a", "news", "good", tx=own)
    assert (kd.runtime.store.head("a"), rows(path)) == (None, [])
    own.execute("COMMIT")
    assert (handle.info().status, rows(path)) == ("queued", [("ann", 1)])
    parked(kd, "a")
    own.execute("BEGIN IMMEDIATE")
    kd.answer("a", "approve", by="bob", tx=own)
    with pytest.raises(AlreadyAnswered, match="bob"):
        kd.answer("a", "reject", by="cyd", tx=own)
    own.execute("COMMIT")
    assert kd.run(asks, "ann", id="a") == "good approve"
    assert kd.store.verify().holds


def test_what_was_started_sent_and_answered_goes_with_a_rollback(kd: killick.Client, own: sqlite3.Connection) -> None:
    kd.start(asks, "ann", id="a")
    kd.send("a", "news", "good")
    parked(kd, "a")
    own.execute("BEGIN IMMEDIATE")
    kd.start(asks, "bob", id="b", tx=own)
    kd.send("a", "news", "more", tx=own)
    kd.answer("a", "approve", tx=own)
    own.execute("ROLLBACK")
    assert (kd.runtime.store.head("b"), [message.name for message in kd.runtime.store.inbox("a")]) == (None, [])
    kd.start(asks, "bob", id="b")
    kd.answer("a", "reject")
    assert kd.run(asks, "ann", id="a") == "good reject"
    assert kd.store.verify().holds


def test_a_tool_may_start_and_tell_others_in_its_own_transaction(kd: killick.Client, path: Path) -> None:
    kd.start(asks, "ann", id="other")

    @killick.tool(effect="transaction", retry=killick.Retry(attempts=3, first=0.001, max=0.001))
    def tells(tx: killick.Tx = killick.TX, step: killick.ToolStep = killick.STEP) -> None:
        kd.send("other", "news", "good", id=step.key, tx=tx)
        kd.start(asks, "bob", id="new", tx=tx.connection)
        if step.attempt == 1:
            raise killick.NotDone("not yet")

    @killick.agent
    async def telling(run: killick.Run) -> None:
        await run.call(tells)

    kd.run(telling)
    assert [message.name for message in kd.runtime.store.inbox("other")] == ["news"]
    assert kd.info("new").status == "queued"


def test_the_awaitable_forms_take_it_too(kd: killick.Client, path: Path) -> None:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)

    async def started() -> None:
        connection.execute("BEGIN IMMEDIATE")
        await kd.as_async().start(asks, "ann", id="a", tx=connection)
        await kd.as_async().send("a", "news", "good", tx=connection)
        connection.execute("COMMIT")

    asyncio.run(started())
    connection.close()
    assert [message.name for message in kd.runtime.store.inbox("a")] == ["news"]


def test_a_connection_that_cannot_be_joined_is_refused_with_a_line(
    kd: killick.Client, path: Path, tmp_path: Path, own: sqlite3.Connection
) -> None:
    kd.start(asks, "ann", id="a")
    elsewhere = sqlite3.connect(tmp_path / "other.db", isolation_level=None)
    elsewhere.execute("BEGIN")
    nowhere = sqlite3.connect(":memory:", isolation_level=None)
    nowhere.execute("BEGIN")
    for tx, told in (
        (elsewhere, "is a connection to .*other.db; open one to this file"),
        (nowhere, "is a connection to memory"),
        (own, "no transaction is open on tx=; execute BEGIN IMMEDIATE"),
        ("killick.db", "takes a sqlite3.Connection to this file, not a builtins.str"),
        (killick.TX, "no transaction is open here"),
    ):
        for act in (
            lambda: kd.start(asks, "bob", id="b", tx=tx),
            lambda: kd.send("a", "news", "good", tx=tx),
        ):
            with pytest.raises(killick.KillickError, match=told):
                act()
    assert (kd.runtime.store.head("b"), kd.runtime.store.inbox("a")) == (None, [])
    elsewhere.close()
    nowhere.close()


def test_a_thread_that_does_not_own_the_connection_is_told_so(kd: killick.Client, own: sqlite3.Connection) -> None:
    own.execute("BEGIN IMMEDIATE")
    with pytest.raises((StoreError, sqlite3.ProgrammingError), match="thread"):
        asyncio.run(kd.as_async().start(asks, "ann", tx=own))  # type: ignore[arg-type]
