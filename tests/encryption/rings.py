"""A decrypting store for tests."""

from __future__ import annotations

from typing import Final, cast

from killick.clock import Clock
from killick.encryption.keyring import Keyring
from killick.encryption.master_key import LocalKey
from killick.encryption.store import DecryptingStore
from killick.store import Store

KEY: Final = bytes(range(32))


def beside(store: Store, keys: Store, clock: Clock) -> Store:
    """A store that decrypts by keys in another one, so that its own logs are only those of its test."""
    return cast("Store", DecryptingStore(store, Keyring(keys, [LocalKey(KEY)], clock)))
