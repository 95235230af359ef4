"""A decrypting store keeps the contract of the store below it."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

import killick
import servers
from encryption.rings import KEY, beside, live_and_erase
from killick.clock import Clock
from killick.store.memory import MemoryStore
from killick.store.protocol import Store, raw_store
from killick.store.sqlite.store import SqliteStore
from store_contract import StoreContract


@pytest.mark.slow
class TestDecryptingSqliteStore(StoreContract):
    def make(self, tmp_path: Path, clock: Clock) -> Store:
        self._keys = MemoryStore()
        return beside(SqliteStore(tmp_path / "killick.db", clock=clock), self._keys, clock)

    def reopen(self, store: Store, clock: Clock) -> Store:
        return beside(SqliteStore(raw_store(store).place, clock=clock), self._keys, clock)

    def connect(self, store: Store) -> sqlite3.Connection:
        return sqlite3.connect(store.place, isolation_level=None)


def test_a_person_is_encrypted_and_erased_on_sqlite(tmp_path: Path) -> None:
    live_and_erase(str(tmp_path / "killick.db"))


@killick.agent
async def renews(run: killick.Run, count: int) -> list[str]:
    said = await run.wait("order")
    if count:
        await run.renew(count - 1)
    return [said, await run.wait("order")]


def test_messages_that_a_renewal_and_a_fork_take_along_are_read(tmp_path: Path) -> None:
    with killick.open(str(tmp_path / "killick.db"), keys=KEY) as kd:
        kd.start(renews, 1, id="r")
        for number in range(4):
            kd.send("r", "order", f"order {number}", by="ann")
        kd.advance("r")
        assert kd.advance("r+2").result == ["order 1", "order 2"]
        kd.fork("r+2", at="1:before", id="forked")
        assert kd.advance("forked").result == ["order 1", "order 2"]
        assert kd.store.verify().problems == []


def test_the_token_of_a_question_is_a_mac_in_an_encrypted_store(tmp_path: Path) -> None:
    @killick.agent
    async def asks(run: killick.Run, n: int) -> str:
        return (await run.ask("Go?", to="ann")).kind

    tokens = list[str]()
    for keys in (None, KEY):
        with killick.open(str(tmp_path / f"{keys is None}.db"), keys=keys) as kd:
            kd.start(asks, 1, id="r")
            kd.advance("r")
            [slot] = kd.runtime.store.slots("r")
            tokens.append(slot.token)
            kd.answer("r", "approve", by="ann")
            assert kd.advance("r").result == "approve"
            assert kd.store.verify().problems == []
    assert tokens[0].isdigit()
    assert len(tokens[1]) == 43


@pytest.mark.slow
def test_a_person_is_encrypted_and_erased_on_postgresql() -> None:
    live_and_erase(servers.postgres_store())
