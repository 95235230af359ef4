"""A delivery trusts no slot that was changed or lost: it is refused until the slots are built again from the log."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import killick
from killick.errors import AnswerRefused, StoreBroken
from killick.log.index_scrub import IndexScrub


@killick.agent(name="slots.asker")
async def asker(run: killick.Run) -> str:
    return (await run.ask("pay?")).kind


@killick.agent(name="slots.life")
async def life(run: killick.Run, number: int) -> str:
    if number < 2:
        await run.renew(number + 1)
    return await run.wait("go")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with killick.open(str(tmp_path / "killick.db")) as kd:
        for run in ("asks", "done"):
            kd.start(asker, id=run)
            kd.advance(run)
        kd.answer("done", "approve", by="ann")
        kd.advance("done")
        kd.start(life, 1, id="old")
        kd.advance("old")
    return tmp_path / "killick.db"


@pytest.fixture
def kd(path: Path) -> Iterator[killick.Client]:
    with killick.open(str(path)) as client:
        yield client


def changed(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        assert db.execute(statement).rowcount == 1


def delivered(kd: killick.Client, run: str) -> None:
    if run == "asks":
        kd.answer("asks", "approve", by="ann")
    else:
        kd.send(run, "go", "GO", id="g1")


DAMAGE = {
    "another token": ("asks", "UPDATE slots SET token = '3' WHERE name LIKE 'wait:%'"),
    "no places": ("asks", "UPDATE slots SET places = 0 WHERE name LIKE 'wait:%'"),
    "a lost question": ("asks", "DELETE FROM slots WHERE name LIKE 'wait:%'"),
    "a renamed renewal": ("old", "UPDATE slots SET name = 'renewet' WHERE name = 'renewed'"),
    "a lost renewal": ("old", "DELETE FROM slots WHERE name = 'renewed'"),
    "a lost end": ("done", "DELETE FROM slots WHERE name = 'ended'"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_delivery_to_a_run_with_a_damaged_slot_is_refused_until_verification_built_it_again(
    path: Path, kd: killick.Client, damage: str
) -> None:
    run, statement = DAMAGE[damage]
    changed(path, statement)
    before = kd.runtime.store.messages(run)
    with pytest.raises(StoreBroken, match="killick store verify"):
        delivered(kd, run)
    assert kd.runtime.store.messages(run) == before
    found = kd.store.verify()
    assert not found.holds  # a delivery may have trusted it
    assert {each.where for each in found.problems} == {"slots"}
    assert kd.runtime.store.quarantined(run) is None
    assert kd.store.verify().problems == []
    if run == "done":
        with pytest.raises(AnswerRefused):
            delivered(kd, run)
        return
    delivered(kd, run)
    kd.advance_due()
    assert {"asks": kd.info("asks").status, "old": kd.info("old+2").status}[run] == "completed"


def test_the_slots_of_an_open_run_are_built_again_by_the_scrub(path: Path, kd: killick.Client) -> None:
    changed(path, DAMAGE["a lost question"][1])
    assert IndexScrub(kd.runtime.log).scrub() == ["asks"]
    delivered(kd, "asks")
    assert kd.store.verify().problems == []


@killick.agent(name="slots.both")
async def both(run: killick.Run) -> str:
    first, second = await run.gather(run.ask("one?"), run.ask("two?"))
    return f"{first.kind} {second.kind}"


def test_what_is_written_after_the_damage_does_not_hide_it(path: Path, kd: killick.Client) -> None:
    kd.start(both, id="both")
    kd.advance("both")
    one, two = (wait.id for wait in kd.inbox() if wait.run == "both")
    kd.answer(one, "approve", by="ann")
    with closing(sqlite3.connect(path)) as db:
        [name] = db.execute("SELECT max(name) FROM slots JOIN heads USING (number) WHERE run = 'both'").fetchone()
    changed(path, f"DELETE FROM slots WHERE name = '{name}' AND number = (SELECT number FROM heads WHERE run = 'both')")
    kd.advance("both")
    with pytest.raises(StoreBroken):
        kd.answer(two, "approve", by="ann")
