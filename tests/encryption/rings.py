"""A decrypting store for tests, and a life of a person's data on any store."""

from __future__ import annotations

from typing import Final, cast

import killick
from killick.clock import Clock
from killick.encryption.keyring import Keyring
from killick.encryption.master_key import LocalKey
from killick.encryption.store import DecryptingStore
from killick.log.checked import unchecked
from killick.model.cipher import Place
from killick.store import Store
from killick.store.protocol import raw_store

KEY: Final = bytes(range(32))


class PlainLogs(Keyring):
    """The keys of a store to which a test appends rows and messages that no runtime sealed."""

    def keeps_plain(self, run: str) -> bool:
        return True

    def proves(self, place: Place, body: bytes) -> bool:
        return True


def beside(store: Store, keys: Store, clock: Clock) -> Store:
    """A store that decrypts by keys in another one, so that its own logs are only those of its test. It compares
    nothing with the chain, which the rows of a store's contract lack."""
    return unchecked(cast("Store", DecryptingStore(store, PlainLogs(keys, [LocalKey(KEY)], clock))))


@killick.tool(effect="idempotent")
async def find_person(name: str, letter: str) -> dict[str, str]:
    return {"found": name, "letter": letter}


@killick.agent
async def person_clerk(run: killick.Run, name: str) -> str:
    said = await run.wait("order")
    found = await run.call(find_person, name, said)
    return found["found"]


def live_and_erase(url: str) -> None:
    """A run of a person on a store, with a message and a long value; then the person is erased."""
    with killick.open(url, keys=KEY) as kd:
        kd.start(person_clerk, "Ada Lovelace", id="r", subject="user-17")
        kd.advance("r")
        kd.send("r", "order", "Dear Ada Lovelace, " * 1_000)
        assert kd.advance("r").result == "Ada Lovelace"
        raw = raw_store(kd.runtime.store)
        rows, messages = raw.read("r"), raw.messages("r")
        pieces = raw.pieces(raw.references("r").log)
        assert pieces
        stored = [row.data for row in rows] + [each.body for each in (*messages, *pieces.values())]
        assert all(b"Lovelace" not in (each or b"") for each in stored)
        assert kd.store.verify().problems == []
    with killick.open(url, keys=KEY) as kd:
        assert kd.state("r").result == "Ada Lovelace"
        assert kd.store.erase("user-17").runs == 1
        assert all(row.data is None for row in kd.runtime.log.rows("r"))
        assert {piece.body for piece in kd.runtime.store.pieces(list(pieces)).values()} == {None}
        assert kd.store.verify().problems == []
