"""A store whose values are encrypted, as the layers above read it: in clear. Writers encrypt before they append.

Wraps any store. Data of a destroyed key is read as erased. `raw` has everything as it is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, cast

from msgspec.structs import replace

from killick.clock import Clock, SystemClock
from killick.encryption.keyring import Keyring
from killick.encryption.master_key import KeySources, described, master_keys
from killick.errors import KeyRefused, ValueBroken
from killick.log.checked import checked
from killick.model.chunks import Blob
from killick.model.cipher import SUFFIX, is_encrypted, sealed_in
from killick.model.hashing import data_hash
from killick.store.protocol import Store
from killick.store.records import ERASED_BODY, Delivered, Message, Opening, Row

STORE_LOG = "killick:key:" + "0" * 24
"""The log of the store's own key: a store that has it is encrypted."""

_READS: Final = ("read", "row", "opening", "displaced", "pieces", "inbox", "message", "messages", "deliver")
"""The operations that return values."""


def decrypting(store: Store, keys: KeySources = None, *, clock: Clock | None = None) -> Store:
    """Returns a store that decrypts with these master keys, or those that `KILLICK_KEYS` names; without keys, one that
    only compares what it reads. Raises KeyRefused, and closes the store, if keys and store do not fit."""
    try:
        masters, is_encrypting = master_keys(keys), store.head(STORE_LOG) is not None
        if not masters:
            if is_encrypting:
                raise KeyRefused(store.place, "its values are encrypted; give keys=, or set KILLICK_KEYS")
            return checked(store)
        if not is_encrypting and store.heads(limit=1) and store.head(STORE_LOG) is None:  # no process made its key
            raise KeyRefused(store.place, "has unencrypted runs, and none is converted; omit keys, or name a new store")
        ring = Keyring(store, masters, clock or SystemClock())
    except BaseException:
        store.close()
        raise
    return cast("Store", DecryptingStore(store, ring, described(keys)))


class DecryptingStore:
    """Reads values through a keyring. Everything else is the store's own."""

    is_checked = True

    def __init__(self, raw: Store, keys: Keyring, described: str | None = None) -> None:
        self.raw, self.keys = checked(raw), keys
        self.described = described
        """The master keys as another process can name them, if it can."""
        self.secret_key = keys.secret_key
        self.append = raw.append

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.raw, name)
        return partial(self._read, found) if name in _READS else found

    def close(self) -> None:
        self.keys.close()
        self.raw.close()

    # decryption -------------------------------------------------------------------------------

    def opened(self, data: bytes) -> bytes | None:
        """Returns an event's data, or a message's body, in clear; None if its key was destroyed."""
        if not is_encrypted(data):
            return data
        try:
            return self.keys.decrypted(sealed_in(data))
        except ValueError as error:
            raise ValueBroken(data_hash(data), str(error)) from None

    def opened_piece(self, piece: Blob) -> Blob:
        """Returns a chunk in clear; erased if its key was destroyed."""
        if piece.body is None or not piece.codec.endswith(SUFFIX):
            return piece
        codec = piece.codec.removesuffix(SUFFIX)
        try:
            return Blob(piece.hash, codec, self.keys.decrypted(piece.body, codec.encode()))
        except ValueError as error:
            raise ValueBroken(piece.hash, str(error)) from None

    def _read(self, read: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return self._in_clear(read(*args, **options))

    def _in_clear(self, found: Any) -> Any:
        match found:
            case Row():
                return found if found.data is None else Row(found.seq, found.body, self.opened(found.data), found.hash)
            case Blob():
                return self.opened_piece(found)
            case Message():
                return replace(found, body=self.opened(found.body) or ERASED_BODY)
            case Delivered():
                return Delivered(self._in_clear(found.message), found.fresh)
            case Opening():
                return replace(found, rows=self._in_clear(found.rows))
            case list():
                return [self._in_clear(each) for each in cast("list[object]", found)]
            case dict():
                return {digest: self._in_clear(piece) for digest, piece in cast("dict[bytes, Any]", found).items()}
            case _:
                return found
