"""Master keys: a file, a folder, an environment variable or a key service. They wrap data keys, and nothing else."""

from __future__ import annotations

import hmac
import os
from base64 import b64decode
from binascii import unhexlify
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

from killick.errors import KeyRefused
from killick.permissions import exposure, keep, read_secret

VARIABLE: Final = "KILLICK_KEYS"
"""Names the master keys of stores that are opened without `keys`: files or `env:NAME`, with commas between them."""

_MAGIC: Final = b"killick1"
_IN_FOLDER: Final = b"killick-folder:"
_ID_BYTES: Final = 8
_BYTES: Final = 32
_NEED: Final = "32 bytes as 64 hexadecimal digits or as base64; `killick store new-key FILE` makes one"


@runtime_checkable
class MasterKey(Protocol):
    """Wraps data keys: a key service, or 32 bytes of your own. `unwrap` raises for a key that another one wrapped, and
    returns None for a destroyed one."""

    def wrap(self, key: bytes) -> bytes: ...

    def unwrap(self, wrapped: bytes) -> bytes | None: ...


@runtime_checkable
class DestroysKeys(Protocol):
    """A master key that can make a wrapped key useless in every copy of the store. Returns whether it wrapped that key,
    also when it is called again."""

    def destroy(self, wrapped: bytes) -> bool: ...


KeySource = str | os.PathLike[str] | bytes | MasterKey
"""A file, a folder, `env:NAME`, 32 bytes, or an object with `wrap` and `unwrap`."""

KeySources = KeySource | Sequence[KeySource] | None


class LocalKey:
    """A master key in memory. It wraps with AES-256-GCM, and knows its own work by an id."""

    def __init__(self, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._key, self._aead = key, AESGCM(key)
        self._head = _MAGIC + sha256(b"killick master key\x00" + key).digest()[:_ID_BYTES]

    def wrap(self, key: bytes) -> bytes:
        # A data key is random, so its keyed hash is a nonce that never repeats.
        nonce = hmac.digest(self._key, key, "sha256")[:12]
        return self._head + nonce + self._aead.encrypt(nonce, key, self._head)

    def unwrap(self, wrapped: bytes) -> bytes:
        head, rest = wrapped[: len(self._head)], wrapped[len(self._head) :]
        if head != self._head:
            theirs = wrapped[len(_MAGIC) :][:_ID_BYTES].hex() if wrapped.startswith(_MAGIC) else "a key service"
            raise ValueError(f"they were wrapped by {theirs}, this is {self._head[len(_MAGIC) :].hex()}")
        return self._aead.decrypt(rest[:12], rest[12:], head)


class KeyFolder:
    """A folder outside the store with each data key in a file. The store has their names, and so do its backups."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        if reason := exposure(self._folder.stat()):
            raise KeyRefused(folder, reason)

    def wrap(self, key: bytes) -> bytes:
        name = sha256(b"killick data key\x00" + key).hexdigest()[:32]
        keep(self._folder / name, key.hex())
        self._sync(self._folder / name)
        return _IN_FOLDER + name.encode()

    def unwrap(self, wrapped: bytes) -> bytes | None:
        return unhexlify(read_secret(self._file(wrapped))) or None

    def destroy(self, wrapped: bytes) -> bool:
        if not wrapped.startswith(_IN_FOLDER):
            return False
        # An empty file says that the key was destroyed. A missing one may be in another folder.
        os.truncate(self._file(wrapped), 0)
        self._sync(self._file(wrapped))
        return True

    def _file(self, wrapped: bytes) -> Path:
        name = wrapped.removeprefix(_IN_FOLDER)
        if name == wrapped or len(unhexlify(name)) != 16:
            raise ValueError(f"they were not wrapped by {self._folder}")
        return self._folder / name.decode()

    def _sync(self, file: Path) -> None:
        from killick.workspace.vault.packs import sync_folder

        with file.open("rb") as written:
            os.fsync(written.fileno())
        sync_folder(self._folder)


def described(keys: KeySources) -> str | None:
    """Returns master keys as `KILLICK_KEYS` names them, for another process; None if it cannot."""
    named = [keys] if isinstance(keys, str | os.PathLike) else keys
    if named is None or isinstance(named, bytes | MasterKey):
        return None
    found = [os.fspath(each) for each in named if isinstance(each, str | os.PathLike)]
    return ",".join(found) if len(found) == len(named) else None


def master_keys(keys: KeySources) -> list[MasterKey]:
    """Returns the master keys that a caller gave, or `KILLICK_KEYS` names; none if neither did.

    The first wraps new data keys; all of them unwrap. Raises KeyRefused.
    """
    if keys is None:
        keys = [each for each in os.environ.get(VARIABLE, "").split(",") if each]
    if isinstance(keys, str | os.PathLike | bytes | MasterKey):
        keys = [keys]
    return [_master_key(each) for each in keys]


def _master_key(given: KeySource) -> MasterKey:
    if isinstance(given, bytes):
        if len(given) != _BYTES:
            raise KeyRefused("keys", f"a master key has {len(given)} bytes; it needs {_NEED}")
        return LocalKey(given)
    if isinstance(given, str | os.PathLike):
        if os.path.isdir(given):
            return KeyFolder(os.fspath(given))
        return LocalKey(_decoded(*_text(os.fspath(given))))
    return given


def _text(given: str) -> tuple[str, str]:
    """Returns the text of a key, with its place."""
    if given.startswith("env:"):
        name = given.removeprefix("env:")
        if not os.environ.get(name):
            raise KeyRefused("keys", f"the environment variable {name} is not set; set it to {_NEED}")
        return f"the environment variable {name}", os.environ[name]
    try:
        return given, read_secret(given).decode("ascii")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not text"
        raise KeyRefused(given, f"the master key cannot be read ({reason}); name a file with {_NEED}") from None


def _decoded(place: str, text: str) -> bytes:
    text = text.strip()
    try:
        key = unhexlify(text) if len(text) == 2 * _BYTES else b64decode(text, validate=True)
    except ValueError:
        key = b""
    if len(key) != _BYTES:
        raise KeyRefused(place, f"holds no master key; it needs {_NEED}")
    return key
