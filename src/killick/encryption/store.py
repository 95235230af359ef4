"""A store whose values are encrypted, as the layers above read it: in clear. Writers encrypt before they append.

Wraps any store. Data of a destroyed key is read as erased. `raw` has everything as it is stored.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

from msgspec.structs import replace

from killick.clock import Clock, SystemClock
from killick.encryption.keyring import Keyring
from killick.encryption.master_key import KeySources, described, master_keys
from killick.errors import KeyRefused, LogError, ValueBroken
from killick.model.chunks import Blob
from killick.model.cipher import SUFFIX, is_encrypted, sealed_in
from killick.model.hashing import data_hash
from killick.store.protocol import Store
from killick.store.records import ERASED_BODY, READ_LIMIT, Delivered, Delivery, Message, Opening, Row

STORE_LOG = "killick:key:" + "0" * 24
"""The log of the store's own key: a store that has it is encrypted."""


def decrypting(store: Store, keys: KeySources = None, *, clock: Clock | None = None) -> Store:
    """Returns a store that decrypts with these master keys, or those that `KILLICK_KEYS` names; without keys, the store
    itself. Raises KeyRefused, and closes the store, if keys and store do not fit."""
    try:
        masters, is_encrypting = master_keys(keys), store.head(STORE_LOG) is not None
        if not masters:
            if is_encrypting:
                raise KeyRefused(store.place, "its values are encrypted; give keys=, or set KILLICK_KEYS")
            return store
        if not is_encrypting and store.heads(limit=1) and store.head(STORE_LOG) is None:  # nobody made its key since
            raise KeyRefused(store.place, "has runs in clear; leave keys away, or name a new store: none is converted")
        ring = Keyring(store, masters, clock or SystemClock())
    except BaseException:
        store.close()
        raise
    return cast("Store", DecryptingStore(store, ring, described(keys)))


class DecryptingStore:
    """Reads values through a keyring. Everything else is the store's own."""

    def __init__(self, raw: Store, keys: Keyring, described: str | None = None) -> None:
        self.raw, self.keys = raw, keys
        self.described = described
        """The master keys as another process can name them, if it can."""
        self.secret_key = keys.secret_key
        self.append = raw.append

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)

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

    def _row(self, row: Row) -> Row:
        return row if row.data is None else Row(row.seq, row.body, self.opened(row.data), row.hash)

    def _message(self, message: Message) -> Message:
        return replace(message, body=self.opened(message.body) or ERASED_BODY)

    # reading ----------------------------------------------------------------------------------

    def read(self, run: str, *, after: int = 0, limit: int = READ_LIMIT, data: bool = True) -> list[Row]:
        return [self._row(row) for row in self.raw.read(run, after=after, limit=limit, data=data)]

    def row(self, run: str, seq: int) -> Row | None:
        row = self.raw.row(run, seq)
        return None if row is None else self._row(row)

    def opening(self, run: str, *, fold: int) -> Opening | None:
        found = self.raw.opening(run, fold=fold)
        return None if found is None else replace(found, rows=[self._row(row) for row in found.rows])

    def displaced(self, run: str) -> list[Row]:
        return [self._row(row) for row in self.raw.displaced(run)]

    def pieces(self, hashes: Collection[bytes]) -> Mapping[bytes, Blob]:
        return {digest: self.opened_piece(piece) for digest, piece in self.raw.pieces(hashes).items()}

    def inbox(self, run: str, *, name: str | None = None, after: int = 0, limit: int = READ_LIMIT) -> list[Message]:
        return [self._message(each) for each in self.raw.inbox(run, name=name, after=after, limit=limit)]

    def message(self, run: str, id: str) -> Message | None:  # noqa: A002
        found = self.raw.message(run, id)
        return None if found is None else self._message(found)

    def messages(self, run: str) -> list[Message]:
        return [self._message(each) for each in self.raw.messages(run)]

    def deliver(self, deliveries: Sequence[Delivery]) -> list[Delivered | LogError]:
        outcomes = self.raw.deliver(deliveries)
        return [
            each if isinstance(each, LogError) else Delivered(self._message(each.message), each.fresh)
            for each in outcomes
        ]
