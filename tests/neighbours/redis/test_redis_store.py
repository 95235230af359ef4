"""The Redis store keeps the contract, on a real Valkey server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from encryption.forging import FORGERIES, forge
from encryption.rings import live_and_erase
from killick.clock import Clock
from killick.store.protocol import Store
from killick.store.redis.store import RedisStore
from neighbours.redis import valkeys
from store_contract import StoreContract


class TestRedisStore(StoreContract):
    def make(self, tmp_path: Path, clock: Clock) -> Store:
        return RedisStore(valkeys.emptied(), clock=clock)

    def reopen(self, store: Store, clock: Clock) -> Store:
        return RedisStore(valkeys.server().url, clock=clock)


def test_a_person_is_encrypted_and_erased_on_redis() -> None:
    live_and_erase(valkeys.emptied())


@pytest.mark.parametrize("forgery", FORGERIES, ids=lambda each: each.__name__)
def test_a_writer_without_keys_forges_no_approval_on_redis(forgery: Callable[[Store], None]) -> None:
    forge(valkeys.emptied(), forgery)
