"""A lost or damaged index entry is found without a verification, and rebuilt from the log at once."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import killick
from killick.log import index_scrub
from killick.log.index_scrub import IndexScrub


@killick.agent(name="scrub.asker")
async def asker(run: killick.Run, number: int) -> int:
    await run.ask("ok?")
    return number


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with killick.open(str(tmp_path / "killick.db")) as kd:
        for number in range(5):
            with pytest.raises(killick.RunWaiting):
                kd.run(asker, number, id=f"r{number}")
            kd.answer(f"r{number}", "approve", by="mia")
    return tmp_path / "killick.db"


@pytest.fixture
def kd(path: Path) -> Iterator[killick.Client]:
    with killick.open(str(path)) as client:
        yield client


def changed(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        assert db.execute(statement).rowcount == 1


DAMAGE = {
    "a lost row": "DELETE FROM runs WHERE number = 3",
    "another agent": "UPDATE runs SET agent = 'scrub.askes' WHERE number = 3",
    "another time to wake": "UPDATE runs SET wake_at_us = wake_at_us + (1 << 50) WHERE number = 3",
    "another status": "UPDATE runs SET status = 'waitinG' WHERE number = 3",
    "a lost tag": "DELETE FROM tags WHERE number = 3 AND tag = 'killick:asks'",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_index_entry_is_rebuilt(path: Path, kd: killick.Client, damage: str) -> None:
    scrub = IndexScrub(kd.runtime.log)
    assert scrub.scrub() == []
    changed(path, DAMAGE[damage])
    assert scrub.scrub() == ["r2"]
    assert scrub.scrub() == []
    assert kd.store.verify().problems == []


def test_a_worker_finishes_a_run_whose_index_row_was_lost(path: Path) -> None:
    changed(path, "DELETE FROM runs WHERE number = 3")

    async def serve(kd: killick.AsyncClient) -> None:
        async with kd, kd.worker() as worker:
            await worker.idle.wait()

    asyncio.run(serve(killick.open_async(str(path))))
    with killick.open(str(path)) as kd:
        assert {row.id: row.status for row in kd.list()} == {f"r{number}": "completed" for number in range(5)}


def test_each_part_continues_where_the_last_one_ended(
    path: Path, kd: killick.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_scrub, "FOLDED_MAX", 2)
    scrub = IndexScrub(kd.runtime.log)
    changed(path, "DELETE FROM runs WHERE number = 5")
    assert [scrub.scrub() for _ in range(4)] == [[], [], ["r4"], []]


def test_a_damaged_log_is_quarantined_by_the_scrub(path: Path, kd: killick.Client) -> None:
    changed(path, "UPDATE events SET body = zeroblob(20) WHERE id = (4 << 32) + 2")
    assert IndexScrub(kd.runtime.log).scrub() == []
    assert kd.runtime.store.quarantined("r3") is not None
