"""Encrypts stored values with AES-256-GCM under one data key, and keys their digests. Pure functions of bytes.

sealed = version (1) ‖ key (22) ‖ nonce (12) ‖ ciphertext and tag

The key names the data key; it is no secret. The nonce is a keyed hash of the plain text, so equal chunks of a run tree
stay equal and are stored once. An event's data is salted, so that no two are equal. Hashes are of the sealed bytes: the
chain and every value can be verified without a key.
"""

from __future__ import annotations

import hmac
from binascii import a2b_base64, b2a_base64
from hashlib import blake2b
from typing import Any, Final

from killick.model.codec import DigestKey

KEY_BYTES: Final = 22
SUFFIX: Final = ".aes"
"""Marks the codec of an encrypted chunk."""

_VERSION: Final = b"\x01"
_NONCE_AT: Final = 1 + KEY_BYTES
_TEXT_AT: Final = _NONCE_AT + 12
_OPEN: Final = b'{"$encrypted":"'
_DATA: Final = b"data"


class Cipher:
    """One data key, ready for use. `key` is its name."""

    __slots__ = ("_aead", "_head", "_nonces", "_wrong", "digest_key")

    def __init__(self, key: bytes, secret: bytes, store_wide: bytes | None = None) -> None:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._head, self._wrong = _VERSION + key, InvalidTag
        self._aead: Any = AESGCM(derived(secret, b"values"))
        self._nonces = derived(secret, b"nonces")
        self.digest_key = DigestKey.of(derived(secret, b"digests"), store_wide)
        """Keys the digests of arguments that stay in the log."""

    def encrypt(self, body: bytes, codec: bytes = _DATA) -> bytes:
        """Returns the sealed bytes."""
        nonce = blake2b(body, digest_size=12, key=self._nonces, person=codec).digest()
        sealed: bytes = self._aead.encrypt(nonce, body, codec)
        return self._head + nonce + sealed

    def decrypt(self, sealed: bytes, codec: bytes = _DATA) -> bytes | None:
        """Returns the plain bytes; None if they were changed, or sealed by another key."""
        try:
            body: bytes = self._aead.decrypt(sealed[_NONCE_AT:_TEXT_AT], sealed[_TEXT_AT:], codec)
            return body
        except self._wrong:
            return None

    def encrypt_json(self, raw: bytes) -> bytes:
        """Returns a JSON document as an encrypted one, which is JSON too."""
        return b'%b%b"}' % (_OPEN, b2a_base64(self.encrypt(raw), newline=False))


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
