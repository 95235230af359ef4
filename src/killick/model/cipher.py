"""Encrypts stored values with AES-256-GCM under one data key, and keys their digests. Pure functions of bytes.

sealed = version (1) ‖ key (22) ‖ nonce (12) ‖ ciphertext and tag

The key names the data key; it is no secret. The associated data is that name and the place: of an event's data the run
and the seq, of a message everything that is acted upon, of a chunk its codec. The nonce is a keyed hash of the place
and the plain text, so equal chunks of a run tree stay equal and are stored once. An event's data is salted, so that no
two are equal. Hashes are of the sealed bytes: the chain and every value can be verified without a key.

The body of an event ends in its MAC, before the hash of its data. It covers the run, the seq, the chain hash before and
the body. So only a process with the keys can append to a log, and only what it appended there is read. MACs are under
the store's key, so that they prove the log of an erased subject, too.
"""

from __future__ import annotations

import hmac
from binascii import a2b_base64, b2a_base64
from hashlib import blake2b
from hmac import compare_digest
from typing import Any, Final, NamedTuple

import msgspec

from killick.model.codec import DigestKey

KEY_BYTES: Final = 22
SUFFIX: Final = ".aes"
"""Marks the codec of an encrypted chunk."""

OBJECT: Final = b"object"
SCAN: Final = b"scan"
"""The places of a file in a vault, and of the cache of a folder's scan. Each names what it is by a keyed hash."""

_VERSION: Final = b"\x02"
_NONCE_AT: Final = 1 + KEY_BYTES
_TEXT_AT: Final = _NONCE_AT + 12
_OPEN: Final = b'{"$encrypted":"'
_MAC: Final = b',"mac":"'
_MAC_CHARS: Final = 22
_DATA: Final = b',"data":"'
_DATA_CHARS: Final = len(_DATA) + 43 + len(b'"}')
_URL_SAFE: Final = bytes.maketrans(b"+/", b"-_")


class Place(NamedTuple):
    """The place of an event: what it appends there is sealed for it alone."""

    run: str
    seq: int
    hash: bytes
    """The chain hash before it."""

    @property
    def data(self) -> bytes:
        """The place of its data."""
        return data_place(self.run, self.seq)


def data_place(run: str, seq: int) -> bytes:
    """Returns the place of an event's data."""
    return b"data %d %b" % (seq, run.encode())


def message_place(root: str, id: str, name: str, by: str | None, at_us: int) -> bytes:  # noqa: A002
    """Returns the place of a message's body: the first run in the chain of renewals, its id, name, sender and time."""
    return msgspec.json.encode(("message", root, id, name, by, at_us))


class Cipher:
    """One data key, ready for use. `key` is its name."""

    __slots__ = ("_aead", "_head", "_macs", "_nonces", "_wrong", "digest_key")

    def __init__(self, key: bytes, secret: bytes, store_wide: bytes | None = None) -> None:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._head, self._wrong = _VERSION + key, InvalidTag
        self._aead: Any = AESGCM(derived(secret, b"values"))
        self._nonces = derived(secret, b"nonces")
        self.digest_key = DigestKey.of(derived(secret, b"digests"), store_wide)
        """Keys the digests of arguments that stay in the log."""
        self._macs = derived(self.digest_key if store_wide is None else store_wide, b"macs")

    def encrypt(self, body: bytes, place: bytes) -> bytes:
        """Returns the sealed bytes."""
        # The nonce covers the place: one nonce for two places would give away the key of the tags.
        nonce = blake2b(b"%d %b%b" % (len(place), place, body), digest_size=12, key=self._nonces).digest()
        sealed: bytes = self._aead.encrypt(nonce, body, self._head + place)
        return self._head + nonce + sealed

    def decrypt(self, sealed: bytes, place: bytes) -> bytes | None:
        """Returns the plain bytes; None if they were changed, moved, or sealed by another key."""
        try:
            body: bytes = self._aead.decrypt(sealed[_NONCE_AT:_TEXT_AT], sealed[_TEXT_AT:], self._head + place)
            return body
        except self._wrong:
            return None

    def encrypt_json(self, raw: bytes, place: bytes) -> bytes:
        """Returns a JSON document as an encrypted one, which is JSON too."""
        return b'%b%b"}' % (_OPEN, b2a_base64(self.encrypt(raw, place), newline=False))

    def mac(self, text: bytes) -> bytes:
        """Returns the MAC of a text that is stored in clear."""
        mac = blake2b(text, digest_size=16, key=self._macs).digest()
        return b2a_base64(mac, newline=False)[:_MAC_CHARS].translate(_URL_SAFE)

    def sealed(self, place: Place, body: bytes) -> bytes:
        """Returns the body of an event with its MAC."""
        end = _mac_end(body)
        return b'%b%b%b"%b' % (body[:end], _MAC, self.mac(_macced(place, body)), body[end:])

    def proves(self, place: Place, body: bytes) -> bool:
        """Returns whether the body of an event has the MAC of its place."""
        end = _mac_end(body)
        at = end - len(_MAC) - _MAC_CHARS - 1
        said = body[at + len(_MAC) : end - 1]
        return body[at : at + len(_MAC)] == _MAC and compare_digest(
            said, self.mac(_macced(place, body[:at] + body[end:]))
        )


def _mac_end(body: bytes) -> int:
    """Returns where the MAC of a body ends: before the hash of its data, or its brace."""
    return len(body) - (_DATA_CHARS if body[-_DATA_CHARS:].startswith(_DATA) else 1)


def _macced(place: Place, body: bytes) -> bytes:
    return b"%b%d %b\0%b" % (place.hash, place.seq, place.run.encode(), body)


def derived(secret: bytes, purpose: bytes) -> bytes:
    """Derives a separate key for a purpose."""
    return hmac.digest(secret, b"killick " + purpose, "sha256")


def is_encrypted(raw: bytes) -> bool:
    """Returns whether a JSON document is an encrypted one."""
    return raw.startswith(_OPEN)


def sealed_in(raw: bytes) -> bytes:
    """Returns the sealed bytes in an encrypted JSON document. ValueError if it is damaged."""
    return a2b_base64(raw[len(_OPEN) : -2], strict_mode=True)


def key_in(sealed: bytes) -> bytes:
    """Returns the name of the data key of sealed bytes. ValueError if they are damaged."""
    if sealed[:1] != _VERSION or len(sealed) < _TEXT_AT:
        raise ValueError("not sealed by this version of Killick")
    return sealed[1:_NONCE_AT]
