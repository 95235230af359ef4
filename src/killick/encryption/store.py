"""A store whose values are encrypted, as the layers above read it: in clear. Writers encrypt before they append.

Wraps any store. Data of a destroyed key is read as erased. `raw` has everything as it is stored, compared with the
chain and with the MACs. What is not sealed for its place is refused, and its run is quarantined: an event, its data and
a message. Only the logs of keys are plain.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, cast

import msgspec
from msgspec.structs import replace

from killick.clock import Clock, SystemClock
from killick.encryption.keyring import Keyring
from killick.encryption.master_key import KeySources, described, master_keys
from killick.errors import KeyRefused, ValueBroken
from killick.log.checked import CheckedStore, broken, checked, quarantine
from killick.model.chunks import Blob
from killick.model.cipher import SUFFIX, data_place, is_encrypted, message_place, sealed_in
from killick.model.hashing import data_hash
from killick.store.protocol import Store
from killick.store.records import COMMAND, ERASED_BODY, Delivered, Delivery, Message, Opening, Row

STORE_LOG = "killick:key:" + "0" * 24
"""The log of the store's own key: a store that has it is encrypted."""

_READS: Final = ("read", "row", "opening", "pieces", "inbox", "message", "messages", "deliver")
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
        self.raw, self.keys = cast("Store", CheckedStore(raw, keys.proves)), keys
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

    def opened(self, run: str, seq: int, data: bytes) -> bytes | None:
        """Returns an event's data in clear; None if its key was destroyed."""
        return data if self.keys.keeps_plain(run) else self._opened(data, data_place(run, seq))

    def opened_message(self, message: Message | Delivery) -> bytes | None:
        """Returns a message's body in clear; None if its key was destroyed. An erased one, and a call for a permit, is
        in clear: nothing is read from it."""
        body = message.body
        if self.keys.keeps_plain(message.run) or body == ERASED_BODY or (message.name == COMMAND and _is_permit(body)):
            return body
        root = self.keys.root_of(message.run)
        return self._opened(body, message_place(root, message.id, message.name, message.by, message.at_us))

    def _opened(self, data: bytes, place: bytes) -> bytes | None:
        try:
            if not is_encrypted(data):
                raise ValueError("it is in clear, where a sealed one belongs")
            return self.keys.decrypted(sealed_in(data), place)
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
        return self._in_clear(args[0], read(*args, **options))

    def displaced(self, run: str) -> list[Row]:
        """Returns the rows that a repair set aside. Data that was not sealed is no data."""
        found: list[Row] = []
        for row in self.raw.displaced(run):
            try:
                found.append(self._in_clear(run, row))
            except ValueBroken:
                found.append(replace(row, data=None))
        return found

    def _in_clear(self, run: str, found: Any) -> Any:
        match found:
            case Row():
                return found if found.data is None else replace(found, data=self.opened(run, found.seq, found.data))
            case Blob():
                return self.opened_piece(found)
            case Message():
                return self._message(found)
            case Delivered():
                return Delivered(self._message(found.message), found.fresh)
            case Opening():
                return replace(found, rows=self._in_clear(run, found.rows))
            case list():
                return [self._in_clear(run, each) for each in cast("list[object]", found)]
            case dict():
                return {digest: self.opened_piece(piece) for digest, piece in cast("dict[bytes, Blob]", found).items()}
            case _:
                return found

    def _message(self, found: Message) -> Message:
        try:
            return replace(found, body=self.opened_message(found) or ERASED_BODY)
        except ValueBroken as error:
            reason = f"message {found.number} in its inbox was not sent with the key of its run ({error.reason})"
            quarantine(self.raw, found.run, reason)
            raise broken(found.run, reason) from None


def _is_permit(body: bytes) -> bool:
    """Returns whether a message only wakes a run that waits for a permit, whichever that is."""
    if is_encrypted(body):
        return False
    try:
        said = msgspec.json.decode(body, type=dict[str, str])
    except msgspec.DecodeError:
        return False
    return said == {"command": "permit", "tag": said.get("tag")}
